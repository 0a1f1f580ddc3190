"""A bounded reader of GGUF headers: metadata fields, and the location of each tensor.

It does not interpret the fields, and reads at most WINDOW_BYTES of tensor data. Every length in the
file is checked against the remaining bytes before memory is allocated.

Source: the GGUF specification of ggml (docs/gguf.md), versions 2 and 3.
"""

import contextlib
import functools
import itertools
import math
import re
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from parallel_llama.errors import CheckpointError, UsageError
from parallel_llama.files.bounded_files import open_file, reading
from parallel_llama.files.fields import Fields, naming
from parallel_llama.files.safetensors_header import FileTensor, merged

MAX_FIELDS = 65_536
MAX_TENSORS = 100_000
MAX_HEADER_BYTES = 256 << 20
MAX_NAME_BYTES = 4096
MAX_STRING_BYTES = 64 << 20  # some files contain a whole tokenizer.json
MAX_ARRAY_VALUES = 1 << 23  # of all arrays; up to 60 bytes each as Python objects
MAX_DIMS = 4
WINDOW_BYTES = 1 << 18
# A second change within one tick of the file system's clock changes no attribute of the file, so
# the header of a recently written file is not cached.
SETTLED_NS = 2_000_000_000

_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")  # before every string

# The end of the name of one part of a split file.
PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$", re.IGNORECASE)

# ggml type number: (name, values per block, bytes per block)
GGML_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
    29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36),
}  # fmt: skip
# Unsupported types: removed from ggml, not for weights, or unknown to the gguf package.
_REFUSED_TYPES = {
    4: "Q4_2", 5: "Q4_3", 9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64",
    28: "F64", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8", 41: "Q1_0", 42: "Q2_0",
}  # fmt: skip


@dataclass(frozen=True)
class GGUFHeader:
    """The metadata fields and tensors of a GGUF file; shared by all callers, so never modified.

    Args:
        tensors: By name; of all parts, if the file is split.
        files: The file of each tensor, by name.
    """

    fields: dict[str, Any]
    tensors: dict[str, FileTensor]
    files: dict[str, Path]


class _Cursor:
    """Reads the header forward through a window, at most to the end or to MAX_HEADER_BYTES.

    The window has WINDOW_BYTES, or the size of a single larger value.
    """

    def __init__(self, file: BinaryIO, size: int, path: Path) -> None:
        self.file, self.path = file, path
        self.limit = min(size, MAX_HEADER_BYTES)
        self.window, self.at = b"", 0
        self.window_end = 0  # offset in the file
        self.array_values = 0

    @property
    def position(self) -> int:
        return self.window_end - len(self.window) + self.at

    def take(self, n_bytes: int, what: str) -> bytes:
        self.require_bytes(n_bytes, what)
        if n_bytes > len(self.window) - self.at:
            self._advance(n_bytes, what)
        start, self.at = self.at, self.at + n_bytes
        return self.window[start : self.at]

    def _advance(self, n_bytes: int, what: str) -> None:
        """Move the window to the cursor, so that it holds this many bytes."""
        rest = self.window[self.at :]
        wanted = min(max(n_bytes, WINDOW_BYTES) - len(rest), self.limit - self.window_end)
        data = self.file.read(wanted)
        if len(data) != wanted:
            raise CheckpointError(f"{self.path}: the file ends inside {what}")
        self.window, self.at = rest + data, 0
        self.window_end += wanted

    def require_bytes(self, n_bytes: int, what: str) -> None:
        """Check that this many bytes remain."""
        left = self.limit - self.position
        if n_bytes > left:
            raise CheckpointError(
                f"{self.path}: {what} claims {n_bytes} bytes and {left} are left; "
                "the file is truncated or damaged"
            )

    def number(self, code: str, what: str) -> Any:
        form = "<" + code
        return struct.unpack(form, self.take(struct.calcsize(form), what))[0]

    def name(self, what: str) -> str:
        """A short string, for names that errors quote."""
        return self.string(what, MAX_NAME_BYTES)

    def string(self, what: str, max_bytes: int = MAX_STRING_BYTES) -> str:
        n_bytes = self.number("Q", what)
        if n_bytes > max_bytes:
            raise CheckpointError(
                f"{self.path}: {what} claims {n_bytes} bytes; at most {max_bytes} are read"
            )
        data = self.take(n_bytes, what)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.path}: {what} is not UTF-8 text") from error

    def strings(self, count: int, what: str) -> list[str]:
        """Many strings; those in the window are read in one loop without calls, for speed."""
        self.require_bytes(count * 8, what)
        values: list[str] = []
        while len(values) < count:
            values.append(self.string(what))  # moves the window, and raises errors
            window, end, length = self.window, len(self.window), _LENGTH.unpack_from
            with contextlib.suppress(UnicodeDecodeError):
                for _ in range(count - len(values)):
                    start = self.at + 8
                    if start > end:
                        break
                    stop = start + length(window, start - 8)[0]
                    if stop > end:
                        break
                    values.append(window[start:stop].decode())
                    self.at = stop
        return values


