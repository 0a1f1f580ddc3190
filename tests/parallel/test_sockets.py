"""Sockets between ranks of several hosts: equal bits, named faults, only authenticated peers."""

import hashlib
import os
import random
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from ipaddress import IPv4Address
from pathlib import Path

import pytest
import torch
from ranks import SOON_S, Ranks
from test_shared_memory import (
    compute_and_idle,
    compute_for_long,
    idle_and_compute,
    overlap_and_idle,
    step_and_hang,
    wait_for_rank_0,
)
from torch import Tensor

from parallel_llama.ops import CPUOps
from parallel_llama.parallel import sockets
from parallel_llama.parallel.authenticated_sockets import NotConnected, connect_all, listen
from parallel_llama.parallel.collectives import Communicator
from parallel_llama.parallel.failures import RankError
from parallel_llama.parallel.process_group import ProcessGroup
from parallel_llama.parallel.sockets import MAX_BYTES, Endpoint, Sockets, connect
from parallel_llama.parallel.stage_group import stage_group
from parallel_llama.parallel.timeouts import Timeouts
from parallel_llama.parallel.wait_policy import WaitPolicy

LOOPBACK = IPv4Address("127.0.0.1")
KEY = b"a key of 32 bytes, as a run has "
LIMIT_S = 200
ROOT = Path(__file__).parents[2]
WIDTHS = 5, 0, 3, 2


def over_sockets(group: Communicator, hosts: str, step_s: float = LIMIT_S) -> Sockets:
    """A group of ranks; rank r is on the host hosts[r]."""
    assert isinstance(group, ProcessGroup)
    endpoint = Endpoint(LOOPBACK, KEY, hosts[group.rank])
    comm = connect(group, endpoint, Timeouts(step_s, LIMIT_S))
    assert isinstance(comm, Sockets)
    return comm


