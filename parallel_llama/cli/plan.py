"""`plan`: how a model is sharded, how much memory it needs, and how many ranks fit. No torch."""

import json
import sys
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from parallel_llama.cli import model
from parallel_llama.cli.arguments import JSON, Flag, Flags, Job, Verb, warn
from parallel_llama.cli.calibration import Calibration, read_calibrations
from parallel_llama.cli.estimate import (
    Comparison,
    Estimate,
    PlanRequest,
    RankEstimate,
    compare,
    estimate,
    fewest_that_fit,
)
from parallel_llama.cli.format_table import (
    FormatTable,
    format_lines,
    format_objects,
    format_table,
)
from parallel_llama.cli.hardware import Hardware, gpu_hardware
from parallel_llama.cli.hosts import Hosts, read_hosts
from parallel_llama.cli.largest import MAX_BATCH, Largest, find_largest
from parallel_llama.cli.parsers import (
    GB,
    GPU,
    bandwidths,
    count_or_range,
    gpu_list,
    input_file,
    input_files,
    memory_sizes,
    number,
    output_file,
    whole,
)
from parallel_llama.cli.plan_picture import picture
from parallel_llama.cli.prediction import (
    Prediction,
    RankSteps,
    StepTime,
    predict,
    rank_steps,
    why_unpredicted,
)
from parallel_llama.cli.remedies import Remedy, find_remedies
from parallel_llama.cli.terminal import DIM, GREEN, RED, bar, bar_fills, painted, size, table
from parallel_llama.config.layouts import default_dtype, default_quant, stored_formats, why_decoded
from parallel_llama.engine.llm_config import require_pipeline
from parallel_llama.errors import UsageError, WriteError
from parallel_llama.families.model_args import ModelArgs, context_length
from parallel_llama.families.weights import Axis
from parallel_llama.files.partial_output import growing_file, replace_file
from parallel_llama.memory import CUDA_ALLOWANCE, PROCESS_BYTES
from parallel_llama.parallel.device_choice import DeviceKind, choose_device, count_gpus
from parallel_llama.plan import ShardPlan, why_unrecorded

WIDTH = 80
LABEL_WIDTH = 11
CUTS = {"kv_heads": "KV heads", "heads": "query heads"}
PLACEMENTS = {
    "tensor": "tensor parallel",
    "expert": "expert parallel",
    "mixed": "tensor and expert parallel",
}
BAR_WIDTH = 18
_SPEED = "predicted for each sequence, at the full context"
_BOUND = "most that the memory bandwidth allows for each sequence, at the full context"

NPROC: Flag[list[int] | None] = Flag(
    "nproc", "ranks to plan for, or a range to compare", count_or_range, "N|A-B",
    default_text="the number in --memory or --gpus; for one size, the fewest that fit; else 1",
    aliases=model.NPROC_ALIASES,
)  # fmt: skip
MEMORY: Flag[int | list[int] | None] = Flag(
    "memory",
    "memory per rank: one size for all ranks in GiB (80; or 24G, 24GB, 24576MiB), or one per rank "
    "(80,80,40; 80x4,40x2), so that ranks get work in proportion; GPU memory with --device cuda",
    memory_sizes, "SIZES",
)  # fmt: skip
GPUS: Flag[GPU | list[GPU] | None] = Flag(
    "gpus",
    "plan for CUDA GPUs, one per rank: number and name (8xH200) or number and usable GiB (3x24; "
    "2x80,1x40); without a number (H100) finds the fewest that fit",
    gpu_list, "GPUS",
)  # fmt: skip
BANDWIDTH: Flag[int | list[int] | None] = Flag(
    "bandwidth",
    "memory bandwidth in GB/s (3350; or 25GiB), one value for all ranks or one per rank: predicts "
    "the speed of GPUs that --gpus names; otherwise gives an upper bound of the decoding speed",
    bandwidths, "RATES", default_text="that of the GPUs that --gpus names",
)  # fmt: skip
CALIBRATION: Flag[list[str] | None] = Flag(
    "calibration",
    "file of bench --calibrate: predict the speed on its machine, on CPU ranks; with a file per "
    "host or rank (a.json,b.json), ranks get work in proportion to their speed",
    input_files, "FILES",
)  # fmt: skip
HOSTS: Flag[str | None] = Flag(
    "hosts", "JSON file with a list of hosts, each with its ranks or gpus, memory, calibration and "
    "link: plan for all hosts, and predict the exchanges between hosts",
    input_file, "FILE",
)  # fmt: skip
PRICE: Flag[float | None] = Flag(
    "price", "price of a GPU (or rank) per hour, in any currency: print the cost of a million new "
    "tokens at this batch and context",
    number(0), "PER_GPU_HOUR",
)  # fmt: skip
SVG: Flag[Path | None] = Flag(
    "svg", "also draw the plan in a file for browsers: what each rank holds, and its memory",
    output_file, "FILE", subject="output",
)  # fmt: skip
FIT: Flag[bool] = Flag(
    "fit",
    "compare formats of weights and KV cache: which fit into the memory, the fewest ranks for each "
    "format if no number of ranks is given, and the largest context and batch",
)
BATCH: Flag[int] = Flag("batch", "concurrent sequences", whole(1, MAX_BATCH), "B", 1)


