"""Reading a Hugging Face folder: one file or an index of many, safetensors or torch's own.

Its rows of wq and wk are in the half-split order already. Reads exactly the bytes asked for.
"""

from pathlib import Path

from torch import Tensor

from parallel_llama.checkpoint.byte_ranges import ByteRanges, Empty, new_memory
from parallel_llama.checkpoint.file_tensor import DTYPES, FileTensor
from parallel_llama.checkpoint.names import hf_full_name, is_skipped, renamed
from parallel_llama.checkpoint.safetensors_header import read_safetensors_header
from parallel_llama.checkpoint.structure import listed, require_structure
from parallel_llama.checkpoint.torch_file import read_torch_header
from parallel_llama.config import ModelArgs
from parallel_llama.errors import CheckpointError
from parallel_llama.fields import read_json_object
from parallel_llama.model_files import MAX_INDEX_BYTES, ModelFiles
from parallel_llama.plan import Param, parameters

READERS = {".safetensors": read_safetensors_header, ".bin": read_torch_header}


class HFFolder:
    """The tensors of a HF folder.

    Raises: CheckpointError if a file is damaged, or the files and their index disagree.
    """

    def __init__(self, files: ModelFiles, args: ModelArgs, empty: Empty = new_memory) -> None:
        self.path, self.args = files.path, args
        headers = {path: _header(path) for path in files.weights}
        self._tensors = merged(files.path, headers)
        if files.index is not None:
            _require_index(files.index, headers, args)
        self._files = {path: ByteRanges(path, empty) for path in files.weights}

    def check(self, args: ModelArgs) -> None:
        wanted = {renamed(param.name, "meta", "hf"): param.shape for param in parameters(args)}
        require_structure(
            self.path,
            {name: tensor.shape for name, (_, tensor) in self._tensors.items()},
            wanted,
            lambda name: is_skipped(name, "hf", args),
        )
        for name in wanted:
            path, tensor = self._tensors[name]
            if tensor.dtype not in DTYPES:
                raise CheckpointError(
                    f"{path}: tensor {name!r} has the dtype {tensor.dtype}; readable are "
                    f"{', '.join(DTYPES)}: use a checkpoint that is not quantised"
                )

    def read(self, param: Param, rows: range) -> Tensor:
        path, tensor = self._tensors[renamed(param.name, "meta", "hf")]
        return self._files[path].values(tensor.offset, DTYPES[tensor.dtype], param, rows)

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def _header(path: Path) -> dict[str, FileTensor]:
    """A file's tensors under the names that they have in a model with a head."""
    tensors: dict[str, FileTensor] = {}
    for name, tensor in READERS[path.suffix](path).items():
        full_name = hf_full_name(name)
        if full_name in tensors:
            raise CheckpointError(
                f"{path}: holds {full_name!r:.200} with and without the 'model.'; remove one"
            )
        tensors[full_name] = tensor
    return tensors


def merged(
    where: Path, headers: dict[Path, dict[str, FileTensor]]
) -> dict[str, tuple[Path, FileTensor]]:
    """Every tensor of some files, with the file that holds it.

    Raises: CheckpointError if two files hold the same one.
    """
    tensors: dict[str, tuple[Path, FileTensor]] = {}
    for path, header in headers.items():
        for name, tensor in header.items():
            if name in tensors:
                raise CheckpointError(
                    f"{where}: tensor {name!r:.200} is in {tensors[name][0].name} and in "
                    f"{path.name}; remove the file that does not belong to this checkpoint"
                )
            tensors[name] = path, tensor
    return tensors


def _require_index(
    index: Path, headers: dict[Path, dict[str, FileTensor]], args: ModelArgs
) -> None:
    """Check that the index names every tensor of the files, each in the file that holds it."""
    listing = _weight_map(index)
    held = {name: path for path, header in headers.items() for name in header}
    wrong = [
        f"{name!r} should be in {file.name!r} and is "
        + (f"in {held[name].name!r}" if name in held else "in none of the files")
        for name, file in listing.items()
        if held.get(name) != file
    ]
    unlisted = [
        repr(name) for name in held if name not in listing and not is_skipped(name, "hf", args)
    ]
    if wrong or unlisted:
        parts = [listed(wrong)] if wrong else []
        parts += [f"not listed: {listed(unlisted)}"] if unlisted else []
        raise CheckpointError(
            f"{index}: does not fit the files beside it; {'; '.join(parts)}; fetch them again"
        )


def _weight_map(index: Path) -> dict[str, Path]:
    listing = read_json_object(index, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(listing, dict) or not all(isinstance(file, str) for file in listing.values()):
        raise CheckpointError(f"{index}: needs a weight_map from tensor names to file names")
    return {hf_full_name(name): index.parent / file for name, file in listing.items()}
