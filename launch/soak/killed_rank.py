"""A rank that answers requests until launch.soak.kills kills it: python -m ... JOB, in JSON.

Rank 0 prints the process ids of the ranks when they are ready, then the number of tokens so far at
each output, and at the end its Report.
"""

import random
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from parallel_llama import LLM, SamplingParams
from parallel_llama.engine import ranks
from parallel_llama.request import Request

N_STREAMS = 16


class Job(msgspec.Struct):
    """What one program computes.

    Args:
        settings: of `LLM`.
        set_number: of the set of requests.
        max_tokens: of each request.
        longest: tokens of the longest prompt.
    """

    settings: dict[str, Any]
    set_number: int
    max_tokens: int
    longest: int


class Answer(msgspec.Struct):
    """One stream; each log-probability has a token, its own value, and the likeliest tokens."""

    tokens: list[int]
    logprobs: list[tuple[int, float, list[tuple[int, float]]]]
    text: str


class Report(msgspec.Struct):
    """What rank 0 has seen.

    Args:
        first_s: for each number of ranks, when they returned their first tokens (monotonic).
        last_s: when the last token was returned.
        n_replaced: the number of lost ranks that new processes have replaced.
    """

    answers: list[Answer]
    first_s: dict[int, float]
    last_s: float
    n_replaced: int


def main(job: Job) -> None:
    ranks._RECOMPUTE_S = 1e6  # no process replaces a lost rank
    with LLM(**job.settings) as llm:
        say(list(llm.ranks.pids().values()))
        say(run(llm, job))


def run(llm: LLM, job: Job) -> Report:
    answers = [Answer([], [], "") for _ in range(N_STREAMS)]
    report = Report(answers, {}, 0.0, 0)
    n_tokens = 0
    for output in llm.run(requests_of(llm, job)):
        if output.tokens:
            report.last_s = time.monotonic()
            report.first_s.setdefault(llm.tp_size, report.last_s)
            n_tokens += len(output.tokens)
            say(n_tokens)
        if (done := output.completion) is not None:
            rows = [(each.token, each.logprob, list(each.top)) for each in done.logprobs or ()]
            answers[output.index] = Answer(list(done.tokens), rows, done.text)
    report.n_replaced = sum(regroup.n_new for regroup in llm.ranks.regroups)
    return report


def requests_of(llm: LLM, job: Job) -> Sequence[Request]:
    """Greedy and sampled requests for log-probabilities, with random prompts of random lengths."""
    rng = random.Random(job.set_number)
    requests = []
    for index in range(N_STREAMS):
        prompt = [rng.randrange(3, llm.args.vocab_size) for _ in range(rng.randint(4, job.longest))]
        params = SamplingParams(
            max_tokens=job.max_tokens, ignore_eos=True, logprobs=rng.randint(0, 3),
            temperature=rng.choice([0.0, 0.7, 1.3]), top_p=rng.choice([1.0, 0.9]),
            seed=rng.randrange(1 << 30),
        )  # fmt: skip
        requests.append(llm.input_processor.request(index, prompt, params))
    return requests


def say(what: object) -> None:
    sys.stdout.write(msgspec.json.encode(what).decode() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(msgspec.json.decode(sys.argv[1], type=Job))
