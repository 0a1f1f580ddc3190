"""Speed beside other runtimes: the same weights, token ids and cores, turn by turn in one run.

    python -m launch.bench.compare [--task stream|ragged] [--model smollm2]
                                   [--engines ours:1,transformers,llama-models,vllm]
                                   [--vllm-python PATH] [--repeat 5] [--json]

`stream` is one prompt of 512 tokens and 64 new ones; `ragged` is one batch of 16 prompts, of 16 to
512 tokens, and 64 new ones for each. `ours:N` is this runtime on N ranks, the cores shared out
among them. Weights and arithmetic are float32. Each engine has one turn to warm up. One that is not
installed, or fails, is left out with the reason. Greedy tokens are compared with those of the first
engine: the exit code is 1 where they part at more than a near tie, or an engine failed.
"""

import argparse
import json
import platform
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from launch.bench.agreement import agreements
from launch.bench.contenders import Contender, contenders
from launch.bench.figures import all_ratios, spreads
from launch.bench.hardware import processor, read_bytes_per_s, usable_cores
from launch.bench.report import report
from launch.bench.tasks import SHORTEST_RAGGED, Task, make_task
from launch.bench.turns import Turns, play
from launch.bench.weights import step_bytes
from parallel_llama.checkpoint import meta_vocab_size
from parallel_llama.config import load_model_args
from parallel_llama.errors import CheckpointError, UsageError
from parallel_llama.model_files import find_model

DTYPE = "float32"


def compare(model: str, task: Task, chosen: Sequence[Contender], n_turns: int) -> dict[str, Any]:
    """Run the whole comparison and return what it found, ready for JSON.

    Raises: UsageError or CheckpointError for a model that cannot be used, or not for this task.
    """
    files = find_model(model)
    files.require_weights()
    args = load_model_args(files, meta_vocab_size)
    if task.max_seq_len > args.max_seq_len:
        raise UsageError(
            f"prompt and new tokens are up to {task.max_seq_len} and the context of {model} is "
            f"{args.max_seq_len}; lower --prompt-tokens or --new-tokens"
        )
    cores = usable_cores()
    prompts_of_turn = partial(task.prompts, args.vocab_size)
    turns = play(
        files,
        task,
        chosen,
        prompts_of_turn,
        n_turns=n_turns,
        cores=cores,
        read_rate=partial(read_bytes_per_s, len(cores)),
    )
    read_rate = max(turns.read_rates)  # others on the machine can only lower it
    engines = engine_figures(task, chosen, turns, len(cores), step_bytes(args) / read_rate)
    for name, agreement in agreements(model, turns.runs, prompts_of_turn).items():
        engines[name]["agreement"] = agreement
    return {
        "model": model,
        "dtype": DTYPE,
        "task": task.kind,
        "prompt_tokens": task.lengths,
        "new_tokens": task.n_new,
        "turns": n_turns,
        "processor": processor(),
        "cores": cores,
        "read_bytes_per_s": round(read_rate),
        "system": platform.platform(),
        "python": platform.python_version(),
        "engines": engines,
        "ratios": all_ratios(task, turns.runs),
        "absent": turns.absent,
        "failed": turns.failed,
    }


def engine_figures(
    task: Task, chosen: Sequence[Contender], turns: Turns, n_cores: int, floor_s: float
) -> dict[str, dict[str, Any]]:
    """Each engine's figures; `floor_s` is how long reading the weights once takes at the least."""
    engines = {}
    for each in chosen:
        if each.name not in turns.runs:
            continue
        speeds: dict[str, Any] = dict(spreads(task, turns.runs[each.name]))
        if "decode_tokens_per_s" in speeds:
            share = speeds["decode_tokens_per_s"]["median"] * floor_s
            speeds["read_bandwidth_share"] = round(share, 3)
        engines[each.name] = {
            "ranks": each.n_ranks,
            "threads": each.n_threads(n_cores),
            "versions": turns.versions[each.name],
            "start_s": round(turns.start_s[each.name], 1),
            **speeds,
        }
    return engines


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, compare, print; the exit code."""
    parser, options = _parse(arguments)
    task = make_task(options.task, options.prompt_tokens, options.new_tokens)
    chosen = [
        replace(each, python=options.vllm_python) if each.kind.has_own_python else each
        for each in options.engines
    ]
    try:
        result = compare(options.model, task, chosen, options.repeat)
    except (UsageError, CheckpointError) as error:
        parser.error(str(error))
    print(json.dumps(result) if options.json else report(result))
    wrong = any(own["agreement"]["wrong"] for own in result["engines"].values())
    return int(wrong or bool(result["failed"]))


def _parse(arguments: Sequence[str] | None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    about = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser("python -m launch.bench.compare", description=about)
    parser.add_argument("--task", choices=("stream", "ragged"), default="stream")
    parser.add_argument("--model", default="smollm2", help="a model with weights")
    parser.add_argument(
        "--engines",
        type=contenders,
        default="ours:1,transformers,llama-models,vllm",
        help="ours:N, transformers, llama-models, vllm; the first gives the tokens to agree with",
    )
    parser.add_argument(
        "--prompt-tokens", type=_whole, default=512, help="length of the prompt, or the longest"
    )
    parser.add_argument("--new-tokens", type=_whole, default=64, help="for each prompt")
    parser.add_argument("--repeat", type=_whole, default=5, help="turns after the one to warm up")
    parser.add_argument("--vllm-python", metavar="PATH", help="the Python of vLLM's environment")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    if options.task == "ragged" and options.prompt_tokens < SHORTEST_RAGGED:
        parser.error(f"--prompt-tokens: ragged prompts begin at {SHORTEST_RAGGED} tokens")
    return parser, options


def _whole(text: str) -> int:
    if text.isascii() and text.isdigit() and 0 < int(text) < 10**6:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 to 999999")


if __name__ == "__main__":
    # As on Ctrl-C, no engine is left running: by itself a SIGTERM would leave them all.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
