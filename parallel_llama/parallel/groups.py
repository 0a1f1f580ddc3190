"""How a rank finds the others and becomes part of their group.

The only place that initialises torch.distributed and fairscale. Under torchrun the ranks meet at
torchrun's own store; elsewhere at a store of rank 0, which listens at the address of MASTER_ADDR
alone.
"""

import errno
import fcntl
import ipaddress
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
from fairscale.nn.model_parallel import initialize as fairscale_groups
from torch.distributed import PrefixStore, Store, TCPStore

from parallel_llama.errors import CheckpointError, UsageError, listed_ranks
from parallel_llama.parallel.collectives import ByDevice, Communicator, Solo, Timeouts
from parallel_llama.parallel.current_device import use_device
from parallel_llama.parallel.failures import RankError, first_line
from parallel_llama.parallel.handshake import (
    RankInfo,
    read_objection,
    rendezvous,
    say_goodbye,
    tell,
    telling,
)
from parallel_llama.parallel.one_shot import (
    seconds_on_card,
    symmetric_memory,
    with_one_shot_sums,
)
from parallel_llama.parallel.place import (
    SECRET_FILE,
    Place,
    end_with_parent,
    is_under_torchrun,
    is_watched,
    place_in_environment,
)
from parallel_llama.parallel.process_group import ProcessGroup, within
from parallel_llama.parallel.sealed_store import SealedStore
from parallel_llama.parallel.shared_memory import share

_CONNECT_S = 0.05
_LISTEN_S = 0.1
_SIOCGIFADDR = 0x8915  # Linux's request for the address of an interface
# For a rank that gives up before it joins, until the other ranks have come to read why.
_TELL_S = 15.0

_CPU = torch.device("cpu")


_has_begun = False  # whether this process has called `join`


def join(
    device: torch.device = _CPU,
    *,
    place: Place | None = None,
    facts: Mapping[str, str] | None = None,
    timeout_s: float | None = None,
    look: Callable[[Sequence[int]], None] = lambda _: None,
) -> Communicator:
    """The group of all ranks; one rank alone where nobody has started others.

    `device` is where the model's tensors will be. `place` is this process's own, and without it the
    environment's. `facts` must be the same on all ranks. `look` is called with the ranks that are
    missing while they are awaited, and may raise. No rank is waited for longer than `timeout_s`, or
    the default of `Timeouts`.

    Raises: UsageError for an incomplete environment; RankError naming ranks that never came, or
    that are about to do something else.
    Collective: every rank calls it, once.
    """
    global _has_begun
    _has_begun = True
    place = place or place_in_environment()
    use_device(device)
    if place.size == 1:
        return Solo()
    if dist.is_initialized():
        raise RuntimeError("this process has joined its group already; close that one first")
    if is_under_torchrun():
        end_with_parent()
    if place.rank > 0 and threading.current_thread() is threading.main_thread():
        # Ctrl-C reaches every process of the terminal; rank 0 alone decides what it means.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    timeouts = Timeouts.of(timeout_s)
    missing = set(range(place.size))

    heard: list[str] = []  # why another rank has given up
    ended = threading.Event()

    def come_together() -> Communicator:
        use_device(device)  # this is a thread of its own
        store = _open_store(place, timeouts.start_s)
        with telling(store, place.rank, place.size):
            rendezvous(
                store, RankInfo.of_this_process(place.rank, place.size, facts or {}), missing
            )
            # gloo waits for a rank that has given up, as long as for one that is late.
            how = place, timeouts.start_s, ended, heard
            threading.Thread(target=_listen, args=how, daemon=True).start()
            with _gloo_on_interface_to(place):
                return form_group(place.rank, place.size, store, device, timeouts)

    def look_around() -> None:
        if heard:
            raise RankError(heard[0])
        look(sorted(missing))

    try:
        return within(timeouts.start_s, come_together, look_around)
    except TimeoutError as error:
        raise RankError(_never_came(place, missing, timeouts)) from error
    except dist.DistNetworkError as error:
        others = f"; rank {listed_ranks(missing)} had not joined" if missing else ""
        raise RankError(
            f"{_store_owner(place)} has died or given up, and with it the store where the ranks "
            f"meet{others}"
        ) from error
    finally:
        ended.set()


