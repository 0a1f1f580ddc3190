"""Drafts are copied from the sequence itself, and only while they save time."""

import doctest
import random

from hypothesis import given
from hypothesis import strategies as st

from parallel_llama.engine import drafts
from parallel_llama.engine.prompt_lookup import LONGEST, SHORTEST, PromptLookup

SEQUENCES = st.lists(st.integers(0, 3), max_size=60)


def latest_continuation(tokens: list[int], most: int) -> list[int]:
    """The reference: searches the whole sequence for each suffix, the longest first."""
    for size in range(LONGEST, SHORTEST - 1, -1):
        for start in range(len(tokens) - size - 1, -1, -1):
            if tokens[start : start + size] == tokens[len(tokens) - size :] and size <= len(tokens):
                return tokens[start + size : start + size + most]
    return []


@given(SEQUENCES, st.integers(0, 8), st.lists(st.integers(1, 9), max_size=12))
def test_drafts_follow_latest_occurrence_of_the_longest_suffix(tokens, most, steps):
    """Holds for any lengths at which the growing sequence was looked up before."""
    lookup = PromptLookup()
    for n_tokens in [*(sum(steps[:n]) for n in range(len(steps))), len(tokens)]:
        if n_tokens <= len(tokens):
            part = tokens[:n_tokens]
            assert list(lookup.continuation(part, most)) == latest_continuation(part, most)


@given(SEQUENCES, st.integers(0, 40))
def test_there_are_never_more_drafts_than_asked_for(tokens, most):
    assert len(PromptLookup().draft(tokens, most)) <= most


def run(lookup: PromptLookup, tokens: list[int], start: int) -> tuple[int, int, int]:
    """Decode a known sequence from `start`: forwards, drafts that ran, drafts that were right."""
    n_forwards = n_drafts = n_right = 0
    while start < len(tokens):
        drafts = lookup.draft(tokens[:start], 15)
        n_kept = 0
        for draft, truth in zip(drafts, tokens[start:], strict=False):
            if draft != truth:
                break
            n_kept += 1
        lookup.update(len(drafts), n_kept)
        start += n_kept + 1
        n_forwards, n_drafts, n_right = n_forwards + 1, n_drafts + len(drafts), n_right + n_kept
    return n_forwards, n_drafts, n_right


def noise(n_tokens: int, seed: int, vocab_size: int = 40) -> list[int]:
    """Random tokens of so few ids that suffixes often recur by chance."""
    draw = random.Random(seed)
    return [draw.randrange(vocab_size) for _ in range(n_tokens)]


def test_copied_text_is_drafted_in_long_runs():
    text = noise(400, seed=1, vocab_size=10_000)
    n_forwards, _, n_right = run(PromptLookup(), text + text, start=len(text) + LONGEST)
    assert n_right > 0.85 * len(text)
    assert n_forwards < len(text) / 8


def test_drafting_nearly_stops_on_random_text():
    lookup, text = PromptLookup(), noise(4000, seed=2)
    run(lookup, text[:2000], start=10)
    n_forwards, n_drafts, _ = run(lookup, text, start=2000)
    assert 0 < n_drafts < 0.02 * n_forwards


def test_drafting_resumes_on_copied_text_after_random_text():
    lookup, text = PromptLookup(), noise(2000, seed=3)
    run(lookup, text, start=10)
    fresh = noise(1500, seed=4, vocab_size=10_000)
    n_forwards, _, _ = run(lookup, text + fresh + fresh, start=len(text) + len(fresh) + LONGEST)
    assert n_forwards < len(fresh) / 2


def test_few_drafts_are_made_that_cost_as_much_as_they_save():
    text = noise(200, seed=5, vocab_size=10_000)
    dear = PromptLookup(row_costs=((1, 1.0), (16, 16.0)))
    _, n_drafts, _ = run(dear, text + text, start=len(text) + LONGEST)
    assert n_drafts < len(text) / 10


def test_the_examples_in_the_docstrings_hold():
    results = doctest.testmod(drafts)
    assert results.failed == 0 < results.attempted
