"""The engine process of the server, which receives requests from the frontend over a socket.

The frontend starts it as `python -m parallel_llama.engine_process FD LOG_FORMAT`. The loop never
waits for the frontend while requests run. Another thread compiles grammars.
"""

import os
import select
import socket
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import zip_longest
from threading import Event, Thread

from parallel_llama.engine.llm_config import LLMConfig
from parallel_llama.engine.loop import EngineLoop, StepResult
from parallel_llama.engine.outputs import StepOutput
from parallel_llama.engine.ranks import Ranks
from parallel_llama.errors import ContextExceeded, NumericalError, UsageError
from parallel_llama.llm import LLM
from parallel_llama.parallel.communicators import give_up
from parallel_llama.parallel.failures import RankError, exit_code
from parallel_llama.parallel.rank_env import end_with_parent, write_in_background
from parallel_llama.request import Request, SamplingParams, TokenLogprob
from parallel_llama.serve import wire
from parallel_llama.serve.fair_threads import yield_cores
from parallel_llama.serve.log import log_to_stderr

_ALIVE_CHECK_MS = 200  # while idle, between checks that the other ranks are alive
_REPORT_EVERY_S = 1.0  # during work that may take longer than a step
_SCORED_ROWS = 256  # maximum prompt log-probabilities per frame
# With up to 3 drawn tokens, less than a block of the default size: the prefix cache stores nothing.
_WARM_TOKENS = 13


