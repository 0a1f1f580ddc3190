"""`bench`: measures a model's speed and the fraction of the memory bandwidth that it reaches."""

import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parallel_llama.cli.arguments import JSON, Flag, Flags, Job, Verb
from parallel_llama.cli.calibration import write_calibration
from parallel_llama.cli.model import (
    CALIBRATION,
    DEVICE,
    DOWNLOAD,
    EXACT,
    KV_CACHE_BYTES,
    KV_SPLIT,
    LOG_DIR,
    MEMORY,
    MODEL,
    NPROC,
    PP,
    RANDOM_WEIGHTS,
    RANKS,
    SECRET_FILE,
    START_TIMEOUT,
    TIMEOUT,
    check_model,
    device_kind,
    in_dtypes,
)
from parallel_llama.cli.parsers import one_of_many, output_file, token_count, whole
from parallel_llama.cli.prediction import exchanges
from parallel_llama.cli.session import lead, leads
from parallel_llama.cli.terminal import size, table
from parallel_llama.dtypes import ITEM_BYTES
from parallel_llama.engine.scheduler import MAX_RUNNING
from parallel_llama.errors import UsageError, counted
from parallel_llama.memory import kv_bytes_per_token
from parallel_llama.parallel.launch import MAX_RANKS
from parallel_llama.parallel.rank_env import is_started_as_rank
from parallel_llama.plan import make_plan
from parallel_llama.request import MAX_TOKEN_ID, Request, SamplingParams

if TYPE_CHECKING:
    from parallel_llama.engine.calibration import RankRates
    from parallel_llama.llm import LLM

PROMPT_TOKENS: Flag[int] = Flag(
    "prompt-tokens", "length of each prompt, such as 512 or 4k", token_count(1), "N", 512
)
MAX_TOKENS: Flag[int] = Flag(
    "max-tokens", "new tokens per prompt", token_count(1, MAX_TOKEN_ID), "N", 64
)
BATCH: Flag[int] = Flag(
    "batch", "prompts at once; the KV cache must hold the batch", whole(1, MAX_RUNNING), "B", 1
)
REPEAT: Flag[int] = Flag("repeat", "measured runs, after one warm-up run", whole(1, 1000), "R", 5)
SLICE: Flag[tuple[int, int] | None] = Flag(
    "slice", "time only rank R's shard of N ranks on this device, with random weights (default "
    "seed 0), and model the time of its collectives",
    one_of_many("rank", "R", MAX_RANKS), "R/N",
)  # fmt: skip
CALIBRATE: Flag[Path | None] = Flag(
    "calibrate", "also measure the rates at which these CPU ranks read, multiply and exchange, and "
    "write them to a file for plan --calibration",
    output_file, "FILE",
)  # fmt: skip

# Microseconds per collective of a decode step on GPUs of one host with NVLink: for a fused
# all-reduce and norm kernel, for an all-reduce kernel, and for NCCL.
COLLECTIVE_US = (5, 7, 20)
_SHORT_TOKENS = 32


@dataclass(frozen=True)
class BenchRun:
    """One repetition. Units: seconds; `steps_s` are decode steps that contain all requests."""

    first_token_s: float
    prefill_s: float
    steps_s: tuple[float, ...]


