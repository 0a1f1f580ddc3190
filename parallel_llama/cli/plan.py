"""`plan`: how a model is sharded, how much memory it needs, and how many ranks fit. No torch."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from parallel_llama.cli import model
from parallel_llama.cli.arguments import JSON, Flag, Flags, Job, Verb, warn
from parallel_llama.cli.calibration import Calibration, read_calibrations
from parallel_llama.cli.estimate import (
    Comparison,
    Estimate,
    compare,
    estimate,
    fewest_that_fit,
)
from parallel_llama.cli.format_table import FormatTable, format_objects, format_table
from parallel_llama.cli.hardware import Hardware, gpu_hardware
from parallel_llama.cli.hosts import Hosts, read_hosts
from parallel_llama.cli.largest import MAX_BATCH, find_largest
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
from parallel_llama.cli.plan_json import (
    limits_object,
    plan_object,
    prediction_object,
    remedy_object,
)
from parallel_llama.cli.plan_page import (
    FewerHosts,
    advice_lines,
    fewer_hosts_lines,
    fewest_lines,
    format_table_lines,
    largest_lines,
    more_channels,
    other_stages_lines,
    plan_lines,
    range_lines,
    title_lines,
)
from parallel_llama.cli.plan_picture import picture
from parallel_llama.cli.plan_request import PlanRequest, plan_request
from parallel_llama.cli.prediction import predict, why_unpredicted
from parallel_llama.cli.remedies import Remedy, find_remedies
from parallel_llama.config.layouts import why_decoded
from parallel_llama.engine.llm_config import require_pipeline
from parallel_llama.errors import UsageError, WriteError, counted
from parallel_llama.families.weights import Axis
from parallel_llama.files.partial_output import growing_file, replace_file
from parallel_llama.parallel.device_choice import DeviceKind
from parallel_llama.plan import Stage

NPROC: Flag[list[int] | None] = Flag(
    "nproc", "ranks to plan for, or a range to compare", count_or_range, "N|A-B",
    default_text="the number in --memory, --gpus, --hosts or several files of --calibration; for "
    "one size, the fewest that fit; else 1",
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

_MIN_GAIN = 1.05  # of a plan with fewer hosts


@dataclass(frozen=True)
class _Ranks:
    """The ranks that flags describe.

    Args:
        hosts: those of --hosts, which describe all ranks.
        gpus: one for any number of ranks, or one per rank; None for the CPU.
        memory: one size for all ranks, or one per rank.
        nproc: a number of ranks, or the first and the last of a range; None if no flag has it.
        calibration: the rates of CPU ranks.
    """

    hosts: Hosts | None
    gpus: GPU | list[GPU] | None
    memory: int | tuple[int, ...] | None
    nproc: list[int] | None
    calibration: Calibration | None

    @property
    def finds_fewest(self) -> bool:
        """Whether the plan is for the smallest number of ranks that fits."""
        return self.nproc is None and isinstance(self.memory, int)

    @property
    def n_ranks(self) -> list[int]:
        """A number of ranks, or the first and the last of a range."""
        return self.nproc or [len(self.memory) if isinstance(self.memory, tuple) else 1]


def prepare(flags: Flags) -> Job:
    """Checks the request, and returns the job that prints a plan, or a table for a range of ranks.

    The number of ranks is that of --nproc, else the number that --memory, --gpus, --hosts or
    several files of --calibration list. If --memory or --gpus gives one size without a number of
    ranks, the plan has the fewest ranks that fit; without any of these flags it has one rank.
    """
    ranks = _described_ranks(flags)
    request = _on_ranks(flags, _request(flags, ranks), ranks)
    first, *last = ranks.n_ranks
    if isinstance(listed := flags[BANDWIDTH], list):
        _check_listed(len(listed), None if last or ranks.finds_fewest else first)
    if flags[FIT]:
        _check_fit(flags, request)
        formats = format_table(request, finds_fewest=ranks.finds_fewest)
        return Job(lambda: _show_formats(flags, formats))
    if last:
        _check_range(flags, request, first, last[0])
        comparison = compare(request, range(first, last[0] + 1))
        _check_price(flags, comparison.allowed)
        return Job(lambda: _show_range(flags, comparison))
    if ranks.finds_fewest:
        planned, fewer = fewest_that_fit(request)
        _check_price(flags, [planned])
        return Job(lambda: _show_fewest(flags, planned, fewer))
    planned = estimate(request)
    _check_stages(planned)
    _check_price(flags, [planned])
    return Job(lambda: _show_one(flags, planned))


def _described_ranks(flags: Flags) -> _Ranks:
    if (hosts := _hosts(flags)) is not None:
        return _ranks_of_hosts(hosts)
    gpus, nproc = _gpus(flags), flags[NPROC]
    memory = _memory(flags, gpus)
    calibration = read_calibrations(flags[CALIBRATION])
    if calibration is not None and calibration.n_files > 1:
        nproc = _ranks_of(flags, calibration)
    return _Ranks(None, gpus, memory, nproc, calibration)


def _ranks_of_hosts(hosts: Hosts) -> _Ranks:
    return _Ranks(hosts, hosts.gpus, hosts.memory, [hosts.n_ranks], hosts.calibration)


def _request(flags: Flags, ranks: _Ranks) -> PlanRequest:
    """The requested plan, without what is known of its ranks."""
    files = model.found_model(flags, flags[model.MODEL])
    args = model.args_of(files)
    tp_size = ranks.n_ranks[0]
    device: DeviceKind = "cuda" if ranks.gpus else "cpu"
    if ranks.hosts is None and ranks.gpus is None:
        device = model.device_kind(flags[model.DEVICE], tp_size)
    require_pipeline(flags[model.PP], device, flags[model.KV_SPLIT])
    request = replace(plan_request(flags, files, args, device, tp_size), batch=flags[BATCH])
    if decoded := why_decoded(files, args, request.dtype, flags[model.QUANT]):
        warn(decoded)
    return request


def _on_ranks(flags: Flags, request: PlanRequest, ranks: _Ranks) -> PlanRequest:
    """The request on these ranks, the first number if there are several."""
    hosts, gpus = ranks.hosts, ranks.gpus
    request = replace(
        request,
        tp_size=ranks.n_ranks[0],
        exact=_exact(flags, hosts, request.pp),
        memory=ranks.memory,
        bandwidth=_bandwidth(flags, gpus),
        hardware=_hardware(flags, gpus),
    )
    if ranks.calibration is not None:
        request = _calibrated(request, ranks.calibration, _calibration_name(flags))
    if hosts is not None:
        request = replace(request, hardware=hosts.with_links(request.hardware), hosts=hosts)
    return request


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
    """Raises: UsageError if the number of listed bandwidths is not the number of ranks."""
    if n_bandwidths != n_ranks:
        planned = "the number of ranks varies" if n_ranks is None else f"the plan has {n_ranks}"
        raise UsageError(
            f"--bandwidth lists {n_bandwidths} ranks, but {planned}; give one bandwidth for all "
            "ranks, or one per rank of --nproc N"
        )


def _check_stages(planned: Estimate) -> None:
    """Raises: UsageError if the ranks of a stage are on several hosts."""
    hosts = planned.request.hosts
    if hosts is None or (stage := _divided_stage(planned, hosts)) is None:
        return
    first, last = stage.ranks.start, stage.ranks.stop - 1
    names = [
        hosts.name(host) for host, local in enumerate(hosts.ranks) if {*local} & {*stage.ranks}
    ]
    raise UsageError(
        f"--pp {planned.request.pp}: ranks {first}-{last} are stage "
        f"{planned.plan.stages.index(stage)} and run on {' and '.join(names)}, but the ranks of a "
        "stage share memory, which needs one host; use another number of stages, or list the hosts "
        "in another order"
    )


def _divided_stage(planned: Estimate, hosts: Hosts) -> Stage | None:
    """The first stage of a pipeline with ranks on several hosts, or None."""
    if planned.request.pp == 1:
        return None
    return next(
        (
            stage
            for stage in planned.plan.stages
            if not any({*stage.ranks} <= {*local} for local in hosts.ranks)
        ),
        None,
    )


def _check_price(flags: Flags, estimates: Sequence[Estimate]) -> None:
    """Raises: UsageError if --price is given and the speed of a plan is not predicted."""
    if (price := flags[PRICE]) is None:
        return
    for planned in estimates:
        if reason := why_unpredicted(planned):
            raise UsageError(
                f"--price {price:g} needs a predicted speed, which a plan for "
                f"{counted(planned.plan.tp_size, 'rank')} lacks: {reason}; or drop --price"
            )


def _check_range(flags: Flags, request: PlanRequest, first: int, last: int) -> None:
    """Raises: UsageError if other flags contradict the range of --nproc."""
    if flags[SVG] is not None:
        raise UsageError("--svg draws one plan, but --nproc is a range; give --nproc N")
    if isinstance(request.memory, tuple):
        raise UsageError(
            f"{'--gpus' if flags[GPUS] else '--memory'} lists {len(request.memory)} ranks, but "
            "--nproc is a range; give --nproc N, or one size for all ranks"
        )
    if first < request.pp:
        raise UsageError(
            f"--nproc {first}-{last} and --pp {request.pp}: a stage needs at least one rank; "
            f"use --nproc {request.pp}-{max(last, request.pp + 1)}"
        )


def _check_fit(flags: Flags, request: PlanRequest) -> None:
    """Raises: UsageError if --fit has no memory to compare with, or other flags contradict it."""
    if request.memory is None:
        raise UsageError(
            "--fit needs the memory of the ranks: add --gpus 2x24 or --memory 16,16, or one size "
            "to find the fewest ranks"
        )
    paths, rates = flags[CALIBRATION], flags[BANDWIDTH]
    rates = [rates] if isinstance(rates, int) else rates
    given: dict[str, object] = {
        "quant": flags[model.QUANT],
        "svg": flags[SVG],
        "price": flags[PRICE],
        "bandwidth": rates and ",".join(f"{rate / GB:g}" for rate in rates),
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
        if len(listed) != len(given):  # `_check_listed` refuses this
            return None
        both = zip(listed, given, strict=True)
        return gpu_hardware([gpu._replace(bandwidth=own) for gpu, own in both])
    if isinstance(gpus, list):
        return gpu_hardware([gpu._replace(bandwidth=given) for gpu in gpus])
    return gpu_hardware(gpus._replace(bandwidth=given))


def _calibration_name(flags: Flags) -> str:
    paths = flags[CALIBRATION]
    if flags[HOSTS] is not None:
        return f"the calibration in --hosts {flags[HOSTS]}"
    return f"--calibration {','.join(paths or [])}"


def _ranks_of(flags: Flags, calibration: Calibration) -> list[int]:
    """The number of ranks in several files. Raises: UsageError if --nproc is another number."""
    n_ranks = [len(calibration.ranks)]
    if flags[NPROC] not in (None, n_ranks):
        name, n = _calibration_name(flags), n_ranks[0]
        raise UsageError(f"{name} has {n} ranks; omit --nproc, or give --nproc {n}")
    return n_ranks


def _calibrated(request: PlanRequest, calibration: Calibration, name: str) -> PlanRequest:
    """A request with measured rates. Raises: UsageError if device or formats differ."""
    precision = request.precision
    if request.device != "cpu":
        raise UsageError(f"{name} has rates of CPU ranks; drop --gpus, or add --device cpu")
    if (calibration.dtype, calibration.quant) != (precision.dtype, precision.quant):
        raise UsageError(
            f"{name} is for --dtype {calibration.dtype} --quant {calibration.quant}, and the plan "
            f"has --dtype {precision.dtype} --quant {precision.quant}; use the same formats, or "
            "calibrate again"
        )
    return replace(request, hardware=calibration.hardware(), speeds=calibration.speeds)


def _show_one(flags: Flags, planned: Estimate) -> int:
    _draw(flags, planned)
    largest, other = find_largest(planned.request), _other_stages(flags, planned)
    fewer = _fewer_hosts(flags, planned)
    answer = {
        **plan_object(planned, flags[PRICE]),
        **limits_object(largest),
        "other_stages": other and {"pp": other.request.pp, **prediction_object(other, None)},
        "fewer_hosts": fewer
        and {"left_out": fewer.left_out, **plan_object(fewer.planned, flags[PRICE])},
    }
    page = [
        *plan_lines(planned, flags[PRICE]),
        *other_stages_lines(other),
        *fewer_hosts_lines(fewer),
        *largest_lines(planned.request, largest),
    ]
    return _show(flags, planned.request, answer, page, _remedies(planned))


def _other_stages(flags: Flags, planned: Estimate) -> Estimate | None:
    """The plan with a stage for each host, or without stages if `planned` has several.

    None on one host, on GPUs, and if the ranks of a stage would be on several hosts.
    """
    hosts = planned.request.hosts
    if hosts is None or not hosts.links or planned.request.device != "cpu":
        return None
    pp = 1 if planned.request.pp > 1 else len(hosts.hosts)
    try:
        other = estimate(replace(planned.request, pp=pp, exact=_exact(flags, hosts, pp)))
    except UsageError:
        return None
    return other if _divided_stage(other, hosts) is None else None


def _fewer_hosts(flags: Flags, planned: Estimate) -> FewerHosts | None:
    """A faster plan without hosts that slow the others down; None if all hosts are useful.

    The slowest hosts are left out one after another, while that makes decoding at least 5 % faster
    and the model still fits.
    """
    fastest, speed, left_out = planned, _speed(planned), list[str]()
    while speed is not None and (hosts := fastest.request.hosts) and len(hosts.hosts) > 1:
        faster: list[tuple[float, int, Estimate]] = []
        for host in hosts.slowest:
            other = _without_host(flags, fastest, hosts, host)
            other_speed = other and _speed(other)
            if other and other_speed and other_speed >= _MIN_GAIN * speed:
                faster.append((other_speed, host, other))
        if not faster:
            break
        speed, host, fastest = max(faster, key=lambda each: each[:2])
        left_out.append(hosts.name(host))
    return FewerHosts(fastest, left_out) if left_out else None


def _without_host(flags: Flags, planned: Estimate, hosts: Hosts, host: int) -> Estimate | None:
    """The plan without one of its hosts; None if the model does not fit or has no such plan."""
    request = planned.request
    if request.pp == len(hosts.hosts):  # a stage for each host
        request = replace(request, pp=request.pp - 1)
    try:
        other = estimate(_on_ranks(flags, request, _ranks_of_hosts(hosts.without(host))))
        _check_stages(other)
    except UsageError:
        return None
    return None if other.fits is False else other


def _speed(planned: Estimate) -> float | None:
    """The predicted new tokens per second at the full context; None if not predicted."""
    predicted = predict(planned)
    return None if predicted is None else predicted.tokens_per_s


def _show_fewest(flags: Flags, planned: Estimate, fewer: Estimate | None) -> int:
    """Shows the plan with the fewest ranks that fit, or with the maximum number of ranks."""
    _draw(flags, planned)
    largest = find_largest(planned.request)
    answer = {
        **plan_object(planned, flags[PRICE]),
        **limits_object(largest),
        "other_stages": None,  # --hosts gives the number of ranks
        "fewer_hosts": None,
        "smallest_that_fits": planned.plan.tp_size if planned.fits else None,
        "next_smaller": fewer and plan_object(fewer, flags[PRICE]),
    }
    page = [
        *plan_lines(planned, flags[PRICE]),
        *largest_lines(planned.request, largest),
        *fewest_lines(planned, fewer),
    ]
    return _show(flags, planned.request, answer, page, _remedies(planned))


def _show_formats(flags: Flags, formats: FormatTable) -> int:
    if flags[JSON]:
        answer = {"fits": formats.fits, "formats": format_objects(formats)}
        print(json.dumps({"model": flags[model.MODEL], **answer}))
    else:
        print("\n".join([*title_lines(flags, formats.request), *format_table_lines(formats)]))
    return 0 if formats.fits else 1


def _draw(flags: Flags, planned: Estimate) -> None:
    """Writes the file of --svg, if there is one."""
    if (path := flags[SVG]) is None:
        return
    request, n_ranks = planned.request, planned.plan.tp_size
    precision = request.precision
    sequences = f"{counted(request.batch, 'sequence')} of {request.max_seq_len:,} tokens"
    title = [
        f"{flags[model.MODEL]} on {counted(n_ranks, 'rank')}",
        f"{model.in_dtypes(precision.dtype, precision.quant, request.kv.dtype)}, for {sequences}",
    ]
    names: dict[str, Axis] = {"heads": "heads", "KV heads": "kv_heads", "channels": "ffn"}
    names |= {f"{name} channels": axis for name, axis in more_channels(request.args).items()}
    names["vocabulary"] = "vocab"
    if request.is_exact and n_ranks > 1:
        names["outputs"] = "outputs"
    shards = planned.plan.shards
    axes = {name: [shard.extent(axis) for shard in shards] for name, axis in names.items()}
    if request.pp > 1:
        axes["layers"] = [shard.layers for shard in shards]
    if planned.plan.placement:
        axes["experts"] = [shard.experts for shard in shards]
    try:
        replace_file(path, growing_file(path), picture(planned, title, axes))
    except OSError as error:
        raise WriteError(f"--svg {path}: {error.strerror or error}; give another file") from error


def _show_range(flags: Flags, comparison: Comparison) -> int:
    remedies: list[Remedy] = []
    if comparison.fits is False and comparison.allowed:
        largest = comparison.allowed[-1].request
        if isinstance(flags[GPUS], list) and comparison.memory:  # more ranks need more GPUs
            largest = replace(largest, memory=(comparison.memory,) * largest.tp_size)
        remedies = find_remedies(largest)
    errors = [{"tp_size": n, "error": reason} for n, reason in comparison.refused.items()]
    answer = {
        "plans": [*(plan_object(each, flags[PRICE]) for each in comparison.allowed), *errors],
        "fits": comparison.fits,
        "smallest_that_fits": comparison.smallest_that_fits,
    }
    return _show(flags, comparison.request, answer, range_lines(comparison, flags[PRICE]), remedies)


def _remedies(planned: Estimate) -> list[Remedy]:
    return find_remedies(planned.request) if planned.fits is False else []


def _show(
    flags: Flags,
    request: PlanRequest,
    answer: dict[str, Any],
    page: Sequence[str],
    remedies: Sequence[Remedy],
) -> int:
    if flags[JSON]:
        changes = [remedy_object(remedy) for remedy in remedies]
        print(json.dumps({"model": flags[model.MODEL], **answer, "remedies": changes}))
    else:
        print(
            "\n".join(
                [*title_lines(flags, request), *page, *advice_lines(answer["fits"], remedies)]
            )
        )
    return 1 if answer["fits"] is False else 0


VERB = Verb(
    "plan",
    "Shows how a model is sharded, whether it fits, and the fewest ranks on which it fits.",
    "[MODEL] [--nproc N | --nproc A-B] [--memory SIZES | --gpus GPUS] [flags]",
    (
        *(model.MODEL, NPROC, MEMORY, GPUS, FIT, BANDWIDTH, CALIBRATION, HOSTS, PRICE),
        *(model.MAX_SEQ_LEN, BATCH),
        *(model.ADAPTER, *model.DRAFTS),
        *(model.PP, model.DTYPE, model.QUANT, model.KV_CACHE_DTYPE, model.KV_SPLIT),
        *(model.EXACT, model.DEVICE, model.DOWNLOAD, SVG, JSON),
    ),
    "parallel-llama plan --model llama-3.1-70b --gpus 4xH100 --max-seq-len 32k",
    prepare,
    argument=model.MODEL,
)  # fmt: skip
