"""The checks that all ranks run together, and the program of a rank of this host.

Rank 0 passes on each check as soon as all ranks agree on it. If a rank is lost, the check that was
running fails and names that rank, and the checks after it are skipped.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from threading import Thread

from parallel_llama.doctor import facts, layers, pace, patterns, tiny_model
from parallel_llama.doctor.check import Check
from parallel_llama.doctor.facts import Facts, Listener
from parallel_llama.doctor.records import agreed, exchange
from parallel_llama.engine.llm_config import LLMConfig
from parallel_llama.engine.setup import ModelSetup
from parallel_llama.errors import CheckpointError, UsageError, counted
from parallel_llama.parallel.collectives import Communicator
from parallel_llama.parallel.communicators import (
    give_up,
    join,
    own_device,
    use_device,
    visible_gpus,
)
from parallel_llama.parallel.device_choice import choose_device, ranks_sharing_gpus
from parallel_llama.parallel.failures import RankError, exit_code
from parallel_llama.parallel.rank_env import world
from parallel_llama.parallel.timeouts import Timeouts

# In the order in which they run.
RANK_CHECKS = (
    "start", "versions", "hosts", "clocks", "cards", "instruction-set", "kernel-cache",
    "collectives", "transport", "pace", "bandwidth", "arithmetic", "tensor-parallel", "files",
    "layers",
)  # fmt: skip

_REMEDIES: Mapping[str, str] = {  # by a part of the message of a RankError
    "stopped by a signal": "kill -CONT PID (ps -o pid,stat,args -C python)",
    "has died": "sudo dmesg | grep -iE 'killed process|segfault' (and the rank's own message)",
    "is late": "ps -eo pid,stat,pcpu,args --sort=-pcpu | head (is the rank running?)",
    "never joined": "start the missing ranks, with the same MASTER_ADDR and MASTER_PORT",
    "found no other rank": "set MASTER_ADDR and MASTER_PORT to those of rank 0 (see ss -ltnp)",
    "cannot listen at": "on all hosts: export MASTER_ADDR=ADDRESS of rank 0 (hostname -i)",
    "cannot connect to the other ranks": "export GLOO_SOCKET_IFNAME=INTERFACE (ip -br addr)",
    "different collectives": "install the same version on all hosts",
}


def remedy_for(message: str) -> str:
    found = (remedy for part, remedy in _REMEDIES.items() if part in message)
    return next(found, "parallel-llama doctor --nproc 1 (on each host, to find the one that fails)")


@dataclass
class Examination:
    """The checks among the ranks, and the functions that receive the results.

    Args:
        model: a model with weights, or None for the built-in model alone.
        timeouts: how long a rank waits for another.
        on_check: called on rank 0 with each check.
        on_now: called on every rank with the id of a check before it runs.
        own: checks of this rank's host that have been run already.
    """

    model: str | None
    timeouts: Timeouts
    on_check: Callable[[Check], None]
    on_now: Callable[[str], None]
    own: Sequence[Check] = ()
    now: str = RANK_CHECKS[0]
    given: set[str] = field(default_factory=set)

    def run(self) -> None:
        """Runs the checks one after the other.

        Raises: RankError on ranks above 0, if a rank is lost.

        Collective: every rank calls it once.
        """
        rank, size = world()
        comm: Communicator | None = None
        try:
            self._begin("start")
            gpu, n_local = ranks_sharing_gpus("auto", size, visible_gpus())
            device = own_device(choose_device("auto", n_local, visible_gpus()), gpu)
            use_device(device)
            comm = join(device, timeouts=self.timeouts)
            for check in self._checks(comm):
                self._give(check)
            comm.barrier()
        except RankError as error:
            if rank > 0:
                raise
            self._give(Check(self.now, "fail", str(error), remedy_for(str(error))))
        finally:
            if rank == 0:
                for check in self.own:
                    if check.id not in self.given:
                        self._give(check)
                for name in RANK_CHECKS:
                    if name not in self.given:
                        self._give(Check(name, "skip", f"not reached, because of {self.now}"))
            if comm is not None:
                comm.close()

    def _begin(self, name: str) -> None:
        self.now = name
        self.on_now(name)

    def _give(self, check: Check) -> None:
        self.given.add(check.id)
        self.on_check(check)

    def _checks(self, comm: Communicator) -> Iterator[Check]:
        self._begin("versions")
        store = os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", "0"))
        listener = Listener(store if comm.size > 1 else None)
        comm.barrier()
        found = exchange(comm, Facts.here(listener.address), Facts)
        there = [each for each in found if each is not None]
        n_hosts = len({each.host_id for each in there})
        seen = f"{counted(comm.size, 'rank')} on {counted(n_hosts, 'host')}"
        yield Check("start", "pass", seen)
        yield (same := facts.versions(found))
        if same.status == "fail":
            return
        for own in self.own:
            yield agreed(comm, own)
        self._begin("hosts")
        yield facts.hosts(comm, there)
        listener.close()
        yield facts.clocks(there)
        setup, unusable = self._setup()
        self._begin("cards")
        _, n_local = ranks_sharing_gpus("auto", comm.size, visible_gpus())
        needed = 0 if setup is None else setup.weight_bytes[comm.rank]
        yield agreed(comm, facts.gpus(n_local, needed))
        yield agreed(comm, facts.instruction_set())
        yield agreed(comm, facts.kernel_cache())
        self._begin("collectives")
        device = own_device("cpu", 0) if setup is None else setup.device
        yield patterns.patterns(comm, device)
        self._begin("pace")
        yield from _paces(comm, there)
        self._begin("arithmetic")
        alone = tiny_model.compute_alone(device)
        check, wrong = tiny_model.arithmetic(comm, alone)
        yield check
        self._begin("tensor-parallel")
        yield tiny_model.tensor_parallel(comm, device, alone, wrong)
        self._begin("files")
        if self.model is None:
            yield Check("files", "skip", "needs --model")
            yield Check("layers", "skip", "needs --model")
            return
        usable = agreed(comm, unusable or Check("files", "pass", "can be opened"))
        if usable.status == "fail" or setup is None:
            yield usable
            return
        yield layers.files(comm, setup)
        self._begin("layers")
        yield layers.layers(comm, setup)

    def _setup(self) -> tuple[ModelSetup | None, Check | None]:
        """The model's plan and checkpoint on this rank, or why they are not available."""
        if self.model is None:
            return None, None
        _, n_local = ranks_sharing_gpus("auto", world()[1], visible_gpus())
        is_on_cpu = choose_device("auto", n_local, visible_gpus()) == "cpu"
        try:
            return ModelSetup(LLMConfig(self.model, exact=True if is_on_cpu else None)), None
        except (UsageError, CheckpointError) as error:
            remedy = f"parallel-llama verify {self.model}"
            return None, Check("files", "fail", str(error), remedy)


