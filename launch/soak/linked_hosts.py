"""Network namespaces as hosts, with links that delay and limit what passes. Needs root."""

import ctypes
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_SWITCH = Path(__file__).with_name("link.c")
_PROGRAMS = "ip", "unshare", "nsenter", "setpriv", "mount", "taskset", "cc"
_PORT = 29500
# Large frames, as in a fast local network: with small ones the switch takes a part of the cores.
_MTU = 9000
_CLONE_NEWNET = 0x40000000
_LISTENS = "0A"  # the state of a socket in /proc/net/tcp
# Runs a program in a host. It cannot see the processes, shared memory and network of other hosts.
_UNSHARE = "unshare", "--net", "--ipc", "--pid", "--mount-proc", "--fork", "--kill-child"
_PREPARE = "mount -t tmpfs -o mode=1777 tmpfs /dev/shm && echo ready && exec cat"


class NotPossible(Exception):
    """Hosts cannot be made here, or a command has failed; the message says why."""


@dataclass(frozen=True)
class Link:
    """The network between hosts.

    Args:
        delay_us: microseconds that every packet is delayed.
        gbit: 10^9 bits per second that a host receives from all others together.
        loss: the fraction of lost packets.
        seed: of the choice of lost packets.
    """

    delay_us: float = 100.0
    gbit: float = 1.0
    loss: float = 0.0
    seed: int = 1


class LinkedHosts:
    """Hosts with the addresses 10.231.0.1, 10.231.0.2 and so on, until they are closed.

    `secret` is the file of the ranks' secret.

    Raises: NotPossible.
    """

    def __init__(self, n_hosts: int, link: Link) -> None:
        _require_programs()
        self.n_hosts = n_hosts
        self._open = ExitStack()
        with ExitStack() as opened:
            folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
            self.secret = folder / "secret"
            self.secret.write_text(secrets.token_hex(32))
            self.secret.chmod(0o600)
            switch = str(folder / "link")
            run("cc", "-O2", "-o", switch, str(_SWITCH))
            held = [_hold(opened, *_UNSHARE, "sh", "-c", _PREPARE) for _ in range(n_hosts)]
            self._at = [f"/proc/{process.pid}/ns" for process in held]
            figures = map(str, (link.delay_us, link.gbit, link.loss, link.seed))
            self._switch = _hold(opened, switch, *figures, *(f"{at}/net" for at in self._at))
            for host in range(n_hosts):
                self.ip(host, "link", "set", "dev", "lo", "up")
                self.ip(host, "addr", "add", f"{address(host)}/24", "dev", "link")
                self.ip(host, "link", "set", "dev", "link", "mtu", str(_MTU), "up")
            self._open = opened.pop_all()

    def ip(self, host: int, *arguments: str) -> None:
        """Runs ip of iproute2 on a host."""
        run("nsenter", f"--net={self._at[host]}/net", "ip", *arguments)

    def command(self, host: int, *argv: str) -> list[str]:
        """The command line of a program on a host, which ends if this command is killed."""
        at = self._at[host]
        enter = [f"--{kind}={at}/{name}" for kind, name in (
            ("net", "net"), ("ipc", "ipc"), ("mount", "mnt"), ("pid", "pid_for_children"),
        )]  # fmt: skip
        # nsenter 2.38 and older leave the working folder when the mount namespace changes.
        return ["nsenter", *enter, "--wd=.", "setpriv", "--pdeathsig=KILL", *argv]

    def rank_commands(self, layout: Sequence[int], *verb: str) -> list[list[str]]:
        """The command line of each rank, pinned to one core. Host i has `layout[i]` ranks."""
        hosts = [host for host, n_ranks in enumerate(layout) for _ in range(n_ranks)]
        cores = sorted(os.sched_getaffinity(0))
        return [
            self.command(
                host, "taskset", "--cpu-list", str(cores[rank % len(cores)]),
                "env", f"RANK={rank}", sys.executable, "-m", "parallel_llama", *verb,
                f"--secret-file={self.secret}",
            )
            for rank, host in enumerate(hosts)
        ]  # fmt: skip

    def output(self, layout: Sequence[int], *verb: str) -> str:
        """What rank 0 prints while all ranks of `rank_commands` run.

        Raises: NotPossible if rank 0 fails.
        """
        first, *others = self.rank_commands(layout, *verb)
        with other_ranks(others, sum(layout)):
            return run(*first, env=environment(sum(layout)), cwd=ROOT)

    def received(self) -> list[int]:
        """The bytes that each host has received over its link."""
        counts = []
        for at in self._at:
            said = run("nsenter", f"--net={at}/net", "cat", "/proc/net/dev")
            (line,) = (line for line in said.splitlines() if line.strip().startswith("link:"))
            counts.append(int(line.partition(":")[2].split()[0]))
        return counts

    def switch_s(self) -> float:
        """The CPU time of the program that delays the packets."""
        fields = Path(f"/proc/{self._switch.pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")

    def threads_on(self, host: int, n_threads: int) -> ThreadPoolExecutor:
        """Threads with the network of a host."""

        def enter() -> None:
            with Path(f"{self._at[host]}/net").open() as file:
                if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "setns")

        return ThreadPoolExecutor(n_threads, initializer=enter)

    def signal(self, host: int, name: str) -> None:
        """Sends a signal to all programs of a host."""
        run(*self.command(host, "sh", "-c", f"kill -{name} -1"))

    def resume(self, host: int) -> None:
        """Continues all stopped programs of a host, if it has any."""
        run(*self.command(host, "sh", "-c", "kill -CONT -1; true"))

    def ports(self, host: int) -> list[int]:
        """The TCP ports on which programs of a host listen."""
        said = run(*self.command(host, "cat", "/proc/net/tcp", "/proc/net/tcp6"))
        rows = [line.split() for line in said.splitlines()]
        return [int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == _LISTENS]

    def shared(self, host: int) -> list[str]:
        """The names of the files in shared memory of a host."""
        return run(*self.command(host, "ls", "/dev/shm")).split()

    def close(self) -> None:
        """Kills all programs of all hosts, and removes the hosts."""
        self._open.close()

    def __enter__(self) -> "LinkedHosts":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def address(host: int) -> str:
    return f"10.231.0.{host + 1}"


