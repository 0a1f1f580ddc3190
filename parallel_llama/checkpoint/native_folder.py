"""Reading a native folder: a rank's share of a weight is one range of bytes."""

from torch import Tensor

from parallel_llama.checkpoint.byte_ranges import ByteRanges, Empty, new_memory
from parallel_llama.checkpoint.file_tensor import DTYPES, FileTensor
from parallel_llama.checkpoint.hf_folder import merged
from parallel_llama.checkpoint.native_layout import is_unit_major, stored_shape, unit_of
from parallel_llama.checkpoint.safetensors_header import read_safetensors_header
from parallel_llama.checkpoint.structure import require_structure
from parallel_llama.checkpoint.unit_major import from_unit_major
from parallel_llama.config import ModelArgs
from parallel_llama.config.native_config import native_units
from parallel_llama.errors import CheckpointError, UsageError
from parallel_llama.fields import read_json_object
from parallel_llama.model_files import ModelFiles
from parallel_llama.plan import Param, parameters


class NativeFolder:
    """The tensors of a native folder.

    Raises: CheckpointError if a file is damaged or native.json does not say how it was written.
    """

    def __init__(self, files: ModelFiles, args: ModelArgs, empty: Empty = new_memory) -> None:
        self.path, self.args = files.path, args
        try:
            self._units = native_units(read_json_object(files.config))
        except UsageError as error:
            raise CheckpointError(f"{files.config}: {error}") from error
        headers = {path: read_safetensors_header(path) for path in files.weights}
        self._tensors = merged(files.path, headers)
        self._files = {path: ByteRanges(path, empty) for path in files.weights}

    def check(self, args: ModelArgs) -> None:
        require_structure(
            self.path,
            {name: tensor.shape for name, (_, tensor) in self._tensors.items()},
            {p.name: stored_shape(p, unit_of(p, self._units)) for p in parameters(args)},
            lambda _: False,
        )
        for name, (path, tensor) in self._tensors.items():
            if tensor.dtype not in DTYPES:
                raise CheckpointError(
                    f"{path}: tensor {name!r} has the dtype {tensor.dtype}; a native folder has "
                    f"{', '.join(DTYPES)}"
                )

    def read(self, param: Param, rows: range) -> Tensor:
        path, tensor = self._tensors[param.name]
        if not is_unit_major(param):
            dtype = DTYPES[tensor.dtype]
            return self._files[path].values(tensor.offset, dtype, param, rows)
        return self._columns(self._files[path], tensor, param, rows)

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _columns(self, file: ByteRanges, tensor: FileTensor, param: Param, rows: range) -> Tensor:
        """Some columns of a weight in unit-major order; the units that hold them are read."""
        n_rows, n_columns = param.shape
        unit, dtype = unit_of(param, self._units), DTYPES[tensor.dtype]
        units = range(rows.start // unit, -(-rows.stop // unit) if rows else rows.start // unit)
        held = range(units.start * unit, min(units.stop * unit, n_columns))
        column_bytes = n_rows * dtype.itemsize
        data = file.matrix(tensor.offset, column_bytes, held, range(column_bytes))
        columns = from_unit_major(data.view(-1).view(dtype), n_rows, unit)
        if held == rows:
            return columns
        return columns[:, rows.start - held.start : rows.stop - held.start].contiguous()