def normal(rank: int, seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def exchange_all_kinds(
    group: Communicator, hosts: str, by_python: set[int], most_late_s: float
) -> bool:
    """Compares collectives with locally computed results; some ranks replay kernels."""
    comm, rng, size = over_sockets(group, hosts), random.Random(group.rank), group.size
    ops, widths = CPUOps(torch.float32, 4, {1}), WIDTHS[:size]
    x, columns = torch.empty(1, 1001), torch.empty(2, widths[comm.rank])
    with ops.recording() as recording:
        ops.all_reduce(x, comm)
        whole = ops.gather_columns(columns, widths, comm)
    for turn in range(6):
        parts = [normal(rank, turn, 1, 1001) for rank in range(size)]
        pieces = [normal(rank, turn, 2, widths[rank]) for rank in range(size)]
        x.copy_(parts[comm.rank])
        columns.copy_(pieces[comm.rank])
        time.sleep(rng.random() * most_late_s)
        if comm.rank in by_python:
            comm.all_reduce(x)
            whole = comm.gather_columns(columns, widths)
        else:
            recording.replay()
        assert torch.equal(x, sum(parts[1:], parts[0]))
        assert torch.equal(whole, torch.cat(pieces, 1))
        sent = comm.broadcast(torch.full((3,), comm.rank), src=turn % size, no_timeout=turn > 3)
        assert sent.tolist() == [turn % size] * 3
        assert comm.all_gather(torch.tensor([comm.rank > 0])).tolist() == [
            [rank > 0] for rank in range(size)
        ]
        for n in (3, MAX_BYTES // 4):  # columns of one rank; the last are larger than one message
            own = torch.full((2, n * (comm.rank == turn % size)), float(comm.rank))
            sent = comm.gather_columns(own, [n * (rank == turn % size) for rank in range(size)])
            assert torch.equal(sent, torch.full((2, n), float(turn % size)))
    halves = [normal(rank, 0, 64, dtype=torch.float16) for rank in range(size)]
    own = comm.all_reduce(halves[comm.rank].clone())
    assert torch.equal(own, sum(half.float() for half in halves).half())
    for n in (0, MAX_BYTES // 8 + 1):  # empty, and larger than one message
        assert torch.equal(comm.all_reduce(torch.full((n,), 1)), torch.full((n,), size))
    comm.barrier()
    return True


@pytest.mark.parametrize(
    ("hosts", "by_python", "most_late_s"),
    [
        ("abc", {0, 1, 2}, 0.0),
        ("abc", set(), 0.0),
        ("abc", {1}, 0.005),
        ("aab", {0, 1, 2}, 0.0),
        ("aab", set(), 0.0),
        ("aba", {1}, 0.005),
        ("aabb", set(), 0.0),
        ("abba", {1, 2}, 0.005),
    ],
)
def test_socket_collectives_are_bitwise_equal_in_kernels_and_python(
    ranks, hosts, by_python, most_late_s
):
    pool = ranks(len(hosts), shared_memory=False)
    assert pool.run(exchange_all_kinds, hosts, by_python, most_late_s) == [True] * len(hosts)


def go_wrong(group: Communicator, hosts: str, fault: str) -> str:
    """Rank 1 dies, stops or calls another collective; returns what the others report."""
    comm = over_sockets(group, hosts, 1.5)
    comm.all_reduce(torch.ones(4))
    if comm.rank == 1 and fault.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, fault))
    try:
        for _ in range(3):
            if comm.rank == 1 and fault == "broadcast":
                comm.broadcast(torch.ones(4))
            comm.all_reduce(torch.ones(4 + (comm.rank == 1)))
    except RankError as error:
        return str(error)
    raise AssertionError("nobody noticed")


@pytest.mark.parametrize("hosts", ["abc", "aabb"])
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("SIGKILL", "rank 1 of {} has died or left early"),
        ("SIGSTOP", "rank 1 of {} is late: no progress for 1.5 s"),
    ],
)
def test_a_rank_that_fails_is_named_by_all_others(hosts, fault, message):
    with Ranks(len(hosts), False) as pool:
        outcomes = pool.outcomes(go_wrong, hosts, fault, lost=[1])
    for rank in {*range(len(hosts))} - {1}:
        assert message.format(len(hosts)) in outcomes[rank]
        assert f"rank {rank} is in exchange 2, all_reduce of 4 values" in outcomes[rank]


def wait_over_sockets(group: Communicator, what_rank_0_does: Callable[[Communicator], None]) -> str:
    return wait_for_rank_0(over_sockets(group, "aab"), what_rank_0_does)


@pytest.mark.parametrize(
    ("what_rank_0_does", "lost", "outcome"),
    [
        (compute_for_long, [0], "rank 0 of 3 is late: no progress for 1.5 s"),
        (compute_and_idle, [], "it came"),
        (overlap_and_idle, [], "it came"),
        (idle_and_compute, [], "it came"),
        (step_and_hang, [0], "rank 0 of 3 is late: no progress for 1.5 s"),
    ],
)
def test_no_timeout_wait_limits_computing_but_not_idling(what_rank_0_does, lost, outcome):
    """Regression: the first step in a context ended the context for the other ranks."""
    with Ranks(3, False) as pool:
        outcomes = pool.outcomes(wait_over_sockets, what_rank_0_does, lost=lost)
        assert all(each.startswith(outcome) for each in outcomes[1:])


def reduce_in_a_kernel(comm: Sockets) -> None:
    """Completes an exchange in a kernel, after an exchange in Python of fewer bytes."""
    ops, x = CPUOps(torch.float32, 4, {1}), torch.zeros(1, 1001)
    with pytest.MonkeyPatch.context() as monkeypatch:
        # The kernel does not leave the exchange to Python.
        monkeypatch.setattr(sockets, "_KERNEL_TRIES", dict.fromkeys(WaitPolicy, 1 << 20))
        with ops.recording() as recording:
            ops.all_reduce(x, comm)
    comm.broadcast(torch.ones(1))
    recording.replay()


