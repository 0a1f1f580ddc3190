"""Predicts the time of decode and prefill steps from bytes, operations and exchanges. No torch.

docs/plan.md has the formulas. In each step all ranks wait for the slowest rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from parallel_llama.cli.estimate import Estimate, RankEstimate
from parallel_llama.cli.hardware import Hardware, Rates, are_alike
from parallel_llama.dtypes import ITEM_BYTES
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.plan import MIN_PIECE_TOKENS, Stage, count_pieces

# Larger tensors of CPU ranks on several hosts go through gloo's ring (parallel/sockets.py).
_MAX_DIRECT_BYTES = 1 << 18
_MANY_ROWS = 512  # of the products that bench --calibrate measures

Limit = Literal["memory bandwidth", "arithmetic", "link", "launches"]


@dataclass(frozen=True)
class StepTime:
    """The predicted time of a step, in seconds.

    Args:
        memory_s: reading the KV cache, and the weights unless their products take longer.
        arithmetic_s: products, if they take longer than reading their weights.
        link_s: exchanges between ranks.
        launch_s: the fixed costs of layers and steps (`layer_s` and `step_s` of `Hardware`), on
            GPUs for launching kernels.
    """

    memory_s: float
    arithmetic_s: float
    link_s: float
    launch_s: float

    @property
    def total_s(self) -> float:
        return self.memory_s + self.arithmetic_s + self.link_s + self.launch_s

    @property
    def limit(self) -> Limit:
        """The resource that takes the largest part of the step."""
        parts: dict[Limit, float] = {
            "memory bandwidth": self.memory_s,
            "arithmetic": self.arithmetic_s,
            "link": self.link_s,
            "launches": self.launch_s,
        }
        return max(parts, key=lambda name: parts[name])


@dataclass(frozen=True)
class _Step:
    """A step to predict.

    Args:
        n_rows: the tokens of the step, which are the rows of the layers' products.
        is_prefill: whether this is a prefill step. The head then multiplies only the last token,
            and the time of that product is not counted.
        is_full: whether the step reads the KV cache of the full context.
    """

    n_rows: int
    is_prefill: bool = False
    is_full: bool = False


@dataclass(frozen=True)
class Prediction:
    """The predicted steps of a plan.

    Args:
        full: a decode step at the full context.
        empty: a decode step at the start of the sequences.
        prefill: a prefill step of `step_tokens` tokens, without attention; None if not known.
    """

    full: StepTime
    empty: StepTime
    prefill: StepTime | None
    batch: int
    step_tokens: int

    @property
    def tokens_per_s(self) -> float:
        """New tokens per second of all sequences, at the full context."""
        return self.batch / self.full.total_s

    @property
    def prefill_tokens_per_s(self) -> float | None:
        return None if self.prefill is None else self.step_tokens / self.prefill.total_s

    def cost(self, per_hour: float) -> float:
        """The price of a million new tokens at the full context; `per_hour` is for all ranks."""
        return per_hour / 3600 / self.tokens_per_s * 1e6


@dataclass(frozen=True)
class RankSteps:
    """The predicted work of each rank in a decode step at the full context, without exchanges.

    Args:
        seconds: the time of each rank.
        rates: bytes of weights per second that each rank reads.
        balanced_s: seconds of the step if each rank read exactly in proportion to its speed,
            regardless of units and memory.
    """

    seconds: tuple[float, ...]
    rates: tuple[float, ...]
    balanced_s: float

    @property
    def slowest(self) -> int:
        """The rank that all other ranks wait for."""
        return self.seconds.index(max(self.seconds))

    @property
    def loss(self) -> float:
        """How much longer the slowest rank takes than the balanced step, as a fraction."""
        return max(self.seconds) / self.balanced_s - 1

    @property
    def is_unlike(self) -> bool:
        """Whether ranks have different speeds."""
        return not are_alike(self.rates)


def rank_steps(planned: Estimate) -> RankSteps | None:
    """The predicted work of each rank, which needs no times of exchanges between ranks.

    None for a pipeline, and if the hardware or the work of a rank is not known.
    """
    hardware = planned.request.hardware
    if hardware is None or planned.request.pp > 1 or _why_unknown_work(planned) is not None:
        return None
    rates = [hardware.rates(rank.shard.rank, planned.plan.tp_size) for rank in planned.ranks]
    step = _Step(planned.request.batch, is_full=True)
    seconds = tuple(
        sum(_rank_s(rank, rank_rates, step))
        for rank, rank_rates in zip(planned.ranks, rates, strict=True)
    )
    n_bytes = [rank.read_weights + rank.read_kv for rank in planned.ranks]
    speed = sum(n_read / item for n_read, item in zip(n_bytes, seconds, strict=True))
    return RankSteps(seconds, tuple(item.weights for item in rates), sum(n_bytes) / speed)


def predict(planned: Estimate) -> Prediction | None:
    """The predicted steps of a plan; None where `why_unpredicted` has a reason."""
    hardware = planned.request.hardware
    if hardware is None or why_unpredicted(planned) is not None:
        return None
    n_ranks, batch, n_tokens = (
        planned.plan.tp_size,
        planned.request.batch,
        planned.request.step_tokens,
    )
    rates = [hardware.rates(rank.shard.rank, n_ranks) for rank in planned.ranks]
    launch_s = hardware.step_s + planned.request.args.n_layers * hardware.layer_s
    times = _all_ranks_s if planned.request.pp == 1 else _pipeline_s

    def predicted(step: _Step) -> StepTime:
        return StepTime(*times(planned, hardware, rates, step), launch_s)

    is_known = all(rank_rates.products is not None for rank_rates in rates)
    return Prediction(
        predicted(_Step(batch, is_full=True)),
        predicted(_Step(batch)),
        predicted(_Step(n_tokens, is_prefill=True)) if is_known else None,
        batch,
        n_tokens,
    )


def why_unpredicted(planned: Estimate) -> str | None:
    """Why the speed of a plan is not predicted; None if it is."""
    hardware = planned.request.hardware
    if hardware is None:
        if planned.request.device == "cpu":
            return "bench --calibrate FILE measures a machine; pass FILE to --calibration"
        return "name the GPUs, as in --gpus 4xH100; a T4 has no bfloat16"
    if planned.plan.tp_size > 1 and (hardware.exchange_s is None or hardware.link is None):
        if not hardware.is_shared:
            return "the exchanges between the hosts of several files have not been measured"
        return "one rank exchanges nothing; calibrate with --nproc 2 or more"
    largest = max(len(stage.ranks) for stage in planned.plan.stages)
    if planned.request.pp > 1 and largest > 1 and hardware.local_exchange_s is None:
        return "one rank exchanges nothing; calibrate each host with --nproc 2 or more"
    return _why_unknown_work(planned)


def _why_unknown_work(planned: Estimate) -> str | None:
    """Why the work of a rank cannot be predicted from its rates; None if it can."""
    request, precision = planned.request, planned.request.precision
    if reason := planned.unrecorded:
        return reason
    if request.device == "cuda":
        if precision.quant in ("fp8", "stored"):
            return f"decode steps in {precision.quant} have not been measured in a whole model"
        if precision.quant != "none" and request.batch > 1:
            return (
                f"the kernel for {precision.quant} multiplies row by row, so its speed with "
                f"{request.batch} sequences does not follow from bytes"
            )
        if ITEM_BYTES[precision.computed] != 2:
            return f"on GPUs only 16-bit dtypes have been measured, not {precision.computed}"
    return None


def exchanges(
    args: ModelArgs, n_ranks: int, item_bytes: int, *, is_exact: bool
) -> tuple[int, float]:
    """Collectives of a step, and the bytes that a rank receives in them for each row.

    A ring all-reduce receives 2 (n - 1) / n of its bytes on n ranks, a gather (n - 1) / n. The
    bytes of the exchange after the head are not counted.
    """
    if n_ranks == 1:
        return 0, 0.0
    n_exchanges, n_bytes = _layer_exchanges(args, n_ranks, item_bytes, is_exact=is_exact)
    embedded = 2 * (n_ranks - 1) / n_ranks * item_bytes * args.dim
    return args.n_layers * n_exchanges + 2, args.n_layers * n_bytes + embedded


def _layer_exchanges(
    args: ModelArgs, n_ranks: int, item_bytes: int, *, is_exact: bool
) -> tuple[int, float]:
    """As `exchanges`, of one layer."""
    received = (n_ranks - 1) / n_ranks * item_bytes
    n_sums = 1 if args.parallel_block else 2
    n_norms = 1 if args.qk_norm_across_heads else 0
    if not is_exact:
        return n_sums + n_norms, 2 * received * n_sums * args.dim
    channels = args.ffn_dim * (args.n_active_experts or 1) + args.shared_ffn_dim
    n_inputs = 3 if args.shared_ffn_dim else 2
    gathered = args.n_heads * args.head_dim + channels + n_sums * args.dim
    return n_inputs + n_sums + n_norms, received * gathered


def _link_s(planned: Estimate, hardware: Hardware, n_rows: int) -> float:
    item_bytes = ITEM_BYTES[planned.request.precision.computed]
    n_exchanges, n_bytes = exchanges(
        planned.request.args, planned.plan.tp_size, item_bytes, is_exact=planned.request.is_exact
    )
    if not n_exchanges:
        return 0.0
    assert hardware.exchange_s is not None and hardware.link is not None
    n_ranks, args = planned.plan.tp_size, planned.request.args
    if hardware.messages and n_rows * args.dim * item_bytes <= _MAX_DIRECT_BYTES:
        # A message holds one rank's part of a gather, or the whole tensor of an all-reduce.
        ring_fraction = 1 if planned.request.is_exact else 2 / n_ranks
        n_bytes *= hardware.messages / (n_ranks - 1) / ring_fraction
    return n_exchanges * hardware.exchange_s + n_rows * n_bytes / hardware.link


def _all_ranks_s(
    planned: Estimate, hardware: Hardware, rates: Sequence[Rates], step: _Step
) -> tuple[float, float, float]:
    """Seconds of memory, arithmetic and exchanges of a step that all ranks run together."""
    times = (
        _rank_s(*rank_and_rates, step) for rank_and_rates in zip(planned.ranks, rates, strict=True)
    )
    return *max(times, key=sum), _link_s(planned, hardware, step.n_rows)


def _pipeline_s(
    planned: Estimate, hardware: Hardware, rates: Sequence[Rates], step: _Step
) -> tuple[float, float, float]:
    """Seconds of memory, arithmetic and exchanges of a step that the stages run in pieces.

    In tick t, stage s runs piece t - s; a tick takes as long as its slowest stage.
    """
    stages = planned.plan.stages
    n_pieces = count_pieces(step.n_rows, len(stages))
    rows = step.n_rows / n_pieces
    times = []
    for stage in stages:
        stage_ranks = [(planned.ranks[rank], rates[rank]) for rank in stage.ranks]
        work = max(
            (
                _layers_s(*rank_and_rates, rows, is_full=step.is_full)
                for rank_and_rates in stage_ranks
            ),
            key=sum,
        )
        times.append((*work, _stage_link_s(planned, hardware, stage, rows)))
    parts = [0.0, 0.0, 0.0]
    for tick in range(n_pieces + len(stages) - 1):
        running = [
            stage_ranks for number, stage_ranks in enumerate(times) if 0 <= tick - number < n_pieces
        ]
        parts = [sum(pair) for pair in zip(parts, max(running, key=sum), strict=True)]
    n_drawn = 0 if step.is_prefill else step.n_rows
    head = max(
        (
            _head_s(*rank_and_rates, n_drawn)
            for rank_and_rates in zip(planned.ranks, rates, strict=True)
        ),
        key=sum,
    )
    link_s = parts[2] + _handover_s(planned, hardware, step.n_rows, n_pieces)
    return parts[0] + head[0], parts[1] + head[1], link_s


def _handover_s(planned: Estimate, hardware: Hardware, n_rows: int, n_pieces: int) -> float:
    """Seconds of the exchanges of all ranks: of the embedding, after the stages, after the head."""
    assert hardware.exchange_s is not None and hardware.link is not None
    n_stages, n_ranks = len(planned.plan.stages), planned.plan.tp_size
    x_bytes = n_rows * planned.request.args.dim * ITEM_BYTES[planned.request.precision.computed]
    # After each stage, x is sent to one rank of every other host, if it is small, or else to all of
    # their ranks; the embedding uses a ring.
    n_receivers = n_stages if x_bytes / n_pieces <= _MAX_DIRECT_BYTES else n_ranks
    n_sent = n_receivers * (n_stages - 1) if hardware.messages else n_stages
    n_copies = n_sent + 2 * (n_ranks - 1) / n_ranks
    n_exchanges = n_pieces * n_stages + 2
    return n_exchanges * hardware.exchange_s + n_copies * x_bytes / hardware.link


def _stage_link_s(planned: Estimate, hardware: Hardware, stage: Stage, n_rows: float) -> float:
    """Seconds of the exchanges of a stage's layers, between ranks of one host."""
    if len(stage.ranks) == 1:
        return 0.0
    assert hardware.local_exchange_s is not None and hardware.local_link is not None
    n_exchanges, n_bytes = _layer_exchanges(
        planned.request.args,
        len(stage.ranks),
        ITEM_BYTES[planned.request.precision.computed],
        is_exact=planned.request.is_exact,
    )
    layer_s = n_exchanges * hardware.local_exchange_s + n_rows * n_bytes / hardware.local_link
    return len(stage.layers) * layer_s


