"""Sampling tokens and scoring them, from the logits of all ranks."""

from parallel_llama.sampling.draw import (
    History,
    NoTokenLeft,
    SampledToken,
    SamplingRow,
    both,
    mask_of,
    row_sampling_key,
    sampling_key,
)
from parallel_llama.sampling.pending import PendingDraws, can_pend
from parallel_llama.sampling.sampler import sample
from parallel_llama.sampling.scoring import gather_logits, score, score_tokens

__all__ = [
    "History",
    "NoTokenLeft",
    "PendingDraws",
    "SampledToken",
    "SamplingRow",
    "both",
    "can_pend",
    "gather_logits",
    "mask_of",
    "row_sampling_key",
    "sample",
    "sampling_key",
    "score",
    "score_tokens",
]
