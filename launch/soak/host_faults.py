"""Breaks the network and the hosts of a run, and checks how the run ends.

Each run is `generate --prompts` on the hosts of a random layout. Some time after its first answer,
it gets a fault. Loss, delay and random messages must not change an answer. After any other fault,
every rank outside of the broken host must end with exit code 1 in time, and name a rank of this
host; with `--elastic`, rank 0 must finish, with the answers of an undisturbed run. No answer may
differ, and no process or shared memory may be left.
"""

import argparse
import contextlib
import json
import random
import re
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.soak.kills import processes_of
from launch.soak.linked_hosts import ROOT, Link, LinkedHosts, address, environment
from launch.soak.tally import Tally

TIMEOUT_S, MORE_S = 2.0, 8.0  # of an exchange; then ranks look for the cause, and end
SLOW_TIMEOUT_S = 30.0  # of runs that go on
START_S, LIMIT_S = 200.0, 400.0
N_PROMPTS, MAX_TOKENS = 400, 40
GONE_S = 1.0  # for the kernel to remove processes that were killed
N_MESSAGES, N_HELD = 10_000, 50
PLAIN = Link(delay_us=50)
LINK_DOWN = "link", "set", "dev", "link", "down"


@dataclass(frozen=True)
class Fault:
    """What happens to a run.

    Args:
        begin: what happens to a host after the first answer; None if nothing does.
        link: the network, from the start.
        is_harmless: whether the run must end as without the fault.
        is_loss: whether ranks count as lost, so that `--elastic` goes on without them.
        n_prompts: the number of prompts.
    """

    begin: Callable[[LinkedHosts, int], None] | None
    link: Link = PLAIN
    is_harmless: bool = False
    is_loss: bool = True
    n_prompts: int = N_PROMPTS


def cut(hosts: LinkedHosts, victim: int) -> None:
    """Drops all packets to and from a host."""
    drop_sent(hosts, victim)
    for other in others(hosts, victim):
        hosts.ip(other, "route", "add", "blackhole", address(victim))


def drop_sent(hosts: LinkedHosts, victim: int) -> None:
    """Drops all packets that a host sends; it still receives what the others send."""
    for other in others(hosts, victim):
        hosts.ip(victim, "route", "add", "blackhole", address(other))


def others(hosts: LinkedHosts, victim: int) -> list[int]:
    return [host for host in range(hosts.n_hosts) if host != victim]


def send_messages(hosts: LinkedHosts, victim: int) -> None:
    """Sends random bytes from a host to all ports of all hosts, and holds some connections."""
    ports = [(address(host), port) for host in range(hosts.n_hosts) for port in hosts.ports(host)]
    assert len(ports) > hosts.n_hosts, ports
    with hosts.threads_on(victim, 1) as pool:
        pool.submit(_send_to, ports).result()


def _send_to(ports: Sequence[tuple[str, int]]) -> None:
    rng = random.Random(0)
    held: list[socket.socket] = []
    for number in range(N_MESSAGES):
        with contextlib.suppress(OSError):  # refused, or closed at once
            held.append(socket.create_connection(ports[number % len(ports)], timeout=1))
            held[-1].sendall(rng.randbytes(rng.choice([1, 8, 64, 4096])))
        if len(held) > N_HELD:
            held.pop(0).close()
    for connection in held:
        connection.close()


FAULTS = {
    "cut off": Fault(cut),
    "packets dropped in one direction": Fault(drop_sent),
    "link down": Fault(lambda hosts, victim: hosts.ip(victim, *LINK_DOWN)),
    "stopped": Fault(lambda hosts, victim: hosts.signal(victim, "STOP"), is_loss=False),
    "killed": Fault(lambda hosts, victim: hosts.signal(victim, "KILL")),
    "random messages": Fault(send_messages, is_harmless=True, is_loss=False, n_prompts=3000),
    "5 % loss": Fault(None, Link(delay_us=50, loss=0.05), is_harmless=True, is_loss=False),
    "200 ms of delay": Fault(None, Link(200_000), is_harmless=True, is_loss=False, n_prompts=2),
}


