"""LLM, the public class: completes prompts with a model on one or more ranks.

With several ranks, rank 0 runs the user's program and the other ranks serve it. The LLM starts them
on this host, unless torchrun has started them.
"""

import signal
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from types import FrameType
from typing import Any

from typing_extensions import Unpack

from parallel_llama.engine import rank_rpc
from parallel_llama.engine.calibration import RankRates
from parallel_llama.engine.engine import Engine
from parallel_llama.engine.fair_lock import FairLock
from parallel_llama.engine.input_processor import (
    InputProcessor,
    Prompt,
    Prompts,
    as_prompts,
    as_token_ids,
)
from parallel_llama.engine.llm_config import LLMConfig, Settings, adapter_folders
from parallel_llama.engine.loop import EngineLoop
from parallel_llama.engine.machine import Machine, measure
from parallel_llama.engine.outputs import StepOutput
from parallel_llama.engine.ranks import Ranks
from parallel_llama.engine.setup import ModelSetup
from parallel_llama.errors import UsageError, shown
from parallel_llama.memory import bytes_passed_over
from parallel_llama.parallel.communicators import use_device
from parallel_llama.request import Completion, Request, SamplingParams, whole_number
from parallel_llama.tokenizer import Tokenizer

_Params = SamplingParams | Sequence[SamplingParams] | None
_Adapter = str | Sequence[str | None] | None

# Handlers of these signals often raise an exception: for Ctrl-C, and for a time limit (SIGALRM).
_DELAYED_SIGNALS = signal.SIGINT, signal.SIGALRM


@dataclass
class Statistics:
    """Memory and times of an LLM. Units: seconds, tokens, bytes on each rank.

    The tokens and times are those of the last call, except `load_s`. `cuda_bytes` is each rank's
    peak GPU memory until the model is ready.
    """

    weight_bytes: tuple[int, ...]
    cuda_bytes: tuple[int, ...] = ()
    load_s: float = 0.0
    n_new_tokens: int = 0
    first_token_s: float = 0.0
    total_s: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """New tokens per second after the first, over all requests."""
        after_first = self.total_s - self.first_token_s
        return (self.n_new_tokens - 1) / after_first if after_first > 0 else 0.0

    def begin(self) -> None:
        self.n_new_tokens, self.first_token_s, self.total_s = 0, 0.0, 0.0

    def count(self, n_tokens: int, seconds: float) -> None:
        """Count tokens that arrived `seconds` after `begin`."""
        self.total_s = seconds
        if n_tokens:
            self.n_new_tokens += n_tokens
            self.first_token_s = self.first_token_s or seconds


