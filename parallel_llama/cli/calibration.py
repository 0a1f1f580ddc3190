"""Calibration files: `bench --calibrate` writes the rates of CPU ranks, `plan` predicts from them.

Without torch.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parallel_llama.cli.hardware import Hardware, Rates, are_alike
from parallel_llama.errors import CheckpointError, UsageError, WriteError
from parallel_llama.files.bounded_files import read_again
from parallel_llama.files.fields import Fields, json_object, without_repeats
from parallel_llama.files.partial_output import growing_file, replace_file

if TYPE_CHECKING:
    from parallel_llama.engine.calibration import RankRates

_MAX_BYTES = 1 << 20
_VERSION = 1


@dataclass(frozen=True)
class RankEntry:
    """The rates of one rank, as in `RankRates`."""

    read_bytes_per_s: float
    operations_per_s: float
    piece_operations_per_s: float | None = None
    exchange_s: float | None = None
    link_bytes_per_s: float | None = None


@dataclass(frozen=True)
class Calibration:
    """The rates of ranks that ran a model with weights in this dtype and quantisation.

    Args:
        layer_s: seconds of a layer in a decode step, without reads and exchanges.
        n_files: the number of files, one per host or per rank.
    """

    dtype: str
    quant: str
    ranks: tuple[RankEntry, ...]
    layer_s: float = 0.0
    n_files: int = 1

    @property
    def speeds(self) -> tuple[float, ...] | None:
        """The read rate of each rank; None if the ranks count as equally fast."""
        rates = tuple(rank.read_bytes_per_s for rank in self.ranks)
        return None if are_alike(rates) else rates

    def hardware(self) -> Hardware:
        """The hardware of a plan on the measured machines.

        A single file holds for any number of ranks on its machine. Several files hold for exactly
        the ranks that they list, on different hosts; exchanges between hosts are not measured.
        """
        rates = tuple(
            Rates(
                rank.read_bytes_per_s,
                rank.read_bytes_per_s,
                rank.operations_per_s,
                rank.piece_operations_per_s,
            )
            for rank in self.ranks
        )
        exchange_times = [rank.exchange_s for rank in self.ranks if rank.exchange_s is not None]
        link_rates = [
            rank.link_bytes_per_s for rank in self.ranks if rank.link_bytes_per_s is not None
        ]
        exchange_s, link_rate = max(exchange_times, default=None), min(link_rates, default=None)
        is_one_host = self.n_files == 1
        return Hardware(
            rates,
            exchange_s if is_one_host else None,
            link_rate if is_one_host else None,
            self.layer_s,
            is_shared=is_one_host,
            local_exchange_s=exchange_s,
            local_link=link_rate,
        )


def write_calibration(
    path: Path, dtype: str, quant: str, rates: Sequence["RankRates"], layer_s: float
) -> None:
    """Raises: WriteError if the file cannot be written."""
    content = {
        "version": _VERSION,
        "dtype": dtype,
        "quant": quant,
        "layer_s": layer_s,
        "ranks": [
            {name: value for name, value in asdict(rank_rates).items() if value is not None}
            for rank_rates in rates
        ],
    }
    try:
        replace_file(path, growing_file(path), json.dumps(content, indent=1).encode() + b"\n")
    except OSError as error:
        raise WriteError(
            f"--calibrate {path}: {error.strerror or error}; give another file"
        ) from error


def read_calibrations(paths: Sequence[str] | None) -> Calibration | None:
    """The ranks of all files, in the order of the files; None without files.

    Raises: UsageError as `read_calibration`, or if the files are for different formats.
    """
    if paths is None:
        return None
    return merged([read_calibration(path) for path in paths], paths)


def merged(calibrations: Sequence[Calibration], paths: Sequence[str]) -> Calibration:
    """The ranks of all files, in order. Raises: UsageError if the files' formats differ."""
    first, *others = calibrations
    for path, other in zip(paths[1:], others, strict=True):
        if (other.dtype, other.quant) != (first.dtype, first.quant):
            raise UsageError(
                f"--calibration {path} is for --dtype {other.dtype} --quant {other.quant}, and "
                f"{paths[0]} for --dtype {first.dtype} --quant {first.quant}; calibrate all hosts "
                "with the same flags"
            )
    ranks = tuple(rank for each in calibrations for rank in each.ranks)
    layer_s = max(each.layer_s for each in calibrations)
    return Calibration(first.dtype, first.quant, ranks, layer_s, len(calibrations))


def read_calibration(path: str) -> Calibration:
    """The content of a file of `write_calibration`.

    Raises: UsageError if the file cannot be read, or has other keys or values.
    """
    try:
        content = read_again(Path(path), _MAX_BYTES)
        values = Fields(json_object(Path(path), content, without_repeats))
        values.require_known(["version", "dtype", "quant", "layer_s", "ranks"])
        if (version := values.integer("version")) != _VERSION:
            raise UsageError(f"version={version} is not supported; only {_VERSION} is")
        if (layer_s := values.number("layer_s", 0.0)) < 0:
            raise UsageError(f"layer_s={layer_s:g} is below 0")
        ranks = values.values.get("ranks")
        if not isinstance(ranks, list) or not ranks:
            raise UsageError("ranks is not a list of at least one rank")
        entries = tuple(map(_entry, ranks))
        return Calibration(values.string("dtype"), values.string("quant"), entries, layer_s)
    except (UsageError, CheckpointError) as error:
        raise UsageError(
            f"--calibration {path}: {error}; write the file with bench --calibrate FILE"
        ) from None


def _entry(content: Any) -> RankEntry:
    """Raises: UsageError if the content is not an object of positive numbers."""
    if not isinstance(content, dict):
        raise UsageError("ranks has an item that is not an object")
    names = [field.name for field in fields(RankEntry)]
    values = Fields(content)
    values.require_known(names)
    rates = {name: values.optional_number(name) for name in names}
    for name, rate in rates.items():
        if rate is None and name in names[:2]:  # earlier versions wrote no rate of pieces
            raise UsageError(f"{name} is missing")
        if rate is not None and rate <= 0:
            raise UsageError(f"{name}={rate:g} is not above 0")
    return RankEntry(**rates)  # type: ignore[arg-type]
