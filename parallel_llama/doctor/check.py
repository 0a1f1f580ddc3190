"""`Check`, the result of a check, and the ids of all checks. Without torch."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

Status = Literal["pass", "warn", "fail", "skip"]

# By id, in the order of the report. Do not change ids: scripts depend on them.
CHECKS: Mapping[str, str] = {
    "cores": "cores and CPU quota against the threads of all ranks",
    "load": "cores that other programs use",
    "numa": "NUMA nodes against ranks",
    "memory": "free memory against what the ranks need",
    "dev-shm": "size of /dev/shm, which NCCL uses between GPUs",
    "open-files": "limit of open files",
    "processes": "limits of processes and threads",
    "locked-memory": "limit of locked memory, which InfiniBand needs",
    "huge-pages": "transparent huge pages for weights",
    "temp": "folder of temporary files: writable, with free space",
    "hostname": "name of the host: can be resolved",
    "interface": "network interface between the ranks",
    "loopback": "a connection over the loopback interface, both ways",
    "port": "the default port of `serve`",
    "start": "every rank starts and joins the others",
    "versions": "versions and source of parallel_llama and its libraries, equal on all ranks",
    "hosts": "connections between hosts, both ways",
    "clocks": "clocks of the hosts",
    "cards": "CUDA devices, driver and free memory",
    "instruction-set": "vector instructions of the CPU",
    "kernel-cache": "cached kernels: private, writable and undamaged",
    "transport": "how the ranks exchange tensors, and how long that takes",
    "collectives": "bit patterns through every collective, at several sizes",
    "pace": "the time of each rank for one fixed product",
    "bandwidth": "memory bandwidth of each rank, all at once",
    "arithmetic": "a built-in model, computed by every rank alone: equal bits",
    "tensor-parallel": "the built-in model on 1 to N ranks: equal bits",
    "files": "files of --model: their manifest, and equal on all ranks",
    "layers": "layers of --model on all ranks, against the same layers on one rank",
}


@dataclass(frozen=True)
class Check:
    """The result of one check.

    Args:
        id: a key of `CHECKS`.
        status: warn: works, but slowly or not everywhere; skip: not checked, and `seen` says why.
        seen: the measured values, with the rank if there are several ranks.
        remedy: one command, or what to change; empty if nothing is wrong.
    """

    id: str
    status: Status
    seen: str
    remedy: str = ""

    def __post_init__(self) -> None:
        assert self.id in CHECKS, self.id

    def to_json(self) -> dict[str, str]:
        return {"id": self.id, "status": self.status, "seen": self.seen, "cure": self.remedy}


def in_order(checks: Iterable[Check]) -> list[Check]:
    """The checks in the order of `CHECKS`; those with the same id keep their order."""
    order = list(CHECKS)
    return sorted(checks, key=lambda check: order.index(check.id))


def is_ok(checks: Iterable[Check]) -> bool:
    """Whether no check has failed."""
    return all(check.status != "fail" for check in checks)


def report(checks: Iterable[Check]) -> dict[str, Any]:
    """The result of `doctor --json`, as `SCHEMA` describes it."""
    ordered = in_order(checks)
    return {"ok": is_ok(ordered), "checks": [check.to_json() for check in ordered]}


# JSON Schema, draft 2020-12.
SCHEMA: Mapping[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "required": ["ok", "checks"],
    "additionalProperties": False,
    "properties": {
        "ok": {"type": "boolean", "description": "no check has failed"},
        "checks": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["id", "status", "seen", "cure"],
                "additionalProperties": False,
                "properties": {
                    "id": {"enum": list(CHECKS)},
                    "status": {"enum": list(get_args(Status))},
                    "seen": {"type": "string", "minLength": 1},
                    "cure": {"type": "string"},
                },
            },
        },
    },
}
