"""Small programs that tests start as ranks: `python -m rank_programs NAME [arguments]`."""

import ctypes
import faulthandler
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from parallel_llama.errors import UsageError
from parallel_llama.parallel.failures import WRONG_USE, report_crash, report_error
from parallel_llama.parallel.launch import unblock_ctrl_c
from parallel_llama.parallel.rank_env import world
from parallel_llama.parallel.rank_stacks import record_stacks
from parallel_llama.parallel.timeouts import Timeouts

RANK = int(os.environ.get("RANK", "0"))
FOR_EVER_S = 600  # longer than any test waits
PATIENT = Timeouts(step_s=200, start_s=200)
unblock_ctrl_c()


def say(**what: object) -> None:
    """Prints one line of JSON to stderr, which all ranks share, in one write."""
    sys.stderr.write(json.dumps({"rank": RANK, **what}) + "\n")
    sys.stderr.flush()


def write(line: str) -> None:
    """Writes a line to stdout in one write; print makes two if Python does not buffer."""
    sys.stdout.write(line + "\n")


def environment() -> None:
    """Reports the environment of this rank; rank 0 also prints its input."""
    say(
        world=world(),
        torch="torch" in sys.modules,
        stdin=os.readlink("/proc/self/fd/0"),  # noqa: PTH115, compared as text
        ignores_ctrl_c=signal.getsignal(signal.SIGINT) is signal.SIG_IGN,
        env={key: os.environ.get(key) for key in sys.argv[2:]},
    )
    write(f"rank {RANK} on stdout" + (f" heard {sys.stdin.read()}" if RANK == 0 else ""))


def fail(rank: str, code: str) -> None:
    """One rank reports an error and ends, and the other ranks hang."""
    if int(rank) == RANK:
        report_error("the cause of it all")
        sys.exit(int(code))
    time.sleep(FOR_EVER_S)


def fail_first(rank: str, code: str, reported: str) -> None:
    """One rank reports an error, and ends shortly after the others, which end because of it.

    `reported` is the path of a file that exists after the report.
    """
    if int(rank) == RANK:
        report_error("the cause of it all")
        Path(reported).touch()
        time.sleep(0.3)
        sys.exit(int(code))
    while not Path(reported).exists():
        time.sleep(0.01)
    report_error("another rank failed")
    sys.exit(1)


def fail_alike(code: str) -> None:
    report_error("the same mistake on every rank", int(code))
    sys.exit(int(code))


def die(rank: str, number: str) -> None:
    if int(rank) == RANK:
        os.kill(os.getpid(), int(number))
    time.sleep(FOR_EVER_S)


def die_then_report(seconds: str) -> None:
    """Rank 1 is killed, and some time later rank 0 reports in which exchange it was."""
    record_stacks()
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while is_alive(1):
        time.sleep(0.01)
    time.sleep(float(seconds))
    report_error("rank 1 has died\n  rank 0 is in exchange 5")
    time.sleep(FOR_EVER_S)


def crash_in_dump(seconds: str) -> None:
    """Rank 1 crashes as if while it writes its stacks, and some time later rank 0 reports."""
    stacks = record_stacks()
    if RANK == 1:
        os.write(stacks, b"Current thread 0x1 (most recent call first):\n")
        os.write(stacks, b"Fatal Python error: Segmentation fault\n\n")
        faulthandler.disable()
        os.kill(os.getpid(), signal.SIGSEGV)
    while is_alive(1):
        time.sleep(0.01)
    time.sleep(float(seconds))
    report_error("the ranks called different collectives")
    sys.exit(1)


def is_alive(rank: int) -> bool:
    ranks = psutil.Process().parent().children()
    return len(ranks) > rank and ranks[rank].status() != psutil.STATUS_ZOMBIE


def end_slowly(ended: str) -> None:
    """Reports a wrong use, and creates a file 20 seconds later, before it ends."""
    report_error("the cause of it all", WRONG_USE)
    time.sleep(20)
    Path(ended).touch()