def die_in_a_stage(group: Communicator, is_recorded: bool) -> str:
    """Ranks 0 and 1 are a stage, and rank 1 dies in its exchange while rank 2 waits for rank 0.

    Args:
        is_recorded: whether the last exchange of all ranks before is in a recorded step.
    """
    comm = over_sockets(group, "aab")
    stage = stage_group(comm, [range(2), range(2, 3)], Timeouts(LIMIT_S, LIMIT_S))
    stage.all_reduce(torch.ones(4))
    if is_recorded:
        reduce_in_a_kernel(comm)
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        if comm.rank == 0:
            stage.all_reduce(torch.ones(4))
        comm.broadcast(torch.ones(4))
    except RankError as error:
        comm.close()
        return str(error)
    raise AssertionError("nobody noticed")


@pytest.mark.parametrize("is_recorded", [False, True])
def test_a_rank_that_dies_in_its_stage_is_named_on_other_hosts(is_recorded):
    """Regression: rank 2 named rank 0, which had left only because rank 1 had died."""
    with Ranks(3, False) as pool:
        here, _, elsewhere = pool.outcomes(die_in_a_stage, is_recorded, lost=[1])
    assert here.startswith("rank 1 of 3 has died or left early; rank 0 was waiting for it")
    assert elsewhere.startswith("rank 1 of 3 has died or left early; rank 2 was waiting for it")


@pytest.mark.parametrize("hosts", ["abc", "aab", "aabb"])
@pytest.mark.parametrize("fault", ["another size", "broadcast"])
def test_mismatched_collective_is_reported_before_any_rank_is_late(ranks, hosts, fault):
    """Regression: a rank that waits for a broadcast sends nothing, and the others waited for it.

    A rank that learned of the mismatch from a third rank named two ranks in one collective.
    """
    outcomes = ranks(len(hosts), shared_memory=False).run(go_wrong, hosts, fault)
    for rank, outcome in enumerate(outcomes):
        cause, _, rest = outcome.partition(":")
        assert rest.startswith(" the ranks called different collectives")
        named = re.findall(r"rank (\d)", cause)
        assert len({*named}) == 2 and "1" in named
        kind = "broadcast" if rank == 1 and fault == "broadcast" else "all_reduce"
        assert f"rank {rank} is in exchange 2, {kind} of" in outcome


def finish_late(group: Communicator, hosts: str, idle_s: float) -> str:
    """Rank 2 is still in the first exchange when rank 1 fails in the second.

    Args:
        idle_s: how long rank 0 lets the others wait without a timeout; 0 for no such wait.
    """
    comm = over_sockets(group, hosts, 1.5 if idle_s else SOON_S)
    receive, begun_s = comm._receive, time.monotonic()

    def receive_late(rank: int, n_bytes: int) -> bool:
        is_held = rank == 0 and time.monotonic() < begun_s + idle_s + 0.5
        return not is_held and receive(rank, n_bytes)

    if comm.rank == 2:
        comm._receive = receive_late
    x = torch.full((4,), 1 + comm.rank)
    if idle_s:
        time.sleep(idle_s * (comm.rank == 0))
        comm.broadcast(x, no_timeout=True)
    else:
        comm.all_reduce(x)
    try:
        comm.all_reduce(torch.ones(4 + (comm.rank == 1)))
    except RankError as error:
        return f"{x.tolist()} {error}"
    raise AssertionError("nobody noticed")


@pytest.mark.parametrize(
    ("hosts", "idle_s", "total"), [("abc", 0, 6), ("aabb", 0, 10), ("aabb", 1.7, 1)]
)
def test_a_failure_in_the_next_exchange_does_not_end_the_current_one(ranks, hosts, idle_s, total):
    """Regression: a waiting rank read the failure, and reported an exchange that all finish."""
    outcomes = ranks(len(hosts), shared_memory=False).run(finish_late, hosts, idle_s)
    for rank, outcome in enumerate(outcomes):
        assert outcome.startswith(str([total] * 4))
        assert "the ranks called different collectives" in outcome
        assert f"rank {rank} is in exchange 2, all_reduce of" in outcome


