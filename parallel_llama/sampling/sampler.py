"""Samples one token per row from a vocabulary that is sharded over ranks.

The shards are ascending ranges, some perhaps empty. Ranks rarely exchange whole rows of logits: in
a first exchange, called the head exchange, each rank sends a few numbers per row, and all ranks
compute the token from the same gathered bytes.

A token is the argmax of logits / temperature + Gumbel noise over the tokens that the filters keep.
The noise depends on (seed, choice, position, token id) alone, so a token is the same in any batch,
for any shards and for any number of candidates.

Log-probabilities and the mass of a nucleus are sums over tiles of the vocabulary, in order,
whichever ranks hold the tiles. Without exact sums a shard may end inside a tile; these sums then
differ by about 1e-14 between numbers of ranks.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from parallel_llama.errors import NumericalError
from parallel_llama.ops.filters import Filters, merge_top_k
from parallel_llama.parallel.collectives import Communicator
from parallel_llama.request import TokenLogprob
from parallel_llama.sampling import scoring
from parallel_llama.sampling.draw import NoTokenLeft, SampledToken, SamplingRow, adjust, filters_of
from parallel_llama.sampling.tiles import Tiles, column

# Candidates per rank for a row without top_k, and the maximum for a row with top_k. A row that
# needs more is gathered whole.
N_CANDIDATES = 64
MAX_CANDIDATES = 1024

# The head exchange has one float64 row per token to sample and rank. Its columns after N_LOCAL:
_LARGEST = 1  # the rank's largest logit
_SCORE, _TOKEN = 2, 3  # plain rows: the rank's best score, and its token
_N_FIXED = 4


def sample(
    logits: Tensor,
    vocab: range,
    draws: Sequence[SamplingRow],
    comm: Communicator,
    best: Tensor | npt.NDArray[np.float64] | None = None,
) -> list[SampledToken]:
    """Sample one token per row, the same token on all ranks and at every tp_size.

    Equal logits are ordered by token id: greedy takes the smallest id, top_k keeps exactly k.

    Args:
        logits: [n, V_local] local, for the token ids in `vocab`.
        draws: The tokens to sample, one per row.
        best: [n, 2] float64 local, the best score of each row and its token, if they are known;
            used if every row `takes_best`.

    Raises: on all ranks, NumericalError if a row has NaN or +inf, or only -inf, and NoTokenLeft if
    masks and bans alone caused that.
    Collective: one all_gather; one more if a row has top_p without top_k, one if candidates do not
    suffice for a row's filters, and two for log-probabilities.
    """
    if not draws:
        return []
    if best is not None and all(draw.takes_best for draw in draws):
        tokens = best_tokens(_of_ranks(best, comm), draws)
    else:
        assert logits.shape == (len(draws), len(vocab))
        tokens = _tokens(adjust(logits, vocab, draws), vocab, draws, comm)
    scored = _score_drawn(logits, vocab, tokens, draws, comm)
    return [SampledToken(token, scored.get(row)) for row, token in enumerate(tokens)]


def _of_ranks(
    best: Tensor | npt.NDArray[np.float64], comm: Communicator
) -> list[list[tuple[float, float]]]:
    """Shapes: [n, 2] local -> [tp_size, n, 2]."""
    # One rank needs no exchange, and every call of torch costs a measurable part of a step.
    return [best.tolist()] if comm.size == 1 else comm.all_gather(torch.as_tensor(best)).tolist()


def _tokens(
    adjusted: Tensor, vocab: range, draws: Sequence[SamplingRow], comm: Communicator
) -> list[int]:
    kinds = _Kinds.of(draws)
    if len(kinds.greedy) == len(draws):
        return best_tokens(comm.all_gather(_largest(adjusted, vocab)).tolist(), draws)
    return _pick(adjusted, vocab, draws, kinds, comm).tolist()


def _largest(logits: Tensor, vocab: range) -> Tensor:
    """The largest logit of each row and its token. Shapes: [n, 2] float64 local."""
    best = logits.new_full((len(logits), 2), -math.inf, dtype=torch.float64)
    if len(vocab):
        best[:, :1], best[:, 1:] = Tiles.of(logits, vocab).top_k(1)
    return best


def best_tokens(
    of_ranks: Sequence[Sequence[tuple[float, float]]], draws: Sequence[SamplingRow]
) -> list[int]:
    """The tokens with the best scores, from a head exchange of two numbers per row.

    In Python, since one call of torch would take as long as dozens of rows.

    Shapes: of_ranks [tp_size, n, 2].
    Raises: as `sample`.
    """
    best = [_best_of(row) for row in zip(*of_ranks, strict=True)]
    # A score is finite if the largest logit is finite, and equals that logit otherwise.
    _require_tokens([score for score, _ in best], draws)
    return [int(token) for _, token in best]


def _best_of(of_ranks: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The best score and its token: NaN if any rank has NaN; of equal scores, the lowest rank's."""
    best = of_ranks[0]
    for other in of_ranks[1:]:
        if other[0] > best[0] or math.isnan(other[0]):
            best = other
    return best


