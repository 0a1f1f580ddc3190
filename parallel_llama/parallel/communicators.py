"""Makes this process a rank: meets the other ranks at the store, and forms the communicator.

`join` is the entry point. Only this module initialises torch.distributed and fairscale. Under
torchrun the ranks use the store of torchrun's agent; otherwise rank 0 owns a store that listens
only at MASTER_ADDR.
"""

import errno
import fcntl
import ipaddress
import logging
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from datetime import timedelta
from functools import partial
from io import StringIO

import torch
import torch.distributed as dist
from fairscale.nn.model_parallel import initialize as fs_init
from torch.distributed import PrefixStore, Store, TCPStore

from parallel_llama.errors import CheckpointError, UsageError, named_ranks
from parallel_llama.parallel.collectives import ByDevice, Communicator, Solo
from parallel_llama.parallel.device_choice import DeviceKind
from parallel_llama.parallel.failures import RankError, first_line
from parallel_llama.parallel.gpu import gpu_id
from parallel_llama.parallel.handshake import (
    RankInfo,
    acknowledge_objection,
    publish_objection,
    publishing_objection,
    read_objection,
    rendezvous,
)
from parallel_llama.parallel.one_shot import seconds_on_gpu, symmetric_memory, with_one_shot_sums
from parallel_llama.parallel.process_group import ProcessGroup, within
from parallel_llama.parallel.rank_env import (
    SECRET_FILE,
    RankEnv,
    end_with_parent,
    is_one_host,
    is_under_torchrun,
    is_watched,
    rank_env,
)
from parallel_llama.parallel.rank_stacks import record_stacks
from parallel_llama.parallel.sealed_store import SealedStore
from parallel_llama.parallel.shared_memory import host_id, share
from parallel_llama.parallel.sockets import Endpoint, connect
from parallel_llama.parallel.timeouts import Timeouts
from parallel_llama.parallel.torch_threads import start_thread

logger = logging.getLogger(__name__)