def wait_for_a_message_that_one_rank_has(group: Communicator) -> str:
    """The message of rank 0 reaches rank 1 and not rank 2; then rank 0 does nothing."""
    comm = over_sockets(group, "abc", 1.5)
    receive = comm._receive
    if comm.rank == 2:
        comm._receive = lambda rank, n_bytes: rank != 0 and receive(rank, n_bytes)
    try:
        comm.broadcast(torch.ones(4), no_timeout=True)
        if comm.rank == 0:
            time.sleep(1000)
        comm.all_reduce(torch.ones(4))
    except RankError as error:
        comm.close()
        return str(error)
    raise AssertionError("nobody noticed")


def test_a_failure_in_the_next_exchange_limits_a_wait_without_timeout():
    """Rank 1 is late for the second exchange, so rank 2 must not wait in the first for ever."""
    with Ranks(3, False) as pool:
        outcomes = pool.outcomes(wait_for_a_message_that_one_rank_has, lost=[0])
    for rank, exchange, late in (1, 2, "ranks 0, 2 of 3 are"), (2, 1, "rank 0 of 3 is"):
        assert outcomes[rank].startswith(f"{late} late: no progress for 1.5 s")
        assert f"rank {rank} is in exchange {exchange}, " in outcomes[rank]


def idle_while_rank_1_dies(group: Communicator) -> str:
    """Rank 0 lets the others wait without a timeout, for longer than the limit of a step."""
    comm = over_sockets(group, "abc", 1.5)
    comm.all_reduce(torch.ones(4))
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(4 * (comm.rank == 0))
    try:
        comm.broadcast(torch.ones(4), no_timeout=True)
        comm.all_reduce(torch.ones(4))
    except RankError as error:
        comm.close()
        return str(error)
    raise AssertionError("nobody noticed")


def test_rank_that_dies_during_a_wait_without_timeout_is_named():
    """Rank 0 is not late, because it may wait for a user."""
    with Ranks(3, False) as pool:
        outcomes = pool.outcomes(idle_while_rank_1_dies, lost=[1])
    for rank in (0, 2):
        assert outcomes[rank].startswith("rank 1 of 3 has died or left early")


def receive_a_part(group: Communicator) -> bool:
    """Rank 0 replays the kernel while rank 1 of its host has a part of the message of rank 3."""
    comm = over_sockets(group, "aabb")
    ops, parts = CPUOps(torch.float32, 4, {1}), [normal(rank, 0, 1, 1001) for rank in range(4)]
    x, send = torch.empty(1, 1001), comm._send
    with ops.recording() as recording:
        ops.all_reduce(x, comm)
    x.copy_(parts[comm.rank])

    def has_begun(rank: int) -> bool:
        return comm._headers[0][rank][-1] == 1  # the row has the header of the first exchange

    def send_in_parts(rank: int, n_bytes: int, *, is_receiving: bool) -> bool:
        is_whole = has_begun(0)
        if is_whole:
            time.sleep(0.2)  # for the kernel of rank 0
        return send(rank, n_bytes if is_whole else 80, is_receiving=is_receiving) and is_whole

    if comm.rank == 3:
        comm._send = send_in_parts
        comm.all_reduce(x)
    else:
        while comm.rank == 0 and not (has_begun(1) and has_begun(3)):
            time.sleep(0.001)
        if comm.rank == 0:
            select.select([comm._sockets[2]], [], [])
        recording.replay()
    return torch.equal(x, sum(parts[1:], parts[0]))


def test_kernel_waits_for_messages_that_other_local_ranks_receive(ranks):
    """The header of a message arrives first, so it does not show that the message is complete."""
    assert ranks(4, shared_memory=False).run(receive_a_part) == [True] * 4


