"""Changes of the logits before sampling: biases, bans, masks and penalties.

The oracle is transformers' own processors and warpers. transformers has no presence and frequency
penalties, which are compared with their formula in plain Python.
"""

import dataclasses
import math
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from test_sampling import (
    CUTS,
    chi_square,
    favoured,
    logprobs_of,
    random_logits,
    sample_cut,
    tokens_of,
    vocabs_of,
)
from thread_ranks import run_on_threads
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from parallel_llama.errors import NumericalError
from parallel_llama.parallel.collectives import Communicator
from parallel_llama.request import Request, SamplingParams
from parallel_llama.sampling.draw import History, NoTokenLeft, SampledToken, SamplingRow, adjust
from parallel_llama.sampling.sampler import sample

__all__ = ["favoured"]  # a fixture

VOCAB = 60


def bits(allowed: Sequence[int], vocab_size: int = VOCAB) -> bytes:
    mask = bytearray(-(-vocab_size // 8))
    for token in allowed:
        mask[token // 8] |= 1 << token % 8
    return bytes(mask)


def history_of(prompt: Sequence[int], drawn: Sequence[int]) -> History:
    history = History(prompt)
    for token in drawn:
        history.append(token)
    return history


def adjust_cut(logits: Tensor, draws: Sequence[SamplingRow], tp_size: int = 1) -> Tensor:
    """The adjusted logits of all ranks, side by side."""
    vocabs = vocabs_of(tp_size, logits.shape[1])
    return torch.cat([adjust(logits[:, v.start : v.stop], v, draws) for v in vocabs], dim=1)


class Case:
    """One random request in the middle of its completion, and what transformers makes of it."""

    def __init__(self, rng: random.Random, seed: int) -> None:
        self.prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 30))]
        self.drawn = [rng.randrange(VOCAB) for _ in range(rng.randint(0, 12))]
        stop_ids = frozenset(rng.sample(range(VOCAB), rng.randint(1, 3)))
        biased = rng.sample(range(VOCAB), rng.choice([0, 0, 1, 5, 20]))
        self.params = SamplingParams(
            temperature=rng.choice([0.3, 0.7, 1.0, 2.5]),
            top_k=rng.choice([0, 0, 1, 5, 15, 25, 59, 60, 1000]),
            top_p=rng.choice([1.0, 1.0, 0.999, 0.9, rng.uniform(0.01, 1)]),
            min_p=rng.choice([0.0, 0.0, 1e-4, 0.05, rng.uniform(0, 1)]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.1, 1.3, 5.0, 0.7]),
            min_tokens=rng.choice([0, 5, 12, 20]),
            # transformers keeps biases in float32, which holds eighths exactly.
            logit_bias=tuple((t, rng.randint(-160, 160) / 8) for t in biased),
        )
        self.request = Request(0, tuple(self.prompt), self.params, 0, stop_ids)
        self.allowed = sorted(rng.sample(range(VOCAB), 40)) if rng.random() < 0.3 else None
        self.logits = random_logits(1, VOCAB, seed=seed, scale=2.0, dtype=torch.float64)

    def draw(self, position: int) -> SamplingRow:
        return SamplingRow(
            self.params,
            seed=0,
            choice=0,
            position=position,
            history=history_of(self.prompt, self.drawn),
            banned=self.request.banned_ids(len(self.drawn)),
            mask=None if self.allowed is None else bits(self.allowed),
        )

    def expected(self, with_warpers: bool) -> Tensor:
        """Processed logits. Shapes: [VOCAB] float64."""
        params, steps = self.params, LogitsProcessorList()
        if params.logit_bias:
            steps.append(SequenceBiasLogitsProcessor([[[t], b] for t, b in params.logit_bias]))
        if params.repetition_penalty != 1:
            steps.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
        eos = sorted(self.request.stop_ids)
        steps.append(MinNewTokensLengthLogitsProcessor(len(self.prompt), params.min_tokens, eos))
        if self.allowed is not None:
            allowed = self.allowed
            steps.append(PrefixConstrainedLogitsProcessor(lambda _row, _tokens: allowed, 1))
        if with_warpers:
            steps.append(TemperatureLogitsWarper(params.temperature))
            if params.top_k:
                steps.append(TopKLogitsWarper(params.top_k))
            if params.top_p < 1:
                steps.append(TopPLogitsWarper(params.top_p))
            if params.min_p:
                steps.append(MinPLogitsWarper(params.min_p))
        tokens = torch.tensor([self.prompt + self.drawn])
        processed: Tensor = steps(tokens, self.logits.clone())
        return processed[0]


