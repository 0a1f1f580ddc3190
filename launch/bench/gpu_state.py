"""Clocks, power and temperature of the GPU, as nvidia-smi reports them. Nothing is changed."""

import os
import subprocess
from dataclasses import dataclass

_FIELDS = (
    "name",
    "driver_version",
    "clocks.sm",
    "clocks.mem",
    "clocks.max.sm",
    "power.draw",
    "power.limit",
    "temperature.gpu",
)
_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class GPUState:
    """The values that a GPU reports; None for a value that it does not report.

    Units: MHz, watts, degrees Celsius.
    """

    name: str
    driver: str
    sm_mhz: float | None = None
    memory_mhz: float | None = None
    most_sm_mhz: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    temperature_c: float | None = None


def gpu_state() -> GPUState | None:
    """The state of the first visible GPU; None if nvidia-smi does not report it in time."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0].strip() or "0"
    command = ["nvidia-smi", f"--id={first}", f"--query-gpu={','.join(_FIELDS)}"]
    try:
        done = subprocess.run(
            [*command, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return parsed(done.stdout)


def parsed(line: str) -> GPUState | None:
    """The state in a line of nvidia-smi; None for any other line."""
    values = [each.strip() for each in line.strip().split(",")]
    if len(values) != len(_FIELDS):
        return None
    return GPUState(values[0], values[1], *map(_number, values[2:]))


def _number(value: str) -> float | None:
    """The number; None for a text such as "[N/A]"."""
    try:
        return float(value)
    except ValueError:
        return None
