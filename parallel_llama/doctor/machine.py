"""Checks of one host, without ranks or torch; each takes a `Host` and returns a `Check`."""

import errno
import fcntl
import mmap
import os
import resource
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from parallel_llama.doctor.check import Check
from parallel_llama.engine.available_memory import available_memory
from parallel_llama.errors import counted
from parallel_llama.memory import PROCESS_BYTES
from parallel_llama.parallel.cgroups import cgroup_folders, cpu_cores
from parallel_llama.parallel.device_choice import count_gpus

MIB, GIB = 1 << 20, 1 << 30

# Open files of a rank: libraries, files of weights, sockets and processes of the other ranks. A
# server also needs one for each client.
_MIN_FILES, _USUAL_FILES = 128, 1024
# Threads of a rank besides those of kernels: heartbeat, reading, gloo.
_OTHER_THREADS = 16
# NCCL's documentation asks for 1 GiB; containers have 64 MiB by default, which is too little for
# several GPUs. Ranks on the CPU do not use /dev/shm.
_GPU_SHM, _GPU_MIN_SHM, _CPU_SHM = GIB, 256 * MIB, 32 * MIB
_MIN_LOCKED = 64 * MIB
_TEMP_MIN, _TEMP_USUAL = 1 * MIB, 64 * MIB
_SAMPLE_S = 0.25  # 25 ticks of each core's clock
_MAX_BUSY_CORES = 0.3  # number of cores that other programs may use without delaying ranks
_NAME_S, _CONNECT_S = 1.0, 2.0
_SIOCGIFFLAGS, _IFF_UP = 0x8913, 1


@dataclass(frozen=True)
class Needs:
    """Bytes of memory that all ranks of a host need.

    Args:
        least: without a KV cache.
        usual: with the KV cache of one sequence of the full context.
        remedy: a command that shows how to use less memory.
    """

    least: int
    usual: int
    remedy: str


@dataclass(frozen=True)
class Host:
    """The host to check, and what will run on it.

    Args:
        n_ranks: ranks on this host.
        threads: threads of each rank.
        needs: None without a model.
        port: the default port of the server.
        is_launched: another launcher has started the ranks, so they use its network settings.
        root: the root of the file system, for tests.
    """

    n_ranks: int
    threads: int
    needs: Needs | None = None
    port: int = 8000
    is_launched: bool = False
    root: Path = Path("/")

    @property
    def n_gpus(self) -> int:
        return count_gpus(self.root)


def machine_checks(host: Host) -> Iterator[Check]:
    """All checks of the host; `load` comes first, before this program uses the cores itself."""
    for check in (load, *_QUICK, *_SLOW):
        yield check(host)


def startup_checks(host: Host) -> list[Check]:
    """Quick checks that failed, and the warning about a low CPU quota.

    Without a quota, there is a warning in `doctor` only: more ranks than cores are slow, but the
    user asked for them. With a quota, the system also throttles the threads that exceed it.
    """
    checks = [check(host) for check in _QUICK]
    has_quota = cpu_cores(host.root) < len(os.sched_getaffinity(0))
    return [
        check
        for check in checks
        if check.status == "fail" or (check.id == "cores" and check.status == "warn" and has_quota)
    ]


def cores(host: Host) -> Check:
    n_cores, n_threads = cpu_cores(host.root), host.n_ranks * host.threads
    ranks = f"{counted(host.n_ranks, 'rank')} of {counted(host.threads, 'thread')}"
    seen = f"{ranks} on {n_cores:g} core{'s' * (n_cores != 1)}"
    if n_threads <= n_cores:
        return Check("cores", "pass", seen)
    affinity = len(os.sched_getaffinity(0))
    if n_cores < affinity and n_cores < host.n_ranks:
        seen += f", the CPU quota of a control group (CPU affinity allows {affinity})"
        remedy = f"give the container or service {n_threads} cores, as in: docker update --cpus"
        return Check("cores", "warn", seen, f"{remedy} {n_threads} CONTAINER")
    if host.n_ranks <= n_cores:
        return Check(
            "cores", "warn", seen, f"export OMP_NUM_THREADS={int(n_cores) // host.n_ranks}"
        )
    return Check("cores", "warn", seen, f"use at most --nproc {max(1, int(n_cores))}")


