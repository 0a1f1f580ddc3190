"""Facts about each rank's process and host, compared between ranks or checked on each rank."""

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
from parallel_llama.errors import listed_ranks
from parallel_llama.ops.cpu.jit import CPUFeatures, code_cache, computes, this_machine
from parallel_llama.parallel.collectives import Communicator
from parallel_llama.parallel.communicators import address_to, visible_gpus
from parallel_llama.parallel.device_choice import count_gpus, too_few

_LIBRARIES = "torch", "llvmlite", "numpy", "blake3", "msgspec", "safetensors", "fairscale"
_PACKAGE = Path(parallel_llama.__file__).parent
_CLOCKS_S = 1.0
_CONNECT_S, _FAR_S, _N_PINGS = 3.0, 2e-3, 5
_MIB = 1 << 20


class Facts(msgspec.Struct, frozen=True):
    """One rank's process and host.

    Args:
        host_id: equal for processes of one kernel and one network.
        versions: by name; equal on all ranks.
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


def versions(found: Sequence[Facts | None]) -> Check:
    """Compares the versions of all ranks."""
    lost = [rank for rank, facts in enumerate(found) if facts is None]
    if lost:
        seen = f"the facts of rank {listed_ranks(lost)} cannot be read: the rank runs another "
        seen += "version, or its messages arrive damaged"
        return Check("versions", "fail", seen, "pip install the same version on all hosts")
    there = [facts for facts in found if facts is not None]
    for name in there[0].versions:
        values = [facts.versions.get(name, "none") for facts in there]
        usual, _ = Counter(values).most_common(1)[0]
        odd = [rank for rank, value in enumerate(values) if value != usual]
        if odd:
            rank, like = odd[0], values.index(usual)
            seen = f"{name}: rank {listed_ranks(odd)} has {values[rank]}, rank {like} has {usual}"
            remedy = "pip install the same version on all hosts, and check that rank's PYTHONPATH"
            return Check("versions", "fail", seen, remedy)
    names = "parallel_llama", "torch", "llvmlite"
    seen = ", ".join(f"{name} {there[0].versions[name]}" for name in names)
    return Check("versions", "pass", f"{seen}, Python {there[0].versions['Python']}")


def clocks(found: Sequence[Facts]) -> Check:
    """Compares the clocks of the hosts."""
    if len({facts.host_id for facts in found}) == 1:
        return Check("clocks", "skip", "all ranks are on one host")
    usual = statistics.median(facts.time_s for facts in found)
    off = {rank: facts.time_s - usual for rank, facts in enumerate(found)}
    rank = max(off, key=lambda each: abs(off[each]))
    seen = f"at most {abs(off[rank]):.2f} s from the median"
    if abs(off[rank]) <= _CLOCKS_S:
        return Check("clocks", "pass", seen)
    seen = f"rank {rank} ({found[rank].host}) is off by {off[rank]:.1f} s; only logs are affected"
    return Check("clocks", "warn", seen, "sudo timedatectl set-ntp true")


class Listener:
    """Echoes bytes to other hosts, at the local address that routes to the store.

    Args:
        store: the address of the store; None to listen nowhere.
    """

    def __init__(self, store: tuple[str, int] | None) -> None:
        self.address = "", 0
        self._server: socket.socket | None = None
        own = store and address_to(*store)
        with suppress(OSError):
            if own:
                self._server = socket.create_server((str(own), 0))
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


def hosts(comm: Communicator, found: Sequence[Facts]) -> Check:
    """Connects each rank to every rank on another host, in both directions.

    Collective: one all_gather, after every rank has a `Listener`.
    """
    if len({facts.host_id for facts in found}) == 1:
        return Check("hosts", "skip", "all ranks are on one host")
    own = found[comm.rank]
    trips = [
        0.0 if facts.host_id == own.host_id else _round_trip(facts.address, facts.port)
        for facts in found
    ]
    rows = exchange(comm, trips, list[float])
    pairs = {(a, b): s for a, row in enumerate(rows) for b, s in enumerate(row or ())}
    cut = [pair for pair, s in pairs.items() if s < 0]
    if cut:
        (a, b), n_more = cut[0], len(cut) - 1
        seen = f"rank {a} ({found[a].host}) cannot connect to rank {b} ({found[b].address})"
        seen += f", and {n_more} more" if n_more else ""
        return Check("hosts", "fail", seen, f"allow TCP from {found[a].address} in the firewall")
    (a, b), slowest_s = max(pairs.items(), key=lambda item: item[1])
    n_hosts = len({facts.host_id for facts in found})
    seen = f"{n_hosts} hosts, round trip of at most {slowest_s * 1e3:.2f} ms"
    if slowest_s > _FAR_S:
        seen = (
            f"rank {a} ({found[a].address}) and rank {b} ({found[b].address}) are far apart: {seen}"
        )
        remedy = "export GLOO_SOCKET_IFNAME=INTERFACE (the fastest network of `ip -br addr`)"
        return Check("hosts", "warn", seen, remedy)
    return Check("hosts", "pass", seen)


def _round_trip(address: str, port: int) -> float:
    """The fastest round trip of a byte in seconds; -1 without a connection."""
    try:
        times = []
        with socket.create_connection((address, port), _CONNECT_S) as far:
            far.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for _ in range(_N_PINGS):
                began = time.perf_counter()
                far.sendall(b"?")
                if far.recv(1) != b"?":
                    return -1.0
                times.append(time.perf_counter() - began)
        return min(times)
    except OSError:
        return -1.0


def gpus(n_local: int, needed: int) -> Check:
    """Checks that this rank's GPU has `needed` bytes of free memory, 0 without a model."""
    n_there, n_seen = count_gpus(), visible_gpus()
    if not n_there and not n_seen:
        return Check("cards", "skip", "there is no CUDA device")
    if not n_seen:
        seen = f"{n_there} CUDA devices, but torch {torch.__version__} sees none"
        return Check("cards", "fail", seen, "nvidia-smi (then install a torch for its CUDA)")
    kinds = {torch.cuda.get_device_name(gpu) for gpu in range(min(n_local, n_seen))}
    if n_local > n_seen:
        remedy = f"use at most --nproc {n_seen}"
        return Check("cards", "warn", f"{too_few(n_local, n_seen)}: running on the CPU", remedy)
    n_free, n_all = torch.cuda.mem_get_info()
    seen = f"{torch.cuda.get_device_name()}, {n_free // _MIB} of {n_all // _MIB} MiB free"
    if needed > n_free:
        return Check(
            "cards", "fail", f"{seen}, {needed // _MIB} needed", "nvidia-smi (lists other programs)"
        )
    if len(kinds) > 1:
        seen = f"different GPUs: {', '.join(sorted(kinds))}"
        return Check("cards", "warn", seen, "export CUDA_VISIBLE_DEVICES=.. (equal GPUs)")
    return Check("cards", "pass", seen)


def instruction_set(machine: CPUFeatures | None = None) -> Check:
    machine = machine or this_machine()
    seen = f"{platform.machine()}, vectors of {machine.vector_bytes} bytes"
    if not computes(torch.float32, torch.device("cpu")):
        seen += "; no kernels for this CPU, so torch's operators run"
        return Check("instruction-set", "warn", seen, "use a CPU with AVX2 or NEON")
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
        seen = f"{cache.folder} is not a writable folder that only this user can write to, so every"
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
    found = {
        "parallel_llama": parallel_llama.__version__,
        "Python": platform.python_version(),
        "source of parallel_llama": _source_digest(),
    }
    for name in _LIBRARIES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _source_digest() -> str:
    """A short digest of all modules of the package."""
    digest = hashlib.blake2b(digest_size=6)
    for path in sorted(_PACKAGE.rglob("*.py")):
        name = path.relative_to(_PACKAGE).as_posix().encode()
        with suppress(OSError):
            digest.update(b"%d %s %s" % (len(name), name, path.read_bytes()))
    return digest.hexdigest()
