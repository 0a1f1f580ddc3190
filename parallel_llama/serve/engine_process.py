"""The engine's side of a server: a loop that steps, and tells the front what each step gave.

It never waits for the front while something runs, and nobody waits for a grammar but whoever
asked for it: those are compiled in a thread beside the loop.
"""

import os
import select
import socket
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import zip_longest

from parallel_llama.engine.engine import StepOutput
from parallel_llama.errors import NumericalError, UsageError
from parallel_llama.llm import LLM
from parallel_llama.parallel.failures import RankError
from parallel_llama.request import Grammar, SamplingParams, TokenLogprob
from parallel_llama.serve.fair_threads import yield_cores
from parallel_llama.serve.wire import (
    Cancel,
    Failed,
    FrameSocket,
    Loaded,
    Output,
    RankFacts,
    Refused,
    Scored,
    Stepped,
    Submit,
    to_engine,
)

_LOOK_MS = 200  # between two looks at the other ranks while there is nothing to do
_SCORED_ROWS = 256  # of prompt log-probabilities in one frame, which the front decodes at once
_WARM_TOKENS = 15  # fewer than a block, of which the prefix cache keeps nothing


class EngineProcess:
    """A loaded model behind a socket, whose other end is the front's.

    For rank 0; the other ranks serve it in `rank_calls.serve_rank`.
    """

    def __init__(self, llm: LLM, frames: FrameSocket) -> None:
        self._llm, self._engine, self._frames = llm, llm.engine, frames
        self._keys: dict[int, int] = {}  # by ticket
        self._tickets: dict[int, int] = {}  # by key
        self._grammar_thread = ThreadPoolExecutor(1, "grammars", yield_cores)
        self._compiling: set[int] = set()  # keys
        self._compiled: deque[Submit] = deque()
        self._woken = os.eventfd(0, os.EFD_NONBLOCK)

    def run(self) -> None:
        """Serve the front until it goes.

        Raises: what ends the engine: RankError and whatever else a step raises.
        """
        self._warm_up()
        with suppress(BrokenPipeError, ConnectionError):  # the front has gone: nobody listens
            try:
                self._frames.send(self._loaded())
                while True:
                    self._take_in()
                    self._step()
            except RankError:
                # The front hears of it now, and not only when the other ranks have been ended.
                self._frames.socket.shutdown(socket.SHUT_RDWR)
                raise

    def _warm_up(self) -> None:
        """Answer something, so that the first client does not wait for what is made once.

        Raises: NumericalError for a model that gives no numbers.
        """
        longest = self._engine.capacity.longest(self._llm.input_processor.max_seq_len)
        if n_prompt := min(_WARM_TOKENS, longest // 2):
            params = SamplingParams(max_tokens=min(3, longest - n_prompt), ignore_eos=True)
            self._llm.generate([[0] * n_prompt], params)

    def _loaded(self) -> Loaded:
        llm, capacity = self._llm, self._engine.capacity
        pids = llm.pids()
        weights, on_cards = llm.statistics.weight_bytes, llm.statistics.cuda_bytes
        return Loaded(
            dtype=llm.dtype,
            quant=llm.quant,
            kv_bytes=capacity.n_bytes,
            kv_tokens=capacity.n_tokens,
            block_size=capacity.block_size,
            longest=capacity.longest(llm.input_processor.max_seq_len),
            ranks=tuple(
                RankFacts(rank, n_bytes, pids.get(rank), on_card)
                for rank, (n_bytes, on_card) in enumerate(zip_longest(weights, on_cards))
            ),
        )

    def _take_in(self) -> None:
        """Take what has come, waiting where there is nothing to do."""
        while True:
            if self._engine.idle:
                self._wait()
            self._frames.flush()
            for body in self._frames.receive():
                message = to_engine.decode(body)
                if isinstance(message, Cancel):
                    self._cancel(message.key)
                else:
                    self._begin(message)
            while self._compiled:
                ready = self._compiled.popleft()
                if ready.key in self._compiling:
                    self._compiling.remove(ready.key)
                    self._submit(ready)
            if not self._engine.idle:
                return

    def _wait(self) -> None:
        """Until the front, or a grammar, has something for the engine.

        Raises: RankError as soon as another rank has died.
        """
        poll = select.poll()
        poll.register(self._woken, select.POLLIN)
        poll.register(
            self._frames.socket, select.POLLIN | (select.POLLOUT * self._frames.has_unsent)
        )
        while not poll.poll(_LOOK_MS):
            self._llm.require_alive()
        with suppress(BlockingIOError):
            os.eventfd_read(self._woken)

    def _begin(self, message: Submit) -> None:
        grammar = message.request.params.grammar
        if grammar is None or self._llm.input_processor.grammars.is_compiled(grammar):
            self._submit(message)
        else:
            self._compiling.add(message.key)
            self._grammar_thread.submit(self._compile, grammar, message)

    def _compile(self, grammar: Grammar, message: Submit) -> None:
        """In the grammars' thread: have it compiled, so that the engine finds it so."""
        with suppress(UsageError):  # the engine refuses it in its turn
            # The front has checked it.
            self._llm.input_processor.grammars.matcher(grammar, is_checked=True)
        self._compiled.append(message)
        os.eventfd_write(self._woken, 1)

    def _submit(self, message: Submit) -> None:
        try:
            ticket = self._engine.submit(message.request)
        except UsageError as error:
            self._frames.send(Refused(message.key, str(error)))
        else:
            self._keys[ticket], self._tickets[message.key] = message.key, ticket

    def _cancel(self, key: int) -> None:
        if key in self._compiling:
            self._compiling.remove(key)
            self._frames.send(Refused(key, "it was cancelled"))
        elif key in self._tickets:
            self._engine.cancel(self._tickets[key])

    def _step(self) -> None:
        started = time.perf_counter()
        try:
            outputs = self._llm.step()
        except NumericalError as error:  # the engine has begun anew
            self._frames.send(Failed(tuple(self._tickets), str(error)))
            self._keys.clear()
            self._tickets.clear()
            return
        begun = tuple(self._keys[ticket] for ticket in self._engine.begun)
        for output in outputs:
            self._send_prompt_logprobs(output)
        told = tuple(map(self._told, outputs))
        step_s = time.perf_counter() - started
        self._frames.send(Stepped(told, begun, step_s, self._engine.statistics()))

    def _told(self, output: StepOutput) -> Output:
        key = self._keys[output.ticket]
        if output.is_last:
            del self._keys[output.ticket], self._tickets[key]
        completion = output.completion
        if completion is not None:  # the front has these already, from outputs and from Scored
            completion = replace(completion, logprobs=None, prompt_logprobs=None)
        logprobs = tuple(map(_unspelled, output.logprobs))
        return Output(key, output.choice, output.tokens, output.text, logprobs, completion)

    def _send_prompt_logprobs(self, output: StepOutput) -> None:
        """Send the log-probabilities of a prompt, once for all choices and in bounded frames."""
        completion = output.completion
        if completion is None or completion.choice or completion.prompt_logprobs is None:
            return
        _first, *scored = completion.prompt_logprobs  # nothing predicts the first token
        for start in range(0, len(scored), _SCORED_ROWS):
            rows = map(_unspelled, filter(None, scored[start : start + _SCORED_ROWS]))
            self._frames.send(Scored(self._keys[output.ticket], tuple(rows)))


def _unspelled(scored: TokenLogprob) -> TokenLogprob:
    """Without texts, which the front has itself."""
    return replace(scored, text=None, top_texts=())