def _rank_s(rank: RankEstimate, rates: Rates, step: _Step) -> tuple[float, float]:
    """The `memory_s` and `arithmetic_s` of a rank's step; see `StepTime`."""
    n_values = rank.layer_values + (0 if step.is_prefill else rank.head_values)
    kv_bytes = step.is_full * rank.read_kv
    return _work_s(n_values, rank.read_weights, kv_bytes, rates, step.n_rows)


def _layers_s(
    rank: RankEstimate, rates: Rates, n_rows: float, *, is_full: bool
) -> tuple[float, float]:
    """As `_rank_s`, without the head."""
    n_bytes = rank.read_weights - rank.read_head
    return _work_s(rank.layer_values, n_bytes, is_full * rank.read_kv, rates, n_rows)


def _head_s(rank: RankEstimate, rates: Rates, n_rows: float) -> tuple[float, float]:
    """As `_rank_s`, of the head alone."""
    return _work_s(rank.head_values, rank.read_head, 0, rates, n_rows)


def _work_s(
    n_values: int, n_bytes: float, kv_bytes: float, rates: Rates, n_rows: float
) -> tuple[float, float]:
    kv_s, weights_s = kv_bytes / rates.kv, n_bytes / rates.weights
    products_s = n_values * _row_s(rates, n_rows)
    if products_s > weights_s:
        return kv_s, products_s
    return weights_s + kv_s, 0.0


def _row_s(rates: Rates, n_rows: float) -> float:
    """Seconds of the products of `n_rows` rows with one value; 0 if their rate is not known.

    Products of the pieces of a pipeline take a fixed time and a time for each row.
    """
    if rates.products is None:
        return 0.0
    if rates.piece_products is None or not MIN_PIECE_TOKENS <= n_rows < _MANY_ROWS:
        return 2 * n_rows / rates.products
    piece_s, many_s = 2 * MIN_PIECE_TOKENS / rates.piece_products, 2 * _MANY_ROWS / rates.products
    fraction = (n_rows - MIN_PIECE_TOKENS) / (_MANY_ROWS - MIN_PIECE_TOKENS)
    return piece_s + fraction * (many_s - piece_s)