def prepare(flags: Flags) -> Job:
    """Checks the sizes, model and plan, and returns the job."""
    slice_of = flags[SLICE]
    if slice_of is not None:
        flags = _single_rank_flags(flags, "--slice {}/{}".format(*slice_of))
    inputs, n_ranks = check_model(flags)
    calibration_file = flags[CALIBRATE]
    if calibration_file is not None:
        _require_calibratable(flags, calibration_file, n_ranks)
    if slice_of is not None:
        rank, n_shards = slice_of
        make_plan(inputs.args, n_shards, kv_split=flags[KV_SPLIT], exact=bool(flags[EXACT])).alone(
            rank
        )
    n_tokens, batch = flags[PROMPT_TOKENS], flags[BATCH]
    # Random ids: the time of a token does not depend on its id.
    rng = random.Random(0)
    prompts = [
        [rng.randrange(inputs.args.vocab_size) for _ in range(n_tokens)] for _ in range(batch)
    ]
    params = SamplingParams(max_tokens=flags[MAX_TOKENS], ignore_eos=True)
    requests = inputs.requests(prompts, params) if leads() else []

    longest = n_tokens + flags[MAX_TOKENS] - 1  # the last token is not cached

    def work(llm: "LLM") -> int:
        _require_room(llm, batch, longest)
        # The first run is a warm-up.
        _, *runs = [_measure(llm, _salted(requests, run)) for run in range(1 + flags[REPEAT])]
        figures = _figures(llm, runs, n_tokens * batch, batch)
        if slice_of is not None:
            figures |= _slice_figures(llm, slice_of, figures, batch, longest)
        if calibration_file is not None:
            rates = llm.rank_rates()
            formats = llm.precision.dtype, llm.precision.quant  # with the names that `plan` uses
            write_calibration(calibration_file, *formats, rates, _layer_s(llm, rates))
        print(json.dumps(figures) if flags[JSON] else "\n".join(_report(flags[MODEL], figures)))
        return 0

    # With draft tokens the number of tokens per step would depend on the random prompts.
    options: dict[str, Any] = {"max_drafts": 0, "slice_of": slice_of}
    return Job(lambda: lead(flags, inputs, work, **options), n_ranks)


def _require_room(llm: "LLM", batch: int, n_tokens: int) -> None:
    """Raises: UsageError if the KV cache does not hold the batch, so that prompts would wait."""
    n_fitting = llm.engine.capacity.n_full_requests(n_tokens)
    if n_fitting < batch:
        raise UsageError(
            f"--{BATCH.name} {batch}: the KV cache has room for {n_fitting} of {batch} sequences "
            f"of {counted(n_tokens, 'token')}; lower --{BATCH.name}, --{PROMPT_TOKENS.name} or "
            f"--{MAX_TOKENS.name}, or enlarge the KV cache with --{KV_CACHE_BYTES.name}"
        )


def _layer_s(llm: "LLM", rates: Sequence["RankRates"]) -> float:
    """Seconds of a layer in a decode step, without reads and exchanges.

    Measured with one sequence, so short that reading its KV cache takes no measurable time.
    """
    n_tokens = min(_SHORT_TOKENS, llm.input_processor.max_seq_len - 1)
    params = SamplingParams(max_tokens=n_tokens, ignore_eos=True)
    requests = llm.input_processor.requests([[0]], params)
    _, *runs = [_measure(llm, _salted(requests, run)) for run in range(3)]
    steps_s = [step_s for run in runs for step_s in run.steps_s]
    if not steps_s:
        return 0.0
    is_exact = llm.engine.runner.shard.exact is not None
    n_exchanges, n_bytes = exchanges(
        llm.args, llm.tp_size, ITEM_BYTES[llm.precision.computed], is_exact=is_exact
    )
    n_bytes_read = llm.rank_weight_bytes_per_step(1)
    known_s = max(
        n / rank_rates.read_bytes_per_s for n, rank_rates in zip(n_bytes_read, rates, strict=True)
    )
    for rank_rates in rates[:1]:
        if rank_rates.exchange_s is not None and rank_rates.link_bytes_per_s is not None:
            known_s += n_exchanges * rank_rates.exchange_s + n_bytes / rank_rates.link_bytes_per_s
    return max(statistics.median(steps_s) - known_s, 0.0) / llm.args.n_layers


def _require_calibratable(flags: Flags, path: Path, n_ranks: int) -> None:
    """Raises: UsageError if --calibrate is combined with --slice, --pp or GPUs."""
    if flags[SLICE] is not None:
        raise UsageError("--calibrate and --slice cannot be combined; drop one")
    if flags[PP] > 1:
        raise UsageError(
            f"--calibrate and --pp {flags[PP]} cannot be combined: the exchanges between stages "
            "are not measured; drop one"
        )
    if device_kind(flags[DEVICE], n_ranks) == "cuda":
        raise UsageError(
            f"--calibrate {path} measures CPU ranks, but this command runs on GPUs; add --device "
            "cpu, or drop --calibrate"
        )


