"""Whether the engines gave the same tokens, and where they did not, whether it was a near tie.

Greedy tokens of float32 engines may part where two logits are closer than rounding. From there on
the texts differ, so that only the tokens up to there can be compared. Of weights in fewer bits the
tokens may part anywhere; how many are the same tells of them, and no difference is wrong.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launch.bench.engines import Measurement
from parallel_llama import LLM

# Nats. Two float32 engines' log-probabilities lie within 2e-4 of each other on 30 layers.
NEAR_TIE = 1e-3

# The prompts of a round, by its number.
Prompts = Callable[[int], list[list[int]]]


@dataclass(frozen=True)
class Difference:
    """The first token, by number, at which an answer leaves the reference's; rounds begin at 1."""

    round: int
    prompt: int
    token: int
    expected: int
    drawn: int


def agreements(
    model: str, runs: Mapping[str, Sequence[Measurement]], prompts: Prompts, exact: Collection[str]
) -> dict[str, dict[str, Any]]:
    """How far each engine's tokens are those of the first one, of the exact ones if there are any.

    Differences of those alone are weighed.
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
    """One for each prompt of each round whose new tokens are not all the same."""
    for number, (run, other) in enumerate(zip(runs, reference, strict=True), 1):
        for prompt, (drawn, expected) in enumerate(zip(run.tokens, other.tokens, strict=True)):
            pairs = zip(expected, drawn, strict=True)
            parted = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
            if parted is not None:
                yield Difference(number, prompt, parted, expected[parted], drawn[parted])


def gaps(
    model: str, found: Sequence[Difference], prompts: Prompts, reference: Sequence[Measurement]
) -> dict[Difference, float]:
    """By how many nats the reference's token is likelier than the other one, in float64."""
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
    """Of tokens and of prompts, how many agree."""
    answers = [tokens for run in runs for tokens in run.tokens]
    n_new = len(answers[0])
    return {
        "tokens": len(answers) * n_new - sum(n_new - each.token for each in found),
        "of_tokens": len(answers) * n_new,
        "prompts": len(answers) - len(found),
        "of_prompts": len(answers),
    }


def verdict(found: Sequence[Difference], gap: Mapping[Difference, float]) -> dict[str, Any]:
    """Counts of both kinds of difference; the first one in full."""
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