def prepare(flags: Flags) -> Job:
    """Checks the request, and returns the job that prints a plan, or a table for a range of ranks.

    The number of ranks is --nproc, else the number that --memory or --gpus lists. With one size and
    no number it is the smallest that fits, and with neither flag it is 1.
    """
    hosts = _hosts(flags)
    gpus = _gpus(flags) if hosts is None else hosts.gpus
    memory = _memory(flags, gpus) if hosts is None else hosts.memory
    files = model.found_model(flags, flags[model.MODEL])
    args = model.args_of(files)
    nproc = flags[NPROC] if hosts is None else [hosts.n_ranks]
    calibration = read_calibrations(flags[CALIBRATION]) if hosts is None else hosts.calibration
    if hosts is None and calibration is not None and calibration.n_files > 1:
        nproc = _ranks_of(flags, calibration)
    first, *last = nproc or [len(memory) if isinstance(memory, tuple) else 1]
    device: DeviceKind = "cuda" if gpus else _device_kind(flags[model.DEVICE], first)
    if hosts is not None and gpus is None:
        device = "cpu"
    require_pipeline(flags[model.PP], device, flags[model.KV_SPLIT])
    dtype = flags[model.DTYPE] or default_dtype(files, args, device)
    if decoded := why_decoded(files, args, dtype, flags[model.QUANT]):
        warn(decoded)
    asked = PlanRequest(
        args,
        stored_formats(files, args),
        device,
        dtype,
        flags[model.QUANT] or default_quant(files, args, dtype),
        flags[model.KV_CACHE_DTYPE],
        flags[model.KV_SPLIT],
        _exact(flags, hosts, flags[model.PP]),
        context_length(args, flags[model.MAX_SEQ_LEN]),
        flags[BATCH],
        first,
        memory,
        _bandwidth(flags, gpus),
        _hardware(flags, gpus),
        pp=flags[model.PP],
    )
    if calibration is not None:
        asked = _calibrated(asked, calibration, _named(flags))
    if hosts is not None:
        asked = replace(asked, hardware=hosts.with_links(asked.hardware), hosts=hosts)
    finds_fewest = nproc is None and isinstance(memory, int)
    if isinstance(listed := flags[BANDWIDTH], list):
        _check_listed(len(listed), None if last or finds_fewest else first)
    if flags[FIT]:
        _check_fit(flags, asked)
        formats = format_table(asked, finds_fewest=finds_fewest)
        return Job(lambda: _show_formats(flags, formats))
    if last:
        if flags[SVG] is not None:
            raise UsageError("--svg draws one plan, but --nproc is a range; give --nproc N")
        if isinstance(memory, tuple):
            raise UsageError(
                f"{'--gpus' if flags[GPUS] else '--memory'} lists {len(memory)} ranks, but --nproc "
                "is a range; give --nproc N, or one size for all ranks"
            )
        if first < asked.pp:
            raise UsageError(
                f"--nproc {first}-{last[0]} and --pp {asked.pp}: a stage needs at least one rank; "
                f"use --nproc {asked.pp}-{max(last[0], asked.pp + 1)}"
            )
        comparison = compare(asked, range(first, last[0] + 1), memory)
        _check_price(flags, comparison.allowed)
        return Job(lambda: _show_range(flags, comparison))
    if finds_fewest:
        found, fewer = fewest_that_fit(asked)
        _check_price(flags, [found])
        return Job(lambda: _show_fewest(flags, found, fewer))
    one = estimate(asked)
    _check_price(flags, [one])
    return Job(lambda: _show_one(flags, one))


def _exact(flags: Flags, hosts: Hosts | None, pp: int) -> bool | None:
    """On several hosts exact sums are not the default, except in a pipeline."""
    return bool(flags[model.EXACT]) if hosts and hosts.links and pp == 1 else flags[model.EXACT]


def _hosts(flags: Flags) -> Hosts | None:
    """The hosts of --hosts. Raises: UsageError if other flags list ranks too."""
    if (path := flags[HOSTS]) is None:
        return None
    others = (NPROC, MEMORY, GPUS, BANDWIDTH, CALIBRATION)
    given = [flag.name for flag in others if flags[flag] is not None]
    given += ["fit"] * flags[FIT] + ["device"] * (flags[model.DEVICE] != model.DEVICE.initial)
    if given:
        raise UsageError(
            f"--hosts and --{given[0]} cannot be combined: the file describes the ranks; drop one"
        )
    return read_hosts(path)


def _check_listed(n_bandwidths: int, n_ranks: int | None) -> None:
    """Raises: UsageError if bandwidths are listed for other ranks than the planned ones."""
    if n_bandwidths != n_ranks:
        planned = "the number of ranks varies" if n_ranks is None else f"the plan has {n_ranks}"
        raise UsageError(
            f"--bandwidth lists {n_bandwidths} ranks, but {planned}; give one bandwidth for all "
            "ranks, or one per rank of --nproc N"
        )


def _check_price(flags: Flags, planned: Sequence[Estimate]) -> None:
    """Raises: UsageError if --price is given and the speed of a plan is not predicted."""
    if (price := flags[PRICE]) is None:
        return
    for found in planned:
        if reason := why_unpredicted(found):
            raise UsageError(
                f"--price {price:g} needs a predicted speed, which tp_size={found.plan.tp_size} "
                f"does not have ({reason}); else drop --price"
            )


def _check_fit(flags: Flags, asked: PlanRequest) -> None:
    """Raises: UsageError if --fit has no memory to compare with, or other flags contradict it."""
    if asked.memory is None:
        raise UsageError(
            "--fit needs the memory of the ranks: add --gpus 2x24 or --memory 16,16, or one size "
            "to find the fewest ranks"
        )
    paths = flags[CALIBRATION]
    given: dict[str, object] = {
        "quant": flags[model.QUANT],
        "svg": flags[SVG],
        "price": flags[PRICE],
        "calibration": paths and ",".join(paths),
    }
    if flags[model.KV_CACHE_DTYPE] != model.KV_CACHE_DTYPE.initial:
        given["kv-cache-dtype"] = flags[model.KV_CACHE_DTYPE]
    for name, value in given.items():
        if value is not None:
            raise UsageError(f"--fit compares the formats of one model; drop --{name} {value}")
    if len(nproc := flags[NPROC] or []) > 1:
        raise UsageError(
            f"--fit plans for one number of ranks, or finds the fewest; drop --nproc "
            f"{nproc[0]}-{nproc[1]}, or give --nproc N"
        )


def _gpus(flags: Flags) -> GPU | list[GPU] | None:
    """The GPUs in --gpus that are planned for: one for any number of ranks, or one per rank."""
    gpus = flags[GPUS]
    if gpus is not None and flags[MEMORY] is not None:
        raise UsageError("--gpus and --memory cannot be combined; give one")
    if gpus is not None and flags[model.DEVICE] == "cpu":
        raise UsageError("--gpus and --device cpu cannot be combined; drop one")
    if isinstance(gpus, list) and (nproc := flags[NPROC]):
        return _some_of(gpus, nproc)
    return gpus