def visible_gpus() -> int:
    """The number of GPUs that torch sees in this process; 0 if none can be used."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def own_device(kind: DeviceKind, local_rank: int) -> torch.device:
    """The CPU, or the GPU with the index `local_rank`."""
    return torch.device("cuda", local_rank) if kind == "cuda" else torch.device("cpu")


def use_device(device: torch.device) -> None:
    """Makes `device` the current GPU of this thread, if it is a GPU with an index.

    Every thread begins with GPU 0, and a kernel runs on the current GPU of the thread that launches
    it, wherever its tensors are. So every thread that launches kernels calls this first.
    """
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


_CONNECT_S = 0.05
_LISTEN_S = 0.1
# How long a second rank 0 waits for the first one to publish its RankInfo.
_OTHER_RANK_0_S = 5.0
_SIOCGIFADDR = 0x8915  # Linux: get the address of an interface
# How long a rank that gives up before joining waits for the other ranks to read its objection.
_GIVE_UP_S = 15.0
_LATE_GIVE_UP_S = 4.0  # after the time limit for joining, when the store may not answer

_CPU = torch.device("cpu")


_has_begun = False  # whether this process has called `join`


def require_no_group() -> None:
    """Raises: UsageError if this process is already a rank of a group; it can be in only one."""
    if dist.is_initialized():
        raise UsageError(
            "this process is already a rank of a group: close the other LLM, or call "
            "torch.distributed.destroy_process_group, first"
        )


def join(
    device: torch.device = _CPU,
    *,
    dtype: torch.dtype = torch.float32,
    env: RankEnv | None = None,
    facts: Mapping[str, str] | None = None,
    notes: Mapping[str, str] | None = None,
    timeouts: Timeouts = Timeouts(),  # noqa: B008, it is frozen
    log_dir: str | None = None,
    on_wait: Callable[[Sequence[int]], None] = lambda _: None,
    form: Callable[[RankEnv, SealedStore, Endpoint | None], Communicator] | None = None,
) -> Communicator:
    """Joins the group of all ranks; a process that is not started as a rank gets a group of one.

    Args:
        device: the device of the model's tensors.
        dtype: the dtype of the model's all-reduces.
        env: the rank and store address of this process; by default `rank_env()`.
        facts: must be equal on all ranks.
        notes: describe the rank's GPU, and should be equal on all ranks; rank 0 warns of each
            difference.
        log_dir: the parent of the folder with the ranks' stacks, made after a failure.
        on_wait: called repeatedly with the ranks that have not joined; it may raise.
        form: forms the communicator after the rendezvous, instead of `make_communicator`.

    Raises: UsageError for an incomplete environment; RankError naming ranks that did not join or
    whose facts differ.
    Collective: every rank calls it once.
    """
    global _has_begun
    _has_begun = True
    env = env or rank_env()
    use_device(device)
    if env.size == 1:
        return Solo()
    require_no_group()
    record_stacks(log_dir)
    if is_under_torchrun():
        end_with_parent()
    if env.rank > 0 and threading.current_thread() is threading.main_thread():
        # Ctrl-C reaches every process of the terminal, but only rank 0 handles it.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    missing = set(range(env.size))

    objections: list[str] = []  # of other ranks
    ended = threading.Event()
    stores: list[Store] = []

    def connect_ranks() -> Communicator:
        use_device(device)  # `within` calls this in a new thread
        store = _open_store(env, timeouts.start_s)
        stores.append(store)
        with publishing_objection(store, env.rank, env.size):
            own = RankInfo.of_this_process(
                env.rank, env.size, facts or {}, notes or {}, gpu_id(device)
            )
            gpu_differences = rendezvous(store, own, missing, ended)
            if env.rank == 0:
                for difference in gpu_differences:
                    logger.warning(
                        "the ranks have different GPUs or drivers, and a step takes as long as the "
                        "slowest rank; use equal ones, or --memory, which gives smaller GPUs "
                        "smaller shards. %s",
                        difference,
                    )
            # If a rank has given up, gloo would wait for it until the timeout.
            watch = partial(_watch_for_objections, env, timeouts.start_s, ended, objections)
            start_thread(watch, "listen", ended.set)
            address = _own_address(env)
            key = store.key_for("sockets")
            endpoint = None if address is None else Endpoint(address, key, host_id())
            if form is not None:
                return form(env, store, endpoint)
            with _gloo_on_interface_to(env):
                return make_communicator(
                    env.rank, env.size, store, device, timeouts, endpoint=endpoint, dtype=dtype
                )

    def check_for_objection() -> None:
        if objections:
            raise RankError(objections[0])
        on_wait(sorted(missing))

    try:
        return within(timeouts.start_s, connect_ranks, check_for_objection)
    except TimeoutError as error:
        ended.set()
        why = _why_not_joined(env, missing, timeouts)
        for store in stores:  # otherwise waiting ranks would only see that the store has ended
            with suppress(RuntimeError, TimeoutError):
                within(_LATE_GIVE_UP_S, partial(publish_objection, store, env.rank, env.size, why))
        raise RankError(why) from error
    except dist.DistNetworkError as error:
        others = f"; {named_ranks(missing)} had not joined" if missing else ""
        raise RankError(
            f"{_store_owner(env)} has died or given up, and the ranks' store ended with it{others}"
        ) from error
    finally:
        ended.set()


def give_up(why: str) -> None:
    """Publishes why this rank will not join; returns when the other ranks have read it.

    Waits at most `_GIVE_UP_S` seconds; rank 0 keeps the store open meanwhile. Does nothing in two
    cases: after a call of `join`, because the other ranks then detect the end of this rank, and
    under torchrun or our launcher, because these end all ranks when one fails.
    """
    if _has_begun or is_watched():
        return

    def publish() -> None:
        env = rank_env()
        if env.size > 1:
            store = _open_store(env, _GIVE_UP_S)
            wait_s = 0.0 if env.rank > 0 else _GIVE_UP_S
            publish_objection(
                store, env.rank, env.size, f"rank {env.rank} of {env.size}: {why}", wait_s
            )

    # These errors mean that no other rank can read the reason.
    with suppress(UsageError, CheckpointError, RuntimeError, TimeoutError):
        within(_GIVE_UP_S, publish)


def make_communicator(
    rank: int,
    size: int,
    store: Store,
    device: torch.device = _CPU,
    timeouts: Timeouts = Timeouts(),  # noqa: B008, it is frozen
    shared_memory: bool = True,
    endpoint: Endpoint | None = None,
    dtype: torch.dtype = torch.float32,
) -> Communicator:
    """Forms the group of `size` ranks that share a store.

    Args:
        shared_memory: if false, ranks of one host communicate like ranks of several hosts.
        endpoint: where ranks that do not share memory reach this one; None leaves them to gloo.
        dtype: the dtype of the model's all-reduces, for which GPUs choose the faster exchange.

    Raises: RankError if the ranks cannot connect.
    Collective: every rank calls it, with equal arguments except `rank` and `endpoint`.
    """
    timeout = timedelta(seconds=timeouts.start_s)
    # CUDA needs both back ends: only the model's tensors are on the GPU.
    has_gpu = device.type == "cuda"
    backend = "cpu:gloo,cuda:nccl" if has_gpu else "gloo"
    try:
        with _silent_stdout(), _nccl_leaves_errors_to_us():
            dist.init_process_group(
                backend,
                store=PrefixStore("group", store),
                rank=rank,
                world_size=size,
                timeout=timeout,
            )
            fs_init.initialize_model_parallel(size)
    except RankError:
        raise
    except RuntimeError as error:
        raise RankError(
            f"rank {rank} of {size} cannot connect to the other ranks: {first_line(error, 300)}; "
            "if hosts have several networks, set GLOO_SOCKET_IFNAME to the interface to use"
        ) from error
    group = fs_init.get_model_parallel_group()
    for process_group in (
        group,
        fs_init.get_data_parallel_group(),
        fs_init.get_pipeline_parallel_group(),
    ):
        # fairscale's groups start with torch's default of 30 minutes.
        process_group.set_timeout(timedelta(seconds=timeouts.step_s))
    abort = partial(_abort, group, device) if has_gpu else None
    comm = ProcessGroup(group, store, timeouts, _leave, abort, partial(use_device, device))
    try:
        # No rank continues before all have connected, because the store may end with rank 0.
        comm.barrier()
        host = share(comm, timeouts) if shared_memory else comm
        is_shared = host is not comm
        if not is_shared:
            host = connect(comm, endpoint, timeouts)
        if not has_gpu:
            return host
        comm.all_gather(torch.zeros(1, device=device))  # NCCL connects at the first collective
        gpus: Communicator = comm
        if is_shared:  # on one host, GPUs may read each other's memory
            shared = partial(symmetric_memory, comm, group, device)
            gpus = with_one_shot_sums(comm, device, shared, seconds_on_gpu, dtype)
        return ByDevice(host, gpus, comm.require_not_aborted)
    except RankError:
        comm.close()
        raise


@contextmanager
def _nccl_leaves_errors_to_us() -> Iterator[None]:
    """Disables torch's watchdog.

    The watchdog would kill a user's program 30 s after the loss of a rank, with a C++ stack trace.
    Its threads also must not read the store: the store is a Python object, invalid once the
    interpreter has ended. torch reads the variables that control it when it forms a group.
    """
    names = "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_DUMP_ON_TIMEOUT"
    added = [name for name in names if name not in os.environ]
    os.environ.update(dict.fromkeys(added, "0"))
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


@contextmanager
def _gloo_on_interface_to(env: RankEnv) -> Iterator[None]:
    """Makes gloo use the network interface by which this rank reaches the store.

    By default gloo uses the address of the host's name, often 127.0.1.1, which other hosts cannot
    reach. GLOO_SOCKET_IFNAME takes precedence.
    """
    name = "GLOO_SOCKET_IFNAME"
    interface = None if name in os.environ else _interface_to(env)
    if interface is None:
        yield
        return
    os.environ[name] = interface
    try:
        yield
    finally:
        del os.environ[name]


def address_to(host: str, port: int) -> ipaddress.IPv4Address | None:
    """The source address of packets from this host to `host`; None unless it is IPv4."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            _, address = _resolved(host, port, socket.AF_INET)
            probe.connect(address)  # sends nothing
            return ipaddress.IPv4Address(probe.getsockname()[0])
    except OSError:
        return None


