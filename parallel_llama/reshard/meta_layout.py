"""Writes a Meta folder: consolidated.NN.pth, one file per rank, for any number of ranks.

If the numbers of heads, channels and vocabulary rows are multiples of the number of files, Meta's
program can load the files. Otherwise tensors are cut as in the shard plan, and a KV head that two
files need is in both.
"""

import logging
import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import tee
from pathlib import Path
from typing import IO, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from parallel_llama.checkpoint.byte_ranges import sliced_shape
from parallel_llama.checkpoint.canonical import Piece
from parallel_llama.checkpoint.checkpoint import is_rotary, reordered
from parallel_llama.checkpoint.manifest import tensor_bytes
from parallel_llama.checkpoint.meta_folder import NORM_VARIANTS, as_bytes
from parallel_llama.config.meta import beyond_meta, meta_config, meta_params
from parallel_llama.errors import CheckpointError
from parallel_llama.families import parameters
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.families.weights import Param
from parallel_llama.plan import make_plan
from parallel_llama.reshard.layout import Layout, TargetFile, json_text
from parallel_llama.reshard.target_folder import TargetKind

# A streamed record is followed by a descriptor: this magic, the checksum, the sizes. The directory
# at the end repeats the checksum.
_DESCRIPTOR = b"PK\x07\x08"
_ENTRY = struct.Struct("<4s12xL8xHHH12x")  # magic, checksum, lengths of name, extras, comment
_END = struct.Struct("<4s12xL2x")  # magic, offset of the directory
_END_LOCATOR = struct.Struct("<4s4xQ4x")  # magic, offset of the end record of large archives
_LARGE_END = struct.Struct("<4s44xQ")  # magic, offset of the directory
_CHECKSUM_IN_ENTRY = 16
_IN_LARGE_END = 0xFFFFFFFF
CHECKSUM_BYTES = 4


@dataclass(frozen=True)
class Record:
    """The offset of a tensor's data, and the two offsets of the data's CRC-32 (little-endian).

    `checksum` is the offset right after the data, `listed_checksum` the one in the directory at the
    end of the file.
    """

    offset: int
    n_bytes: int
    checksum: int
    listed_checksum: int


@dataclass(frozen=True)
class PthLayout:
    """The layout of a .pth file of `n_bytes`.

    Args:
        pieces: all bytes, by offset, except the data and the checksums right after it.
        records: where the data is, by tensor name.
    """

    n_bytes: int
    pieces: tuple[tuple[int, bytes], ...]
    records: Mapping[str, Record]


def pth_layout(tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> PthLayout:
    """The layout of the file with these tensors, given as shape and dtype by name.

    torch itself writes the archive, with tensors that have a shape but no memory, so the file loads
    like any other file of torch.save. The checksums of the data are zero until they are written.
    The bytes are deterministic, because the archive holds no times or random numbers.
    """
    sink = _Sink()
    # Storages are numbered in the order of the dictionary.
    with FakeTensorMode(), torch.serialization.skip_data(materialize_fake_tensors=True):
        state = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in tensors.items()}
        sizes = {name: tensor.nbytes for name, tensor in state.items()}
        torch.save(state, cast(IO[bytes], sink))
    entries = _directory(sink)
    holes = iter(sink.holes)
    records = {}
    for number, (name, n_bytes) in enumerate(sizes.items()):
        if n_bytes == 0:
            records[name] = Record(0, 0, 0, 0)
            continue
        hole = next(holes)
        assert len(hole) == n_bytes, "torch skips the data of each tensor in turn"
        assert sink.pieces[hole.stop].startswith(_DESCRIPTOR)
        # The checksum is written with the data: writing the pieces again must not overwrite it.
        checksum = hole.stop + len(_DESCRIPTOR)
        descriptor = sink.pieces[hole.stop]
        sink.pieces[checksum + CHECKSUM_BYTES] = descriptor[len(_DESCRIPTOR) + CHECKSUM_BYTES :]
        del descriptor[len(_DESCRIPTOR) :]
        listed = entries[f"data/{number}"] + _CHECKSUM_IN_ENTRY
        records[name] = Record(hole.start, n_bytes, checksum, listed)
    assert next(holes, None) is None
    pieces = tuple((offset, bytes(piece)) for offset, piece in sink.pieces.items())
    return PthLayout(sink.n_bytes, pieces, records)


