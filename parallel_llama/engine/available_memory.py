"""How much memory this process can still allocate on its host. Without torch."""

import resource
from itertools import product
from pathlib import Path

from parallel_llama.memory import CPU_FRACTION, MAX_CPU_BYTES
from parallel_llama.parallel.cgroups import cgroup_folders


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that can be allocated without swapping, within the limits of container and process.

    If the number is unknown, returns enough for the largest default cache.
    """
    available = _numbers(root / "proc" / "meminfo").get("MemAvailable:")
    if available is None:
        return int(MAX_CPU_BYTES / CPU_FRACTION)
    limits = [available << 10, *_room_in_address_space(root)]
    files_by_version = (  # versions 2 and 1
        ("memory.max", "memory.current", ""),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    )
    for folder, (limit, used, prefix) in product(cgroup_folders("memory", root), files_by_version):
        try:
            n_bytes_left = int((folder / limit).read_text()) - int((folder / used).read_text())
        except (OSError, ValueError):  # no container, or no limit: "max"
            continue
        # The page cache counts as used, but is evicted when memory is needed.
        stat = _numbers(folder / "memory.stat")
        limits.append(
            n_bytes_left + sum(stat.get(f"{prefix}{s}active_file", 0) for s in ("", "in"))
        )
    return max(0, min(limits))


def _room_in_address_space(root: Path) -> list[int]:
    """The bytes that `ulimit -v` leaves, if it is set."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    taken = _numbers(root / "proc" / "self" / "status").get("VmSize:")
    if limit == resource.RLIM_INFINITY or taken is None:
        return []
    return [limit - (taken << 10)]


def _numbers(path: Path) -> dict[str, int]:
    """The first number after each line's first word; empty if there is no such file."""
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except (OSError, ValueError):
        return {}
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}
