"""Reads rank, world size and store address from the launcher's variables. Without torch."""

import ctypes
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parallel_llama.errors import UsageError
from parallel_llama.files.bounded_files import expanded, read_private

# The descriptor of the inherited socket of rank 0, bound to MASTER_ADDR and MASTER_PORT.
STORE_FD = "PARALLEL_LLAMA_STORE_FD"
# The descriptor of the inherited file with the secret of the run, for ranks of `launch`.
SECRET_FD = "PARALLEL_LLAMA_SECRET_FD"
SECRET_BYTES = 32
# The path of a file with the secret, for ranks of another launcher.
SECRET_FILE = "PARALLEL_LLAMA_SECRET_FILE"
_MAX_SECRET_BYTES = 4096

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class RankEnv:
    """The rank of a process, and the address of the store.

    Args:
        listen_fd: the descriptor of a socket that is already bound to the address, for rank 0.
        has_agent_store: torchrun's agent owns the store; otherwise rank 0 does.
        run: the name that the launcher gives to this run.
        secret: known only to the ranks of this run; empty without a secret.
    """

    rank: int
    size: int
    host: str = ""
    port: int = 0
    listen_fd: int | None = None
    has_agent_store: bool = False
    run: str = ""
    secret: bytes = field(default=b"", repr=False)


@dataclass(frozen=True)
class _Launcher:
    """The names of the variables that a launcher sets.

    Args:
        remedy: how to give the ranks of this launcher an address, for error messages.
    """

    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str
    remedy: str


_TORCHRUN = _Launcher(
    "torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
    "start them with torchrun or with --nproc",
)  # fmt: skip
_SLURM_REMEDY = (
    "add this line before srun: export MASTER_PORT=29500 "
    'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
)
_MPIEXEC = _Launcher(
    "mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS",
    "add -genv MASTER_ADDR HOST -genv MASTER_PORT 29500 to mpiexec, where rank 0 runs on HOST",
)  # fmt: skip
_SRUN = _Launcher(
    "srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "", _SLURM_REMEDY
)
_LAUNCHERS = (
    _Launcher(
        "mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "add -x MASTER_ADDR=HOST -x MASTER_PORT=29500 to mpirun, where rank 0 runs on HOST",
    ),
    _MPIEXEC,
    _SRUN,
    _Launcher("srun", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "", _SLURM_REMEDY),
)  # fmt: skip


def _launcher() -> _Launcher | None:
    """The launcher that started this process as a rank, or None.

    A single task of srun or mpirun does not count, because it may start its own ranks. A batch
    script of Slurm has the variables of the job's tasks, but is not a task.
    """
    if _TORCHRUN.rank in os.environ or _TORCHRUN.size in os.environ:
        return _TORCHRUN
    launcher = next(iter(_launchers_found()), None)
    if launcher is None:
        return None
    is_script = launcher.size == "SLURM_NTASKS" and os.environ.get("ENVIRONMENT") == "BATCH"
    return None if is_script or os.environ[launcher.size] == "1" else launcher


def _launchers_found() -> list[_Launcher]:
    """The launchers other than torchrun that have set a rank and a size, in order of precedence.

    With PMI-2, srun also sets the rank and size of mpiexec, but not mpiexec's local rank.
    """
    is_srun = _MPIEXEC.local_rank not in os.environ and _values(_MPIEXEC) == _values(_SRUN)
    return [
        launcher
        for launcher in _LAUNCHERS
        if None not in _values(launcher) and not (launcher is _MPIEXEC and is_srun)
    ]


def _values(launcher: _Launcher) -> tuple[str | None, str | None]:
    """The values of the rank and of the number of ranks that this launcher sets."""
    return os.environ.get(launcher.rank), os.environ.get(launcher.size)


def world() -> tuple[int, int]:
    """This process's rank and the number of ranks; (0, 1) if no launcher started it as a rank.

    Known launchers are torchrun, mpirun, mpiexec and srun.

    Raises: UsageError if the variables are not a rank and a number of ranks.
    """
    launcher = _launcher()
    return (0, 1) if launcher is None else _numbers(launcher.rank, launcher.size)