def _some_of(gpus: list[GPU], nproc: list[int]) -> GPU | list[GPU]:
    """The GPUs in --gpus that --nproc ranks use."""
    if nproc[-1] > len(gpus):
        raise UsageError(
            f"--gpus lists {len(gpus)} GPUs, fewer than --nproc {nproc[-1]}; each rank needs its "
            "own GPU"
        )
    if len(set(gpus)) > 1:
        return gpus
    return gpus[: nproc[0]] if len(nproc) == 1 else gpus[0]


def _memory(flags: Flags, gpus: GPU | list[GPU] | None) -> int | tuple[int, ...] | None:
    """The memory per rank from --memory or --gpus: one size for all ranks, or a list."""
    if isinstance(gpus, GPU):
        return gpus.memory
    given = [gpu.memory for gpu in gpus] if gpus else flags[MEMORY]
    return tuple(given) if isinstance(given, list) else given


def _bandwidth(flags: Flags, gpus: GPU | list[GPU] | None) -> int | tuple[int | None, ...] | None:
    """The bandwidth per rank from --bandwidth, or of the GPUs: one for all ranks, or a list."""
    given = flags[BANDWIDTH]
    if given is None:
        if isinstance(gpus, list):
            return tuple(gpu.bandwidth for gpu in gpus)
        return gpus and gpus.bandwidth
    return tuple(given) if isinstance(given, list) else given


def _hardware(flags: Flags, gpus: GPU | list[GPU] | None) -> Hardware | None:
    """The rates of the GPUs, with the bandwidth of --bandwidth; None if they are not known."""
    given = flags[BANDWIDTH]
    if given is None or gpus is None:
        return gpu_hardware(gpus)
    if isinstance(given, list):
        listed = gpus if isinstance(gpus, list) else [gpus] * len(given)
        if len(listed) != len(given):  # an error follows
            return None
        both = zip(listed, given, strict=True)
        return gpu_hardware([gpu._replace(bandwidth=own) for gpu, own in both])
    if isinstance(gpus, list):
        return gpu_hardware([gpu._replace(bandwidth=given) for gpu in gpus])
    return gpu_hardware(gpus._replace(bandwidth=given))


def _named(flags: Flags) -> str:
    paths = flags[CALIBRATION]
    if flags[HOSTS] is not None:
        return f"the calibration in --hosts {flags[HOSTS]}"
    return f"--calibration {','.join(paths or [])}"


def _ranks_of(flags: Flags, found: Calibration) -> list[int]:
    """The number of ranks in several files. Raises: UsageError if --nproc is another number."""
    n_ranks = [len(found.ranks)]
    if flags[NPROC] not in (None, n_ranks):
        raise UsageError(
            f"{_named(flags)} has {n_ranks[0]} ranks; omit --nproc, or give --nproc {n_ranks[0]}"
        )
    return n_ranks


def _calibrated(asked: PlanRequest, found: Calibration, named: str) -> PlanRequest:
    """A request with the rates of files. Raises: UsageError if they are of something else."""
    own = asked.precision
    if asked.device != "cpu":
        raise UsageError(f"{named} has rates of CPU ranks; drop --gpus, or add --device cpu")
    if (found.dtype, found.quant) != (own.dtype, own.quant):
        raise UsageError(
            f"{named} is for --dtype {found.dtype} --quant {found.quant}, and the plan has --dtype "
            f"{own.dtype} --quant {own.quant}; use the same, or calibrate again"
        )
    return replace(asked, hardware=found.hardware(), speeds=found.speeds)


def _device_kind(asked: str, n_ranks: int) -> DeviceKind:
    """The device to plan for; an explicit --device need not exist on this machine."""
    return choose_device(asked, n_ranks, count_gpus() if asked == "auto" else n_ranks)


def _show_one(flags: Flags, found: Estimate) -> int:
    _draw(flags, found)
    largest, other = find_largest(found.asked), _other_stages(flags, found)
    answer = {
        **_object(found, flags[PRICE]),
        **_limits(largest),
        "other_stages": other and {"pp": other.asked.pp, **_predicted(other, None)},
    }
    page = [
        *_page(found, flags[PRICE]),
        *_compared(other),
        *_largest(found.asked, largest),
    ]
    return _show(flags, found.asked, answer, page, _remedies(found))


def _other_stages(flags: Flags, found: Estimate) -> Estimate | None:
    """The plan with a stage for each host, or without stages if `found` has several.

    None on one host, on GPUs, and if the ranks of a stage would be on several hosts.
    """
    hosts = found.asked.hosts
    if hosts is None or not hosts.links or found.asked.device != "cpu":
        return None
    pp = 1 if found.asked.pp > 1 else len(hosts.hosts)
    try:
        other = estimate(replace(found.asked, pp=pp, exact=_exact(flags, hosts, pp)))
    except UsageError:
        return None
    stages = tuple(stage.ranks for stage in other.plan.stages)
    return other if pp == 1 or stages == hosts.ranks else None


def _compared(other: Estimate | None) -> list[str]:
    """The predicted speed of the plan with other stages; empty if it is not predicted."""
    if other is None or (predicted := predict(other)) is None:
        return []
    pp = other.asked.pp
    text = f"with --pp {pp}" if pp > 1 else "without --pp"
    text += f", about {_rate(1 / predicted.full.total_s)} new tokens/s after "
    text += f"{other.asked.max_seq_len:,} tokens"
    if predicted.prefill_tokens_per_s is not None:
        text += f", and prompts at about {_rate(predicted.prefill_tokens_per_s)} tokens/s"
    return _line("otherwise", text)


def _show_fewest(flags: Flags, found: Estimate, fewer: Estimate | None) -> int:
    """Shows the plan with the fewest ranks that fit, or with the maximum number of ranks."""
    _draw(flags, found)
    largest = find_largest(found.asked)
    answer = {
        **_object(found, flags[PRICE]),
        **_limits(largest),
        "other_stages": None,  # --hosts gives the number of ranks
        "smallest_that_fits": found.plan.tp_size if found.fits else None,
        "next_smaller": fewer and _object(fewer, flags[PRICE]),
    }
    page = [
        *_page(found, flags[PRICE]),
        *_largest(found.asked, largest),
        *_answer(found, fewer),
    ]
    return _show(flags, found.asked, answer, page, _remedies(found))