def _single_rank_flags(flags: Flags, what: str) -> Flags:
    """The flags of a slice, which has random weights.

    Raises: UsageError if there are other ranks, or unequal shares.
    """
    if is_started_as_rank():
        raise UsageError(f"{what} runs in one process; start it without torchrun")
    if flags[PP] > 1:
        raise UsageError(f"{what} runs in one process; omit --pp {flags[PP]}")
    if (flags[NPROC] or 1) > 1:
        raise UsageError(f"{what} runs in one process; omit --nproc {flags[NPROC]}")
    for flag in (MEMORY, CALIBRATION):
        if flags[flag] is not None:
            raise UsageError(f"{what} is one of equal shares; omit --{flag.name}")
    return flags.with_value(RANDOM_WEIGHTS, flags[RANDOM_WEIGHTS] or 0)


def _salted(requests: Sequence[Request], run: int) -> list[Request]:
    """The requests with a cache salt, so that they do not hit the prefix cache of another run."""
    return [
        replace(request, params=replace(request.params, cache_salt=f"run {run}"))
        for request in requests
    ]


def _measure(llm: "LLM", requests: Sequence[Request]) -> BenchRun:
    """Runs the batch once, and records the time of each step's tokens."""
    start_s = time.perf_counter()
    times: dict[int, list[float]] = {request.index: [] for request in requests}
    for output in llm.run(requests):
        times[output.index].append(time.perf_counter() - start_s)
    first_tokens_s = [times_of_request[0] for times_of_request in times.values()]
    prefill_s = max(first_tokens_s)
    # Once all requests are decoding, each step generates one token of the first request.
    decode_times = [time_s for time_s in times[0] if time_s >= prefill_s]
    return BenchRun(min(first_tokens_s), prefill_s, tuple(b - a for a, b in pairwise(decode_times)))


def _figures(
    llm: "LLM", runs: Sequence[BenchRun], n_prompt_tokens: int, batch: int
) -> dict[str, Any]:
    machine = llm.machine()
    step_s = [statistics.median(run.steps_s) for run in runs if run.steps_s]
    n_bytes = llm.weight_bytes_per_step(batch)
    measured: dict[str, list[float]] = {
        "prefill_tokens_per_s": [n_prompt_tokens / run.prefill_s for run in runs],
        "decode_tokens_per_s": [batch / seconds for seconds in step_s],
        "decode_ms_per_step": [seconds * 1e3 for seconds in step_s],
        "time_to_first_token_s": [run.first_token_s for run in runs],
        "read_bandwidth_share": [
            n_bytes / seconds / machine.read_bytes_per_s for seconds in step_s
        ],
    }
    figures: dict[str, Any] = {}
    for suffix, reduce in (("", statistics.median), ("_min", min), ("_max", max)):
        for key, values in measured.items():
            figures[key + suffix] = _rounded(reduce, values)
    return figures | {
        "start_s": round(llm.statistics.load_s, 3),
        "weight_bytes_per_step": n_bytes,
        "read_bytes_per_s": round(machine.read_bytes_per_s),
        "tp_size": llm.tp_size,
        "dtype": llm.dtype,
        "kv_cache_dtype": llm.kv_format.dtype,
        "quant": llm.quant,
        "peak_rss_bytes": machine.peak_rss_bytes,
        "peak_cuda_bytes": machine.peak_cuda_bytes,
    }


def _slice_figures(
    llm: "LLM", slice_of: tuple[int, int], figures: dict[str, Any], batch: int, max_tokens: int
) -> dict[str, Any]:
    """The measured step time of one rank's slice, and the modelled step time of all ranks.

    `byte_floor_ms` is a lower bound: the time to read the weights, and the keys and values of
    sequences of `max_tokens` tokens.
    """
    runner = llm.engine.runner
    kv = kv_bytes_per_token(llm.args, runner.shard, llm.kv_format)
    n_seen = [min(kv_group.window or max_tokens, max_tokens) for kv_group in runner.kv_groups]
    kv_bytes = batch * sum(n * token_bytes for n, token_bytes in zip(n_seen, kv, strict=True))
    n_collectives = _count_collectives(llm)
    compute_ms = figures["decode_ms_per_step"]
    return {
        "slice": "{}/{}".format(*slice_of),
        "collectives_per_step": n_collectives,
        "compute_ms_per_step": compute_ms,
        "modelled_ms_per_step": {
            f"{us} us": None
            if compute_ms is None
            else round(compute_ms + n_collectives * us / 1e3, 4)
            for us in COLLECTIVE_US
        },
        "kv_bytes_per_step": kv_bytes,
        "byte_floor_ms": _rounded(
            min, [(figures["weight_bytes_per_step"] + kv_bytes) / figures["read_bytes_per_s"] * 1e3]
        ),
    }