class EngineProcess:
    """Passes commands from the frontend's socket to the engine loop, and outputs back.

    For rank 0; the other ranks run `rank_rpc.serve_rank`.
    """

    def __init__(self, ranks: Ranks, frames: wire.FrameSocket) -> None:
        self._ranks, self._frames, self._inputs = ranks, frames, ranks.setup.inputs
        self._loop: EngineLoop[int] = EngineLoop(ranks)
        self._grammar_thread = ThreadPoolExecutor(1, "grammars", yield_cores)
        self._compiling: set[int] = set()  # keys
        self._compiled: deque[wire.Submit] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK)
        self._n_regroups = 0  # number of changes of ranks that the frontend has received
        ranks.regrouping = self._reporting

    def run(self) -> None:
        """Serve the frontend until it closes the socket.

        Raises: as `EngineLoop.run`, such as RankError.
        """
        self._warm_up()
        with suppress(BrokenPipeError, ConnectionError):  # the frontend has closed the socket
            try:
                self._frames.send(self._loaded())
                self._loop.run(self)
            except RankError:
                # So that the frontend notices the failure before the other ranks have been ended.
                self._frames.socket.shutdown(socket.SHUT_RDWR)
                raise

    def _warm_up(self) -> None:
        """Run one request, so that one-time work does not delay the first client.

        Raises: NumericalError for a model that produces NaN or Inf.
        """
        longest = self._ranks.engine.capacity.longest(self._inputs.max_seq_len)
        if n_prompt := min(_WARM_TOKENS, longest // 2):
            params = SamplingParams(max_tokens=min(3, longest - n_prompt), ignore_eos=True)
            self._loop.submit(0, self._inputs.request(0, [0] * n_prompt, params))
            while len(self._loop):
                self._loop.step()

    def _loaded(self) -> wire.Loaded:
        setup, capacity, pids = self._ranks.setup, self._ranks.engine.capacity, self._ranks.pids()
        return wire.Loaded(
            dtype=setup.dtype,
            quant=setup.quant,
            kv_bytes=capacity.n_bytes,
            kv_tokens=capacity.n_tokens,
            block_size=capacity.block_size,
            longest=capacity.longest(self._inputs.longest),
            ranks=tuple(
                wire.RankFacts(rank, n_bytes, pids.get(rank), cuda_bytes)
                for rank, (n_bytes, cuda_bytes) in enumerate(
                    zip_longest(setup.weight_bytes, self._ranks.cuda_bytes)
                )
            ),
        )

    def take_commands(self, wait: bool) -> bool:
        if wait:
            self._wait()
        self._frames.flush()
        for body in self._frames.receive():
            message = wire.to_engine.decode(body)
            if isinstance(message, wire.Cancel):
                self._cancel(message.key)
            elif isinstance(message, wire.ChangeAdapter):
                self._change_adapter(message)
            elif self._needs_compiling(message.request):
                self._compiling.add(message.key)
                self._grammar_thread.submit(self._compile, message)
            else:
                self._submit(message)
        while self._compiled:
            ready = self._compiled.popleft()
            if ready.key in self._compiling:
                self._compiling.remove(ready.key)
                self._submit(ready)
        return True

    def on_step(self, result: StepResult[int]) -> None:
        for key, output in result.outputs:
            self._send_prompt_logprobs(key, output)
        outputs = tuple(_wire_output(key, output) for key, output in result.outputs)
        self._send_regroups()
        statistics = self._ranks.engine.statistics()
        self._frames.send(wire.Stepped(outputs, tuple(result.begun), result.seconds, statistics))
        for key, error in result.refused:
            self._refuse(key, error)

    def on_failed(self, keys: Sequence[int], error: NumericalError) -> None:
        self._frames.send(wire.Failed(tuple(keys), str(error)))

    def _wait(self) -> None:
        """Wait until the frontend has sent something or a grammar is compiled.

        Raises: RankError as soon as another rank has died, unless the other ranks continue.
        """
        poll = select.poll()
        poll.register(self._wake_fd, select.POLLIN)
        poll.register(
            self._frames.socket, select.POLLIN | (select.POLLOUT * self._frames.has_unsent)
        )
        while not poll.poll(_ALIVE_CHECK_MS):
            self._ranks.require_alive()
            self._send_regroups()
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """Tells the frontend every second that the engine works; the body must not use the socket.

        Otherwise the frontend would stop the engine if the body, such as reading weights, takes
        longer than a step may take.
        """
        is_complete = Event()

        def report() -> None:
            with suppress(BrokenPipeError, ConnectionError):  # `run` will notice it too
                while not is_complete.wait(_REPORT_EVERY_S):
                    self._frames.send(wire.Working())

        thread = Thread(target=report, name="working")
        thread.start()
        try:
            yield
        finally:  # no two threads may use the socket at once
            is_complete.set()
            thread.join()

    def _send_regroups(self) -> None:
        """Send the frontend each change of ranks since the last call."""
        regroups = self._ranks.regroups[self._n_regroups :]
        self._n_regroups += len(regroups)
        for regroup in regroups:
            self._frames.send(wire.Regrouped(self._loaded(), bool(regroup.lost), regroup.n_new))

    def _submit(self, message: wire.Submit) -> None:
        try:
            self._loop.submit(message.key, message.request)
        except UsageError as error:
            self._refuse(message.key, error)

    def _refuse(self, key: int, error: UsageError) -> None:
        exceeds_context = isinstance(error, ContextExceeded)
        self._frames.send(wire.EngineRefused(key, str(error), exceeds_context))

    def _change_adapter(self, message: wire.ChangeAdapter) -> None:
        why_refused = None
        try:
            with self._reporting():
                self._ranks.change_adapter(message.name, message.folder)
        except UsageError as error:
            why_refused = str(error)
        self._frames.send(wire.AdapterChanged(message.key, why_refused))

    def _cancel(self, key: int) -> None:
        if key in self._compiling:
            self._compiling.remove(key)
            self._frames.send(wire.EngineRefused(key, "it was cancelled"))
        else:
            self._loop.cancel(key)

    def _needs_compiling(self, request: Request) -> bool:
        grammar = request.params.grammar
        return grammar is not None and not self._inputs.grammars.is_compiled(grammar)

    def _compile(self, message: wire.Submit) -> None:
        """Compile a request's grammar, in the grammars' thread; the engine then finds it cached."""
        grammar = message.request.params.grammar
        assert grammar is not None
        with suppress(UsageError):  # `Engine.submit` raises it again
            self._inputs.grammars.matcher(grammar, is_checked=True)  # by the frontend
        self._compiled.append(message)
        os.eventfd_write(self._wake_fd, 1)

    def _send_prompt_logprobs(self, key: int, output: StepOutput) -> None:
        """Send the log-probabilities of a prompt, once for all choices and in bounded frames."""
        completion = output.completion
        if completion is None or completion.choice or completion.prompt_logprobs is None:
            return
        _first, *scored = completion.prompt_logprobs  # nothing predicts the first token
        for start in range(0, len(scored), _SCORED_ROWS):
            rows = map(_without_texts, filter(None, scored[start : start + _SCORED_ROWS]))
            self._frames.send(wire.Scored(key, tuple(rows)))


def _wire_output(key: int, output: StepOutput) -> wire.Output:
    completion = output.completion
    if completion is not None:  # the frontend got these from earlier outputs and from Scored
        completion = replace(completion, logprobs=None, prompt_logprobs=None)
    logprobs = tuple(map(_without_texts, output.logprobs))
    return wire.Output(key, output.choice, output.tokens, output.text, logprobs, completion)


def _without_texts(scored: TokenLogprob) -> TokenLogprob:
    """The log-probabilities without the texts of tokens, which the frontend decodes itself."""
    return replace(scored, text=None, top_texts=())


def main() -> int:
    """Runs the engine of a server, in a process started by the frontend; returns the exit code.

    The process reads its LLMConfig from stdin as one line of JSON, starts the other ranks, and
    serves the frontend through socket FD until the frontend closes it.
    """
    end_with_parent()
    write_in_background()
    log_to_stderr(sys.argv[2])
    config = LLMConfig.from_json(sys.stdin.buffer.readline())

    def serve() -> int:
        with socket.socket(fileno=int(sys.argv[1])) as sock, LLM(config) as llm:
            EngineProcess(llm.ranks, wire.FrameSocket(sock)).run()
        return 0

    return exit_code(serve, give_up)


if __name__ == "__main__":
    sys.exit(main())
