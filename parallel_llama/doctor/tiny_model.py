"""A built-in model of random weights: every rank computes it alone, then all compute it together.

On the CPU the bits of a result do not depend on the number of ranks, so results are compared bit by
bit: ranks with each other, and with the digests that are recorded here. On GPUs, and on CPUs that
have no kernels, they are compared with a tolerance.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from parallel_llama.checkpoint.byte_ranges import sliced_shape
from parallel_llama.checkpoint.checkpoint import RandomCheckpoint
from parallel_llama.doctor.check import Check
from parallel_llama.doctor.records import HARDWARE, exchange
from parallel_llama.doctor.trace import (
    Difference,
    Repeated,
    Trace,
    Traced,
    TracedSolo,
    describe,
    differing,
    first_difference,
)
from parallel_llama.dtypes import Precision
from parallel_llama.engine.model_runner import ModelRunner
from parallel_llama.engine.step_buffer import Chunk
from parallel_llama.errors import counted, named_ranks, ranks_do
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.families.weights import Param
from parallel_llama.ops import Scores, TorchOps
from parallel_llama.ops.cpu.jit import computes, this_machine
from parallel_llama.parallel.collectives import Communicator
from parallel_llama.plan import make_plan

# Heads as in SmolLM2, so that its cached kernels are used; 9 ranks at most.
ARGS = ModelArgs(
    dim=192, n_layers=2, n_heads=9, n_kv_heads=3, head_dim=64, ffn_dim=480, vocab_size=1280,
    max_seq_len=64, dtype="float32",
)  # fmt: skip
PROMPT = tuple(range(7, 7 + 23 * 41, 41))
DECODED = (3, 1279, 640)
# Digests of the logits by the size of a vector register in bytes, which decides the order of sums.
# If kernels change that order, replace these digests; a test prints the new ones.
RECORDED: Mapping[int, str] = {
    32: "70aca10bc51b7b73a17e807462231ede",
    64: "ac8702b45d2e2e853d20f6c5dfd59581",
}

_TOLERANCE = 1e-3  # of sums that are not exact, relative to the largest logit
_REFERENCE_TOLERANCE = 1e-4
_CPU = torch.device("cpu")


class IntegerCheckpoint(RandomCheckpoint):
    """Random weights that are small integers times a power of two, the same bits on every machine.

    torch's normally distributed random numbers depend on the instructions of the CPU.
    """

    def _drawn(self, param: Param, number: int, chunk: range) -> Tensor:
        key = hashlib.blake2b(f"{self.seed} {param.name} {number}".encode(), digest_size=7)
        generator = torch.Generator().manual_seed(int.from_bytes(key.digest(), "little"))
        shape = sliced_shape(param, chunk)
        values = torch.randint(-128, 128, shape, generator=generator).to(torch.float32)
        return values / 512 + 1 if param.name.endswith("norm.weight") else values / 1024


@dataclass(frozen=True)
class Alone:
    """The results of the built-in model that this rank has computed alone.

    Args:
        trace: the results of its exchanges.
        logits: [T, vocab_size], of each position.
    """

    trace: Trace
    logits: Tensor

    @property
    def digest(self) -> str:
        data = self.logits.cpu().contiguous().view(-1).view(torch.uint8).numpy()
        return hashlib.blake2b(data.data, digest_size=16).hexdigest()


class Result(msgspec.Struct, frozen=True):
    """The digest of one rank's logits, and their largest error relative to the largest logit."""

    digest: str
    error: float


def compute_alone(device: torch.device) -> Alone:
    comm = TracedSolo()
    runner = _load(comm, device)
    prefill = _prefill(runner)
    trace = comm.trace
    comm.trace = Trace()  # unused: replayed decode steps do not call `comm`
    return Alone(trace, torch.cat((prefill, *_decode(runner))))


def arithmetic(comm: Communicator, alone: Alone) -> tuple[Check, set[int]]:
    """Compares what every rank has computed alone; also returns the ranks that are wrong.

    Collective: one all_gather.
    """
    reference = _reference()
    error = (alone.logits.cpu().to(torch.float64) - reference).abs().max() / reference.abs().max()
    results = exchange(comm, Result(alone.digest, float(error)), Result)
    is_exact = _is_exact(alone.logits.device)
    recorded = RECORDED.get(this_machine().vector_bytes) if is_exact else None
    return judged(results, recorded, is_exact)


