"""The manifest: what the files and the tensors of a folder hash to, kept in the folder itself.

It has exactly one spelling, and carries a hash of its own text: a changed byte of it is found like
one of any other file. A tensor is hashed in its canonical form (Meta's name, whole, row by row, wq
and wk in half-split rotary order), so folders of different layouts can be compared. It knows
nothing of layouts beyond their names.
"""

import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal

import msgspec
import torch
from blake3 import blake3
from msgspec import Meta, Struct
from msgspec.structs import replace
from torch import Tensor

from parallel_llama.bounded_files import is_file, is_there, open_file, read_bytes
from parallel_llama.errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT = "parallel_llama manifest 1"
MAX_MANIFEST_BYTES = 100_000_000

_BUFFER_BYTES = 8 << 20
# Below this size, waking other threads costs more than they bring.
_THREADED_BYTES = 1 << 20

LayoutName = Literal["hf", "meta", "native", "gguf"]
DTypeName = Literal["float64", "float32", "float16", "bfloat16"]
Digest = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
Size = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class TensorEntry(Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor in its canonical form; `blake3` is of its bytes."""

    dtype: DTypeName
    shape: Annotated[tuple[Size, ...], Meta(max_length=8)]
    blake3: Digest


class FileEntry(Struct, frozen=True, forbid_unknown_fields=True):
    """A file as it lies in the folder."""

    bytes: Size
    blake3: Digest


class Source(Struct, frozen=True, forbid_unknown_fields=True):
    """What a folder was made from.

    `files` gives sizes by name; `tensors` the hashes that a change of dtype made different.
    """

    layout: LayoutName
    files: dict[str, Size]
    tensors: dict[str, Digest] = {}


class Manifest(
    Struct,
    frozen=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
    tag_field="format",
    tag=FORMAT,
):
    """The contents of manifest.json.

    `units` has, for native folders, the hash of every unit of a tensor as it lies in its file.
    `files` are all files of the folder but the manifest. `own` is the hash of the manifest's text
    with that field left out; `write_manifest` fills it in.

    Raises: ValueError for a file name that leads out of the folder.
    """

    layout: LayoutName
    tensors: dict[str, TensorEntry]
    files: dict[str, FileEntry]
    units: dict[str, list[Digest]] = {}
    source: Source | None = None
    own: Digest | None = msgspec.field(default=None, name="self")

    def __post_init__(self) -> None:
        for name in self.files:
            _require_inside(name)


def hash_bytes(data: bytes | bytearray | memoryview) -> str:
    """The BLAKE3 hash of some bytes, in hexadecimal."""
    return blake3(data, max_threads=_threads(len(data))).hexdigest()


def hash_tensor(tensor: Tensor) -> str:
    """The hash of a CPU tensor's values, row by row; a contiguous tensor is not copied."""
    return hash_bytes(tensor_bytes(tensor))


def hash_pieces(pieces: Iterable[Tensor]) -> str:
    """The hash of tensors behind each other, as `hash_tensor` of the whole; one at a time."""
    hasher = blake3(max_threads=blake3.AUTO)
    for piece in pieces:
        hasher.update(tensor_bytes(piece))
    return hasher.hexdigest()


def tensor_bytes(tensor: Tensor) -> memoryview:
    """A CPU tensor's bytes, row by row; a contiguous tensor is not copied."""
    data: memoryview = tensor.contiguous().view(-1).view(torch.uint8).numpy().data
    return data


def hash_file(
    path: Path, on_bytes: Callable[[int], None] = lambda _: None, span: range | None = None
) -> str:
    """The hash of a file, or of a span of its bytes, read once from front to back.

    `on_bytes` is told of every piece.

    Raises: CheckpointError if it cannot be read, or ends before the span does.
    """
    with open_file(path) as file:
        span = range(os.fstat(file.fileno()).st_size) if span is None else span
        hasher = blake3(max_threads=_threads(len(span)))
        buffer = memoryview(bytearray(min(len(span), _BUFFER_BYTES)))
        left = len(span)
        try:
            file.seek(span.start)
            while left and (count := file.readinto(buffer[:left])):
                hasher.update(buffer[:count])
                on_bytes(count)
                left -= count
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    if left:
        raise CheckpointError(f"{path}: ends at byte {span.stop - left}, expected {span.stop}")
    return hasher.hexdigest()


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Put a manifest into a folder: after a crash it is there whole, or as it was before."""
    path, partial = folder / MANIFEST, folder / f".{MANIFEST}.partial"
    with partial.open("wb") as file:
        file.write(encode_manifest(manifest))
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    directory = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a folder; None where there is none.

    Raises: CheckpointError unless it is, byte for byte, one that `write_manifest` wrote.
    """
    path = folder / MANIFEST
    if not is_file(path):
        if path.is_symlink() or is_there(path):
            raise CheckpointError(f"{path}: not a file; remove it")
        return None
    data = read_bytes(path, MAX_MANIFEST_BYTES)
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        raise CheckpointError(f"{path}: damaged: {error}; write it anew with reshard") from error
    if encode_manifest(manifest) != data:
        raise CheckpointError(
            f"{path}: damaged or edited: its text does not have the hash that it carries; "
            "write it anew with reshard"
        )
    return manifest


def encode_manifest(manifest: Manifest) -> bytes:
    """The one spelling of a manifest, its own hash filled in."""
    bare = replace(manifest, own=None)
    return _spelled(replace(bare, own=hash_bytes(_spelled(bare))))


def _spelled(manifest: Manifest) -> bytes:
    return msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n"


def _threads(n_bytes: int) -> int:
    return blake3.AUTO if n_bytes >= _THREADED_BYTES else 1


def _require_inside(name: str) -> None:
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts or re.search(r"[\0\\]", name):
        raise ValueError(f"names the file {name[:200]!r}, which lies outside the folder")