def _show_formats(flags: Flags, formats: FormatTable) -> int:
    if flags[JSON]:
        answer = {"fits": formats.fits, "formats": format_objects(formats)}
        print(json.dumps({"model": flags[model.MODEL], **answer}))
    else:
        print("\n".join([*_title(flags, formats.asked), *_formats_page(formats)]))
    return 0 if formats.fits else 1


def _draw(flags: Flags, found: Estimate) -> None:
    """Writes the file of --svg, if there is one."""
    if (path := flags[SVG]) is None:
        return
    asked, n_ranks = found.asked, found.plan.tp_size
    sequences = f"{asked.batch} sequence{'s' * (asked.batch > 1)} of {asked.max_seq_len:,} tokens"
    title = [
        f"{flags[model.MODEL]} on {n_ranks} rank{'s' * (n_ranks > 1)}",
        f"{model.in_dtypes(asked.precision.dtype, asked.precision.quant, asked.kv.dtype)}, for "
        f"{sequences}",
    ]
    names: dict[str, Axis] = {"heads": "heads", "KV heads": "kv_heads", "channels": "ffn"}
    names |= {f"{name} channels": axis for name, axis in _more_channels(asked.args).items()}
    names["vocabulary"] = "vocab"
    if asked.is_exact and n_ranks > 1:
        names["outputs"] = "outputs"
    shards = found.plan.shards
    axes = {name: [shard.extent(axis) for shard in shards] for name, axis in names.items()}
    if asked.pp > 1:
        axes["layers"] = [shard.layers for shard in shards]
    if found.plan.placement:
        axes["experts"] = [shard.experts for shard in shards]
    try:
        replace_file(path, growing_file(path), picture(found, title, axes))
    except OSError as error:
        raise WriteError(f"--svg {path}: {error.strerror or error}; give another file") from error


def _show_range(flags: Flags, comparison: Comparison) -> int:
    remedies: list[Remedy] = []
    if comparison.fits is False and comparison.allowed:
        largest = comparison.allowed[-1].asked
        if isinstance(flags[GPUS], list) and comparison.memory:  # more ranks need more GPUs
            largest = replace(largest, memory=(comparison.memory,) * largest.tp_size)
        remedies = find_remedies(largest)
    errors = [{"tp_size": n, "error": reason} for n, reason in comparison.refused.items()]
    answer = {
        "plans": [*(_object(each, flags[PRICE]) for each in comparison.allowed), *errors],
        "fits": comparison.fits,
        "smallest_that_fits": comparison.smallest_that_fits,
    }
    return _show(flags, comparison.asked, answer, _overview(comparison, flags[PRICE]), remedies)


def _remedies(found: Estimate) -> list[Remedy]:
    return find_remedies(found.asked) if found.fits is False else []


def _show(
    flags: Flags,
    asked: PlanRequest,
    answer: dict[str, Any],
    page: Sequence[str],
    remedies: Sequence[Remedy],
) -> int:
    if flags[JSON]:
        changes = [_remedy_object(remedy) for remedy in remedies]
        print(json.dumps({"model": flags[model.MODEL], **answer, "remedies": changes}))
    else:
        print("\n".join([*_title(flags, asked), *page, *_advice(answer["fits"], remedies)]))
    return 1 if answer["fits"] is False else 0


def _remedy_object(remedy: Remedy) -> dict[str, Any]:
    return {
        "change": remedy.words,
        **{name: value for name, value in remedy.change.items() if name != "memory"},
        "tp_size": remedy.found.plan.tp_size,
        "needed_bytes": remedy.found.tightest.needed,
        "room_for_kv_tokens": remedy.found.room_for_tokens,
        "kv_tokens": remedy.found.asked.n_tokens,
    }


def _object(found: Estimate, price: float | None) -> dict[str, Any]:
    """A plan as a JSON object; ranges are half-open [start, stop]."""
    steps = rank_steps(found)
    seconds = [None] * len(found.ranks) if steps is None else steps.seconds
    return {
        "tp_size": found.plan.tp_size,
        "pp": len(found.plan.stages),
        "ranks": [
            {
                "rank": rank.shard.rank,
                "stage": found.plan.stages.index(rank.shard.stage),
                "layers": _pair(rank.shard.layers),
                "heads": _pair(rank.shard.heads),
                "kv_heads": _pair(rank.shard.kv_heads),
                "ffn": _pair(rank.shard.ffn),
                "shared_ffn": _pair(rank.shard.shared_ffn),
                "dense_ffn": _pair(rank.shard.dense_ffn),
                "experts": _pair(rank.shard.experts),
                "vocab": _pair(rank.shard.vocab),
                "outputs": _pair(rank.shard.outputs),
                "weight_bytes": rank.weights,
                "kv_bytes_per_token": rank.kv_per_token,
                "working_bytes": rank.working,
                "needed_bytes": rank.needed,
                "memory_bytes": rank.memory,
                "step_read_bytes": rank.read_weights + rank.read_kv,
                "bandwidth_bytes_per_s": rank.bandwidth,
                "step_s": own_s,
            }
            for rank, own_s in zip(found.ranks, seconds, strict=True)
        ],
        "hosts": found.asked.hosts and _host_objects(found.asked.hosts),
        "slowest_rank": steps and steps.slowest,
        "balanced_step_s": steps and steps.balanced_s,
        "loss": steps and steps.loss,
        "exact": found.asked.is_exact,
        "imbalance": found.plan.balance,
        "fits": found.fits,
        "cut": found.plan.cut,
        "placement": found.plan.placement and found.plan.placement.kind,
        "device": found.asked.device,
        "dtype": found.asked.precision.dtype,
        "quant": found.asked.precision.quant,
        "kv_cache_dtype": found.asked.kv.dtype,
        "kv_cache_bytes": found.cache_bytes,
        "kv_tokens": found.asked.n_tokens,
        "room_for_kv_tokens": found.room_for_tokens,
        "weight_bytes": found.weights,
        "one_rank_weight_bytes": found.asked.weights,
        "batch": found.asked.batch,
        "decode_limit_tokens_per_s": found.tokens_per_s(is_full=True),
        "decode_limit_tokens_per_s_empty": found.tokens_per_s(is_full=False),
        **_predicted(found, price),
        "sliding_window": found.asked.args.sliding_window,
        "unrecorded_decode": _unrecorded(found),
        "kv_bytes_per_sequence": sum(rank.kv.per_sequence for rank in found.ranks),
    }


