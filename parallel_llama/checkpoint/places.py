"""Where tensors lie in a weight file, byte for byte; told from its header, without a model."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from parallel_llama.checkpoint.file_tensor import FileTensor
from parallel_llama.checkpoint.names import Layout, hf_full_name, renamed
from parallel_llama.checkpoint.native_layout import axis_units, unit_of
from parallel_llama.checkpoint.safetensors_header import read_safetensors_header
from parallel_llama.checkpoint.torch_file import read_torch_header
from parallel_llama.config import ModelArgs
from parallel_llama.errors import CheckpointError
from parallel_llama.gguf_header import GGUFTensor, read_gguf_header
from parallel_llama.plan import Param

# How to read each kind of file, and whose names it has.
_READERS: dict[str, tuple[Callable[[Path], Mapping[str, FileTensor | GGUFTensor]], Layout]] = {
    ".safetensors": (read_safetensors_header, "hf"),
    ".bin": (read_torch_header, "hf"),
    ".pth": (read_torch_header, "meta"),
    ".gguf": (lambda path: read_gguf_header(path).tensors, "gguf"),
}


@dataclass(frozen=True)
class Place:
    """The bytes of one tensor, or of a part of it, in one file.

    `name` is Meta's where the model has such a tensor, else the file's own.
    """

    name: str
    bytes: range


def places(path: Path) -> list[Place]:
    """Every tensor of a .safetensors, .bin, .pth or .gguf file, in the order of the file.

    Raises: CheckpointError if the file is damaged, or is none of these.
    """
    suffix = path.suffix.lower()
    if suffix not in _READERS:
        raise CheckpointError(f"{path}: not a file of weights")
    read, layout = _READERS[suffix]
    try:
        found = read(path).values()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    held = [
        Place(_meta_name(tensor.name, layout), range(tensor.offset, tensor.offset + tensor.n_bytes))
        for tensor in found
    ]
    return sorted(held, key=lambda place: place.bytes.start)


def unit_spans(place: Place, param: Param, args: ModelArgs) -> list[range]:
    """The bytes of each unit of a weight in a native folder, in the order of the file."""
    size = param.shape[param.dim]
    unit = unit_of(param, axis_units(args))
    per_row = len(place.bytes) // size
    return [
        place.bytes[start * per_row : min(start + unit, size) * per_row]
        for start in range(0, size, unit)
    ]


def _meta_name(name: str, layout: Layout) -> str:
    try:
        return renamed(hf_full_name(name) if layout == "hf" else name, layout, "meta")
    except KeyError:
        return name