def _count_collectives(llm: "LLM") -> int:
    """Collectives per step, counted in a prefill step, which is not replayed from a CUDA graph."""
    from parallel_llama.engine.step_buffer import MAX_DECODED
    from parallel_llama.parallel.collectives import Slice

    comm = llm.engine.comm
    assert isinstance(comm, Slice)
    prompt = [0] * min(MAX_DECODED + 1, llm.input_processor.max_seq_len - 1)
    requests = llm.input_processor.requests([prompt], SamplingParams(max_tokens=1, ignore_eos=True))
    before = comm.n_collectives
    for _ in llm.run(requests):
        pass
    return comm.n_collectives - before


def _rounded(reduce: Callable[[Sequence[float]], float], values: Sequence[float]) -> float | None:
    """Four significant digits; None if there are no values, as with --max-tokens 1."""
    return float(f"{reduce(values):.4g}") if values else None


def _report(model: str, figures: dict[str, Any]) -> list[str]:
    rows = []
    for key, label in (
        ("prefill_tokens_per_s", "prefill, tokens/s"),
        ("decode_tokens_per_s", "decode, tokens/s"),
        ("decode_ms_per_step", "decode, ms/step"),
        ("time_to_first_token_s", "first token, s"),
        ("read_bandwidth_share", "fraction of read bandwidth"),
    ):
        cells = [figures[key + suffix] for suffix in ("", "_min", "_max")]
        rows.append([*("-" if cell is None else f"{cell:g}" for cell in cells), label])
    n_ranks = counted(figures["tp_size"], "rank")
    if "slice" in figures:
        n_ranks = f"rank {figures['slice'].partition('/')[0]} of {n_ranks}, alone, random weights"
    kinds = in_dtypes(figures["dtype"], figures["quant"], figures["kv_cache_dtype"])
    readers = "this rank" if "slice" in figures else "all ranks together"
    n_bytes = figures["peak_cuda_bytes"]
    gpu_text = "" if n_bytes is None else f", and {size(n_bytes)} on a GPU"
    return [
        f"{model} on {n_ranks}, {kinds}",
        "",
        *table(["median", "min", "max", ""], rows, sys.stdout),
        "",
        f"a step reads {size(figures['weight_bytes_per_step'])} of weights; read bandwidth of "
        f"{readers}: {size(figures['read_bytes_per_s'])}/s",
        f"loaded in {figures['start_s']} s; largest peak memory of a rank: "
        f"{size(figures['peak_rss_bytes'])}{gpu_text}",
        *_modelled(figures),
    ]


def _modelled(figures: dict[str, Any]) -> list[str]:
    """Lines with the slice's measured step time, and the modelled step time of all ranks."""
    if "slice" not in figures or figures["compute_ms_per_step"] is None:
        return []
    totals = ", ".join(
        f"{ms:g} ms at {wait}" for wait, ms in figures["modelled_ms_per_step"].items()
    )
    return [
        "",
        f"measured   {figures['compute_ms_per_step']:g} ms/step of this rank without collectives; "
        f"reading its bytes takes {figures['byte_floor_ms']:g} ms",
        f"modelled   {totals} for each of {figures['collectives_per_step']} collectives, which "
        "were not run",
    ]


VERB = Verb(
    "bench",
    "Measures prefill and decode speed, and the memory bandwidth that decode reaches.",
    "[MODEL] [flags]",
    (
        MODEL, PROMPT_TOKENS, MAX_TOKENS, BATCH, REPEAT, SLICE, CALIBRATE, JSON, *RANKS,
        KV_CACHE_BYTES, RANDOM_WEIGHTS, DOWNLOAD, MEMORY, CALIBRATION, TIMEOUT, START_TIMEOUT,
        LOG_DIR, SECRET_FILE,
    ),
    "parallel-llama bench --nproc 2",
    prepare,
    argument=MODEL,
)  # fmt: skip
