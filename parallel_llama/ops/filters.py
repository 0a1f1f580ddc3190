"""top_k, top_p and min_p, computed from the candidates: the largest logits of a row.

A rank sends its candidates as one float64 row per sampled token:

    mass      the sum of exp((logit - largest) / temperature) over the rank's part of the
              vocabulary, where `largest` is the largest logit of this part
    logits    the K largest in descending order, ties by token; -inf if there are fewer
    tokens    the K tokens of these logits; -1 if there are fewer
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from parallel_llama.ops.gumbel import SamplingKeys, gumbel

# Tolerance of sums that are compared with top_p: of 25 equally likely tokens, top_p=0.28 keeps 7
# however a sum over ranks is rounded, although 0.28 * 25 > 7 in float64.
TOP_P_SLACK = 1e-12


@dataclass(frozen=True)
class Filters:
    """The filters of some rows, and the keys to draw from the kept tokens.

    Args:
        sampling_keys: The keys and temperatures of the rows.
        top_k: [n] int64; 0 for off.
        top_p: [n] float64; 1 for off.
        min_p: [n] float64; 0 for off.
    """

    sampling_keys: SamplingKeys
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    def keep_mask(self, logits: Tensor, mass: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
        """Which candidates the filters keep, and for which rows the candidates suffice.

        The candidates suffice if the filters would keep the same tokens of the whole vocabulary.

        Shapes: logits [n, C], each row's largest logits in descending order, C <= vocab_size; mass
        [n, 1], of the whole vocabulary; the results [n, C] bool and [n] bool.
        """
        n_candidates = logits.shape[1]
        temperature, top_p = self.sampling_keys.temperatures[:, None], self.top_p[:, None]
        weight = ((logits - logits[:, :1]) / temperature).exp()  # relative to the likeliest
        top_k = self.top_k[:, None]
        top_k = torch.where(top_k == 0, vocab_size, top_k).clamp(max=vocab_size)
        is_cut = top_k < vocab_size
        in_k = torch.arange(n_candidates, device=logits.device) < top_k
        sums = (weight * in_k).cumsum(1)
        # top_p is a fraction of the mass that top_k keeps.
        needed = top_p * torch.where(is_cut, sums[:, -1:], mass) * (1 - TOP_P_SLACK)
        has_nucleus = top_p < 1
        before = F.pad(sums[:, :-1], (1, 0))  # 0 for the likeliest token, which is always kept
        in_nucleus = (before < needed) | ~has_nucleus
        min_p = self.min_p[:, None]
        kept = in_k & in_nucleus & (weight >= min_p) & (logits > -torch.inf)

        decided = (
            (n_candidates >= top_k)
            | (~is_cut & has_nucleus & (sums[:, -1:] >= needed))
            | ((~is_cut | ~has_nucleus) & (weight[:, -1:] < min_p))
        )
        return kept, decided[:, 0]

    def draw(self, logits: Tensor, tokens: Tensor, is_kept: Tensor) -> Tensor:
        """The index of each row's drawn token among its candidates. Shapes: all [n, C] -> [n]."""
        scores = logits / self.sampling_keys.temperatures[:, None] + gumbel(
            self.sampling_keys.keys, tokens
        )
        return scores.masked_fill(~is_kept, -torch.inf).argmax(1)

    def rows(self, rows: list[int]) -> "Filters":
        sampling_keys = SamplingKeys(
            self.sampling_keys.keys[rows], self.sampling_keys.temperatures[rows]
        )
        return Filters(sampling_keys, self.top_k[rows], self.top_p[rows], self.min_p[rows])


def merge_top_k(blocks: Tensor, n_fixed: int) -> tuple[Tensor, Tensor]:
    """The largest logits of the whole vocabulary and their tokens, from the blocks of all ranks.

    Shapes: blocks [tp_size, n, n_fixed + 2 K]: after the fixed columns K values and K token ids;
    returns [n, K] float64 and int64, in descending order, ties by token.
    """
    tp_size, n, width = blocks.shape
    k = (width - n_fixed) // 2
    values = blocks[:, :, n_fixed : n_fixed + k].permute(1, 0, 2).reshape(n, tp_size * k)
    tokens = blocks[:, :, n_fixed + k :].permute(1, 0, 2).reshape(n, tp_size * k).long()
    if tp_size == 1 or not k:
        return values, tokens
    # Ranks hold ascending token ids, so a stable sort leaves equal values ordered by id.
    values, order = values.sort(dim=1, descending=True, stable=True)
    return values[:, :k], tokens.gather(1, order[:, :k])


def mass_of(masses: Tensor, largest: Tensor, temperatures: Tensor) -> Tensor:
    """The mass of the whole vocabulary, relative to its largest logit.

    `masses` and `largest` have the mass and the largest logit of each rank's part.

    Shapes: masses and largest [tp_size, n], temperatures [n]; returns [n, 1].
    """
    shift = (largest - largest.amax(0)) / temperatures
    return (masses * shift.exp()).sum(0)[:, None]
