"""Files of torch.save that a careless reader would trust."""

import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


class Payload:
    """Creates a file when it is unpickled by a careless reader."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (open, (str(self.path), "w"))


def assert_not_run(path: Path, trace: Path, read: Callable[[], object]) -> None:
    """Put code that creates `trace` into a file of weights: `read` must not run it."""
    torch.save({"model.norm.weight": Payload(trace)}, path)
    read()
    assert not trace.exists()
    with zipfile.ZipFile(path) as archive:
        pickle.loads(archive.read(f"{path.stem}/data.pkl"))  # the trap does spring
    assert trace.exists()


def rewritten(
    path: Path,
    change: Callable[[dict[str, bytes]], object],
    compression: int = zipfile.ZIP_STORED,
) -> None:
    """The archive with the records that `change` makes of a dictionary of names and bytes."""
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    change(records)
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in records.items():
            archive.writestr(name, data)