def _host_objects(hosts: Hosts) -> list[dict[str, Any]]:
    return [
        {"name": hosts.name(number), "ranks": _pair(own)} for number, own in enumerate(hosts.ranks)
    ]


def _predicted(found: Estimate, price: float | None) -> dict[str, Any]:
    """The predicted speed as JSON keys; `price` is that of a rank per hour."""
    predicted = predict(found)
    if predicted is None:
        return {"predicted": None, "unpredicted": why_unpredicted(found)}
    steps = {"decode": predicted.full, "decode_empty": predicted.empty}
    if predicted.prefill is not None:
        steps["prefill"] = predicted.prefill
    answer: dict[str, Any] = {
        "decode_tokens_per_s": predicted.tokens_per_s,
        "prefill_tokens_per_s": predicted.prefill_tokens_per_s,
        "steps": {name: _step_object(step) for name, step in steps.items()},
    }
    if price is not None:
        answer["price_per_million_tokens"] = predicted.cost(price * found.plan.tp_size)
    return {"predicted": answer, "unpredicted": None}


def _step_object(step: StepTime) -> dict[str, Any]:
    return {
        "total_s": step.total_s,
        "memory_s": step.memory_s,
        "arithmetic_s": step.arithmetic_s,
        "link_s": step.link_s,
        "launch_s": step.launch_s,
        "limit": step.limit,
    }


def _title(flags: Flags, asked: PlanRequest) -> list[str]:
    args = asked.args
    shape = (
        f"{args.n_layers} layers of width {args.dim}, {args.n_heads} heads of {args.head_dim}, "
        f"{args.n_kv_heads} KV heads, {_channels(args)}, vocabulary of {args.vocab_size}, "
        f"{model.in_dtypes(asked.precision.dtype, asked.precision.quant, asked.kv.dtype)}"
    )
    where = "for CUDA GPUs" if asked.device == "cuda" else "for the CPU"
    if isinstance(asked.memory, tuple):
        where += f": {_sizes(asked.memory)}"
    elif asked.memory:
        where += f", {size(asked.memory)} each"
    if asked.device == "cpu" and asked.memory and flags[model.DEVICE] == "auto":
        where += " (--gpus plans for GPUs)"
    lines = textwrap.wrap(shape, WIDTH, break_long_words=False)
    return [
        f"{flags[model.MODEL]}, {where}",
        *(painted(line, DIM, sys.stdout) for line in lines),
        "",
    ]


def _sizes(memory: Sequence[int]) -> str:
    return ", ".join(f"{n} x {size(n_bytes)}" for n_bytes, n in Counter(memory).items())


def _channels(args: ModelArgs) -> str:
    if not args.n_experts:
        return f"{args.ffn_dim} channels"
    channels = f"{args.n_active_experts} of {args.n_experts} experts of {args.ffn_dim} channels"
    if args.shared_ffn_dim:
        channels += f", a shared expert of {args.shared_ffn_dim}"
    if args.dense_layers:
        n_dense = len(args.dense_layers)
        channels += (
            f", {args.dense_ffn_dim} in {n_dense} layer{'s' * (n_dense > 1)} without experts"
        )
    return channels


def _line(label: str, text: str) -> list[str]:
    """A label, and wrapped text to its right."""
    wrapped = textwrap.wrap(text, WIDTH - LABEL_WIDTH, break_long_words=False)
    return [f"{label:<{LABEL_WIDTH}}{wrapped[0]}", *(" " * LABEL_WIDTH + w for w in wrapped[1:])]


def _page(found: Estimate, price: float | None) -> list[str]:
    """One plan as text: what each rank holds and needs, and a summary."""
    plan, asked = found.plan, found.asked
    sequences = f"{asked.max_seq_len:,} tokens" + (f" x {asked.batch}" if asked.batch > 1 else "")
    held = ["rank", *(["layers"] if asked.pp > 1 else []), "heads", "KV heads"]
    held += ["experts"] if plan.placement else []
    held += ["channels", *_more_channels(asked.args), "vocabulary", "KV/token"]
    needs = ["rank", "weights", "KV cache", "rest", "needs"]
    needs += [] if found.fits is None else ["has"]
    fills, _ = bar_fills(sys.stdout)
    needs += [f"{fills[0]}weights {fills[1]}KV {fills[2]}rest"]
    scale = max(max(rank.memory or 0, rank.needed) for rank in found.ranks)
    kv_per_token = sum(rank.kv_per_token for rank in found.ranks)
    steps = rank_steps(found)
    return [
        *table(held, [_held_row(rank, asked.args) for rank in found.ranks], sys.stdout),
        "",
        *table(needs, [_needs_row(rank, scale) for rank in found.ranks], sys.stdout),
        "",
        *_steps_table(found, steps),
        *_line(
            "balance",
            f"{plan.balance:.3f} (maximum work of a rank / its fair share), cut between "
            f"{CUTS[plan.cut]}",
        ),
        *_line(
            "weights",
            f"{size(found.weights)} on all ranks, {found.weights / asked.weights:.3f} x the "
            f"model's {size(asked.weights)}",
        ),
        *_line(
            "KV cache",
            f"for {sequences}, {size(kv_per_token)} per token on all ranks, {_copies(found)}",
        ),
        *_line("rest", _rest(found)),
        *_stages(plan),
        *_window(found),
        *_experts(plan),
        *_decode(found),
        *_links(found),
        *_slowest(steps),
        *_speed(found),
        *_cost(found, price),
        *_verdict(found),
        *_cache_flag(found),
    ]


def _more_channels(args: ModelArgs) -> dict[str, Axis]:
    """The columns for channels other than those of experts or of all layers, and their axes."""
    columns: dict[str, Axis] = {}
    if args.shared_ffn_dim:
        columns["shared"] = "shared_ffn"
    if args.dense_layers:
        columns["dense"] = "dense_ffn"
    return columns


def _held_row(rank: RankEstimate, args: ModelArgs) -> list[str]:
    shard = rank.shard
    experts = [_span(shard.experts)] if shard.experts else []
    spans = [_span(shard.heads), _span(shard.kv_heads), *experts, _span(shard.ffn)]
    spans += [_span(shard.extent(axis)) for axis in _more_channels(args).values()]
    layers = [_span(shard.layers)] if len(shard.stages) > 1 else []
    return [str(shard.rank), *layers, *spans, _span(shard.vocab), size(rank.kv_per_token)]