def crash(rank: str) -> None:
    if int(rank) == RANK:
        try:
            say(result=1 // 0)
        except ZeroDivisionError as error:
            report_crash(error)
            sys.exit(1)
    time.sleep(FOR_EVER_S)


def end_with(code: str) -> None:
    """Ends rank 0 with this code and without a report."""
    if RANK == 0:
        sys.exit(int(code))
    time.sleep(FOR_EVER_S)


def sleep(behaviour: str = "") -> None:
    """Runs until Ctrl-C, which rank 0 ignores if "deaf" and counts if "listening"."""
    presses: list[float] = []
    if RANK == 0 and behaviour == "deaf":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    if RANK == 0 and behaviour == "listening":
        signal.signal(signal.SIGINT, lambda *_: presses.append(time.monotonic()))
    try:
        say(pid=os.getpid())
        for _ in range(100 * FOR_EVER_S):
            time.sleep(0.01)
            if presses and time.monotonic() - presses[0] > 1.5:
                sys.exit(7)
    except KeyboardInterrupt:
        sys.exit(130)


def meet(timeout_s: str, color: str = "", stopped: str = "") -> None:
    """Joins the group, and reports the outcome and the time.

    The rank `stopped` is stopped before the rendezvous; rank 0 while it waits for the others.
    """
    import torch  # noqa: F401, so that its own time is not counted

    from parallel_llama.parallel.communicators import join
    from parallel_llama.parallel.failures import RankError

    awaited: list[list[int]] = []

    def look(missing: Sequence[int]) -> None:
        awaited.append(list(missing))
        if stopped == "0" and RANK == 0 and 0 not in missing:
            os.kill(os.getpid(), signal.SIGSTOP)

    say(pid=os.getpid())
    if RANK > 0 and stopped == str(RANK):
        os.kill(os.getpid(), signal.SIGSTOP)
    if stopped and int(stopped) != RANK:
        wait_until_another_is_stopped()
    started = time.monotonic()
    try:
        join(
            timeouts=Timeouts(start_s=float(timeout_s)), facts={"color": color}, on_wait=look
        ).close()
        outcome = "met"
    except RankError as error:
        outcome = str(error)
    say(outcome=outcome, seconds=time.monotonic() - started, awaited=awaited)


def fault(rank: str, kind: str, late: str = "") -> None:
    """Joins the group; then one rank has a fault, and the others wait for it in a collective.

    Args:
        late: a rank that enters the collective long after the others.
    """
    import torch

    from parallel_llama.parallel.communicators import join
    from parallel_llama.parallel.failures import RankError

    comm = join(timeouts=Timeouts(step_s=2, start_s=200))
    comm.all_reduce(torch.zeros(3))
    say(pid=os.getpid())
    try:
        if late:
            time.sleep({rank: 0.3, late: 1.9}.get(str(comm.rank), 0))
        if comm.rank == int(rank):
            FAULTS[kind](comm)
        comm.all_reduce(torch.zeros(5))
    except RankError as error:
        report_error(str(error))
        sys.exit(1)


def hang_in_step(folder: str) -> None:
    """Generates, and rank 0 hangs in a step that the other ranks have not begun."""
    from parallel_llama.cli.main import main
    from parallel_llama.engine.engine import Engine

    if RANK == 0:
        Engine.step = spin
    flags = "--model", folder, "--prompt=Once", "--timeout=2", "--start-timeout=200"
    sys.exit(main(["generate", *flags]))


def spin(_: object) -> None:
    while True:
        pass


def sleep_with_the_gil(_: object) -> None:
    ctypes.PyDLL(None).sleep(FOR_EVER_S)
    spin(_)  # if a signal ended the sleep


FAULTS = {
    "SIGSTOP": lambda _: os.kill(os.getpid(), signal.SIGSTOP),
    "SIGSEGV": lambda _: ctypes.string_at(0),
    "python": spin,
    "c": sleep_with_the_gil,
    "mismatch": lambda comm: comm.barrier(),
}


def wait_until_another_is_stopped() -> None:
    starter = psutil.Process().parent()
    while all(rank.status() != psutil.STATUS_STOPPED for rank in starter.children()):
        time.sleep(0.01)


def reduce(then: str = "") -> None:
    """Joins the group, sums the ranks' numbers, and ends or stays."""
    import torch  # the other programs start without it

    from parallel_llama.parallel.communicators import join

    comm = join(timeouts=PATIENT)
    total = comm.all_reduce(torch.tensor([comm.rank + 1]))
    say(pid=os.getpid(), kind=type(comm).__name__, total=int(total[0]))
    write(f"total {int(total[0])}")
    if then == "twice":
        try:
            join(timeouts=PATIENT)
        except UsageError as error:
            say(error=str(error))
    if then == "stay":
        comm.barrier()
        time.sleep(FOR_EVER_S)
    comm.close()
    comm.close()


if __name__ == "__main__":
    globals()[sys.argv[1]](*(() if sys.argv[1] == "environment" else sys.argv[2:]))