def leave_early(group: Communicator) -> float:
    """Rank 2 leaves after the last exchange, while rank 1 still waits for rank 0 of its host."""
    comm, begun_s = over_sockets(group, "aab"), time.monotonic()
    receive = comm._receive

    def receive_late(rank: int, n_bytes: int) -> bool:
        return time.monotonic() > begun_s + 0.3 and receive(rank, n_bytes)

    if comm.rank == 0:
        comm._receive = receive_late
    total = comm.all_reduce(torch.ones(4))
    for own in comm._sockets.values():
        own.close()
    return float(total.sum())


def test_leaving_after_the_last_exchange_fails_no_other_rank(ranks):
    assert ranks(3, shared_memory=False).run(leave_early) == [12.0] * 3


def heard_by_a_stranger(listener: socket.socket, words: bytes) -> bytes:
    """The bytes that the listener sends to an untrusted connection."""
    with socket.create_connection(listener.getsockname()) as stranger:
        stranger.settimeout(SOON_S)
        stranger.sendall(words)
        with suppress(OSError):  # the listener has closed it already
            stranger.shutdown(socket.SHUT_WR)
        heard = b""
        with suppress(ConnectionResetError):  # the listener does not read all `words`
            while piece := stranger.recv(1000):
                heard += piece
        return heard


def test_unauthenticated_connection_gets_no_proof_and_no_rank():
    hello = b"pllama/1" + (1).to_bytes(4, "little") + (0).to_bytes(4, "little") + bytes(32)
    with listen(LOOPBACK) as listener, ThreadPoolExecutor(4) as pool:
        at = listener.getsockname()
        silent = socket.create_connection(at)  # a silent connection must not delay the ranks
        first = pool.submit(connect_all, 0, listener, {1: at}, KEY, SOON_S)
        assert heard_by_a_stranger(listener, b"GET / HTTP/1.1\r\n\r\n" + bytes(64)) == b""
        # The lower rank's random bytes, and nothing after a wrong proof.
        assert len(heard_by_a_stranger(listener, hello + bytes(32))) == len(hello)
        with pytest.raises(NotConnected, match=r"rank 0 at 127\.0\.0\.1"):
            connect_all(1, listener, {0: at}, b"another key", SOON_S)
        assert not first.done()
        second = connect_all(1, listener, {0: at}, KEY, SOON_S)
        second[0].sendall(b"word")
        held = first.result()[1]
        held.settimeout(SOON_S)
        assert held.recv(4) == b"word"
        silent.close()
        held.close()
        second[0].close()


def test_error_names_the_ranks_that_do_not_connect():
    """Regression: callers wrote "cannot connect to rank 1 did not connect"."""
    addresses = {1: ("127.0.0.1", 1), 2: ("127.0.0.1", 1)}
    with (
        listen(LOOPBACK) as listener,
        pytest.raises(NotConnected, match=r"^ranks 1, 2: no connection in time$"),
    ):
        connect_all(0, listener, addresses, KEY, 0.2)


def test_waiting_rank_notices_a_new_order_while_it_dials_a_host_that_drops_packets():
    """Regression: one attempt to connect lasted until the time limit."""

    def receive_order() -> None:
        raise RankError("rank 0 forms a new group")

    with ExitStack() as opened:
        full = opened.enter_context(socket.socket())
        full.bind(("127.0.0.1", 0))
        full.listen(0)  # a full backlog drops packets
        for _ in range(4):
            waiting = opened.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        listener = opened.enter_context(listen(LOOPBACK))
        with pytest.raises(RankError, match="rank 0 forms a new group"):
            connect_all(1, listener, {0: full.getsockname()}, KEY, 20.0, receive_order)


def test_all_ranks_use_gloo_if_a_rank_cannot_be_reached(ranks):
    assert ranks(2, shared_memory=False).run(reach_no_other_rank) == ["ProcessGroup"] * 2


def reach_no_other_rank(group: Communicator) -> str:
    assert isinstance(group, ProcessGroup)
    key = KEY + bytes([group.rank])  # each refuses the other
    return type(connect(group, Endpoint(LOOPBACK, key, str(group.rank)), Timeouts(2, 2))).__name__