@pytest.mark.slow
@pytest.mark.usefixtures("favoured")
def test_kept_tokens_and_distributions_match_transformers_in_150_cases(monkeypatch):
    """In transformers' order of processors and warpers; few candidates, to reach every path.

    The noise makes the token with the id `position` win if the filters keep it, so VOCAB draws
    reveal the kept tokens through the code of real draws, on 1 to 7 ranks in turn.
    """
    monkeypatch.setattr("parallel_llama.sampling.sampler.N_CANDIDATES", 12)
    monkeypatch.setattr("parallel_llama.sampling.sampler.MAX_CANDIDATES", 20)
    rng = random.Random(0)
    n_adjusted = n_second = 0
    for number in range(150):
        case, tp_size = Case(rng, number), list(CUTS)[number % len(CUTS)]
        draw = case.draw(0)
        adjusted = adjust_cut(case.logits, [draw], tp_size)
        torch.testing.assert_close(adjusted[0], case.expected(False), rtol=1e-14, atol=1e-13)
        draws = [dataclasses.replace(draw, position=token) for token in range(VOCAB)]
        drawn, n_collectives = sample_cut(case.logits.expand(VOCAB, -1), draws, tp_size)
        kept = torch.tensor([token == own.token for token, own in enumerate(drawn)])
        expected = case.expected(True)
        assert torch.equal(kept, expected > -math.inf), (number, case.params)
        scaled = (adjusted[0] / case.params.temperature).masked_fill(~kept, -math.inf)
        torch.testing.assert_close(scaled.softmax(-1), expected.softmax(-1), rtol=0, atol=1e-12)
        n_adjusted += draws[0].is_adjusted
        has_mass = case.params.top_p < 1 and not 0 < case.params.top_k < VOCAB
        n_second += n_collectives > 1 + has_mass
    assert 75 < n_adjusted < 150
    assert 25 < n_second < 125  # with and without an extra collective


def formula(logits: list[float], case: Case, drawn: Sequence[int]) -> list[float]:
    """The documented order in plain Python, one token at a time."""
    params, count = case.params, Counter(drawn)
    banned = case.request.banned_ids(len(drawn))
    biases = dict(params.logit_bias)
    result = []
    for token, logit in enumerate(logits):
        value = logit + biases.get(token, 0.0)
        if token in banned or (case.allowed is not None and token not in case.allowed):
            value = -math.inf
        if token in case.prompt or count[token]:
            factor = params.repetition_penalty
            value = value / factor if value > 0 else value * factor
        if count[token]:
            value -= params.presence_penalty + params.frequency_penalty * count[token]
        result.append(value)
    return result


def penalized_case(rng: random.Random, seed: int) -> Case:
    case = Case(rng, seed)
    params: dict[str, Any] = {
        "temperature": 1.0,
        "repetition_penalty": case.params.repetition_penalty,
        "min_tokens": case.params.min_tokens,
        "logit_bias": case.params.logit_bias,
        "presence_penalty": rng.uniform(-2, 2),
        "frequency_penalty": rng.choice([0.0, rng.uniform(-2, 2)]),
    }
    case.params = SamplingParams(**params)
    case.request = Request(0, tuple(case.prompt), case.params, 0, case.request.stop_ids)
    return case


@pytest.mark.parametrize("tp_size", [1, 2, 3, 7])
def test_penalties_biases_and_bans_match_the_documented_formula(tp_size):
    rng = random.Random(tp_size)
    for number in range(200):
        case = penalized_case(rng, number)
        adjusted = adjust_cut(case.logits, [case.draw(0)], tp_size)
        expected = formula(case.logits[0].tolist(), case, case.drawn)
        expected_row = torch.tensor([expected], dtype=torch.float64)
        torch.testing.assert_close(adjusted, expected_row, rtol=0, atol=1e-12)


def test_presence_and_frequency_penalties_ignore_prompt_tokens():
    params = SamplingParams(presence_penalty=1.5, frequency_penalty=0.5)
    draw = SamplingRow(params, 0, 0, 9, history=history_of([1, 1, 2], [2, 2, 3]))
    change = adjust(torch.zeros(1, 5), range(5), [draw])[0]
    assert change.tolist() == [0, 0, -2.5, -2, 0]