def _pick(
    adjusted: Tensor,
    vocab: range,
    draws: Sequence[SamplingRow],
    kinds: "_Kinds",
    comm: Communicator,
) -> Tensor:
    """Sample tokens of any kind.

    Collective: one all_gather; another if a row has top_p without top_k, and another if candidates
    do not suffice for a row's filters.
    """
    head = _Head(comm.all_gather(_local_block(adjusted, vocab, draws, kinds)).cpu())
    _require_tokens(head.largest.tolist(), draws)
    picked = torch.full((len(draws),), -1)
    if kinds.greedy:
        picked[kinds.greedy] = head.tokens[kinds.greedy, 0]
    if kinds.plain:
        blocks = head.blocks[:, kinds.plain]
        winner = blocks[:, :, _SCORE].argmax(0)
        picked[kinds.plain] = blocks[winner, torch.arange(len(kinds.plain)), _TOKEN].long()
    if kinds.filtered:
        mass = _mass(adjusted, vocab, draws, kinds.filtered, head, comm)
        undecided = _pick_filtered(picked, head, kinds.filtered, draws, mass)
        if undecided:
            uncovered = [kinds.filtered[index] for index in undecided]
            full = scoring.gather_logits(adjusted[uncovered], head.vocabs, comm).cpu()
            _pick_from_full(picked, full, uncovered, draws, mass[undecided])
    return picked


def _mass(
    logits: Tensor,
    vocab: range,
    draws: Sequence[SamplingRow],
    rows: Sequence[int],
    head: "_Head",
    comm: Communicator,
) -> Tensor:
    """The sum of exp((logit - the row's largest) / temperature) over the vocabulary, for some rows.

    Only top_p without top_k needs this sum; for rows with other filters it is NaN.

    Shapes: returns [len(rows), 1] float64 replicated.
    Collective: one all_gather if a row needs it.
    """
    params = [draws[row].params for row in rows]
    needed = [
        index for index, p in enumerate(params) if p.top_p < 1 and not 0 < p.top_k < head.vocab_size
    ]
    mass = torch.full((len(rows), 1), math.nan, dtype=torch.float64)
    if needed:
        needed_rows = [rows[index] for index in needed]
        temperatures = column([params[index].temperature for index in needed])[:, 0]
        lse = scoring.log_sum_exp(logits[needed_rows], vocab, head.vocabs, comm, temperatures).cpu()
        mass[needed, 0] = (lse - head.largest[needed_rows] / temperatures).exp()
    return mass


@dataclass(frozen=True)
class _Kinds:
    """Row numbers by kind of sampling: greedy, sampled without filters, sampled with filters."""

    greedy: list[int]
    plain: list[int]
    filtered: list[int]

    @classmethod
    def of(cls, draws: Sequence[SamplingRow]) -> "_Kinds":
        kinds = cls([], [], [])
        for row, draw in enumerate(draws):
            if draw.params.is_filtered:
                kinds.filtered.append(row)
            else:
                (kinds.greedy if draw.params.is_greedy else kinds.plain).append(row)
        return kinds


class _Head:
    """The result of the head exchange, with the candidates of all ranks merged.

    Shapes: blocks [tp_size, n, _N_FIXED + 2 K] float64; largest [n]; values and tokens [n, K], the
    largest logits of the whole vocabulary in descending order, ties by token id.
    """

    def __init__(self, blocks: Tensor) -> None:
        self.blocks = blocks
        self.vocabs = scoring.vocabs_of(blocks)
        self.vocab_size = self.vocabs[-1].stop
        self.largest = blocks[:, :, _LARGEST].amax(0)  # NaN if a rank has one
        self.values, self.tokens = merge_top_k(blocks, _N_FIXED)


def _pick_filtered(
    picked: Tensor, head: _Head, rows: list[int], draws: Sequence[SamplingRow], mass: Tensor
) -> list[int]:
    """Sample the filtered rows whose candidates suffice. Returns: the indices of the others."""
    filters = filters_of([draws[row] for row in rows])
    n_candidates = min(head.values.shape[1], head.vocab_size)
    values, tokens = head.values[rows, :n_candidates], head.tokens[rows, :n_candidates]
    return _pick_decided(picked, rows, filters, values, tokens, mass, head.vocab_size)