class _Sink:
    """A file object for torch that records what is written and the gaps that are skipped."""

    def __init__(self) -> None:
        self.n_bytes = 0
        self.pieces: dict[int, bytearray] = {}
        self.holes: list[range] = []
        self._begin()

    def write(self, data: bytes) -> int:
        self._piece += data
        self.n_bytes += len(data)
        return len(data)

    def seek(self, offset: int, whence: int) -> int:
        assert whence == 1 and offset >= 0, "torch only ever skips ahead"
        if offset:
            self.holes.append(range(self.n_bytes, self.n_bytes + offset))
            self.n_bytes += offset
            self._begin()
        return self.n_bytes

    def flush(self) -> None:
        """Nothing is buffered."""

    def _begin(self) -> None:
        self._piece = self.pieces.setdefault(self.n_bytes, bytearray())


def _directory(sink: _Sink) -> dict[str, int]:
    """The offset of each record's entry in the directory of the archive, by the record's name.

    torch writes the directory last, so it is in the last piece.
    """
    start, tail = list(sink.pieces.items())[-1]
    magic, offset = _END.unpack_from(tail, len(tail) - _END.size)
    assert magic == b"PK\x05\x06"
    if offset == _IN_LARGE_END:
        magic, end = _END_LOCATOR.unpack_from(tail, len(tail) - _END.size - _END_LOCATOR.size)
        assert magic == b"PK\x06\x07"
        magic, offset = _LARGE_END.unpack_from(tail, end - start)
        assert magic == b"PK\x06\x06"
    entries = {}
    at = offset - start
    while tail[at : at + 4] == b"PK\x01\x02":
        _, _, name_length, extra_length, comment_length = _ENTRY.unpack_from(tail, at)
        name = tail[at + _ENTRY.size : at + _ENTRY.size + name_length].decode()
        entries[name.partition("/")[2]] = start + at
        at += _ENTRY.size + name_length + extra_length + comment_length
    return entries


EMBEDDINGS, OUTPUT = "tok_embeddings.weight", "output.weight"

logger = logging.getLogger(__name__)


@dataclass
class RecordWriter:
    """A record that is being written: the number of bytes so far, and their CRC-32."""

    name: str
    record: Record
    n_bytes: int = 0
    checksum: int = 0

    def parts(self, data: Tensor) -> Iterator[tuple[str, int, Tensor]]:
        """Yields the next data and its location; after the last data, the checksum as well."""
        if not data.nbytes:
            return
        yield self.name, self.record.offset + self.n_bytes, data
        self.n_bytes += data.nbytes
        self.checksum = zlib.crc32(tensor_bytes(data), self.checksum)
        if self.n_bytes == self.record.n_bytes:
            checksum = bytearray(self.checksum.to_bytes(CHECKSUM_BYTES, "little"))
            yield self.name, self.record.checksum, torch.frombuffer(checksum, dtype=torch.uint8)


