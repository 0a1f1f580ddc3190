"""The base class of readers of unsharded tensors: for all layouts but Meta's."""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from torch import Tensor

from parallel_llama.checkpoint.byte_ranges import ByteRanges, Empty, new_memory
from parallel_llama.checkpoint.checkpoint import Checkpoint, refuse_difference
from parallel_llama.checkpoint.torch_file import read_torch_header
from parallel_llama.dtypes import QUANT_GROUP_SIZE, STORED
from parallel_llama.errors import CheckpointError
from parallel_llama.families import family_of, stored_slices
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.families.names import Layout
from parallel_llama.families.stored_slices import StoredSlice
from parallel_llama.families.weights import Param
from parallel_llama.files.gguf_header import read_gguf_header
from parallel_llama.files.model_files import ModelFiles
from parallel_llama.files.safetensors_header import (
    FileTensor,
    HeldTensors,
    merged,
    read_safetensors_header,
)
from parallel_llama.ops.formats import torch_dtype
from parallel_llama.ops.quant import QuantMatrix

HEADER_READERS: dict[str, Callable[[Path], Mapping[str, FileTensor]]] = {
    ".safetensors": read_safetensors_header,
    ".bin": read_torch_header,
    ".pth": read_torch_header,
    ".gguf": lambda path: read_gguf_header(path).tensors,
}


class TensorFiles(Checkpoint):
    """Tensors by their names in the files.

    Attributes:
        layout: defines names, slices and rotary order. None if every weight is a tensor of its own,
            with the model's name and in half-split order.
        readable: the end of the error for an unreadable dtype; None if every dtype is readable.
    """

    layout: Layout | None = None
    readable: str | None = None

    def __init__(
        self,
        files: ModelFiles,
        args: ModelArgs,
        empty: Empty = new_memory,
        tensors: HeldTensors | None = None,
    ) -> None:
        super().__init__(args, family_of(args).rotary_order[self.layout] if self.layout else "half")
        self.path = files.path
        if tensors is None:
            tensors = merged(files.path, {path: read_header(path) for path in files.weights})
        self._tensors = tensors
        self._slices = self._slices_of(args)
        self._files = {path: ByteRanges(path, empty) for path in files.weights}

    def check(self, args: ModelArgs) -> None:
        file_shapes = {name: tensor.shape for name, (_, tensor) in self._tensors.items()}
        expected = {
            stored_slice.name: stored_slice.shape for stored_slice in self._slices_of(args).values()
        }
        extra = [name for name in file_shapes if name not in expected]
        if self.layout is not None:
            extra = [name for name in extra if not family_of(args).skips(name, self.layout, args)]
        misshapen = [
            f"{name} is {list(file_shapes[name])}, expected {list(shape)}"
            for name, shape in expected.items()
            if name in file_shapes and not self._fits(file_shapes[name], shape)
        ]
        missing = [name for name in expected if name not in file_shapes]
        refuse_difference(
            self.path,
            {"missing": missing, "extra": list(map(repr, extra)), "misshapen": misshapen},
        )
        for name in expected if self.readable else ():
            path, tensor = self._tensors[name]
            if tensor.dtype not in self._dtypes(name):
                raise CheckpointError(
                    f"{path}: tensor {name!r:.200} has the dtype {tensor.dtype}; {self.readable}"
                )

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _stored(self, param: Param, rows: range) -> Tensor:
        file, tensor = self._held(param)
        dtype, stored_slice = torch_dtype(STORED[tensor.dtype]), self._slices[param.name]
        return file.values(tensor.offset, dtype, param, stored_slice, rows)

    def _held(self, param: Param) -> tuple[ByteRanges, FileTensor]:
        """The file that holds a weight, and its stored tensor."""
        path, tensor = self._tensors[self._slices[param.name].name]
        return self._files[path], tensor

    def _slices_of(self, args: ModelArgs) -> Mapping[str, StoredSlice]:
        assert self.layout is not None, "a reader without a layout overrides this method"
        return stored_slices(args, self.layout)

    def _fits(self, file_shape: tuple[int, ...], shape: tuple[int, ...]) -> bool:
        """Whether a tensor in a file has the shape of a stored tensor."""
        return file_shape == shape

    def _dtypes(self, name: str) -> Collection[str]:  # noqa: ARG002 (subclasses use it)
        """The readable dtypes of a stored tensor."""
        return STORED


def read_header(path: Path) -> Mapping[str, FileTensor]:
    """The locations of all tensors of a file of weights, by name.

    Raises: CheckpointError if the file is damaged, or its suffix is not in HEADER_READERS.
    """
    read = HEADER_READERS.get(path.suffix.lower())
    if read is None:
        raise CheckpointError(f"{path}: not a file of weights")
    return read(path)


def decoded(param: Param, rows: range, groups: Callable[[range], QuantMatrix]) -> Tensor:
    """Dequantised rows or columns of a matrix; `groups` reads whole groups."""
    if param.dim == 0:
        return groups(rows).values()
    whole_groups = range(
        rows.start // QUANT_GROUP_SIZE * QUANT_GROUP_SIZE,
        -(-rows.stop // QUANT_GROUP_SIZE) * QUANT_GROUP_SIZE,
    )
    columns = groups(whole_groups).values()
    return columns[:, rows.start - whole_groups.start :][:, : len(rows)].contiguous()
