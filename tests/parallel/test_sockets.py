"""Ranks that do not share memory exchange over sockets: same bits, named faults, no strangers."""

import hashlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from ipaddress import IPv4Address
from pathlib import Path

import pytest
import torch
from ranks import SOON_S, Ranks
from torch import Tensor

from parallel_llama.ops import CPUOps
from parallel_llama.parallel.authenticated_sockets import NotConnected, connect_all, listen
from parallel_llama.parallel.collectives import Communicator
from parallel_llama.parallel.failures import RankError
from parallel_llama.parallel.process_group import ProcessGroup
from parallel_llama.parallel.sockets import MAX_BYTES, Endpoint, Sockets, connect
from parallel_llama.parallel.timeouts import Timeouts

LOOPBACK = IPv4Address("127.0.0.1")
KEY = b"a key of 32 bytes, as a run has "
LIMIT_S = 200
ROOT = Path(__file__).parents[2]
WIDTHS = 5, 0, 3


def over_sockets(group: Communicator, step_s: float = LIMIT_S) -> Sockets:
    assert isinstance(group, ProcessGroup)
    comm = connect(group, Endpoint(LOOPBACK, KEY), Timeouts(step_s, LIMIT_S))
    assert isinstance(comm, Sockets)
    return comm


def normal(rank: int, seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def exchange_all_kinds(group: Communicator, by_python: set[int], most_late_s: float) -> bool:
    """Compares collectives with what every rank can compute; some ranks replay kernels."""
    comm, rng, size = over_sockets(group), random.Random(group.rank), group.size
    ops = CPUOps(torch.float32, 4, {1})
    x, columns = torch.empty(1, 1001), torch.empty(2, WIDTHS[comm.rank])
    with ops.recording() as recording:
        ops.all_reduce(x, comm)
        whole = ops.gather_columns(columns, WIDTHS, comm)
    for turn in range(6):
        parts = [normal(rank, turn, 1, 1001) for rank in range(size)]
        pieces = [normal(rank, turn, 2, WIDTHS[rank]) for rank in range(size)]
        x.copy_(parts[comm.rank])
        columns.copy_(pieces[comm.rank])
        time.sleep(rng.random() * most_late_s)
        if comm.rank in by_python:
            comm.all_reduce(x)
            whole = comm.gather_columns(columns, WIDTHS)
        else:
            recording.replay()
        assert torch.equal(x, parts[0] + parts[1] + parts[2])
        assert torch.equal(whole, torch.cat(pieces, 1))
        sent = comm.broadcast(torch.full((3,), comm.rank), src=turn % size, no_timeout=turn > 3)
        assert sent.tolist() == [turn % size] * 3
        assert comm.all_gather(torch.tensor([comm.rank > 0])).tolist() == [[0], [1], [1]]
    halves = [normal(rank, 0, 64, dtype=torch.float16) for rank in range(size)]
    own = comm.all_reduce(halves[comm.rank].clone())
    assert torch.equal(own, sum(half.float() for half in halves).half())
    for n in (0, MAX_BYTES // 8 + 1):  # nothing, and more than a message has
        assert torch.equal(comm.all_reduce(torch.full((n,), 1)), torch.full((n,), size))
    comm.barrier()
    return True


@pytest.mark.parametrize(
    ("by_python", "most_late_s"), [({0, 1, 2}, 0.0), (set(), 0.0), ({1}, 0.005)]
)
def test_collectives_over_sockets_have_the_same_bits_in_kernels_and_in_python(
    ranks, by_python, most_late_s
):
    pool = ranks(3, shared_memory=False)
    assert pool.run(exchange_all_kinds, by_python, most_late_s) == [True] * 3


def go_wrong(group: Communicator, fault: str) -> str:
    """Rank 1 dies, stops or calls another collective; returns what the others report."""
    comm = over_sockets(group, 1.5)
    comm.all_reduce(torch.ones(4))
    if comm.rank == 1 and fault != "mismatch":
        os.kill(os.getpid(), getattr(signal, fault))
    try:
        for _ in range(3):
            comm.all_reduce(torch.ones(4 + (comm.rank == 1)))
    except RankError as error:
        return str(error)
    raise AssertionError("nobody noticed")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("SIGKILL", "rank 1 of 3 has died or left early"),
        ("SIGSTOP", "rank 1 of 3 is late: no progress for 1.5 s"),
        ("mismatch", "the ranks called different collectives"),
    ],
)
def test_a_rank_that_fails_is_named_by_all_others(fault, message):
    with Ranks(3, False) as pool:
        outcomes = pool.outcomes(go_wrong, fault, lost=[1])
    for rank in (0, 2):
        assert message in outcomes[rank]
        assert f"rank {rank} is in exchange 2, all_reduce of 4 values" in outcomes[rank]


