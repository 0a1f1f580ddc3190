"""The online softmax of attention.

The state of a query is its largest score so far, the sum of its weights relative to that score, and
the weighted sum of values. Scores are scaled by log2(e), since GPUs compute powers of 2.

Source: online softmax, arXiv 1805.02867; FlashAttention, arXiv 2205.14135.
"""

import math

import triton
import triton.language as tl

from parallel_llama.ops.attention import Scores

_LOG2_E = tl.constexpr(math.log2(math.e))
_TWO_LOG2_E = tl.constexpr(2 * math.log2(math.e))


def factors(scores: Scores, head_dim: int) -> tuple[float, float]:
    """The factor on q k, and the factor on the tanh of this product, 0 without a soft cap."""
    scale, cap = scores.scale_of(head_dim), scores.soft_cap
    if cap is None:
        return scale * math.log2(math.e), 0.0
    return scale / cap, cap * math.log2(math.e)


@triton.jit
def nothing(ROWS: tl.constexpr, SIZE: tl.constexpr):
    """The state before the first key, for ROWS queries."""
    top = tl.full([ROWS], -float("inf"), tl.float32)
    return top, tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, SIZE], tl.float32)


@triton.jit
def add_keys(top, total, sums, q, k, v, is_visible, factor, cap, CAPPED: tl.constexpr):
    """The state after more keys; `is_visible` marks the keys that a query attends to.

    Shapes: top, total [ROWS], sums [ROWS, SIZE]; q [ROWS, SIZE]; k, v [n, SIZE]; is_visible
    [ROWS, n], or [1, n] for all queries.
    """
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * factor
    if CAPPED:
        scores = _tanh(scores) * cap
    scores = tl.where(is_visible, scores, -float("inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    # A query without a key so far gets weights of 0, not NaN.
    base = tl.where(new_top == -float("inf"), 0, new_top)
    weights = tl.exp2(scores - base[:, None])
    shrunk = tl.exp2(top - base)
    total = total * shrunk + tl.sum(weights, 1)
    sums = tl.dot(weights.to(v.dtype), v, sums * shrunk[:, None], input_precision="ieee")
    return new_top, total, sums


@triton.jit
def merge_states(top, total, sums, top2, total2, sums2):
    """The merged state of two sets of keys; at most one set is empty.

    Shapes: tops and totals [...], sums [..., SIZE].
    """
    new_top = tl.maximum(top, top2)
    shrunk, shrunk2 = tl.exp2(top - new_top), tl.exp2(top2 - new_top)
    total = total * shrunk + total2 * shrunk2
    sums = sums * tl.expand_dims(shrunk, -1) + sums2 * tl.expand_dims(shrunk2, -1)
    return new_top, total, sums


@triton.jit
def results(top, total, sums, sinks, heads, is_head, HAS_SINKS: tl.constexpr):
    """The results of attention from its state; with HAS_SINKS a head's sink adds to its total.

    Shapes: top, total, heads, is_head [...], sums and the results [..., SIZE]; `sinks` is the
    address of the sinks of all heads.
    """
    if HAS_SINKS:
        sink = tl.load(sinks + heads, is_head, 0).to(tl.float32) * _LOG2_E
        new_top = tl.maximum(top, sink)
        shrunk = tl.exp2(top - new_top)
        total = total * shrunk + tl.exp2(sink - new_top)
        sums = sums * tl.expand_dims(shrunk, -1)
    return sums / tl.expand_dims(total, -1)


@triton.jit
def _tanh(x):
    """1 - 2 / (exp(2 x) + 1), which does not overflow to NaN."""
    return 1 - 2 / (tl.exp2(x * _TWO_LOG2_E) + 1)