def _value(cursor: _Cursor, kind: int, what: str) -> Any:
    if kind in _SCALARS:
        return cursor.number(_SCALARS[kind], what)
    if kind == _STRING:
        return cursor.string(what)
    if kind == _ARRAY:
        return _array(cursor, what)
    raise CheckpointError(f"{cursor.path}: {what} has the unknown value type {kind}")


def _array(cursor: _Cursor, what: str) -> list[Any]:
    kind, count = cursor.number("I", what), cursor.number("Q", what)
    cursor.array_values += count
    if cursor.array_values > MAX_ARRAY_VALUES:
        raise CheckpointError(
            f"{cursor.path}: the arrays up to {what} have {cursor.array_values} values; "
            f"at most {MAX_ARRAY_VALUES} are read"
        )
    if kind in _SCALARS:
        form = f"<{count}{_SCALARS[kind]}"
        return list(struct.unpack(form, cursor.take(struct.calcsize(form), what)))
    if kind == _STRING:
        return cursor.strings(count, what)
    raise CheckpointError(f"{cursor.path}: {what} is an array of the unsupported type {kind}")


def _tensor(cursor: _Cursor, index: int) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.name(f"the name of tensor {index}")
    what = f"tensor {name!r:.200}"
    n_dims = cursor.number("I", what)
    if not 1 <= n_dims <= MAX_DIMS:
        raise CheckpointError(f"{cursor.path}: {what} has {n_dims} dimensions, allowed 1 to 4")
    # Row-major as in torch, the reverse of the order in the file.
    shape = tuple(cursor.number("Q", what) for _ in range(n_dims))[::-1]
    return name, shape, cursor.number("I", what), cursor.number("Q", what)


def _n_bytes(shape: tuple[int, ...], type_number: int, fail: Callable[[str], None]) -> int:
    if type_number not in GGML_TYPES:
        name = _REFUSED_TYPES.get(type_number)
        shown = f"{name} ({type_number})" if name else str(type_number)
        known = ", ".join(name for name, _, _ in GGML_TYPES.values())
        fail(
            f"has the ggml type {shown}, which is not supported; use a file of another type, such "
            f"as Q8_0; supported: {known}"
        )
    _, block, block_bytes = GGML_TYPES[type_number]
    if shape[-1] % block:
        fail(f"has rows of {shape[-1]} values, not a multiple of its blocks of {block}")
    return math.prod(shape) // block * block_bytes


def read_gguf_header(path: Path) -> GGUFHeader:
    """Reads the header of a GGUF file, in time and memory bounded by the header's size.

    The last header is cached and returned again while the file's inode, size and modification time
    are unchanged. Callers share it and must not modify it.

    Raises: CheckpointError unless the file is a complete, well-formed little-endian GGUF file of
    version 2 or 3 with supported tensor types.
    """
    with reading(path):
        stat = path.stat()
        if time.time_ns() - stat.st_mtime_ns < SETTLED_NS:
            return _read(path, stat.st_size)
        return _cached_header(path, stat.st_size, stat.st_ino, stat.st_mtime_ns)


@functools.lru_cache(maxsize=1)
def _cached_header(path: Path, size: int, _inode: int, _mtime_ns: int) -> GGUFHeader:
    return _read(path, size)


def gguf_parts(name: str) -> list[str]:
    """The names of all parts of a split GGUF file, given one name; otherwise the name itself.

    >>> gguf_parts("model-00002-of-00002.gguf")
    ['model-00001-of-00002.gguf', 'model-00002-of-00002.gguf']
    """
    part = PART.search(name)
    if part is None:
        return [name]
    number, count = int(part[1]), int(part[2])
    if not 1 <= number <= count:
        raise UsageError(f"{name[-200:]}: part {number} of {count}; use the name of a part")
    start, end = name[: part.start()], name[-len(".gguf") :]
    return [f"{start}-{at:05}-of-{count:05}{end}" for at in range(1, count + 1)]