def give_up(why: str) -> None:
    """Tell the other ranks why this one will never join; returns when they have read it.

    Only where nobody else ends ranks when one fails, as torchrun and our own launcher do. Rank 0
    keeps the store for them meanwhile. It waits `_TELL_S` seconds at the most.
    """
    if _has_begun or is_watched():
        return

    def tell_all() -> None:
        place = place_in_environment()
        if place.size > 1:
            store = _open_store(place, _TELL_S)
            wait_s = 0.0 if place.rank > 0 else _TELL_S
            tell(store, place.rank, place.size, f"rank {place.rank} of {place.size}: {why}", wait_s)

    with suppress(
        UsageError, CheckpointError, RuntimeError, TimeoutError
    ):  # nobody is there to read it
        within(_TELL_S, tell_all)


def form_group(
    rank: int,
    size: int,
    store: Store,
    device: torch.device = _CPU,
    timeouts: Timeouts = Timeouts(),  # noqa: B008, it is frozen
    shared_memory: bool = True,
) -> Communicator:
    """The group of `size` ranks that have a store in common.

    Without `shared_memory` the ranks of one host talk through gloo, as those of several do.

    Raises: RankError if they cannot connect.
    Collective: every rank calls it, with the same arguments but `rank`.
    """
    timeout = timedelta(seconds=timeouts.start_s)
    # Both back ends under CUDA: what is not a tensor of the model travels on the CPU.
    has_card = device.type == "cuda"
    backend = "cpu:gloo,cuda:nccl" if has_card else "gloo"
    try:
        with _silent_stdout(), _nccl_leaves_errors_to_us():
            dist.init_process_group(
                backend,
                store=PrefixStore("group", store),
                rank=rank,
                world_size=size,
                timeout=timeout,
            )
            fairscale_groups.initialize_model_parallel(size)
    except RankError:
        raise
    except RuntimeError as error:
        raise RankError(
            f"rank {rank} of {size} met the others and cannot connect to them: "
            f"{first_line(error, 300)}; where hosts have several networks, GLOO_SOCKET_IFNAME "
            "names the one to use"
        ) from error
    group = fairscale_groups.get_model_parallel_group()
    for own in (
        group,
        fairscale_groups.get_data_parallel_group(),
        fairscale_groups.get_pipeline_parallel_group(),
    ):
        # fairscale's groups start with torch's default of 30 minutes.
        own.set_timeout(timedelta(seconds=timeouts.step_s))
    abort = partial(_abort, group, device) if has_card else None
    comm = ProcessGroup(group, store, timeouts, _leave, abort)
    try:
        # Nobody goes on before all have met: the store may end with rank 0.
        comm.barrier()
        host = share(comm, timeouts) if shared_memory else comm
        if not has_card:
            return host
        comm.all_gather(torch.zeros(1, device=device))  # NCCL connects at the first collective
        cards: Communicator = comm
        if host is not comm:  # all on one host, where cards may read each other's memory
            shared = partial(symmetric_memory, group, device)
            cards = with_one_shot_sums(comm, device, shared, seconds_on_card)
        return ByDevice(host, cards, comm.require_whole)
    except RankError:
        comm.close()
        raise


@contextmanager
def _nccl_leaves_errors_to_us() -> Iterator[None]:
    """Keeps torch's watchdog from ending the process of a rank whose peer is lost.

    It would end a user's program 30 s later, with a page of C++. Nor may its threads look for
    dumps at the store, which is Python's and out of reach once the interpreter ends. torch reads
    these once, when it makes a group.
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
def _gloo_on_interface_to(place: Place) -> Iterator[None]:
    """Lets gloo use the network by which this rank reaches the store.

    By itself it takes the address of the host's name, often 127.0.1.1, which no other host reaches.
    GLOO_SOCKET_IFNAME goes first where it is set.
    """
    name = "GLOO_SOCKET_IFNAME"
    found = None if name in os.environ else _interface_to(place)
    if found is None:
        yield
        return
    os.environ[name] = found
    try:
        yield
    finally:
        del os.environ[name]


def _interface_to(place: Place) -> str | None:
    """The interface by which this rank reaches the store; None where that is not by IPv4."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((place.host, place.port))  # sends nothing
            own = ipaddress.IPv4Address(probe.getsockname()[0])
            for _, name in socket.if_nameindex():
                request = struct.pack("256s", name.encode())
                with suppress(OSError):  # it has no address
                    reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
                    address = ipaddress.IPv4Address(reply[20:24])
                    if address == own or (address.is_loopback and own.is_loopback):
                        return name
    except OSError:
        pass
    return None


