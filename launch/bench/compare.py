"""Speed beside other runtimes: the same weights, token ids and cores, turn by turn in one run.

    python -m launch.bench.compare [--task stream|ragged] [--streams 1] [--model smollm2]
                                   [--engines ours:1,transformers,llama-models,vllm]
                                   [--vllm-python PATH] [--repeat 5] [--json]

`stream` is one prompt of 512 tokens and 64 new ones, or as many of them at once as --streams says;
`ragged` is one batch of 16 prompts, of 16 to 512 tokens, and 64 new ones for each. `ours:N` is this
runtime on N ranks, the cores shared out among them. Weights and arithmetic are float32. Each engine
has one turn to warm up. One that is not installed, or fails, is left out with the reason. Greedy
tokens are compared with those of the first engine: the exit code is 1 where they part at more than
a near tie, or an engine failed.
"""

import argparse
import json
import os
import platform
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from launch.bench.agreement import agreements
from launch.bench.engines import Engine, engines
from launch.bench.report import report
from launch.bench.task import Kind, Task, make_task
from launch.bench.turns import Turns, play
from parallel_llama.checkpoint import meta_vocab_size
from parallel_llama.config import ModelArgs, load_model_args
from parallel_llama.dtypes import Precision
from parallel_llama.errors import CheckpointError, UsageError
from parallel_llama.files.model_files import find_model
from parallel_llama.plan import bytes_passed_over, make_plan, weight_bytes


def compare(
    model: str,
    kind: Kind,
    prompt_tokens: int,
    n_new: int,
    chosen: Sequence[Engine],
    n_turns: int,
    n_streams: int = 1,
) -> dict[str, Any]:
    """Run the whole comparison and return what it found, ready for JSON.

    Raises: UsageError or CheckpointError for a model that cannot be used, or not for this task.
    """
    files = find_model(model)
    files.require_weights()
    args = load_model_args(files, meta_vocab_size)
    task = make_task(kind, prompt_tokens, n_new, args.vocab_size, n_streams)
    if task.max_seq_len > args.max_seq_len:
        raise UsageError(
            f"prompt and new tokens are up to {task.max_seq_len} and the context of {model} is "
            f"{args.max_seq_len}; lower --prompt-tokens or --new-tokens"
        )
    cores = tuple(sorted(os.sched_getaffinity(0)))  # `taskset` narrows them
    turns = play(files, task, chosen, n_turns, cores)
    read_rate = max(turns.read_rates)  # others on the machine can only lower it
    floor_s = step_bytes(args, len(task.lengths)) / read_rate
    figures = engine_figures(task, chosen, turns, len(cores), floor_s)
    for name, agreement in agreements(model, turns.runs, task.prompts).items():
        figures[name]["agreement"] = agreement
    return {
        "model": model,
        "dtype": "float32",
        "task": kind,
        "prompt_tokens": task.lengths,
        "new_tokens": n_new,
        "turns": n_turns,
        "processor": processor(),
        "cores": cores,
        "read_bytes_per_s": round(read_rate),
        "system": platform.platform(),
        "python": platform.python_version(),
        "engines": figures,
        "ratios": all_ratios(task, turns),
        "absent": turns.absent,
        "failed": turns.failed,
    }


def engine_figures(
    task: Task, chosen: Sequence[Engine], turns: Turns, n_cores: int, floor_s: float
) -> dict[str, dict[str, Any]]:
    """Each engine's figures; `floor_s` is how long reading the weights once takes at the least."""
    figures = {}
    for each in [each for each in chosen if each.name in turns.runs]:
        player, speeds = turns.players[each.name], task.spreads(turns.runs[each.name])
        own = figures[each.name] = {
            "ranks": each.n_ranks,
            "threads": each.n_threads(n_cores),
            "versions": player.versions,
            "start_s": round(player.start_s, 1),
            **speeds,
        }
        if decode := speeds.get("decode_tokens_per_s"):
            steps_per_s = decode["median"] / len(task.lengths)
            own["read_bandwidth_share"] = round(steps_per_s * floor_s, 3)
    return figures


def all_ratios(task: Task, turns: Turns) -> dict[str, dict[str, Any]]:
    """How many times as fast every engine called ours is as every other engine."""
    ours = {name: runs for name, runs in turns.runs.items() if name.startswith("ours")}
    peers = {name: runs for name, runs in turns.runs.items() if name not in ours}
    return {
        name: {peer: task.ratios(own, runs) for peer, runs in peers.items()}
        for name, own in ours.items()
    }


def step_bytes(args: ModelArgs, batch: int) -> int:
    """Bytes of float32 weights that one decode step of so many sequences must read."""
    precision = Precision.plain("float32")
    whole = weight_bytes(args, make_plan(args, 1).shares[0], precision)
    return whole - bytes_passed_over(args, batch, precision)


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, compare, print; the exit code."""
    parser = _parser()
    flags = parser.parse_args(arguments)
    chosen = [replace(each, python=each.python or flags.vllm_python) for each in flags.engines]
    sizes = flags.task, flags.prompt_tokens, flags.new_tokens
    try:
        result = compare(flags.model, *sizes, chosen, flags.repeat, flags.streams)
    except (UsageError, CheckpointError) as error:
        parser.error(str(error))
    print(json.dumps(result) if flags.json else report(result))
    wrong = any(own["agreement"]["wrong"] for own in result["engines"].values())
    return int(wrong or bool(result["failed"]))


def _parser() -> argparse.ArgumentParser:
    about = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser("python -m launch.bench.compare", description=about)
    parser.add_argument("--task", choices=("stream", "ragged"), default="stream")
    parser.add_argument("--model", default="smollm2", help="a model with weights")
    parser.add_argument(
        "--engines",
        type=engines,
        default="ours:1,transformers,llama-models,vllm",
        help="ours:N, transformers, llama-models, vllm; the first gives the tokens to agree with",
    )
    parser.add_argument("--streams", type=_whole, default=1, help="prompts at once of a stream")
    length = "length of the prompt, or the longest"
    parser.add_argument("--prompt-tokens", type=_whole, default=512, help=length)
    parser.add_argument("--new-tokens", type=_whole, default=64, help="for each prompt")
    parser.add_argument("--repeat", type=_whole, default=5, help="turns after the one to warm up")
    parser.add_argument("--vllm-python", metavar="PATH", help="the Python of vLLM's environment")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _whole(text: str) -> int:
    if text.isascii() and text.isdigit() and 0 < int(text) < 10**6:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 to 999999")


if __name__ == "__main__":
    # As on Ctrl-C, no engine is left running: by itself a SIGTERM would leave them all.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