def load(host: Host, wait_s: float = _SAMPLE_S) -> Check:
    """Samples the cores for `wait_s` seconds, in which this process sleeps."""
    if host.is_launched and host.n_ranks > 1:
        return Check("load", "skip", "all ranks have started, and use the cores")
    own_cores = os.sched_getaffinity(0)
    before, work_before = _core_times(host.root), _work_by_process(host.root)
    if not before:
        return Check("load", "skip", "/proc/stat cannot be read")
    time.sleep(wait_s)
    busy = stolen = 0.0
    for core, (total, idle, steal) in _core_times(host.root).items():
        earlier = before.get(core)
        if core in own_cores and earlier is not None and total > earlier[0]:
            busy += 1 - (idle - earlier[1]) / (total - earlier[0])
            stolen += (steal - earlier[2]) / (total - earlier[0])
    n_threads = min(host.n_ranks * host.threads, len(own_cores))
    seen = f"other programs use {busy:.1f} of {counted(len(own_cores), 'core')}"
    if busy < _MAX_BUSY_CORES or n_threads + busy <= len(own_cores) + _MAX_BUSY_CORES:
        return Check("load", "pass", seen)
    if stolen > busy / 2:
        seen += f"; other virtual machines of this host take {stolen:.1f}"
        return Check("load", "warn", seen, "use --nproc 1, or a machine with dedicated cores")
    after = _work_by_process(host.root)
    gains = {pid: after[pid] - work_before.get(pid, 0) for pid in after if pid != os.getpid()}
    busiest = max(gains, key=lambda pid: gains[pid], default=0)
    if not gains.get(busiest):
        seen += "; this container does not show them"
        return Check("load", "warn", seen, "on its host: ps -eo pid,pcpu,comm --sort=-pcpu")
    name = _read(host.root / f"proc/{busiest}/comm").strip() or "?"
    return Check(
        "load",
        "warn",
        f"{seen}, most of it process {busiest} ({name})",
        f"renice -n 19 -p {busiest}",
    )


def numa(host: Host) -> Check:
    own_cores = os.sched_getaffinity(0)
    folder = host.root / "sys/devices/system/node"
    lists = {path.parent.name: _read(path) for path in folder.glob("node*/cpulist")}
    nodes = sorted(name for name, text in lists.items() if _numbers_in(text) & own_cores)
    if not nodes:
        return Check("numa", "skip", "the system does not list its NUMA nodes")
    seen = f"{counted(len(nodes), 'NUMA node')} for {counted(host.n_ranks, 'rank')}"
    if len(nodes) > host.n_ranks:
        return Check(
            "numa", "warn", f"{seen}: ranks read weights of other nodes", f"--nproc {len(nodes)}"
        )
    return Check("numa", "pass", seen)


def memory(host: Host) -> Check:
    n_free = available_memory(host.root)
    needs = host.needs or Needs(
        host.n_ranks * PROCESS_BYTES, 0, "end a program: ps -eo pid,rss,comm --sort=-rss | head"
    )
    seen = f"{_size(n_free)} available, {_size(needs.least)} needed"
    if n_free < needs.least:
        return Check("memory", "fail", seen, needs.remedy)
    if needs.usual > n_free:
        seen += f", {_size(needs.usual)} with the KV cache of one full context"
        return Check("memory", "warn", seen, needs.remedy)
    return Check("memory", "pass", seen)


def dev_shm(host: Host) -> Check:
    try:
        stat = os.statvfs(host.root / "dev/shm")
    except OSError as error:
        total = n_free = 0
        seen = f"/dev/shm: {error.strerror}"
    else:
        total, n_free = stat.f_frsize * stat.f_blocks, stat.f_frsize * stat.f_bavail
        seen = f"{_size(n_free)} free of {_size(total)}"
    remedy = "mount -o remount,size=1G /dev/shm (for a container: docker run --shm-size 1g)"
    if host.n_gpus > 1 and host.n_ranks > 1:
        if n_free < _GPU_MIN_SHM:
            return Check("dev-shm", "fail", f"{seen}; NCCL needs up to 1 GiB", remedy)
        if n_free < _GPU_SHM:
            return Check("dev-shm", "warn", f"{seen}; NCCL needs up to 1 GiB", remedy)
    elif n_free < _CPU_SHM:
        seen += "; ranks on the CPU use unnamed memory instead, but NCCL on GPUs would fail"
        return Check("dev-shm", "warn", seen, remedy)
    return Check("dev-shm", "pass", seen)


def open_files(_: Host) -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= _USUAL_FILES:
        return Check("open-files", "pass", f"limit {_limit(soft)}")
    can_raise = hard == resource.RLIM_INFINITY or hard >= _USUAL_FILES
    remedy = "ulimit -n 4096" if can_raise else "sudo prlimit --pid $$ --nofile=4096:4096"
    is_low = soft < _MIN_FILES
    seen = f"limit {_limit(soft)} (hard limit {_limit(hard)}); "
    seen += f"a rank needs {_MIN_FILES}" if is_low else "a server needs one for each client"
    return Check("open-files", "fail" if is_low else "warn", seen, remedy)