def faults(flags: argparse.Namespace) -> int:
    """Runs random faults. Returns: 1 if a run ended in another way than it must, else 0."""
    from tiny_folder import write_endless_folder

    tally, rng, kinds = Tally("faults"), random.Random(flags.seed), list[str]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = write_endless_folder(folder / "model")
        expected = undisturbed(model, folder)
        for _ in range(flags.runs):
            kinds = kinds or rng.sample(sorted(FAULTS), len(FAULTS))
            kind, layout = kinds.pop(), rng.choice(flags.hosts)
            elastic = FAULTS[kind].is_loss and rng.random() < 0.5
            run = Run(layout, rng.randrange(int(elastic), len(layout)), elastic, rng.random())
            with tempfile.TemporaryDirectory() as own:
                wrong, end_s = run_fault(FAULTS[kind], run, model, Path(own), expected)
            line = f"{kind}: {run}, {end_s:.1f} s"
            tally.add(not wrong, "\n    ".join([line, *wrong]))
    return tally.close(f"seed {flags.seed}")


@dataclass(frozen=True)
class Run:
    """A run that gets a fault.

    Args:
        layout: the number of ranks of each host.
        victim: the host with the fault.
        elastic: whether the other ranks go on.
        wait_s: from the first answer to the fault.
    """

    layout: Sequence[int]
    victim: int
    elastic: bool
    wait_s: float

    def __str__(self) -> str:
        hosts = "+".join(map(str, self.layout))
        return f"host {self.victim} of {hosts}" + " with --elastic" * self.elastic

    @property
    def size(self) -> int:
        return sum(self.layout)

    @property
    def victims(self) -> range:
        """The ranks of the host with the fault."""
        first = sum(self.layout[: self.victim])
        return range(first, first + self.layout[self.victim])


def write_prompts(folder: Path, n_prompts: int) -> Path:
    """Writes greedy and sampled prompts; steps of prefill and of decoding alternate."""
    rng, path = random.Random(0), folder / "prompts.jsonl"
    with path.open("w") as file:
        for index in range(n_prompts):
            max_tokens = rng.randint(2, MAX_TOKENS if n_prompts > 2 else 2)
            body = {"prompt": f"{index} is " * rng.randint(1, 9), "max_tokens": max_tokens}
            sampled = {"temperature": 1.0, "seed": index} if index % 2 else {}
            file.write(json.dumps(body | sampled) + "\n")
    return path


def command(model: Path, folder: Path, n_prompts: int, timeout_s: float) -> list[str]:
    return [
        "generate", f"--model={model}", f"--prompts={write_prompts(folder, n_prompts)}",
        f"--output={folder / 'answers.jsonl'}", "--exact", f"--timeout={timeout_s}",
        f"--start-timeout={START_S}", "--kv-cache-bytes=8MiB", "--max-seq-len=4k",
    ]  # fmt: skip


def answers(folder: Path) -> dict[int, dict[str, Any]]:
    """The complete lines of the output so far, by prompt."""
    path = folder / "answers.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("\n")]
    return {each["index"]: each for each in found}


def undisturbed(model: Path, folder: Path) -> dict[int, dict[int, dict[str, Any]]]:
    """The answers of one rank, for each number of prompts."""
    found = {}
    for n_prompts in {fault.n_prompts for fault in FAULTS.values()}:
        own = folder / str(n_prompts)
        own.mkdir()
        with LinkedHosts(1, PLAIN) as hosts:
            hosts.output([1], *command(model, own, n_prompts, SLOW_TIMEOUT_S))
        found[n_prompts] = answers(own)
        assert len(found[n_prompts]) == n_prompts
    return found