def test_penalties_count_draft_tokens_only_in_later_rows_of_the_step():
    """Row j of a speculative step counts the j drafts before row j, accepted or not."""
    rng = random.Random(5)
    for number in range(100):
        case = penalized_case(rng, number)
        drafts = tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, 6)))
        history = history_of(case.prompt, case.drawn)
        rows = [
            SamplingRow(case.params, 0, 0, j, history=history, drafts=drafts[:j])
            for j in range(len(drafts) + 1)
        ]
        alone = [
            SamplingRow(
                case.params, 0, 0, j, history=history_of(case.prompt, [*case.drawn, *drafts[:j]])
            )
            for j in range(len(drafts) + 1)
        ]
        logits = case.logits.expand(len(rows), -1)
        for _ in range(2):  # counting drafts twice does not change the history
            assert torch.equal(adjust_cut(logits, rows, 2), adjust_cut(logits, alone, 2))


def test_growing_history_counts_every_drawn_token():
    """Covers many enlargements of the arrays, and ids that are in the prompt."""
    rng = random.Random(1)
    prompt = [rng.randrange(500) for _ in range(40)]
    history, drawn = History(prompt), list[int]()
    for _ in range(700):
        drawn.append(rng.randrange(500))
        history.append(drawn[-1])
        tokens, n_drawn = history.counts()
        counted = dict(zip(tokens.tolist(), n_drawn.tolist(), strict=True))
        assert len(counted) == len(tokens)
        if len(drawn) % 50 == 0:
            assert counted == {token: drawn.count(token) for token in {*prompt, *drawn}}


def test_unadjusted_rows_keep_their_logits_and_need_no_copy():
    logits = random_logits(3, VOCAB)
    before = logits.clone()
    plain, biased = SamplingParams(), SamplingParams(logit_bias=((7, -3.0),))
    draws = [SamplingRow(plain, 0, 0, 0)] * 3
    assert adjust(logits, range(VOCAB), draws) is logits
    adjusted = adjust(logits, range(VOCAB), [draws[0], SamplingRow(biased, 0, 0, 0), draws[2]])
    assert torch.equal(adjusted[[0, 2]], logits[[0, 2]])
    assert torch.equal((adjusted - logits).nonzero(), torch.tensor([[1, 7]]))
    assert torch.equal(logits, before)


def test_small_bias_is_not_lost_on_bfloat16_logits():
    """bfloat16 has steps of 0.5 at 100: a bias of 0.1 would vanish."""
    logits = torch.full((1, 9), 100.0, dtype=torch.bfloat16)
    draw = SamplingRow(SamplingParams(logit_bias=((4, 0.1),)), 0, 0, 0)
    assert sample_cut(logits, [draw])[0][0].token == 4


@pytest.mark.parametrize("tp_size", list(CUTS))
def test_mask_has_token_t_in_bit_t_mod_8_and_bans_tokens_beyond_its_end(tp_size):
    """Shards begin and end inside bytes; 19 bytes do not cover tokens from 152 on."""
    logits = torch.zeros(1, 211)
    mask = bytes([0b00000010, 0b10000001, *bytes(16), 0b01000000])
    draw = SamplingRow(SamplingParams(), 0, 0, 0, mask=mask)
    adjusted = adjust_cut(logits, [draw], tp_size)
    assert (adjusted[0] > -math.inf).nonzero()[:, 0].tolist() == [1, 8, 15, 150]


def mixed_case_draws() -> tuple[Tensor, list[SamplingRow]]:
    """A batch of all kinds of rows: greedy, plain or filtered, with and without logit changes."""
    rng = random.Random(8)
    draws: list[SamplingRow] = []
    for row in range(72):
        prompt = [rng.randrange(211) for _ in range(30)]
        params = SamplingParams(
            temperature=(0.0, 0.9, 1.3)[row % 3],
            top_p=0.95 if row % 2 else 1.0,
            logprobs=4 if row % 5 == 0 else None,
            repetition_penalty=1.4 if row % 4 == 1 else 1.0,
            frequency_penalty=0.8 if row % 4 == 2 else 0.0,
            logit_bias=((3, 2.0), (150, 4.5)) if row % 7 == 0 else (),
        )
        allowed = rng.sample(range(211), 50)
        draws.append(
            SamplingRow(
                params,
                seed=row,
                choice=row % 3,
                position=40 + row,
                request=row,
                history=history_of(prompt, prompt[:20]),
                drafts=tuple(prompt[: row % 4]),
                banned=frozenset(allowed[:5]) if row % 9 == 0 else frozenset(),
                mask=bits(allowed, 211) if row % 8 == 3 else None,
            )
        )
    return random_logits(72), draws


@pytest.mark.parametrize("tp_size", [2, 3, 5, 7])
def test_adjusted_draws_are_the_same_at_every_tp_size(tp_size):
    logits, draws = mixed_case_draws()
    alone, cut = sample_cut(logits, draws, 1)[0], sample_cut(logits, draws, tp_size)[0]
    assert [each.token for each in cut] == [each.token for each in alone]


