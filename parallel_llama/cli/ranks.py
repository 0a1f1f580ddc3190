"""From a checked command to the ranks that run it: started here, or joined under torchrun."""

from collections.abc import Callable
from dataclasses import dataclass

from parallel_llama.errors import UsageError
from parallel_llama.parallel.launch import run_ranks, threads_per_rank
from parallel_llama.parallel.place import is_started_as_rank, launcher_name, world


@dataclass(frozen=True)
class Job:
    """A command that has been checked and not started: what each of `nproc` ranks runs.

    `run` returns the exit code. An interactive job decides itself what Ctrl-C means.
    """

    run: Callable[[], int]
    nproc: int = 1
    interactive: bool = False


def leads() -> bool:
    """Whether this process checks what was asked: the one that was called, or rank 0."""
    rank, _ = world()
    return rank == 0


def rank_count(nproc: int | None) -> int:
    """The number of ranks that a command runs on.

    Raises: UsageError if --nproc contradicts torchrun, or torchrun's variables each other.
    """
    _, size = world()
    if not is_started_as_rank():
        return nproc or 1
    if nproc is not None and nproc != size:
        raise UsageError(
            f"--nproc {nproc} inside {launcher_name()}, which started {size} ranks; "
            "leave --nproc out"
        )
    return size


def execute(job: Job, argv: list[str]) -> int:
    """Run a job to its end and return its exit code; `argv` repeats the command on each rank."""
    if job.nproc == 1 or is_started_as_rank():
        return job.run()
    threads = threads_per_rank(job.nproc)
    return run_ranks(argv, job.nproc, threads, interactive=job.interactive)
