"""The loop around the engine of rank 0: it takes requests, runs steps, and routes the outputs.

`LLM` drives an EngineLoop in place; `AsyncLLM` runs one on a thread; the server's engine process
runs one over a socket.
"""

import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from parallel_llama.engine.engine import Engine
from parallel_llama.engine.outputs import StepOutput
from parallel_llama.engine.ranks import Ranks
from parallel_llama.errors import NumericalError, UsageError
from parallel_llama.request import FinishReason, Request

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class StepResult(Generic[Key]):
    """The outputs of one step, each with the key of its request.

    Args:
        begun: the keys of requests that ran for the first time, or for the first time since the
            ranks changed.
        seconds: the duration of the step.
        refused: requests that ended because they no longer fit after the loss of a rank.
    """

    outputs: Sequence[tuple[Key, StepOutput]]
    begun: Sequence[Key]
    seconds: float
    refused: Sequence[tuple[Key, UsageError]] = ()


class Client(Protocol[Key]):
    """A client of `EngineLoop.run`."""

    def take_commands(self, wait: bool) -> bool:
        """Submit and cancel requests; with `wait`, block until there may be a command.

        Returns: False to end the loop.
        """

    def on_step(self, result: StepResult[Key]) -> None: ...

    def on_failed(self, keys: Sequence[Key], error: NumericalError) -> None:
        """A step has failed, which ends all requests `keys`; the loop continues."""


class EngineLoop(Generic[Key]):
    """Steps the engine of rank 0, and maps its tickets to the keys of one client.

    All ranks take part in each step.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._keys: dict[int, Key] = {}  # by ticket
        self._tickets: dict[Key, int] = {}

    @property
    def _engine(self) -> Engine:
        return self._ranks.engine  # a reference of its own would keep a closed model in memory

    def __contains__(self, key: Key) -> bool:
        return key in self._tickets

    def __len__(self) -> int:
        """The number of unfinished requests."""
        return len(self._tickets)

    def submit(self, key: Key, request: Request, timeout_s: float | None = None) -> None:
        """Raises: UsageError as `Engine.submit`."""
        ticket = self._engine.submit(request, timeout_s)
        self._keys[ticket], self._tickets[key] = key, ticket

    def cancel(self, key: Key, reason: FinishReason = "cancelled") -> None:
        """End a request at the next step; does nothing if the request has ended."""
        if key in self._tickets:
            self._engine.cancel(self._tickets[key], reason)

    def step(self) -> StepResult[Key]:
        """Run one step.

        Raises: as `Ranks.step`. The requests then stay in the loop until `drop_all`.
        """
        began_s = time.perf_counter()
        outputs = [(self._keys[output.ticket], output) for output in self._ranks.step()]
        begun = [self._keys[ticket] for ticket in self._engine.begun]
        refused, self._engine.refused = self._engine.refused, []
        ended = [output.ticket for _, output in outputs if output.is_last]
        errors = [(self._keys[ticket], error) for ticket, error in refused]
        for ticket in [*ended, *(ticket for ticket, _ in refused)]:
            del self._tickets[self._keys.pop(ticket)]
        return StepResult(outputs, begun, time.perf_counter() - began_s, errors)

    def drop_all(self) -> list[Key]:
        """Forget all requests, after a step that raised. Returns: their keys."""
        keys = list(self._tickets)
        self._keys.clear()
        self._tickets.clear()
        return keys

    def run(self, client: Client[Key]) -> None:
        """Serve a client until it ends the loop, then cancel its requests.

        Raises: as `step`, except NumericalError, which is reported to the client.
        """
        while client.take_commands(wait=self._engine.idle):
            if not self._engine.idle:
                self._step_for(client)
        for key in self._tickets:
            self.cancel(key)
        while not self._engine.idle:
            self._step_for(client)

    def _step_for(self, client: Client[Key]) -> None:
        try:
            result = self.step()
        except NumericalError as error:  # the engine has been reset
            client.on_failed(self.drop_all(), error)
        else:
            client.on_step(result)
