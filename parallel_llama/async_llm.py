"""AsyncLLM: an LLM for many coroutines. Its engine runs on a thread of its own.

Only rank 0 uses it; the other ranks run `rank_rpc.serve_rank`.
"""

import asyncio
import queue
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from threading import Thread

import torch

from parallel_llama.engine.input_processor import Prompt, Prompts, as_prompts, per_prompt
from parallel_llama.engine.loop import EngineLoop, StepResult
from parallel_llama.engine.outputs import StepOutput
from parallel_llama.engine.statistics import EngineStatistics
from parallel_llama.errors import UsageError
from parallel_llama.llm import LLM, params_of
from parallel_llama.request import Completion, Request, SamplingParams


class RequestHandle:
    """One submitted request: iterate over its outputs, or await its completions.

    The outputs of all choices arrive in one stream. Call `cancel`, or leave the iteration, to stop
    the request early.
    """

    def __init__(
        self, request: Request, commands: "_Commands", deadline_s: float | None = None
    ) -> None:
        self.request = request
        self._commands, self._deadline_s = commands, deadline_s
        self._inbox: asyncio.Queue[StepOutput | Exception] = asyncio.Queue()
        self._n_open = request.params.n

    def __aiter__(self) -> AsyncIterator[StepOutput]:
        return self._outputs()

    async def completions(self) -> list[Completion]:
        """The completions by choice, except those already returned by iteration."""
        ended = [output.completion async for output in self if output.completion]
        return sorted(ended, key=lambda completion: completion.choice)

    def cancel(self) -> None:
        """End the request at the next step, if it has not ended; its last output still arrives."""
        if self._n_open:
            self._commands.put(_Cancel(self))

    def timeout_s(self) -> float | None:
        """Seconds until the request ends with its tokens so far; None without a time limit."""
        return None if self._deadline_s is None else self._deadline_s - time.monotonic()

    def put(self, output: StepOutput | Exception) -> None:
        """Called by AsyncLLM, in the event loop."""
        self._inbox.put_nowait(output)

    async def _outputs(self) -> AsyncIterator[StepOutput]:
        try:
            while self._n_open:
                output = await self._inbox.get()
                if isinstance(output, Exception):
                    self._n_open = 0
                    raise output
                self._n_open -= output.completion is not None
                yield output
        finally:
            if self._n_open:  # the caller stopped early
                self.cancel()


@dataclass(frozen=True)
class _Cancel:
    handle: RequestHandle


# Commands: submit a handle's request, cancel a request, or end the loop (None).
_Commands = queue.SimpleQueue[RequestHandle | _Cancel | None]


