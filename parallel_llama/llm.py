"""The class that users hold: a model on one rank or many, prompts in, completions out.

Where the model runs on several ranks, rank 0 runs the user's program and the others serve it: ranks
that the LLM starts itself on this host, or those that torchrun has started. It does not know flags
or terminals.
"""

import logging
import signal
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch

from parallel_llama.checkpoint import (
    Checkpoint,
    meta_vocab_size,
    open_checkpoint,
    random_checkpoint,
    require_whole,
)
from parallel_llama.checkpoint.ahead import started_thread
from parallel_llama.config import ModelArgs, default_quant, load_model_args, stored_formats
from parallel_llama.engine import rank_calls
from parallel_llama.engine.block_group import STEP_TOKENS
from parallel_llama.engine.engine import BLOCK_SIZE, MAX_DRAFTS, Engine
from parallel_llama.engine.free_memory import give_back_memory
from parallel_llama.engine.input_processor import InputProcessor
from parallel_llama.engine.kv_capacity import CacheSize, MemoryFor, memory_of
from parallel_llama.engine.loop import EngineLoop
from parallel_llama.engine.machine import Machine, measure, peak_cuda_bytes
from parallel_llama.engine.model_runner import ModelRunner
from parallel_llama.engine.outputs import StepOutput
from parallel_llama.engine.prompts import Prompt, Prompts, as_prompts
from parallel_llama.engine.rank_group import RankGroup, resolve_size, shared_facts
from parallel_llama.engine.scheduler import MAX_RUNNING
from parallel_llama.errors import CheckpointError, DamagedWeights, UsageError
from parallel_llama.files.model_files import ModelFiles, find_model
from parallel_llama.parallel.collectives import Communicator
from parallel_llama.parallel.current_device import own_device, use_device, visible_cards
from parallel_llama.parallel.device_choice import DeviceKind, choose_device, too_few
from parallel_llama.parallel.place import is_started_as_rank, local_world, world
from parallel_llama.parallel.slice import Slice
from parallel_llama.plan import (
    KVSplit,
    ShardPlan,
    bytes_passed_over,
    default_dtype,
    kv_format,
    make_plan,
    make_precision,
    values_by_form,
    weight_bytes,
    working_bytes,
)
from parallel_llama.request import Completion, Request, SamplingParams, with_outputs
from parallel_llama.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_Params = SamplingParams | Sequence[SamplingParams] | None


