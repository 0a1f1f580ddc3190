"""top_k, top_p and min_p: which tokens a draw keeps, told from the largest logits alone."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from parallel_llama.ops.noise import gumbel
from parallel_llama.sampling.draw import Draw
from parallel_llama.sampling.noise import noise_key
from parallel_llama.sampling.tiles import column

# A sum of probabilities this close below top_p has reached it: of 25 equal tokens top_p=0.28 keeps
# 7, though 0.28 * 25 > 7 in float64, and so it is whichever way a sum over ranks was rounded.
TOP_P_SLACK = 1e-12


@dataclass
class Filters:
    """The sampling parameters and noise keys of some rows, as columns of a batch."""

    temperature: Tensor  # [n, 1] float64
    top_k: Tensor  # [n, 1] int64, 0: off
    top_p: Tensor  # [n, 1] float64
    min_p: Tensor  # [n, 1] float64
    keys: Tensor  # [n] int64

    @classmethod
    def of(cls, draws: Sequence[Draw]) -> "Filters":
        params = [draw.params for draw in draws]
        return cls(
            temperature=column([each.temperature for each in params]),
            top_k=torch.tensor([[each.top_k] for each in params]),
            top_p=column([each.top_p for each in params]),
            min_p=column([each.min_p for each in params]),
            keys=torch.tensor([noise_key(draw) for draw in draws]),
        )

    def kept(self, logits: Tensor, mass: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
        """Which candidates the filters keep, and which rows the candidates settle.

        A settled row's kept set is the one that the whole vocabulary would give.

        Shapes: logits [n, C], each row's largest logits in falling order, C <= vocab_size; mass
        [n, 1], sum of exp((logit - largest) / temperature) over the whole vocabulary; returns
        [n, C] bool and [n] bool.
        """
        n_candidates = logits.shape[1]
        weight = ((logits - logits[:, :1]) / self.temperature).exp()  # relative to the likeliest
        top_k = torch.where(self.top_k == 0, vocab_size, self.top_k).clamp(max=vocab_size)
        is_cut = top_k < vocab_size
        in_k = torch.arange(n_candidates) < top_k
        sums = (weight * in_k).cumsum(1)
        # top_p is a share of what top_k left.
        needed = self.top_p * torch.where(is_cut, sums[:, -1:], mass) * (1 - TOP_P_SLACK)
        has_nucleus = self.top_p < 1
        before = F.pad(sums[:, :-1], (1, 0))  # the likeliest has 0 before it and always stays
        in_nucleus = (before < needed) | ~has_nucleus
        kept = in_k & in_nucleus & (weight >= self.min_p) & (logits > -torch.inf)

        knows_mass = (n_candidates >= top_k) | ~is_cut
        settled = (
            (n_candidates >= top_k)
            | (~is_cut & has_nucleus & (sums[:, -1:] >= needed))
            | ((knows_mass | ~has_nucleus) & (weight[:, -1:] < self.min_p))
        )
        return kept, settled[:, 0]

    def draw(self, logits: Tensor, tokens: Tensor, kept: Tensor) -> Tensor:
        """The place of each row's drawn token among its candidates. Shapes: all [n, C] -> [n]."""
        scores = logits / self.temperature + gumbel(self.keys, tokens)
        return scores.masked_fill(~kept, -torch.inf).argmax(1)

    def rows(self, rows: list[int]) -> "Filters":
        return Filters(**{name: column[rows] for name, column in vars(self).items()})
