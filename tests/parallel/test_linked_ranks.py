"""Elastic ranks that are started one by one on two hosts: losing ranks changes no answer."""

import ctypes
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from ipaddress import IPv4Address
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from tiny_folder import write_endless_folder
from torch.distributed import HashStore

from parallel_llama import LLM, SamplingParams
from parallel_llama.cli.arguments import parse_flags
from parallel_llama.cli.main import load_verb
from parallel_llama.engine.llm_config import LLMConfig
from parallel_llama.engine.ranks import Ranks
from parallel_llama.engine.setup import ModelSetup
from parallel_llama.errors import UsageError
from parallel_llama.parallel.failures import RankError
from parallel_llama.parallel.linked_ranks import Links, link_ranks
from parallel_llama.parallel.sealed_store import SealedStore
from parallel_llama.parallel.sockets import MAX_BYTES, Endpoint, Sockets
from parallel_llama.parallel.timeouts import Timeouts
from parallel_llama.request import Completion

LIMIT_S = 200.0
TORCHRUN = {
    "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "1",
}  # fmt: skip


@pytest.fixture(autouse=True)
def kept_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restores the variables that a rank sets, here in the test process, when it joins a group."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_endless_folder(tmp_path_factory.mktemp("models") / "tiny")


def answers(llm: LLM, at_token: Callable[[int], None] = lambda _: None) -> list[Completion]:
    """Greedy and sampled completions, without cache hits, which depend on time."""
    greedy = SamplingParams(max_tokens=120, ignore_eos=True, prompt_logprobs=1)
    params = greedy, replace(greedy, temperature=1.0, seed=1, n=2, logprobs=2)
    requests = [
        llm.input_processor.request(index, "Once upon " * (9 * index + 1), each, 5)
        for index, each in enumerate(params)
    ]
    done, n_tokens = {}, 0
    for output in llm.run(requests):
        n_tokens += len(output.tokens)
        at_token(n_tokens)
        if output.completion is not None:
            key = output.index, output.choice
            done[key] = replace(output.completion, n_cached_tokens=0)
    return [done[key] for key in sorted(done)]


def run_rank(host: str, rank: int, size: int, folder: Path, parent: Connection) -> None:
    """Runs one rank in the network of a host; rank 0 waits for its parent at two token counts."""
    with Path(f"/var/run/netns/{host}").open() as file:
        assert ctypes.CDLL(None).setns(file.fileno(), 0) == 0
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
    os.environ.update(MASTER_ADDR="10.231.0.1", MASTER_PORT="29500")
    torch.set_num_threads(1)
    stops = [70, 200]

    def wait_for_parent(n_tokens: int) -> None:
        if stops and n_tokens >= stops[0]:
            parent.send(stops.pop(0))
            parent.recv()

    with LLM(str(folder), elastic=True, exact=True) as llm:
        parent.send((answers(llm, wait_for_parent), llm.ranks.regroups))


@contextmanager
def started(layout: Sequence[int], hosts: Sequence[str], folder: Path) -> Iterator[tuple]:
    """The connection to rank 0, and the processes of ranks on these hosts."""
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    processes = [
        context.Process(
            target=run_rank, args=(hosts[host], rank, len(layout), folder, theirs), daemon=True
        )
        for rank, host in enumerate(layout)
    ]
    for process in processes:
        process.start()
    try:
        yield ours, processes
        processes[0].join(LIMIT_S)
        assert processes[0].exitcode == 0
    finally:
        for process in processes:
            process.kill()
            process.join()


def received(connection: Connection) -> Any:
    assert connection.poll(LIMIT_S)
    return connection.recv()


def test_a_lost_host_and_a_lost_rank_change_no_bit(folder, hosts):
    """Rank 2 is alone on the second host."""
    outcomes = []
    for layout, victims in (([0], [None, None]), ([0, 0, 1], [2, 1])):
        with started(layout, hosts, folder) as (rank_0, processes):
            for victim in victims:
                received(rank_0)
                if victim is not None:
                    os.kill(processes[victim].pid, signal.SIGKILL)
                rank_0.send("go on")
            outcomes.append(received(rank_0))
    (expected, _), (found, regroups) = outcomes
    assert found == expected
    assert [regroup.tp_size for regroup in regroups] == [2, 1]
    assert regroups[0].lost == "rank 2 of 3 on 10.231.0.2 has ended or cannot be reached"
    assert regroups[1].lost == "rank 1 of 2 on 10.231.0.1 has ended or cannot be reached"


