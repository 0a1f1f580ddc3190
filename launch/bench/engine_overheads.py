"""Measures the prefix cache, drafts, and the time of a step outside the model.

    python -m launch.bench.engine_overheads [--model smollm2] [--repeat 5] [--threads 2]
        [--draft-model smollm2] [--draft-quant int4]

It prints five lines. The first has the time to the first token if the prompt's beginning is in the
prefix cache, and if it is not. The next two have the speed with drafts divided by the speed without
drafts, and the number of equal greedy tokens: for text that repeats its prompt, and for other text.
By default drafts are found by prompt lookup. The last two lines have the mean time of each part of
a step, with one request and with 16. All other times and ratios are medians over interleaved
rounds.
"""

import argparse
import random
import statistics
import time
from dataclasses import asdict, replace

import torch

from parallel_llama.engine.statistics import StepTimes
from parallel_llama.llm import LLM
from parallel_llama.request import SamplingParams

PROMPT_TOKENS, SHARED = 2048, 0.95
NEW_TOKENS, MAX_DRAFTS = 128, 8

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


def prefix_rounds(llm: LLM, n_rounds: int) -> list[tuple[float, float]]:
    """Seconds to the first token of a cold prompt and of one with a cached beginning."""
    draw = random.Random(0)
    n_shared = int(PROMPT_TOKENS * SHARED)
    params = SamplingParams(max_tokens=1, ignore_eos=True)

    def first_token_s(prompt: list[int]) -> float:
        started = time.perf_counter()
        llm.generate([prompt], params)
        return time.perf_counter() - started

    rounds = []
    for _ in range(n_rounds + 1):  # the first warms up
        cold = random_tokens(llm, draw, PROMPT_TOKENS)
        warm = cold[:n_shared] + random_tokens(llm, draw, PROMPT_TOKENS - n_shared)
        rounds.append((first_token_s(cold), first_token_s(warm)))
    return rounds[1:]


def guess_gain(plain: LLM, drafting: LLM, text: str, n_rounds: int) -> tuple[float, int, int]:
    """Speed with drafts over speed without, and the numbers of equal tokens and of all tokens.

    `plain` has no draft model, and may be `drafting` itself.
    """
    messages = [{"role": "user", "content": text}]
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0)

    def decode(llm: LLM, max_drafts: int) -> tuple[float, tuple[int, ...]]:
        """Seconds from the first token to the last, and the tokens."""
        llm.engine.max_drafts = max_drafts
        (completion,) = llm.generate([messages], params)
        return llm.statistics.total_s - llm.statistics.first_token_s, completion.tokens

    rounds = [(decode(plain, 0), decode(drafting, MAX_DRAFTS)) for _ in range(n_rounds + 1)]
    gain = statistics.median(without[0] / guessed[0] for without, guessed in rounds[1:])
    plain, guessed = rounds[0][0][1], rounds[0][1][1]
    return gain, sum(a == b for a, b in zip(plain, guessed, strict=True)), len(plain)


def step_times(llm: LLM, n_requests: int, n_new: int) -> StepTimes:
    """The times of the parts of decode steps with `n_requests` running requests."""
    draw = random.Random(0)
    prompts = [random_tokens(llm, draw, 64) for _ in range(n_requests)]
    llm.engine.max_drafts = 0
    params = SamplingParams(max_tokens=n_new, ignore_eos=True)
    requests = llm.input_processor.requests(prompts, params)
    for _ in llm.run(requests):  # warms up
        pass
    before = StepTimes()
    for n_outputs, _ in enumerate(llm.run(requests)):
        if n_outputs == n_requests:  # all prompts have been prefilled
            before = replace(llm.engine.times)
    after = asdict(llm.engine.times)
    return StepTimes(**{name: after[name] - getattr(before, name) for name in after})


def random_tokens(llm: LLM, draw: random.Random, n_tokens: int) -> list[int]:
    return [draw.randrange(llm.args.vocab_size) for _ in range(n_tokens)]


def prefix_line(rounds: list[tuple[float, float]]) -> str:
    share = statistics.median(warm / cold for cold, warm in rounds)
    cold, warm = (statistics.median(column) for column in zip(*rounds, strict=True))
    return (
        f"first token of {PROMPT_TOKENS} prompt tokens, {SHARED:.0%} in the prefix cache: "
        f"{warm:.3f} s, cold {cold:.3f} s, {share:.3f}x"
    )


def guess_line(name: str, gains: list[tuple[float, int, int]]) -> str:
    cells = ", ".join(f"{gain:.2f}x ({same} of {n} the same)" for gain, same, n in gains)
    middle = statistics.median(gain for gain, _, _ in gains)
    return f"drafts, {name} text: {middle:.2f}x; each {cells}"


def step_line(times: StepTimes, n_requests: int) -> str:
    names = ("messages", "schedule", "forward", "sample", "decide")
    step_ms = {name: getattr(times, f"{name}_s") / times.n_steps * 1e3 for name in names}
    total_ms = sum(step_ms.values())
    cells = ", ".join(f"{name} {ms:.2f} ms" for name, ms in step_ms.items())
    return (
        f"a step of {n_requests} requests: {total_ms:.1f} ms, "
        f"{1 - step_ms['forward'] / total_ms:.1%} outside the model: {cells}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--draft-model")
    parser.add_argument("--draft-quant")
    flags = parser.parse_args()
    torch.set_num_threads(flags.threads)
    llm = drafting = LLM(flags.model, dtype="float32", device="cpu")
    if flags.draft_model is not None:
        drafts = {"draft_model": flags.draft_model, "draft_quant": flags.draft_quant}
        drafting = LLM(flags.model, dtype="float32", device="cpu", **drafts)
    lines = [prefix_line(prefix_rounds(llm, flags.repeat))]
    for name, texts in (("copying", COPYING), ("free", FREE)):
        gains = [guess_gain(llm, drafting, text, flags.repeat) for text in texts]
        lines.append(guess_line(name, gains))
    lines += [step_line(step_times(llm, n, 64), n) for n in (1, 16)]
    print("\n".join(lines))


if __name__ == "__main__":
    main()
