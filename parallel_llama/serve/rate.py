"""How many tokens a second come: now, and over the last minute."""

import time
from collections import deque

NOW_S = 5.0
MINUTE_S = 60.0
RESOLUTION_S = 0.05


class Rate:
    """Mean rates of what was counted in the last seconds, at most MINUTE_S of them."""

    def __init__(self) -> None:
        self._started_s = time.monotonic()
        self._counts: deque[tuple[float, int]] = deque()

    def add(self, n: int) -> None:
        now_s = time.monotonic()
        # Counts of the same moment are one entry, so that a minute of fast steps stays short.
        if self._counts and now_s - self._counts[-1][0] < RESOLUTION_S:
            begun_s, n_before = self._counts.pop()
            self._counts.append((begun_s, n_before + n))
        else:
            self._counts.append((now_s, n))
        while now_s - self._counts[0][0] > MINUTE_S:
            self._counts.popleft()

    def per_s(self, window_s: float = NOW_S) -> float:
        """The mean rate of the last `window_s` seconds, or since the start if that is later."""
        now_s = time.monotonic()
        total = 0
        for begun_s, n in reversed(self._counts):
            if now_s - begun_s > window_s:
                break
            total += n
        return total / min(window_s, max(now_s - self._started_s, NOW_S))
