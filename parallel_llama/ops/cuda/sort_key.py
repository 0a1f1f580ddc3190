"""Sort keys: a score and a number in one integer, so that the largest key has the best score."""

import triton
import triton.language as tl

_NUMBER_BITS = tl.constexpr(31)
_LAST = tl.constexpr((1 << 31) - 1)


@triton.jit
def sort_key(scores, numbers):
    """Keys that are larger for larger float32 scores and, among equal ones, for smaller numbers.

    All keys are at least 0, and keys of different numbers differ, whatever the scores.
    """
    bits = (scores + 0.0).to(tl.int32, bitcast=True)  # -0 becomes 0, its equal
    rising = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + (1 << 31)
    return (rising << _NUMBER_BITS) | (_LAST - numbers.to(tl.int64))


@triton.jit
def score_of(keys):
    """The float32 scores of some keys."""
    rising = ((keys >> _NUMBER_BITS) - (1 << 31)).to(tl.int32)
    return (rising ^ ((rising >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def number_of(keys):
    return _LAST - (keys & _LAST)
