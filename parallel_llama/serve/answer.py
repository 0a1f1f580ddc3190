"""`Answer`: the frontend's handle of one request, which yields the outputs of the engine."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from parallel_llama.request import FinishReason, Request, TokenLogprob
from parallel_llama.serve.asgi import current_id
from parallel_llama.serve.wire import Output

MAX_UNREAD = 4096  # outputs; if more are unread, the client counts as stalled


class Stalled(Exception):
    """The client does not read the outputs."""


class Diverged(Exception):
    """A restarted engine generated other tokens than the engine before it."""


@dataclass
class _Emitted:
    """The outputs of a choice so far.

    `n_tokens_rerun` and `n_chars_rerun` count only what the current engine has generated.
    """

    tokens: list[int] = field(default_factory=list)
    n_chars: int = 0
    n_tokens_rerun: int = 0
    n_chars_rerun: int = 0
    end: FinishReason | None = None


class Answer:
    """A submitted request; iterate over `outputs`.

    After a restart of the engine, the request runs again from its prompt and generates the same
    tokens. The tokens that have been emitted are not emitted again.

    Iterating raises the error that ended the request, such as UsageError, NumericalError, NotReady,
    UnknownModel, Stalled or Diverged.
    """

    def __init__(
        self, key: int, request: Request, cancel: Callable[["Answer"], None], account: str = ""
    ) -> None:
        self.key, self.request, self.request_id = key, request, current_id.get()
        self.account = account
        self.is_abandoned = False
        self.n_engines = 1  # engines that the request was sent to
        self.prompt_logprobs: list[TokenLogprob] = []  # from the prompt's second token on
        # Times of the monotonic clock.
        self.submitted_s = time.monotonic()
        self.started_s: float | None = None
        self.first_token_s: float | None = None
        self.last_token_s: list[float | None] = [None] * request.params.n  # by choice
        # Seconds from the first token of a choice to its last one, summed over the choices.
        self.decode_s = 0.0
        self._n_scored_rerun = 0  # of `prompt_logprobs`, by the current engine
        self._cancel = cancel
        self._emitted = [_Emitted() for _ in range(request.params.n)]
        self._unread: list[Output] = []
        self._error: Exception | None = None
        self._has_news = asyncio.Event()

    @property
    def ends(self) -> list[FinishReason]:
        """Finish reasons of the choices that have ended."""
        return [emitted.end for emitted in self._emitted if emitted.end is not None]

    @property
    def n_tokens(self) -> int:
        """Number of tokens of all choices so far."""
        return sum(len(emitted.tokens) for emitted in self._emitted)

    @property
    def has_ended(self) -> bool:
        """Whether all choices have ended."""
        return all(emitted.end is not None for emitted in self._emitted)

    def abandon(self) -> None:
        """Cancels the request at the next step, if it has not ended."""
        if not self.has_ended and not self.is_abandoned and self._error is None:
            self.is_abandoned = True
            self._cancel(self)

    async def outputs(self) -> AsyncIterator[list[Output]]:
        """Yields lists of ready outputs; closing the iterator cancels the request."""
        try:
            while True:
                await self._has_news.wait()
                self._has_news.clear()
                unread, self._unread = self._unread, []
                if unread:
                    yield unread
                if self._error is not None:
                    raise self._error
                if self.has_ended and not self._unread:
                    return
        finally:
            self.abandon()

    async def whole(self) -> list[Output]:
        """Waits until the request has ended. Returns: all its outputs."""
        return [output async for outputs_of_step in self.outputs() for output in outputs_of_step]

    # Called by the engine client

    def start(self) -> None:
        """Records that a step has run tokens of the request."""
        self.started_s = self.started_s or time.monotonic()

    def put_prompt_logprobs(self, logprobs: Sequence[TokenLogprob]) -> None:
        """Adds the next log-probabilities of the prompt."""
        n_known = len(self.prompt_logprobs) - self._n_scored_rerun
        self._n_scored_rerun += len(logprobs)
        self.prompt_logprobs += logprobs[n_known:]

    def put(self, output: Output) -> Output | None:
        """Adds a step's output. Returns: the part that is new, if any."""
        new = self._new_part(output)
        if new is None:
            return None
        if new.tokens:
            now, before_s = time.monotonic(), self.last_token_s[new.choice]
            self.last_token_s[new.choice] = now
            self.first_token_s = self.first_token_s or now
            self.decode_s += 0.0 if before_s is None else now - before_s
        self._unread.append(new)
        self._has_news.set()
        if len(self._unread) > MAX_UNREAD:
            self.abandon()
            self.fail(Stalled(f"{MAX_UNREAD} outputs are unread; read the stream faster"))
        return new

    def fail(self, error: Exception) -> None:
        """Ends the request with an error, which `outputs` raises."""
        if self._error is None and not self.has_ended:
            self._error = error
            self._has_news.set()

    def restart(self) -> None:
        """Records that a restarted engine runs the request from its prompt."""
        self.n_engines += 1
        self._n_scored_rerun = 0
        for emitted in self._emitted:
            emitted.n_tokens_rerun = emitted.n_chars_rerun = 0

    def _new_part(self, output: Output) -> Output | None:
        """The part of an output that has not been emitted yet; None without a new part.

        Fails the request if a restarted engine generated other tokens.
        """
        emitted = self._emitted[output.choice]
        if emitted.end is not None:
            return None
        n_known = len(emitted.tokens) - emitted.n_tokens_rerun
        n_known_chars = emitted.n_chars - emitted.n_chars_rerun
        emitted.n_tokens_rerun += len(output.tokens)
        emitted.n_chars_rerun += len(output.text)
        first = len(emitted.tokens) - n_known
        known = emitted.tokens[first : first + len(output.tokens)]
        if has_diverged := list(output.tokens[:n_known]) != known:
            self.abandon()
            self.fail(Diverged("the engine was restarted and generated other tokens; try again"))
        # After the check: a request that has ended cannot fail.
        if output.completion is not None:
            emitted.end = output.completion.finish_reason
        if has_diverged:
            return None
        if not n_known and not n_known_chars:  # the engine was not restarted
            emitted.tokens += output.tokens
            emitted.n_chars = emitted.n_chars_rerun
            return output
        tokens, text = output.tokens[n_known:], output.text[n_known_chars:]
        emitted.tokens += tokens
        emitted.n_chars = max(emitted.n_chars, emitted.n_chars_rerun)
        if not tokens and not text and output.completion is None:
            return None
        logprobs = output.logprobs[n_known:]
        return Output(output.key, output.choice, tokens, text, logprobs, output.completion)