def answers(hosts: list[str], layout: list[int], folder: Path, *more: str) -> tuple[str, int]:
    """The hash of what ranks on these hosts generate, and the bytes that host 0 has sent so far.

    `more` are further flags.

    Each host has its own process ids, so that ranks of two hosts cannot share memory.
    """
    secret = folder / "secret"
    secret.write_text("0" * 64)
    secret.chmod(0o600)
    env = {
        **os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": str(len(layout)), "MASTER_ADDR": "10.231.0.1", "MASTER_PORT": "29500",
        "PARALLEL_LLAMA_SECRET_FILE": str(secret),
    }  # fmt: skip
    env.pop("GLOO_SOCKET_IFNAME", None)
    flags = "--prompt", "Once upon a time", "--max-tokens", "8", "--seed", "1", *more
    program = sys.executable, "-m", "parallel_llama", "generate", "--exact", "--json", *flags
    enter = "unshare", "--pid", "--fork", "--kill-child", "--mount-proc"
    processes = []
    for host in sorted(set(layout)):
        ranks = " ".join(str(rank) for rank, other in enumerate(layout) if other == host)
        start = f'for rank in {ranks}; do RANK=$rank "$@" & pids="$pids $!"; done; '
        start += "for pid in $pids; do wait $pid || exit; done"
        processes.append(
            subprocess.Popen(
                ["ip", "netns", "exec", hosts[host], *enter, "sh", "-c", start, "sh", *program],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=env,
            )
        )
    try:
        said = [process.communicate(timeout=LIMIT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0] * len(processes), said
    counted = ["ip", "netns", "exec", hosts[0], "cat", "/sys/class/net/v0/statistics/tx_bytes"]
    n_bytes = int(subprocess.run(counted, check=True, capture_output=True).stdout)
    return hashlib.sha256(said[0][0]).hexdigest(), n_bytes


@pytest.mark.slow
def test_two_hosts_equal_one_host_and_send_each_value_once(hosts, tmp_path):
    alone, idle = answers(hosts, [0], tmp_path)
    assert idle < 100_000
    for layout in ([0, 0, 1], [0, 0, 1, 1]):
        before = idle
        found, idle = answers(hosts, layout, tmp_path)
        assert found == alone
        # Two exchanges of 576 and 1536 inputs and of 576 outputs in each of 30 layers, for 12
        # tokens. Each value crosses the link once, whatever the number of ranks that need it.
        n_bytes = 30 * 4 * (576 + 1536 + 2 * 576) * layout.count(0) / len(layout)
        assert 8 < (idle - before) / n_bytes < 16
    found, piped = answers(hosts, [0, 0, 1, 1], tmp_path, "--pp", "2")
    assert found == alone
    # The residual stream crosses the link after each of two stages, not twice in every layer.
    assert (piped - idle) < (idle - before) / 4


def test_note_waits_until_the_other_rank_has_read_an_exchange():
    """Regression: the note was lost, and an idle rank 0 that had computed was late."""
    ours, theirs = socket.socketpair()
    with ours, theirs, ThreadPoolExecutor() as pool:
        ours.setblocking(False)
        theirs.settimeout(SOON_S)
        n_sent = 0
        with suppress(BlockingIOError):
            while True:
                n_sent += ours.send(bytes(1 << 16))
        comm = object.__new__(Sockets)
        comm.size, comm._cells = 2, [0] * 3 * sockets.CELLS
        comm._sockets, comm._timeouts = {1: ours}, Timeouts(SOON_S, SOON_S)
        sent = pool.submit(comm._send_note, sockets._COMPUTING)
        time.sleep(0.2)  # until it waits
        while n_sent:
            n_sent -= len(theirs.recv(min(n_sent, 1 << 16)))
        sent.result()
        assert theirs.recv(64) == sockets._HEADER.pack(sockets._COMPUTING, 0)