class MetaLayout(Layout):
    """A Meta folder of `n_parts` files.

    Tied embeddings are also stored as output.weight, because Meta's program reads that tensor.

    Args:
        dtypes: dtypes of the tensors, by Meta's names.
        embeddings_dim: dimension along which the embeddings are cut: 0 as in Llama 3, 1 as in Llama
            1 and 2.
        variants: the copies of norms that differ between the files of the source. If there are as
            many files as copies, each file gets its copy; else a separate file gets all copies.

    Raises: UsageError unless n_parts is 1 to n_heads, or if params.json and config.json cannot
    express the model.
    """

    kind: TargetKind = "meta"

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
        stored = list(_stored(args, embeddings_dim))
        self._dims = {param.name: param.dim for param in stored}
        self._cuts = _cuts(args, n_parts, stored)
        layouts = _layouts(stored, dtypes, self._cuts)
        self._records = [layout.records for layout in layouts]
        self.files = tuple(
            TargetFile(f"consolidated.{number:02}.pth", layout.n_bytes, layout.pieces)
            for number, layout in enumerate(layouts)
        )
        if beyond := beyond_meta(args):
            logger.warning(
                "Meta's program cannot run this model, which has %s; config.json states "
                "these features",
                ", ".join(beyond),
            )

    def parts(self, param: Param, pieces: Iterable[Piece]) -> Iterator[tuple[str, int, Tensor]]:
        if param.name == EMBEDDINGS and self._args.tied_embeddings:
            pieces, again = tee(pieces)
            yield from self._parts(param, pieces)
            yield from self._parts(replace(param, name=OUTPUT), again)
        else:
            yield from self._parts(param, pieces)

    def finish(self, folder: Path) -> None:
        """Copy every checksum into the directory of its archive.

        Raises: CheckpointError if the size of a file has changed.
        """
        for target, records in zip(self.files, self._records, strict=True):
            path = folder / target.name
            with path.open("r+b", buffering=0) as file:
                descriptor = file.fileno()
                if (size := os.fstat(descriptor).st_size) != target.n_bytes:
                    raise CheckpointError(
                        f"{path}: has {size} bytes, expected {target.n_bytes}; start again"
                    )
                for record in records.values():
                    if record.n_bytes:
                        checksum = os.pread(descriptor, CHECKSUM_BYTES, record.checksum)
                        os.pwrite(descriptor, checksum, record.listed_checksum)

    def metadata(self) -> dict[str, bytes]:
        files = {"params.json": json_text(self._params), "config.json": json_text(self._config)}
        if any(len(copies) != len(self.files) for copies in self._variants.values()):
            files[NORM_VARIANTS] = as_bytes(self._variants)
        return files

    def _parts(self, param: Param, pieces: Iterable[Piece]) -> Iterator[tuple[str, int, Tensor]]:
        """The parts of one tensor in every file."""
        writers = [
            RecordWriter(file.name, records[param.name])
            for file, records in zip(self.files, self._records, strict=True)
        ]
        copies = self._variants.get(param.name, ())
        start = 0
        for (piece,) in pieces:
            rows = range(start, start + piece.shape[0])
            start = rows.stop
            for number, writer in enumerate(writers):
                rows_of_file = piece
                if len(copies) == len(writers):
                    rows_of_file = copies[number][rows.start : rows.stop].to(piece.dtype)
                yield from writer.parts(self._cut(param, rows_of_file, rows, number))

    def _cut(self, param: Param, piece: Tensor, rows: range, number: int) -> Tensor:
        """The part of rows of a tensor that a file holds, in the rotary order of the file."""
        dim, cut = self._dims[param.name], self._cuts[number][param.name]
        start, stop = cut.start, cut.stop
        if dim == 0:
            start, stop = (min(max(0, at - rows.start), len(rows)) for at in (start, stop))
        part = piece.narrow(dim, start, stop - start)
        if is_rotary(param.name):
            head_dim, rotary_dim = self._args.head_dim, self._args.rotary_dim
            part = reordered(part, head_dim, "interleaved", rotary_dim)
        return part.contiguous()


def _stored(args: ModelArgs, embeddings_dim: int) -> Iterator[Param]:
    """The tensors of a file in order; a tied output follows the embeddings."""
    embeddings, *others = parameters(args)
    yield replace(embeddings, dim=embeddings_dim)
    if args.tied_embeddings:
        yield replace(embeddings, name=OUTPUT)
    yield from others


def _cuts(args: ModelArgs, n_parts: int, stored: Sequence[Param]) -> list[dict[str, range]]:
    """The range of every tensor along its `dim` that each file holds."""

    def equal_part(size: int, number: int) -> range:
        return range(size * number // n_parts, size * (number + 1) // n_parts)

    files = []
    # Every file has channels of all experts, so that all files have the same tensors.
    for shard in make_plan(args, n_parts, ranks_per_expert=n_parts).shards:
        # Heads need no such case: the plan cuts heads equally if n_parts divides their number.
        if args.ffn_dim % n_parts == 0:
            shard = replace(shard, ffn=equal_part(args.ffn_dim, shard.rank))
        if args.vocab_size % n_parts == 0:
            shard = replace(shard, vocab=equal_part(args.vocab_size, shard.rank))
        cuts = {param.name: shard.rows_of(param) for param in stored}
        if stored[0].dim == 1:
            cuts[EMBEDDINGS] = equal_part(args.dim, shard.rank)
        files.append(cuts)
    return files


def _layouts(
    stored: Sequence[Param], dtypes: Mapping[str, torch.dtype], cuts: Sequence[Mapping[str, range]]
) -> list[PthLayout]:
    """The archive layout of each file; files with equal shapes share one."""
    # A tied output has the dtype of the embeddings.
    types = [dtypes.get(param.name, dtypes[EMBEDDINGS]) for param in stored]
    names = [param.name for param in stored]
    shapes_of_files = [
        tuple(sliced_shape(param, cuts_of_file[param.name]) for param in stored)
        for cuts_of_file in cuts
    ]
    layouts = {
        shapes: pth_layout(dict(zip(names, zip(shapes, types, strict=True), strict=True)))
        for shapes in dict.fromkeys(shapes_of_files)
    }
    return [layouts[shapes] for shapes in shapes_of_files]
