"""`Service` is what all route handlers share; `RequestContext` is one HTTP request to it."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from starlette.requests import Request as HTTPRequest

from parallel_llama.engine.input_processor import InputProcessor, Prompt
from parallel_llama.errors import UsageError
from parallel_llama.request import Request, SamplingParams, with_special_tokens
from parallel_llama.serve.answer import Answer
from parallel_llama.serve.asgi import until_disconnect
from parallel_llama.serve.engine_client import EngineClient, UnknownModel
from parallel_llama.serve.fair_threads import LARGE_WORK, FairThreads
from parallel_llama.tokenizer import Chat

T = TypeVar("T")

WAIT_LIMIT_S = 10.0  # for a thread to start processing a request's input
MAX_PROMPT_LOGPROBS = 1 << 18  # per response: about 25 MB of JSON
SMALL_PART_BYTES = 8 << 10  # serialised on the event loop: takes less than a millisecond
GRAMMAR_WORK = 1 << 20  # cost of a grammar that is not cached: as for a text of this many bytes


@dataclass(frozen=True)
class Service:
    """One model and its engine.

    Args:
        names: the names by which requests may call the model; replies contain the first.
        adapter_root: the folder from which clients may load adapters; None if they may not.
        adapter_change: held while an adapter is loaded or unloaded.
        threads: run templates, tokenizers and grammars, which would block the event loop.
    """

    names: Sequence[str]
    inputs: InputProcessor
    engine: EngineClient
    adapter_root: Path | None = None
    adapter_change: asyncio.Lock = field(default_factory=asyncio.Lock)
    created: int = field(default_factory=lambda: int(time.time()))
    threads: FairThreads = field(default_factory=FairThreads)

    @property
    def adapters(self) -> Sequence[str]:
        """The names of the loaded LoRA adapters."""
        return self.engine.adapters

    def require_model(self, name: str | None) -> None:
        """Raises: UnknownModel."""
        if name is not None and name not in self.names and name not in self.adapters:
            raise UnknownModel(f"the model {name!r:.200} is not served here; use {self.names[0]!r}")


@dataclass(frozen=True)
class RequestContext:
    """One HTTP request to a service.

    Args:
        client: API key or connection that the request's thread time is charged to.
        account: API key or address that the request's completions are charged to.
        n_bytes: length of the request's body.
        adapter: the adapter that the request runs with.
    """

    service: Service
    request: HTTPRequest
    client: str = ""
    account: str = ""
    n_bytes: int = 0
    adapter: str | None = None

    @property
    def inputs(self) -> InputProcessor:
        return self.service.inputs

    @property
    def model(self) -> str:
        """The name of the model in replies."""
        return self.adapter or self.service.names[0]

    def for_model(self, name: str | None) -> "RequestContext":
        """The context of a request that names a model or an adapter.

        Raises: UnknownModel.
        """
        self.service.require_model(name)
        return replace(self, adapter=name if name in self.service.adapters else None)

    async def until_disconnect(self, work: Awaitable[T]) -> T:
        return await until_disconnect(self.request, work)

    async def in_thread(
        self, work: Callable[[], T], n_choices: int = 1, *, extra: int = 0, renders: bool = False
    ) -> T:
        """Runs work on the request's input in a thread, because it would block the event loop.

        Args:
            n_choices: choices that count as admitted while the work runs.
            extra: cost in addition to reading the body once, in bytes.
            renders: whether the work renders a chat template.

        Raises: as `EngineClient.preparing`; Busy also if no thread is free within WAIT_LIMIT_S.
        """
        engine, threads = self.service.engine, self.service.threads
        with engine.preparing(n_choices, self.account, is_large=self.n_bytes > LARGE_WORK):
            try:
                size = self.n_bytes + extra
                return await threads.run(work, size, self.client, WAIT_LIMIT_S, renders=renders)
            except TimeoutError as error:
                raise self._busy_threads() from error

    async def wait_for_large(self, n_bytes: int) -> None:
        """Waits until more of a large body may be read, after a piece of `n_bytes`.

        Raises: Busy if that takes longer than WAIT_LIMIT_S.
        """
        try:
            await self.service.threads.wait_for_large(n_bytes, self.client, WAIT_LIMIT_S)
        except TimeoutError as error:
            raise self._busy_threads() from error

    def _busy_threads(self) -> Exception:
        return self.service.engine.busy(
            f"no thread was free for this request within {WAIT_LIMIT_S:g} s; try again later"
        )

    async def serialize(self, work: Callable[[], T], n_bytes: int) -> T:
        """Builds a part of the response, in a thread if its length, about n_bytes, is large."""
        if n_bytes <= SMALL_PART_BYTES:
            return work()
        return await self.service.threads.run(work, n_bytes, self.client)

    async def submit(
        self, prompts: Sequence[Prompt], params: SamplingParams, *, with_markers: bool = False
    ) -> list[Answer]:
        """Submits all prompts to the engine, or none.

        Args:
            with_markers: whether special tokens are in the text of the answers, for a reader.

        Raises: UsageError, UnknownModel, NotReady, Busy.
        """
        engine = self.service.engine
        n_choices = len(prompts) * params.n
        engine.require_room(n_choices, self.account, is_large=self.n_bytes > LARGE_WORK)
        requests = await self.in_thread(
            lambda: _requests(self.inputs, prompts, params, self.adapter, with_markers),
            n_choices,
            extra=_grammar_work(self.inputs, params),
            renders=any(isinstance(prompt, Chat) for prompt in prompts),
        )
        return engine.submit(requests, self.account)


def _grammar_work(inputs: InputProcessor, params: SamplingParams) -> int:
    if params.grammar is None or not inputs.has_tokenizer:
        return 0
    return 0 if inputs.grammars.is_compiled(params.grammar) else GRAMMAR_WORK


def _requests(
    inputs: InputProcessor,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    adapter: str | None,
    with_markers: bool,
) -> list[Request]:
    requests = []
    for index, prompt in enumerate(prompts):
        try:
            request = inputs.request(index, prompt, params, adapter=adapter, is_interactive=True)
            requests.append(with_special_tokens(request) if with_markers else request)
        except UsageError as error:
            if len(prompts) == 1:
                raise
            raise type(error)(f"prompt {index}: {error}") from error
    _require_small_logprobs(requests, params)
    return requests


def _require_small_logprobs(requests: Sequence[Request], params: SamplingParams) -> None:
    """Raises: UsageError if the prompts' log-probabilities would make the response too large."""
    if params.prompt_logprobs is None:
        return
    n_tokens = sum(len(request.prompt) for request in requests)
    n_logprobs, n = params.prompt_logprobs + 1, params.n
    if (total := n_tokens * n_logprobs * n) > MAX_PROMPT_LOGPROBS:
        raise UsageError(
            f"{n_tokens} prompt tokens x {n_logprobs} log-probabilities x n={n} make {total} in "
            f"one response, over the limit of {MAX_PROMPT_LOGPROBS}; shorten the prompts, or lower "
            "logprobs or n"
        )
