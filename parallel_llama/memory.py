"""How many bytes a rank needs: weights, KV cache, and the tensors of a step.

Pure arithmetic on a `ShardPlan`: no torch, and no device is queried. The `plan` command and the
engine compute every size with these functions.
"""

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from operator import mul
from typing import Literal

from parallel_llama.config.adapter import Adapter, served_pairs
from parallel_llama.dtypes import ITEM_BYTES, KVFormat, MatrixFormat, Precision
from parallel_llama.families.model_args import ModelArgs, context_length, kv_groups
from parallel_llama.families.weights import (
    Axis,
    Param,
    cut_by_outputs,
    layer_parameters,
    outer_parameters,
)
from parallel_llama.plan import (
    MAX_GATHERED_ROWS,
    MAX_QUERIES,
    MAX_TILE_PARTS,
    PART_KEYS,
    Shard,
    ShardPlan,
    Stage,
)

GIB = 1 << 30

# Sliding-window layers get at least this fraction of the blocks that full-attention layers get.
MIN_WINDOW_FRACTION = Fraction(1, 4)

# Allowance on a GPU for the workspaces of the CUDA libraries, NCCL's buffers and the memory of CUDA
# graphs. It is an estimate, not a measurement.
CUDA_ALLOWANCE = 1 << 30

# Memory of a CPU process in addition to weights, cache and tensors of a step: torch's libraries and
# modules, LLVM, our modules and buffers. All constants below were measured with x86-64 builds.
PROCESS_BYTES = 305 << 20
# One of several ranks also has the threads and buffers with which it exchanges data.
_EXCHANGE_BYTES = 22 << 20
# For each token of the vocabulary: the tokenizer, which only rank 0 has.
_TOKENIZER_BYTES = 600
# The package gguf, and the header of a GGUF file, for each token of the vocabulary.
_GGUF_BYTES, _GGUF_TOKEN_BYTES = 16 << 20, 270

# By default KV caches take this fraction of the memory that is free after loading. On the CPU the
# fraction is for all ranks of a host together; on a GPU it includes the working memory.
CPU_FRACTION, CUDA_FRACTION = 0.5, 0.9
# Default maximum per rank on the CPU, where other programs need memory too.
MAX_CPU_BYTES = 2 << 30

# The size of a weight on a rank is proportional to one of these: the rank's units of an axis, the
# channels or outputs of its experts, or 1 ("rank") for a replicated weight.
Counted = Axis | Literal["expert ffn", "expert outputs", "rank"]


def values_by_form(
    args: ModelArgs, precision: Precision, *, exact: bool = False, layers: range | None = None
) -> dict[MatrixFormat, Counter[Counted]]:
    """Number of weight values per `Counted` unit, for each format; `exact` as in `make_plan`.

    Args:
        layers: the layers to count, in addition to the weights outside of layers; by default all.
    """
    values: defaultdict[MatrixFormat, Counter[Counted]] = defaultdict(Counter)
    in_layers = (
        (layer_parameters(args, layer), times)
        for layer, times in _kinds_of_layers(
            args, precision, range(args.n_layers) if layers is None else layers
        ).items()
    )
    for params, times in ((outer_parameters(args), 1), *in_layers):
        for param in map(cut_by_outputs, params) if exact else params:
            if not param.expert:  # all experts are equal, so only expert 0 is counted
                counted = _counted(param)
                form = precision.form_of(param.kind, param.name)
                values[form][counted] += param.values_per_unit * times
    return dict(values)


def values_of_stages(
    args: ModelArgs, precision: Precision, plan: ShardPlan
) -> dict[Stage, dict[MatrixFormat, Counter[Counted]]]:
    """The result of `values_by_form` for the layers of each stage."""
    exact = plan.shards[0].exact is not None
    return {
        stage: values_by_form(args, precision, exact=exact, layers=stage.layers)
        for stage in plan.stages
    }


def _kinds_of_layers(args: ModelArgs, precision: Precision, layers: range) -> dict[int, int]:
    """The first layer of each kind among `layers`, and the number of layers of this kind.

    All layers with experts are alike, and so are all layers without experts, unless the files store
    their matrices in different formats.
    """
    if precision.stored is not None:
        return dict.fromkeys(layers, 1)
    dense = [layer for layer in layers if layer in args.dense_layers]
    others = [layer for layer in layers if layer not in args.dense_layers]
    return {alike[0]: len(alike) for alike in (dense, others) if alike}


def weight_bytes(shard: Shard, values: Mapping[MatrixFormat, Mapping[Counted, int]]) -> int:
    """Bytes of the weights that a rank holds.

    `values` comes from `values_by_form`, for the layers of the rank.
    """
    return sum(form.n_bytes(_n_values(shard, per_unit)) for form, per_unit in values.items())


