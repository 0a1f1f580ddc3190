"""From each rank's logits to tokens and log-probabilities: everything after the output layer.

The vocabulary is cut over the ranks in ascending ranges, some of them perhaps empty, and whole rows
of logits do not cross ranks. In the head exchange each rank sends a few numbers per row; every rank
then decides from the same gathered bytes, so all decide alike.

A draw is an argmax of logits / temperature + Gumbel noise over the tokens that the filters keep.
The noise of a token follows from (seed, choice, position, token id) alone, so a draw depends
neither on the other rows of the batch, nor on who holds which rows, nor on how many candidates were
sent. Between tp sizes only the rounding of sums over ranks differs: log-probabilities agree to
about 1e-14, and a nucleus may differ where its sum lies within rounding of top_p.

It does not know requests' text, stop conditions or which rank's word counts.
"""

import hashlib
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from parallel_llama.errors import NumericalError, UsageError
from parallel_llama.parallel import Communicator
from parallel_llama.request import SamplingParams

# Candidates that a rank sends for a row whose filters do not say how many they keep, and the most
# it sends for one that does. A row that needs more is gathered whole.
N_CANDIDATES = 64
MAX_CANDIDATES = 1024

# A sum of probabilities this close below top_p has reached it: of 25 equal tokens top_p=0.28 keeps
# 7, though 0.28 * 25 > 7 in float64, and so it is whichever way a sum over ranks was rounded.
TOP_P_SLACK = 1e-12

# Logits that are widened to float64 at once: small enough to stay in a core's own cache.
_CHUNK = 1 << 16

# Columns of the head exchange: one float64 row per draw and rank, then K values and K token ids.
_N_LOCAL = 0  # rows of the vocabulary that the rank holds
_LSE = 1  # log-sum-exp of its logits
_MASS = 2  # filtered rows: sum of exp((logit - its largest logit) / temperature)
_SCORE, _TOKEN, _LOGIT = 3, 4, 5  # plain rows: its largest logit / temperature + noise, and whose
_N_FIXED = 6


@dataclass(frozen=True)
class Draw:
    """One token to be drawn: how, and the numbers that fix its noise.

    `choice` counts the completions of one request from 0, `position` is the place of the drawn
    token in its sequence, and `request` is named in errors.
    """

    params: SamplingParams
    seed: int
    choice: int
    position: int
    request: int | None = None


