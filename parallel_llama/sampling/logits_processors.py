"""Logit biases, masks and penalties, applied to the model's logits before sampling.

Every rank knows the tokens of all sequences, so each rank changes its own shard of the vocabulary
without communication.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from parallel_llama.sampling.draw import SamplingRow


def adjust(logits: Tensor, vocab: range, draws: Sequence[SamplingRow]) -> Tensor:
    """Apply biases, masks and penalties to logits.

    In this order: logit_bias is added; banned tokens and tokens outside of the mask become -inf;
    repetition_penalty divides positive logits and multiplies the others, for tokens of prompt and
    completion; presence_penalty and frequency_penalty are subtracted, for tokens of the completion.
    transformers (without presence and frequency penalties) and vLLM have the same order.

    Shapes: logits [n, V_local] local, for the token ids in `vocab`, not changed; n draws; returns
    [n, V_local] local, `logits` itself if nothing changes.
    Source: repetition: Keskar et al., CTRL, arXiv 1909.05858, section 4.1, as transformers applies
    it to negative logits; presence and frequency: OpenAI's API reference.
    """
    rows = [row for row, draw in enumerate(draws) if draw.is_adjusted]
    if not rows or not len(vocab):
        return logits
    # In float32, since 16 bits would round small biases away.
    adjusted = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
    for row in rows:
        own, draw = adjusted[row], draws[row]
        _add_biases(own, vocab, draw)
        _forbid(own, vocab, draw)
        if draw.params.has_penalties:
            _penalize(own, vocab, draw)
    return adjusted


def _add_biases(own: Tensor, vocab: range, draw: SamplingRow) -> None:
    biases = [(token, bias) for token, bias in draw.params.logit_bias if token in vocab]
    if biases:
        places = torch.tensor([token - vocab.start for token, _ in biases], device=own.device)
        values = torch.tensor([bias for _, bias in biases], dtype=own.dtype, device=own.device)
        own[places] += values


def _forbid(own: Tensor, vocab: range, draw: SamplingRow) -> None:
    if draw.mask is not None:
        own.masked_fill_(~_allowed(draw.mask, vocab).to(own.device), -torch.inf)
    banned = [token - vocab.start for token in draw.banned if token in vocab]
    if banned:
        own[torch.tensor(banned, device=own.device)] = -torch.inf


def _allowed(mask: bytes, vocab: range) -> Tensor:
    """The bits of this rank's tokens. Shapes: [V_local] bool."""
    first, stop = vocab.start // 8, -(-vocab.stop // 8)
    own = mask[first:stop].ljust(stop - first, b"\0")
    bits = np.unpackbits(np.frombuffer(own, dtype=np.uint8), bitorder="little")
    return torch.from_numpy(bits[vocab.start - 8 * first : vocab.stop - 8 * first]).bool()


def _penalize(own: Tensor, vocab: range, draw: SamplingRow) -> None:
    assert draw.history is not None
    params = draw.params
    tokens, n_drawn = (each.to(own.device) for each in draw.history.counts(draw.drafts))
    is_own = (tokens >= vocab.start) & (tokens < vocab.stop)
    places, n_drawn = tokens[is_own] - vocab.start, n_drawn[is_own]
    values = own[places].double()
    factor = params.repetition_penalty
    values = torch.where(values < 0, values * factor, values / factor)
    values -= params.presence_penalty * (n_drawn > 0).double() + params.frequency_penalty * n_drawn
    own[places] = values.to(own.dtype)
