"""Compares the tokens of the engines, and checks whether a difference is a near tie.

Greedy tokens of float32 engines may differ where two logits are closer than rounding errors. The
texts differ after that token, so only the tokens before it can be compared. Tokens in other
formats may differ anywhere: they are counted, and no difference is an error.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launch.bench.engines import Measurement
from parallel_llama import LLM

# Nats. Log-probabilities of two float32 engines differ by at most 2e-4 on 30 layers.
NEAR_TIE = 1e-3

# The prompts of a round, by its number.
Prompts = Callable[[int], list[list[int]]]


@dataclass(frozen=True)
class Difference:
    """The index of the first token that differs from the reference; rounds begin at 1."""

    round: int
    prompt: int
    token: int
    expected: int
    drawn: int


def agreements(
    model: str, runs: Mapping[str, Sequence[Measurement]], prompts: Prompts, exact: Collection[str]
) -> dict[str, dict[str, Any]]:
    """Compares each engine's tokens with those of the first exact engine, or of the first engine.

    Only differences of exact engines are checked for near ties.
    """
    first = next((name for name in runs if name in exact), next(iter(runs), None))
    reference = () if first is None else runs[first]
    found = {name: list(differences(own, reference)) for name, own in runs.items()}
    weighed = [each for name, own in found.items() if name in exact for each in own]
    gap = gaps(model, weighed, prompts, reference)
    return {
        name: counts(own, found[name])
        | {"with": first}
        | (verdict(found[name], gap) if name in exact else {})
        for name, own in runs.items()
    }


def differences(
    runs: Sequence[Measurement], reference: Sequence[Measurement]
) -> Iterator[Difference]:
    """Yields a difference for each round and prompt with unequal new tokens."""
    for number, (run, other) in enumerate(zip(runs, reference, strict=True), 1):
        for prompt, (drawn, expected) in enumerate(zip(run.tokens, other.tokens, strict=True)):
            pairs = zip(expected, drawn, strict=True)
            parted = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
            if parted is not None:
                yield Difference(number, prompt, parted, expected[parted], drawn[parted])


def gaps(
    model: str, found: Sequence[Difference], prompts: Prompts, reference: Sequence[Measurement]
) -> dict[Difference, float]:
    """The log-probability of the reference's token minus that of the engine's token, in float64."""
    if not found:
        return {}
    result = {}
    with LLM(model, dtype="float64", device="cpu") as llm:
        for each in found:
            answer = reference[each.round - 1].tokens[each.prompt]
            before = prompts(each.round)[each.prompt] + answer[: each.token]
            expected, drawn = llm.score([[*before, each.expected], [*before, each.drawn]])
            result[each] = expected[-1] - drawn[-1]
    return result


def counts(runs: Sequence[Measurement], found: Sequence[Difference]) -> dict[str, int]:
    """How many tokens and prompts agree."""
    answers = [tokens for run in runs for tokens in run.tokens]
    n_new = len(answers[0])
    return {
        "tokens": len(answers) * n_new - sum(n_new - each.token for each in found),
        "of_tokens": len(answers) * n_new,
        "prompts": len(answers) - len(found),
        "of_prompts": len(answers),
    }


def verdict(found: Sequence[Difference], gap: Mapping[Difference, float]) -> dict[str, Any]:
    """The numbers of near ties and of wrong tokens, and the first difference."""
    n_near_ties = sum(abs(gap[each]) < NEAR_TIE for each in found)
    first: dict[str, Any] | None = None
    if found:
        at, nats = found[0], float(f"{gap[found[0]]:.2g}")
        first = {"turn": at.round, "prompt": at.prompt, "token": at.token, "gap_nats": nats}
    return {
        "near_ties": n_near_ties,
        "wrong": len(found) - n_near_ties,
        "first_difference": first,
    }
