"""The manifest: the hashes of a folder's files and tensors, stored in the folder.

Its encoding is unique and includes a hash of its own text, so a changed byte of the manifest is
detected too. Tensors are hashed in canonical form (see `canonical`), so folders of different
layouts can be compared.
"""

import os
import re
from collections.abc import Callable
from io import BufferedReader, FileIO
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal, Protocol

import msgspec
import torch
from blake3 import blake3
from msgspec import Meta, Struct
from msgspec.structs import replace
from torch import Tensor

from parallel_llama.dtypes import DTypeName
from parallel_llama.errors import CheckpointError
from parallel_llama.files.bounded_files import is_file, is_there, open_file, read_bytes
from parallel_llama.files.partial_output import replace_file, sync

MANIFEST = "manifest.json"
FORMAT = "parallel_llama manifest 1"
MAX_MANIFEST_BYTES = 100_000_000

_BUFFER_BYTES = 8 << 20
# Below this size, starting threads takes longer than it saves.
_THREADED_BYTES = 1 << 20

LayoutName = Literal["hf", "meta", "native", "gguf"]
Digest = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
Size = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class TensorEntry(Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor in canonical form, with the hash of its bytes."""

    dtype: DTypeName
    shape: Annotated[tuple[Size, ...], Meta(max_length=8)]
    blake3: Digest


class FileEntry(Struct, frozen=True, forbid_unknown_fields=True):
    """The size and hash of a file."""

    bytes: Size
    blake3: Digest


class Source(Struct, frozen=True, forbid_unknown_fields=True):
    """The source of a converted folder.

    `files` has the sizes of the weight files. `tensors` has the hashes of the tensors that were
    converted to another dtype.
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
    """The content of manifest.json.

    Args:
        files: all files of the folder except the manifest.
        units: in native folders, the hashes of the units of each stored tensor; empty for models
            with very many units.
        own: the hash of the manifest's text without this field; set by `write_manifest`.

    Raises: ValueError for a file name outside the folder.
    """

    layout: LayoutName
    tensors: dict[str, TensorEntry]
    files: dict[str, FileEntry]
    units: dict[str, list[Digest]] = {}
    source: Source | None = None
    own: Digest | None = msgspec.field(default=None, name="self")

    def __post_init__(self) -> None:
        for name in self.files:
            path = PurePosixPath(name)
            if not name or path.is_absolute() or ".." in path.parts or re.search(r"[\0\\]", name):
                raise ValueError(f"names the file {name[:200]!r}, which is outside the folder")


class Hasher(Protocol):
    """An incremental hash function."""

    def update(self, data: memoryview, /) -> object: ...

    def hexdigest(self) -> str: ...


def hash_bytes(data: bytes | bytearray | memoryview) -> str:
    """The BLAKE3 hash of bytes, in hexadecimal."""
    return blake3(data, max_threads=_threads(len(data))).hexdigest()


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a CPU tensor, row-major; a contiguous tensor is not copied."""
    data: memoryview = tensor.contiguous().view(-1).view(torch.uint8).numpy().data
    return data


def hash_file(
    path: Path,
    on_bytes: Callable[[int], None] = lambda _: None,
    span: range | None = None,
    hasher: Hasher | None = None,
) -> str:
    """The hash of a file, or of a span of its bytes, read once from front to back.

    `on_bytes` is called with the size of each piece; `hasher` is BLAKE3 by default.

    Raises: CheckpointError if the file cannot be read, or ends before the span does.
    """
    with open_file(path) as file:
        span = range(os.fstat(file.fileno()).st_size) if span is None else span
        hasher = hasher or blake3(max_threads=_threads(len(span)))
        try:
            file.seek(span.start)
            stop = span.start + feed(hasher, file, len(span), on_bytes)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    if stop < span.stop:
        raise CheckpointError(f"{path}: ends at byte {stop}, expected {span.stop}")
    return hasher.hexdigest()


def feed(
    hasher: Hasher,
    file: BufferedReader | FileIO,
    n_bytes: int,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> int:
    """Hash the next bytes of a file; returns their number, less than `n_bytes` at its end."""
    buffer = memoryview(bytearray(min(n_bytes, _BUFFER_BYTES)))
    done = 0
    while done < n_bytes and (count := file.readinto(buffer[: n_bytes - done])):
        hasher.update(buffer[:count])
        on_bytes(count)
        done += count
    return done


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest of a folder; after a crash it is complete or unchanged."""
    temporary = folder / f".{MANIFEST}.partial"
    replace_file(folder / MANIFEST, temporary, encode_manifest(manifest))
    sync(folder)


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a folder, or None if it has none.

    Raises: CheckpointError unless `write_manifest` wrote exactly these bytes.
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
        raise CheckpointError(
            f"{path}: damaged: {error}; write the folder again with reshard"
        ) from error
    if encode_manifest(manifest) != data:
        raise CheckpointError(
            f"{path}: damaged or edited: its text does not match its own hash; write the folder "
            "again with reshard"
        )
    return manifest


def encode_manifest(manifest: Manifest) -> bytes:
    """The unique encoding of a manifest, with its own hash."""
    bare = replace(manifest, own=None)
    return _encoded(replace(bare, own=hash_bytes(_encoded(bare))))


def _encoded(manifest: Manifest) -> bytes:
    return msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n"


def _threads(n_bytes: int) -> int:
    return blake3.AUTO if n_bytes >= _THREADED_BYTES else 1