def judged(
    results: Sequence[Result | None], recorded: str | None, is_exact: bool = True
) -> tuple[Check, set[int]]:
    """The check of the results of all ranks, and the ranks that are wrong.

    A rank is wrong if its error exceeds the limit. With exact sums, a rank is also wrong if its
    digest is not the expected one: the recorded digest if a rank has it, else the most frequent
    digest. If two digests are equally frequent and no error exceeds the limit, a rank is wrong if
    its error is over ten times the smallest.
    """
    lost_ranks = {rank for rank, result in enumerate(results) if result is None}
    if lost_ranks:
        seen = f"the results of {named_ranks(lost_ranks)} arrive damaged"
        return Check("arithmetic", "fail", seen, HARDWARE), lost_ranks
    known_results = [result for result in results if result is not None]
    limit = _REFERENCE_TOLERANCE if is_exact else _TOLERANCE
    wrong = {rank for rank, result in enumerate(known_results) if not result.error <= limit}
    max_error = max(result.error for result in known_results)
    seen = f"{counted(len(known_results), 'rank')}, error {max_error:.1e}"
    counts = Counter(result.digest for result in known_results)
    if len(counts) > 1 and is_exact:
        (most_common, n_most), (_, n_next) = counts.most_common(2)
        right = recorded if recorded in counts else most_common if n_most > n_next else None
        if right is not None:
            wrong |= {rank for rank, result in enumerate(known_results) if result.digest != right}
        if not wrong:
            min_error = min(result.error for result in known_results)
            wrong = {
                rank for rank, result in enumerate(known_results) if result.error > 10 * min_error
            }
        if not wrong:
            seen = "ranks compute different bits, and which rank is wrong is unknown"
            return Check("arithmetic", "fail", seen, HARDWARE), set(range(len(known_results)))
    if wrong:
        error = max(known_results[rank].error for rank in wrong)
        other_bits = (
            f"bits that differ from {'those recorded' if recorded in counts else 'other ranks'}"
        )
        fault = f"wrong values, error {error:.1e}" if error > limit else other_bits
        seen = f"{ranks_do(wrong, 'computes', 'compute')} {fault}"
        return Check("arithmetic", "fail", seen, HARDWARE), wrong
    if recorded is not None and recorded not in counts:
        seen = f"{seen}; all equal, but different from the bits recorded for this kind of CPU"
        return Check("arithmetic", "warn", seen, HARDWARE), set()
    how = "equal bits" if is_exact else "within the tolerance"
    suffix = ", as recorded" if recorded is not None else ""
    return Check("arithmetic", "pass", f"{seen}; {how}{suffix}"), set()


def tensor_parallel(
    comm: Communicator, device: torch.device, alone: Alone, wrong: set[int]
) -> Check:
    """Runs the model on 1, 2, 3, ... ranks, and compares with what this rank has computed alone.

    The largest number is that of all ranks, at most the number of heads. Ranks in `wrong` compute
    wrong results alone, so their findings are ignored.

    Collective: loads and runs the model once for each number of ranks, and once more if all ranks
    can run it together and no rank is wrong.
    """
    max_ranks = min(comm.size, ARGS.n_heads)
    for size in range(1, max_ranks + 1):
        group = comm if size == comm.size else Repeated(comm, size)
        traced = Traced(group)
        result = _compare(traced, device, alone)
        check = _failed_check(exchange(comm, result, _Comparison), size, wrong)
        if check is not None:
            return check
    if max_ranks == comm.size > 1 and not wrong:  # with the exchanges that kernels do themselves
        logits = torch.cat((_prefill(runner := _load(comm, device)), *_decode(runner)))
        is_equal = not _differs(logits, alone, runner)
        ranks = exchange(comm, is_equal, bool)
        differing_ranks = [rank for rank, equal in enumerate(ranks) if not equal]
        if differing_ranks:
            which = named_ranks(differing_ranks, of=max_ranks)
            seen = f"{which}: decode steps give different logits"
            return Check("tensor-parallel", "fail", seen, HARDWARE)
    how = "equal bits" if _is_exact(device) else "within the tolerance"
    if wrong:
        seen = f"{ranks_do(wrong, 'computes', 'compute')} wrong values; other ranks give {how}"
        return Check("tensor-parallel", "skip", seen)
    return Check("tensor-parallel", "pass", f"on 1 to {max_ranks} ranks: {how}")


class _Comparison(msgspec.Struct, frozen=True):
    """How one rank's pass differs: in an exchange, or only in its logits."""

    difference: Difference | None
    is_equal: bool