def values_multiplied(
    args: ModelArgs, shard: Shard, values: Mapping[MatrixFormat, Mapping[Counted, int]]
) -> tuple[int, int]:
    """How many weight values of a rank one token is multiplied with.

    Returns: the number in all layers, and the number in the output layer.

    A token selects `n_active_experts` experts, which are taken to be spread evenly over the ranks.
    `values` comes from `values_by_form`.
    """
    n_in_layers = 0
    for per_unit in values.values():
        in_layers: dict[Counted, int] = {n: v for n, v in per_unit.items() if n != "vocab"}
        experts: dict[Counted, int] = {n: v for n, v in in_layers.items() if n.startswith("expert")}
        n_in_experts = _n_values(shard, experts)
        n_in_layers += _n_values(shard, in_layers) - n_in_experts
        if args.n_experts:
            n_in_layers += n_in_experts * args.n_active_experts // args.n_experts
    return n_in_layers, len(shard.vocab) * args.dim


def adapter_bytes(adapter: Adapter, shard: Shard, precision: Precision) -> int:
    """Bytes of a rank's part of A and B, for all weights that an adapter changes."""
    n_values = 0
    for param, name in served_pairs(adapter):
        if not shard.holds(param):
            continue
        cut = shard.cut(param)
        local_shape = list(param.shape)
        local_shape[cut.dim] = len(shard.rows_of(cut))
        n_values += adapter.pairs[name].rank * sum(local_shape)
    return n_values * ITEM_BYTES[precision.computed]


def bytes_passed_over(
    args: ModelArgs,
    batch: int,
    precision: Precision,
    shard: Shard | None = None,
    values: Mapping[MatrixFormat, Mapping[Counted, int]] | None = None,
) -> int:
    """Bytes of weights that one decode step does not need to read.

    A step reads only a few rows of an untied embedding, and only the experts that the tokens of
    `batch` sequences select; the tokens are taken to select experts uniformly.

    Args:
        shard: count for the rank of this shard; by default for all ranks together.
        values: the result of `values_by_form`, if the caller has it.
    """
    n_rows = args.vocab_size if shard is None else len(shard.vocab)
    embedding = 0 if args.tied_embeddings else n_rows * args.dim
    n_bytes = precision.form_of("outer", "tok_embeddings.weight").n_bytes(embedding)
    if args.n_experts:
        unselected = (1 - args.n_active_experts / args.n_experts) ** batch
        if values is None:
            is_exact = shard is not None and shard.exact is not None
            layers = None if shard is None else shard.layers
            values = values_by_form(args, precision, exact=is_exact, layers=layers)
        for form, per_unit in values.items():
            n_in_experts = per_unit["expert ffn"] * args.ffn_dim * args.n_experts
            if shard is not None:
                n_in_experts = _n_values(
                    shard, {unit: per_unit[unit] for unit in ("expert ffn", "expert outputs")}
                )
            n_bytes += form.n_bytes(round(n_in_experts * unselected))
    return n_bytes


def head_bytes(args: ModelArgs, shard: Shard, precision: Precision) -> int:
    """Bytes of a rank's rows of the output layer, which may also be its embedding."""
    name = "tok_embeddings.weight" if args.tied_embeddings else "output.weight"
    return precision.form_of("outer", name).n_bytes(len(shard.vocab) * args.dim)


