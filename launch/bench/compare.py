"""Speed beside peers: the same weights, token ids and cores, turn by turn in one run.

    python launch/bench/compare.py [--model smollm2] [--prompt-tokens 512] [--new-tokens 64]
                                   [--engines ours:1,ours:2,transformers] [--repeat 5] [--json]

Each engine runs in a process (or ranks) of its own and is measured after one run to warm up; the
engines take turns, so that a machine that grows slower does so for all. `ours:N` is this runtime on
N ranks, with the cores shared out among them. An engine whose package is absent is skipped with a
note. Greedy tokens are compared with the first engine's: speed counts only where they agree.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

PROMPT_SEED = 0
GIVE_UP_S = 1800


@dataclass(frozen=True)
class Task:
    """What every engine is asked: one prompt of random ids, that many greedy tokens."""

    model: str
    prompt: list[int]
    n_new: int
    n_threads: int


@dataclass(frozen=True)
class Run:
    """One measured answer. Units: seconds until the first token, and for all the others."""

    tokens: list[int]
    prefill_s: float
    decode_s: float


def run_ours(task: Task) -> Run | None:
    """This runtime, on the ranks that are there; None on ranks above 0."""
    import torch

    from parallel_llama import LLM, SamplingParams

    torch.set_num_threads(task.n_threads)
    llm = LLM(task.model, dtype="float32", device="cpu")
    if llm.rank:
        llm.follow()
        llm.close()
        return None
    params = SamplingParams(max_tokens=task.n_new, ignore_eos=True)
    requests = llm.intake.requests([task.prompt], params)
    list(llm.run(requests))
    started = time.perf_counter()
    ticks, tokens = [], []
    for progress in llm.run(requests):
        ticks.append(time.perf_counter() - started)
        tokens.append(progress.token)
    llm.close()
    return Run(tokens, ticks[0], ticks[-1] - ticks[0])


def run_transformers(task: Task) -> Run:
    """transformers' generate, with its own cache."""
    import torch
    from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList

    from parallel_llama.model_files import find_model

    class Clock(LogitsProcessor):
        """Notes when each step's logits are there."""

        def __init__(self):
            self.ticks = []

        def __call__(self, _, scores):
            self.ticks.append(time.perf_counter())
            return scores

    torch.set_num_threads(task.n_threads)
    files = find_model(task.model)
    where = (
        {"pretrained_model_name_or_path": files.path.parent, "gguf_file": files.path.name}
        if files.kind == "gguf"
        else {"pretrained_model_name_or_path": files.path}
    )
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    ids = torch.tensor([task.prompt])

    def answer():
        clock = Clock()
        started = time.perf_counter()
        with torch.inference_mode():
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=task.n_new,
                max_new_tokens=task.n_new,
                eos_token_id=None,
                logits_processor=LogitsProcessorList([clock]),
            )
        ticks = [tick - started for tick in clock.ticks]
        return Run(output[0, len(task.prompt) :].tolist(), ticks[0], ticks[-1] - ticks[0])

    answer()
    return answer()


def turn(engine: str, task: Task, n_cores: int) -> Run:
    """One engine's turn, in a process of its own."""
    name, _, n_ranks = engine.partition(":")
    ranks = int(n_ranks or 1)
    asked = json.dumps(asdict(task) | {"n_threads": max(1, n_cores // ranks)})
    start = [sys.executable]
    if ranks > 1:
        start += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = os.environ | {"OMP_NUM_THREADS": str(max(1, n_cores // ranks))}
    done = subprocess.run(
        [*start, __file__, "--worker", name, asked],
        capture_output=True,
        text=True,
        env=environment,
        timeout=GIVE_UP_S,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{engine} failed:\n{done.stderr[-2000:]}")
    return Run(**json.loads(done.stdout.splitlines()[-1]))


def work(name: str, asked: str) -> None:
    run = {"ours": run_ours, "transformers": run_transformers}[name](Task(**json.loads(asked)))
    if run is not None:
        print(json.dumps(asdict(run)), flush=True)


def compare(options: argparse.Namespace) -> dict:
    from parallel_llama.config import load_model_args
    from parallel_llama.model_files import find_model

    vocab_size = load_model_args(find_model(options.model)).vocab_size
    draw = random.Random(PROMPT_SEED)
    prompt = [draw.randrange(vocab_size) for _ in range(options.prompt_tokens)]
    task = Task(options.model, prompt, options.new_tokens, 0)
    n_cores = len(os.sched_getaffinity(0))
    engines = []
    for engine in options.engines.split(","):
        if engine == "transformers" and find_spec("transformers") is None:
            print("transformers is not installed: skipped", file=sys.stderr)
        else:
            engines.append(engine)
    runs: dict[str, list[Run]] = {engine: [] for engine in engines}
    for number in range(options.repeat):
        for engine in engines:
            print(f"run {number + 1} of {options.repeat}: {engine}", file=sys.stderr)
            runs[engine].append(turn(engine, task, n_cores))
    reference = runs[engines[0]][0].tokens
    return {
        "model": options.model,
        "prompt_tokens": options.prompt_tokens,
        "new_tokens": options.new_tokens,
        "cores": n_cores,
        "engines": {engine: figures(own, task, reference) for engine, own in runs.items()},
    }


def figures(runs: list[Run], task: Task, reference: list[int]) -> dict:
    prefill = [len(task.prompt) / run.prefill_s for run in runs]
    decode = [(task.n_new - 1) / run.decode_s for run in runs]
    agree = min(agreement(run.tokens, reference) for run in runs)
    return {
        "prefill_tokens_per_s": spread(prefill),
        "decode_tokens_per_s": spread(decode),
        "tokens_that_agree": agree,
    }


def agreement(tokens: list[int], reference: list[int]) -> int:
    """How many tokens from the start on are the same."""
    pairs = zip(tokens, reference, strict=True)
    return next((i for i, (own, theirs) in enumerate(pairs) if own != theirs), len(tokens))


def spread(values: list[float]) -> list[float]:
    """Median, least and most."""
    return [round(f(values), 1) for f in (statistics.median, min, max)]


def table(result: dict) -> str:
    base = result["engines"].get("transformers")
    lines = [
        f"{result['model']}, float32, {result['cores']} cores, {result['prompt_tokens']} prompt "
        f"tokens, {result['new_tokens']} new; median (least to most), ratio to transformers",
        "",
        f"{'engine':<14} {'prefill tokens/s':>34} {'decode tokens/s':>34} same tokens",
    ]
    for engine, own in result["engines"].items():
        cells = [f"{engine:<14}"]
        for key in ("prefill_tokens_per_s", "decode_tokens_per_s"):
            median, least, most = own[key]
            ratio = f"{median / base[key][0]:.2f}x" if base else ""
            cells.append(f"{median:>8} ({least:>6} to {most:>6}) {ratio:>7}")
        cells.append(f"{own['tokens_that_agree']:>5} of {result['new_tokens']}")
        lines.append(" ".join(cells))
    return "\n".join(lines)


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        work(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--engines", default="ours:1,ours:2,transformers")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    result = compare(options)
    print(json.dumps(result) if options.json else table(result))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    main()
