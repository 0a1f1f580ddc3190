"""Runs a checked command on its ranks, which are started here or by torchrun."""

from collections.abc import Callable
from dataclasses import dataclass

from parallel_llama.errors import UsageError
from parallel_llama.parallel.launch import run_ranks, threads_per_rank
from parallel_llama.parallel.rank_env import is_started_as_rank, launcher_name, world


@dataclass(frozen=True)
class Job:
    """A checked command.

    Args:
        run: what each of `nproc` ranks calls; returns the exit code.
        interactive: whether the job handles Ctrl-C itself.
    """

    run: Callable[[], int]
    nproc: int = 1
    interactive: bool = False


def leads() -> bool:
    """Whether this process is rank 0, or starts the ranks."""
    rank, _ = world()
    return rank == 0


def rank_count(nproc: int | None) -> int:
    """The number of ranks that a command runs on.

    Raises: UsageError if --nproc contradicts torchrun, or torchrun's variables are inconsistent.
    """
    _, size = world()
    if not is_started_as_rank():
        return nproc or 1
    if nproc is not None and nproc != size:
        raise UsageError(
            f"--nproc {nproc} inside {launcher_name()}, which started {size} ranks; omit --nproc"
        )
    return size


def execute(job: Job, argv: list[str]) -> int:
    """Runs a job and returns its exit code; `argv` is the command line for the other ranks."""
    if job.nproc == 1 or is_started_as_rank():
        return job.run()
    threads = threads_per_rank(job.nproc)
    return run_ranks(argv, job.nproc, threads, interactive=job.interactive)
