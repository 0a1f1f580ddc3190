"""Hostile files of torch.save."""

import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (open, (str(self.path), "w"))


def assert_not_run(path: Path, trace: Path, read: Callable[[], object]) -> None:
    """Adds code that creates `trace` to a file of weights; asserts that `read` does not run it."""
    torch.save({"model.norm.weight": Payload(trace)}, path)
    read()
    assert not trace.exists()
    with zipfile.ZipFile(path) as archive:
        pickle.loads(archive.read(f"{path.stem}/data.pkl"))  # the code runs when it is unpickled
    assert trace.exists()


def rewritten(
    path: Path, change: Callable[[dict[str, bytes]], object], compression: int = zipfile.ZIP_STORED
) -> None:
    """Rewrites an archive after `change` has modified its records, a dict of names and bytes."""
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    change(records)
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in records.items():
            archive.writestr(name, data)
