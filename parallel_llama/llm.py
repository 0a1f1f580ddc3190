"""The class that users hold: a model on one rank or many, prompts in, completions out.

In a plain process the model runs on one rank. In a process that torchrun started it joins the
other ranks: rank 0 leads, and what it is asked goes to all ranks as bytes. It does not know flags
or terminals.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import torch

from parallel_llama.checkpoint import (
    Checkpoint,
    meta_vocab_size,
    open_checkpoint,
    random_checkpoint,
    require_whole,
)
from parallel_llama.config import ModelArgs, load_model_args
from parallel_llama.engine import Generation, Progress
from parallel_llama.errors import UsageError
from parallel_llama.intake import Intake, Prompt
from parallel_llama.machine import Machine, measure
from parallel_llama.model_files import ModelFiles, find_model
from parallel_llama.parallel import broadcast_bytes, join
from parallel_llama.parallel.launch import world
from parallel_llama.plan import default_dtype, make_plan, weight_bytes
from parallel_llama.request import (
    Completion,
    Request,
    SamplingParams,
    decode_requests,
    encode_requests,
)
from parallel_llama.runner import Piece, Runner
from parallel_llama.sampling import score

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

_SCORE_ROWS = 256  # positions whose logits exist at once


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


class LLM:
    """A model, ready to generate.

    `model` is what `--model` takes: a folder, a .gguf file, or a name. `dtype` is one of float32,
    bfloat16, float16, float64; None takes the device's default. `random_weights` fills a named
    shape with random numbers from that seed. `verify` compares every file with the folder's
    manifest before any is read, the files dealt to the ranks. `intake` is the model's text side
    where the caller has made it already.

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
        checkpoint = open_weights(intake.files, self.args, random_weights)
        self.comm = join(kind)
        self.rank, self.tp_size = self.comm.rank, self.comm.size
        plan = make_plan(self.args, self.tp_size)
        width = DTYPES[dtype_name].itemsize
        self.statistics = Statistics(
            tuple(weight_bytes(self.args, share, width) for share in plan.shares)
        )
        self.runner = Runner.load(
            self.args,
            checkpoint,
            plan,
            self.comm,
            dtype=DTYPES[dtype_name],
            device=torch.device(kind),
            on_bytes=on_bytes,
        )
        checkpoint.close()
        self.comm.barrier()
        self.statistics.load_s = time.monotonic() - started

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Complete all prompts, in one ragged batch; texts, token ids and chats may be mixed.

        Collective: under torchrun every rank calls it, rank 0's arguments count, and every rank
        gets the completions.
        """
        if self.rank:
            return self._follow_one()
        completions = [
            progress.completion
            for progress in self.run(self.intake.requests(prompts, params))
            if progress.completion is not None
        ]
        return sorted(completions, key=lambda completion: completion.index)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[str]:
        """Complete one prompt and give its text piece by piece, as it comes.

        Collective: the other ranks call `generate`, or serve in `follow`.
        """
        for progress in self.run(self.intake.requests([prompt], params)):
            yield progress.text

    def run(
        self, requests: Sequence[Request], interrupted: Callable[[], bool] = lambda: False
    ) -> Iterator[Progress]:
        """Run requests that the intake made, and tell of every token; for rank 0.

        Where `interrupted` says so, or the caller stops iterating, all of them end.

        Collective: like `stream`.
        """
        self._tell(b"g" + encode_requests(requests))
        completions: list[Completion] = []
        tokenizer = self.intake.tokenizer if self.intake.has_tokenizer else None
        generation = Generation(self.runner, requests, tokenizer)
        try:
            for progress in self._steps(generation, interrupted):
                if progress.completion is not None:
                    completions.append(progress.completion)
                yield progress
        except GeneratorExit:  # the caller wants no more: the other ranks must hear of it
            generation.interrupt()
            while not generation.done:
                completions += [p.completion for p in generation.step() if p.completion]
            raise
        finally:
            if generation.done:
                self._share(completions)

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Natural-log probabilities of every token after the first, given those before it.

        Returns: on ranks above 0 nothing.

        Collective: like `generate`.
        """
        if self.rank:
            self._follow_one()
            return []
        for index, tokens in enumerate(sequences):
            try:
                self.intake.check_sequence(tokens)
            except UsageError as error:
                raise UsageError(f"sequence {index}: {error}") from error
        self._tell(b"s" + msgspec.msgpack.encode(sequences))
        return self._score(sequences)

    def machine(self) -> Machine:
        """How fast the ranks read their memory, and how much of it they have held; for rank 0.

        Collective: like `stream`.
        """
        self._tell(b"m")
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
        while self._follow_one() is not _CLOSED:
            pass

    def close(self) -> None:
        """End the group; ranks that follow return from `follow`."""
        if self.rank == 0 and self.tp_size > 1:
            self._tell(b"c")
        self.comm.close()

    def _steps(self, generation: Generation, interrupted: Callable[[], bool]) -> Iterator[Progress]:
        """Every step's progress, with the statistics kept beside."""
        started = time.monotonic()
        stats = self.statistics
        stats.n_new_tokens, stats.first_token_s, stats.total_s = 0, 0.0, 0.0
        while not generation.done:
            if interrupted():
                generation.interrupt()
            for progress in generation.step():
                stats.total_s = time.monotonic() - started
                if progress.token is not None:
                    stats.n_new_tokens += 1
                    stats.first_token_s = stats.first_token_s or stats.total_s
                yield progress

    def _share(self, completions: list[Completion]) -> None:
        if self.tp_size > 1:
            broadcast_bytes(self.comm, msgspec.msgpack.encode(completions))

    def _score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Every rank's part of `score`: prompts in pieces, logits a few rows at a time."""
        results = []
        for tokens in sequences:
            self.runner.reserve(len(tokens))
            span = self.runner.cache.allocate(len(tokens))
            logprobs: list[float] = []
            for start in range(0, len(tokens) - 1, _SCORE_ROWS):
                piece = tokens[start : min(start + _SCORE_ROWS, len(tokens) - 1)]
                hidden = self.runner.forward([Piece(span, piece, start)])
                targets = torch.tensor(
                    tokens[start + 1 : start + 1 + len(piece)], device=self.runner.device
                )
                logits = self.runner.logits(hidden)
                logprobs += score(logits, self.runner.share.vocab, targets, self.comm).tolist()
            results.append(logprobs)
        return results

    def _tell(self, message: bytes) -> None:
        if self.tp_size > 1:
            self.comm.ring()
            broadcast_bytes(self.comm, message)

    def _follow_one(self) -> list[Completion]:
        """Wait for rank 0's next call and do this rank's part of it."""
        self.comm.wait_for_ring()
        message = broadcast_bytes(self.comm, None)
        verb, body = message[:1], message[1:]
        if verb == b"c":
            return _CLOSED
        if verb == b"m":
            measure(self.comm, self.runner.device)
            return []
        if verb == b"s":
            self._score(msgspec.msgpack.decode(body, type=list[list[int]]))
            return []
        generation = Generation(self.runner, decode_requests(body), None)
        while not generation.done:
            generation.step()
        return msgspec.msgpack.decode(broadcast_bytes(self.comm, None), type=list[Completion])


_CLOSED: list[Completion] = []  # what follow_one returns, by identity, when rank 0 has closed


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
