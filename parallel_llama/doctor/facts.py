"""Checks of software, clocks, hosts and GPUs: each rank gathers its facts, and all are compared."""

import hashlib
import os
import platform
import socket
import statistics
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec
import torch

import parallel_llama
from parallel_llama.doctor.check import Check
from parallel_llama.doctor.records import exchange
from parallel_llama.errors import named_ranks, ranks_do
from parallel_llama.ops.cpu.jit import CPUFeatures, code_cache, this_machine, why_no_kernels
from parallel_llama.parallel.collectives import Communicator
from parallel_llama.parallel.communicators import address_to, visible_gpus
from parallel_llama.parallel.device_choice import count_gpus, too_few

_LIBRARIES = "torch", "llvmlite", "numpy", "blake3", "msgspec", "safetensors", "fairscale"
_PACKAGE = Path(parallel_llama.__file__).parent
_MAX_CLOCK_OFFSET_S = 1.0
_CONNECT_S, _SLOW_TRIP_S, _N_PINGS = 3.0, 2e-3, 5
_MIB = 1 << 20


class Facts(msgspec.Struct, frozen=True):
    """One rank's process and host.

    Args:
        host_id: equal for processes of one kernel and one network.
        versions: by name; the check `versions` compares those of all ranks.
        time_s: the host's clock, at about the same moment on all ranks.
        address: where this rank listens for `hosts`; "" if it has no address.
    """

    host: str
    host_id: str
    pid: int
    versions: dict[str, str]
    time_s: float
    address: str = ""
    port: int = 0

    @classmethod
    def here(cls, address: tuple[str, int] = ("", 0)) -> "Facts":
        return cls(
            socket.gethostname(),
            _host_id(),
            os.getpid(),
            _versions(),
            time.time(),
            address[0],
            address[1],
        )


def versions(facts_by_rank: Sequence[Facts | None]) -> Check:
    """Compares the versions of all ranks."""
    lost_ranks = [rank for rank, facts in enumerate(facts_by_rank) if facts is None]
    if lost_ranks:
        seen = (
            f"the facts of {named_ranks(lost_ranks)} cannot be read: another version runs there, "
        )
        seen += "or messages arrive damaged"
        return Check("versions", "fail", seen, "pip install the same version on all hosts")
    known_facts = [facts for facts in facts_by_rank if facts is not None]
    for name in known_facts[0].versions:
        values = [facts.versions.get(name, "none") for facts in known_facts]
        most_common, _ = Counter(values).most_common(1)[0]
        differing = [rank for rank, value in enumerate(values) if value != most_common]
        if differing:
            rank, reference = differing[0], values.index(most_common)
            seen = f"{name}: {ranks_do(differing, 'has', 'have')} {values[rank]}, "
            seen += f"rank {reference} has {most_common}"
            remedy = "pip install the same version on all hosts, and check that rank's PYTHONPATH"
            return Check("versions", "fail", seen, remedy)
    names = "parallel_llama", "torch", "llvmlite"
    seen = ", ".join(f"{name} {known_facts[0].versions[name]}" for name in names)
    return Check("versions", "pass", f"{seen}, Python {known_facts[0].versions['Python']}")


def clocks(ranks: Sequence[Facts]) -> Check:
    """Compares the clocks of the hosts."""
    if len({facts.host_id for facts in ranks}) == 1:
        return Check("clocks", "skip", "all ranks are on one host")
    median_s = statistics.median(facts.time_s for facts in ranks)
    offset_s = {rank: facts.time_s - median_s for rank, facts in enumerate(ranks)}
    rank = max(offset_s, key=lambda rank: abs(offset_s[rank]))
    seen = f"at most {abs(offset_s[rank]):.2f} s from the median"
    if abs(offset_s[rank]) <= _MAX_CLOCK_OFFSET_S:
        return Check("clocks", "pass", seen)
    seen = (
        f"rank {rank} ({ranks[rank].host}) is off by {offset_s[rank]:.1f} s; only logs are affected"
    )
    return Check("clocks", "warn", seen, "sudo timedatectl set-ntp true")


class Listener:
    """Echoes the bytes of other hosts. It listens at the source address of packets to the store.

    Args:
        store: the address at which the ranks join (MASTER_ADDR); None to listen nowhere.
    """

    def __init__(self, store: tuple[str, int] | None) -> None:
        self.address = "", 0
        self._server: socket.socket | None = None
        address = store and address_to(*store)
        with suppress(OSError):
            if address:
                self._server = socket.create_server((str(address), 0))
                self.address = self._server.getsockname()[:2]
                threading.Thread(target=self._echo, args=(self._server,), daemon=True).start()

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    @staticmethod
    def _echo(server: socket.socket) -> None:
        with suppress(OSError):  # it is closed
            while True:
                near, _ = server.accept()
                with suppress(OSError), near:
                    near.settimeout(_CONNECT_S)
                    for _ in range(_N_PINGS):
                        near.sendall(near.recv(1))