def working_bytes(
    args: ModelArgs,
    shard: Shard,
    precision: Precision,
    step_tokens: int,
    n_drawn: int,
    device: str,
    max_seq_len: int,
    *,
    from_gguf: bool,
) -> int:
    """Bytes of a rank in addition to weights and KV cache, on its GPU or, for 'cpu', on the host.

    The sum of the tensors of one transformer block in the largest step (`step_tokens` tokens of
    sequences of up to `max_seq_len`), the logits of `n_drawn` rows, and the memory of a process. On
    a GPU, the sum has three other terms instead of the process: CUDA_ALLOWANCE, the rotary tables,
    and memory for quantised matrices that steps of many rows convert to the dtype of computation.

    Args:
        from_gguf: whether the model's files are GGUF files; only the process needs to know.
    """
    item = ITEM_BYTES[precision.computed]
    q_and_kv = (len(shard.heads) + 2 * shard.n_local_kv_heads) * args.head_dim
    attention = 2 * q_and_kv + shard.n_local_heads * args.head_dim  # rotated copies, and the output
    # Outputs of w1 and w3, input and output of the activation.
    n_per_channel = 4 if args.gated else 3
    feed_forward, shared, dense = (
        n_per_channel * len(channels) for channels in (shard.ffn, shard.shared_ffn, shard.dense_ffn)
    )
    if shard.exact is not None and len(shard.exact.outputs) > 1:  # gathered inputs of wo and w2
        attention += args.n_heads * args.head_dim
        feed_forward += args.ffn_dim
        shared += args.shared_ffn_dim
        dense += args.dense_ffn_dim
    if args.n_experts:  # the activation reads the output of w1 and w3 where it is
        per_pair = feed_forward - len(shard.ffn) + 2 * args.dim
        feed_forward = args.n_active_experts * per_pair
    if args.shared_ffn_dim:  # it runs after the experts, whose sum is kept
        feed_forward = max(feed_forward, shared + 2 * args.dim)
    in_attention = step_tokens * attention * item
    in_attention += _gathered_bytes(args, shard, precision, step_tokens, max_seq_len)
    block = max(in_attention, step_tokens * max(feed_forward, dense) * item)
    block += step_tokens * 4 * args.dim * item  # residual stream, its norm, the sums
    # Scores in the model's dtype, as float32 logits, and two copies that sampling changes.
    per_score = item + 3 * max(item, ITEM_BYTES["float32"])
    scores = n_drawn * len(shard.vocab) * per_score
    allowance = process_bytes(args, shard, from_gguf=from_gguf)
    if device == "cuda":
        converted = _converted_values(args, shard, precision) * item
        allowance = CUDA_ALLOWANCE + _rotary_bytes(args, precision) + converted
    return block + scores + allowance


def process_bytes(args: ModelArgs, shard: Shard, *, from_gguf: bool) -> int:
    """Bytes of a CPU rank for its process, without weights, cache and the tensors of a step."""
    n_bytes = PROCESS_BYTES
    if shard.stages[-1].ranks.stop > 1:
        n_bytes += _EXCHANGE_BYTES
    if shard.rank == 0:
        n_bytes += _TOKENIZER_BYTES * args.vocab_size
    if from_gguf:
        n_bytes += _GGUF_BYTES + _GGUF_TOKEN_BYTES * args.vocab_size
    return n_bytes