def processes(host: Host) -> Check:
    needed = host.n_ranks * (host.threads + _OTHER_THREADS)
    limits = []  # processes left, the limit in words, the remedy
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft != resource.RLIM_INFINITY and os.geteuid() != 0:  # root has no limit
        n_left = soft - _threads_of_user(host.root)
        limits.append((n_left, f"ulimit -u is {soft}", f"ulimit -u {soft + 2 * needed}"))
    for folder in cgroup_folders("pids", host.root):
        with suppress(OSError, ValueError):  # no limit: "max"
            n_max = int((folder / "pids.max").read_text())
            n_left = n_max - int((folder / "pids.current").read_text())
            remedy = "docker update --pids-limit -1 CONTAINER (or raise TasksMax of the service)"
            limits.append((n_left, f"pids.max of its control group is {n_max}", remedy))
    if not limits:
        return Check("processes", "pass", f"no limit; {needed} needed")
    n_left, limit_text, remedy = min(limits)
    seen = f"{limit_text}, {max(0, n_left)} left, {needed} needed"
    return Check(
        "processes", "pass" if n_left >= needed else "fail", seen, remedy * (n_left < needed)
    )


def locked_memory(host: Host) -> Check:
    if not any((host.root / "sys/class/infiniband").glob("*")):
        return Check("locked-memory", "skip", "no InfiniBand device")
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or soft >= _MIN_LOCKED:
        seen = "no limit" if soft == resource.RLIM_INFINITY else f"limit {_size(soft)}"
        return Check("locked-memory", "pass", seen)
    remedy = "ulimit -l unlimited (for a container: docker run --ulimit memlock=-1)"
    return Check("locked-memory", "warn", f"limit {_size(soft)}; InfiniBand needs more", remedy)


def huge_pages(host: Host) -> Check:
    path = "sys/kernel/mm/transparent_hugepage/enabled"
    text = _read(host.root / path).strip()
    chosen = text.partition("[")[2].partition("]")[0]
    if chosen in ("always", "madvise"):
        return Check("huge-pages", "pass", chosen)
    if not text:
        seen = "this kernel has no transparent huge pages; decoding may be slower"
        return Check("huge-pages", "warn", seen, "use a kernel with CONFIG_TRANSPARENT_HUGEPAGE")
    seen = f"{chosen or text}: weights are in small pages, which makes decoding slower"
    return Check("huge-pages", "warn", seen, f"echo madvise | sudo tee /{path}")


def temp(_: Host) -> Check:
    requested = os.environ.get("TMPDIR")
    try:
        folder = tempfile.gettempdir()  # the first folder that can be written
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(mmap.PAGESIZE))
            file.flush()
        stat = os.statvfs(folder)
    except OSError as error:
        folder_text = requested or "/tmp"
        seen = f"{folder_text}: {error.strerror or error}"
        return Check("temp", "fail", seen, "export TMPDIR=DIR, a folder with free space")
    n_free = stat.f_frsize * stat.f_bavail
    if requested and Path(folder) != Path(requested):
        seen = f"TMPDIR={requested} is full or cannot be written; {folder} is used"
        return Check(
            "temp", "warn", seen, f"export TMPDIR={folder}, or free space: df -h {requested}"
        )
    seen = f"{folder}: {_size(n_free)} free"
    if n_free < _TEMP_USUAL:
        remedy = "export TMPDIR=DIR, a folder with free space"
        return Check("temp", "fail" if n_free < _TEMP_MIN else "warn", seen, remedy)
    return Check("temp", "pass", seen)


def hostname(_: Host) -> Check:
    name = socket.gethostname()
    address = _call_within(_NAME_S, lambda: socket.getaddrinfo(name, None)[0][4][0])
    if address is None:
        # Not 127.0.1.1: rank 0 would listen there if MASTER_ADDR is the name of this host.
        remedy = f"echo \"$(hostname -I | cut -d' ' -f1) {name}\" | sudo tee -a /etc/hosts"
        return Check("hostname", "warn", f"{name} cannot be resolved", remedy)
    return Check("hostname", "pass", f"{name} is {address}")