def test_an_adjusted_draw_depends_on_no_other_row():
    logits, draws = mixed_case_draws()
    together = tokens_of(logits, draws, 2)
    order = list(range(len(draws)))
    random.Random(2).shuffle(order)
    shuffled = tokens_of(logits[order], [draws[row] for row in order], 2)
    assert shuffled == [together[row] for row in order]
    for row in order[:20]:
        assert tokens_of(logits[row : row + 1], [draws[row]], 3) == [together[row]]


def test_logprobs_are_computed_from_unadjusted_logits():
    logits, draws = mixed_case_draws()
    expected = logits.double().log_softmax(-1)
    scored = [row for row, draw in enumerate(draws) if draw.params.logprobs is not None]
    assert any(draws[row].is_adjusted for row in scored)
    for tp_size in (1, 3):
        drawn = sample_cut(logits, draws, tp_size)[0]
        assert [row for row, each in enumerate(drawn) if each.logprobs is not None] == scored
        for row in scored:
            own = logprobs_of(drawn[row])
            assert own.logprob == pytest.approx(float(expected[row, own.token]), abs=1e-12)
            ranked = (-logits[row]).argsort(stable=True).tolist()
            others = [token for token in ranked if token != own.token][:4]
            assert [token for token, _ in own.top] == others


@pytest.mark.slow
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}, {"top_k": 12}])
def test_four_thousand_penalized_draws_fit_their_distribution(filters):
    """False alarms: 1e-4 per case for new noise; without the penalties the fit is below 1e-12."""
    n = 4_000
    params = SamplingParams(
        temperature=0.8, repetition_penalty=1.5, logit_bias=((2, 1.5), (9, -2.0)), **filters
    )
    case = Case(random.Random(3), 3)
    case.params, case.allowed, case.drawn = params, None, []
    case.request = Request(0, tuple(case.prompt), params, 0, frozenset({5}))
    history = history_of(case.prompt, [])
    draws = [SamplingRow(params, 5, 0, each, history=history) for each in range(n)]
    counts = torch.tensor(tokens_of(case.logits.expand(n, -1), draws, 2)).bincount(minlength=VOCAB)
    assert chi_square(counts.double(), case.expected(True).softmax(-1)) > 1e-4


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9}])
@pytest.mark.parametrize("tp_size", [1, 3])
def test_rows_without_an_allowed_token_are_named_and_others_can_be_drawn(params, tp_size):
    logits = random_logits(4)
    own = SamplingParams(**params)
    draws = [SamplingRow(own, 0, 0, 9, request) for request in (40, 41, 42, 43)]
    draws[1] = SamplingRow(own, 0, 0, 9, 41, mask=bytes(27))
    draws[3] = SamplingRow(own, 0, 0, 9, 43, banned=frozenset(range(211)))
    with pytest.raises(NoTokenLeft, match="request 41, token at position 9") as caught:
        sample_cut(logits, draws, tp_size)
    assert caught.value.rows == (1, 3)
    left = [row for row in range(4) if row not in caught.value.rows]
    assert len(sample_cut(logits[left], [draws[row] for row in left], tp_size)[0]) == 2


def test_nan_logits_are_not_blamed_on_the_request():
    logits = random_logits(2)
    logits[0, 5] = math.nan
    draws = [SamplingRow(SamplingParams(logit_bias=((3, 1.0),)), 0, 0, 9, 7)] * 2
    with pytest.raises(NumericalError, match="weights") as caught:
        sample_cut(logits, draws, 3)
    assert not isinstance(caught.value, NoTokenLeft)


def test_stop_ids_are_banned_until_there_are_min_tokens():
    request = Request(0, (1,), SamplingParams(min_tokens=3), 0, frozenset({4, 9}))
    assert [request.banned_ids(n) for n in range(5)] == [frozenset({4, 9})] * 3 + [frozenset()] * 2


def test_frequency_penalty_stops_greedy_repetition():
    """A model that always favours token 3 also generates other tokens."""

    def one_rank(comm: Communicator) -> list[int]:
        vocab = vocabs_of(2, 6)[comm.rank]
        logits = torch.tensor([[5.0, 4.0, 3.0, 6.0, 2.0, 1.0]])[:, vocab.start : vocab.stop]
        params = SamplingParams(frequency_penalty=2.0)
        history, drawn = History([3]), list[int]()
        for position in range(6):
            draw = SamplingRow(params, 0, 0, position, history=history)
            result: SampledToken = sample(logits, vocab, [draw], comm)[0]
            history.append(result.token)
            drawn.append(result.token)
        return drawn

    assert run_on_threads(2, one_rank) == [[3, 0, 1, 3, 0, 2]] * 2