def _gathered_bytes(
    args: ModelArgs, shard: Shard, precision: Precision, step_tokens: int, max_seq_len: int
) -> int:
    """Bytes of the queries and results that the attention of a rank gathers from all ranks.

    0 unless the KV cache is sharded by token. `model.sharded_attention` has the tensors.
    """
    if not shard.peers:
        return 0
    item, n_ranks = ITEM_BYTES[precision.computed], len(shard.peers)
    queries = step_tokens * args.n_heads * args.head_dim * item
    if shard.exact is not None:
        per_query = -(-max_seq_len // PART_KEYS)
        n_parts = max(per_query, min(MAX_QUERIES * per_query, MAX_TILE_PARTS))
        # Each part's result, its largest score and its sum of weights.
        results = n_parts * args.n_heads * (args.head_dim + 2) * item
        return queries + results + 2 * results // n_ranks  # also its own parts, and its own heads
    per_row = args.n_heads * (args.head_dim + 1) * max(item, ITEM_BYTES["float32"])
    n_gathered = n_ranks * min(step_tokens, MAX_GATHERED_ROWS)
    return queries + (2 * step_tokens + n_gathered) * per_row  # also its own parts and heads


def _converted_values(args: ModelArgs, shard: Shard, precision: Precision) -> int:
    """Values of quantised matrices that a GPU holds in the dtype of computation.

    Twice the largest matrix, because CUDA graphs keep memory of their own.
    """
    if precision.quant_group_size == 1:
        return 0
    fused = 2 * max(len(shard.ffn), len(shard.shared_ffn), len(shard.dense_ffn))  # w1 and w3
    q_and_kv = (len(shard.heads) + 2 * shard.n_local_kv_heads) * args.head_dim
    return 2 * args.dim * max(len(shard.vocab), fused, q_and_kv)


def _rotary_bytes(args: ModelArgs, precision: Precision) -> int:
    """Bytes of the rotary tables on a GPU: a complex number per position and pair of a head.

    An upper bound: with a KV cache of fewer tokens than the context, the tables are shorter.
    """
    if args.rope_scaling is not None and args.rope_scaling.kind == "dynamic":
        return 0  # computed on the host for each step
    n_tables = 1 if args.local_rope_theta is None else len(kv_groups(args))
    itemsize = max(ITEM_BYTES[precision.computed], ITEM_BYTES["float32"])
    return n_tables * context_length(args) * args.head_dim * itemsize


def kv_bytes_per_token(args: ModelArgs, shard: Shard, kv_format: KVFormat) -> tuple[int, ...]:
    """Bytes of KV cache that a rank needs for one token, for each KV group of layers.

    With a KV cache sharded by token this is the mean over all tokens of a sequence.
    """
    per_layer = 2 * shard.n_local_kv_heads * kv_format.n_bytes(args.head_dim)
    n_layers = (len(shard.layers_of(kv_group)) for kv_group in kv_groups(args))
    return tuple(-(-n * per_layer // shard.kv_parts) for n in n_layers)


def default_cache_bytes(device: str, n_free: int, working: int, n_ranks: int) -> int:
    """Default size in bytes of a rank's KV cache, where --kv-cache-bytes is not given.

    `n_free` bytes are free after loading the weights, on the rank's GPU or, for 'cpu', on the
    rank's host, and `n_ranks` ranks share them. On a GPU `working` bytes stay free for the tensors
    of a step.
    """
    if device == "cuda":
        return int(n_free // n_ranks * CUDA_FRACTION) - working
    return min(MAX_CPU_BYTES, int(n_free * CPU_FRACTION) // n_ranks)


def pool_sizes(
    args: ModelArgs, n_blocks: int, block_size: int, max_seq_len: int, step_tokens: int
) -> tuple[int, ...]:
    """Number of blocks for each KV group of layers; the first KV group has `n_blocks`.

    In a model with both kinds of layers, the first KV group has full attention and the second a
    sliding window. The second gets the fraction of `n_blocks` that makes a sequence of
    `max_seq_len` tokens fit into either both groups or neither. This fraction is at least
    MIN_WINDOW_FRACTION, because most sequences are a few windows long. The second group also gets
    at least the blocks for the longest sequence that the first group can hold.
    """
    _, *windowed = kv_groups(args)
    n_full = blocks_held(max_seq_len, block_size, None, step_tokens)

    def size(window: int | None) -> int:
        part = Fraction(blocks_held(max_seq_len, block_size, window, step_tokens), n_full)
        n_longest = blocks_held(n_blocks * block_size, block_size, window, step_tokens)
        return max(math.ceil(n_blocks * max(part, MIN_WINDOW_FRACTION)), n_longest)

    return (n_blocks, *(size(kv_group.window) for kv_group in windowed))


def most_blocks(sizes: Callable[[int], Sequence[int]], n_bytes: Sequence[int], room: int) -> int:
    """The most blocks of the first KV group for which the blocks of all groups fit into `room`.

    `sizes` maps the number of blocks of the first group to those of every group, and must be
    non-decreasing; `n_bytes` are the bytes of one block, for each group. They are 0 for a group
    with no layer in the rank's stage.
    """
    first, *others = n_bytes
    if not others:
        return max(room, 0) // first
    upper_bound = int(max(room, 0) // (first + MIN_WINDOW_FRACTION * sum(others)))

    def pool_bytes(n_blocks: int) -> int:
        return sum(map(mul, sizes(n_blocks), n_bytes))

    return bisect_right(range(upper_bound + 1), max(room, 0), key=pool_bytes) - 1


def blocks_held(
    n_tokens: int, block_size: int, window: int | None, step_tokens: int, n_sinks: int = 0
) -> int:
    """The largest number of blocks that a sequence of `n_tokens` tokens ever holds in a layer.

    In a sliding-window layer these are the blocks of the tokens of one step, of the window before
    these tokens, and of the `n_sinks` attention sinks; blocks behind the window are reused.

    >>> blocks_held(10, 4, None, 2), blocks_held(1000, 4, 16, 2), blocks_held(1000, 1, 16, 2)
    (3, 5, 17)
    """
    n_blocks = -(-n_tokens // block_size)
    if window is None:
        return n_blocks
    n_live_tokens = window - 1 + step_tokens
    n_sink_blocks = -(-n_sinks // block_size)
    return min(n_blocks, n_sink_blocks + (n_live_tokens - 2 + block_size) // block_size + 1)


def _counted(param: Param) -> Counted:
    if param.expert is None:
        return param.axis or "rank"
    return "expert outputs" if param.axis == "outputs" else "expert ffn"


def _n_values(shard: Shard, per_unit: Mapping[Counted, int]) -> int:
    """Number of weight values that a rank holds."""
    units: Mapping[Counted, int] = {
        "heads": len(shard.heads),
        "kv_heads": len(shard.kv_heads),
        "ffn": len(shard.ffn),
        "shared_ffn": len(shard.shared_ffn),
        "dense_ffn": len(shard.dense_ffn),
        "vocab": len(shard.vocab),
        "outputs": len(shard.outputs),
        "expert ffn": len(shard.experts) * len(shard.ffn),
        "expert outputs": len(shard.experts) * len(shard.outputs),
        "rank": 1,
    }
    return sum(n * units[counted] for counted, n in per_unit.items())
