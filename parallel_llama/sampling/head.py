"""Drawing one token per row from a vocabulary that is cut over ranks.

The cuts are ascending ranges, some of them perhaps empty, and whole rows of logits do not cross
ranks. In the head exchange each rank sends a few numbers per row; every rank then decides from the
same gathered bytes, so all decide alike.

A draw is an argmax of logits / temperature + Gumbel noise over the tokens that the filters keep.
The noise of a token follows from (seed, choice, position, token id) alone, so a draw depends
neither on the other rows of the batch, nor on who holds which rows, nor on how many candidates were
sent. Between tp sizes only the rounding of sums over ranks differs: log-probabilities agree to
about 1e-14, and a nucleus may differ where its sum lies within rounding of top_p.

It does not know requests' text, stop conditions or which rank's word counts.
"""

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from parallel_llama.errors import NumericalError
from parallel_llama.parallel import Communicator
from parallel_llama.request import TokenLogprob
from parallel_llama.sampling.adjust import adjust
from parallel_llama.sampling.draw import Draw, NoTokenLeft, Sampled
from parallel_llama.sampling.filters import Filters
from parallel_llama.sampling.scoring import chunks, gather_logits, leaders_of, score_tokens
from parallel_llama.sampling.tiles import Tiles, column

# Candidates that a rank sends for a row whose filters do not say how many they keep, and the most
# it sends for one that does. A row that needs more is gathered whole.
N_CANDIDATES = 64
MAX_CANDIDATES = 1024

# Columns of the head exchange: one float64 row per draw and rank, then K values and K token ids.
_N_LOCAL = 0  # rows of the vocabulary that the rank holds
_LARGEST = 1  # its largest logit
_MASS = 2  # filtered rows: sum of exp((logit - its largest logit) / temperature)
_SCORE, _TOKEN = 3, 4  # plain rows: its largest logit / temperature + noise, and whose
_N_FIXED = 5


def sample(
    logits: Tensor, vocab: range, draws: Sequence[Draw], comm: Communicator
) -> list[Sampled]:
    """Draw one token per row; the same on all ranks, and at every tp_size.

    Equal logits rank by token id: greedy takes the smallest, top_k keeps exactly k.

    Shapes: logits [n, V_local] local, the scores of the token ids in `vocab`; n draws.
    Raises: on all ranks, NumericalError where a row holds nan or +inf or nothing but -inf, and
    NoTokenLeft where only what the draw forbids made it so.
    Collective: one all_gather; another where the candidates do not settle a row's filters, and
    another where log-probabilities are asked for.
    """
    assert logits.shape == (len(draws), len(vocab))
    if not draws:
        return []
    adjusted = adjust(logits, vocab, draws)
    head = _Head(comm.all_gather(_local_block(adjusted, vocab, draws)).cpu())
    _require_tokens(head.largest, draws)
    tokens = [-1] * len(draws)
    _pick_greedy(tokens, head, draws)
    _pick_plain(tokens, head, draws)
    uncovered = _pick_filtered(tokens, head, draws)
    if uncovered:
        rows = torch.tensor(uncovered, device=logits.device)
        full = gather_logits(adjusted[rows], head.vocabs, comm).cpu()
        _pick_from_full(tokens, full, uncovered, draws)
    scored = _score_drawn(logits, vocab, tokens, draws, comm)
    return [Sampled(token, scored.get(row)) for row, token in enumerate(tokens)]


class _Head:
    """What the head exchange brought: all ranks' numbers, and their candidates in one order.

    Shapes: blocks [tp_size, n, _N_FIXED + 2 K] float64; largest [n]; values and tokens [n, K], the
    largest logits of the whole vocabulary in falling order, equal ones by token id.
    """

    def __init__(self, blocks: Tensor) -> None:
        self.blocks = blocks
        borders = accumulate((int(each) for each in blocks[:, 0, _N_LOCAL]), initial=0)
        self.vocabs = [range(start, stop) for start, stop in pairwise(borders)]
        self.vocab_size = self.vocabs[-1].stop
        self.largest = blocks[:, :, _LARGEST].amax(0)  # nan wherever a rank has one
        self.values, self.tokens = leaders_of(blocks, _N_FIXED)


