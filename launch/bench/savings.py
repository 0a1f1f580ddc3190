"""What the engine saves and what it costs: prefix cache, guesses, and the step around the model.

    python -m launch.bench.savings [--model smollm2] [--repeat 5] [--threads 2]

Three tables, each of medians over interleaved turns: the time to the first token of a prompt whose
beginning is in the prefix cache, as a share of a cold one's; the speed with guesses as a multiple
of that without, on texts that repeat their prompt and on texts that do not; and where the time of a
step goes with 16 requests running. Greedy tokens with and without guesses are compared.
"""

import argparse
import random
import statistics
import time
from collections.abc import Sequence

import torch

from parallel_llama.engine import StepTimes
from parallel_llama.llm import LLM
from parallel_llama.request import SamplingParams

PROMPT_TOKENS, SHARED = 2048, 0.95

_CODE = '''def total_price(items, tax_rate):
    """Return the total price of all items, with tax."""
    total = 0.0
    for item in items:
        if item.quantity < 0:
            raise ValueError("quantity is negative")
        total += item.price * item.quantity
    return total * (1.0 + tax_rate)


def average_price(items):
    """Return the average price of all items."""
    if not items:
        return 0.0
    return sum(item.price for item in items) / len(items)
'''
_ARTICLE = (
    "The city council voted on Tuesday to rebuild the old harbour bridge, which has been closed to "
    "traffic since the storm of last winter. The new bridge will cost forty million dollars and "
    "will open in three years. The mayor said that the bridge is the heart of the city, and that "
    "nobody should have to drive an hour to visit a neighbour. Engineers will begin the work in "
    "April, when the river is low and the weather is mild."
)
COPYING = (
    f"Rename the function total_price to sum_price and write the code again:\n\n{_CODE}",
    f"Repeat the following code exactly, and add nothing:\n\n{_CODE}",
    f"Summarize the article with word for word quotes of its sentences:\n\n{_ARTICLE}",
    f"Repeat this article word for word:\n\n{_ARTICLE}",
)
FREE = (
    "Write a short story about a lighthouse keeper.",
    "Explain why the sky is blue.",
    "What should one think of when buying a used car?",
    "Describe a walk through a forest in autumn.",
)


def prefix_shares(llm: LLM, n_turns: int) -> list[tuple[float, float]]:
    """Seconds to the first token: of a cold prompt, and of one that shares its beginning."""
    rng = random.Random(0)
    n_shared = int(PROMPT_TOKENS * SHARED)
    turns = []
    for _ in range(n_turns + 1):  # the first warms up
        cold = [rng.randrange(llm.args.vocab_size) for _ in range(PROMPT_TOKENS)]
        tail = [rng.randrange(llm.args.vocab_size) for _ in range(PROMPT_TOKENS - n_shared)]
        turns.append((_first_token_s(llm, cold), _first_token_s(llm, cold[:n_shared] + tail)))
    return turns[1:]


def _first_token_s(llm: LLM, prompt: Sequence[int]) -> float:
    started = time.perf_counter()
    llm.generate([prompt], SamplingParams(max_tokens=1, ignore_eos=True))
    return time.perf_counter() - started


def guess_gains(
    llm: LLM, texts: Sequence[str], n_new: int, n_turns: int
) -> list[tuple[float, int, int]]:
    """For each text: the speed with guesses over that without, and how many tokens agree of all."""
    gains = []
    for text in texts:
        messages = [{"role": "user", "content": text}]
        without, guessed = [], []
        for _ in range(n_turns + 1):
            without.append(_decode(llm, messages, n_new, 0))
            guessed.append(_decode(llm, messages, n_new, 8))
        gain = statistics.median(a[0] / b[0] for a, b in zip(without[1:], guessed[1:], strict=True))
        same = sum(a == b for a, b in zip(without[0][1], guessed[0][1], strict=True))
        gains.append((gain, same, len(without[0][1])))
    return gains


def _decode(
    llm: LLM, messages: list[dict[str, str]], n_new: int, max_drafts: int
) -> tuple[float, tuple[int, ...]]:
    """Seconds from the first token to the last, and the tokens."""
    llm.engine.max_drafts = max_drafts
    params = SamplingParams(max_tokens=n_new, temperature=0.0)
    (completion,) = llm.generate([messages], params)
    return llm.statistics.total_s - llm.statistics.first_token_s, completion.tokens


def step_times(llm: LLM, n_requests: int, n_new: int) -> StepTimes:
    """Where the time of decode steps goes with so many requests running."""
    rng = random.Random(0)
    prompts = [[rng.randrange(llm.args.vocab_size) for _ in range(64)] for _ in range(n_requests)]
    llm.engine.max_drafts = 0
    requests = llm.intake.requests(prompts, SamplingParams(max_tokens=n_new, ignore_eos=True))
    for _ in llm.run(requests):  # warms up
        pass
    for n_told, _ in enumerate(llm.run(requests)):
        if n_told == n_requests:  # all are through their prompts
            llm.engine.times = StepTimes()
    return llm.engine.times


def report(llm: LLM, n_turns: int) -> list[str]:
    turns = prefix_shares(llm, n_turns)
    share = statistics.median(warm / cold for cold, warm in turns)
    cold, warm = (statistics.median(column) for column in zip(*turns, strict=True))
    lines = [
        f"first token of {PROMPT_TOKENS} prompt tokens, {SHARED:.0%} of them in the prefix cache: "
        f"{warm:.3f} s, cold {cold:.3f} s, {share:.3f}x"
    ]
    for name, texts in (("copying", COPYING), ("free", FREE)):
        gains = guess_gains(llm, texts, 128, n_turns)
        cells = ", ".join(f"{gain:.2f}x ({same} of {n} the same)" for gain, same, n in gains)
        middle = statistics.median(gain for gain, _, _ in gains)
        lines.append(f"guesses, {name} text: {middle:.2f}x; each {cells}")
    times = step_times(llm, 16, 64)
    outside = times.orders_s + times.schedule_s + times.sample_s + times.decide_s
    total = outside + times.forward_s
    lines.append(
        f"a step of 16 requests: {total / times.n_steps * 1e3:.1f} ms, of which outside the "
        f"model {outside / total:.1%}: "
        + ", ".join(
            f"{name} {getattr(times, name + '_s') / times.n_steps * 1e3:.2f} ms"
            for name in ("orders", "schedule", "forward", "sample", "decide")
        )
    )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    flags = parser.parse_args()
    torch.set_num_threads(flags.threads)
    llm = LLM(flags.model, dtype="float32", device="cpu")
    print("\n".join(report(llm, flags.repeat)))


if __name__ == "__main__":
    main()