class LLM:
    """A model, ready to generate; `with LLM(...) as llm` closes it at the end.

    Threads may call one LLM at the same time; their requests share the batch. A process made by
    `os.fork` cannot use the LLM of its parent.

    The constructor starts the other ranks on this host; they end with this process. Under torchrun
    they exist already: rank 0 runs the program, and on every other rank the constructor serves rank
    0 until rank 0 closes its LLM, and then ends the process.

    Args:
        model: as `LLMConfig.model`, or a whole LLMConfig.
        tensor_parallel_size: vLLM's name for `tp_size`.
        input_processor: the model's InputProcessor, if the caller has one.
        facts: other values, by name, that must be equal on all ranks; not compared with
            ranks that this process starts.
        on_bytes: called with the number of bytes of weights just read.
        on_wait: called with the ranks that have not joined yet.
        on_graph: called before each CUDA graph is recorded, with its number of rows.
        settings: the other fields of `LLMConfig`, by name: tp_size, pp, memory, speeds, dtype,
            quant, device, max_seq_len, seed, random_weights, slice_of, verify, download,
            kv_cache_bytes, kv_cache_dtype, kv_split, exact, attention_sinks, block_size,
            max_drafts, draft_model, draft_quant, integrity_check, timeout_s, start_timeout_s,
            log_dir, elastic, spares, adapters.

    Raises: UsageError for settings that cannot run; CheckpointError for files that cannot be used;
    DamagedWeights for damage that only reading the weights shows; RankError for a rank that does
    not start or join, fails, or has other settings.
    Collective: the constructor, under torchrun, with the same arguments on all ranks.
    """

    def __init__(
        self,
        model: str | LLMConfig = "smollm2",
        *,
        tensor_parallel_size: int | None = None,
        input_processor: InputProcessor | None = None,
        facts: Mapping[str, str] | None = None,
        on_bytes: Callable[[int], None] = lambda _: None,
        on_wait: Callable[[Sequence[int]], None] = lambda _: None,
        on_graph: Callable[[int], None] = lambda _: None,
        **settings: Unpack[Settings],
    ) -> None:
        start_s = time.monotonic()
        if tensor_parallel_size is not None:
            tp_size = settings.get("tp_size")
            if tp_size is not None and tp_size != tensor_parallel_size:
                raise UsageError(
                    f"tp_size={shown(tp_size)} and tensor_parallel_size="
                    f"{shown(tensor_parallel_size)} are two names of one argument; give one"
                )
            settings["tp_size"] = tensor_parallel_size
        config = model if isinstance(model, LLMConfig) else LLMConfig(model)
        setup = ModelSetup(replace(config, **settings), input_processor)
        self._model = config.model
        self.input_processor, self.args, self.device = setup.inputs, setup.args, setup.device
        self.dtype, self.quant, self.precision = setup.dtype, setup.quant, setup.precision
        self.kv_format = setup.kv_format
        self.ranks = Ranks(setup)
        self._end = weakref.finalize(self, self.ranks.end)
        try:
            self.ranks.start(facts, on_bytes, on_wait, on_graph)
        except BaseException:
            self._end()
            raise
        self.rank, self._tp_size = self.engine.comm.rank, self.engine.comm.size
        self.statistics = Statistics(
            setup.weight_bytes, self.ranks.cuda_bytes, load_s=time.monotonic() - start_s
        )
        self._loop: EngineLoop[tuple[_GenerateCall, int]] = EngineLoop(self.ranks)
        self._lock, self._is_lent = FairLock(), False
        self._inputs_lock = threading.Lock()  # a tokenizer or template need not be thread-safe
        if self.rank > 0:
            self.ranks.follow()
            self.close()
            raise SystemExit(0)

    @property
    def engine(self) -> Engine:
        """The engine of this rank.

        Raises: UsageError after `close`, which frees the engine's memory.
        """
        return self.ranks.engine

    @property
    def tp_size(self) -> int:
        """The number of ranks; with `elastic` it changes when a rank is lost or replaced."""
        return self.engine.comm.size if self._end.alive else self._tp_size

    def generate(
        self,
        prompts: Prompts,
        params: _Params = None,
        *,
        sampling_params: _Params = None,
        adapter: _Adapter = None,
    ) -> list[Completion]:
        """Complete a prompt or a list of prompts, in one ragged batch.

        Args:
            prompts: a prompt is a string, a list of token ids, a conversation (a list of messages),
                or vLLM's {"prompt": ..} or {"prompt_token_ids": ..}; a list may mix them.
            params: sampling parameters for all prompts, or one for each. By default the model's.
            sampling_params: vLLM's name for `params`.
            adapter: the name of an adapter for all prompts, or one for each; None for the model
                without an adapter.

        Returns: completions by prompt, then by choice. With one choice per prompt the list reads as
            vLLM's: `.prompt`, `.outputs[0].text`.
        Raises: UsageError, before anything runs, for a prompt or parameters that cannot run; with
        `elastic`, also as soon as a prompt no longer fits after the loss of a rank; NumericalError
        if the model produces NaN or Inf.
        """
        prompt_list = as_prompts(prompts)
        params = params_of(params, sampling_params)
        inputs = self.input_processor
        with self._inputs_lock:
            requests = inputs.requests(prompt_list, params, adapter)
        prompts_and_requests = list(zip(prompt_list, requests, strict=True))
        choices: list[list[Completion]] = [[] for _ in requests]
        marked = [inputs.with_markers(prompt, request) for prompt, request in prompts_and_requests]
        for output in self._run(marked, lambda: False, finishes_others=False):
            if output.completion is not None:
                choices[output.completion.index].append(output.completion)
        completions = []
        for (prompt, request), own_choices in zip(prompts_and_requests, choices, strict=True):
            own_choices.sort(key=lambda completion: completion.choice)
            completions += inputs.finished(prompt, request, own_choices)
        return completions

    def chat(
        self,
        messages: Any,
        params: _Params = None,
        *,
        sampling_params: _Params = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        template_vars: Mapping[str, Any] | None = None,
        adapter: _Adapter = None,
    ) -> list[Completion]:
        """Answer a conversation, or a list of conversations, through the model's chat template.

        Args:
            messages: a conversation is a list of messages, {"role": .., "content": ..}.
            tools: JSON schemas of tools, for the template.
            documents: documents, for the template.
            template_vars: further variables of the template, by name.
            adapter: as in `generate`.

        Returns: as `generate`. If the model marks its reasoning, as Qwen 3 and gpt-oss do, the
            reasoning is in `reasoning` and not in `text`; with skip_special_tokens=False, `text` is
            the unchanged output of the model, including its markers.
        Raises: as `generate`.
        """
        chats = self.input_processor.chats(
            messages,
            () if tools is None else tools,
            () if documents is None else documents,
            template_vars or {},
        )
        return self.generate(chats, params, sampling_params=sampling_params, adapter=adapter)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        sampling_params: SamplingParams | None = None,
        adapter: str | None = None,
    ) -> Iterator[str]:
        """Complete one prompt, with the adapter if one is named, and yield its text in pieces.

        Raises: UsageError for more than one choice, whose texts would mix.
        """
        own_params = params_of(params, sampling_params)
        with self._inputs_lock:
            requests = self.input_processor.requests([prompt], own_params, adapter)
        if requests[0].params.n > 1:
            raise UsageError(f"n={requests[0].params.n}: a stream has one choice; use generate")
        for output in self.run(requests):
            yield output.text

    def run(
        self, requests: Sequence[Request], interrupted: Callable[[], bool] = lambda: False
    ) -> Generator[StepOutput, None, None]:
        """Run requests that `input_processor` made; yields each request's output of each step.

        Concurrent calls share the batch: each step advances all calls.

        Args:
            interrupted: called before each step; once it returns true, the requests of this call
                end. They also end when the caller stops iterating.

        Raises: UsageError, before any request runs, if one can never fit into the cache; with
        `elastic`, also after the outputs of all other requests if one no longer fits after the loss
        of a rank.
        """
        return self._run(requests, interrupted, finishes_others=True)

    def _run(
        self,
        requests: Sequence[Request],
        interrupted: Callable[[], bool],
        *,
        finishes_others: bool,
    ) -> Generator[StepOutput, None, None]:
        """As `run`; without `finishes_others`, an error of one request is raised immediately."""
        call = _GenerateCall()
        self.statistics.begin()
        try:
            with self._exclusive():
                for request in requests:
                    self.engine.check(request)
                for number, request in enumerate(requests):
                    self._loop.submit((call, number), request)
                    call.unfinished.add(number)
            while call.unfinished or call.inbox:
                if interrupted():
                    with self._exclusive():
                        self._cancel(call)
                self._await_output(call)
                if call.refused is not None and not finishes_others:
                    raise call.refused
                while call.inbox:
                    output = call.inbox.popleft()
                    self.statistics.count(len(output.tokens), time.monotonic() - call.start_s)
                    yield output
            if call.refused is not None:
                raise call.refused
        except BaseException:  # the caller stopped early or failed: end its requests
            self._abandon(call)
            raise

    def score(
        self,
        sequences: Sequence[Sequence[int]],
        stride: int | None = None,
        on_tokens: Callable[[int], None] = lambda _: None,
        *,
        adapter: str | None = None,
    ) -> list[list[float]]:
        """Natural-log probabilities of every token after the first, given the tokens before it.

        A sequence longer than the context is scored in windows of the length of the context. The
        probability of a token is conditioned on the preceding tokens of the first window that
        contains it. Between two windows, calls of other threads may run. While unfinished requests
        hold too much of the KV cache, this call steps them; requests that other threads add
        meanwhile may run before it.

        Args:
            sequences: lists or arrays of token ids.
            stride: tokens between the starts of two windows, 1 to one less than the context. By
                default half the context. A small stride gives tokens more context and takes longer.
            on_tokens: called after each window with the number of newly scored tokens.
            adapter: the name of an adapter; None for the model without an adapter.

        Raises: UsageError for a sequence that cannot be scored or does not fit into the KV cache,
            and for an adapter that is not loaded.
        """
        self._require_usable()
        max_tokens = self.input_processor.longest
        given, stride = stride, max(max_tokens // 2, 1) if stride is None else whole_number(stride)
        if stride is None or not 1 <= stride < max(max_tokens, 2):
            raise UsageError(
                f"a stride of {shown(given)} in a context of {max_tokens} tokens; use a whole "
                f"number from 1 to {max_tokens - 1}"
            )
        checked = []
        for index, sequence in enumerate(sequences):
            try:
                tokens = as_token_ids(sequence)
                self.input_processor.check_sequence(tokens)
                self.engine.scheduler.check_length(min(len(tokens), max_tokens))
                checked.append(tokens)
            except UsageError as error:
                raise UsageError(f"sequence {index}: {error}") from error
        with self._adapter_held(adapter):
            return [
                self._score(
                    tokens, rank_rpc.windows(len(tokens), max_tokens, stride), on_tokens, adapter
                )
                for tokens in checked
            ]

    @contextmanager
    def _adapter_held(self, adapter: str | None) -> Iterator[None]:
        """A context in which an adapter cannot be unloaded.

        Raises: UsageError if it is not loaded.
        """
        engine = self.engine
        engine.held_adapters.append(adapter)
        try:
            with self._exclusive():
                engine.require_adapter(adapter)
            yield
        finally:
            engine.held_adapters.remove(adapter)

    def _score(
        self,
        tokens: Sequence[int],
        windows: Iterator[range],
        on_tokens: Callable[[int], None],
        adapter: str | None,
    ) -> list[float]:
        logprobs: list[float] = []
        n_done = 0
        for window in windows:
            part = tokens[window.start : window.stop]
            score = partial(rank_rpc.score_sequence, self.engine, part, adapter)
            scored = None
            while scored is None:
                with self._exclusive():
                    if self.engine.idle or self.engine.scheduler.has_room(len(part)):
                        scored = self.ranks.retry_after_loss(score)
                    else:
                        self._step_for_all()
            logprobs += scored[len(logprobs) - window.start :]
            on_tokens(window.stop - n_done)
            n_done = window.stop
        return logprobs

    def load_adapter(self, name: str, folder: str) -> None:
        """Load a LoRA adapter on all ranks, between two steps; requests may then name it.

        Raises: UsageError if `elastic` is set, if the name is in use, or if the adapter is not
        supported or some rank cannot read it; then no rank has the adapter.
        """
        (path,) = adapter_folders({name: folder}).values()
        with self._exclusive():
            self.ranks.change_adapter(name, path)

    def unload_adapter(self, name: str) -> None:
        """Free the memory of an adapter.

        Raises: UsageError if it is not loaded, or an unfinished request or `score` uses it; and
        with `elastic`.
        """
        with self._exclusive():
            self.ranks.change_adapter(name, None)

    def machine(self) -> Machine:
        """The memory bandwidth of all ranks, and their peak memory."""
        with self._exclusive():
            if self.ranks.comm is not self.engine.comm:  # a slice
                return measure(self.ranks.comm, self.device)
            return self.ranks.retry_after_loss(lambda: rank_rpc.measure_machine(self.engine))

    def rank_rates(self) -> list[RankRates]:
        """The rates at which each rank reads, multiplies and exchanges, on the CPU.

        `bench --calibrate` writes them to a file for `plan`.

        Raises: UsageError with `slice_of` or `pp`, and on GPUs.
        """
        with self._exclusive():
            return self.ranks.retry_after_loss(lambda: rank_rpc.calibrate(self.engine))

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises: UsageError if the model has none.
        """
        return self.input_processor.tokenizer

    def weight_bytes_per_step(self, batch: int) -> int:
        """Bytes of weights that all ranks together read to decode a step of `batch` sequences.

        With `slice_of`, only the weights of the slice's rank count. Weights that the step does not
        read do not count; see `memory.bytes_passed_over`.
        """
        shards = self.engine.runner.plan.shards
        only_shard = shards[0] if len(shards) == 1 else None
        n_unread = bytes_passed_over(self.args, batch, self.precision, only_shard)
        return sum(self.statistics.weight_bytes) - n_unread

    def rank_weight_bytes_per_step(self, batch: int) -> list[int]:
        """Bytes of weights that each rank reads to decode a step of `batch` sequences."""
        shards = self.engine.runner.plan.shards
        return [
            n_bytes - bytes_passed_over(self.args, batch, self.precision, shard)
            for n_bytes, shard in zip(self.statistics.weight_bytes, shards, strict=True)
        ]

    def close(self) -> None:
        """End the other ranks and the processes of the tokenizer, and free the model's memory.

        May be called twice, and after an error. LLMs left open are closed at exit. No-op in a
        process made by `os.fork`.
        """
        if self.ranks.is_forked:
            return
        self._tp_size = self.tp_size
        if self._lock.is_held_or_awaited_here:
            self._end()
        else:
            with self._lock.acquired():
                self._end()
        self.input_processor.close()

    def __repr__(self) -> str:
        if not self._end.alive:
            return f"LLM({self._model!r}, closed)"
        return (
            f"LLM({self._model!r}, tp_size={self.tp_size}, dtype={self.dtype!r}, "
            f"quant={self.quant!r}, device={str(self.device)!r})"
        )

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @contextmanager
    def unattended(self) -> Iterator[None]:
        """A context in which this program does not wait for a person between two steps.

        In the context, the other ranks fail if rank 0 starts no step within the time limit of a
        step, except between ranks that are connected through gloo alone. Outside of the context,
        they wait for the next step without a limit. Has no effect with `elastic`.
        """
        self._require_usable()
        if self.ranks.setup.config.elastic:  # the group, and its communicator, may change
            yield
            return
        context = ExitStack()
        try:
            with self._exclusive():
                context.enter_context(self.engine.comm.computing())
            yield
        finally:
            if not self.ranks.is_forked:
                with self._lock.acquired(), _delayed_signals(self.ranks.setup.size > 1):
                    context.close()

    def lend(self) -> None:
        """Let another object step the engine, and refuse all calls until `take_back`.

        Waits for the step or call that runs in another thread.

        Raises: UsageError if it is lent already, has unfinished requests, scores texts in another
        thread, or is closed.
        """
        with self._exclusive():
            if len(self._loop):
                raise UsageError("this LLM has unfinished requests; finish or close their streams")
            if self.engine.held_adapters:
                raise UsageError("another thread scores texts with this LLM; wait until it ends")
            self._is_lent = True

    def take_back(self) -> None:
        """Take calls again, after `lend`."""
        self._is_lent = False

    def _require_usable(self) -> None:
        """Raises: UsageError if the LLM is closed, lent, or of the parent process."""
        if not self._end.alive:
            raise UsageError("this LLM is closed; create a new one")
        self.ranks.require_not_forked()
        if self._is_lent:
            raise UsageError("an AsyncLLM uses this LLM; close the AsyncLLM first")

    @contextmanager
    def _exclusive(self, is_needless: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """A context in which only this thread uses the engine, as `FairLock.acquired`.

        Signals are handled at the end of the context: an exception from a handler within a
        collective would break the group.

        Raises: UsageError as `_require_usable`.
        """
        self._require_usable()
        with self._lock.acquired(is_needless):
            self._require_usable()
            use_device(self.device)
            with _delayed_signals(self.ranks.setup.size > 1):
                yield

    def _await_output(self, call: "_GenerateCall") -> None:
        """Step until the inbox of a call has an output, unless steps of other threads fill it."""
        if call.inbox:
            return

        def is_needless() -> bool:
            return bool(call.inbox) or not call.unfinished

        with self._exclusive(is_needless):
            if is_needless():
                return
            if not self._is_running(call):
                raise RuntimeError("these requests ended when another run failed; run them again")
            self._step_for_all()

    def _abandon(self, call: "_GenerateCall") -> None:
        """End the unfinished requests of a call, if they are still in the engine."""
        if not self._end.alive or self.ranks.is_forked or not self._is_running(call):
            return
        if self._lock.is_held_or_awaited_here:
            # The garbage collector closes a stream during a step, so a later step ends them.
            self._cancel(call)
            return
        with self._lock.acquired(), _delayed_signals(self.ranks.setup.size > 1):
            if self._end.alive:
                self._cancel(call)
            while self._end.alive and self._is_running(call):
                self._step_for_all()

    def _is_running(self, call: "_GenerateCall") -> bool:
        """Whether some of a call's requests are in the engine."""
        return any((call, number) in self._loop for number in tuple(call.unfinished))

    def _cancel(self, call: "_GenerateCall") -> None:
        for number in tuple(call.unfinished):
            self._loop.cancel((call, number), "interrupted")

    def _step_for_all(self) -> None:
        """Run one step and put each output into the inbox of its call."""
        try:
            result = self._loop.step()
        except BaseException:
            self._loop.drop_all()
            raise
        for (call, number), output in result.outputs:
            call.inbox.append(output)
            if output.is_last:
                call.unfinished.remove(number)
        for (call, number), error in result.refused:
            call.unfinished.remove(number)
            call.refused = error
        self.statistics.weight_bytes = self.ranks.setup.weight_bytes


@contextmanager
def _delayed_signals(is_needed: bool) -> Iterator[None]:
    """Delays the handlers of _DELAYED_SIGNALS until the context ends, in the main thread."""
    handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
    if is_needed and threading.current_thread() is threading.main_thread():
        found = {number: signal.getsignal(number) for number in _DELAYED_SIGNALS}
        handlers = {number: handler for number, handler in found.items() if callable(handler)}
    received: dict[int, FrameType | None] = {}
    try:
        for number in handlers:
            signal.signal(number, received.__setitem__)
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    for number, frame in received.items():
        handlers[number](number, frame)


@dataclass(eq=False)
class _GenerateCall:
    """One call of `run`.

    Args:
        unfinished: the numbers of the unfinished requests.
        inbox: outputs that are not yielded yet.
        refused: the error of a request that no longer fits after the loss of a rank.
    """

    unfinished: set[int] = field(default_factory=set)
    inbox: deque[StepOutput] = field(default_factory=deque)
    refused: UsageError | None = None
    start_s: float = field(default_factory=time.monotonic)


def params_of(params: _Params, sampling_params: _Params) -> _Params:
    """The sampling parameters of a call, from either of the two arguments.

    Raises: UsageError if both are given.
    """
    if params is not None and sampling_params is not None:
        raise UsageError("params and sampling_params are two names of one argument; give one")
    return sampling_params if params is None else params