def run_fault(
    fault: Fault, run: Run, model: Path, folder: Path, expected: Mapping[int, dict[int, Any]]
) -> tuple[list[str], float]:
    """Returns: what is wrong, and the seconds from the fault to the end of the last rank."""
    goes_on = fault.is_harmless or run.elastic
    timeout_s = SLOW_TIMEOUT_S if goes_on else TIMEOUT_S
    verb = command(model, folder, fault.n_prompts, timeout_s) + ["--elastic"] * run.elastic
    with LinkedHosts(len(run.layout), fault.link) as hosts:
        with started(hosts, run, verb, folder) as ranks:
            if fault.begin is not None:
                await_answer(ranks[0], folder)
                time.sleep(run.wait_s)
                fault.begin(hosts, run.victim)
                assert ranks[0].poll() is None or run.victim == 0, "the run ended before the fault"
            began_s = time.monotonic()
            ended_s = ends(ranks, began_s, LIMIT_S if goes_on else 10 * TIMEOUT_S)
        hosts.resume(run.victim)  # programs that are stopped do not notice the end of their rank
        time.sleep(GONE_S)
        wrong = [f"process {pid} is left" for pid in processes_of(str(folder))]
        for host in range(hosts.n_hosts):
            wrong += [f"/dev/shm/{name} is left" for name in hosts.shared(host)]
    said = [(folder / f"{rank}.said").read_text() for rank in range(run.size)]
    codes = [rank.returncode for rank in ranks]
    if not fault.is_harmless:
        wrong += faults_of_ends(run, codes, ended_s, said)
    elif any(codes):
        wrong += [f"exit codes {codes}", *said]
    found, want = answers(folder), expected[fault.n_prompts]
    wrong += [f"another answer to {index}" for index in found if found[index] != want[index]]
    if goes_on and len(found) != len(want):
        wrong.append(f"{len(found)} of {len(want)} answers")
    return wrong, max((each for each in ended_s if each is not None), default=LIMIT_S)


@contextmanager
def started(
    hosts: LinkedHosts, run: Run, verb: Sequence[str], folder: Path
) -> Iterator[list["subprocess.Popen[bytes]"]]:
    """Starts all ranks; what a rank prints is in a file. Kills those that have not ended."""
    env = {**environment(run.size), "TMPDIR": str(folder)}
    with ExitStack() as stack:
        ranks = []
        for rank, rank_command in enumerate(hosts.rank_commands(run.layout, *verb)):
            said = stack.enter_context((folder / f"{rank}.said").open("w"))
            process = subprocess.Popen(rank_command, env=env, cwd=ROOT, stdout=said, stderr=said)
            stack.callback(process.wait)
            stack.callback(process.kill)
            ranks.append(process)
        yield ranks


def await_answer(rank: "subprocess.Popen[bytes]", folder: Path) -> None:
    deadline_s = time.monotonic() + START_S
    while not answers(folder):
        if rank.poll() is not None or time.monotonic() > deadline_s:
            raise RuntimeError(f"no answer: {(folder / '0.said').read_text()}")
        time.sleep(0.01)


def ends(
    ranks: Sequence["subprocess.Popen[bytes]"], began_s: float, limit_s: float
) -> list[float | None]:
    """When each rank ended, in seconds after the fault; None for those that did not.

    Waits until all have ended, or for `limit_s`.
    """
    ended_s: list[float | None] = [None] * len(ranks)
    while None in ended_s and time.monotonic() < began_s + limit_s:
        for rank, process in enumerate(ranks):
            if ended_s[rank] is None and process.poll() is not None:
                ended_s[rank] = time.monotonic() - began_s
        time.sleep(0.01)
    return ended_s


def faults_of_ends(
    run: Run, codes: Sequence[int | None], ended_s: Sequence[float | None], said: Sequence[str]
) -> list[str]:
    """What is wrong with the end of a run that has lost a host."""
    wrong = []
    victims = "|".join(map(str, run.victims))
    named = re.compile(
        rf"ranks? (\d+, )*({victims})\b.*(is late|has ended|has died|cannot be reached)"
    )
    for rank in set(range(run.size)) - set(run.victims):
        if codes[rank] != int(not run.elastic):
            wrong.append(f"rank {rank} has exit code {codes[rank]}: {said[rank]}")
        if not run.elastic and (ended_s[rank] or LIMIT_S) > TIMEOUT_S + MORE_S:
            wrong.append(f"rank {rank} ended too late: {said[rank]}")
        if not named.search(said[rank]) and (rank == 0 or not run.elastic):
            wrong.append(f"rank {rank} does not name a rank of the host: {said[rank]}")
    return wrong