def _pick_from_full(
    picked: Tensor, full: Tensor, rows: list[int], draws: Sequence[SamplingRow], mass: Tensor
) -> None:
    """Sample rows from their whole logits. Shapes: full [len(rows), vocab_size]."""
    vocab_size = full.shape[1]
    filters = filters_of([draws[row] for row in rows])
    tiles = Tiles.of(full, range(vocab_size))
    # Sorting a whole row takes much longer than finding its 1024 largest logits.
    for k in (MAX_CANDIDATES, 8 * MAX_CANDIDATES, vocab_size):
        values, tokens = tiles.top_k(min(k, vocab_size))
        undecided = _pick_decided(picked, rows, filters, values.double(), tokens, mass, vocab_size)
        if not undecided:
            return
        rows = [rows[index] for index in undecided]
        tiles, mass, filters = tiles.rows(undecided), mass[undecided], filters.rows(undecided)


def _pick_decided(
    picked: Tensor,
    rows: Sequence[int],
    filters: Filters,
    values: Tensor,
    tokens: Tensor,
    mass: Tensor,
    vocab_size: int,
) -> list[int]:
    """Sample the rows whose candidates suffice. Returns: the indices of the others in `rows`.

    Shapes: values and tokens [n, C] candidates; mass [n, 1]; n rows.
    """
    is_kept, is_decided = filters.keep_mask(values, mass, vocab_size)
    index = filters.draw(values, tokens, is_kept)[:, None]
    picked[torch.tensor(rows)[is_decided]] = tokens.gather(1, index)[is_decided, 0]
    return (~is_decided).nonzero()[:, 0].tolist()


def _score_drawn(
    logits: Tensor,
    vocab: range,
    tokens: Sequence[int],
    draws: Sequence[SamplingRow],
    comm: Communicator,
) -> dict[int, TokenLogprob]:
    """Log-probabilities of the sampled tokens, by row, for rows that want them."""
    rows = [row for row, draw in enumerate(draws) if draw.params.logprobs is not None]
    if not rows:
        return {}
    n_top = [draws[row].params.logprobs or 0 for row in rows]
    row_logits = logits if len(rows) == len(logits) else logits[rows]
    targets = torch.tensor([tokens[row] for row in rows], device=logits.device)
    scored = scoring.score_tokens(row_logits, vocab, targets, n_top, comm)
    return dict(zip(rows, scored, strict=True))


def _local_block(
    logits: Tensor, vocab: range, draws: Sequence[SamplingRow], kinds: _Kinds
) -> Tensor:
    """This rank's part of the head exchange. Shapes: [n, _N_FIXED + 2 K] float64 local."""
    k = max(map(_n_candidates, draws))
    block = scoring.new_block(len(draws), _N_FIXED, k, vocab, logits.device)
    if not len(vocab):
        return block
    tiles = Tiles.of(logits, vocab)
    block[:, _LARGEST] = tiles.largest.amax(1).double()
    if rows := kinds.plain:
        scores, tokens = tiles.rows(rows).argmax_with_noise([draws[row] for row in rows])
        block[rows, _SCORE], block[rows, _TOKEN] = scores, tokens.double()
    # One maximum is several times cheaper than the 64 largest, so greedy rows are separate.
    for rows, n_largest in ((kinds.greedy, 1), (kinds.filtered, k)):
        if rows:
            scoring.put_top_k(block, rows, _N_FIXED, *tiles.rows(rows).top_k(n_largest))
    return block


def _n_candidates(draw: SamplingRow) -> int:
    """Candidates per rank for a row; depends only on its parameters."""
    params = draw.params
    if params.is_filtered:
        return min(params.top_k or N_CANDIDATES, MAX_CANDIDATES)
    return 1 if params.is_greedy else 0


def _require_tokens(largest: Sequence[float], draws: Sequence[SamplingRow]) -> None:
    """Check that the largest logit of every row is finite."""
    rows_without: list[int] = []
    for row, value in enumerate(largest):
        if math.isfinite(value):
            continue
        if value == -math.inf and draws[row].is_adjusted:
            rows_without.append(row)
            continue
        raise NumericalError(
            f"{draws[row]}: the largest of its logits is {value}; the weights are damaged or "
            "overflow their dtype: verify the checkpoint, or use a wider dtype"
        )
    if rows_without:
        raise NoTokenLeft(rows_without, draws)