@dataclass(frozen=True)
class Sampled:
    """A drawn token with its log-probability and its likeliest alternatives.

    Log-probabilities are of the model's own distribution, log_softmax of the unscaled logits,
    whatever the temperature and the filters. `top` holds (token, logprob) of as many other tokens
    as the draw's `logprobs` asks for, likeliest first; tokens of probability 0 are left out.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def sample(
    logits: Tensor, vocab: range, draws: Sequence[Draw], comm: Communicator
) -> list[Sampled]:
    """Draw one token per row; the same on all ranks, and at every tp_size.

    Equal logits rank by token id: greedy takes the smallest, top_k keeps exactly k.

    Shapes: logits [n, V_local] local, the scores of the token ids in `vocab`; n draws.
    Raises: NumericalError, on all ranks, where a row holds nan or +inf or nothing but -inf.
    Collective: one all_gather; a second one where the candidates do not settle a row's filters.
    """
    assert logits.shape == (len(draws), len(vocab))
    if not draws:
        return []
    block = _local_block(logits, vocab, draws)
    head = _Head(comm.all_gather(block).cpu())
    _require_finite(head.lse, [_name(draw) for draw in draws])
    picks = _Picks(len(draws))
    _pick_greedy(picks, head, draws)
    _pick_plain(picks, head, draws)
    uncovered = _pick_filtered(picks, head, draws)
    if uncovered:
        rows = torch.tensor(uncovered, device=logits.device)
        full = gather_logits(logits[rows], head.vocabs, comm).cpu()
        _pick_from_full(picks, full, uncovered, draws)
    return _sampled(picks, head, draws)


def score(logits: Tensor, vocab: range, targets: Tensor, comm: Communicator) -> Tensor:
    """Natural-log probabilities of the targets, one per row.

    Shapes: logits [n, V_local] local; targets [n] int64 replicated; returns [n] float64 replicated.
    Raises: NumericalError as in `sample`; UsageError for a target outside the vocabulary.
    Collective: one all_gather.
    """
    assert logits.shape == (len(targets), len(vocab))
    if not len(targets):
        return torch.empty(0, dtype=torch.float64, device=logits.device)
    block = torch.full((len(targets), 3), -math.inf, dtype=torch.float64, device=logits.device)
    block[:, 0] = len(vocab)
    for rows, x in _chunks(logits):
        block[rows, 1] = x.logsumexp(-1)
    own = ((targets >= vocab.start) & (targets < vocab.stop)).nonzero()[:, 0]
    block[own, 2] = logits[own, targets[own] - vocab.start].double()
    blocks = comm.all_gather(block)  # [tp_size, n, 3]
    vocab_size = int(blocks[:, 0, 0].sum())
    for token in (int(targets.min()), int(targets.max())):
        if not 0 <= token < vocab_size:
            raise UsageError(
                f"token id {token} is not in the vocabulary; use 0 to {vocab_size - 1}"
            )
    lse = blocks[:, :, 1].logsumexp(0)
    _require_finite(lse, [f"scored row {row}" for row in range(len(targets))])
    return blocks[:, :, 2].amax(0) - lse


def gather_logits(logits: Tensor, vocabs: Sequence[range], comm: Communicator) -> Tensor:
    """Whole rows of logits on every rank.

    Shapes: logits [n, V_local] local; vocabs, one range per rank, ascending; returns
    [n, vocab_size] replicated.
    Collective: one all_gather, rows padded to the longest local vocabulary.
    """
    longest = max(map(len, vocabs))
    padded = F.pad(logits, (0, longest - logits.shape[1]))
    blocks = comm.all_gather(padded)  # [tp_size, n, longest]
    parts = [block[:, : len(vocab)] for block, vocab in zip(blocks, vocabs, strict=True)]
    return torch.cat(parts, dim=1)


def noise_key(draw: Draw) -> int:
    """The 64-bit key of a draw's noise, as a signed integer."""
    counter = struct.pack("<qqq", draw.seed, draw.choice, draw.position)
    return int.from_bytes(hashlib.blake2b(counter, digest_size=8).digest(), "little", signed=True)


def gumbel(keys: Tensor, tokens: Tensor) -> Tensor:
    """Standard Gumbel noise that depends on (key, token id) alone.

    The generator is SplitMix64 started at the key, and a token takes its id's place in the stream.
    Products wrap around as int64; a shift drags the sign along, so a mask takes it away.

    Shapes: keys [n] int64; tokens [n, m] or [m] int64; returns [n, m] float64.
    Source: Steele, Lea and Flood, Fast splittable pseudorandom number generators, 2014, section 5;
    the multipliers are those of Vigna's splitmix64.c.
    """
    z = (tokens + 1) * _signed(0x9E3779B97F4A7C15) + keys[:, None]  # [n, m]
    z ^= (z >> 30).bitwise_and_((1 << 34) - 1)
    z *= _signed(0xBF58476D1CE4E5B9)
    z ^= (z >> 27).bitwise_and_((1 << 37) - 1)
    z *= _signed(0x94D049BB133111EB)
    z ^= (z >> 31).bitwise_and_((1 << 33) - 1)
    # Odd multiples of 2**-53: exact in float64, and neither 0 nor 1, whose logarithms would be inf.
    uniform = (z >> 12).bitwise_and_((1 << 52) - 1).double().add_(0.5).mul_(2.0**-52)
    return uniform.log_().neg_().log_().neg_()


