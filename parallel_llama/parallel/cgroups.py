"""Reads the limits of this process's control groups (containers, services). Without torch.

Source: Linux, admin-guide/cgroup-v2.rst and cgroup-v1/; cgroups(7), section /proc/pid/cgroup.
"""

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def cgroup_folders(controller: str, root: Path = Path("/")) -> list[Path]:
    """The cgroup folders (v2 and v1) that may limit this process, outermost first.

    Some of these folders may not exist. A limit of an outer group also applies to its inner groups.

    Args:
        controller: such as "cpu" or "memory".
        root: the root of the file system.
    """
    base = root / "sys" / "fs" / "cgroup"
    folders = [base, base / controller]
    with suppress(OSError):
        for line in (root / "proc" / "self" / "cgroup").read_text().splitlines():
            _, names, path = line.split(":", 2)
            if not names or controller in names.split(","):
                folder = base / controller if names else base
                for part in Path(path).parts[1:]:
                    folder /= part
                    folders.append(folder)
    return folders


def cpu_cores(root: Path = Path("/")) -> float:
    """The cores that this process may use, by its CPU affinity and the quotas of its groups."""
    return min([len(os.sched_getaffinity(0)), *_cpu_quotas(root)])


def cpu_quota(root: Path = Path("/")) -> float:
    """The cores that the quotas of this process's groups allow; infinite without a quota."""
    return min(_cpu_quotas(root), default=math.inf)


def _cpu_quotas(root: Path) -> Iterator[float]:
    for folder in cgroup_folders("cpu", root):
        v1 = folder / "cpu.cfs_quota_us", folder / "cpu.cfs_period_us"
        for files in ((folder / "cpu.max",), v1):
            with suppress(OSError, ValueError):  # no such file, or no limit: "max" or -1
                quota, period = " ".join(file.read_text() for file in files).split()
                if int(quota) > 0:
                    yield int(quota) / int(period)
