"""Finds the best tokens of a rank's logits, in tiles of the vocabulary.

One pass over all logits computes the largest logit of each tile; later passes read only the few
tiles that may contain a result.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from parallel_llama.ops.gumbel import TILE, gumbel, tile_gumbel
from parallel_llama.sampling.draw import SamplingRow, sampling_key

# Number of tiles that sampling without filters reads first; their best score rules out most others.
_FIRST_TILES = 4

# Added to the bounds on the noise: far above its rounding errors, and too small to make more tiles
# candidates in practice.
_NOISE_SLACK = 1e-9


@dataclass(frozen=True)
class Tiles:
    """Some rows of logits in whole tiles, padded with -inf outside of the rank's vocabulary.

    Args:
        logits: [n, n_tiles, TILE].
        largest: [n, n_tiles], the largest logit of each tile.
        first: The number of the first tile.
    """

    logits: Tensor
    largest: Tensor
    first: int

    @classmethod
    def of(cls, logits: Tensor, vocab: range) -> "Tiles":
        """From logits [n, V_local] for the token ids in `vocab`; whole tiles are not copied."""
        before, after = vocab.start % TILE, -vocab.stop % TILE
        if before or after:
            logits = F.pad(logits, (before, after), value=-torch.inf)
        tiles = logits.view(len(logits), -1, TILE)
        return cls(tiles, tiles.amax(-1), vocab.start // TILE)

    def rows(self, rows: list[int]) -> "Tiles":
        """Some of the rows, as a copy; self if all rows are selected."""
        if len(rows) == len(self.logits):
            return self
        return Tiles(self.logits[rows], self.largest[rows], self.first)

    def flat(self) -> Tensor:
        """Shapes: [n, n_tiles * TILE]."""
        return self.logits.flatten(1)

    def top_k(self, k: int) -> tuple[Tensor, Tensor]:
        """The k largest logits of each row and their tokens, in descending order, ties by token.

        Shapes: returns [n, min(k, n_tiles * TILE)] twice, the logits' dtype and int64.
        """
        n_tiles = self.logits.shape[1]
        if k == 1:
            values, columns = self._largest()
        elif 2 * k >= n_tiles * TILE:
            values, columns = self.flat().sort(dim=1, descending=True, stable=True)
            values, columns = values[:, :k], columns[:, :k]
        else:
            values, columns = self._top_k_of_tiles(k)
        return values, columns + self.first * TILE

    def argmax_with_noise(self, draws: Sequence[SamplingRow]) -> tuple[Tensor, Tensor]:
        """The best logit / temperature + noise of each row without filters, and its token.

        Noise is computed only for tokens that could win with the largest noise of their tile. Ties
        go to the smallest token.

        Shapes: n draws; returns [n] float64 and [n] int64.
        """
        device = self.logits.device
        n, n_tiles, _ = self.logits.shape
        keys = torch.tensor([sampling_key(draw) for draw in draws], device=device)
        temperature = column([draw.params.temperature for draw in draws]).to(device)
        numbers = torch.arange(self.first, self.first + n_tiles, device=device)
        noise_bounds = tile_gumbel(keys, numbers).add_(_NOISE_SLACK)
        bounds = self.largest.double() / temperature + noise_bounds  # [n, n_tiles]
        promising = bounds.topk(min(_FIRST_TILES, n_tiles)).indices
        floor = self._best_in(promising, keys, temperature)[:, None]
        rows, tiles = ((bounds >= floor) & (bounds > -torch.inf)).nonzero(as_tuple=True)
        scaled = self.logits[rows, tiles] / temperature[rows]  # [n_pairs, TILE]
        could_win = scaled + noise_bounds[rows, tiles, None] >= floor[rows]
        pairs, columns = could_win.nonzero(as_tuple=True)
        rows, tokens = rows[pairs], (tiles[pairs] + self.first) * TILE + columns
        scores = scaled[pairs, columns] + gumbel(keys[rows], tokens[:, None])[:, 0]
        best = scores.new_full((n,), -torch.inf).scatter_reduce_(0, rows, scores, "amax")
        rivals = torch.where(scores == best[rows], tokens, torch.iinfo(torch.int64).max)
        winners = torch.full_like(keys, torch.iinfo(torch.int64).max)
        return best, winners.scatter_reduce_(0, rows, rivals, "amin")

    def _best_in(self, tiles: Tensor, keys: Tensor, temperature: Tensor) -> Tensor:
        """The best score in some tiles of each row. Shapes: tiles [n, t] -> [n]."""
        noise = gumbel(keys, _tokens_of(tiles + self.first))
        return noise.add_(self._within(tiles) / temperature).amax(1)

    def _within(self, tiles: Tensor) -> Tensor:
        """The logits of some tiles of each row. Shapes: [n, t] -> [n, t * TILE]."""
        rows = torch.arange(len(tiles), device=tiles.device)[:, None]
        return self.logits[rows, tiles].flatten(1)

    def _largest(self) -> tuple[Tensor, Tensor]:
        tiles = self.largest.max(1).indices[:, None]  # the first of equal ones
        values, columns = self._within(tiles).max(1, keepdim=True)
        return values, tiles * TILE + columns

    def _top_k_of_tiles(self, k: int) -> tuple[Tensor, Tensor]:
        logits = self.flat()
        n_tiles = self.logits.shape[1]
        if n_tiles > 2 * k:  # the k largest are all in the k tiles with the largest maxima
            tiles = self.largest.topk(k).indices
            values, order = self._within(tiles).topk(k)
            columns = _tokens_of(tiles).gather(1, order)
        else:
            values, columns = logits.topk(k)
        columns, order = columns.sort(1)
        values, order = values.gather(1, order).sort(dim=1, descending=True, stable=True)
        columns = columns.gather(1, order)
        # topk may return any of the values that tie for the last place; the first are needed.
        smallest = values[:, -1:]
        has_tie = ((logits >= smallest).sum(1) > k) & (smallest[:, 0] > -torch.inf)
        for row in has_tie.nonzero()[:, 0].tolist():
            all_columns = (logits[row] >= smallest[row]).nonzero()[:, 0]
            _, order = logits[row, all_columns].sort(dim=0, descending=True, stable=True)
            columns[row] = all_columns[order[:k]]
        return values, columns


def column(values: Sequence[float]) -> Tensor:
    """Shapes: returns [n, 1] float64."""
    return torch.tensor(values, dtype=torch.float64)[:, None]


def _tokens_of(tiles: Tensor) -> Tensor:
    """The token ids of some tiles. Shapes: [m, t] -> [m, t * TILE]."""
    return (tiles[:, :, None] * TILE + torch.arange(TILE, device=tiles.device)).flatten(1)
