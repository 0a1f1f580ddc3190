"""Checks of one host, on file systems and limits that a test fakes."""

import os
import re
import resource
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from parallel_llama.doctor import machine
from parallel_llama.doctor.check import CHECKS
from parallel_llama.doctor.machine import Host, Needs, machine_checks, startup_checks
from parallel_llama.parallel.cgroups import cpu_cores

ROOT = Path(__file__).parents[2]
GIB = 1 << 30
STAT = "cpu  1 1 1 1\ncpu0 {0} 0 0 {1} 0 0 0 {2} 0 0\ncpu1 {0} 0 0 {1} 0 0 0 {2} 0 0\nintr 1\n"
V1 = "sys/fs/cgroup/cpu/inner/leaf"
MEMINFO = {"proc/meminfo": "MemAvailable: 1048576 kB\n"}


@pytest.fixture(autouse=True)
def two_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})


def host(root: Path, files: dict[str, str], **changed: object) -> Host:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return Host(**{"n_ranks": 2, "threads": 1, "root": root, **changed})


@pytest.mark.parametrize(
    ("check", "files", "changed", "expected"),
    [
        (machine.cores, {}, {}, "pass: 2 ranks of 1 thread on 2 cores"),
        (machine.cores, {}, {"threads": 2}, "warn: .*; export OMP_NUM_THREADS=1"),
        (machine.cores, {}, {"n_ranks": 3}, "warn: .*; use at most --nproc 2"),
        (
            machine.cores,
            {
                "proc/self/cgroup": "4:cpuset:/\n3:cpu,cpuacct:/inner/leaf\n0::/\n",
                f"{V1}/cpu.cfs_quota_us": "50000",
                f"{V1}/cpu.cfs_period_us": "100000",
            },
            {},
            "warn: .* on 0.5 cores, the CPU quota .*; .*docker update --cpus 2",
        ),
        (machine.memory, MEMINFO, {}, "pass: 1.00 GiB available"),
        (machine.memory, MEMINFO, {"n_ranks": 4}, "fail: .*1.19 GiB needed; .*ps -eo"),
        (machine.memory, MEMINFO, {"needs": Needs(2 * GIB, 3 * GIB, "buy")}, "fail: .*; buy"),
        (machine.memory, MEMINFO, {"needs": Needs(1, 3 * GIB, "buy")}, "warn: .*3.00 GiB with.*"),
        (machine.dev_shm, {}, {}, "warn: /dev/shm: No such file.*; mount -o remount"),
        (machine.dev_shm, {"dev/nvidia0": "", "dev/nvidia1": ""}, {}, "fail: .*NCCL needs.*"),
        (machine.dev_shm, {"dev/shm/x": ""}, {}, "pass: .*free of.*"),
        (machine.processes, {"sys/fs/cgroup/pids.max": "max"}, {}, "pass: no limit.*"),
        (
            machine.processes,
            {"sys/fs/cgroup/pids.max": "40", "sys/fs/cgroup/pids.current": "30"},
            {},
            "fail: pids.max .* is 40, 10 left, 34 needed; docker update --pids-limit",
        ),
        (machine.locked_memory, {}, {}, "skip: no InfiniBand.*"),
        (
            machine.huge_pages,
            {"sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]\n"},
            {},
            "warn: never.*; echo madvise . sudo tee /sys/kernel/mm/.*/enabled",
        ),
        (machine.huge_pages, {}, {}, "warn: this kernel has no.*"),
        (
            machine.numa,
            {f"sys/devices/system/node/node{n}/cpulist": f"{n}-{n}\n" for n in (0, 1)},
            {"n_ranks": 1},
            "warn: 2 NUMA nodes for 1 rank.*; --nproc 2",
        ),
        (machine.numa, {"sys/devices/system/node/node0/cpulist": "0-1,4\n"}, {}, "pass: 1 NUMA.*"),
        (machine.loopback, {}, {}, "pass: both ways"),
    ],
)
def test_host_check_reports_status_and_remedy(
    tmp_path, check: Callable[[Host], object], files, changed, expected
):
    found = check(host(tmp_path, files, **changed))
    assert re.match(expected, f"{found.status}: {found.seen}; {found.remedy}"), found


