"""A draft model changes the number of steps of a completion, and none of its tokens."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from mixes import (
    ARGS,
    HYBRID,
    SMALL,
    make_draft_model,
    make_engine,
    make_runner,
    random_mix,
    run_mix,
    run_mixes,
)
from thread_ranks import run_on_threads

from parallel_llama.engine.draft_model import DraftModel
from parallel_llama.engine.drafts import DraftBudget, row_costs, shared_tables
from parallel_llama.errors import UsageError
from parallel_llama.parallel.collectives import Solo
from parallel_llama.request import Request, SamplingParams

FEWER = replace(SMALL, vocab_size=97)
SMALL_HYBRID = replace(HYBRID, dim=20, n_heads=5, n_kv_heads=1, ffn_dim=14)
GREEDY = SamplingParams(max_tokens=40)


@pytest.mark.parametrize(
    ("tp_size", "args", "draft", "seed", "seeds"),
    [
        (1, ARGS, ARGS, 1, range(900, 930)),  # the model itself
        (1, ARGS, SMALL, 7, range(930, 960)),
        (2, ARGS, FEWER, 7, range(960, 970)),
        (3, ARGS, ARGS, 1, range(970, 980)),
        (5, ARGS, SMALL, 7, range(980, 990)),
        (1, HYBRID, SMALL_HYBRID, 7, range(900, 920)),
        (1, HYBRID, ARGS, 7, range(920, 930)),  # drafts share the block table of full attention
        (3, HYBRID, HYBRID, 1, range(930, 940)),
    ],
)
def test_draft_model_changes_no_token(tp_size, args, draft, seed, seeds):
    """Covers preemption, prefix hits, chunked prompts, penalties, filters and several choices."""
    own = partial(make_draft_model, draft=draft, args=args, seed=seed)
    assert not run_on_threads(tp_size, run_mixes, seeds, args, draft_model=own)[0]


@pytest.mark.parametrize("args", [ARGS, HYBRID])
def test_a_model_accepts_its_own_drafts(args):
    """So the draft model sees the same sequence as the model, and samples in the same way."""
    runner, drafts = make_runner(Solo(), args), make_draft_model(Solo(), args, args, seed=1)
    n_drafts = n_accepted = n_prefix = n_preempted = 0
    for seed in range(700, 740):
        mix = random_mix(seed)
        asked = [replace(guest.request, stop_ids=frozenset()) for guest in mix.guests]
        guests = [
            replace(guest, request=each) for guest, each in zip(mix.guests, asked, strict=True)
        ]
        mix = replace(mix, max_drafts=4, guests=tuple(guests))
        limits = mix.n_blocks, mix.block_size, mix.step_tokens, mix.max_drafts
        engine = make_engine(runner, *limits, draft_model=drafts)
        run_mix(engine, mix)
        state = engine.statistics()
        n_drafts += state.n_draft_tokens
        n_accepted += state.n_accepted_tokens
        n_prefix += state.n_prefix_tokens
        n_preempted += state.n_preempted
    assert n_accepted == n_drafts > 500
    assert n_prefix and n_preempted


def test_drafts_save_steps():
    steps = []
    for most, drafts in ((0, None), (8, make_draft_model(Solo(), ARGS, seed=1))):
        engine = make_engine(make_runner(Solo()), max_drafts=most, draft_model=drafts)
        engine.submit(Request(0, (1, 2, 3), GREEDY, 0, frozenset()))
        steps.append(0)
        while not engine.idle:
            engine.step()
            steps[-1] += 1
    assert steps[1] <= 10 < 40 == steps[0]


@pytest.mark.parametrize("has_nan", [True, False], ids=["nan", "padding"])
def test_draft_model_with_nan_or_unknown_tokens_drafts_nothing(has_nan):
    runner = make_runner(Solo(), SMALL)
    drafts = DraftModel(runner, (0,), ARGS.vocab_size if has_nan else 0, 0.1)
    if has_nan:
        runner.model.norm.weight.values.fill_(torch.nan)
    engine = make_engine(make_runner(Solo()), max_drafts=8, draft_model=drafts)
    for index in range(4):
        engine.submit(Request(index, (1, 2, index), GREEDY, 0, frozenset()))
    while not engine.idle:
        engine.step()
    assert engine.statistics().n_draft_tokens == 0


@pytest.mark.parametrize(
    ("args", "draft", "error"),
    [
        (
            ARGS,
            replace(ARGS, vocab_size=300),
            "its vocabulary has 300 tokens and that of the model",
        ),
        (ARGS, HYBRID, "attend to the last 5 tokens, and no layer of the model does"),
        (replace(HYBRID, full_layers=()), ARGS, "attend to all tokens, and no layer"),
    ],
)
def test_incompatible_draft_model_is_refused(args, draft, error):
    with pytest.raises(UsageError, match=error):
        shared_tables(args, draft)


def test_draft_budget_rises_with_accuracy_and_falls_with_cost():
    found = []
    for relative_cost in (0.02, 0.2, 0.9):
        for n_kept in (8, 4, 0):
            budget = DraftBudget(row_costs(relative_cost))
            for _ in range(40):
                budget.update(8, n_kept)
            found.append(budget.n_allowed())
    assert found == [15, 8, 0, 15, 4, 0, 1, 1, 0]