def linked(size: int, timeouts: Timeouts = Timeouts(LIMIT_S, LIMIT_S)) -> list:  # noqa: B008
    """The links and the first group of each rank, in threads."""
    store = SealedStore(HashStore(), b"secret", "run")
    endpoint = Endpoint(IPv4Address("127.0.0.1"), store.key_for("sockets"), "host")
    return on_threads(size, lambda rank: link_ranks(rank, size, store, endpoint, timeouts))


def on_threads(size: int, function: Callable) -> list:
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(function, range(size)))


def close(ranks: list) -> None:
    for links, comm in reversed(ranks):
        comm.close()
        links.close()


@pytest.mark.parametrize("size", [3, 5])
def test_tensors_larger_than_a_message_are_exchanged_in_pieces(size):
    """Regression: ranks without a torch process group could not exchange such tensors."""
    ranks, n = linked(size), MAX_BYTES // 8 * 2 + 3
    parts = [torch.randn(n, dtype=torch.float64) for _ in range(size)]
    widths = [7 + 1000 * (rank == 1) for rank in range(size)]
    columns = [torch.randn(101, width) for width in widths]

    def exchange(rank: int) -> tuple:
        _, comm = ranks[rank]
        sent = torch.arange(n) if rank == 1 else torch.empty(n, dtype=torch.int64)
        return (
            comm.all_reduce(parts[rank].clone()),
            comm.all_gather(parts[rank][None]),
            comm.gather_columns(columns[rank], widths),
            comm.broadcast(sent, src=1),
            comm.all_gather(torch.empty(0)),
            comm.all_gather(torch.tensor([rank % 2 == 0])),
        )

    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    for summed, gathered, whole, sent, nothing, flags in on_threads(size, exchange):
        assert torch.equal(summed, total)
        assert torch.equal(gathered, torch.stack(parts)[:, None])
        assert torch.equal(whole, torch.cat(columns, 1))
        assert torch.equal(sent, torch.arange(n))
        assert nothing.shape == (size, 0)
        assert flags[:, 0].tolist() == [rank % 2 == 0 for rank in range(size)]
    close(ranks)


def test_loading_rank_that_sends_keepalives_is_not_late(monkeypatch):
    monkeypatch.setattr("parallel_llama.parallel.sockets._KEEPALIVE_S", 0.05)
    ranks = linked(3)

    def load(rank: int) -> bool:
        _, comm = ranks[rank]
        comm._timeouts = Timeouts(LIMIT_S, 0.5)
        for _ in range(15 if rank == 1 else 0):
            time.sleep(0.1)
            comm.keepalive()
        comm.barrier()
        return bool(comm.all_gather(torch.tensor([rank])).sum() == 3)

    assert on_threads(3, load) == [True] * 3
    comm = ranks[0][1]
    comm._timeouts = Timeouts(LIMIT_S, 0.3)
    with pytest.raises(RankError, match=r"ranks 1, 2 of 3 are late: no progress for 0\.3 s"):
        comm.barrier()
    close(ranks)


def test_remaining_ranks_form_a_new_group_after_each_loss():
    """Rank 2 reports why it ends; rank 1 is lost while the others form their next group."""
    ranks = linked(4)
    links = ranks[0][0]
    links.require_alive()
    ranks[2][0].send_reason("the KV cache: no memory\n  with a stack")
    ranks[2][0].close()
    ranks[2][1].close()
    for rank in (0, 1, 3):
        with pytest.raises(RankError, match="rank 2 of 4 has died or left early"):
            ranks[rank][1].barrier()
    why = "rank 2 of 4 on 127.0.0.1: the KV cache: no memory"
    with pytest.raises(RankError, match=why):
        links.require_alive()
    assert links.drop_ended(LIMIT_S) == why

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(links.group)
        last = ranks[3][0]
        joining = pool.submit(lambda: last.group(last.latest()))
        assert ranks[1][0].latest().members == (0, 1, 3)
        ranks[1][0].close()
        with pytest.raises(RankError, match="rank 1 of 3"):
            first.result()
        assert links.drop_ended(LIMIT_S) == (
            "rank 1 of 3 on 127.0.0.1 has ended or cannot be reached"
        )
        first = pool.submit(links.group)
        with pytest.raises(RankError, match="rank 0 forms a new group"):
            joining.result()
        comm = last.group(last.latest())
        pair = first.result(), comm
        assert [(own.rank, own.size) for own in pair] == [(0, 2), (1, 2)]
        sums = pool.map(lambda own: own.all_reduce(torch.ones(3)), pair)
        assert [each.tolist() for each in sums] == [[2.0] * 3] * 2
        waiting = pool.submit(comm.barrier)
        first = pool.submit(links.group)
        with pytest.raises(RankError, match="rank 0 forms a new group"):
            waiting.result()
        comm = last.group(last.latest())
        assert first.result().size == 2
    links.close()
    with pytest.raises(RankError, match=r"rank 0 of 4 on 127\.0\.0\.1 has ended"):
        last.latest()
    for each in (*pair, comm, last, ranks[1][1], ranks[3][1], first.result(), ranks[0][1]):
        each.close()


