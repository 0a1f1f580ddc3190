"""The layout of a .pth file: all bytes but tensor data, and the offsets of the tensors.

torch itself writes the archive, with tensors that have a shape but no memory, so every program that
loads files of torch.save loads these. The checksums of the data are zero until they are written.
The bytes are deterministic, because the archive holds no times or random numbers.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, cast

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

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
    """The offset of a tensor's data, and the two offsets of its CRC-32 (little-endian).

    `checksum` is right after the data, `listed_checksum` in the directory at the end of the file.
    """

    offset: int
    n_bytes: int
    checksum: int
    listed_checksum: int


@dataclass(frozen=True)
class PthLayout:
    """A file of `n_bytes`, with `records` of the data by tensor name.

    `pieces` are all bytes but the data and the checksums right after it, with offsets.
    """

    n_bytes: int
    pieces: tuple[tuple[int, bytes], ...]
    records: Mapping[str, Record]


def pth_layout(tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> PthLayout:
    """The layout of the file with these tensors, given as shape and dtype by name."""
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
        # The checksum belongs to the data: writing the pieces again must not overwrite it.
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
