"""The memory that a command needs, and warnings about its host. No torch."""

import os
import shlex

from parallel_llama.cli.arguments import Flags, warn
from parallel_llama.cli.estimate import PlanRequest, estimate
from parallel_llama.cli.model import (
    DEVICE,
    DTYPE,
    EXACT,
    KV_CACHE_BYTES,
    KV_CACHE_DTYPE,
    KV_SPLIT,
    MAX_SEQ_LEN,
    PP,
    QUANT,
)
from parallel_llama.config.layouts import default_dtype, default_quant, stored_formats
from parallel_llama.doctor.machine import Host, Needs, startup_checks
from parallel_llama.engine.available_memory import available_memory
from parallel_llama.families.model_args import ModelArgs, context_length
from parallel_llama.files.model_files import ModelFiles
from parallel_llama.parallel.device_choice import choose_device, count_gpus, ranks_sharing_gpus
from parallel_llama.parallel.launch import threads_per_rank
from parallel_llama.parallel.rank_env import SECRET_FD, is_started_as_rank, local_world, world


def host_of(n_ranks: int, needs: Needs | None, port: int = 0) -> Host:
    """This process's host, for `n_ranks` ranks in all."""
    _, n_local = local_world(n_ranks)
    given = os.environ.get("OMP_NUM_THREADS", "")
    threads = int(given) if given.isdecimal() and int(given) > 0 else threads_per_rank(n_local)
    return Host(n_local, threads, needs, port, is_launched=is_started_as_rank())


def needs_of(
    flags: Flags, model: str, files: ModelFiles, args: ModelArgs, n_ranks: int
) -> Needs | None:
    """The memory of this host's ranks; None if they run on GPUs.

    Raises: UsageError if there is no plan for that many ranks.
    """
    local_rank, n_local = local_world(n_ranks)
    n_gpus = count_gpus()
    _, n_sharing = ranks_sharing_gpus(flags[DEVICE], n_ranks, n_gpus)
    if choose_device(flags[DEVICE], n_sharing, n_gpus) != "cpu":
        return None
    dtype = flags[DTYPE] or default_dtype(files, args, "cpu")
    asked = PlanRequest(
        args,
        stored_formats(files, args),
        "cpu",
        dtype,
        flags[QUANT] or default_quant(files, args, dtype),
        flags[KV_CACHE_DTYPE],
        flags[KV_SPLIT],
        flags[EXACT],
        context_length(args, flags[MAX_SEQ_LEN]),
        batch=1,
        tp_size=n_ranks,
        pp=flags[PP],
    )
    first = world()[0] - local_rank
    here = estimate(asked).ranks[first : first + n_local]
    least = sum(rank.weights + rank.working for rank in here)
    cache = sum(flags[KV_CACHE_BYTES] or rank.kv.needed for rank in here)
    each = max(1, (available_memory() // n_local) >> 20)
    remedy = (
        f"parallel-llama plan --model {shlex.quote(model)} --nproc {n_ranks} --memory {each}MiB"
    )
    return Needs(least, least + cache, remedy)


def warn_of_host(
    flags: Flags, model: str, files: ModelFiles, args: ModelArgs, n_ranks: int
) -> None:
    """Warns about faults of the host, once per host: not in ranks that this run starts."""
    if SECRET_FD in os.environ or local_world(n_ranks)[0] > 0:
        return
    for check in startup_checks(host_of(n_ranks, needs_of(flags, model, files, args, n_ranks))):
        warn(f"{check.id}: {check.seen}; try: {check.remedy}")