def _needs_row(rank: RankEstimate, scale: int) -> list[str]:
    parts = rank.weights, rank.kv.needed, rank.working
    limit = 1 if rank.memory is None else rank.memory / scale
    drawn = bar([part / scale for part in parts], BAR_WIDTH, sys.stdout, limit)
    cells = [str(rank.shard.rank), *map(size, parts), size(rank.needed)]
    if rank.memory is None:
        return [*cells, drawn]
    color = GREEN if rank.needed <= rank.memory else RED
    return [*cells, size(rank.memory), painted(drawn, color, sys.stdout)]


def _steps_table(found: Estimate, steps: RankSteps | None) -> list[str]:
    """What each rank reads in a decode step and how long it takes; empty for ranks that are alike.

    The times have no exchanges, in which all ranks wait for each other.
    """
    if steps is None or not steps.is_unlike:
        return []
    header = ["rank", "reads in a step", "at", "takes"]
    rows = [
        [
            str(rank.shard.rank),
            size(rank.read_weights + rank.read_kv),
            f"{rate / GB:,.1f} GB/s",
            f"{seconds * 1e3:,.2f} ms",
        ]
        for rank, rate, seconds in zip(found.ranks, steps.rates, steps.seconds, strict=True)
    ]
    return [*table(header, rows, sys.stdout), ""]


def _slowest(steps: RankSteps | None) -> list[str]:
    """The rank that limits the step, and the loss; empty for ranks that are alike."""
    if steps is None or not steps.is_unlike:
        return []
    return _line(
        "slowest",
        f"rank {steps.slowest} limits a step: {max(steps.seconds) * 1e3:,.2f} ms without "
        f"exchanges, {steps.loss:.1%} more than {steps.balanced_s * 1e3:,.2f} ms, which the ranks "
        "would take if each read exactly in proportion to its speed",
    )


def _links(found: Estimate) -> list[str]:
    """The hosts, and the time of the exchanges between them; empty without --hosts."""
    if (hosts := found.asked.hosts) is None:
        return []
    text = ", ".join(
        f"{hosts.name(number)}: {'rank' if len(own) == 1 else 'ranks'} {_span(own)}"
        for number, own in enumerate(hosts.ranks)
    )
    if hosts.links and (predicted := predict(found)) is not None:
        text += f"; exchanges take {predicted.full.link_s * 1e3:,.2f} ms of a step"
    return _line("hosts", text)


def _experts(plan: ShardPlan) -> list[str]:
    if plan.placement is None:
        return []
    return _line("experts", f"{PLACEMENTS[plan.placement.kind]}: {plan.placement.reason}")


def _stages(plan: ShardPlan) -> list[str]:
    """The stages of the pipeline, and the exchanges of all ranks; empty without a pipeline."""
    if len(plan.stages) == 1:
        return []
    text = "; ".join(
        f"{_numbered('rank', stage.ranks)}: {_numbered('layer', stage.layers)}"
        for stage in plan.stages
    )
    n_exchanges = len(plan.stages) + 3  # of the embedding, the output layer and the new tokens too
    return _line("stages", f"{text}; {n_exchanges} exchanges of all ranks in a decode step")


def _numbered(what: str, numbers: range) -> str:
    return f"{what}{'s' * (len(numbers) > 1)} {_span(numbers)}"


def _unrecorded(found: Estimate) -> str | None:
    return why_unrecorded(found.asked.args, found.plan.kv_parts, found.asked.device)


def _decode(found: Estimate) -> list[str]:
    """Why decode steps run operator by operator; empty if they do not."""
    reason = _unrecorded(found)
    return [] if reason is None else _line("decode", reason)


def _speed(found: Estimate) -> list[str]:
    """The predicted speed, else the most that memory allows; empty if no rate is known."""
    asked, slowest = found.asked, found.slowest
    each = f" for each of {asked.batch} sequences" if asked.batch > 1 else ""
    if (predicted := predict(found)) is not None:
        return _predicted_speed(found, predicted, each)
    full, empty = found.tokens_per_s(is_full=True), found.tokens_per_s(is_full=False)
    if full is None or empty is None or slowest.bandwidth is None:
        return []
    in_turn = "the stages run one after another, and " if asked.pp > 1 else ""
    return _line(
        "speed",
        f"memory bandwidth limits decoding to {_rate(empty)} tokens/s{each}, and to {_rate(full)} "
        f"after {asked.max_seq_len:,} tokens: {in_turn}a step of rank {slowest.shard.rank} then "
        f"reads {size(slowest.read_weights)} of weights and {size(slowest.read_kv)} of KV cache, "
        f"at {slowest.bandwidth / GB:,.0f} GB/s",
    )


def _predicted_speed(found: Estimate, predicted: Prediction, each: str) -> list[str]:
    """The predicted speed, what limits it, and where its figures are from."""
    full, empty = predicted.full, predicted.empty
    limits = f", limited by {full.limit}"
    if empty.limit != full.limit:
        limits = f"; {empty.limit} limits the former, {full.limit} the latter"
    text = (
        f"about {_rate(1 / empty.total_s)} new tokens/s{each}, and {_rate(1 / full.total_s)} after "
        f"{found.asked.max_seq_len:,} tokens{limits}"
    )
    if predicted.prefill is not None and predicted.prefill_tokens_per_s is not None:
        text += (
            f"; prompts at about {_rate(predicted.prefill_tokens_per_s)} tokens/s, limited by "
            f"{predicted.prefill.limit}"
        )
    return _line("speed", f"{text} (an estimate {_basis(found)})")


def _basis(found: Estimate) -> str:
    if found.asked.device == "cpu":
        return "from the calibration"
    slowest = found.slowest
    at = "" if slowest.bandwidth is None else f", at {slowest.bandwidth / GB:,.0f} GB/s"
    return f"from data sheets and one measured H100{at}"