def limit_starts(ranks: list, start_s: float) -> None:
    """Limits how long ranks wait for each other when they form a group, from now on."""
    for own, _ in ranks:
        own._connector = replace(own._connector, timeouts=Timeouts(LIMIT_S, start_s))


def lose(links: Links, lost: tuple) -> str | None:
    """Ends one rank. Returns: why, for rank 0."""
    close([lost])
    return links.drop_ended(LIMIT_S)


def test_new_group_waits_for_a_rank_that_still_loads(monkeypatch):
    """Regression: the others gave up after the limit. Rank 1 is lost while they wait for rank 3."""
    monkeypatch.setattr("parallel_llama.parallel.sockets._KEEPALIVE_S", 0.05)
    ranks = linked(4)
    limit_starts(ranks, 3.0)
    links, waiting, last = ranks[0][0], ranks[1][0], ranks[3][0]
    has_loaded = Event()

    def load_and_join() -> Sockets:
        while not has_loaded.wait(0.05):
            last.keepalive()
        with pytest.raises(RankError):
            ranks[3][1].barrier()
        return last.group(last.latest())

    lose(links, ranks[2])
    with ThreadPoolExecutor(3) as pool:
        joining = pool.submit(load_and_join)
        first = pool.submit(links.group)
        second = pool.submit(lambda: waiting.group(waiting.latest()))
        time.sleep(5)
        assert not first.done() and not second.done()
        waiting._sock.shutdown(socket.SHUT_RDWR)  # as if its process had ended
        with pytest.raises(RankError, match="rank 1 of 3 on 127"):
            first.result()
        with pytest.raises(RankError, match="or is lost"):
            second.result()
        assert lose(links, ranks[1]) == "rank 1 of 3 on 127.0.0.1 has ended or cannot be reached"
        first = pool.submit(links.group)
        time.sleep(5)
        assert not first.done()
        has_loaded.set()
        pair = first.result(), joining.result()
        sums = pool.map(lambda own: own.all_reduce(torch.ones(3)), pair)
        assert [each.tolist() for each in sums] == [[2.0] * 3] * 2
    for each in pair:
        each.close()
    close([ranks[0], ranks[3]])


def test_new_group_gives_up_on_a_rank_that_sends_nothing():
    ranks = linked(3)
    limit_starts(ranks, 2.0)
    links = ranks[0][0]
    lose(links, ranks[2])
    with pytest.raises(RankError, match="rank 0 cannot connect to rank 1: no connection in time"):
        links.group()
    close(ranks[:2])


def test_elastic_in_torchrun_and_spares_for_external_ranks_are_refused(folder, put, monkeypatch):
    """After the loss of a rank, torchrun's agent would end the remaining ranks."""
    put(TORCHRUN)
    verb, config = load_verb("generate"), LLMConfig(str(folder), elastic=True)
    command = "--model", str(folder), "--prompt", "Once", "--elastic", "--spares=1"
    with pytest.raises(UsageError, match="--elastic cannot work inside torchrun"):
        verb.prepare(parse_flags(verb, command))
    with pytest.raises(UsageError, match=r"^elastic cannot work inside torchrun"):
        Ranks(ModelSetup(config))
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    with pytest.raises(UsageError, match="--spares 1 with ranks that another program has started"):
        verb.prepare(parse_flags(verb, command))
    with pytest.raises(UsageError, match="1 spare with ranks that another program has started"):
        Ranks(ModelSetup(replace(config, spares=1)))
