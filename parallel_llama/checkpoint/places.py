"""Where tensors lie in a weight file, byte for byte; told from its header, without a model."""

from dataclasses import dataclass
from pathlib import Path

from parallel_llama.checkpoint.names import Layout, hf_full_name, renamed
from parallel_llama.checkpoint.native_layout import axis_units, unit_of
from parallel_llama.checkpoint.safetensors_header import read_safetensors_header
from parallel_llama.checkpoint.torch_file import open_torch_file, storage_records
from parallel_llama.config import ModelArgs
from parallel_llama.errors import CheckpointError
from parallel_llama.gguf_header import read_gguf_header
from parallel_llama.plan import Param


@dataclass(frozen=True)
class Place:
    """The bytes of one tensor, or of a part of it, in one file.

    `name` is Meta's where the model has such a tensor, else the file's own.
    """

    name: str
    bytes: range


def places(path: Path) -> list[Place]:
    """Every tensor of a .safetensors, .pth or .gguf file, in the order of the file.

    Raises: CheckpointError if the file is damaged, or is none of these.
    """
    readers = {".safetensors": _safetensors, ".pth": _torch, ".gguf": _gguf}
    if path.suffix.lower() not in readers:
        raise CheckpointError(f"{path}: not a file of weights")
    try:
        found = readers[path.suffix.lower()](path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    return sorted(found, key=lambda place: place.bytes.start)


def unit_spans(place: Place, param: Param, args: ModelArgs) -> list[range]:
    """The bytes of each unit of a weight in a native folder, in the order of the file."""
    size = param.shape[param.dim]
    unit = unit_of(param, axis_units(args))
    per_row = len(place.bytes) // size
    return [
        place.bytes[start * per_row : min(start + unit, size) * per_row]
        for start in range(0, size, unit)
    ]


def _safetensors(path: Path) -> list[Place]:
    return [
        Place(_meta_name(name, "hf"), range(tensor.offset, tensor.offset + tensor.n_bytes))
        for name, tensor in read_safetensors_header(path).items()
    ]


def _gguf(path: Path) -> list[Place]:
    return [
        Place(_meta_name(name, "gguf"), range(tensor.offset, tensor.offset + tensor.n_bytes))
        for name, tensor in read_gguf_header(path).tensors.items()
    ]


def _torch(path: Path) -> list[Place]:
    """The map's address is not known; its first storage is the first record."""
    records = storage_records(path)
    state = {name: tensor for name, tensor in open_torch_file(path).items() if tensor.numel()}
    if not state:
        return []
    scattered = [name for name, tensor in state.items() if not tensor.is_contiguous()]
    if scattered:
        raise CheckpointError(f"{path}: tensor {scattered[0]!r} is not stored row by row")
    first = min(tensor.untyped_storage().data_ptr() for tensor in state.values())
    shift = min(offset for offset, _ in records) - first
    starts = {name: tensor.data_ptr() + shift for name, tensor in state.items()}
    return [
        Place(name, range(starts[name], starts[name] + tensor.nbytes))
        for name, tensor in state.items()
    ]


def _meta_name(name: str, layout: Layout) -> str:
    try:
        return renamed(hf_full_name(name) if layout == "hf" else name, layout, "meta")
    except KeyError:
        return name
