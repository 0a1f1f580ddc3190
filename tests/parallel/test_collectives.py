"""Collectives return the sum, the parts or the source's values, bitwise equal on all ranks."""

import os
import random
import signal
import time
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
from ranks import SILENCE_S, SOON_S, RankFailed, Ranks, call_late_after
from torch import Tensor

from parallel_llama.parallel.collectives import (
    MAX_MESSAGE_BYTES,
    Communicator,
    Solo,
    broadcast_bytes,
)
from parallel_llama.parallel.failures import RankError
from parallel_llama.parallel.process_group import ProcessGroup
from parallel_llama.parallel.shared_memory import SHARED_SUM_BYTES, SLOT_BYTES
from parallel_llama.parallel.timeouts import Timeouts

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64]

# Numbers of values, so that pieces end before, at and after the end of a slot and of the shared
# sum.
SIZES = [0, 1, 7, 576, SHARED_SUM_BYTES // 4 - 1, SHARED_SUM_BYTES // 4, 100_003]
BORDERS = [SLOT_BYTES // 4 - 1, SLOT_BYTES // 4, SLOT_BYTES // 4 + 1, 3 * SLOT_BYTES // 4 + 5]

KINDS = [pytest.param(True, id="shared"), pytest.param(False, id="gloo")]


def part(rank: int, n: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """The values of a rank, which every rank can compute."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype.is_floating_point:
        return torch.randn(n, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(-(10**15), 10**15, (n,), generator=generator).to(dtype)


def reduce_sizes(comm: Communicator, sizes: list[int], dtype: torch.dtype) -> list[Tensor]:
    reduced = []
    for n in sizes:
        x = part(comm.rank, n, dtype)
        y = comm.all_reduce(x)
        assert y is x
        reduced.append(x)
    return reduced


def check_sums(
    results: list[list[Tensor]], sizes: list[int], dtype: torch.dtype, half_ulps: float
) -> None:
    size = len(results)
    for index, n in enumerate(sizes):
        parts = [part(rank, n, dtype) for rank in range(size)]
        first = results[0][index]
        for other in results[1:]:
            assert torch.equal(first, other[index]), (n, dtype)
        if not dtype.is_floating_point:
            assert torch.equal(first, torch.stack(parts).sum(0))
            continue
        exact = torch.stack(parts).to(torch.float64).sum(0)
        scale = torch.stack(parts).to(torch.float64).abs().sum(0)
        limit = half_ulps * torch.finfo(dtype).eps / 2 * scale + torch.finfo(dtype).tiny
        assert bool(((first.to(torch.float64) - exact).abs() <= limit).all()), (n, dtype)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7])
def test_sums_are_right_and_the_same_bits_on_every_rank(ranks, size):
    """Half types too are rounded once: the sum is taken in float32."""
    for dtype in DTYPES:
        results = ranks(size).run(reduce_sizes, SIZES, dtype)
        half = dtype in (torch.float16, torch.bfloat16)
        check_sums(results, SIZES, dtype, half_ulps=1.01 if half else 2 * size)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_gloo_sums_are_the_same_bits_on_every_rank(ranks, size):
    for dtype in DTYPES:
        results = ranks(size, shared_memory=False).run(reduce_sizes, SIZES, dtype)
        check_sums(results, SIZES, dtype, half_ulps=2 * size)


@pytest.mark.parametrize("size", [2, 3])
def test_sums_of_tensors_larger_than_a_slot_are_correct(ranks, size):
    results = ranks(size).run(reduce_sizes, BORDERS, torch.float32)
    check_sums(results, BORDERS, torch.float32, half_ulps=2 * size)


def reduce_in_inference_mode_and_out(comm: Communicator) -> list[float]:
    """A view of a slot that is created in inference mode cannot be written outside of it."""
    sums = []
    for inference in (True, True, False, False):  # both slots in each
        with torch.inference_mode(inference):
            sums.append(float(comm.all_reduce(torch.full((3,), comm.rank + 1.0)).sum()))
    return sums


def test_all_reduce_works_in_and_after_inference_mode(ranks):
    assert ranks(2).run(reduce_in_inference_mode_and_out) == [[9.0] * 4] * 2


def move_strided(comm: Communicator) -> tuple[Tensor, Tensor, Tensor]:
    base = torch.arange(24, dtype=torch.float32).view(4, 6) + 100 * comm.rank
    reduced, sent = base.clone(), base.clone()
    comm.all_reduce(reduced[:, ::2])
    comm.broadcast(sent.t()[1:3], src=comm.size - 1)
    return reduced, sent, comm.all_gather(base.t())


@pytest.mark.parametrize("shared_memory", KINDS)
def test_strided_views_are_updated_in_place_without_touching_gaps(ranks, shared_memory):
    bases = [torch.arange(24, dtype=torch.float32).view(4, 6) + 100 * rank for rank in range(3)]
    for rank, (reduced, sent, gathered) in enumerate(ranks(3, shared_memory).run(move_strided)):
        expected = bases[rank].clone()
        expected[:, ::2] = sum(base[:, ::2] for base in bases)
        assert torch.equal(reduced, expected)
        expected = bases[rank].clone()
        expected[:, 1:3] = bases[2][:, 1:3]
        assert torch.equal(sent, expected)
        assert torch.equal(gathered, torch.stack([base.t() for base in bases]))


def gather_and_broadcast(comm: Communicator, sizes: list[int]) -> None:
    for dtype in (*DTYPES, torch.uint8, torch.bool):
        for n in sizes:
            mine = part(comm.rank, n, torch.float32).to(dtype)
            everybody = [part(rank, n, torch.float32).to(dtype) for rank in range(comm.size)]
            gathered = comm.all_gather(mine)
            assert gathered.shape == (comm.size, n) and gathered.dtype == dtype
            assert torch.equal(gathered, torch.stack(everybody)), (dtype, n)
            for src in range(comm.size):
                x = mine.clone()
                assert comm.broadcast(x, src) is x
                assert torch.equal(x, everybody[src]), (dtype, n, src)
    scalar = comm.all_gather(torch.tensor(float(comm.rank)))
    assert scalar.tolist() == [float(rank) for rank in range(comm.size)]


@pytest.mark.parametrize("shared_memory", KINDS)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_gathered_and_broadcast_values_are_exact(ranks, size, shared_memory):
    ranks(size, shared_memory).run(gather_and_broadcast, [0, 1, 9, 1000])


def test_gathered_and_broadcast_values_are_exact_beyond_a_slot(ranks):
    ranks(2).run(gather_and_broadcast, [SLOT_BYTES // 2 + 3])


def race(comm: Communicator, seed: int, n_turns: int, delay_s: float) -> None:
    """Runs and checks random collectives back to back; ranks are randomly late."""
    common, own = random.Random(seed), random.Random(1000 * seed + comm.rank)
    for exchange in range(n_turns):
        kind = common.choice(["all_reduce", "all_reduce", "all_gather", "broadcast", "barrier"])
        n = common.choice([1, 2, 31, 576, 2000, SHARED_SUM_BYTES // 4 + 3])
        src = common.randrange(comm.size)
        base = torch.arange(n, dtype=torch.float32) % 1000
        mine = base + (exchange + comm.rank)
        if own.random() < delay_s * 50:
            time.sleep(own.random() * delay_s)
        if kind == "all_reduce":
            expected = base * comm.size + (exchange * comm.size + sum(range(comm.size)))
            assert torch.equal(comm.all_reduce(mine), expected), (exchange, kind, n)
        elif kind == "all_gather":
            everybody = torch.stack([base + (exchange + rank) for rank in range(comm.size)])
            assert torch.equal(comm.all_gather(mine), everybody), (exchange, kind, n)
        elif kind == "broadcast":
            assert torch.equal(comm.broadcast(mine, src), base + (exchange + src)), (
                exchange,
                kind,
                n,
            )
        else:
            comm.barrier()


@pytest.mark.parametrize("size", [2, 3, 5])
def test_two_thousand_collectives_back_to_back_do_not_mix(ranks, size):
    ranks(size).run(race, 1, 2000, 0.0)


@pytest.mark.parametrize("size", [2, 3])
def test_random_delays_of_ranks_change_no_result(ranks, size):
    """Delays from microseconds to 4 ms pass through spinning, yielding and sleeping."""
    ranks(size).run(race, 2, 400, 0.004)


def go_different_ways(comm: Communicator) -> None:
    if comm.rank == 1:
        comm.all_gather(torch.zeros(3))
    else:
        comm.all_reduce(torch.zeros(5))


def test_ranks_in_different_collectives_report_both_calls(ranks):
    """Without signatures, a rank would read the other rank's slot as data of its own collective."""
    with pytest.raises(RankFailed, match="different collectives") as raised:
        ranks(2).run(go_different_ways)
    assert "all_gather of 12 values of torch.uint8" in str(raised.value)
    assert "all_reduce of 5 values of torch.float32" in str(raised.value)


def send_bytes(comm: Communicator, messages: list[bytes]) -> list[bytes]:
    return [broadcast_bytes(comm, m if comm.rank == 0 else None) for m in messages]


@pytest.mark.parametrize("shared_memory", KINDS)
def test_broadcast_bytes_delivers_whole_messages(ranks, shared_memory):
    messages = [b"", b"\0", b"llama" * 1000, bytes(range(256)) * (SLOT_BYTES // 200)]
    for received in ranks(2, shared_memory).run(send_bytes, messages):
        assert received == messages


@dataclass
class Announcing(Solo):
    """Receives a length from a rank 0 that does not exist."""

    announced: int
    rank: int = 1
    size: int = 2
    seen: list[int] = field(default_factory=list)

    def broadcast(self, x: Tensor, src: int = 0, *, no_timeout: bool = False) -> Tensor:
        assert src == 0 and not no_timeout
        self.seen.append(x.numel())
        return x.fill_(self.announced)


@pytest.mark.parametrize("length", [-1, MAX_MESSAGE_BYTES + 1, 2**62])
def test_impossible_message_length_is_refused_before_allocation(length):
    comm = Announcing(length)
    with pytest.raises(RankError, match=f"message of {length} bytes"):
        broadcast_bytes(comm, None)
    assert comm.seen == [1]


def test_rank_0_cannot_broadcast_none():
    with pytest.raises(ValueError, match="broadcasts nothing"):
        broadcast_bytes(Solo(), None)


def wait_for_a_late_word(comm: Communicator) -> float:
    """Rank 0 broadcasts after more time than a collective may take."""
    comm.barrier()
    call_late_after(comm, 0.5)
    started = time.monotonic()
    if comm.rank == 0:
        time.sleep(1.5)
    word = broadcast_bytes(comm, b"word" if comm.rank == 0 else None, no_timeout=True)
    waited = time.monotonic() - started
    call_late_after(comm, SILENCE_S)
    assert word == b"word"
    assert float(comm.all_reduce(torch.ones(1))) == comm.size
    return waited


@pytest.mark.parametrize("shared_memory", KINDS)
def test_idle_rank_may_wait_longer_than_the_timeout(ranks, shared_memory):
    """Rank 0 may wait for a user for hours, which the other ranks must not treat as a fault."""
    for waited in ranks(2, shared_memory).run(wait_for_a_late_word):
        assert waited > 1.0


def load_for_long(comm: Communicator) -> float:
    """Rank 1 loads for longer than the timeout and sends keepalives; the others wait."""
    call_late_after(comm, 3)
    started = time.monotonic()
    if comm.rank == 1:
        for _ in range(40):
            time.sleep(0.1)
            comm.keepalive()
    comm.barrier()
    call_late_after(comm, SILENCE_S)
    assert float(comm.all_reduce(torch.ones(1))) == comm.size
    return time.monotonic() - started


@pytest.mark.parametrize("shared_memory", KINDS)
def test_loading_rank_that_sends_keepalives_is_not_late(ranks, shared_memory):
    """Ranks load at different speeds."""
    for waited in ranks(3, shared_memory).run(load_for_long):
        assert waited > 3.5


def stop_loading(comm: Communicator) -> tuple[float, str]:
    """Rank 1 hangs while it loads."""
    if comm.rank == 1:
        comm.keepalive()
        time.sleep(1000)
    call_late_after(comm, 1.5)
    started = time.monotonic()
    try:
        comm.barrier()
    except RankError as error:
        return time.monotonic() - started, str(error)
    raise AssertionError("nobody noticed")


@pytest.mark.parametrize("shared_memory", KINDS)
def test_rank_that_hangs_while_loading_is_named(shared_memory):
    with Ranks(3, shared_memory) as pool:
        for rank, outcome in enumerate(pool.outcomes(stop_loading, lost=[1])):
            if rank != 1:
                waited, message = outcome
                assert 1.4 < waited < SOON_S
                assert message.startswith("rank 1 of 3 is late")


def fall_silent(comm: Communicator, number: int) -> tuple[float, str]:
    """Rank 1 sends itself a signal, and the others continue."""
    comm.barrier()
    started = time.monotonic()
    if comm.rank == 1:
        os.kill(os.getpid(), number)
        time.sleep(1000)
    call_late_after(comm, 1.5)
    try:
        while True:
            comm.all_reduce(torch.ones(8))
    except RankError as error:
        return time.monotonic() - started, str(error)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_gloo_names_the_rank_that_has_died_or_is_stopped(number):
    """The error message of gloo has an address and a port, but no rank."""
    with Ranks(3, False) as pool:
        for rank, outcome in enumerate(pool.outcomes(fall_silent, number, lost=[1])):
            if rank != 1:
                waited, message = outcome
                assert waited < SOON_S
                assert "of 3: rank 1 has died, is stopped or cannot be reached" in message


def notice_late(comm: Communicator) -> tuple[float, float, str]:
    """Rank 2 dies, and rank 1 calls the collective a second later."""
    comm.barrier()
    if comm.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1.0 if comm.rank == 1 else 0.0)
    called_s = time.monotonic()
    try:
        while True:
            comm.all_reduce(torch.ones(8))
    except RankError as error:
        return called_s, time.monotonic(), str(error)


def test_rank_0_leaves_after_all_ranks_have_named_the_lost_rank():
    """The heartbeats of all ranks end with the store, which rank 0 may own."""
    with Ranks(3, False) as pool:
        first, last, _ = pool.outcomes(notice_late, lost=[2])
    for _, _, message in (first, last):
        assert "of 3: rank 2 has died, is stopped or cannot be reached" in message
    assert first[1] > last[0] + 1.5
    assert last[1] - last[0] < SOON_S


class SilentStore:
    """A store that never answers."""

    def set(self, *_: str) -> None:
        time.sleep(1000)

    check = get = set


def lose_rank_1_and_the_store(comm: Communicator) -> tuple[float, str]:
    """Rank 1 dies, and rank 0 cannot read the heartbeats."""
    group = ProcessGroup(dist.group.WORLD, SilentStore(), Timeouts(), lambda: None)
    comm.barrier()
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    try:
        while True:
            group.all_reduce(torch.ones(8))
    except RankError as error:
        return time.monotonic() - started, str(error)


def test_rank_without_the_store_waits_for_it_once():
    """Regression: after 5 s for the heartbeats, the rank waited 5 s more to report the failure."""
    with Ranks(2, False) as pool:
        waited, message = pool.outcomes(lose_rank_1_and_the_store, lost=[1])[0]
    assert "the store of the ranks does not answer" in message
    assert 4 < waited < 8


def lose_a_rank_while_idle(comm: Communicator) -> str:
    """Rank 1 dies, and the others check for it between collectives."""
    comm.barrier()
    comm.require_alive()
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    deadline = time.monotonic() + SOON_S
    while time.monotonic() < deadline:
        try:
            comm.require_alive()
        except RankError as error:
            return str(error)
        time.sleep(0.1)
    raise AssertionError("nobody noticed")


@pytest.mark.parametrize("shared_memory", KINDS)
def test_rank_that_dies_between_collectives_is_named(shared_memory):
    with Ranks(3, shared_memory) as pool:
        for rank, outcome in enumerate(pool.outcomes(lose_a_rank_while_idle, lost=[1])):
            if rank != 1:
                assert outcome.startswith("rank 1 of 3 has died")


def take_turns(comm: Communicator) -> None:
    for exchange in range(50):
        word = b"%d" % exchange if comm.rank == 0 else None
        assert broadcast_bytes(comm, word, no_timeout=True) == b"%d" % exchange
        assert float(comm.all_reduce(torch.ones(1))) == comm.size


@pytest.mark.parametrize("shared_memory", KINDS)
def test_collectives_with_and_without_timeout_can_alternate(ranks, shared_memory):
    ranks(3, shared_memory).run(take_turns)


def test_solo_collectives_return_the_input_and_gather_a_copy():
    comm = Solo()
    x = torch.arange(6.0).view(2, 3)
    assert comm.all_reduce(x) is x and comm.broadcast(x) is x
    gathered = comm.all_gather(x.t())
    assert gathered.shape == (1, 3, 2)
    gathered.zero_()
    assert x.sum() == 15