def _pick_greedy(picked: list[int], head: _Head, draws: Sequence[Draw]) -> None:
    rows = _greedy_rows(draws)
    if rows:
        _put(picked, rows, head.tokens[rows, 0])


def _pick_plain(picked: list[int], head: _Head, draws: Sequence[Draw]) -> None:
    rows = _plain_rows(draws)
    if rows:
        blocks = head.blocks[:, rows]
        winner = blocks[:, :, _SCORE].argmax(0)
        _put(picked, rows, blocks[winner, torch.arange(len(rows)), _TOKEN])


def _pick_filtered(picked: list[int], head: _Head, draws: Sequence[Draw]) -> list[int]:
    """Draw the filtered rows that their candidates settle. Returns: the rows that are left."""
    rows = _filtered_rows(draws)
    if not rows:
        return []
    filters = Filters.of([draws[row] for row in rows])
    n_candidates = min(head.values.shape[1], head.vocab_size)
    values, tokens = head.values[rows, :n_candidates], head.tokens[rows, :n_candidates]
    blocks = head.blocks[:, rows]
    shift = (blocks[:, :, _LARGEST] - values[:, 0]) / filters.temperature[:, 0]  # [tp_size, n]
    mass = (blocks[:, :, _MASS] * shift.exp()).sum(0)[:, None]
    left = _pick_settled(picked, rows, filters, values, tokens, mass, head.vocab_size)
    return [rows[each] for each in left]


def _pick_from_full(
    picked: list[int], full: Tensor, rows: list[int], draws: Sequence[Draw]
) -> None:
    """Draw the rows that needed their whole logits. Shapes: full [len(rows), vocab_size]."""
    vocab_size = full.shape[1]
    filters = Filters.of([draws[row] for row in rows])
    tiles = Tiles.of(full, range(vocab_size))
    mass = _mass(tiles, filters.temperature)
    # Sorting a whole row takes many times longer than finding its largest thousand.
    for k in (MAX_CANDIDATES, 8 * MAX_CANDIDATES, vocab_size):
        values, tokens = tiles.leaders(min(k, vocab_size))
        left = _pick_settled(picked, rows, filters, values.double(), tokens, mass, vocab_size)
        if not left:
            return
        rows = [rows[each] for each in left]
        tiles, mass, filters = tiles.rows(left), mass[left], filters.rows(left)


def _pick_settled(
    picked: list[int],
    rows: Sequence[int],
    filters: Filters,
    values: Tensor,
    tokens: Tensor,
    mass: Tensor,
    vocab_size: int,
) -> list[int]:
    """Draw the rows that their candidates settle. Returns: the places of the others in `rows`.

    Shapes: values and tokens [n, C] candidates; mass [n, 1]; n rows.
    """
    kept, settled = filters.kept(values, mass, vocab_size)
    place = filters.draw(values, tokens, kept)[:, None]
    done = settled.nonzero()[:, 0].tolist()
    _put(picked, [rows[each] for each in done], tokens.gather(1, place)[done, 0])
    return (~settled).nonzero()[:, 0].tolist()


def _put(picked: list[int], rows: Sequence[int], tokens: Tensor) -> None:
    for row, token in zip(rows, tokens.tolist(), strict=True):
        picked[row] = int(token)


def _score_drawn(
    logits: Tensor, vocab: range, tokens: list[int], draws: Sequence[Draw], comm: Communicator
) -> dict[int, TokenLogprob]:
    """Log-probabilities of the drawn tokens, by row, where they are asked for."""
    n_top = {
        row: draw.params.logprobs
        for row, draw in enumerate(draws)
        if draw.params.logprobs is not None
    }
    rows = list(n_top)
    own = logits if len(rows) == len(logits) else logits[rows]
    targets = torch.tensor([tokens[row] for row in rows], dtype=torch.int64, device=logits.device)
    scored = score_tokens(own, vocab, targets, list(n_top.values()), comm)
    return dict(zip(rows, scored, strict=True))


