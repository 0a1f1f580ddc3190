"""Sampling tokens from a vocabulary that is sharded over ranks.

The ranks are threads, and their communicator counts the exchanges. Every draw is determined by its
key, so the statistical tests give the same result in each run; their false-alarm rate matters only
for a new noise generator.
"""

import dataclasses
import itertools
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from thread_ranks import ThreadComm, run_on_threads
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from parallel_llama.errors import NumericalError, UsageError
from parallel_llama.ops import SamplingKeys, TorchOps
from parallel_llama.ops.gumbel import TILE, gumbel, tile_gumbel
from parallel_llama.parallel.collectives import Communicator, Solo
from parallel_llama.request import SamplingParams, TokenLogprob
from parallel_llama.sampling.draw import SampledToken, SamplingRow, row_sampling_key, sampling_key
from parallel_llama.sampling.pending import PendingDraws
from parallel_llama.sampling.sampler import sample
from parallel_llama.sampling.scoring import gather_logits, score, score_tokens
from parallel_llama.sampling.tiles import Tiles

# A vocabulary of 211 rows, cut evenly, unevenly, with ranks of one row and of no rows.
VOCAB = 211
HEAD = "parallel_llama.sampling.sampler"
CUTS = {
    1: [0, 211],
    2: [0, 100, 211],
    3: [0, 0, 210, 211],
    5: [0, 50, 50, 51, 200, 211],
    7: [0, 0, 1, 2, 70, 70, 211, 211],
}


def vocabs_of(tp_size: int, vocab_size: int = VOCAB) -> list[range]:
    borders = [border * vocab_size // VOCAB for border in CUTS[tp_size]]
    return [range(a, b) for a, b in itertools.pairwise(borders)]


def _n_collectives(comm: Communicator) -> int:
    assert isinstance(comm, ThreadComm)
    return sum(comm.counts.values())


def sample_cut(
    logits: Tensor, draws: Sequence[SamplingRow], tp_size: int = 1
) -> tuple[list[SampledToken], int]:
    """Sample from logits cut over ranks; returns rank 0's tokens and its number of collectives.

    Every rank's results must be the same to the last bit.
    """
    vocabs = vocabs_of(tp_size, logits.shape[1])

    def one_rank(comm: Communicator) -> tuple[list[SampledToken], int]:
        vocab = vocabs[comm.rank]
        results = sample(logits[:, vocab.start : vocab.stop], vocab, draws, comm)
        return results, _n_collectives(comm)

    results = run_on_threads(tp_size, one_rank)
    assert all(result == results[0] for result in results)
    return results[0]


def tokens_of(logits: Tensor, draws: Sequence[SamplingRow], tp_size: int = 1) -> list[int]:
    return [drawn.token for drawn in sample_cut(logits, draws, tp_size)[0]]


def draws_at(n: int, **params: Any) -> list[SamplingRow]:
    return [SamplingRow(SamplingParams(**params), 1, 0, position) for position in range(n)]


def random_logits(
    n: int,
    vocab_size: int = VOCAB,
    seed: int = 0,
    scale: float = 3.0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, vocab_size, generator=generator, dtype=torch.float64).mul(scale).to(dtype)


MIXED = [
    SamplingParams(),
    SamplingParams(logprobs=5),
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=1.3, logprobs=20),
    SamplingParams(temperature=0.7, top_k=1),
    SamplingParams(temperature=0.7, top_k=40, top_p=0.95, logprobs=0),
    SamplingParams(temperature=1.5, top_p=0.9),
    SamplingParams(temperature=1.0, min_p=0.05, logprobs=3),
    SamplingParams(temperature=3.0, top_p=0.999, min_p=0.0001),
    SamplingParams(temperature=2.0, top_k=150),
    SamplingParams(temperature=2.0, top_k=5000, top_p=0.98),
    SamplingParams(temperature=1e-6),
    SamplingParams(temperature=1e-6, top_p=0.5),
    SamplingParams(temperature=1e30, top_p=0.5),
]