def _compare(comm: Traced, device: torch.device, alone: Alone) -> _Comparison:
    runner = _load(comm, device)
    logits = _prefill(runner)
    found = first_difference(alone.trace, comm.trace, _tolerance(device))
    return _Comparison(found, not _differs(logits, alone, runner))


def _differs(logits: Tensor, alone: Alone, runner: ModelRunner) -> bool:
    """Whether the logits of this rank's vocabulary rows differ from those it computed alone."""
    vocab = runner.shard.vocab
    expected = alone.logits[: len(logits), vocab.start : vocab.stop]
    return bool(differing(expected.contiguous(), logits, _tolerance(logits.device)).any())


def _failed_check(
    comparisons: Sequence[_Comparison | None], size: int, wrong: set[int]
) -> Check | None:
    """The check that has failed, or None."""
    received = {rank: item for rank, item in enumerate(comparisons) if rank not in wrong}
    trusted = {rank: item for rank, item in received.items() if item is not None}
    group_text = f"on {counted(size, 'rank')}"
    by_rank = {rank: comparison.difference for rank, comparison in trusted.items()}
    present = [difference for difference in by_rank.values() if difference is not None]
    if not all(set(difference.owners) & wrong for difference in present):
        seen = f"{group_text}, {describe(by_rank, _names(ARGS.n_layers))}"
        return Check("tensor-parallel", "fail", seen, HARDWARE)
    if lost_ranks := received.keys() - trusted.keys():
        seen = f"{group_text}, the findings of {named_ranks(lost_ranks)} arrive damaged"
        return Check("tensor-parallel", "fail", seen, HARDWARE)
    if present:
        return None  # all differences are those of a rank that is known to be wrong
    differing_ranks = [rank for rank, comparison in trusted.items() if not comparison.is_equal]
    if differing_ranks:
        who = ranks_do(differing_ranks, "computes", "compute")
        seen = f"{group_text}, {who} different logits"
        return Check("tensor-parallel", "fail", seen, HARDWARE)
    return None


def _names(n_layers: int) -> list[str]:
    """The exchanges of a forward pass with exact sums."""
    return ["the embedding", *(name for n in range(n_layers) for name in layer_names(n, 4))]


def layer_names(layer: int, n_exchanges: int) -> list[str]:
    """The exchanges of one layer, in words."""
    if n_exchanges == 4:
        parts = ["attention heads", "output of wo", "feed-forward channels", "output of w2"]
    else:
        parts = [f"exchange {number} of {n_exchanges}" for number in range(n_exchanges)]
    return [f"layer {layer}, {part}" for part in parts]


def _is_exact(device: torch.device) -> bool:
    """Whether sums are exact, so that the bits do not depend on the number of ranks."""
    return computes(torch.float32, device)


def _tolerance(device: torch.device) -> float:
    return 0.0 if _is_exact(device) else _TOLERANCE


def _load(comm: Communicator, device: torch.device) -> ModelRunner:
    runner = ModelRunner.load(
        ARGS,
        IntegerCheckpoint(ARGS, 0, _CPU),
        make_plan(ARGS, comm.size, exact=_is_exact(device)),
        comm,
        precision=Precision.plain("float32"),
        device=device,
    )
    runner.reserve([1], ARGS.max_seq_len)
    return runner


def _reference() -> Tensor:
    """The logits in float64, by torch's operators. Shapes: [T, vocab_size]."""
    scores = Scores(ARGS.attention_scale, ARGS.attention_soft_cap)
    runner = ModelRunner.load(
        ARGS,
        IntegerCheckpoint(ARGS, 0, _CPU),
        make_plan(ARGS, 1),
        TracedSolo(),
        precision=Precision.plain("float64"),
        device=_CPU,
        ops=TorchOps(scores),
    )
    runner.reserve([1], ARGS.max_seq_len)
    return torch.cat((_prefill(runner), *_decode(runner)))


def _prefill(runner: ModelRunner) -> Tensor:
    """The logits of the prompt, operator by operator. Shapes: [T, V_local] local."""
    chunk = Chunk(PROMPT, 0, [[0]], len(PROMPT))
    with torch.inference_mode():
        hidden = runner.model(runner.batch([chunk]), runner.caches)
        return runner.model.logits(hidden).clone()


def _decode(runner: ModelRunner) -> Iterator[Tensor]:
    """The logits of each token after the prompt. Shapes: [1, V_local] local."""
    for number, token in enumerate(DECODED):
        chunk = Chunk([token], len(PROMPT) + number, [[0]], len(PROMPT))
        logits, _ = runner.step([chunk], [0])
        yield logits.values.clone()
