"""What every layout that is written has in common: all is placed before any data is read."""

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from parallel_llama.checkpoint.canonical import Piece
from parallel_llama.families.weights import Param
from parallel_llama.reshard.target_folder import TargetKind


@dataclass(frozen=True)
class TargetFile:
    """A weight file of its final size; `pieces`, each at its offset, are all but tensor data."""

    name: str
    n_bytes: int
    pieces: tuple[tuple[int, bytes], ...]


class Layout(ABC):
    """The files of one model in one layout, and where every tensor lies in them."""

    kind: TargetKind
    files: tuple[TargetFile, ...]

    def create(self, folder: Path) -> None:
        """Make every weight file at its full size, with everything but tensor data in it.

        Files that are there keep their data.
        """
        for target in self.files:
            path = folder / target.name
            path.touch()
            with path.open("r+b", buffering=0) as file:
                file.truncate(target.n_bytes)
                for offset, piece in target.pieces:
                    os.pwrite(file.fileno(), piece, offset)

    @abstractmethod
    def parts(self, param: Param, pieces: Iterable[Piece]) -> Iterator[tuple[str, int, Tensor]]:
        """The parts of one tensor in canonical form: file name, byte offset, what lies there.

        `pieces` are all its rows in order, some whole heads at a time, or at once if ranks cut it
        by columns.

        Returns: contiguous tensors.
        """

    def unit_bytes(
        self,
        param: Param,  # noqa: ARG002 (most layouts have none)
    ) -> dict[str, list[int]]:
        """The bytes of each unit of a weight that has a hash of its own, in the order of `parts`.

        By the name of the tensor in the files; a quantised weight has several.
        """
        return {}

    def finish(self, folder: Path) -> None:  # noqa: B027 (most layouts have nothing to do)
        """Put in what needs all data; only then are the files valid."""

    @abstractmethod
    def metadata(self) -> dict[str, bytes]:
        """The small files beside the weights, by name."""


def json_text(value: object) -> bytes:
    """The content of a JSON file that a person may read."""
    return json.dumps(value, indent=2).encode() + b"\n"