def _local_block(logits: Tensor, vocab: range, draws: Sequence[Draw]) -> Tensor:
    """This rank's part of the head exchange. Shapes: [n, _N_FIXED + 2 K] float64 local."""
    k = max(map(_n_candidates, draws))
    shape = (len(draws), _N_FIXED + 2 * k)
    block = torch.full(shape, -math.inf, dtype=torch.float64, device=logits.device)
    block[:, _N_LOCAL] = len(vocab)
    block[:, _MASS] = 0
    block[:, _N_FIXED + k :] = -1
    if len(vocab):
        _fill(block, Tiles.of(logits, vocab), draws, k)
    return block


def _fill(block: Tensor, tiles: Tiles, draws: Sequence[Draw], k: int) -> None:
    block[:, _LARGEST] = tiles.largest.amax(1).double()
    plain = _plain_rows(draws)
    if plain:
        scores, tokens = tiles.rows(plain).plain_leaders([draws[row] for row in plain])
        block[plain, _SCORE], block[plain, _TOKEN] = scores, tokens.double()
    filtered = _filtered_rows(draws)
    # One maximum is several times cheaper than the largest 64: rows share the work by their need.
    for rows, n_leaders in ((_greedy_rows(draws), 1), (filtered, k)):
        if rows:
            values, tokens = tiles.rows(rows).leaders(n_leaders)
            n_found = values.shape[1]
            block[rows, _N_FIXED : _N_FIXED + n_found] = values.double()
            block[rows, _N_FIXED + k : _N_FIXED + k + n_found] = tokens.double()
    if filtered:
        temperature = column([draws[row].params.temperature for row in filtered])
        block[filtered, _MASS] = _mass(tiles.rows(filtered), temperature)[:, 0]


def _mass(tiles: Tiles, temperature: Tensor) -> Tensor:
    """The sum of exp((logit - its row's largest) / temperature). Shapes: [n, 1] twice, float64."""
    # Rows of nothing but -inf on this rank have no mass; -inf minus itself would be nan.
    largest = tiles.largest.amax(1, keepdim=True).double()
    largest.clamp_(min=-torch.finfo(torch.float64).max)
    temperature = temperature.to(largest.device)
    mass = torch.empty_like(largest)
    for rows, x in chunks(tiles.flat()):
        weight = (x.double() - largest[rows]).div_(temperature[rows]).exp_()
        mass[rows] = weight.sum(1, keepdim=True)
    return mass


def _n_candidates(draw: Draw) -> int:
    """How many of its largest logits each rank sends for a row; known from its parameters alone."""
    params = draw.params
    if params.is_filtered:
        return min(params.top_k or N_CANDIDATES, MAX_CANDIDATES)
    return 1 if params.is_greedy else 0


def _greedy_rows(draws: Sequence[Draw]) -> list[int]:
    return [row for row, draw in enumerate(draws) if draw.params.is_greedy]


def _plain_rows(draws: Sequence[Draw]) -> list[int]:
    return [
        row
        for row, draw in enumerate(draws)
        if not draw.params.is_greedy and not draw.params.is_filtered
    ]


def _filtered_rows(draws: Sequence[Draw]) -> list[int]:
    return [row for row, draw in enumerate(draws) if draw.params.is_filtered]


def _require_tokens(largest: Tensor, draws: Sequence[Draw]) -> None:
    """Check that every row has a largest logit that is a number."""
    without: list[int] = []
    for row, value in enumerate(largest.tolist()):
        if math.isfinite(value):
            continue
        if value == -math.inf and draws[row].is_adjusted:
            without.append(row)
            continue
        raise NumericalError(
            f"{draws[row]}: the largest of its logits is {value}; the weights are damaged or "
            "overflow their dtype: verify the checkpoint, or use a wider dtype"
        )
    if without:
        raise NoTokenLeft(without, draws)
