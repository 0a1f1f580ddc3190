"""Runs the checks that all ranks take part in; also the program of a rank of this host.

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
from parallel_llama.ops.cpu.jit import has_kernels
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
    "died": "sudo dmesg | grep -iE 'killed process|segfault' (and the rank's own message)",
    "late: no progress": "ps -eo pid,stat,pcpu,args --sort=-pcpu | head (is the rank running?)",
    "never joined": "start the missing ranks, with the same MASTER_ADDR and MASTER_PORT",
    "found no other rank": "set MASTER_ADDR and MASTER_PORT to those of rank 0 (see ss -ltnp)",
    "another program uses this port": "on all hosts: export MASTER_PORT=PORT, a free one (ss -ltn)",
    "cannot listen at": "on all hosts: export MASTER_ADDR=ADDRESS of rank 0 (hostname -I)",
    "cannot connect to the other ranks": "export GLOO_SOCKET_IFNAME=INTERFACE (ip -br addr)",
    "different collectives": "install the same version on all hosts",
}


def remedy_for(message: str) -> str:
    remedies = (remedy for part, remedy in _REMEDIES.items() if part in message)
    return next(
        remedies, "parallel-llama doctor --nproc 1 (on each host, to find the one that fails)"
    )


@dataclass
class Examination:
    """The checks among the ranks, and the functions that receive the results.

    Args:
        model: a model with weights, or None for the built-in model alone.
        timeouts: how long a rank waits for another.
        on_check: called on every rank with each check on which the ranks agree, and on rank 0 also
            with a check that a lost rank has failed and with the skipped checks.
        on_begin: called on every rank with the id of a check before its collectives.
        host_checks: the results of checks of this rank's host.
    """

    model: str | None
    timeouts: Timeouts
    on_check: Callable[[Check], None]
    on_begin: Callable[[str], None]
    host_checks: Sequence[Check] = ()
    current: str = RANK_CHECKS[0]
    passed_on: set[str] = field(default_factory=set)

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
                self._pass_on(check)
            comm.barrier()
        except RankError as error:
            if rank > 0:
                raise
            self._pass_on(Check(self.current, "fail", str(error), remedy_for(str(error))))
        finally:
            if rank == 0:
                for check in self.host_checks:
                    if check.id not in self.passed_on:
                        self._pass_on(check)
                for name in RANK_CHECKS:
                    if name not in self.passed_on:
                        self._pass_on(
                            Check(name, "skip", f"not reached, because of {self.current}")
                        )
            if comm is not None:
                comm.close()

    def _begin(self, name: str) -> None:
        self.current = name
        self.on_begin(name)

    def _pass_on(self, check: Check) -> None:
        self.passed_on.add(check.id)
        self.on_check(check)

    def _checks(self, comm: Communicator) -> Iterator[Check]:
        self._begin("versions")
        store = os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", "0"))
        listener = Listener(store if comm.size > 1 else None)
        comm.barrier()
        facts_by_rank = exchange(comm, Facts.here(listener.address), Facts)
        known_facts = [item for item in facts_by_rank if item is not None]
        n_hosts = len({item.host_id for item in known_facts})
        seen = f"{counted(comm.size, 'rank')} on {counted(n_hosts, 'host')}"
        yield Check("start", "pass", seen)
        yield (version_check := facts.versions(facts_by_rank))
        if version_check.status == "fail":
            return
        for check in self.host_checks:
            self._begin(check.id)
            yield agreed(comm, check)
        self._begin("hosts")
        yield facts.hosts(comm, known_facts)
        listener.close()
        yield facts.clocks(known_facts)
        setup, unusable = self._setup()
        self._begin("cards")
        _, n_local = ranks_sharing_gpus("auto", comm.size, visible_gpus())
        needed = 0 if setup is None else setup.weight_bytes[comm.rank]
        yield agreed(comm, facts.gpus(n_local, needed))
        self._begin("instruction-set")
        yield agreed(comm, facts.instruction_set())
        self._begin("kernel-cache")
        yield agreed(comm, facts.kernel_cache())
        self._begin("collectives")
        device = own_device("cpu", 0) if setup is None else setup.device
        yield patterns.patterns(comm, device)
        self._begin("pace")
        yield from _paces(comm, known_facts)
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
        exact = True if is_on_cpu and has_kernels() else None
        try:
            return ModelSetup(LLMConfig(self.model, exact=exact)), None
        except (UsageError, CheckpointError) as error:
            remedy = f"parallel-llama verify {self.model}"
            return None, Check("files", "fail", str(error), remedy)


def _paces(comm: Communicator, facts_of_ranks: Sequence[Facts]) -> Iterator[Check]:
    measured = pace.measure(comm)
    known_paces = [item for item in measured if item is not None]
    if len(known_paces) < comm.size:
        for name in ("transport", "pace", "bandwidth"):
            yield Check(name, "skip", "measurements of some ranks arrived damaged")
        return
    is_one_host = len({item.host_id for item in facts_of_ranks}) == 1
    names, exchange_s = (
        [item.host for item in facts_of_ranks],
        [item.exchange_s for item in known_paces],
    )
    yield pace.transport(comm, names, is_one_host, exchange_s)
    yield pace.pace([item.product_s for item in known_paces])
    yield pace.bandwidth([item.bytes_per_s for item in known_paces])


def main() -> int:
    """Runs one rank that `doctor.local_ranks` has started; returns the exit code.

    It reads its settings from stdin, as one line of JSON, and ends when stdin ends. Rank 0 writes
    the id of each check before its collectives, and its result, as lines of JSON to `results`.
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
            on_begin=lambda name: write({"now": name}),
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
