"""A checkpoint's tensors in canonical form: the same bytes and hash whatever the layout.

Meta's name, whole, row by row, wq and wk in half-split rotary order, in the stored dtype (float32
where it was quantised).
"""

from collections.abc import Callable, Iterator

import msgspec
from torch import Tensor

from parallel_llama.bounded_files import is_file, names_in
from parallel_llama.checkpoint.manifest import (
    MANIFEST,
    DTypeName,
    FileEntry,
    Manifest,
    Source,
    TensorEntry,
    hash_file,
    hash_pieces,
)
from parallel_llama.checkpoint.places import places, unit_spans
from parallel_llama.checkpoint.reading import Checkpoint, pieces_of
from parallel_llama.config import ModelArgs
from parallel_llama.errors import UsageError
from parallel_llama.model_files import ModelFiles
from parallel_llama.plan import Param, parameters

# So few that their memory is used again for the next, and that they are hashed in the cache.
ROW_PIECE_VALUES = 1 << 22


def canonical_entry(
    checkpoint: Checkpoint, param: Param, on_bytes: Callable[[int], None] = lambda _: None
) -> TensorEntry:
    """Shape, dtype and hash of one tensor; holds a bounded piece, or all of one cut on dim 1.

    Raises: CheckpointError if it cannot be read.
    """
    dtypes: set[str] = set()

    def read() -> Iterator[Tensor]:
        for rows in row_pieces(param):
            piece = checkpoint.read(param, rows)
            dtypes.add(str(piece.dtype).removeprefix("torch."))
            on_bytes(piece.nbytes)
            yield piece

    digest = hash_pieces(read())
    (dtype,) = dtypes
    return TensorEntry(msgspec.convert(dtype, DTypeName), param.shape, digest)


def row_pieces(param: Param) -> list[range]:
    """What to read of a whole tensor, one after the other, to have it row by row.

    Pieces of rows lie behind each other in the whole; pieces of columns do not, so a tensor that
    ranks cut by columns is one piece.
    """
    whole = range(param.shape[param.dim])
    return pieces_of(param, whole, ROW_PIECE_VALUES) if param.dim == 0 else [whole]


def describe(
    files: ModelFiles,
    args: ModelArgs,
    checkpoint: Checkpoint,
    source: Source | None = None,
) -> Manifest:
    """The manifest of a folder as it lies there: every file and every tensor hashed.

    Raises: CheckpointError if a file or tensor cannot be read; UsageError for a GGUF file or a
    shape, which are no folders.
    """
    if files.kind not in ("hf", "meta", "native"):
        raise UsageError(f"{files.path}: a manifest belongs to a folder; reshard it into one")
    paths = {files.path / name for name in names_in(files.path) if name != MANIFEST}
    entries = {
        path.relative_to(files.path).as_posix(): FileEntry(path.stat().st_size, hash_file(path))
        for path in sorted(set(filter(is_file, paths)) | set(files.weights))
    }
    tensors = {param.name: canonical_entry(checkpoint, param) for param in parameters(args)}
    units = _units(files, args) if files.kind == "native" else {}
    return Manifest(files.kind, tensors, entries, units, source)


def _units(files: ModelFiles, args: ModelArgs) -> dict[str, list[str]]:
    """The hash of every unit of every weight, as they lie in the files of a native folder."""
    held = {place.name: (path, place) for path in files.weights for place in places(path)}
    return {
        param.name: [
            hash_file(held[param.name][0], span=span)
            for span in unit_spans(held[param.name][1], param, args)
        ]
        for param in parameters(args)
    }
