"""The interface of layouts that are written. All offsets are known before any data is read."""

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
    """A file of weights with its final size.

    `pieces` has the bytes that are known before any weight is read, each piece with its offset.
    """

    name: str
    n_bytes: int
    pieces: tuple[tuple[int, bytes], ...]


class Layout(ABC):
    """The files of one model in one layout, and the location of every tensor."""

    kind: TargetKind
    files: tuple[TargetFile, ...]

    def create(self, folder: Path) -> None:
        """Create every file of weights at its final size, with all bytes except tensor data.

        Existing files keep their tensor data.
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
        """Yields file name, byte offset and contiguous data of the parts of a tensor.

        `pieces` has the tensor in canonical form: blocks of rows, cut only between heads, or one
        piece if ranks cut the tensor by columns.
        """

    def written_with(self, param: Param) -> str:
        """The name of the weight whose parts contain the data of `param`; usually its own.

        A continued run reads `param` again unless that weight has been written.
        """
        return param.name

    def unit_bytes(
        self,
        param: Param,  # noqa: ARG002 (native folders use it)
    ) -> dict[str, list[int]]:
        """The number of bytes of each hashed unit, by stored tensor, in the order of `parts`.

        Only native folders have hashes of units, and only models without very many units; a
        quantised weight has several stored tensors.
        """
        return {}

    def finish(self, folder: Path) -> None:  # noqa: B027 (most layouts have nothing to do)
        """Write the bytes that depend on all data; only then are the files valid."""

    @abstractmethod
    def metadata(self) -> dict[str, bytes]:
        """The small files beside the weights, by name."""


def json_text(value: object) -> bytes:
    """The content of a human-readable JSON file."""
    return json.dumps(value, indent=2).encode() + b"\n"