class AsyncLLM:
    """An LLM for many coroutines of one event loop at once; it owns the LLM until `close`.

    Create it inside the event loop, and close it before the loop ends; another event loop cannot
    use it. Until `close`, the LLM itself refuses calls. A short request may start before a long one
    that was submitted earlier (see `engine.scheduler`). A step that produces NaN or Inf fails all
    running requests with NumericalError; any other error of the engine fails them and ends the
    engine.

    Args:
        llm: the loaded model, on rank 0.

    Raises: UsageError if the LLM is closed, has unfinished requests, or has an AsyncLLM already.
    Collective: the other ranks call `rank_rpc.serve_rank`.
    """

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._loop: EngineLoop[RequestHandle] = EngineLoop(llm.ranks)
        self._client = _QueueClient(self._loop)
        # Set by the engine's thread before it calls the event loop, which reads it.
        self._error: Exception | None = None
        self._is_closed = False
        self._n_submitted = 0
        # One thread, because a tokenizer or chat template need not be thread-safe.
        self._input_thread = ThreadPoolExecutor(1, "input_processor")
        self._n_threads = torch.get_num_threads()
        self._thread = Thread(target=self._run, name="engine", daemon=True)
        llm.lend()
        self._thread.start()

    def __repr__(self) -> str:
        return f"AsyncLLM({self._llm!r})"

    async def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        timeout_s: float | None = None,
        adapter: str | None = None,
    ) -> RequestHandle:
        """Submit one prompt, which is checked before this returns.

        Args:
            adapter: the name of an adapter; None for the model without one.
            timeout_s: seconds until the request times out and ends with the tokens so far.

        Raises: UsageError for a prompt or parameters that cannot run; RuntimeError after the engine
        has ended, and in another event loop.
        """
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        ((params, adapter),) = per_prompt(1, params, adapter)
        return self._start(await self._request(prompt, params, adapter), deadline_s)

    async def generate(
        self,
        prompts: Prompts,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        adapter: str | Sequence[str | None] | None = None,
    ) -> list[Completion]:
        """Complete a prompt or several prompts, as `LLM.generate`.

        Raises: as `submit`.
        """
        prompt_list = as_prompts(prompts)
        params = params_of(params, sampling_params)
        settings = per_prompt(len(prompt_list), params, adapter)
        inputs, completions = self._llm.input_processor, list[Completion]()
        started: list[tuple[Request, RequestHandle]] = []
        try:
            for prompt, (own_params, own_adapter) in zip(prompt_list, settings, strict=True):
                request = await self._request(prompt, own_params, own_adapter)
                started.append((request, self._start(inputs.with_markers(prompt, request))))
            for index, (prompt, (request, handle)) in enumerate(
                zip(prompt_list, started, strict=True)
            ):
                choices = [replace(each, index=index) for each in await handle.completions()]
                completions += inputs.finished(prompt, request, choices)
            return completions
        finally:
            for _, handle in started:  # after an error or a cancellation
                handle.cancel()

    async def _request(
        self, prompt: Prompt, params: SamplingParams | None, adapter: str | None
    ) -> Request:
        """The checked request for one prompt. Raises: as `submit`."""
        self._require_open()
        index, self._n_submitted = self._n_submitted, self._n_submitted + 1
        make_request = partial(self._llm.input_processor.request, is_interactive=True)
        request = await asyncio.get_running_loop().run_in_executor(
            self._input_thread, make_request, index, prompt, params, None, adapter
        )
        self._llm.engine.check(request)
        return request

    def _start(self, request: Request, deadline_s: float | None = None) -> RequestHandle:
        """Submit a request. Raises: as `submit`."""
        self._require_open()  # `close` may have run while the request was made
        handle = RequestHandle(request, self._client.queue, deadline_s)
        self._client.queue.put(handle)
        return handle

    def statistics(self) -> EngineStatistics:
        """The load of the engine; the numbers may belong to two consecutive steps."""
        return self._llm.engine.statistics()

    async def close(self) -> None:
        """Cancel running requests and end the engine's thread; the caller owns the LLM again.

        Raises: the error that ended the engine, if one did.
        """
        self._is_closed = True
        self._client.queue.put(None)
        await asyncio.to_thread(self._thread.join)
        self._input_thread.shutdown()
        if self._error is not None:
            raise self._error

    def _require_open(self) -> None:
        self._llm.ranks.require_not_forked()
        if asyncio.get_running_loop() is not self._client.event_loop:
            raise RuntimeError(
                "this AsyncLLM belongs to another event loop; create a new one in this loop"
            )
        if self._is_closed:
            raise RuntimeError("this AsyncLLM is closed; create a new one")
        if self._error is not None:
            message = "the engine has ended on an error; load the model again"
            raise RuntimeError(message) from self._error

    def _run(self) -> None:
        """The engine's thread."""
        torch.set_num_threads(self._n_threads)  # OpenMP keeps this number for each thread
        try:
            self._loop.run(self._client)
        except Exception as error:
            self._error = error
            self._client.on_failed(self._loop.drop_all(), error)
            self._client.refuse_commands(error)
        finally:
            self._llm.take_back()


class _QueueClient:
    """The client of the engine's loop: commands come from a queue, outputs go to the event loop."""

    def __init__(self, loop: EngineLoop[RequestHandle]) -> None:
        self.queue: _Commands = queue.SimpleQueue()
        self._loop, self.event_loop = loop, asyncio.get_running_loop()

    def take_commands(self, wait: bool) -> bool:
        while wait or not self.queue.empty():
            command, wait = self.queue.get(), False
            if command is None:
                return False
            if isinstance(command, _Cancel):
                self._loop.cancel(command.handle)
            else:
                self._submit(command)
        return True

    def _submit(self, handle: RequestHandle) -> None:
        try:
            self._loop.submit(handle, handle.request, handle.timeout_s())
        except UsageError as error:
            self._deliver([(handle, error)])

    def on_step(self, result: StepResult[RequestHandle]) -> None:
        self._deliver([*result.outputs, *result.refused])

    def on_failed(self, keys: Sequence[RequestHandle], error: Exception) -> None:
        self._deliver([(handle, error) for handle in keys])

    def refuse_commands(self, error: Exception) -> None:
        """Fail the requests that are still in the queue; `submit` refuses later ones."""

        def refuse() -> None:
            while not self.queue.empty():
                command = self.queue.get()
                if isinstance(command, RequestHandle):
                    command.put(error)

        self._call(refuse)

    def _deliver(self, outputs: Sequence[tuple[RequestHandle, StepOutput | Exception]]) -> None:
        def put() -> None:
            for handle, output in outputs:
                handle.put(output)

        if outputs:
            self._call(put)

    def _call(self, function: Callable[[], None]) -> None:
        """Call a function in the event loop."""
        try:
            self.event_loop.call_soon_threadsafe(function)
        except RuntimeError:  # the event loop has ended without `close`
            self.queue.put(None)
