"""Sampling tokens and scoring them, from the logits of all ranks."""

from parallel_llama.sampling.draw import (
    Draw,
    History,
    NoTokenLeft,
    Sampled,
    both,
    mask_of,
    row_noise,
    sampling_key,
)
from parallel_llama.sampling.pending import PendingDraws, can_pend
from parallel_llama.sampling.sampler import sample
from parallel_llama.sampling.scoring import gather_logits, score, score_tokens

__all__ = [
    "Draw",
    "History",
    "NoTokenLeft",
    "PendingDraws",
    "Sampled",
    "both",
    "can_pend",
    "gather_logits",
    "mask_of",
    "row_noise",
    "sample",
    "sampling_key",
    "score",
    "score_tokens",
]