def local_world(size: int) -> tuple[int, int]:
    """This process's rank among the ranks of its host, and the number of ranks of the host.

    All `size` ranks are assumed to be on one host if this program starts them, or if no
    environment variable gives the number of ranks on this host.

    Raises: UsageError like `world`.
    """
    if _launcher() is None:
        return 0, size
    local_rank, n_local = known_local_world()
    if local_rank is None:
        return world()
    return local_rank, world()[1] if n_local is None else n_local


def ranks_here(size: int) -> tuple[int, int]:
    """This process's rank among the ranks that certainly are on its host, and their number.

    If no environment variable gives the number of ranks on this host, a rank counts as alone on its
    host, unless `is_one_host`. `local_world` assumes one host instead.

    Raises: UsageError like `world`.
    """
    if _launcher() is None:
        return 0, size
    local_rank, n_local = known_local_world()
    if local_rank is None or n_local is None:
        return world() if is_one_host(size) else (0, 1)
    # With --virtual-local-rank of torchrun, each rank is local rank 0. torchrun numbers the ranks
    # of a host consecutively.
    return world()[0] % n_local if is_watched() else local_rank, n_local


def is_one_host(size: int) -> bool:
    """Whether it is certain that all `size` ranks are on one host.

    If no variable gives the number of ranks on this host, only a MASTER_ADDR that is a loopback
    address shows it. Names are not looked up: a host often has a loopback address for its own name.

    Raises: UsageError like `world`.
    """
    if _launcher() is None:
        return True
    _, n_local = known_local_world()
    if n_local is not None:
        return n_local == size
    address = os.environ.get("MASTER_ADDR", "")
    return address in ("localhost", "::1") or address.startswith("127.")


def known_local_world() -> tuple[int | None, int | None]:
    """Like `local_world`, but None for a number that no environment variable states.

    Raises: UsageError like `world`.
    """
    launcher = _host_launcher()
    if launcher is None:
        return None, None
    if launcher.name == "srun" and (n_tasks := _tasks_of_node()) is not None:
        local_rank_text = os.environ.get(launcher.local_rank, "")
        return (int(local_rank_text), n_tasks) if local_rank_text.isdigit() else (None, None)
    has_size = launcher.local_size in os.environ
    if launcher.local_rank not in os.environ and not has_size:
        return None, None
    local_size = launcher.local_size if has_size else launcher.size
    local_rank, n_local = _numbers(launcher.local_rank, local_size)
    return local_rank, n_local if has_size else None


def _host_launcher() -> _Launcher | None:
    """The launcher that sets the local rank and the number of ranks of this host.

    A script that srun or mpirun starts often sets torchrun's RANK and WORLD_SIZE, but not
    LOCAL_WORLD_SIZE. Then the variables of srun or mpirun are used, if they give the same rank and
    size.
    """
    launcher = _launcher()
    if launcher is not _TORCHRUN or _TORCHRUN.local_size in os.environ:
        return launcher
    others = (other for other in _launchers_found() if _values(other) == _values(_TORCHRUN))
    return next(others, launcher)


def requests_gpu_per_rank() -> bool:
    """Whether the variables of Slurm or Kubernetes say that each rank has GPUs of its own.

    A rank in Kubernetes without a local rank in its variables counts as alone in its pod.
    """
    is_pod = "KUBERNETES_SERVICE_HOST" in os.environ and known_local_world() == (None, None)
    return (
        is_pod
        or "SLURM_GPUS_PER_TASK" in os.environ
        or os.environ.get("SLURM_NTASKS_PER_GPU") == "1"
        or "gpu" in os.environ.get("SLURM_TRES_PER_TASK", "")
        or os.environ.get("SLURM_GPU_BIND", "").startswith(("single:1", "per_task", "map_gpu"))
    )


def _tasks_of_node() -> int | None:
    """The tasks of a Slurm step on this node: "2(x3),1" means that nodes 0 to 2 have 2 tasks."""
    counts: list[str] = []
    try:
        for part in os.environ["SLURM_STEP_TASKS_PER_NODE"].split(","):
            count, _, times = part.rstrip(")").partition("(x")
            counts += [count] * int(times or 1)
        return int(counts[int(os.environ["SLURM_NODEID"])])
    except (KeyError, ValueError, IndexError):
        return None