def interface(host: Host) -> Check:
    requested = os.environ.get("GLOO_SOCKET_IFNAME")
    present = interfaces()
    if requested is None or (host.is_launched and requested == "lo" and "lo" in present):
        return Check("interface", "pass", f"chosen by address among {', '.join(present) or 'none'}")
    # gloo takes the first of several names.
    wrong = [name for name in requested.split(",") if not present.get(name)]
    if not wrong:
        return Check("interface", "pass", f"GLOO_SOCKET_IFNAME={requested}")
    fault = "is down" if wrong[0] in present else "does not exist"
    seen = f"GLOO_SOCKET_IFNAME={requested}, and {wrong[0]} {fault}; "
    seen += f"this host has {', '.join(present)}"
    if not host.is_launched:
        seen += "; ranks that --nproc starts use lo, but ranks of several hosts would fail"
    return Check(
        "interface", "fail" if host.is_launched else "warn", seen, _interface_remedy(present)
    )


def loopback(_: Host) -> Check:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(_CONNECT_S)
            address = server.getsockname()
            with (
                socket.create_connection(address, _CONNECT_S) as client,
                server.accept()[0] as server_side,
            ):
                server_side.settimeout(_CONNECT_S)
                for sender, receiver in ((client, server_side), (server_side, client)):
                    sender.sendall(b"?")
                    if receiver.recv(1) != b"?":
                        raise OSError(errno.EIO, "a wrong byte arrived")
    except OSError as error:
        seen = f"127.0.0.1: {error.strerror or error}"
        return Check("loopback", "fail", seen, "sudo ip link set lo up")
    return Check("loopback", "pass", "both ways")


def port(host: Host) -> Check:
    address = "127.0.0.1", host.port
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        seen = f"{address[0]}:{host.port}: {error.strerror}"
        remedy = f"parallel-llama serve --port 0 (what uses it: ss -ltnp sport = :{host.port})"
        return Check("port", "warn", seen, remedy)
    return Check("port", "pass", f"{address[0]}:{host.port} is free")


def interfaces() -> Mapping[str, bool]:
    """The network interfaces of this host, and whether each is up."""
    is_up = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            reply = fcntl.ioctl(probe.fileno(), _SIOCGIFFLAGS, request)
            is_up[name] = bool(struct.unpack_from("H", reply, 16)[0] & _IFF_UP)
    return is_up


def _interface_remedy(present: Mapping[str, bool]) -> str:
    usable = [name for name, is_up in present.items() if is_up and name != "lo"]
    if usable:
        return f"export GLOO_SOCKET_IFNAME={usable[0]}"
    return "unset GLOO_SOCKET_IFNAME"


def _core_times(root: Path) -> dict[int, tuple[int, int, int]]:
    """Ticks of each core since boot: all, idle and stolen by other virtual machines.

    Source: proc(5), /proc/stat.
    """
    times = {}
    for line in _read(root / "proc/stat").splitlines():
        name, *words = line.split()
        if name.startswith("cpu") and name != "cpu":
            ticks = [int(word) for word in words[:8]]  # `user` includes the time of guests
            times[int(name[3:])] = sum(ticks), ticks[3] + ticks[4], ticks[7]
    return times


def _work_by_process(root: Path) -> dict[int, int]:
    """CPU ticks of each process."""
    work = {}
    for path in root.glob("proc/[0-9]*/stat"):
        # The name, in parentheses, may contain any characters.
        words = _read(path).rpartition(")")[2].split()
        if len(words) > 12:
            work[int(path.parent.name)] = int(words[11]) + int(words[12])
    return work


def _threads_of_user(root: Path) -> int:
    n_threads = 0
    for path in root.glob("proc/[0-9]*"):
        with suppress(OSError):  # it has ended
            if path.stat().st_uid == os.geteuid():
                n_threads += len(list(path.glob("task/*")))
    return n_threads


def _numbers_in(text: str) -> set[int]:
    """The numbers of a list such as 0-3,8."""
    numbers: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers |= set(range(int(first), int(last or first) + 1))
    return numbers


def _call_within(limit_s: float, function: Callable[[], object]) -> object:
    """The result of a function; None if it fails or takes longer."""
    results: list[object] = []

    def run() -> None:
        with suppress(OSError, UnicodeError):
            results.append(function())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(limit_s)
    return results[0] if results else None


def _read(path: Path) -> str:
    """The text of a file of the system; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _limit(n: int) -> str:
    return "unlimited" if n == resource.RLIM_INFINITY else str(n)


def _size(n_bytes: float) -> str:
    return f"{n_bytes / GIB:.2f} GiB" if n_bytes >= GIB else f"{n_bytes / MIB:.1f} MiB"


Rule = Callable[[Host], Check]
# Checks of what can make a run fail; `serve` and `generate` run them too.
_QUICK: Sequence[Rule] = (cores, memory, dev_shm, open_files, processes)
_SLOW: Sequence[Rule] = (
    numa, locked_memory, huge_pages, temp, hostname, interface, loopback, port,
)  # fmt: skip
