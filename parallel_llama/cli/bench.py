"""`bench`: how fast a model runs here, and how much of the memory's bandwidth it reaches."""

import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from parallel_llama.cli.arguments import JSON, Flag, Flags, Verb
from parallel_llama.cli.model import MODEL, RANDOM_WEIGHTS, RANKS, TIMEOUT, check_model, in_dtypes
from parallel_llama.cli.parsers import whole
from parallel_llama.cli.ranks import Job, leads
from parallel_llama.cli.session import lead
from parallel_llama.cli.terminal import size, table
from parallel_llama.engine.scheduler import MAX_RUNNING
from parallel_llama.request import MAX_TOKEN_ID, Request, SamplingParams

if TYPE_CHECKING:
    from parallel_llama.llm import LLM

PROMPT_TOKENS: Flag[int] = Flag("prompt-tokens", "length of each prompt", whole(1), "N", 512)
MAX_TOKENS: Flag[int] = Flag(
    "max-tokens", "new tokens for each prompt", whole(1, MAX_TOKEN_ID), "N", 64
)
BATCH: Flag[int] = Flag("batch", "prompts at once", whole(1, MAX_RUNNING), "B", 1)
REPEAT: Flag[int] = Flag(
    "repeat", "runs to take the median of, after one to warm up", whole(1, 1000), "R", 5
)


@dataclass(frozen=True)
class Run:
    """One repetition. Units: seconds; `steps_s` are the decode steps, all requests in each."""

    first_token_s: float
    prefill_s: float
    steps_s: tuple[float, ...]


def prepare(flags: Flags) -> Job:
    """Check the sizes, model and plan, and return the job that measures."""
    inputs, n_ranks = check_model(flags)
    n_tokens, batch = flags[PROMPT_TOKENS], flags[BATCH]
    # Any ids will do: the arithmetic of a token does not depend on which it is.
    draw = random.Random(0)
    prompts = [
        [draw.randrange(inputs.args.vocab_size) for _ in range(n_tokens)] for _ in range(batch)
    ]
    params = SamplingParams(max_tokens=flags[MAX_TOKENS], ignore_eos=True)
    requests = inputs.requests(prompts, params) if leads() else []

    def work(llm: "LLM") -> int:
        # The first run warms memory and threads, and does not count.
        _, *runs = [_measure(llm, _unseen(requests, run)) for run in range(1 + flags[REPEAT])]
        figures = _figures(llm, runs, n_tokens * batch, batch)
        print(json.dumps(figures) if flags[JSON] else "\n".join(_report(flags[MODEL], figures)))
        return 0

    # Guesses would make a step's tokens, and so its speed, a matter of what random prompts hold.
    return Job(lambda: lead(flags, inputs, work, max_drafts=0), n_ranks)


def _unseen(requests: Sequence[Request], run: int) -> list[Request]:
    """The same requests, which find nothing in the KV cache that another run left there."""
    return [
        replace(request, params=replace(request.params, cache_salt=f"run {run}"))
        for request in requests
    ]


def _measure(llm: "LLM", requests: Sequence[Request]) -> Run:
    """Run the batch once, and note when each step's tokens came."""
    started = time.perf_counter()
    times: dict[int, list[float]] = {request.index: [] for request in requests}
    for output in llm.run(requests):
        times[output.index].append(time.perf_counter() - started)
    firsts = [own[0] for own in times.values()]
    prefill_s = max(firsts)
    # Once all are decoding, a step gives each of them one token: the first request keeps time.
    ticks = [tick for tick in times[0] if tick >= prefill_s]
    return Run(min(firsts), prefill_s, tuple(b - a for a, b in pairwise(ticks)))


def _figures(llm: "LLM", runs: Sequence[Run], n_prompt_tokens: int, batch: int) -> dict[str, Any]:
    machine = llm.machine()
    step_s = [statistics.median(run.steps_s) for run in runs if run.steps_s]
    n_bytes = llm.weight_bytes_per_step(batch)
    measured: dict[str, list[float]] = {
        "prefill_tokens_per_s": [n_prompt_tokens / run.prefill_s for run in runs],
        "decode_tokens_per_s": [batch / each for each in step_s],
        "decode_ms_per_step": [each * 1e3 for each in step_s],
        "time_to_first_token_s": [run.first_token_s for run in runs],
        "read_bandwidth_share": [n_bytes / each / machine.read_bytes_per_s for each in step_s],
    }
    figures: dict[str, Any] = {}
    for name, choose in (("", statistics.median), ("_min", min), ("_max", max)):
        for key, values in measured.items():
            figures[key + name] = _rounded(choose, values)
    return figures | {
        "start_s": round(llm.statistics.load_s, 3),
        "weight_bytes_per_step": n_bytes,
        "read_bytes_per_s": round(machine.read_bytes_per_s),
        "tp_size": llm.tp_size,
        "dtype": llm.dtype,
        "kv_cache_dtype": llm.kv_format.dtype,
        "quant": llm.quant,
        "peak_rss_bytes": machine.peak_rss_bytes,
    }


def _rounded(choose: Callable[[Sequence[float]], float], values: Sequence[float]) -> float | None:
    """Four significant digits; None where max-tokens 1 leaves no step to time."""
    return float(f"{choose(values):.4g}") if values else None


def _report(model: str, figures: dict[str, Any]) -> list[str]:
    rows = []
    for key, label in (
        ("prefill_tokens_per_s", "prefill, tokens/s"),
        ("decode_tokens_per_s", "decode, tokens/s"),
        ("decode_ms_per_step", "decode, ms a step"),
        ("time_to_first_token_s", "first token, s"),
        ("read_bandwidth_share", "share of read bandwidth"),
    ):
        cells = [figures[key + suffix] for suffix in ("", "_min", "_max")]
        rows.append([*("-" if cell is None else f"{cell:g}" for cell in cells), label])
    n_ranks = f"{figures['tp_size']} rank{'s' * (figures['tp_size'] > 1)}"
    kinds = in_dtypes(figures["dtype"], figures["quant"], figures["kv_cache_dtype"])
    return [
        f"{model} on {n_ranks}, {kinds}",
        "",
        *table(["median", "min", "max", ""], rows, sys.stdout),
        "",
        f"a step reads {size(figures['weight_bytes_per_step'])} of weights; the memory gives "
        f"{size(figures['read_bytes_per_s'])}/s to all ranks at once",
        f"loaded in {figures['start_s']} s; the largest rank held "
        f"{size(figures['peak_rss_bytes'])} at its peak",
    ]


VERB = Verb(
    "bench",
    "Measures prefill and decode, and the share of the memory's bandwidth that decode reaches.",
    "[--model PATH_OR_NAME] [flags]",
    (MODEL, PROMPT_TOKENS, MAX_TOKENS, BATCH, REPEAT, JSON, *RANKS, RANDOM_WEIGHTS, TIMEOUT),
    "parallel-llama bench --nproc 2",
    prepare,
)