def read_split_header(paths: Sequence[Path]) -> GGUFHeader:
    """The header of a GGUF file that is split into parts, in their order; or of a whole file.

    The first part has the fields of the model. At most MAX_TENSORS tensors are read.

    Raises: CheckpointError as `read_gguf_header`, and for parts of other files; UsageError for one
    part without the others.
    Source: llama.cpp's gguf-split.
    """
    first, *others = paths
    header = read_gguf_header(first)
    _require_part(first, header.fields, 1, len(paths))
    if not others:
        return header
    tensors, n_tensors = {first: header.tensors}, len(header.tensors)
    for number, path in enumerate(others, 2):
        with reading(path):
            part = _read(path, path.stat().st_size)
        _require_part(path, part.fields, number, len(paths))
        tensors[path] = part.tensors
        n_tensors += len(part.tensors)
        if n_tensors > MAX_TENSORS:
            raise CheckpointError(f"{path}: tensor {n_tensors}; at most {MAX_TENSORS} are read")
    held = merged(first, tensors)
    files = {name: path for name, (path, _) in held.items()}
    return GGUFHeader(header.fields, {name: tensor for name, (_, tensor) in held.items()}, files)


def _require_part(path: Path, header_fields: dict[str, Any], number: int, count: int) -> None:
    """Compare what a file states about its place among parts with its name.

    Raises: as `read_split_header`.
    """
    fields = Fields(header_fields)
    with naming(path):
        stated_count = max(1, fields.integer("split.count", 1))  # 0 in files that were joined
        stated = 1 if stated_count == 1 else fields.integer("split.no", 0) + 1
    if stated_count > count == 1:
        raise UsageError(
            f"{path}: one of {stated_count} parts; give all parts the names that llama-gguf-split "
            f"does, such as NAME-{1:05}-of-{stated_count:05}.gguf, in one folder"
        )
    if (stated, stated_count) != (number, count):
        raise CheckpointError(
            f"{path}: is part {stated} of {stated_count}, but by its name part {number} of "
            f"{count}; fetch the parts again"
        )


def _read(path: Path, size: int) -> GGUFHeader:
    with open_file(path) as file:
        cursor = _Cursor(file, size, path)
        if cursor.take(4, "the magic number") != b"GGUF":
            raise CheckpointError(f"{path}: not a GGUF file (it does not begin with 'GGUF')")
        version = cursor.number("I", "the version")
        if version not in (2, 3):
            raise CheckpointError(f"{path}: GGUF version {version} is not supported; 2 and 3 are")
        n_tensors = cursor.number("Q", "the tensor count")
        n_fields = cursor.number("Q", "the field count")
        for count, limit, noun in (
            (n_tensors, MAX_TENSORS, "tensors"),
            (n_fields, MAX_FIELDS, "fields"),
        ):
            if count > limit:
                raise CheckpointError(f"{path}: claims {count} {noun}; at most {limit} are read")
        fields: dict[str, Any] = {}
        for index in range(n_fields):
            key = cursor.name(f"the name of field {index}")
            if key in fields:
                raise CheckpointError(f"{path}: field {key!r:.200} appears twice")
            what = f"field {key!r:.200}"
            fields[key] = _value(cursor, cursor.number("I", what), what)
        entries = [_tensor(cursor, index) for index in range(n_tensors)]
        header_end = cursor.position

    alignment = fields.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20 or alignment & alignment - 1:
        raise CheckpointError(f"{path}: general.alignment={alignment!r:.80} is not a power of two")
    data_start = -(-header_end // alignment) * alignment
    tensors = _located(path, entries, data_start, size)
    return GGUFHeader(fields, tensors, dict.fromkeys(tensors, path))


def _located(
    path: Path, entries: list[tuple[str, tuple[int, ...], int, int]], data_start: int, size: int
) -> dict[str, FileTensor]:
    """The tensors at absolute offsets, checked to be inside the file and not to overlap."""
    tensors: dict[str, FileTensor] = {}
    for name, shape, type_number, offset in entries:

        def fail(why: str, name: str = name) -> None:
            raise CheckpointError(f"{path}: tensor {name!r:.200} {why}")

        if name in tensors:
            fail("appears twice")
        if 0 in shape:
            fail(f"has an empty shape {list(shape)}")
        n_bytes = _n_bytes(shape, type_number, fail)
        start = data_start + offset
        if start + n_bytes > size:
            fail(
                f"needs bytes {start} to {start + n_bytes} and the file has {size}; "
                "it is truncated or damaged: fetch it again"
            )
        tensors[name] = FileTensor(name, GGML_TYPES[type_number][0], shape, start, n_bytes)
    ordered = sorted(tensors.values(), key=lambda tensor: tensor.offset)
    for first, second in itertools.pairwise(ordered):
        if first.offset + first.n_bytes > second.offset:
            raise CheckpointError(f"{path}: tensors {first.name!r} and {second.name!r} overlap")
    return tensors
