"""What every layout that is written has in common: all places are known before any data is read."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from torch import Tensor

from parallel_llama.plan import Param

LayoutKind = Literal["meta", "hf", "native"]


@dataclass(frozen=True)
class TargetFile:
    """A weight file under its name, at its final size."""

    name: str
    n_bytes: int


class Layout(Protocol):
    """The files of one model in one layout, and where every tensor lies in them."""

    @property
    def kind(self) -> LayoutKind: ...

    @property
    def files(self) -> tuple[TargetFile, ...]: ...

    def create(self, folder: Path) -> None:
        """Make every weight file at its full size, with everything but tensor data in place.

        Files that are there keep their data.
        """

    def parts(self, param: Param, pieces: Iterable[Tensor]) -> Iterator[tuple[str, int, Tensor]]:
        """The parts of one tensor in canonical form: file name, byte offset, what lies there.

        `pieces` are all its rows in order, some whole heads at a time, or at once if ranks cut it
        by columns.

        Returns: contiguous tensors.
        """

    def finish(self, folder: Path) -> None:
        """Put in what needs all data; only then are the files valid."""

    def metadata(self) -> dict[str, bytes]:
        """The small files beside the weights, by name."""