@dataclass
class _Filters:
    """The sampling parameters and noise keys of some rows, as columns of a batch."""

    temperature: Tensor  # [n, 1] float64
    top_k: Tensor  # [n, 1] int64, 0: off
    top_p: Tensor  # [n, 1] float64
    min_p: Tensor  # [n, 1] float64
    keys: Tensor  # [n] int64

    @classmethod
    def of(cls, draws: Sequence[Draw]) -> "_Filters":
        params = [draw.params for draw in draws]
        return cls(
            temperature=_column([each.temperature for each in params]),
            top_k=torch.tensor([[each.top_k] for each in params]),
            top_p=_column([each.top_p for each in params]),
            min_p=_column([each.min_p for each in params]),
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
        kept = in_k & in_nucleus & (weight >= self.min_p) & (logits > -math.inf)

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
        return scores.masked_fill(~kept, -math.inf).argmax(1)

    def rows(self, rows: list[int]) -> "_Filters":
        return _Filters(
            self.temperature[rows],
            self.top_k[rows],
            self.top_p[rows],
            self.min_p[rows],
            self.keys[rows],
        )


class _Head:
    """What the head exchange brought: all ranks' numbers, and their candidates in one order.

    Shapes: blocks [tp_size, n, _N_FIXED + 2 K] float64; lse [n]; values and tokens [n, K], the
    largest logits of the whole vocabulary in falling order, equal ones by token id.
    """

    def __init__(self, blocks: Tensor) -> None:
        self.blocks = blocks
        tp_size, n, width = blocks.shape
        k = (width - _N_FIXED) // 2
        borders = accumulate((int(each) for each in blocks[:, 0, _N_LOCAL]), initial=0)
        self.vocabs = [range(start, stop) for start, stop in pairwise(borders)]
        self.vocab_size = self.vocabs[-1].stop
        self.lse = blocks[:, :, _LSE].logsumexp(0)
        self.values = blocks[:, :, _N_FIXED : _N_FIXED + k].permute(1, 0, 2).reshape(n, tp_size * k)
        self.tokens = blocks[:, :, _N_FIXED + k :].permute(1, 0, 2).reshape(n, tp_size * k).long()
        if tp_size > 1 and k:
            # Ranks hold ascending token ids, so a stable sort leaves equal values ordered by id.
            self.values, order = self.values.sort(dim=1, descending=True, stable=True)
            self.values, order = self.values[:, :k], order[:, :k]
            self.tokens = self.tokens.gather(1, order)


class _Picks:
    """The chosen token and its logit, row by row."""

    def __init__(self, n: int) -> None:
        self.tokens = [-1] * n
        self.logits = [math.nan] * n

    def put(self, rows: Sequence[int], tokens: Tensor, logits: Tensor) -> None:
        for row, token, logit in zip(rows, tokens.tolist(), logits.tolist(), strict=True):
            self.tokens[row], self.logits[row] = int(token), logit


def _pick_greedy(picks: _Picks, head: _Head, draws: Sequence[Draw]) -> None:
    rows = _greedy_rows(draws)
    if rows:
        picks.put(rows, head.tokens[rows, 0], head.values[rows, 0])


def _pick_plain(picks: _Picks, head: _Head, draws: Sequence[Draw]) -> None:
    rows = _plain_rows(draws)
    if rows:
        blocks = head.blocks[:, rows]
        winner = blocks[:, :, _SCORE].argmax(0)
        best = blocks[winner, torch.arange(len(rows))]
        picks.put(rows, best[:, _TOKEN], best[:, _LOGIT])


def _pick_filtered(picks: _Picks, head: _Head, draws: Sequence[Draw]) -> list[int]:
    """Draw the filtered rows that their candidates settle. Returns: the rows that are left."""
    rows = _filtered_rows(draws)
    if not rows:
        return []
    filters = _Filters.of([draws[row] for row in rows])
    n_candidates = min(head.values.shape[1], head.vocab_size)
    values, tokens = head.values[rows, :n_candidates], head.tokens[rows, :n_candidates]
    blocks = head.blocks[:, rows]
    shift = (blocks[:, :, _N_FIXED] - values[:, 0]) / filters.temperature[:, 0]  # [tp_size, n]
    mass = (blocks[:, :, _MASS] * shift.exp()).sum(0)[:, None]
    left = _pick_settled(picks, rows, filters, values, tokens, mass, head.vocab_size)
    return [rows[each] for each in left]


def _pick_from_full(picks: _Picks, full: Tensor, rows: list[int], draws: Sequence[Draw]) -> None:
    """Draw the rows that needed their whole logits. Shapes: full [len(rows), vocab_size]."""
    vocab_size = full.shape[1]
    filters = _Filters.of([draws[row] for row in rows])
    largest = full.amax(1, keepdim=True).double()
    mass = ((full - largest) / filters.temperature).exp().sum(1, keepdim=True)  # float64
    # Sorting a whole row takes many times longer than finding its largest thousand.
    for k in (MAX_CANDIDATES, 8 * MAX_CANDIDATES, vocab_size):
        values, tokens = _leaders(full, k)
        left = _pick_settled(picks, rows, filters, values.double(), tokens, mass, vocab_size)
        if not left:
            return
        rows = [rows[each] for each in left]
        full, mass, filters = full[left], mass[left], filters.rows(left)


def _pick_settled(
    picks: _Picks,
    rows: Sequence[int],
    filters: _Filters,
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
    picks.put(
        [rows[each] for each in done],
        tokens.gather(1, place)[done, 0],
        values.gather(1, place)[done, 0],
    )
    return (~settled).nonzero()[:, 0].tolist()


def _sampled(picks: _Picks, head: _Head, draws: Sequence[Draw]) -> list[Sampled]:
    results = []
    for row, (draw, lse) in enumerate(zip(draws, head.lse.tolist(), strict=True)):
        token, top = picks.tokens[row], []
        if draw.params.logprobs:
            n = draw.params.logprobs + 1  # one more, for the chosen token may be among them
            pairs = zip(head.tokens[row, :n].tolist(), head.values[row, :n].tolist(), strict=True)
            top = [(other, value - lse) for other, value in pairs if other != token]
            top = [pair for pair in top if pair[1] > -math.inf][: n - 1]
        results.append(Sampled(token, picks.logits[row] - lse, tuple(top)))
    return results


def _local_block(logits: Tensor, vocab: range, draws: Sequence[Draw]) -> Tensor:
    """This rank's part of the head exchange. Shapes: [n, _N_FIXED + 2 K] float64 local."""
    k = max(map(_n_candidates, draws))
    width = _N_FIXED + 2 * k
    block = torch.full((len(draws), width), -math.inf, dtype=torch.float64, device=logits.device)
    block[:, _N_LOCAL] = len(vocab)
    block[:, _MASS] = 0
    block[:, _N_FIXED + k :] = -1
    if len(vocab):
        for rows, x in _chunks(logits):
            _fill(block[rows], x, vocab, draws[rows], k)
    return block


def _fill(block: Tensor, x: Tensor, vocab: range, draws: Sequence[Draw], k: int) -> None:
    """Write the numbers of some rows. Shapes: block [n, width]; x [n, V_local] float64 local."""
    block[:, _LSE] = x.logsumexp(-1)
    plain = _plain_rows(draws)
    if plain:
        block[plain, _SCORE : _LOGIT + 1] = _plain_leaders(
            _rows(x, plain), vocab, [draws[row] for row in plain]
        )
    # One maximum is several times cheaper than the largest 64: rows share the work by their need.
    needs = [_n_candidates(draw) for draw in draws]
    for rows, n_leaders in (
        ([row for row, need in enumerate(needs) if need == 1], 1),
        ([row for row, need in enumerate(needs) if need > 1], k),
    ):
        if rows:
            values, places = _leaders(_rows(x, rows), n_leaders)
            n_found = values.shape[1]
            block[rows, _N_FIXED : _N_FIXED + n_found] = values
            block[rows, _N_FIXED + k : _N_FIXED + k + n_found] = (places + vocab.start).double()
    filtered = _filtered_rows(draws)
    if filtered:
        temperature = _column([draws[row].params.temperature for row in filtered]).to(x.device)
        # Rows of nothing but -inf on this rank have no mass; -inf minus itself would be nan.
        largest = block[filtered, _N_FIXED, None].clamp(min=-torch.finfo(x.dtype).max)
        block[filtered, _MASS] = ((_rows(x, filtered) - largest) / temperature).exp().sum(-1)


def _plain_leaders(x: Tensor, vocab: range, draws: Sequence[Draw]) -> Tensor:
    """This rank's best token of each unfiltered draw. Shapes: [n, V_local] -> [n, 3] float64."""
    keys = torch.tensor([noise_key(draw) for draw in draws], device=x.device)
    temperature = _column([draw.params.temperature for draw in draws]).to(x.device)
    tokens = torch.arange(vocab.start, vocab.stop, device=x.device)
    scores, places = gumbel(keys, tokens).add_(x / temperature).max(-1, keepdim=True)
    return torch.cat([scores, (places + vocab.start).double(), x.gather(1, places)], dim=1)


def _leaders(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest values of each row and their places, in falling order, equal ones by place.

    Shapes: x [n, m]; returns [n, min(k, m)] twice.
    """
    if k == 1:
        return x.max(-1, keepdim=True)  # the first of equal ones
    if k >= x.shape[1]:
        return x.sort(dim=1, descending=True, stable=True)
    values, places = x.topk(k)
    places, order = places.sort(-1)
    values, order = values.gather(1, order).sort(dim=1, descending=True, stable=True)
    places = places.gather(1, order)
    # topk takes any of several values equal to the smallest it returns; the first are wanted.
    smallest = values[:, -1:]
    is_open = ((x >= smallest).sum(-1) > k) & (smallest[:, 0] > -math.inf)
    for row in is_open.nonzero()[:, 0].tolist():
        all_places = (x[row] >= smallest[row]).nonzero()[:, 0]
        _, order = x[row, all_places].sort(dim=0, descending=True, stable=True)
        places[row] = all_places[order[:k]]
    return values, places


def _n_candidates(draw: Draw) -> int:
    """How many of its largest logits each rank sends for a row; known from its parameters alone."""
    params = draw.params
    n = params.logprobs + 1 if params.logprobs else 0
    if params.is_greedy:
        return max(n, 1)
    if params.is_filtered:
        return max(n, min(params.top_k or N_CANDIDATES, MAX_CANDIDATES))
    return n


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


def _chunks(logits: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Some rows at a time in float64, so that the wide copy of a long prefill stays small."""
    step = max(1, _CHUNK // max(1, logits.shape[1]))
    for start in range(0, len(logits), step):
        rows = slice(start, start + step)
        yield rows, logits[rows].double()


def _rows(x: Tensor, rows: list[int]) -> Tensor:
    """x[rows] without a copy where they are all of it."""
    return x if len(rows) == len(x) else x[rows]


def _column(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None]


def _signed(word: int) -> int:
    """A 64-bit word as the signed integer of the same bits."""
    return word - (1 << 64) if word >> 63 else word


def _name(draw: Draw) -> str:
    owner = "a request" if draw.request is None else f"request {draw.request}"
    return f"{owner}, token at position {draw.position}"


def _require_finite(lse: Tensor, names: Sequence[str]) -> None:
    for name, value in zip(names, lse.tolist(), strict=True):
        if not math.isfinite(value):
            raise NumericalError(
                f"{name}: the log-sum-exp of its logits is {value}; the weights are damaged or "
                "overflow their dtype: verify the checkpoint, or use a wider dtype"
            )