@pytest.mark.parametrize(
    ("busy", "steal", "expected"), [(0, 0, "pass"), (20, 0, "warn"), (0, 20, "warn")]
)
def test_busy_or_stolen_cores_give_a_warning(tmp_path, monkeypatch, busy, steal, expected):
    name = "proc/77/stat", "proc/77/comm"
    given = host(tmp_path, {"proc/stat": STAT.format(9, 9, 9), name[0]: f"77 (a) b) R{' 0' * 20}"})

    def work(_: float) -> None:
        ticks = STAT.format(9 + busy, 34 - busy - steal, 9 + steal)
        host(tmp_path, {"proc/stat": ticks, name[0]: f"77 (a) b) R{' 50' * 20}", name[1]: "burn\n"})

    monkeypatch.setattr(machine.time, "sleep", work)
    found = machine.load(given)
    assert found.status == expected, found
    if busy:
        assert "1.6 of 2 cores" in found.seen and "77 (burn)" in found.seen
        assert found.remedy.endswith("-p 77")


@pytest.mark.parametrize(
    ("mib", "n_gpus", "status"),
    [(16, 0, "warn"), (64, 0, "pass"), (64, 2, "fail"), (512, 2, "warn"), (1024, 2, "pass")],
)
def test_dev_shm_status_depends_on_size_and_gpus(tmp_path, monkeypatch, mib, n_gpus, status):
    blocks = SimpleNamespace(f_frsize=4096, f_blocks=mib * 256, f_bavail=mib * 256)
    monkeypatch.setattr(os, "statvfs", lambda _: blocks)
    found = machine.dev_shm(host(tmp_path, {f"dev/nvidia{gpu}": "" for gpu in range(n_gpus)}))
    assert found.status == status and ("remount" in found.remedy) == (status != "pass"), found


@pytest.mark.parametrize(("limit", "status"), [(64, "fail"), (512, "warn"), (1024, "pass")])
def test_low_limit_of_open_files_is_reported(monkeypatch, limit, status):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    found = machine.open_files(Host(1, 1))
    assert found.status == status and ("prlimit" in found.remedy) == (status != "pass")


def test_missing_or_full_temp_folder_is_reported(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "absent"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    assert machine.temp(Host(1, 1)).status == "warn"
    monkeypatch.setattr(
        tempfile, "_get_default_tempdir", lambda: (_ for _ in ()).throw(OSError(28, "full"))
    )
    monkeypatch.setattr(tempfile, "tempdir", None)
    found = machine.temp(Host(1, 1))
    assert found.status == "fail" and "full" in found.seen and "TMPDIR" in found.remedy


def test_bad_port_interface_or_hostname_is_reported(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        found = machine.port(Host(1, 1, port=taken.getsockname()[1]))
    assert found.status == "warn" and "--port 0" in found.remedy
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth99")
    assert machine.interface(Host(1, 1)).status == "warn"
    found = machine.interface(Host(1, 1, is_launched=True))
    assert found.status == "fail" and "eth99" in found.seen and "GLOO_SOCKET_IFNAME" in found.remedy
    monkeypatch.setattr(socket, "gethostname", lambda: "no such host")
    found = machine.hostname(Host(1, 1))
    assert found.status == "warn" and "/etc/hosts" in found.remedy
    assert "127.0." not in found.remedy


def test_host_checks_are_known_and_startup_checks_find_problems(tmp_path):
    found = [check.id for check in machine_checks(Host(1, 1))]
    assert len(found) == len(set(found)) and set(found) <= CHECKS.keys()
    assert [check.id for check in startup_checks(Host(1, 1)) if check.status == "fail"] == []
    tight = host(tmp_path, MEMINFO, n_ranks=4)
    assert [check.id for check in startup_checks(tight)] == ["memory"]
    quota = {"sys/fs/cgroup/cpu.max": "100000 100000"}
    assert [check.id for check in startup_checks(host(tmp_path, quota))] == ["cores"]


def test_cpu_quota_of_parent_cgroup_applies(tmp_path):
    host(tmp_path, {"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "150000 100000"})
    assert cpu_cores(tmp_path) == 1.5


def test_doctor_page_lists_every_check():
    rows = re.findall(r"^\| `([a-z-]+)` \|", (ROOT / "docs/doctor.md").read_text(), re.M)
    assert rows == list(CHECKS)