def _cost(found: Estimate, price: float | None) -> list[str]:
    """The price of a million new tokens; empty without --price."""
    predicted = predict(found)
    if price is None or predicted is None:
        return []
    asked, n_ranks = found.asked, found.plan.tp_size
    cost = predicted.cost(price * n_ranks)
    return _line(
        "cost",
        f"{cost:,.3g} for a million new tokens of {asked.batch} sequences at "
        f"{asked.max_seq_len:,} tokens: {n_ranks} x {price:g} per hour at "
        f"{_rate(predicted.tokens_per_s)} tokens/s",
    )


def _rate(tokens_per_s: float) -> str:
    return f"{tokens_per_s:,.0f}" if tokens_per_s >= 10 else f"{tokens_per_s:.1f}"


def _copies(found: Estimate) -> str:
    """How often KV heads are replicated, and what --kv-split sequence would save."""
    own, n_ranks = found.asked.args.n_kv_heads, found.plan.tp_size
    if found.plan.kv_parts > 1:
        return f"each KV head stored once, its tokens sharded over {n_ranks} ranks"
    if found.n_kv_heads == own:
        return "each KV head stored once"
    copies = f"{found.n_kv_heads} KV heads stored instead of {own} ({found.kv_overhead:+.0%})"
    if found.asked.pp > 1:
        return copies
    spread = estimate(replace(found.asked, kv_split="sequence"))
    if found.room_for_tokens is not None and spread.room_for_tokens is not None:
        if spread.room_for_tokens <= found.room_for_tokens:
            return copies
        return f"{copies}; --kv-split sequence makes room for {spread.room_for_tokens:,} tokens"
    before, after = found.tightest.needed, spread.tightest.needed
    if after >= before:
        return copies
    return f"{copies}; with --kv-split sequence a rank needs at most {size(after)}"


def _rest(found: Estimate) -> str:
    """What a rank needs in addition to weights and KV cache."""
    n_tokens = found.asked.step_tokens
    if found.asked.device == "cuda":
        is_quantised = found.asked.precision.quant_group_size > 1
        converted = "quantised matrices that long steps convert, " if is_quantised else ""
        return (
            f"rotary tables, activations and scores of a step of {n_tokens} tokens, {converted}and "
            f"{size(CUDA_ALLOWANCE)} for CUDA's libraries and graphs"
        )
    return (
        f"a process of about {PROCESS_BYTES >> 20} MiB (torch, LLVM, the tokenizer), activations "
        f"and scores of a step of {n_tokens} tokens"
    )


def _window(found: Estimate) -> list[str]:
    """The KV cache of a model with a sliding window; empty for other models."""
    args = found.asked.args
    if args.sliding_window is None:
        return []
    n_layers = args.n_layers - len(args.full_layers)
    most = size(sum(rank.kv.per_sequence for rank in found.ranks))
    return _line(
        "window",
        f"of {args.sliding_window:,} tokens in {n_layers} of {args.n_layers} layers: "
        f"{most} on all ranks for a sequence of {found.asked.max_seq_len:,} tokens",
    )


def _formats_page(formats: FormatTable) -> list[str]:
    """A row for each pair of formats, what its columns mean, and the first that fits."""
    asked = formats.asked
    model_context = formats.rows[0].largest.model_context
    chosen = next((row for row in formats.rows if row.found.fits), None)
    if chosen is None:
        most = "; the maximum number of ranks is not enough" if formats.finds_fewest else ""
        verdict = f"no format fits{most}"
    else:
        verdict = f"{chosen.flags} is the most precise that fits"
    if chosen is not None and formats.finds_fewest:
        verdict = "each row has the fewest ranks that are enough for its formats"
    sequences = f"{asked.batch} sequence{'s' * (asked.batch > 1)} of {asked.max_seq_len:,} tokens"
    return [
        *format_lines(formats),
        "",
        *_line("needs", f"of the fullest rank, for {sequences}"),
        *_line(
            "context",
            f"the longest at batch {asked.batch}; the model's own is {model_context:,} tokens",
        ),
        *_line("batch", f"the largest at a context of {asked.max_seq_len:,} tokens"),
        *(
            line
            for name, reason in formats.refused.items()
            for line in _line("no plan", f"in {name}: {reason}")
        ),
        *_line("formats", verdict),
    ]


def _largest(asked: PlanRequest, largest: Largest | None) -> list[str]:
    """The largest context and batch; empty if memory is not known, or no sequence fits."""
    if largest is None or not largest.context:
        return []
    whole = " (the model's own)" if largest.context == largest.model_context else ""
    return _line(
        "largest",
        f"context of {largest.context:,} tokens{whole} at batch {asked.batch}; batch of "
        f"{largest.batch:,} at {asked.max_seq_len:,} tokens",
    )


def _limits(largest: Largest | None) -> dict[str, int | None]:
    """The largest context and batch as JSON keys."""
    return {
        "largest_context": None if largest is None else largest.context,
        "largest_batch": None if largest is None else largest.batch,
    }


def _verdict(found: Estimate) -> list[str]:
    if found.fits is None:
        return []
    if not found.fits:
        return _fits(False, _shortfall(found))
    room = f"room for {found.room_for_tokens:,} tokens of KV cache"
    if found.asked.args.sliding_window is not None:
        n_sequences = (found.room_for_tokens or 0) // found.asked.tokens_each[0]
        room += f", {n_sequences:,} sequences of {found.asked.max_seq_len:,} tokens"
    return _fits(True, room)


def _cache_flag(found: Estimate) -> list[str]:
    """The --kv-cache-bytes that the plan needs; empty if the default is enough."""
    if found.fits is False or not found.needs_cache_flag:
        return []
    n_mib = -(-found.cache_bytes >> 20)
    default = min(found.default_rooms or [0])
    return _line(
        "start", f"with --kv-cache-bytes {n_mib}M; the default for a rank is {size(default)}"
    )


def _fits(fits: bool, text: str) -> list[str]:
    word, color = ("yes", GREEN) if fits else ("no", RED)
    first, *others = _line("fits", f"{word}: {text}")
    return [first.replace(word, painted(word, color, sys.stdout), 1), *others]


def _shortfall(found: Estimate) -> str:
    """Which rank has too little memory, and how much is left for the KV cache."""
    rank = found.tightest
    room = found.room_for_tokens or 0
    left = "the weights leave no room for KV cache"
    if room:
        left = f"room for {room:,} of {found.asked.n_tokens:,} tokens of KV cache"
    has = size(rank.memory or 0)
    return f"rank {rank.shard.rank} needs {size(rank.needed)} and has {has}; {left}"


