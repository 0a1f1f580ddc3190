"""One request as the front holds it: what came of it so far, and who waits for more."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from parallel_llama.request import FinishReason, Request, TokenLogprob
from parallel_llama.serve.asgi import current_id
from parallel_llama.serve.wire import Output

# Outputs that nobody has taken: whoever asked has stopped reading.
MAX_HELD = 4096


class Stalled(Exception):
    """Whoever asked does not take what comes."""


class Diverged(Exception):
    """An engine that was started again gave other tokens than the one before it."""


@dataclass
class _Told:
    """What of a choice has been told, and how much of it a new engine has repeated."""

    tokens: list[int] = field(default_factory=list)
    n_chars: int = 0
    n_tokens_again: int = 0
    n_chars_again: int = 0
    end: FinishReason | None = None


class Answer:
    """One request on its way: iterate over what comes, in lists of what is there.

    Where the engine is started again, the request runs once more from its prompt, which gives the
    same tokens, and those that were told are not told again.

    Iterating raises: UsageError, NumericalError, Stalled, Diverged, or what ended the engine.
    """

    def __init__(self, key: int, request: Request, cancel: Callable[["Answer"], None]) -> None:
        self.key, self.request, self.request_id = key, request, current_id.get()
        self.is_abandoned = False  # nobody waits for it any more
        self.n_engines = 1  # that have had it
        self.prompt_logprobs: list[TokenLogprob] = []  # of the second token and those after it
        # When things happened to it, on the monotonic clock.
        self.submitted_s = time.monotonic()
        self.begun_s: float | None = None
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self._cancel = cancel
        self._told = [_Told() for _ in range(request.params.n)]
        self._held: list[Output] = []
        self._error: Exception | None = None
        self._came = asyncio.Event()

    @property
    def ends(self) -> list[FinishReason]:
        """Why the choices ended that have."""
        return [told.end for told in self._told if told.end is not None]

    @property
    def n_tokens(self) -> int:
        """Tokens of all choices so far."""
        return sum(len(told.tokens) for told in self._told)

    @property
    def has_ended(self) -> bool:
        """Whether the engine has nothing more to say."""
        return all(told.end is not None for told in self._told)

    def abandon(self) -> None:
        """End it within a step, if it has not ended."""
        if not self.has_ended and not self.is_abandoned and self._error is None:
            self.is_abandoned = True
            self._cancel(self)

    async def outputs(self) -> AsyncIterator[list[Output]]:
        """All outputs, in lists of those that have come; leaving early cancels the request."""
        try:
            while True:
                await self._came.wait()
                self._came.clear()
                held, self._held = self._held, []
                if held:
                    yield held
                if self._error is not None:
                    raise self._error
                if self.has_ended and not self._held:
                    return
        finally:
            self.abandon()

    async def whole(self) -> list[Output]:
        """Every output of it, once all have come."""
        return [output async for some in self.outputs() for output in some]

    # For the engine's client

    def begin(self) -> None:
        """A step has had it for the first time."""
        self.begun_s = self.begun_s or time.monotonic()

    def put(self, output: Output) -> Output | None:
        """Take what a step gave; what of it is new."""
        new = self._unknown(output)
        if new is None:
            return None
        if new.tokens:
            self.last_token_s = time.monotonic()
            self.first_token_s = self.first_token_s or self.last_token_s
        self._held.append(new)
        self._came.set()
        if len(self._held) > MAX_HELD:
            self.abandon()
            self.fail(Stalled(f"{MAX_HELD} outputs were left unread"))
        return new

    def fail(self, error: Exception) -> None:
        """End it with an error, which whoever iterates over it meets."""
        if self._error is None and not self.has_ended:
            self._error = error
            self._came.set()

    def begin_again(self) -> None:
        """A new engine runs it from the prompt."""
        self.n_engines += 1
        self.prompt_logprobs.clear()  # which the new engine sends again
        for told in self._told:
            told.n_tokens_again = told.n_chars_again = 0

    def _unknown(self, output: Output) -> Output | None:
        """What of an output has not been told before."""
        told = self._told[output.choice]
        if told.end is not None:
            return None
        n_known = len(told.tokens) - told.n_tokens_again
        n_known_chars = told.n_chars - told.n_chars_again
        told.n_tokens_again += len(output.tokens)
        told.n_chars_again += len(output.text)
        if output.completion is not None:
            told.end = output.completion.finish_reason
        if not n_known and not n_known_chars:  # the usual case
            told.tokens += output.tokens
            told.n_chars = told.n_chars_again
            return output
        start = len(told.tokens) - n_known
        if list(output.tokens[:n_known]) != told.tokens[start : start + len(output.tokens)]:
            self.abandon()
            self.fail(Diverged("the engine was started again and drew other tokens"))
            return None
        tokens, text = output.tokens[n_known:], output.text[n_known_chars:]
        told.tokens += tokens
        told.n_chars = max(told.n_chars, told.n_chars_again)
        if not tokens and not text and output.completion is None:
            return None
        logprobs = output.logprobs[n_known:]
        return Output(output.key, output.choice, tokens, text, logprobs, output.completion)
