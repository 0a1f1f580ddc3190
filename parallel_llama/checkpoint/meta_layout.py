"""Writing a Meta folder: consolidated.NN.pth, one file for each of any number of ranks.

Where the number of files divides the heads, channels and rows the cuts are Meta's own, so Meta's
program loads the files; elsewhere they are the plan's. A KV head that two files need is in both.
"""

import json
import logging
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import tee
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from parallel_llama.checkpoint.layout import TargetFile
from parallel_llama.checkpoint.manifest import tensor_bytes
from parallel_llama.checkpoint.norm_variants import NORM_VARIANTS, as_bytes
from parallel_llama.checkpoint.rotary import is_rotary, to_interleaved
from parallel_llama.checkpoint.torch_skeleton import (
    CHECKSUM_BYTES,
    Record,
    TorchSkeleton,
    torch_skeleton,
)
from parallel_llama.config import ModelArgs
from parallel_llama.config.meta_config import meta_config
from parallel_llama.config.params_writing import beyond_meta, meta_params
from parallel_llama.errors import CheckpointError
from parallel_llama.plan import Param, Share, make_plan, parameters

EMBEDDINGS, OUTPUT = "tok_embeddings.weight", "output.weight"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Cut:
    """What one file holds of a tensor: a range along a dimension, all of the other."""

    dim: int
    rows: range


@dataclass
class Filling:
    """A record that is being filled: how much of it there is, and the CRC-32 of that."""

    name: str
    record: Record
    n_bytes: int = 0
    checksum: int = 0

    def parts(self, data: Tensor) -> Iterator[tuple[str, int, Tensor]]:
        """Where its next data lies, and with the last of it the checksum."""
        if not data.nbytes:
            return
        yield self.name, self.record.offset + self.n_bytes, data
        self.n_bytes += data.nbytes
        self.checksum = zlib.crc32(tensor_bytes(data), self.checksum)
        if self.n_bytes == self.record.n_bytes:
            checksum = bytearray(self.checksum.to_bytes(CHECKSUM_BYTES, "little"))
            yield self.name, self.record.checksum, torch.frombuffer(checksum, dtype=torch.uint8)


class MetaLayout:
    """A Meta folder of `n_parts` files; `dtypes` are the tensors' by Meta's names.

    `embeddings_dim` is the dimension along which the embeddings are cut: 0 as in Llama 3, 1 as in
    Llama 1 and 2. `variants` are a source's copies of norms that differ, one for each of its files:
    as many files as it had get them back, and any other number keeps them beside the weights.
    Tied embeddings are stored a second time as output.weight, which Meta's program needs.

    Raises: UsageError unless n_parts is 1 to n_heads, or if params.json and config.json cannot say
    what the model is.
    """

    kind: Literal["meta"] = "meta"

    def __init__(
        self,
        args: ModelArgs,
        dtypes: Mapping[str, torch.dtype],
        n_parts: int,
        embeddings_dim: int = 0,
        variants: Mapping[str, Sequence[Tensor]] | None = None,
    ) -> None:
        self._args = args
        self._variants = variants or {}
        self._params, self._config = meta_params(args), meta_config(args)
        self._cuts = _cuts(args, n_parts, embeddings_dim)
        self._names = [f"consolidated.{number:02}.pth" for number in range(n_parts)]
        self._skeletons = _skeletons(args, dtypes, self._cuts)
        if beyond := beyond_meta(args):
            logger.warning(
                "Meta's own program cannot run this model, which has %s; config.json says it "
                "beside params.json",
                ", ".join(beyond),
            )

    @property
    def files(self) -> tuple[TargetFile, ...]:
        return tuple(TargetFile(name, skeleton.n_bytes) for name, skeleton in self._by_name())

    def create(self, folder: Path) -> None:
        for name, skeleton in self._by_name():
            descriptor = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                os.truncate(descriptor, skeleton.n_bytes)
                for offset, piece in skeleton.pieces:
                    os.pwrite(descriptor, piece, offset)
            finally:
                os.close(descriptor)

    def parts(self, param: Param, pieces: Iterable[Tensor]) -> Iterator[tuple[str, int, Tensor]]:
        if param.name == EMBEDDINGS and self._args.tied_embeddings:
            pieces, again = tee(pieces)
            yield from self._parts(param, pieces)
            yield from self._parts(replace(param, name=OUTPUT), again)
        else:
            yield from self._parts(param, pieces)

    def finish(self, folder: Path) -> None:
        """Repeat every checksum in the directory, so that any program finds the archives whole.

        Raises: CheckpointError if a file has another size than it was made with.
        """
        for name, skeleton in self._by_name():
            descriptor = os.open(folder / name, os.O_RDWR | os.O_CLOEXEC)
            try:
                if (size := os.fstat(descriptor).st_size) != skeleton.n_bytes:
                    raise CheckpointError(
                        f"{folder / name}: has {size} bytes, expected {skeleton.n_bytes}; "
                        "start again"
                    )
                for record in skeleton.records.values():
                    if record.n_bytes:
                        checksum = os.pread(descriptor, CHECKSUM_BYTES, record.checksum)
                        os.pwrite(descriptor, checksum, record.listed_checksum)
            finally:
                os.close(descriptor)

    def metadata(self) -> dict[str, bytes]:
        files = {"params.json": _spelled(self._params), "config.json": _spelled(self._config)}
        if any(len(copies) != len(self._names) for copies in self._variants.values()):
            files[NORM_VARIANTS] = as_bytes(self._variants)
        return files

    def _by_name(self) -> Iterator[tuple[str, TorchSkeleton]]:
        return zip(self._names, self._skeletons, strict=True)

    def _parts(self, param: Param, pieces: Iterable[Tensor]) -> Iterator[tuple[str, int, Tensor]]:
        """The parts of one record of each file."""
        fillings = [
            Filling(name, skeleton.records[param.name]) for name, skeleton in self._by_name()
        ]
        copies = self._variants.get(param.name, ())
        start = 0
        for piece in pieces:
            rows = range(start, start + piece.shape[0])
            start = rows.stop
            for number, filling in enumerate(fillings):
                own = piece
                if len(copies) == len(fillings):
                    own = copies[number][rows.start : rows.stop].to(piece.dtype)
                yield from filling.parts(self._cut(param, own, rows, number))

    def _cut(self, param: Param, piece: Tensor, rows: range, number: int) -> Tensor:
        """What a file holds of some rows of a tensor, in the file's rotary order."""
        cut = self._cuts[number][param.name]
        start, stop = cut.rows.start, cut.rows.stop
        if cut.dim == 0:
            start, stop = (min(max(0, at - rows.start), len(rows)) for at in (start, stop))
        part = piece.narrow(cut.dim, start, stop - start)
        if is_rotary(param):
            part = to_interleaved(part, self._args.head_dim)
        return part.contiguous()


