"""Many requests at once from coroutines, answered by one model: what a server holds.

A thread of its own runs the engine and nothing else; coroutines hand requests to it and take
outputs from it. For rank 0; the other ranks serve in `rank_calls.serve_rank`.
"""

import asyncio
import queue
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from threading import Thread

import torch

from parallel_llama.engine.engine import StepOutput
from parallel_llama.engine.prompts import Prompt
from parallel_llama.engine.statistics import EngineStatistics
from parallel_llama.errors import NumericalError, UsageError
from parallel_llama.llm import LLM
from parallel_llama.request import Completion, Request, SamplingParams


class Answer:
    """One request on its way: iterate over its outputs, or await all its completions.

    The outputs of all choices come in one stream. An answer nobody wants is to be cancelled.
    """

    def __init__(self, request: Request, messages: "_Messages") -> None:
        self.request = request
        self._messages = messages
        self._inbox: asyncio.Queue[StepOutput | Exception] = asyncio.Queue()
        self._n_open = request.params.n

    def __aiter__(self) -> AsyncIterator[StepOutput]:
        return self._outputs()

    async def completions(self) -> list[Completion]:
        """Every choice's completion, in order; nothing that was iterated over before."""
        ended = [output.completion async for output in self if output.completion]
        return sorted(ended, key=lambda completion: completion.choice)

    def cancel(self) -> None:
        """End it at the next step, if it has not ended; it still tells of its end."""
        if self._n_open:
            self._messages.put(_Cancel(self))

    def put(self, output: StepOutput | Exception) -> None:
        """For the engine's owner, in the event loop."""
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
            if self._n_open:  # whoever read this has gone away
                self.cancel()


@dataclass(frozen=True)
class _Submit:
    answer: Answer
    late_s: float | None  # on the monotonic clock


@dataclass(frozen=True)
class _Cancel:
    answer: Answer


_Messages = queue.SimpleQueue[_Submit | _Cancel | None]


class AsyncLLM:
    """An LLM that many coroutines of one event loop ask at once; it owns the model from here on.

    Make it inside the loop, and close it before that ends. Requests start in the order in which
    they are submitted. A forward pass that gives no numbers fails the requests that are here with
    NumericalError; any other error of the engine fails them and ends it.

    Collective: the other ranks call `rank_calls.serve_rank`.
    """

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._loop = asyncio.get_running_loop()
        self._messages: _Messages = queue.SimpleQueue()
        # The engine thread's alone.
        self._answers: dict[int, Answer] = {}  # by ticket
        self._tickets: dict[Answer, int] = {}
        # Written before the event loop hears of it, and only read there.
        self._error: Exception | None = None
        self._is_closed = False
        self._n_submitted = 0
        # One at a time: a tokenizer or chat template need not be safe for several threads.
        self._input_thread = ThreadPoolExecutor(1, "input_processor")
        self._n_threads = torch.get_num_threads()
        self._thread = Thread(target=self._serve, name="engine", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"AsyncLLM({self._llm!r})"

    async def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        timeout_s: float | None = None,
    ) -> Answer:
        """Hand in one prompt, which is checked before this returns.

        An answer that takes longer than `timeout_s` from now on ends with what it has.

        Raises: UsageError for what cannot be done; RuntimeError once the engine has ended.
        """
        self._require_open()
        late_s = None if timeout_s is None else time.monotonic() + timeout_s
        line, self._n_submitted = self._n_submitted, self._n_submitted + 1
        request = await self._loop.run_in_executor(
            self._input_thread, self._llm.input_processor.request, line, prompt, params
        )
        self._llm.engine.check(request)
        self._require_open()  # and nothing is awaited before the message is in the queue
        answer = Answer(request, self._messages)
        self._messages.put(_Submit(answer, late_s))
        return answer

    async def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams | None = None
    ) -> list[Completion]:
        """Complete some prompts; the completions in order, choices of a prompt side by side.

        Their `index` is the prompt's place among these.
        """
        answers: list[Answer] = []
        try:
            for prompt in prompts:
                answers.append(await self.submit(prompt, params))
            return [
                replace(completion, index=index)
                for index, answer in enumerate(answers)
                for completion in await answer.completions()
            ]
        finally:
            for answer in answers:  # those that an error or a cancellation has left behind
                answer.cancel()

    def statistics(self) -> EngineStatistics:
        """How busy the engine is; numbers may stem from two neighbouring steps."""
        return self._llm.engine.statistics()

    async def close(self) -> None:
        """End what is running as cancelled, then the thread; the LLM is its caller's again.

        Raises: the error that ended the engine, if one did.
        """
        self._is_closed = True
        self._messages.put(None)
        await asyncio.to_thread(self._thread.join)
        self._input_thread.shutdown()
        if self._error is not None:
            raise self._error

    def _require_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("this AsyncLLM is closed; make another one")
        if self._error is not None:
            raise RuntimeError("the engine has ended on an error; load it anew") from self._error

    # In the engine's thread

    def _serve(self) -> None:
        torch.set_num_threads(self._n_threads)  # OpenMP keeps this number for each thread
        try:
            while self._take_in():
                self._step()
            for ticket in self._answers:
                self._llm.engine.cancel(ticket)
            while not self._llm.engine.idle:
                self._step()
        except Exception as error:
            self._error = error
            self._fail(error)
            self._call(self._refuse_messages, error)

    def _take_in(self) -> bool:
        """Take what has come, waiting where there is nothing to do; whether to go on."""
        engine = self._llm.engine
        while engine.idle or not self._messages.empty():
            message = self._messages.get()
            if message is None:
                return False
            self._obey(message)
        return True

    def _obey(self, message: _Submit | _Cancel) -> None:
        engine = self._llm.engine
        if isinstance(message, _Cancel):
            if message.answer in self._tickets:
                engine.cancel(self._tickets[message.answer])
            return
        answer, late_s = message.answer, message.late_s
        try:
            ticket = engine.submit(
                answer.request, None if late_s is None else late_s - time.monotonic()
            )
        except UsageError as error:
            self._call(answer.put, error)
        else:
            self._answers[ticket], self._tickets[answer] = answer, ticket

    def _step(self) -> None:
        try:
            outputs = self._llm.step()
        except NumericalError as error:  # the engine has begun anew
            self._fail(error)
        else:
            self._tell(outputs)

    def _tell(self, outputs: Sequence[StepOutput]) -> None:
        told = []
        for output in outputs:
            answer = self._answers[output.ticket]
            told.append((answer, output))
            if output.is_last:
                del self._answers[output.ticket], self._tickets[answer]
        if told:
            self._call(_hand_out, told)

    def _fail(self, error: Exception) -> None:
        self._call(_hand_out, [(answer, error) for answer in self._tickets])
        self._answers.clear()
        self._tickets.clear()

    def _call(self, function: Callable[..., None], *args: object) -> None:
        """Call something in the event loop."""
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the loop has ended without `close`: nobody listens any more
            self._messages.put(None)

    # In the event loop

    def _refuse_messages(self, error: Exception) -> None:
        while not self._messages.empty():
            message = self._messages.get()
            if isinstance(message, _Submit):
                message.answer.put(error)


def _hand_out(told: Sequence[tuple[Answer, StepOutput | Exception]]) -> None:
    for answer, output in told:
        answer.put(output)