def hosts(comm: Communicator, ranks: Sequence[Facts]) -> Check:
    """Connects each rank to every rank on another host, in both directions.

    Collective: one all_gather, after every rank has a `Listener`.
    """
    if len({facts.host_id for facts in ranks}) == 1:
        return Check("hosts", "skip", "all ranks are on one host")
    own_facts = ranks[comm.rank]
    round_trips_s = [
        0.0 if facts.host_id == own_facts.host_id else _round_trip(facts.address, facts.port)
        for facts in ranks
    ]
    rows = exchange(comm, round_trips_s, list[float])
    pairs = {(a, b): s for a, row in enumerate(rows) for b, s in enumerate(row or ())}
    unreachable = [pair for pair, s in pairs.items() if s < 0]
    if unreachable:
        (a, b), n_more = unreachable[0], len(unreachable) - 1
        seen = f"rank {a} ({ranks[a].host}) cannot connect to rank {b} ({ranks[b].address})"
        seen += f", and {n_more} more" if n_more else ""
        return Check("hosts", "fail", seen, f"allow TCP from {ranks[a].address} in the firewall")
    (a, b), slowest_s = max(pairs.items(), key=lambda item: item[1])
    n_hosts = len({facts.host_id for facts in ranks})
    seen = f"{n_hosts} hosts, round trip of at most {slowest_s * 1e3:.2f} ms"
    if slowest_s > _SLOW_TRIP_S:
        pair = f"rank {a} ({ranks[a].address}) and rank {b} ({ranks[b].address})"
        seen = f"{pair} are far apart: {seen}"
        remedy = "export GLOO_SOCKET_IFNAME=INTERFACE (the fastest network of `ip -br addr`)"
        return Check("hosts", "warn", seen, remedy)
    return Check("hosts", "pass", seen)


def _round_trip(address: str, port: int) -> float:
    """The fastest round trip of a byte in seconds; -1 without a connection."""
    try:
        times = []
        with socket.create_connection((address, port), _CONNECT_S) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for _ in range(_N_PINGS):
                start_s = time.perf_counter()
                connection.sendall(b"?")
                if connection.recv(1) != b"?":
                    return -1.0
                times.append(time.perf_counter() - start_s)
        return min(times)
    except OSError:
        return -1.0


def gpus(n_local: int, needed: int) -> Check:
    """Checks that this rank's GPU has `needed` bytes of free memory; 0 bytes without a model."""
    n_devices, n_visible = count_gpus(), visible_gpus()
    if not n_devices and not n_visible:
        return Check("cards", "skip", "there is no CUDA device")
    if not n_visible:
        seen = f"{n_devices} CUDA devices, but torch {torch.__version__} sees none"
        return Check("cards", "fail", seen, "nvidia-smi (then install a torch for its CUDA)")
    names = {torch.cuda.get_device_name(gpu) for gpu in range(min(n_local, n_visible))}
    if n_local > n_visible:
        remedy = f"use at most --nproc {n_visible}"
        return Check("cards", "warn", f"{too_few(n_local, n_visible)}: running on the CPU", remedy)
    n_free, n_all = torch.cuda.mem_get_info()
    seen = f"{torch.cuda.get_device_name()}, {n_free // _MIB} of {n_all // _MIB} MiB free"
    if needed > n_free:
        return Check(
            "cards", "fail", f"{seen}, {needed // _MIB} needed", "nvidia-smi (lists other programs)"
        )
    if len(names) > 1:
        seen = f"different GPUs: {', '.join(sorted(names))}"
        return Check("cards", "warn", seen, "export CUDA_VISIBLE_DEVICES=.. (equal GPUs)")
    return Check("cards", "pass", seen)


def instruction_set(machine: CPUFeatures | None = None) -> Check:
    machine = machine or this_machine()
    seen = f"{platform.machine()}, vectors of {machine.vector_bytes} bytes"
    if (why := why_no_kernels()) is not None:
        missing, remedy = why.split("; ")
        return Check("instruction-set", "warn", f"{seen}; torch's operators run: {missing}", remedy)
    if machine.vector_bytes < 32 and platform.machine() == "x86_64":
        remedy = "use a CPU model with AVX2 for the virtual machine: -cpu host"
        return Check("instruction-set", "warn", f"{seen}: no AVX2", remedy)
    return Check("instruction-set", "pass", f"{seen}, dot products of bytes by {machine.byte_dots}")


def kernel_cache() -> Check:
    cache = code_cache()
    if cache.folder is None:
        seen = "no home folder, or a relative XDG_CACHE_HOME, so every start compiles all kernels"
        return Check("kernel-cache", "warn", seen, "export XDG_CACHE_HOME=DIR, an absolute path")
    if not cache.is_used:
        seen = f"{cache.folder} cannot be written, or other users can write to it, so every"
        remedy = f"chmod -R go-w {cache.folder} && chown -R $(id -u) {cache.folder}"
        return Check("kernel-cache", "warn", f"{seen} start compiles all kernels", remedy)
    if cache.damaged:
        files = " ".join(str(cache.folder / name) for name in cache.damaged[:3])
        seen = f"{len(cache.damaged)} of {cache.n_files} files are damaged or another user's; "
        seen += "these kernels are compiled again"
        return Check("kernel-cache", "warn", seen, f"rm {files}")
    return Check("kernel-cache", "pass", f"{cache.n_files} kernels in {cache.folder}")


def _host_id() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/net').readlink()}"
    except OSError:
        return socket.gethostname()


def _versions() -> dict[str, str]:
    versions = {
        "parallel_llama": parallel_llama.__version__,
        "Python": platform.python_version(),
        "source of parallel_llama": _source_digest(),
    }
    for name in _LIBRARIES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def _source_digest() -> str:
    """A short digest of all modules of the package."""
    digest = hashlib.blake2b(digest_size=6)
    for path in sorted(_PACKAGE.rglob("*.py")):
        name = path.relative_to(_PACKAGE).as_posix().encode()
        with suppress(OSError):
            digest.update(b"%d %s %s" % (len(name), name, path.read_bytes()))
    return digest.hexdigest()