def _resolved(
    host: str, port: int, family: int = socket.AF_UNSPEC
) -> tuple[socket.AddressFamily, tuple[str | int | bytes, ...]]:
    """The address of a host and its family; a loopback address only if the host has no other.

    Raises: OSError if the host has no address of this family.
    """
    found = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)
    own_family, *_, address = min(found, key=lambda each: _is_loopback(each[4]))
    return own_family, address


def _is_loopback(address: tuple[str | int | bytes, ...]) -> bool:
    return ipaddress.ip_address(address[0]).is_loopback


def _own_address(env: RankEnv) -> ipaddress.IPv4Address | None:
    """The IPv4 address at which the other ranks reach this rank, or None."""
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME")
    if interfaces is None:
        return address_to(env.host, env.port)
    return _address_of(interfaces.partition(",")[0])  # gloo takes the first of several names


def _interface_to(env: RankEnv) -> str | None:
    """The network interface by which this rank reaches the store; None unless by IPv4."""
    source = address_to(env.host, env.port)
    if source is None:
        return None
    for _, name in socket.if_nameindex():
        address = _address_of(name)
        if address is not None and (
            address == source or (address.is_loopback and source.is_loopback)
        ):
            return name
    return None


def _address_of(interface: str) -> ipaddress.IPv4Address | None:
    """The IPv4 address of a network interface; None if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError, struct.error):
        request = struct.pack("256s", interface.encode())
        reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        return ipaddress.IPv4Address(reply[20:24])
    return None


def _abort(group: dist.ProcessGroup, device: torch.device) -> None:
    """Aborts the collectives that are queued on the GPU, and with them the group."""
    group._get_backend(device).abort()


@contextmanager
def _silent_stdout() -> Iterator[None]:
    """Discards what fairscale, and gloo from C++, print to stdout."""
    try:
        stdout_fd = os.dup(1)
    except OSError:  # stdout is closed
        yield
        return
    if sys.stdout is not None:
        sys.stdout.flush()
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)
    os.close(devnull)
    try:
        with redirect_stdout(StringIO()):
            yield
    finally:
        os.dup2(stdout_fd, 1)
        os.close(stdout_fd)


def _open_store(env: RankEnv, limit_s: float) -> SealedStore:
    """The store of the ranks, owned by rank 0 or by torchrun.

    If another process is rank 0 of this run, a second rank 0 connects to the store of the first
    one, and the rendezvous names both.

    Raises: RankError if another program uses rank 0's port.
    """
    if env.has_agent_store or env.rank > 0:
        return _connect_to_store(env, limit_s)
    listen_fd = _bound_socket(env)
    if listen_fd is not None:
        return _connect_to_store(env, limit_s, listen_fd)
    wait_s = min(_OTHER_RANK_0_S, limit_s / 2)

    def connect_to_other_rank_0() -> SealedStore:
        store = _connect_to_store(env, wait_s)
        store.wait(["info/0"], timedelta(seconds=wait_s))
        return store

    try:
        return within(wait_s, connect_to_other_rank_0)
    except (RuntimeError, TimeoutError) as error:
        raise RankError(
            f"rank 0 of {env.size} cannot listen at MASTER_ADDR={env.host}, MASTER_PORT="
            f"{env.port}: another program uses this port; give all ranks another MASTER_PORT"
        ) from error


def _connect_to_store(env: RankEnv, limit_s: float, listen_fd: int | None = None) -> SealedStore:
    """Connects to the store, or serves it at the socket with the descriptor `listen_fd`."""
    if listen_fd is None:
        _wait_for_store(env, limit_s)
    store = TCPStore(
        env.host,
        env.port,
        is_master=listen_fd is not None,
        wait_for_workers=False,
        timeout=timedelta(seconds=limit_s),
        master_listen_fd=listen_fd,
    )
    return SealedStore(store, env.secret, env.run)


def _watch_for_objections(
    env: RankEnv, limit_s: float, ended: threading.Event, objections: list[str]
) -> None:
    """Appends the objection of another rank to `objections`; returns when `ended` is set.

    It needs its own connection, because gloo waits on the other one.
    """
    with suppress(RuntimeError, TimeoutError):  # the store has ended
        store = _connect_to_store(env, limit_s)
        while not ended.wait(_LISTEN_S):
            if (objection := read_objection(store)) is not None:
                objections.append(objection)
                acknowledge_objection(store, env.rank)
                return


def _bound_socket(env: RankEnv) -> int | None:
    """The descriptor of a socket that is bound to the store's address; None if it is in use.

    A socket of torch would listen on every interface. Warns if other hosts cannot reach the
    address: installers of Debian and Ubuntu give a host the address 127.0.1.1 for its own name.
    """
    if env.listen_fd is not None:
        return env.listen_fd
    try:
        family, address = _resolved(env.host, env.port)
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return None
        raise RankError(
            f"rank 0 of {env.size} cannot listen at MASTER_ADDR={env.host}, MASTER_PORT="
            f"{env.port}: {error.strerror or error}; give an address of rank 0's own host"
        ) from error
    if _is_loopback(address) and not is_one_host(env.size):
        logger.warning(
            "MASTER_ADDR=%s is %s on rank 0's host, which ranks of other hosts cannot reach; set "
            "MASTER_ADDR to another address of this host on all ranks (hostname -I)",
            env.host,
            address[0],
        )
    return sock.detach()


def _wait_for_store(env: RankEnv, limit_s: float) -> None:
    """Waits until a process listens at the store's address; otherwise torch would print warnings.

    Raises: TimeoutError.
    """
    deadline = time.monotonic() + limit_s
    while True:
        try:
            socket.create_connection((env.host, env.port), timeout=limit_s).close()
            return
        except OSError as error:
            if time.monotonic() >= deadline:
                raise TimeoutError from error
            time.sleep(_CONNECT_S)


def _why_not_joined(env: RankEnv, missing: set[int], timeouts: Timeouts) -> str:
    address = f"MASTER_ADDR={env.host}, MASTER_PORT={env.port}"
    if len(missing) == env.size:
        who = (
            f"rank {env.rank} of {env.size} found no other rank: {_store_owner(env)} did not "
            f"answer at {address}"
        )
    elif missing:
        who = f"{named_ranks(missing, env.size)} never joined"
    else:
        who = f"all {env.size} ranks have joined, but at least one rank did not answer"
    secret_hint = " with the same secret file" if SECRET_FILE in os.environ else ""
    return (
        f"{who} within {timeouts.start_s:g} s; check that every rank was started{secret_hint}, and "
        "what each one printed (--start-timeout waits longer)"
    )


def _store_owner(env: RankEnv) -> str:
    return "torchrun's agent" if env.has_agent_store else f"rank 0 of {env.size}"


def _leave() -> None:
    fs_init.destroy_model_parallel()
    dist.destroy_process_group()