def rank_env() -> RankEnv:
    """This process's RankEnv, from its launcher's variables; a single rank without a launcher.

    The bound socket and an inherited secret are consumed: a second call does not find them.

    Raises: UsageError for incomplete variables; CheckpointError if the file of the secret cannot be
    read.
    """
    rank, size = world()
    if size == 1:
        return RankEnv(0, 1)
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        launcher = _launcher() or _TORCHRUN
        raise UsageError(
            f"{launcher.rank}={rank} and MASTER_ADDR={host!r}, MASTER_PORT={port!r}: the ranks "
            f"need an address to connect to; {launcher.remedy}"
        )
    listen_fd = os.environ.pop(STORE_FD, None)
    return RankEnv(
        rank,
        size,
        host,
        int(port),
        listen_fd=None if listen_fd is None else int(listen_fd),
        has_agent_store=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        run=run_in(os.environ),
        secret=_secret(),
    )


def run_in(environment: Mapping[str, str]) -> str:
    """The name of a run; torchrun may restart a run, which changes the name."""
    names = "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"
    return " ".join(environment.get(name, "") for name in names)


def _secret() -> bytes:
    """The secret in the file inherited from `launch`, or in SECRET_FILE."""
    fd, path = os.environ.pop(SECRET_FD, None), os.environ.get(SECRET_FILE)
    if fd is not None:
        secret = os.pread(int(fd), SECRET_BYTES, 0)
        os.close(int(fd))
        if len(secret) < SECRET_BYTES:
            raise UsageError(
                f"{SECRET_FD}={fd}: this file has {len(secret)} of the {SECRET_BYTES} bytes of the "
                "secret; unset the variable, or restart the command"
            )
        return secret
    if path is None:
        return b""
    secret = read_private(expanded(path), _MAX_SECRET_BYTES).strip()
    if len(secret) < SECRET_BYTES:
        raise UsageError(
            f"secret file {path} has {len(secret)} bytes; use {SECRET_BYTES} to "
            f"{_MAX_SECRET_BYTES} random ones, such as: openssl rand -hex 32"
        )
    return secret


def use_secret_file(path: str) -> None:
    """Makes this process, and all processes that it starts, read the secret from this file.

    Raises: UsageError if no launcher has started this process as a rank.
    """
    if not is_started_as_rank():
        raise UsageError(
            f"--secret-file {path}: ranks that this command starts have a secret of their own; the "
            "flag is for ranks that torchrun, srun or mpirun starts, so drop it"
        )
    os.environ[SECRET_FILE] = str(Path(expanded(path)).absolute())


def is_started_as_rank() -> bool:
    """Whether a launcher has started this process as a rank."""
    return _launcher() is not None


def launcher_name() -> str:
    """The launcher of this process; "torchrun" for ranks of `launch` and without a launcher."""
    return (_launcher() or _TORCHRUN).name


def is_under_torchrun() -> bool:
    """Whether torchrun's agent has started this process."""
    return "TORCHELASTIC_USE_AGENT_STORE" in os.environ


def is_watched() -> bool:
    """Whether the launcher ends all ranks when one fails: true for torchrun and `launch`."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def _numbers(rank_name: str, size_name: str) -> tuple[int, int]:
    """A rank and a number of ranks from two variables."""
    texts = os.environ.get(rank_name), os.environ.get(size_name)
    rank, size = (int(t) if t and t.isascii() and t.isdigit() else -1 for t in texts)
    if not 0 <= rank < size:
        raise UsageError(
            f"{rank_name}={texts[0]!r} and {size_name}={texts[1]!r}: use integers "
            f"with 0 <= {rank_name} < {size_name}; start with torchrun, or unset both"
        )
    return rank, size


def beyond_ctrl_c() -> dict[str, Any]:
    """Arguments of `Popen` for a process that Ctrl-C in the terminal does not reach.

    Linux schedules each session as a group, and compares the priorities of threads only within a
    session. So the new process gets its own process group, but stays in the session of this
    process: if this process is a server, the threads of a step then take precedence over the
    server's low-priority threads. Before Python 3.11 the new process gets its own session instead.
    Source: sched(7), "The autogroup feature".
    """
    if sys.version_info >= (3, 11):
        return {"process_group": 0}
    return {"start_new_session": True}


def write_in_background() -> None:
    """Lets this process write to the terminal from the background, even under `stty tostop`."""
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)


def end_with_parent() -> None:
    """Makes the kernel kill this process when the thread that started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