def _abort(group: dist.ProcessGroup, device: torch.device) -> None:
    """End what is queued on this rank's card, and with it the group."""
    group._get_backend(device).abort()


@contextmanager
def _silent_stdout() -> Iterator[None]:
    """Keeps libraries from announcing themselves where answers go: fairscale, and gloo from C++."""
    try:
        kept = os.dup(1)
    except OSError:  # it is closed
        yield
        return
    if sys.stdout is not None:
        sys.stdout.flush()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    try:
        with redirect_stdout(StringIO()):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _open_store(place: Place, limit_s: float) -> Store:
    """The store where the ranks meet: rank 0 keeps it, unless torchrun does."""
    bound = None if place.is_served or place.rank > 0 else _bound_socket(place)
    return _connect(place, limit_s, bound)


def _connect(place: Place, limit_s: float, bound: int | None = None) -> Store:
    """A connection to the store; with a socket that is `bound`, the store itself."""
    if bound is None:
        _wait_for_store(place, limit_s)
    store = TCPStore(
        place.host,
        place.port,
        is_master=bound is not None,
        wait_for_workers=False,
        timeout=timedelta(seconds=limit_s),
        master_listen_fd=bound,
    )
    return SealedStore(store, place.secret, place.run)


def _listen(place: Place, limit_s: float, ended: threading.Event, heard: list[str]) -> None:
    """Add to `heard` why another rank gives up, until this rank has `ended` its start.

    By a connection of its own: the rank's other one waits for gloo.
    """
    with suppress(RuntimeError, TimeoutError):  # the store has ended
        store = _connect(place, limit_s)
        while not ended.wait(_LISTEN_S):
            if (objection := read_objection(store)) is not None:
                heard.append(objection)
                say_goodbye(store, place.rank)
                return


def _bound_socket(place: Place) -> int | None:
    """The number of a socket bound to the meeting place; None if another process listens there.

    Torch's own would listen on every interface, without any authorisation.
    """
    if place.bound is not None:
        return place.bound
    try:
        address = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(address[0], socket.SOCK_STREAM)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address[4])
    except OSError as error:
        if error.errno == errno.EADDRINUSE:  # another rank 0, perhaps: it is met there
            return None
        raise RankError(
            f"rank 0 of {place.size} cannot listen at MASTER_ADDR={place.host}, MASTER_PORT="
            f"{place.port}: {error.strerror or error}; give an address of rank 0's own host"
        ) from error
    return bound.detach()


def _wait_for_store(place: Place, limit_s: float) -> None:
    """Wait until somebody listens at the meeting place; torch's store would complain at length.

    Raises: TimeoutError.
    """
    deadline = time.monotonic() + limit_s
    while True:
        try:
            socket.create_connection((place.host, place.port), timeout=limit_s).close()
            return
        except OSError as error:
            if time.monotonic() >= deadline:
                raise TimeoutError from error
            time.sleep(_CONNECT_S)


def _never_came(place: Place, missing: set[int], timeouts: Timeouts) -> str:
    where = f"MASTER_ADDR={place.host}, MASTER_PORT={place.port}"
    if len(missing) == place.size:
        who = (
            f"rank {place.rank} of {place.size} met nobody: {_store_owner(place)} did not answer "
            f"at {where}"
        )
    elif missing:
        who = f"rank {listed_ranks(missing)} of {place.size} never joined"
    else:
        who = f"the {place.size} ranks met and one of them stopped answering"
    unseen = f", or has another {SECRET_FILE}" if SECRET_FILE in os.environ else ""
    return (
        f"{who} within {timeouts.start_s:g} s; see what it says, or whether it was started"
        f"{unseen} (--timeout waits longer)"
    )


def _store_owner(place: Place) -> str:
    return "torchrun's agent" if place.is_served else f"rank 0 of {place.size}"


def _leave() -> None:
    fairscale_groups.destroy_model_parallel()
    dist.destroy_process_group()
