"""Describes a rank's GPU and its GPU libraries, for the comparison of ranks in the rendezvous."""

import re
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

_DRIVER = re.compile(r"\s(\d+\.\d+(?:\.\d+)*)\s")


def gpu_id(device: torch.device) -> str:
    """The UUID of a GPU; empty for the CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def library_versions() -> dict[str, str]:
    """The versions of Triton and NCCL; ranks with different versions may get different results."""
    versions = {"version of Triton": "none", "version of NCCL": "none"}
    with suppress(PackageNotFoundError):
        versions["version of Triton"] = version("triton")
    with suppress(AttributeError):  # a build of torch without NCCL
        nccl = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        versions["version of NCCL"] = ".".join(map(str, nccl))
    return versions


def describe_gpu(device: torch.device, root: Path = Path("/")) -> Mapping[str, str]:
    """The name, the architecture and the driver of a GPU; empty for the CPU.

    Args:
        root: the root of the file system.
    """
    if device.type != "cuda":
        return {}
    gpu = torch.cuda.get_device_properties(device)
    return {
        "GPU": f"{gpu.name}, {gpu.total_memory >> 30} GiB",
        "architecture of the GPU": f"sm_{gpu.major}{gpu.minor}",
        "driver of the GPU": _driver(root),
    }


def _driver(root: Path) -> str:
    """The version of the host's NVIDIA driver."""
    try:
        first_line = (root / "proc/driver/nvidia/version").read_text().partition("\n")[0]
    except OSError:
        return "unknown"
    match = _DRIVER.search(first_line)
    return match[1] if match else "unknown"