@dataclass
class Statistics:
    """What the last call took. Units: seconds, tokens, bytes on each rank.

    `cuda_bytes` are those that a model has taken of each card when it is ready.
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
        """Note tokens that came this long after the beginning."""
        self.total_s = seconds
        if n_tokens:
            self.n_new_tokens += n_tokens
            self.first_token_s = self.first_token_s or seconds


class LLM:
    """A model, ready to generate; `with LLM(..) as llm` closes it at the end.

    `model` is what `--model` takes: a folder, a .gguf file, or a name. `tp_size` is the number of
    ranks, of which the others are started on this host and end with this one;
    `tensor_parallel_size`, vLLM's name for it, is taken too. Under torchrun the ranks are there
    already: rank 0 runs the program, and in every other process the constructor serves rank 0 until
    that closes, and ends the process then.

    `dtype` is one of float32, bfloat16, float16, float64; None takes the device's default. A CPU
    keeps weights in 16 bits and computes in float32. With `quant` int8 or int4 the matrices become
    small integers with a scale for every 32 of them, when they are read, and with fp8 floats of 8
    bits; with `quant` stored they stay as the files have them, and with none they are decoded. A
    folder that is quantised stays so by default, unlike a GGUF file.
    `max_seq_len` lowers the model's context. Requests without a seed of their own get one from
    `seed`, and without that a new one in every call. `random_weights` fills a named shape with
    random numbers from that seed. With a `slice_of` (R, N), one rank alone holds what rank R of N
    would, filled with random numbers, and waits for no other: how long it takes means something,
    and its tokens do not. `verify` compares every file with the folder's manifest before any is
    read, the files dealt to the ranks. `kv_cache_bytes` limits each rank's KV cache, which
    otherwise takes a part of the memory at hand; `block_size` is its unit in tokens, and
    `kv_cache_dtype` what it keeps numbers in: bfloat16, int8, fp8, or auto for `dtype`.
    With a `kv_split` by sequence ranks share out the cache's tokens where several would hold the
    same heads; with `attention_sinks` so many first tokens stay visible beside a sliding window,
    and a sequence may grow beyond the context without end.
    `max_drafts` limits the tokens that are guessed from earlier text and verified in one step, 0
    for none: they change how fast tokens come, not which. No rank waits for another longer than
    `timeout_s`; by default it is 30 s in a step and 60 s at the start.

    Whoever has made the model's text side already gives it as `input_processor`; `facts` are more
    that must be the same on all ranks. `on_bytes` hears of weights as they are read, `on_wait` of
    the ranks that are awaited, `on_graph` of decode steps as they are recorded, by their rows.

    Raises: UsageError for what cannot be done, CheckpointError for files that cannot be used
    (before any weight is read), DamagedWeights for what only reading them shows, RankError for a
    rank that does not come, fails, or is about to do something else.
    Collective: the constructor, under torchrun, with the same arguments on all ranks.
    """

    def __init__(
        self,
        model: str = "smollm2",
        *,
        tp_size: int | None = None,
        dtype: str | None = None,
        quant: str | None = None,
        device: str = "auto",
        max_seq_len: int | None = None,
        seed: int | None = None,
        random_weights: int | None = None,
        slice_of: tuple[int, int] | None = None,
        verify: bool = False,
        kv_cache_bytes: int | None = None,
        kv_cache_dtype: str = "auto",
        kv_split: KVSplit = "heads",
        attention_sinks: int = 0,
        block_size: int = BLOCK_SIZE,
        max_drafts: int = MAX_DRAFTS,
        timeout_s: float | None = None,
        tensor_parallel_size: int | None = None,
        input_processor: InputProcessor | None = None,
        facts: Mapping[str, str] | None = None,
        on_bytes: Callable[[int], None] = lambda _: None,
        on_wait: Callable[[Sequence[int]], None] = lambda _: None,
        on_graph: Callable[[int], None] = lambda _: None,
    ) -> None:
        started = time.monotonic()
        if slice_of is not None:
            random_weights = random_weights or 0
        settings = {
            "model": model,
            "dtype": dtype,
            "quant": quant,
            "device": device,
            "max_seq_len": max_seq_len,
            "seed": seed,
            "random_weights": random_weights,
            "slice_of": slice_of,
            "verify": verify,
            "kv_cache_bytes": kv_cache_bytes,
            "kv_cache_dtype": kv_cache_dtype,
            "kv_split": kv_split,
            "attention_sinks": attention_sinks,
            "block_size": block_size,
            "max_drafts": max_drafts,
            "timeout_s": timeout_s,
        }
        size = resolve_size(tensor_parallel_size if tp_size is None else tp_size)
        _require_alone(slice_of, size)
        if verify:
            where = model if input_processor is None else str(input_processor.files.path)
            require_whole(where, part=slice(world()[0], None, size))
        if input_processor is None:
            files = find_model(model)
            args = load_model_args(files, meta_vocab_size)
            input_processor = InputProcessor(
                files, args, max_seq_len=max_seq_len, seed=seed, attention_sinks=attention_sinks
            )
        self._model = model
        self.input_processor, self.args = input_processor, input_processor.args
        local_rank, n_local_ranks = local_world(size)
        kind = _device_kind(device, n_local_ranks)
        self.device = own_device(kind, local_rank)
        self.dtype = dtype or default_dtype(self.args, kind)
        files = input_processor.files
        has_own = random_weights is None  # weights in its files
        self.quant = quant or (default_quant(files, self.args) if has_own else "none")
        is_stored = has_own and self.quant == "stored"
        stored = stored_formats(files, self.args) if is_stored else None
        self.precision = make_precision(self.args, self.dtype, kind, self.quant, stored)
        played, n_shares = slice_of or (0, size)
        group_size = self.precision.group_size
        plan = make_plan(self.args, n_shares, quant_group=group_size, kv_split=kv_split)
        if slice_of is not None:
            plan = plan.alone(played)
        self.kv_format = kv_format(kv_cache_dtype, self.dtype)
        longest = input_processor.max_seq_len
        step_tokens = STEP_TOKENS[kind]
        working = [
            working_bytes(self.args, share, self.precision, step_tokens, MAX_RUNNING, kind)
            for share in plan.shares
            if kind == "cuda"
        ]
        cache_size = CacheSize(
            self.args,
            plan,
            self.kv_format,
            block_size,
            kv_cache_bytes,
            longest,
            working,
            step_tokens,
        )
        values = values_by_form(self.args, self.precision)
        weights = tuple(weight_bytes(share, values) for share in plan.shares)
        drawn_on = torch.device("cpu") if slice_of is None else self.device
        checkpoint = _open_weights(files, self.args, random_weights, verify, drawn_on)
        settings["max_seq_len"] = input_processor.max_seq_len
        shared = shared_facts(settings, input_processor.files, self.args, plan, kind)
        self.ranks = RankGroup(settings, size)
        self._end = weakref.finalize(self, self.ranks.end)
        try:
            with self.ranks.explaining():
                comm = self.ranks.join(self.device, {**(facts or {}), **shared}, timeout_s, on_wait)
                self._present = comm  # the ranks that are there
                if slice_of is not None:
                    comm = Slice(n_shares)
                self.rank, self.tp_size = comm.rank, comm.size
                if kind == "cuda":
                    cache_size.require_room(self._present, memory_of(self.device), weights)
                runner = self._load(checkpoint, plan, comm, self.device, on_bytes)
                self.engine = self.ranks.engine = self._engine(runner, cache_size, max_drafts)
                self._record(runner, on_graph)
                cuda_bytes = self._cuda_bytes(runner)
        except BaseException:
            self._end()
            raise
        input_processor.n_cache_tokens = self.engine.capacity.longest(longest)
        self.statistics = Statistics(weights, cuda_bytes, load_s=time.monotonic() - started)
        self._loop: EngineLoop[tuple[_GenerateCall, int]] = EngineLoop(self.ranks)
        if self.rank > 0:
            rank_calls.serve_rank(self.engine)
            self.close()
            raise SystemExit(0)

    def generate(
        self,
        prompts: Prompts,
        params: _Params = None,
        *,
        sampling_params: _Params = None,
    ) -> list[Completion]:
        """Complete a prompt or a list of them, in one ragged batch.

        A prompt is a text, a list of token ids, a conversation (a list of messages), or vLLM's
        {"prompt": ..} and {"prompt_token_ids": ..}; they may be mixed. `sampling_params` is vLLM's
        name of `params`.

        Returns: completions in the order of the prompts, the choices of each in their order. With
            one choice for each prompt the list reads as vLLM's: `.prompt`, `.outputs[0].text`.
        Raises: UsageError naming what cannot be done, before anything runs; NumericalError.
        """
        given = as_prompts(prompts)
        requests = self.input_processor.requests(given, _either(params, sampling_params))
        choices: list[list[Completion]] = [[] for _ in requests]
        for output in self.run(requests):
            if output.completion is not None:
                choices[output.completion.index].append(output.completion)
        found = []
        for prompt, request, own in zip(given, requests, choices, strict=True):
            own.sort(key=lambda each: each.choice)
            found += with_outputs(own, self.input_processor.text_of(prompt, request), request)
        return found

    def chat(
        self,
        messages: Any,
        params: _Params = None,
        *,
        sampling_params: _Params = None,
        tools: Sequence[Mapping[str, Any]] = (),
        documents: Sequence[Mapping[str, Any]] = (),
        template_vars: Mapping[str, Any] | None = None,
    ) -> list[Completion]:
        """Answer a conversation, or each of a list of them, through the model's chat template.

        A conversation is a list of messages, {"role": .., "content": ..}. `tools` and `documents`
        go to the template, as do `template_vars` under their names.

        Returns, Raises: as `generate`.
        """
        chats = self.input_processor.chats(messages, tools, documents, template_vars or {})
        return self.generate(chats, params, sampling_params=sampling_params)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        sampling_params: SamplingParams | None = None,
    ) -> Iterator[str]:
        """Complete one prompt and give its text piece by piece, as it comes.

        Raises: UsageError for more than one choice, whose texts would mix.
        """
        requests = self.input_processor.requests([prompt], _either(params, sampling_params))
        if requests[0].params.n > 1:
            raise UsageError(f"n={requests[0].params.n}: a stream is one text; use generate")
        for output in self.run(requests):
            yield output.text

    def run(
        self, requests: Sequence[Request], interrupted: Callable[[], bool] = lambda: False
    ) -> Generator[StepOutput, None, None]:
        """Run requests of the input processor; yields the output of each step of each request.

        Several calls at once share the batch: each step of one call is a step of all.

        Args:
            interrupted: asked before each step; once it returns true, all requests end. They also
                end when the caller stops iterating.

        Raises: UsageError, before any request runs, if one can never fit into the cache.
        """
        call = _GenerateCall()
        self.statistics.begin()
        try:
            self._require_open()
            for request in requests:
                self.engine.check(request)
            for number, request in enumerate(requests):
                self._loop.submit((call, number), request)
                call.unfinished.add(number)
            while call.unfinished or call.inbox:
                if interrupted():
                    self._cancel(call)
                if not call.inbox:
                    self._require_open()
                    if not self._is_running(call):
                        raise RuntimeError(
                            "these requests ended when another run failed; run them again"
                        )
                    self._step_for_all()
                while call.inbox:
                    output = call.inbox.popleft()
                    self.statistics.count(len(output.tokens), time.monotonic() - call.began_s)
                    yield output
        except BaseException:  # the caller has left early or failed: its requests must end
            self._abandon(call)
            raise

    def score(
        self,
        sequences: Sequence[Sequence[int]],
        stride: int | None = None,
        on_tokens: Callable[[int], None] = lambda _: None,
    ) -> list[list[float]]:
        """Natural-log probabilities of every token after the first, given those before it.

        A sequence longer than the context is scored in windows of the context's length, each
        `stride` tokens after the one before; by default that is half the context. A token is given
        as many of those before it as are in the first window that holds it.

        Args:
            sequences: token ids.
            stride: 1 to one less than the context. A small stride gives tokens more context and
                takes more time.
            on_tokens: called after each window with the number of tokens that it added.

        Raises: UsageError for a sequence that cannot be scored, or for which the cache has no room.
        """
        self._require_open()
        longest = self.input_processor.longest
        stride = max(longest // 2, 1) if stride is None else stride
        if not 1 <= stride < max(longest, 2):
            raise UsageError(
                f"a stride of {stride} and a context of {longest} tokens; use 1 to {longest - 1}"
            )
        for index, tokens in enumerate(sequences):
            try:
                self.input_processor.check_sequence(tokens)
                n_tokens = min(len(tokens), longest)
                for group in self.engine.scheduler.groups:
                    n_takeable = group.pool.n_takeable()
                    if group.n_held(n_tokens) > n_takeable:
                        raise UsageError(
                            f"{n_tokens} tokens and the KV cache has room for "
                            f"{n_takeable * group.pool.block_size}; raise kv_cache_bytes"
                        )
            except UsageError as error:
                raise UsageError(f"sequence {index}: {error}") from error
        return [self._score(tokens, longest, stride, on_tokens) for tokens in sequences]

    def _score(
        self, tokens: Sequence[int], longest: int, stride: int, on_tokens: Callable[[int], None]
    ) -> list[float]:
        logprobs: list[float] = []
        n_done = 0
        for window in rank_calls.windows(len(tokens), longest, stride):
            with self._whole_step():
                scored = rank_calls.score_sequence(self.engine, tokens[window.start : window.stop])
            logprobs += scored[len(logprobs) - window.start :]
            on_tokens(window.stop - n_done)
            n_done = window.stop
        return logprobs

    def machine(self) -> Machine:
        """How fast the ranks read their memory, and how much of it they have held."""
        self._require_open()
        if self._present is not self.engine.comm:
            return measure(self._present, self.engine.runner.device)
        with self._whole_step():
            return rank_calls.measure_machine(self.engine)

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises: UsageError if the model has none.
        """
        return self.input_processor.tokenizer

    def pids(self) -> dict[int, int]:
        """The processes of the ranks that this host runs for this program, by rank."""
        return self.ranks.pids()

    def require_alive(self) -> None:
        """Look whether all ranks are alive, while no step runs; a step finds it out by itself.

        Raises: RankError naming a rank that has died.
        """
        self.ranks.require_alive()

    def weight_bytes_per_step(self, batch: int) -> int:
        """Bytes of weights that all ranks together read to decode one step of so many sequences.

        Of a slice, its own. See `plan.bytes_passed_over` for those that are not read.
        """
        shares = self.engine.runner.plan.shares
        one = shares[0] if len(shares) == 1 else None
        passed_over = bytes_passed_over(self.args, batch, self.precision, one)
        return sum(self.statistics.weight_bytes) - passed_over

    def close(self) -> None:
        """End the other ranks; it can be called twice, and after a fault.

        A program that ends without it closes what it holds.
        """
        self._end()

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

    def _load(
        self,
        checkpoint: Checkpoint,
        plan: ShardPlan,
        comm: Communicator,
        device: torch.device,
        on_bytes: Callable[[int], None],
    ) -> ModelRunner:
        """The model, once all ranks have read their weights, however long that takes."""

        def note(n_bytes: int) -> None:
            comm.pulse()
            on_bytes(n_bytes)

        inputs = self.input_processor
        with closing(checkpoint), started_thread() as thread:
            # Beside the weights: it is another process that does most of it.
            tokenizer = thread.submit(lambda: comm.rank == 0 and inputs.has_tokenizer)
            with MemoryFor("the weights", "use more ranks, or a smaller dtype"):
                runner = ModelRunner.load(
                    self.args,
                    checkpoint,
                    plan,
                    comm,
                    precision=self.precision,
                    device=device,
                    kv_format=self.kv_format,
                    on_bytes=note,
                )
            tokenizer.result()
        give_back_memory()
        comm.barrier()
        return runner

    def _engine(self, runner: ModelRunner, size: CacheSize, max_drafts: int) -> Engine:
        """The engine, once all ranks have their cache."""
        capacity = size.agree(self._present, memory_of(runner.device))
        writes = runner.comm.rank == 0 and self.input_processor.has_tokenizer
        with MemoryFor("the KV cache", "lower kv_cache_bytes"):
            engine = Engine(
                runner,
                capacity,
                self.input_processor.tokenizer if writes else None,
                self.input_processor.grammars if writes else None,
                max_drafts=max_drafts,
            )
        runner.comm.barrier()
        return engine

    def _record(self, runner: ModelRunner, on_graph: Callable[[int], None]) -> None:
        """Record the decode steps where the device can play them back."""

        def note(n_rows: int) -> None:
            runner.comm.pulse()
            on_graph(n_rows)

        if runner.device.type == "cuda":
            with MemoryFor("recorded decode steps", "lower kv_cache_bytes, or use more ranks"):
                runner.record(on_graph=note)
            runner.comm.barrier()

    def _cuda_bytes(self, runner: ModelRunner) -> tuple[int, ...]:
        """What each rank has taken of its card; nothing on the CPU."""
        own = peak_cuda_bytes(runner.device)
        if own is None:
            return ()
        return tuple(self._present.all_gather(torch.tensor(own)).tolist())

    def _require_open(self) -> None:
        if not self._end.alive:
            raise UsageError("this LLM is closed; make another one")

    def _abandon(self, call: "_GenerateCall") -> None:
        """End the unfinished requests of a call, if they are still in the engine."""
        if self._is_running(call) and self._end.alive:
            self._cancel(call)
            while self._is_running(call):
                self._step_for_all()

    def _whole_step(self) -> AbstractContextManager[None]:
        """Holds Ctrl-C back until a step is over: half a collective would be the group's end."""
        use_device(self.device)
        if self.tp_size == 1 or threading.current_thread() is not threading.main_thread():
            return nullcontext()
        handler = signal.getsignal(signal.SIGINT)
        return _held_back(handler) if callable(handler) else nullcontext()

    def _is_running(self, call: "_GenerateCall") -> bool:
        """Whether some of a call's requests are in the engine."""
        return any((call, number) in self._loop for number in call.unfinished)

    def _cancel(self, call: "_GenerateCall") -> None:
        for number in call.unfinished:
            self._loop.cancel((call, number), "interrupted")

    def _step_for_all(self) -> None:
        """Run one step and put each output into the inbox of its call."""
        with self._whole_step():
            try:
                result = self._loop.step()
            except BaseException:
                self._loop.drop_all()
                raise
            for (call, number), output in result.outputs:
                call.inbox.append(output)
                if output.is_last:
                    call.unfinished.remove(number)


