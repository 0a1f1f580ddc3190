"""Downloads a model before the ranks start, once for all ranks of a host. No torch.

A program that starts ranks downloads before it starts them. Ranks that torchrun, srun or mpirun has
started run this before they connect to each other: the first rank of a host downloads, while the
others wait until the cache has the model.
"""

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from parallel_llama.errors import UsageError
from parallel_llama.files.hub_cache import HubName, hub_folder
from parallel_llama.files.model_files import missing_from_hub
from parallel_llama.files.partial_output import is_locked, take_lock_if_supported
from parallel_llama.parallel.rank_env import ranks_here, world

_POLL_S = 0.2

logger = logging.getLogger(__name__)


def require_downloaded(
    model: str, limit_s: float, announce: Callable[[str], None] = logger.info
) -> None:
    """Downloads the missing files of a model, if `model` can be a name on the hub.

    The first rank of a host downloads them, and holds a lock in the cache meanwhile. Other programs
    and hosts that share the cache wait for the lock. The other ranks of this host wait for the
    files.

    Args:
        limit_s: how long the other ranks wait for the files while no process holds the lock.
        announce: called with a line that says what will be downloaded.

    Raises: UsageError if the download fails, or the wait ends without the model.
    """
    name = missing_from_hub(model)
    if name is None:
        return
    local_rank, _ = ranks_here(world()[1])
    if local_rank > 0:
        _await_download(model, name, limit_s)
        return
    with _lock_of(name, announce):
        if missing_from_hub(model) is not None:
            from parallel_llama.files.hub_download import download_model  # slow

            download_model(name, announce)


def _await_download(model: str, name: HubName, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while missing_from_hub(model) is not None:
        if _is_locked(name):
            deadline = time.monotonic() + limit_s
        elif time.monotonic() > deadline:
            raise UsageError(
                f"model {model!r}: the first rank of this host has not downloaded it, and no "
                f"download has run for {limit_s:g} s; see the message of that rank, or run: "
                f"{name.command}"
            )
        time.sleep(_POLL_S)


def _lock_path(name: HubName) -> Path:
    folder = hub_folder(name.repo)
    return folder.parent / ".locks" / folder.name / "parallel_llama.lock"


@contextmanager
def _lock_of(name: HubName, announce: Callable[[str], None]) -> Iterator[None]:
    """Holds the lock of a model; continues without it if no lock file can be made or locked.

    The lock only prevents two downloads of one model: huggingface_hub replaces files atomically.
    """
    path = _lock_path(name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError:
        yield
        return
    try:
        if not take_lock_if_supported(descriptor):
            announce(f"waiting for another process, which is downloading {name.repo}")
            while not take_lock_if_supported(descriptor):
                time.sleep(_POLL_S)
        yield
    finally:
        os.close(descriptor)


def _is_locked(name: HubName) -> bool:
    """Whether another process holds the lock of a model."""
    try:
        descriptor = os.open(_lock_path(name), os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return is_locked(descriptor)
    except OSError:
        return False
    finally:
        os.close(descriptor)
