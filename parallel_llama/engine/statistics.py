"""Statistics of an engine: its load, and the time that the parts of its steps take."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol


@dataclass
class StepTimes:
    """The total time of each part of a step, over all steps so far, in seconds.

    On CUDA these are device times: concurrent work of the host counts as zero.
    """

    n_steps: int = 0
    messages_s: float = 0.0
    schedule_s: float = 0.0
    forward_s: float = 0.0
    sample_s: float = 0.0
    decide_s: float = 0.0


@dataclass(frozen=True)
class EngineStatistics:
    """The load of an engine between two steps. Units: choices, blocks, tokens."""

    n_running: int
    n_waiting: int
    n_blocks_used: int
    n_blocks_cached: int
    n_blocks_free: int
    n_prompt_tokens: int
    n_prefix_tokens: int
    n_preempted: int
    n_draft_tokens: int
    n_accepted_tokens: int
    times: StepTimes


class Tick(Protocol):
    """A moment in the work of a device, which the device may not have reached yet."""

    def is_reached(self) -> bool: ...

    def seconds_until(self, later: "Tick", /) -> float:
        """The time until another tick of the same kind, once both have been reached."""


class HostTick:
    """The moment at which it is created."""

    def __init__(self) -> None:
        self.s = time.perf_counter()

    def is_reached(self) -> bool:
        return True

    def seconds_until(self, later: Tick) -> float:
        assert isinstance(later, HostTick)
        return later.s - self.s


class StepClock:
    """Adds the laps of each step to `times`, once the device has reached the last tick of the step.

    It never waits for a device, so `times` may lack the last one or two steps.
    """

    def __init__(self, times: StepTimes, tick: Callable[[], Tick]) -> None:
        self._times, self._tick = times, tick
        self._laps: list[tuple[str, Tick]] = []
        self._ended: deque[list[tuple[str, Tick]]] = deque()

    def begin(self) -> None:
        """Start a step, and discard one that has not ended."""
        self._laps = [("", self._tick())]

    def lap(self, name: str) -> None:
        """End a part of the step, which began at the previous lap."""
        self._laps.append((name, self._tick()))

    def end(self) -> None:
        self._ended.append(self._laps)
        while self._ended and self._ended[0][-1][1].is_reached():
            laps = self._ended.popleft()
            for (_, before), (name, after) in pairwise(laps):
                seconds = getattr(self._times, name) + before.seconds_until(after)
                setattr(self._times, name, seconds)