@contextmanager
def _held_back(handler: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    """Ctrl-C comes to its handler afterwards."""
    pressed: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda *press: pressed.append(press))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if pressed:
        handler(*pressed[-1])


@dataclass(eq=False)
class _GenerateCall:
    """One call of `run`: its unfinished requests, by number, and outputs not yet yielded."""

    unfinished: set[int] = field(default_factory=set)
    inbox: deque[StepOutput] = field(default_factory=deque)
    began_s: float = field(default_factory=time.monotonic)


def _either(params: _Params, sampling_params: _Params) -> _Params:
    """The settings of a call, under whichever of both names.

    Raises: UsageError where both are given.
    """
    if params is not None and sampling_params is not None:
        raise UsageError("params and sampling_params are two names of one argument; give one")
    return sampling_params if params is None else params


def _require_alone(slice_of: tuple[int, int] | None, size: int) -> None:
    if slice_of is None:
        return
    rank, n_ranks = slice_of
    if not 0 <= rank < n_ranks:
        raise UsageError(f"slice_of={slice_of}: a rank of {n_ranks} is one from 0 on, below that")
    if size > 1 or is_started_as_rank():
        raise UsageError(
            f"slice_of={slice_of} with {size} ranks: a slice runs alone; leave tp_size out"
        )


def _open_weights(
    files: ModelFiles,
    args: ModelArgs,
    random_weights: int | None,
    verify: bool,
    drawn_on: torch.device,
) -> Checkpoint:
    """The model's checkpoint, its structure checked, before any weight is read."""
    if random_weights is not None:
        return random_checkpoint(args, random_weights, drawn_on)
    files.require_weights()
    try:
        checkpoint = open_checkpoint(files, args)
        checkpoint.check(args)
    except CheckpointError as error:
        if verify:  # in a file that another rank is verifying
            raise DamagedWeights(str(error)) from error
        raise
    return checkpoint


def _device_kind(asked: str, n_ranks: int) -> DeviceKind:
    """The device for auto, cpu or cuda of this host's ranks; says so where they get no cards."""
    n_cards = visible_cards()
    kind = choose_device(asked, n_ranks, n_cards)
    if n_cards and asked == "auto" and kind == "cpu" and world()[0] == 0:
        logger.warning("running on the CPU: %s", too_few(n_ranks, n_cards))
    return kind
