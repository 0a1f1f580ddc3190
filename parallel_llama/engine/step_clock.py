"""Where the time of steps goes: by the host's clock, or by a card's, where work is only queued."""

import time
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from typing import Protocol

import torch

from parallel_llama.engine.statistics import StepTimes


class Tick(Protocol):
    """A moment, which a card may only come to later."""

    def has_come(self) -> bool: ...

    def seconds_until(self, later: "Tick", /) -> float:
        """How long after it another one of its kind was, once both have come."""
        ...


class HostTick:
    """The moment at which it is made."""

    def __init__(self) -> None:
        self.s = time.perf_counter()

    def has_come(self) -> bool:
        return True

    def seconds_until(self, later: Tick) -> float:
        assert isinstance(later, HostTick)
        return later.s - self.s


class CardTick:
    """The moment at which this thread's card is through with what was queued before."""

    def __init__(self) -> None:
        self.event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self.event.record()

    def has_come(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def seconds_until(self, later: Tick) -> float:
        assert isinstance(later, CardTick)
        return float(self.event.elapsed_time(later.event)) / 1e3


def tick_of(device: torch.device) -> Callable[[], Tick]:
    """What makes the ticks of a device."""
    return CardTick if device.type == "cuda" else HostTick


class StepClock:
    """Adds the laps of steps to `times`, each under its name; a step's once its last tick has come.

    It waits for no card, so `times` may be a step or two behind.
    """

    def __init__(self, times: StepTimes, tick: Callable[[], Tick]) -> None:
        self._times, self._tick = times, tick
        self._laps: list[tuple[str, Tick]] = []
        self._ended: deque[list[tuple[str, Tick]]] = deque()

    def begin(self) -> None:
        """The beginning of a step; one that broke off is forgotten."""
        self._laps = [("", self._tick())]

    def lap(self, name: str) -> None:
        """The end of a part of the step, which began at the lap before."""
        self._laps.append((name, self._tick()))

    def end(self) -> None:
        self._ended.append(self._laps)
        while self._ended and self._ended[0][-1][1].has_come():
            laps = self._ended.popleft()
            for (_, before), (name, after) in pairwise(laps):
                seconds = getattr(self._times, name) + before.seconds_until(after)
                setattr(self._times, name, seconds)
