"""The class that users hold: a model on one rank or many, prompts in, completions out.

In a plain process the model runs on one rank. In a process that torchrun started it joins the
other ranks: rank 0 leads, and what it is asked goes to all ranks as bytes. It does not know flags
or terminals.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import msgspec
import torch

from parallel_llama.capacity import agree_on_capacity, check_one_block_fits
from parallel_llama.checkpoint import (
    Checkpoint,
    meta_vocab_size,
    open_checkpoint,
    random_checkpoint,
    require_whole,
)
from parallel_llama.config import ModelArgs, load_model_args
from parallel_llama.engine import BLOCK_SIZE, MAX_DRAFTS, Engine, Progress
from parallel_llama.errors import CheckpointError, DamagedWeights, NumericalError, UsageError
from parallel_llama.intake import Intake, Prompt
from parallel_llama.machine import Machine, measure
from parallel_llama.model_files import ModelFiles, find_model
from parallel_llama.parallel import broadcast_bytes, join
from parallel_llama.parallel.launch import world
from parallel_llama.plan import default_dtype, make_plan, weight_bytes
from parallel_llama.request import Completion, Request, SamplingParams
from parallel_llama.runner import Piece, Runner
from parallel_llama.sampling import score

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

_SCORED_AT_ONCE = 256  # positions whose logits exist at once
_ANSWER_COMPLETIONS = 4096  # in one message

# What rank 0 asks of the others.
_STEP, _SCORE, _MEASURE, _ANSWER, _CLOSE = b"e", b"s", b"m", b"a", b"c"


@dataclass
class Statistics:
    """What the last call took. Units: seconds, tokens, bytes on each rank."""

    weight_bytes: tuple[int, ...]
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
    """A model, ready to generate.

    `model` is what `--model` takes: a folder, a .gguf file, or a name. `dtype` is one of float32,
    bfloat16, float16, float64; None takes the device's default. `random_weights` fills a named
    shape with random numbers from that seed. `verify` compares every file with the folder's
    manifest before any is read, the files dealt to the ranks. `kv_cache_bytes` limits each rank's
    KV cache, which otherwise takes a part of the memory at hand; `block_size` is its unit in
    tokens. `max_drafts` limits the tokens that are guessed from earlier text and verified in one
    step, 0 for none: they change how fast tokens come, not which. `intake` is the model's text
    side where the caller has made it already.

    Raises: UsageError for what cannot be done, CheckpointError for files that cannot be used
    (before any weight is read), DamagedWeights for what only reading them shows.
    Collective: the constructor and every method that runs the model, under torchrun.
    """

    def __init__(
        self,
        model: str = "smollm2",
        *,
        dtype: str | None = None,
        device: str = "auto",
        max_seq_len: int | None = None,
        seed: int = 0,
        random_weights: int | None = None,
        verify: bool = False,
        kv_cache_bytes: int | None = None,
        block_size: int = BLOCK_SIZE,
        max_drafts: int = MAX_DRAFTS,
        intake: Intake | None = None,
        on_bytes: Callable[[int], None] = lambda _: None,
    ) -> None:
        started = time.monotonic()
        if verify:
            rank, size = world()
            where = model if intake is None else str(intake.files.path)
            require_whole(where, part=slice(rank, None, size))
        if intake is None:
            files = find_model(model)
            args = load_model_args(files, meta_vocab_size)
            intake = Intake(files, args, max_seq_len=max_seq_len, seed=seed)
        self.intake, self.args = intake, intake.args
        kind = resolve_device(device)
        dtype_name = dtype or default_dtype(self.args, kind)
        if dtype_name not in DTYPES:
            raise UsageError(f"dtype={dtype_name!r}: use one of {', '.join(DTYPES)}")
        try:
            checkpoint = open_weights(intake.files, self.args, random_weights)
        except CheckpointError as error:
            if verify:  # in a file that another rank is verifying
                raise DamagedWeights(str(error)) from error
            raise
        self.comm = join(kind)
        self.rank, self.tp_size = self.comm.rank, self.comm.size
        plan = make_plan(self.args, self.tp_size)
        torch_dtype = DTYPES[dtype_name]
        check_one_block_fits(
            self.args, plan, dtype=torch_dtype, block_size=block_size, n_bytes=kv_cache_bytes
        )
        width = torch_dtype.itemsize
        self.statistics = Statistics(
            tuple(weight_bytes(self.args, share, width) for share in plan.shares)
        )
        self.runner = Runner.load(
            self.args,
            checkpoint,
            plan,
            self.comm,
            dtype=torch_dtype,
            device=torch.device(kind),
            on_bytes=on_bytes,
        )
        checkpoint.close()
        capacity = agree_on_capacity(
            self.args,
            plan,
            self.comm,
            dtype=self.runner.dtype,
            device=self.runner.device,
            block_size=block_size,
            n_bytes=kv_cache_bytes,
        )
        writes = self.rank == 0 and intake.has_tokenizer
        self.engine = Engine(
            self.runner,
            capacity,
            intake.tokenizer if writes else None,
            intake.grammars if writes else None,
            max_drafts=max_drafts,
        )
        self._runs: dict[int, _Run] = {}
        self._closed = False
        self.comm.barrier()
        self.statistics.load_s = time.monotonic() - started

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Complete all prompts, in one ragged batch; texts, token ids and chats may be mixed.

        Returns: completions in the order of the prompts, the choices of each in their order.

        Collective: under torchrun every rank calls it, rank 0's arguments count, and every rank
        gets the completions.
        """
        if self.rank:
            return self._follow_until_answer()
        with self._answering() as completions:
            for progress in self.run(self.intake.requests(prompts, params)):
                if progress.completion is not None:
                    completions.append(progress.completion)
            completions.sort(key=lambda each: (each.index, each.choice))
        return completions

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[str]:
        """Complete one prompt and give its text piece by piece, as it comes.

        Raises: UsageError for more than one choice, whose texts would mix.
        Collective: the other ranks serve in `follow`.
        """
        requests = self.intake.requests([prompt], params)
        if requests[0].params.n > 1:
            raise UsageError(f"n={requests[0].params.n}: a stream is one text; use generate")
        for progress in self.run(requests):
            yield progress.text

    def run(
        self, requests: Sequence[Request], interrupted: Callable[[], bool] = lambda: False
    ) -> Iterator[Progress]:
        """Run requests that the intake made, and tell of every step of each; for rank 0.

        Where `interrupted` says so, or the caller stops iterating, all of them end. Several runs
        at once share the batch: each step of one is a step of all.

        Raises: UsageError, before any of them runs, if a request can never fit into the cache.
        Collective: like `stream`.
        """
        run = _Run()
        self.statistics.begin()
        try:
            self._submit(run, requests)
            while run.open or run.inbox:
                if interrupted():
                    self._cancel(run)
                if not run.inbox:
                    self._require_alive(run)
                    self._deliver(self.step())
                while run.inbox:
                    progress = run.inbox.popleft()
                    self.statistics.count(len(progress.tokens), run.seconds())
                    yield progress
        except BaseException:  # the caller wants no more, or fails: the other ranks must hear of it
            self._abandon(run)
            raise
        self.rest()

    def step(self) -> list[Progress]:
        """One step of the engine, for rank 0; the other ranks come in from `follow`.

        Raises: NumericalError like `Engine.step`, with the other ranks at rest.
        Collective: like `Engine.step`.
        """
        if self.engine.paused:
            self._tell(_STEP)
        try:
            return self.engine.step()
        except BaseException:
            self._runs.clear()
            if self.engine.idle:  # it has begun anew, and the other ranks with it
                self.rest()
            raise

    def rest(self) -> None:
        """Let the other ranks wait without work, however long; for rank 0."""
        if not self.engine.paused:
            self.engine.pause()

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Natural-log probabilities of every token after the first, given those before it.

        Returns: on ranks above 0 nothing.

        Raises: UsageError for a sequence that cannot be scored, or for which the cache has no room.
        Collective: like `generate`.
        """
        if self.rank:
            self._follow_until_answer()
            return []
        with self._answering():
            for index, tokens in enumerate(sequences):
                try:
                    self.intake.check_sequence(tokens)
                    self._require_room(len(tokens))
                except UsageError as error:
                    raise UsageError(f"sequence {index}: {error}") from error
            self._tell(_SCORE, msgspec.msgpack.encode(sequences))
            return self._score(sequences)

    def machine(self) -> Machine:
        """How fast the ranks read their memory, and how much of it they have held; for rank 0.

        Collective: like `stream`.
        """
        self._tell(_MEASURE)
        return measure(self.comm, self.runner.device)

    @property
    def weight_bytes_per_step(self) -> int:
        """Bytes of weights that all ranks together read to decode one step of any batch.

        An embedding that is not the head too is looked up, not read.
        """
        looked_up = 0
        if not self.args.tied_embeddings:
            looked_up = self.args.vocab_size * self.args.dim * self.runner.dtype.itemsize
        return sum(self.statistics.weight_bytes) - looked_up

    @property
    def dtype(self) -> str:
        return str(self.runner.dtype).removeprefix("torch.")

    def follow(self) -> None:
        """Serve rank 0's calls until it closes; for ranks above 0."""
        while not self._closed:
            self._follow_one()

    def close(self) -> None:
        """End the group; ranks that follow return from `follow`. It can be called twice."""
        if self.rank == 0 and not self._closed:
            self._tell(_CLOSE)
        self._closed = True
        self.comm.close()

    def _submit(self, run: "_Run", requests: Sequence[Request]) -> None:
        for request in requests:
            self.engine.check(request)
        for request in requests:
            ticket = self.engine.submit(request)
            self._runs[ticket] = run
            run.open.add(ticket)

    def _abandon(self, run: "_Run") -> None:
        """End what is left of a run; where a step has failed there is nothing left."""
        if not self._is_alive(run) or self._closed:
            return
        self._cancel(run)
        while self._is_alive(run):
            self._deliver(self.step())
        self.rest()

    def _is_alive(self, run: "_Run") -> bool:
        """Whether some of its requests are still in the engine."""
        return not run.open.isdisjoint(self._runs)

    def _require_alive(self, run: "_Run") -> None:
        if not self._is_alive(run):
            raise RuntimeError("this run's requests ended when another run failed; ask again")

    def _cancel(self, run: "_Run") -> None:
        for ticket in run.open:
            self.engine.cancel(ticket, "interrupted")

    def _deliver(self, progress: Sequence[Progress]) -> None:
        """Put each piece where the run that asked for it finds it."""
        for each in progress:
            self._runs[each.ticket].put(each)
            if each.is_last:
                del self._runs[each.ticket]

    def _require_room(self, n_tokens: int) -> None:
        pool = self.engine.pool
        room = (pool.n_free + pool.n_cached) * pool.block_size
        if n_tokens > room:
            raise UsageError(
                f"{n_tokens} tokens and the KV cache has room for {room}; raise kv_cache_bytes"
            )

    def _score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Every rank's part of `score`: prompts in pieces, logits a few rows at a time."""
        results = []
        pool = self.engine.pool
        for tokens in sequences:
            blocks = pool.take(-(-len(tokens) // pool.block_size))
            try:
                results.append(self._score_one(tokens, blocks))
            finally:
                pool.release(blocks)
        return results

    def _score_one(self, tokens: Sequence[int], blocks: Sequence[int]) -> list[float]:
        logprobs: list[float] = []
        for start in range(0, len(tokens) - 1, _SCORED_AT_ONCE):
            piece = tuple(tokens[start : min(start + _SCORED_AT_ONCE, len(tokens) - 1)])
            hidden = self.runner.forward([Piece(piece, start, blocks, len(tokens))])
            targets = torch.tensor(
                tokens[start + 1 : start + 1 + len(piece)], device=self.runner.device
            )
            logits = self.runner.logits(hidden)
            logprobs += score(logits, self.runner.share.vocab, targets, self.comm).tolist()
        return logprobs

    @contextmanager
    def _answering(self) -> Iterator[list[Completion]]:
        """Tell the ranks that made the same call what came of it: completions, or an error."""
        completions: list[Completion] = []
        try:
            yield completions
        except (UsageError, NumericalError) as error:
            self._tell(_ANSWER, _Answer([], type(error).__name__, str(error)).encode())
            raise
        for start in range(0, max(1, len(completions)), _ANSWER_COMPLETIONS):
            part = completions[start : start + _ANSWER_COMPLETIONS]
            is_last = start + _ANSWER_COMPLETIONS >= len(completions)
            self._tell(_ANSWER, _Answer(part, is_last=is_last).encode())

    def _tell(self, verb: bytes, body: bytes = b"") -> None:
        if self.tp_size > 1:
            self.rest()
            self.comm.ring()
            broadcast_bytes(self.comm, verb + body)

    def _follow_until_answer(self) -> list[Completion]:
        """Serve rank 0 until it says what came of the call that this rank makes too."""
        completions: list[Completion] = []
        while not self._closed:
            answer = self._follow_one()
            if answer is not None:
                answer.raise_error()
                completions += answer.completions
                if answer.is_last:
                    break
        return completions

    def _follow_one(self) -> "_Answer | None":
        """Wait for rank 0's next call and do this rank's part of it; its answer, if it is one."""
        self.comm.wait_for_ring()
        message = broadcast_bytes(self.comm, None)
        verb, body = message[:1], message[1:]
        if verb == _ANSWER:
            return msgspec.msgpack.decode(body, type=_Answer)
        if verb == _CLOSE:
            self._closed = True
        elif verb == _MEASURE:
            measure(self.comm, self.runner.device)
        elif verb == _SCORE:
            with suppress(NumericalError):  # rank 0 has it too, and is the one to tell
                self._score(msgspec.msgpack.decode(body, type=list[list[int]]))
        else:
            self._follow_steps()
        return None

    def _follow_steps(self) -> None:
        """Steps of the engine, one at least, until rank 0 lets this rank rest."""
        while True:
            with suppress(NumericalError):  # as above
                self.engine.step()
            if self.engine.paused:
                return


@dataclass(frozen=True)
class _Answer:
    """What came of a call that all ranks make; long ones go in parts."""

    completions: list[Completion]
    error: str = ""  # UsageError or NumericalError
    text: str = ""
    is_last: bool = True

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    def raise_error(self) -> None:
        if self.error:
            raise (UsageError if self.error == UsageError.__name__ else NumericalError)(self.text)


@dataclass(eq=False)
class _Run:
    """The requests of one call of `run`: those that have not ended, and what came for them."""

    open: set[int] = field(default_factory=set)  # tickets
    inbox: deque[Progress] = field(default_factory=deque)
    began_s: float = field(default_factory=time.monotonic)

    def seconds(self) -> float:
        return time.monotonic() - self.began_s

    def put(self, progress: Progress) -> None:
        self.inbox.append(progress)
        if progress.is_last:
            self.open.remove(progress.ticket)


def open_weights(files: ModelFiles, args: ModelArgs, random_weights: int | None) -> Checkpoint:
    """The model's checkpoint, its structure checked, before any weight is read."""
    if random_weights is not None:
        return random_checkpoint(args, random_weights)
    files.require_weights()
    checkpoint = open_checkpoint(files, args)
    checkpoint.check(args)
    return checkpoint


def resolve_device(device: str) -> str:
    """'cpu' or 'cuda' for a request of auto, cpu or cuda."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("device=cuda: torch sees no CUDA device here; use --device cpu")
    if device not in ("cpu", "cuda"):
        raise UsageError(f"device={device!r}: use auto, cpu or cuda")
    return device