def mixed_draws(n: int) -> list[SamplingRow]:
    return [
        SamplingRow(MIXED[row % len(MIXED)], row // 5, row % 3, 100 + row, row) for row in range(n)
    ]


def assert_same_logprobs(one: TokenLogprob | None, other: TokenLogprob | None) -> None:
    if one is None or other is None:
        assert one is other
        return
    assert one.token == other.token
    assert other.logprob == pytest.approx(one.logprob, abs=1e-12)
    assert [token for token, _ in one.top] == [token for token, _ in other.top]
    assert [lp for _, lp in other.top] == pytest.approx([lp for _, lp in one.top], abs=1e-12)


def logprobs_of(drawn: SampledToken) -> TokenLogprob:
    assert drawn.logprobs.token == drawn.token
    return drawn.logprobs


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("tp_size", [2, 3, 5, 7])
def test_tokens_and_logprobs_are_the_same_at_every_tp_size(tp_size, dtype):
    """bfloat16 brings ties, at the border of top_k too; tp 3, 5 and 7 have ranks without rows."""
    logits = random_logits(5 * len(MIXED), dtype=dtype)
    draws = mixed_draws(len(logits))
    alone, _ = sample_cut(logits, draws, 1)
    cut, _ = sample_cut(logits, draws, tp_size)
    for one, other in zip(alone, cut, strict=True):
        assert one.token == other.token
        assert_same_logprobs(one.logprobs, other.logprobs)


@pytest.mark.parametrize("tp_size", list(CUTS))
def test_greedy_breaks_ties_by_the_smallest_token_id(tp_size):
    """Ties within a rank and across ranks; the argmax must not depend on tp_size."""
    logits = random_logits(40).round().clamp(max=4)
    logits[0] = 0
    assert tokens_of(logits, draws_at(40), tp_size) == [
        row.index(max(row)) for row in logits.tolist()
    ]


@pytest.mark.parametrize("tp_size", list(CUTS))
def test_top_logprobs_are_the_likeliest_tokens_except_the_drawn_one(tp_size):
    logits = random_logits(20).round()  # ties: alternatives rank by (-logit, token)
    draws = draws_at(10, logprobs=7) + draws_at(10, logprobs=7, temperature=2.0)
    expected = logits.double().log_softmax(-1)
    for row, drawn in enumerate(sample_cut(logits, draws, tp_size)[0]):
        ranked = (-logits[row]).argsort(stable=True).tolist()
        others = [token for token in ranked if token != drawn.token][:7]
        scored = logprobs_of(drawn)
        assert [token for token, _ in scored.top] == others
        for token, logprob in ((drawn.token, scored.logprob), *scored.top):
            assert logprob == pytest.approx(float(expected[row, token]), abs=1e-12)


def test_logprobs_ignore_temperature_and_filters():
    logits = random_logits(30)
    draws = draws_at(30, temperature=0.5, top_k=3, logprobs=0)
    for row, drawn in enumerate(sample_cut(logits, draws)[0]):
        expected = float(logits[row].double().log_softmax(-1)[drawn.token])
        assert logprobs_of(drawn).logprob == pytest.approx(expected, abs=1e-12)
        assert logprobs_of(drawn).top == ()


def test_logprobs_are_none_unless_requested():
    assert [each.logprobs for each in sample_cut(random_logits(2), draws_at(2))[0]] == [None, None]


def test_masked_token_is_never_drawn_nor_in_top_logprobs():
    """A grammar leaves a few tokens; -inf on all rows of some rank must not become nan."""
    logits = torch.full((len(MIXED), VOCAB), -math.inf)
    logits[:, 205:208] = random_logits(len(MIXED), 3)
    for tp_size in CUTS:
        drawn, _ = sample_cut(logits, mixed_draws(len(MIXED)), tp_size)
        assert all(205 <= each.token < 208 for each in drawn)
        assert all(
            205 <= token < 208 for each in drawn if each.logprobs for token, _ in each.logprobs.top
        )


@pytest.fixture
def favoured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise that makes the token with the id `position` win if the filters keep it.

    One row per token then reveals all kept tokens, through the code of real draws.
    """
    for module in ("draw", "tiles"):
        place = f"parallel_llama.sampling.{module}.sampling_key"
        monkeypatch.setattr(place, lambda draw: draw.position)
    for module in ("ops.filters", "sampling.tiles"):
        monkeypatch.setattr(
            f"parallel_llama.{module}.gumbel",
            lambda keys, tokens: (tokens == keys[:, None]).double() * 1e12,
        )
    monkeypatch.setattr(
        "parallel_llama.sampling.tiles.tile_gumbel",
        lambda keys, tiles: (tiles == keys[:, None] // TILE).double() * 1e12,
    )


def kept_tokens(logits: Tensor, params: SamplingParams, tp_size: int) -> tuple[set[int], int]:
    """The tokens that can be sampled from one row of logits, and the collectives that were used."""
    vocab_size = len(logits)
    draws = [SamplingRow(params, 0, 0, token) for token in range(vocab_size)]
    drawn, n_collectives = sample_cut(logits.expand(vocab_size, -1), draws, tp_size)
    return {token for token, each in enumerate(drawn) if token == each.token}, n_collectives


def oracle(params: SamplingParams, logits: Tensor) -> Tensor:
    """Logits after transformers' own warpers, in the order of its generate()."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        warpers.append(MinPLogitsWarper(params.min_p))
    no_tokens = torch.empty(1, 0, dtype=torch.int64)
    filtered: Tensor = warpers(no_tokens, logits)
    return filtered[0]


@pytest.mark.usefixtures("favoured")
def test_top_p_keeps_the_fewest_of_equal_tokens():
    """0.28 * 25 is above 7 in float64; ranks with only -inf must not have a NaN probability."""
    logits = torch.full((VOCAB,), -math.inf, dtype=torch.float64)
    logits[95:120] = 0.1
    for tp_size in CUTS:
        for temperature in (0.3, 1.0, 1.7):
            params = SamplingParams(temperature=temperature, top_p=0.28)
            assert kept_tokens(logits, params, tp_size)[0] == set(range(95, 102))


@pytest.mark.usefixtures("favoured")
def test_top_p_equal_to_a_partial_sum_keeps_the_same_tokens_at_every_tp_size():
    """The sum over ranks rounds differently at every tp_size; the kept tokens must not change."""
    for seed in range(3):
        logits = random_logits(1, 40, seed=seed, scale=1.0, dtype=torch.float64)[0]
        ordered, tokens = logits.softmax(-1).sort(descending=True)
        for n in (3, 11, 24):
            params = SamplingParams(temperature=1.0, top_p=float(ordered[:n].sum()))
            for tp_size in CUTS:
                assert kept_tokens(logits, params, tp_size)[0] == set(tokens[:n].tolist())


@pytest.mark.usefixtures("favoured")
def test_top_k_keeps_exactly_k_of_equal_tokens():
    logits = torch.zeros(VOCAB)
    for tp_size in CUTS:
        for top_k in (1, 2, 60, 120):
            params = SamplingParams(temperature=1.0, top_k=top_k)
            assert kept_tokens(logits, params, tp_size)[0] == set(range(top_k))


def _one(field: str, value: int) -> dict[str, Any]:
    return {field: value}


def chi_square(counts: Tensor, probabilities: Tensor) -> float:
    """Pearson's test; returns the probability of a fit this bad, if the draws are right."""
    expected = probabilities * counts.sum()
    assert counts[expected == 0].sum() == 0
    order = expected.argsort()
    counts, expected = counts[order], expected[order]
    few = int((expected < 8).sum())  # cells too small for the approximation become one
    counts = torch.cat([counts[:few].sum()[None], counts[few:]])
    expected = torch.cat([expected[:few].sum()[None], expected[few:]])
    is_used = expected > 0
    statistic = ((counts - expected) ** 2 / expected)[is_used].sum()
    freedom = torch.tensor(float(is_used.sum() - 1), dtype=torch.float64)
    return float(torch.special.gammaincc(freedom / 2, statistic / 2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("filters", "vary"),
    [
        ({}, "position"),
        ({}, "seed"),
        ({}, "choice"),
        ({"top_k": 12}, "position"),
        ({"top_p": 0.9}, "seed"),
        ({"min_p": 0.1}, "choice"),
        ({"top_k": 30, "top_p": 0.8, "min_p": 0.02}, "position"),
    ],
)
def test_four_thousand_draws_fit_the_filtered_softmax(filters, vary):
    """False alarms: 1e-4 per case for new noise, 7 cases; wrong temperatures give below 1e-12."""
    n = 4_000
    params = SamplingParams(temperature=0.8, **filters)
    logits = random_logits(1, 40, scale=1.5, dtype=torch.float64)
    base = SamplingRow(params, 5, 0, 3)
    draws = [dataclasses.replace(base, **_one(vary, each)) for each in range(n)]
    tokens = torch.tensor(tokens_of(logits.expand(n, -1), draws, 2))
    counts = tokens.bincount(minlength=40).double()
    assert chi_square(counts, oracle(params, logits).softmax(-1)) > 1e-4


def test_consecutive_draws_are_independent():
    """Pairs of draws at neighbouring positions fill the table of 8 x 8; false alarms 1e-4."""
    logits = random_logits(1, 8, scale=1.0, dtype=torch.float64)
    tokens = torch.tensor(tokens_of(logits.expand(20_000, -1), draws_at(20_000, temperature=1.0)))
    pairs = (tokens[0::2] * 8 + tokens[1::2]).bincount(minlength=64).double()
    p = logits[0].softmax(-1)
    assert chi_square(pairs, torch.outer(p, p).flatten()) > 1e-4


def test_a_draw_depends_on_its_key_alone_and_not_on_its_batch():
    logits = random_logits(60)
    draws = mixed_draws(60)
    together = tokens_of(logits, draws, 3)
    order = list(range(60))
    random.Random(1).shuffle(order)
    shuffled = tokens_of(logits[order], [draws[row] for row in order], 3)
    assert [together[row] for row in order] == shuffled
    for row in range(0, 60, 7):
        assert tokens_of(logits[row : row + 1], draws[row : row + 1], 2) == [together[row]]


@pytest.mark.parametrize("field", ["seed", "choice", "position"])
def test_draws_change_with_seed_choice_and_position(field):
    """Two draws from 211 equal tokens agree with probability 1/211: never 10 of 100 by chance."""
    logits = torch.zeros(100, VOCAB)
    draws = draws_at(100, temperature=1.0)
    others = [
        dataclasses.replace(each, **_one(field, getattr(each, field) + 1000)) for each in draws
    ]
    agree = sum(
        a == b for a, b in zip(tokens_of(logits, draws), tokens_of(logits, others), strict=True)
    )
    assert agree < 10


def test_filters_that_keep_every_token_do_not_change_the_draw():
    """The same noise is used for the rows of a rank, for candidates and for whole rows."""
    logits = random_logits(50)
    plain = tokens_of(logits, draws_at(50, temperature=1.1), 5)
    for filters in ({"top_k": 211}, {"top_k": 9999}, {"min_p": 1e-9}, {"top_p": 1 - 1e-11}):
        assert tokens_of(logits, draws_at(50, temperature=1.1, **filters), 5) == plain


def test_extra_collective_for_few_candidates_does_not_change_draws(monkeypatch):
    logits = random_logits(60)
    draws = mixed_draws(60)
    monkeypatch.setattr(f"{HEAD}.N_CANDIDATES", 300)
    covered, n_covered = sample_cut(logits, draws, 3)
    monkeypatch.setattr(f"{HEAD}.N_CANDIDATES", 2)
    monkeypatch.setattr(f"{HEAD}.MAX_CANDIDATES", 4)
    uncovered, n_uncovered = sample_cut(logits, draws, 3)
    # One collective is for the sums of top_p, and two are for log-probabilities.
    assert (n_covered, n_uncovered) == (4, 5)
    assert [each.token for each in covered] == [each.token for each in uncovered]


@pytest.mark.parametrize(
    ("params", "n_collectives"),
    [
        ({}, 1),
        ({"logprobs": 20}, 3),
        ({"temperature": 5.0}, 1),
        ({"temperature": 5.0, "logprobs": 20}, 3),
        ({"temperature": 5.0, "top_k": 200}, 1),
        ({"temperature": 0.1, "top_p": 0.9}, 2),
        ({"temperature": 0.1, "min_p": 0.1}, 1),
        ({"temperature": 1e-6, "top_p": 0.999}, 2),
        ({"temperature": 1e30, "top_p": 0.9}, 3),
        ({"temperature": 1e30, "min_p": 0.1}, 2),
    ],
)
def test_logprobs_top_p_and_undecided_filters_add_collectives(params, n_collectives):
    assert sample_cut(random_logits(4), draws_at(4, **params), 3)[1] == n_collectives


class _Scales(Solo):
    """A single rank that counts the bytes that it would send."""

    sent_bytes = 0

    def all_gather(self, x: Tensor) -> Tensor:
        self.sent_bytes += x.nbytes
        return super().all_gather(x)


def test_a_greedy_row_sends_16_bytes_whatever_the_vocabulary():
    comm = _Scales()
    sample(random_logits(1, 5000), range(5000), draws_at(1), comm)
    assert comm.sent_bytes == 16


def test_empty_batch_needs_no_collective():
    assert sample_cut(torch.empty(0, VOCAB), [], 2) == ([], 0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("params", [MIXED[0], MIXED[2], MIXED[6]])
def test_nan_or_inf_logits_raise_an_error_that_names_the_request(bad, params):
    logits = random_logits(3)
    logits[1, slice(None) if bad == -math.inf else 207] = bad
    draws = [SamplingRow(params, 0, 0, 9, request) for request in (40, 41, 42)]
    with pytest.raises(NumericalError, match="request 41, token at position 9"):
        sample_cut(logits, draws, 3)


def best_of(logits: Tensor, vocab: range, draws: Sequence[SamplingRow]) -> Tensor:
    """The result of the device's draw from a step's logits."""
    rows = [row_sampling_key(each.params, each.seed, each.choice, each.position) for each in draws]
    keys, temperatures = zip(*rows, strict=True)
    sampling_keys = SamplingKeys(
        torch.tensor(keys), torch.tensor(temperatures, dtype=torch.float64)
    )
    return TorchOps().draw(logits[:, vocab.start : vocab.stop], sampling_keys, vocab.start)


@pytest.mark.parametrize("tp_size", list(CUTS))
def test_device_draws_equal_sampled_tokens(tp_size):
    """Greedy and unfiltered rows, some with equal logits. The tokens are on the device before the
    read, and log-probabilities are computed only on request.
    """
    logits = random_logits(20).round()
    draws = [
        SamplingRow(
            SamplingParams(temperature=(0, 0.5, 1e-7)[row % 3], logprobs=row % 2 or None), row, 0, 9
        )
        for row in range(20)
    ]
    plain = [
        dataclasses.replace(draw, params=dataclasses.replace(draw.params, logprobs=None))
        for draw in draws
    ]
    expected = tokens_of(logits, draws)

    def one_rank(
        comm: Communicator,
    ) -> tuple[list[int], list[SampledToken], bool, list[SampledToken]]:
        vocab = vocabs_of(tp_size)[comm.rank]
        best, own = best_of(logits, vocab, draws), logits[:, vocab.start : vocab.stop]
        pending = PendingDraws(own, best, vocab, VOCAB, plain, comm, TorchOps())
        known = sample(own, vocab, draws, comm, best)
        assert known == sample(own, vocab, draws, comm)
        return pending.tokens.tolist(), *pending.read(), known

    for tokens, read, were_known, known in run_on_threads(tp_size, one_rank):
        assert tokens == expected and were_known
        assert [drawn.token for drawn in read] == [drawn.token for drawn in known] == expected


@pytest.mark.parametrize("tp_size", list(CUTS))
@pytest.mark.parametrize("vocab_size", [VOCAB, 40])
def test_filtered_draws_are_on_the_device_if_candidates_decide_them(
    tp_size, vocab_size, monkeypatch
):
    """Rows of all kinds in one batch. An undecided row has the token -1 until the read, which
    returns the token that the sampler draws.
    """
    monkeypatch.setattr("parallel_llama.sampling.pending.N_CANDIDATES", 16)
    settings = [
        params
        for params in (dataclasses.replace(each, logprobs=None) for each in MIXED)
        if params.top_k <= 16
    ]
    settings += [
        SamplingParams(temperature=0.9, top_k=16, top_p=0.9, min_p=0.02),
        SamplingParams(temperature=9, top_k=3, min_p=0.001),
        SamplingParams(temperature=5, top_p=0.05),
    ]
    draws = [SamplingRow(params, 3, 0, at) for at, params in enumerate(settings * 4)]
    logits = random_logits(len(draws), vocab_size)
    logits[1::3] = logits[1::3].round()  # creates equal logits
    expected = sample_cut(logits, draws)[0]

    def one_rank(comm: Communicator) -> tuple[list[int], list[SampledToken], bool]:
        vocab = vocabs_of(tp_size, vocab_size)[comm.rank]
        own, best = logits[:, vocab.start : vocab.stop], best_of(logits, vocab, draws)
        pending = PendingDraws(own, best, vocab, vocab_size, draws, comm, TorchOps())
        own.zero_() if comm.size == 1 else None  # as the next step may do
        return pending.tokens.tolist(), *pending.read()

    for tokens, read, were_known in run_on_threads(tp_size, one_rank):
        assert read == expected
        undecided = [row for row, token in enumerate(tokens) if token != expected[row].token]
        assert {tokens[row] for row in undecided} <= {-1} and len(undecided) < len(draws) / 3
        assert were_known == (not undecided)
        # 16 candidates do not cover the nucleus of rows with a high temperature.
        assert len(undecided) > 4


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("temperature", "top_p"), [(0.0, 1.0), (0.7, 1.0), (0.7, 0.9)])
def test_device_draw_from_nan_or_inf_logits_names_the_request(temperature, top_p, bad):
    logits = random_logits(3)
    logits[1, slice(None) if bad == -math.inf else 207] = bad
    params = SamplingParams(temperature=temperature, top_p=top_p)
    draws = [SamplingRow(params, 0, 0, 9, row) for row in (40, 41, 42)]

    def one_rank(comm: Communicator) -> None:
        vocab = vocabs_of(3)[comm.rank]
        own, best = logits[:, vocab.start : vocab.stop], best_of(logits, vocab, draws)
        pending = PendingDraws(own, best, vocab, VOCAB, draws, comm, TorchOps())
        with pytest.raises(NumericalError, match="request 41, token at position 9"):
            pending.read()

    run_on_threads(3, one_rank)


def test_tiny_temperature_is_greedy_and_huge_one_draws_many_tokens():
    logits = random_logits(300) * 1e4
    greedy = tokens_of(logits, draws_at(300))
    assert tokens_of(logits, draws_at(300, temperature=1e-6), 3) == greedy
    assert tokens_of(logits, draws_at(300, temperature=1e-6, top_p=0.99), 3) == greedy
    assert len(set(tokens_of(logits, draws_at(300, temperature=1e300), 3))) > 100


@pytest.mark.parametrize("tp_size", list(CUTS))
def test_score_is_log_softmax_of_the_targets(tp_size, monkeypatch):
    monkeypatch.setattr(
        "parallel_llama.sampling.scoring._CHUNK", 1000
    )  # several rows per chunk, and fewer in the last
    logits = random_logits(23)
    targets = torch.arange(23) * 9
    vocabs = vocabs_of(tp_size)

    def one_rank(comm: Communicator) -> tuple[Tensor, int]:
        vocab = vocabs[comm.rank]
        scores = score(logits[:, vocab.start : vocab.stop], vocab, targets, comm)
        return scores, _n_collectives(comm)

    expected = logits.double().log_softmax(-1).gather(1, targets[:, None])[:, 0]
    for scores, n_collectives in run_on_threads(tp_size, one_rank):
        assert n_collectives == 2
        torch.testing.assert_close(scores, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("target", [-1, VOCAB])
def test_score_refuses_a_target_outside_the_vocabulary(target):
    """Without the check a target that no rank holds scores -inf, as if it were impossible."""
    vocabs = vocabs_of(3)

    def one_rank(comm: Communicator) -> Tensor:
        vocab = vocabs[comm.rank]
        return score(torch.zeros(1, len(vocab)), vocab, torch.tensor([target]), comm)

    with pytest.raises(UsageError, match=str(target)):
        run_on_threads(3, one_rank)


def test_score_refuses_nan_logits():
    logits = torch.zeros(2, VOCAB)
    logits[1, 3] = math.nan
    with pytest.raises(NumericalError, match="row 1"):
        score(logits, range(VOCAB), torch.tensor([0, 0]), Solo())


@pytest.mark.parametrize("tp_size", [1, 2, 3, 7])
def test_score_tokens_returns_the_likeliest_other_tokens(tp_size):
    """Ties rank by token id, across ranks too; each row requests its own number, at most 20."""
    logits = random_logits(23).round()
    logits[3, 2:] = -math.inf  # fewer tokens than alternatives
    targets = torch.arange(23) * 9
    targets[3] = 1
    n_top = [row % 21 for row in range(23)]
    vocabs = vocabs_of(tp_size)

    def one_rank(comm: Communicator) -> tuple[list[TokenLogprob], int]:
        vocab = vocabs[comm.rank]
        own = logits[:, vocab.start : vocab.stop]
        return score_tokens(own, vocab, targets, n_top, comm), _n_collectives(comm)

    expected = logits.double().log_softmax(-1)
    for scored, n_collectives in run_on_threads(tp_size, one_rank):
        assert n_collectives == 2
        for row, each in enumerate(scored):
            target = int(targets[row])
            ranked = (-logits[row]).argsort(stable=True).tolist()
            others = [t for t in ranked if t != target and logits[row, t] > -math.inf]
            assert each.token == target
            assert [token for token, _ in each.top] == others[: n_top[row]]
            for token, logprob in ((target, each.logprob), *each.top):
                assert logprob == pytest.approx(float(expected[row, token]), abs=1e-12)


@pytest.mark.parametrize("k", [2, 5, 20])
def test_top_k_of_tiles_equals_a_stable_sort(k):
    """Ties at the border, more tiles than k, and tiles that reach beyond the vocabulary."""
    logits = random_logits(20, 9000).mul(4).round()
    for vocab in (range(0, 9000), range(100, 9100)):
        values, tokens = Tiles.of(logits, vocab).top_k(k)
        order = (-logits).argsort(stable=True)[:, :k]
        assert torch.equal(tokens - vocab.start, order)
        assert torch.equal(values, logits.gather(1, order))


@pytest.mark.parametrize("tp_size", list(CUTS))
def test_gathered_logits_are_the_whole_rows(tp_size):
    logits = random_logits(3)
    vocabs = vocabs_of(tp_size)

    def one_rank(comm: Communicator) -> Tensor:
        vocab = vocabs[comm.rank]
        return gather_logits(logits[:, vocab.start : vocab.stop], vocabs, comm)

    for gathered in run_on_threads(tp_size, one_rank):
        assert torch.equal(gathered, logits)


@pytest.mark.parametrize("vocab_size", [211, 256])
def test_scoring_and_sampling_do_not_modify_the_logits(vocab_size):
    """Regression: float64 logits of whole tiles (256) are not copied, and were changed in place."""
    logits = random_logits(len(MIXED), vocab_size, dtype=torch.float64)
    before = logits.clone()
    sample_cut(logits, mixed_draws(len(MIXED)))
    score(logits, range(vocab_size), torch.zeros(len(logits)).long(), Solo())
    assert torch.equal(logits, before)


def test_logits_from_inference_mode_can_be_sampled_outside_it():
    with torch.inference_mode():
        logits = random_logits(len(MIXED)) * 1.0
    assert tokens_of(logits, mixed_draws(len(MIXED)), 2) == tokens_of(
        logits.clone(), mixed_draws(len(MIXED)), 2
    )


def _splitmix64(state: int) -> int:
    """The generator in Python's unbounded integers, as its authors define it."""
    mask = (1 << 64) - 1
    z = state & mask
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
    return z ^ (z >> 31)


def _exponential(key: int, place: int) -> tuple[float, int]:
    word = _splitmix64(key + place * 0x9E3779B97F4A7C15)
    uniform = ((word >> 12) + 0.5) / 2**52
    assert 0 < uniform < 1
    return -math.log(uniform), word & 127


def test_gumbel_noise_matches_the_splitmix64_reference():
    """Pins the shifts and the wrap-around of int64, for keys of both signs and large ids."""
    assert _splitmix64(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF  # first output for seed 0
    rng = random.Random(3)
    keys = [0, -1, 2**63 - 1, -(2**63), *(rng.randrange(-(2**63), 2**63) for _ in range(50))]
    tokens = [*range(128), 2**31 - 1, *(rng.randrange(10**6) for _ in range(50))]
    noise = gumbel(torch.tensor(keys), torch.tensor(tokens))
    for key, row in zip(keys, noise.tolist(), strict=True):
        assert row.index(max(row[:128])) == _exponential(key, 0)[1]
        for token, value in zip(tokens, row, strict=True):
            first, winner = _exponential(key, -(token // 128))
            arrival = first / 128 + (token % 128 != winner) * _exponential(key, token + 1)[0]
            assert value == pytest.approx(-math.log(arrival), rel=1e-12, abs=1e-12)


def test_the_noise_is_standard_gumbel_and_independent_of_its_neighbours():
    """Compares arrival times, of 4 tokens and 50,000 keys each, with the exponential distribution.

    Chi-square tests of the deciles of each token, and of pairs of deciles of two tokens. For new
    noise, each test has a false-alarm rate of 1e-4.
    """
    keys = torch.arange(50_000) * 7919
    arrivals = gumbel(keys, torch.tensor([0, 5, 127, 300])).neg().exp()
    deciles = (-(-arrivals).expm1() * 10).long()  # [n, 4], 0 to 9
    uniform = torch.full((10,), 0.1, dtype=torch.float64)
    for token in range(4):
        assert chi_square(deciles[:, token].bincount(minlength=10).double(), uniform) > 1e-4
    for one, other in ((0, 1), (1, 2), (2, 3)):
        pairs = (deciles[:, one] * 10 + deciles[:, other]).bincount(minlength=100).double()
        assert chi_square(pairs, torch.full((100,), 0.01, dtype=torch.float64)) > 1e-4


def test_tile_noise_is_the_largest_noise_of_its_tokens():
    """A draw skips tiles by this bound."""
    keys = torch.arange(500) * 31
    noise = gumbel(keys, torch.arange(3 * 128)).view(500, 3, 128)
    bound = tile_gumbel(keys, torch.arange(3))
    torch.testing.assert_close(noise.amax(-1), bound, rtol=1e-15, atol=0)


@pytest.mark.parametrize("scale", [0.0, 0.5, 3.0, 30.0])
def test_skipping_tiles_does_not_change_an_unfiltered_draw(scale):
    """Compares with the noise of every token, over forty tiles; shards end inside some tiles."""
    logits = random_logits(60, 5000, scale=scale)
    draws = draws_at(60, temperature=0.9)
    keys = torch.tensor([sampling_key(draw) for draw in draws])
    scores = logits / torch.tensor(0.9, dtype=torch.float64) + gumbel(keys, torch.arange(5000))
    for tp_size in (1, 3, 5):
        assert tokens_of(logits, draws, tp_size) == scores.argmax(1).tolist()


def test_the_noise_of_a_token_does_not_depend_on_its_neighbours():
    """To the last bit: a rank computes noise for its rows, and all ranks again for candidates."""
    keys = torch.tensor([sampling_key(draw) for draw in draws_at(3)])
    whole = gumbel(keys, torch.arange(4001))
    for start, stop in ((0, 4001), (1, 9), (7, 8), (3000, 4001), (5, 3002)):
        assert torch.equal(gumbel(keys, torch.arange(start, stop)), whole[:, start:stop])


def test_the_noise_of_a_draw_is_pinned():
    """A seed must give the same completion after an upgrade; change this only on purpose."""
    assert sampling_key(SamplingRow(SamplingParams(), 1, 2, 3)) == -5405627362230748553
    logits = torch.zeros(8, VOCAB)
    assert tokens_of(logits, draws_at(8, temperature=1.0)) == [3, 103, 125, 207, 168, 23, 141, 200]