def _advice(fits: bool | None, remedies: Sequence[Remedy]) -> list[str]:
    """The changes that would make the plan fit, and what the tightest rank would need."""
    if fits is not False:
        return []
    if not remedies:
        text = "give each rank more memory: no other format, rank count or token count fits"
        return _line("remedy", text)
    width = max(len(remedy.words) for remedy in remedies)
    rows = [(remedy.words, _numbers(remedy.found)) for remedy in remedies]
    lines = [f"  {words:<{width}}  {numbers}" for words, numbers in rows]
    if max(map(len, lines)) > WIDTH:
        lines = [line for words, numbers in rows for line in (f"  {words}", f"      {numbers}")]
    return ["", "each of these changes makes it fit, the least lossy first:", *lines]


def _numbers(found: Estimate) -> str:
    tightest = found.tightest
    return (
        f"needs {size(tightest.needed)} of {size(tightest.memory or 0)}, "
        f"room for {found.room_for_tokens:,} tokens"
    )


def _answer(found: Estimate, fewer: Estimate | None) -> list[str]:
    """The fewest ranks that are enough, and why one rank fewer is not enough."""
    precision = found.asked.precision
    tp_size, dtype = found.plan.tp_size, model.in_dtype(precision.dtype, precision.quant)
    if not found.fits:
        text = f"no number of ranks is enough; the maximum is {tp_size}"
    elif fewer is None:
        text = f"1 rank is enough in {dtype}"
    else:
        fullest = fewer.tightest
        text = (
            f"{tp_size} ranks are enough in {dtype}; with {fewer.plan.tp_size}, "
            f"rank {fullest.shard.rank} would need {size(fullest.needed)}"
        )
    return _line("fewest", text)


def _overview(comparison: Comparison, price: float | None) -> list[str]:
    """A range of numbers of ranks as text: one row each, and a summary."""
    is_predicted = all(predict(found) is not None for found in comparison.allowed)
    has_speed = is_predicted or comparison.asked.bandwidth is not None
    header = ["ranks", "balance", "tokens/s" if has_speed else "cut between"]
    header += ["weights", "KV/token", "extra KV" if price is None else "cost/1M"]
    header += ["works"] if comparison.memory is None else ["KV tokens", "fits"]
    rows = [
        _size_row(found, price, is_predicted=is_predicted, has_speed=has_speed)
        for found in comparison.allowed
    ]
    refused = []
    if comparison.refused:
        (first, reason), *others = comparison.refused.items()
        sizes = _span(range(first, first + 1 + len(others)))
        rows.append([sizes, *["-"] * (len(header) - 2), _yes_or_no(False)])
        refused = _line("no plan", f"for {sizes} ranks: {reason}")
    return [
        *table(header, rows, sys.stdout),
        "",
        "balance    maximum work of a rank / its fair share",
        *(_line("tokens/s", _SPEED if is_predicted else _BOUND) if has_speed else []),
        "weights    maximum of any rank; likewise KV/token",
        "extra KV   additional copies of KV heads"
        if price is None
        else f"cost/1M    of a million new tokens, at {price:g} per rank and hour",
        *refused,
        *_conclusion(comparison),
    ]


def _size_row(
    found: Estimate, price: float | None, *, is_predicted: bool, has_speed: bool
) -> list[str]:
    predicted = predict(found) if is_predicted else None
    tokens_per_s = found.tokens_per_s(is_full=True)
    if predicted is not None:
        tokens_per_s = 1 / predicted.full.total_s
    speed = "-" if tokens_per_s is None else _rate(tokens_per_s)
    extra = f"{found.kv_overhead:.0%}"
    if price is not None and predicted is not None:
        extra = f"{predicted.cost(price * found.plan.tp_size):,.3g}"
    cells = [
        str(found.plan.tp_size),
        f"{found.plan.balance:.3f}",
        speed if has_speed else CUTS[found.plan.cut],
        size(max(rank.weights for rank in found.ranks)),
        size(max(rank.kv_per_token for rank in found.ranks)),
        extra,
    ]
    if found.fits is None:
        return [*cells, "yes"]
    return [*cells, f"{found.room_for_tokens:,}", _yes_or_no(found.fits)]


def _conclusion(comparison: Comparison) -> list[str]:
    """The fewest ranks that fit, or why no number does; empty if the memory is not known."""
    if comparison.memory is None:
        return []
    fewest = comparison.smallest_that_fits
    if fewest is not None:
        answer = f"of these, {fewest} {'rank is' if fewest == 1 else 'ranks are'} enough"
    else:
        answer = "none of these is enough"
        if comparison.allowed:
            largest = comparison.allowed[-1]
            answer += f"; with {largest.plan.tp_size}, {_shortfall(largest)}"
    room = f"room with {size(comparison.memory)} per rank"
    needed = f"{comparison.asked.n_tokens:,} are needed"
    return [*_line("KV tokens", f"{room}; {needed}"), *_line("fewest", answer)]


def _yes_or_no(fits: bool) -> str:
    return painted("yes", GREEN, sys.stdout) if fits else painted("no", RED, sys.stdout)


def _pair(r: range) -> list[int]:
    return [r.start, r.stop]


def _span(r: range) -> str:
    """A range as text, with both ends included."""
    if not r:
        return "none"
    return f"{r.start}-{r.stop - 1}" if len(r) > 1 else str(r.start)


VERB = Verb(
    "plan",
    "Shows how a model is sharded, whether it fits, and the fewest ranks that do.",
    "[MODEL] [--nproc N | --nproc A-B] [--memory SIZES | --gpus GPUS] [flags]",
    (
        *(model.MODEL, NPROC, MEMORY, GPUS, FIT, BANDWIDTH, CALIBRATION, HOSTS, PRICE),
        *(model.MAX_SEQ_LEN, BATCH),
        *(model.PP, model.DTYPE, model.QUANT, model.KV_CACHE_DTYPE, model.KV_SPLIT),
        *(model.EXACT, model.DEVICE, model.DOWNLOAD, SVG, JSON),
    ),
    "parallel-llama plan --model llama-3.1-70b --gpus 4xH100 --max-seq-len 32k",
    prepare,
    placed=model.MODEL,
)  # fmt: skip