def _paces(comm: Communicator, found: Sequence[Facts]) -> Iterator[Check]:
    measured = pace.measure(comm)
    known = [each for each in measured if each is not None]
    if len(known) < comm.size:
        yield Check("transport", "skip", "measurements of some ranks arrived damaged")
        return
    is_one = len({each.host_id for each in found}) == 1
    names, exchange_s = [each.host for each in found], [each.exchange_s for each in known]
    yield pace.transport(comm, names, is_one, exchange_s)
    yield pace.pace([each.product_s for each in known])
    yield pace.bandwidth([each.bytes_per_s for each in known])


def main() -> int:
    """Runs one rank that `doctor.local_ranks` has started; returns the exit code.

    It reads its settings from stdin, as one line of JSON, and ends when stdin ends. Rank 0 writes
    the id of each check before it runs, and then the check, as lines of JSON to `results`.
    """
    settings = json.loads(sys.stdin.buffer.readline())
    Thread(target=_end_with_stdin, daemon=True).start()
    os.dup2(2, 1)  # the command may print JSON to stdout
    rank, _ = world()

    def write(line: Mapping[str, object]) -> None:
        if rank == 0:
            os.write(settings["results"], json.dumps(line).encode() + b"\n")

    def run() -> int:
        Examination(
            settings["model"],
            Timeouts(settings["step_s"], settings["start_s"]),
            on_check=lambda check: write({"check": asdict(check)}),
            on_now=lambda name: write({"now": name}),
        ).run()
        return 0

    code = exit_code(run, give_up)
    write({"done": code})
    return code


def _end_with_stdin() -> None:
    while os.read(0, 1 << 16):
        pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
