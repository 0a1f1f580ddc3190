"""Compares the results of a model run in several ways, bit by bit."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ranks import Pools, RankFailed
from ways import Completions, Way, random_company, random_way, run_alone, run_way

from parallel_llama.engine.llm_config import LLMConfig
from parallel_llama.engine.setup import ModelSetup
from parallel_llama.model.rope import base_len
from parallel_llama.request import Completion, Request, SamplingParams

MAX_SHOWN = 3  # differences of one model


@dataclass
class Comparison:
    """Compares ways of running a model with runs of each request alone.

    Args:
        config: the model and its formats, on one rank.
        planted: cut sums in the other ways.
    """

    pools: Pools
    config: LLMConfig
    planted: bool
    requests: list[Request] = field(default_factory=list)
    expected: Completions = field(default_factory=dict)
    differences: list[str] = field(default_factory=list)
    n_tokens: int = 0
    n_logprobs: int = 0

    def run_alone(self, requests: Sequence[Request]) -> None:
        """Run each request alone, and score its answer as a prompt.

        The scored answers become requests too.
        """
        alone = self.pools(1).run(run_alone, self.config, requests)[0]
        scored = [
            replace(
                request,
                index=len(requests) + request.index,
                prompt=request.prompt + alone[request.index, 0].tokens,
                params=SamplingParams(max_tokens=1, prompt_logprobs=1),
            )
            for request in requests
        ]
        self.requests = [*requests, *scored]
        self.expected = alone | self.pools(1).run(run_alone, self.config, scored)[0]
        args = ModelSetup(self.config).args
        for request, answer in zip(requests, scored, strict=True):
            n_prompt = len(request.prompt)
            if base_len(args, n_prompt) != base_len(args, len(answer.prompt)):
                continue  # dynamic scaling rotates by the length of the prompt
            drawn = [each.logprob for each in self.expected[request.index, 0].logprobs]
            found = [
                each.logprob for each in self.expected[answer.index, 0].prompt_logprobs[n_prompt:]
            ]
            self.n_logprobs += len(drawn)
            if drawn != found:
                self.differences.append(f"request {request.index}: decode {drawn}, prefill {found}")

    def compare_some(self, rng: random.Random, n_ranks: int, pp: int) -> None:
        """Run some of the requests in a random way on `n_ranks` ranks in `pp` stages."""
        requests = random_company(rng, self.requests)
        self.compare(random_way(rng, self.config, requests, n_ranks, pp))

    def compare(self, way: Way) -> Completions:
        """Run a way, and compare the results of every rank. Returns: those of rank 0."""
        if self.planted:
            way = replace(way, config=replace(way.config, exact=False))
        try:
            results = self.pools(way.n_ranks).run(run_way, way)
        except RankFailed as error:
            self.differences.append(f"{way}: {error}")
            return {}
        requests = [guest.request for guest in way.mix.guests]
        for key in [(each.index, choice) for each in requests for choice in range(each.params.n)]:
            expected = self.expected[key]
            for rank, found in enumerate(results):
                if (what := difference(found.get(key), expected)) is not None:
                    self.differences.append(f"{way}: rank {rank}, request {key}: {what}")
            self.n_tokens += len(expected.tokens)
            self.n_logprobs += len(expected.logprobs or ()) + len(expected.prompt_logprobs or ())
        return results[0]

    def shown(self) -> str:
        """The first differences, each on its own line."""
        return "".join(f"\n  {each}" for each in self.differences[:MAX_SHOWN])


def difference(found: Completion | None, expected: Completion) -> str | None:
    """What differs first between two results; None if all bits are equal."""
    if found is None:
        return "no result"
    for name in ("tokens", "logprobs", "prompt_logprobs"):
        pairs = zip(getattr(found, name) or (), getattr(expected, name) or (), strict=False)
        for at, (one, other) in enumerate(pairs):
            if one != other:
                return f"{name} from position {at}: {one}, not {other}"
    return None if found == expected else f"{found}, not {expected}"