def _stored(args: ModelArgs) -> Iterator[Param]:
    """Every tensor of a file in its order: the output that is tied follows the embeddings."""
    for param in parameters(args):
        yield param
        if param.name == EMBEDDINGS and args.tied_embeddings:
            yield replace(param, name=OUTPUT)


def _cuts(args: ModelArgs, n_parts: int, embeddings_dim: int) -> list[dict[str, Cut]]:
    """For each file, where every tensor is cut."""
    files = []
    for share in make_plan(args, n_parts).shares:
        own = _equal_where_possible(args, n_parts, share)
        cuts = {param.name: Cut(param.dim, param.local_range(own)) for param in _stored(args)}
        if embeddings_dim == 1:
            cuts[EMBEDDINGS] = Cut(1, _equal_part(args.dim, n_parts, share.rank))
        files.append(cuts)
    return files


def _equal_where_possible(args: ModelArgs, n_parts: int, share: Share) -> Share:
    """A share of the plan, with Meta's equal parts of channels and rows where they divide.

    Of the heads the plan makes equal parts itself.
    """

    def part(size: int, planned: range) -> range:
        return planned if size % n_parts else _equal_part(size, n_parts, share.rank)

    return replace(
        share, ffn=part(args.ffn_dim, share.ffn), vocab=part(args.vocab_size, share.vocab)
    )


def _equal_part(size: int, n_parts: int, number: int) -> range:
    return range(size * number // n_parts, size * (number + 1) // n_parts)


def _skeletons(
    args: ModelArgs, dtypes: Mapping[str, torch.dtype], files: Sequence[Mapping[str, Cut]]
) -> list[TorchSkeleton]:
    """One for each file; files of the same shapes share theirs."""
    made: dict[tuple[int, ...], TorchSkeleton] = {}
    skeletons = []
    for cuts in files:
        sizes = tuple(len(cut.rows) for cut in cuts.values())
        if sizes not in made:
            made[sizes] = torch_skeleton(
                {
                    param.name: (_cut_shape(param, cuts[param.name]), dtypes[_origin(param, args)])
                    for param in _stored(args)
                }
            )
        skeletons.append(made[sizes])
    return skeletons


def _cut_shape(param: Param, cut: Cut) -> tuple[int, ...]:
    return (*param.shape[: cut.dim], len(cut.rows), *param.shape[cut.dim + 1 :])


def _origin(param: Param, args: ModelArgs) -> str:
    """The model's own tensor that a tensor of a file is."""
    return EMBEDDINGS if param.name == OUTPUT and args.tied_embeddings else param.name


def _spelled(value: object) -> bytes:
    return json.dumps(value, indent=2).encode() + b"\n"
