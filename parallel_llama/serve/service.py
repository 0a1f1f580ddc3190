"""What the handlers of all routes share: a model's text side, and its engine."""

import copy
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from parallel_llama.engine.input_processor import InputProcessor
from parallel_llama.engine.prompts import Prompt
from parallel_llama.errors import UsageError
from parallel_llama.request import Request, SamplingParams
from parallel_llama.serve.answer import Answer
from parallel_llama.serve.engine_client import EngineClient
from parallel_llama.serve.fair_threads import LARGE_WORK, FairThreads
from parallel_llama.tokenizer import Chat

T = TypeVar("T")

WAIT_LIMIT_S = 10.0  # for a thread, until what a client sent is looked at
MAX_PROMPT_LOGPROBS = 1 << 18  # in one answer: about 25 MB of JSON
SMALL_PART_BYTES = 8 << 10  # written at once, in less than a millisecond
GRAMMAR_WORK = 1 << 20  # of one that is not compiled yet, in bytes of text that take as long


class UnknownModel(Exception):
    """A client asked for a model that is not the one served here."""


class Service:
    """One model under one or more names, the first of which it gives as its own."""

    def __init__(self, names: Sequence[str], inputs: InputProcessor, engine: EngineClient) -> None:
        self.names, self.inputs, self.engine = names, inputs, engine
        self.created = int(time.time())
        # Templates, tokenizers and grammars work here, so that no other client waits for them.
        self._threads = FairThreads()
        self._client, self._size = "", 0

    def asked_by(self, client: str, size: int) -> "Service":
        """This service to one request: whose it is, and the bytes of its body."""
        own = copy.copy(self)
        own._client, own._size = client, size
        return own

    def require_model(self, name: str | None) -> None:
        """Raises: UnknownModel."""
        if name is not None and name not in self.names:
            raise UnknownModel(f"the model {name!r:.200} is not here; use {self.names[0]!r}")

    async def in_thread(
        self, work: Callable[[], T], n_choices: int = 1, *, extra: int = 0, renders: bool = False
    ) -> T:
        """Run work on a request's input that would keep the event loop from other clients.

        It counts as so many choices of those that are taken in at once. `extra` is work beyond that
        of reading the body once, in bytes; `renders` says that it renders a chat template.

        Raises: Busy if too many choices are here, or no thread is free in WAIT_LIMIT_S.
        """
        with self.engine.preparing(n_choices, is_large=self._size > LARGE_WORK):
            try:
                size = self._size + extra
                return await self._threads.run(
                    work, size, self._client, WAIT_LIMIT_S, renders=renders
                )
            except TimeoutError as error:
                raise self._no_thread() from error

    async def room_for_large(self) -> None:
        """Wait until more of a large body may be read.

        Raises: Busy if there is no room in WAIT_LIMIT_S.
        """
        try:
            await self._threads.room_for_large(WAIT_LIMIT_S)
        except TimeoutError as error:
            raise self._no_thread() from error

    def _no_thread(self) -> Exception:
        return self.engine.busy(f"no thread was free for this request within {WAIT_LIMIT_S:g} s")

    async def written(self, work: Callable[[], T], n_bytes: int) -> T:
        """Write a part of an answer of about so many bytes, in a thread where that takes long."""
        if n_bytes <= SMALL_PART_BYTES:
            return work()
        return await self._threads.run(work, n_bytes, self._client)

    async def submit(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[Answer]:
        """Hand in prompts, all or none of them.

        Raises: UsageError, NotReady, Busy.
        """
        self.engine.require_room(len(prompts) * params.n, is_large=self._size > LARGE_WORK)
        requests = await self.in_thread(
            lambda: self._requests(prompts, params),
            len(prompts) * params.n,
            extra=self._grammar_work(params),
            renders=any(isinstance(prompt, Chat) for prompt in prompts),
        )
        answers: list[Answer] = []
        try:
            for request in requests:
                answers.append(self.engine.submit(request))
        except BaseException:
            for answer in answers:
                answer.abandon()
            raise
        return answers

    def _grammar_work(self, params: SamplingParams) -> int:
        if params.grammar is None or not self.inputs.has_tokenizer:
            return 0
        return 0 if self.inputs.grammars.is_compiled(params.grammar) else GRAMMAR_WORK

    def _requests(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[Request]:
        requests = []
        for index, prompt in enumerate(prompts):
            try:
                requests.append(self.inputs.request(index, prompt, params))
            except UsageError as error:
                if len(prompts) == 1:
                    raise
                raise type(error)(f"prompt {index}: {error}") from error
        _check_scores(requests, params)
        return requests


def _check_scores(requests: Sequence[Request], params: SamplingParams) -> None:
    """Raises: UsageError where the prompts' log-probabilities make an answer too large."""
    if params.prompt_logprobs is None:
        return
    n_tokens = sum(len(request.prompt) for request in requests)
    n_each, n = params.prompt_logprobs + 1, params.n
    if (total := n_tokens * n_each * n) > MAX_PROMPT_LOGPROBS:
        raise UsageError(
            f"{n_tokens} prompt tokens x {n_each} log-probabilities x n={n} are {total} in one "
            f"answer, and {MAX_PROMPT_LOGPROBS} are the most; shorten the prompts, or lower "
            "logprobs or n"
        )
