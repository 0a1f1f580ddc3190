"""Computes the memory that a command needs, and warns about faults of its host. Without torch."""

import os
import shlex
from collections.abc import Sequence
from dataclasses import replace

from parallel_llama.cli.arguments import Flags, warn
from parallel_llama.cli.calibration import read_calibrations
from parallel_llama.cli.estimate import estimate
from parallel_llama.cli.model import (
    CALIBRATION,
    DEVICE,
    DRAFTS,
    EXACT,
    KV_CACHE_BYTES,
    MEMORY,
    NPROC,
    RANKS,
    adapters_of,
)
from parallel_llama.cli.plan_request import plan_request
from parallel_llama.doctor.machine import Host, Needs, startup_checks
from parallel_llama.engine.available_memory import available_memory
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.files.model_files import ModelFiles
from parallel_llama.parallel.device_choice import choose_device, count_gpus, ranks_sharing_gpus
from parallel_llama.parallel.launch import threads_per_rank
from parallel_llama.parallel.rank_env import SECRET_FD, is_started_as_rank, ranks_here, world


def host_of(n_ranks: int, needs: Needs | None, port: int = 0) -> Host:
    """This process's host, for `n_ranks` ranks in all."""
    _, n_local = ranks_here(n_ranks)
    omp_threads = os.environ.get("OMP_NUM_THREADS", "")
    threads = (
        int(omp_threads)
        if omp_threads.isdecimal() and int(omp_threads) > 0
        else threads_per_rank(n_local)
    )
    return Host(n_local, threads, needs, port, is_launched=is_started_as_rank())


def needs_of(
    flags: Flags, model: str, files: ModelFiles, args: ModelArgs, n_ranks: int
) -> Needs | None:
    """The memory of this host's ranks; None if they run on GPUs.

    Raises: UsageError if there is no plan for that many ranks.
    """
    local_rank, n_local = ranks_here(n_ranks)
    n_gpus = count_gpus()
    _, n_sharing = ranks_sharing_gpus(flags[DEVICE], n_ranks, n_gpus)
    if choose_device(flags[DEVICE], n_sharing, n_gpus) != "cpu":
        return None
    memory, calibration = flags[MEMORY], read_calibrations(flags[CALIBRATION])
    request = replace(
        plan_request(flags, files, args, "cpu", n_ranks),
        memory=None if memory is None else tuple(memory),
        speeds=None if calibration is None else calibration.speeds,
    )
    first_rank = world()[0] - local_rank
    here = slice(first_rank, first_rank + n_local)
    local_ranks = estimate(request).ranks[here]
    min_bytes = sum(rank.all_weights + rank.working for rank in local_ranks)
    cache_bytes = sum(flags[KV_CACHE_BYTES] or rank.kv.needed for rank in local_ranks)
    available = available_memory() // n_local
    sizes = [available]
    if memory is not None:
        sizes = list(memory)
        sizes[here] = [min(size, available) for size in memory[here]]
    command = _plan_command(flags, model, n_ranks, sizes)
    return Needs(min_bytes, min_bytes + cache_bytes, shlex.join(command))


def _plan_command(flags: Flags, model: str, n_ranks: int, sizes: Sequence[int]) -> list[str]:
    """The words of the `plan` command for the ranks of these flags.

    Args:
        sizes: bytes of memory of each rank, or of all ranks.
    """
    command = ["parallel-llama", "plan", "--model", model, "--nproc", f"{n_ranks}"]
    command += ["--device", "cpu"]
    command += ["--memory", ",".join(f"{max(1, n_bytes >> 20)}MiB" for n_bytes in sizes)]
    if (paths := flags[CALIBRATION]) is not None:
        command += ["--calibration", ",".join(paths)]
    for name, folder in adapters_of(flags).items():
        command += ["--adapter", f"{name}={folder}"]
    if (exact := flags[EXACT]) is not None:
        command += ["--exact" if exact else "--no-exact"]
    for flag in (*RANKS, *DRAFTS):
        if flag not in (NPROC, DEVICE, EXACT) and flags[flag] != flag.initial:
            command += [f"--{flag.name}", f"{flags[flag]}"]
    return command


def warn_of_host(
    flags: Flags, model: str, files: ModelFiles, args: ModelArgs, n_ranks: int
) -> None:
    """Warns about faults of the host, once per host: not in ranks that this run starts."""
    if SECRET_FD in os.environ or ranks_here(n_ranks)[0] > 0:
        return
    for check in startup_checks(host_of(n_ranks, needs_of(flags, model, files, args, n_ranks))):
        warn(f"{check.id}: {check.seen}; try: {check.remedy}")