def heard_by_a_stranger(listener: socket.socket, words: bytes) -> bytes:
    """What the listener says to a connection that it cannot trust."""
    with socket.create_connection(listener.getsockname()) as stranger:
        stranger.settimeout(SOON_S)
        stranger.sendall(words)
        stranger.shutdown(socket.SHUT_WR)
        heard = b""
        with suppress(ConnectionResetError):  # it does not read all words
            while piece := stranger.recv(1000):
                heard += piece
        return heard


def test_a_stranger_gets_no_proof_and_no_place():
    hello = b"pllama/1" + (1).to_bytes(4, "little") + (0).to_bytes(4, "little") + bytes(32)
    with listen(LOOPBACK) as listener, ThreadPoolExecutor(4) as pool:
        at = listener.getsockname()
        silent = socket.create_connection(at)  # it must not delay the others
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


def test_a_rank_that_cannot_be_reached_leaves_all_to_gloo(ranks):
    assert ranks(2, shared_memory=False).run(reach_no_other_rank) == ["ProcessGroup"] * 2


def reach_no_other_rank(group: Communicator) -> str:
    assert isinstance(group, ProcessGroup)
    key = KEY + bytes([group.rank])  # each refuses the other
    return type(connect(group, Endpoint(LOOPBACK, key), Timeouts(2, 2))).__name__


def answers(hosts: list[str], layout: list[int], folder: Path) -> tuple[str, int]:
    """The hash of what ranks on these hosts generate, and the bytes that crossed the link.

    Each host has its own process ids, or ranks would find each other's memory.
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
    flags = "--prompt", "Once upon a time", "--max-tokens", "8", "--seed", "1"
    program = sys.executable, "-m", "parallel_llama", "generate", "--exact", "--json", *flags
    enter = "unshare", "--pid", "--fork", "--kill-child", "--mount-proc"
    processes = [
        subprocess.Popen(
            ["ip", "netns", "exec", hosts[host], *enter, *program],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**env, "RANK": str(rank)},
        )
        for rank, host in enumerate(layout)
    ]
    try:
        said = [process.communicate(timeout=LIMIT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0] * len(layout), said
    counted = ["ip", "netns", "exec", hosts[0], "cat", "/sys/class/net/v0/statistics/tx_bytes"]
    n_bytes = int(subprocess.run(counted, check=True, capture_output=True).stdout)
    return hashlib.sha256(said[0][0]).hexdigest(), n_bytes


@pytest.mark.slow
def test_two_hosts_generate_what_one_host_does_and_send_it_over_the_link(hosts, tmp_path):
    alone, idle = answers(hosts, [0], tmp_path)
    assert idle < 100_000
    for layout in ([0, 1], [0, 0, 1]):
        before = idle
        found, idle = answers(hosts, layout, tmp_path)
        assert found == alone
        # Two exchanges of 576 and 1536 inputs and of 576 outputs in each of 30 layers.
        assert idle - before > 8 * 30 * 4 * (576 + 1536 + 2 * 576) / 3