def environment(n_ranks: int) -> Mapping[str, str]:
    """The environment of all ranks."""
    return {
        **os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(n_ranks),
        "MASTER_ADDR": address(0), "MASTER_PORT": str(_PORT),
    }  # fmt: skip


@contextmanager
def other_ranks(commands: Sequence[Sequence[str]], size: int) -> Iterator[list[subprocess.Popen]]:
    """Runs the commands of all ranks but rank 0, and kills those that have not ended."""
    env = environment(size)
    with ExitStack() as stack:
        processes = []
        for command in commands:
            process = subprocess.Popen(command, env=env, cwd=ROOT, stdout=subprocess.DEVNULL)
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        yield processes


def run(*command: str, **options: Any) -> str:
    """What a command prints. Raises: NotPossible if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, **options)
    if done.returncode:
        raise NotPossible(f"{' '.join(command)} failed: {done.stderr.strip()[-2000:]}")
    return done.stdout


def _hold(opened: ExitStack, *command: str) -> subprocess.Popen:
    """Starts a program that says that it is ready, and ends it with `opened`."""
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    opened.callback(process.communicate)
    opened.callback(process.kill)
    if process.stdout.readline() != "ready\n":
        raise NotPossible(f"{command[0]} failed: {process.communicate()[1].strip()}")
    return process


def _require_programs() -> None:
    if os.geteuid():
        raise NotPossible("hosts are network namespaces, and only root can make them")
    if missing := [name for name in _PROGRAMS if shutil.which(name) is None]:
        raise NotPossible(
            f"missing: {', '.join(missing)}; on Debian install iproute2, util-linux and gcc"
        )
    if not Path("/dev/net/tun").exists():
        raise NotPossible("/dev/net/tun is missing; run modprobe tun")
