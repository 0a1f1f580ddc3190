"""How many tokens a second come, over the last few seconds."""

import time
from collections import deque

WINDOW_S = 5.0


class Rate:
    """The mean rate of what was counted in the last WINDOW_S seconds."""

    def __init__(self) -> None:
        self._counts: deque[tuple[float, int]] = deque()
        self._total = 0

    def add(self, n: int) -> None:
        self._counts.append((time.monotonic(), n))
        self._total += n
        self._drop_old()

    def per_s(self) -> float:
        self._drop_old()
        return self._total / WINDOW_S

    def _drop_old(self) -> None:
        oldest_s = time.monotonic() - WINDOW_S
        while self._counts and self._counts[0][0] < oldest_s:
            self._total -= self._counts.popleft()[1]
