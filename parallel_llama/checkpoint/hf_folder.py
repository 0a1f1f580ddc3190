"""Reading a Hugging Face folder: one file or an index of many, safetensors or torch's own."""

from pathlib import Path

from parallel_llama.checkpoint.byte_ranges import Empty, new_memory
from parallel_llama.checkpoint.tensor_files import TensorFiles, merged
from parallel_llama.checkpoint.torch_file import read_torch_header
from parallel_llama.config import ModelArgs
from parallel_llama.dtypes import STORED
from parallel_llama.errors import CheckpointError, listed
from parallel_llama.families import family_of
from parallel_llama.families.names import hf_full_name
from parallel_llama.files.json_text import read_json_object
from parallel_llama.files.model_files import MAX_INDEX_BYTES, ModelFiles
from parallel_llama.files.safetensors_header import FileTensor, read_safetensors_header

# How the tensors of GPTQ, AWQ, bitsandbytes and fp8 checkpoints end, which config.json should tell.
_QUANTISED = (".qweight", ".qzeros", ".absmax", ".weight_scale", ".weight_scale_inv")
_INSTEAD = "use the unquantised model, or a GGUF file of it"

READERS = {".safetensors": read_safetensors_header, ".bin": read_torch_header}


class HFFolder(TensorFiles):
    """The tensors of a HF folder.

    Raises: CheckpointError if a file is damaged, or the files and their index disagree.
    """

    layout = "hf"
    readable = f"readable are {', '.join(STORED)}; {_INSTEAD}"

    def __init__(self, files: ModelFiles, args: ModelArgs, empty: Empty = new_memory) -> None:
        headers = {path: _header(path, args) for path in files.weights}
        tensors = merged(files.path, headers)
        if files.index is not None:
            _require_index(files.index, headers, args)
        super().__init__(files, args, tensors, empty)

    def check(self, args: ModelArgs) -> None:
        quantised = next((name for name in self._tensors if name.endswith(_QUANTISED)), None)
        if quantised is not None:
            raise CheckpointError(
                f"{self._tensors[quantised][0]}: tensor {quantised!r:.200} is part of a quantised "
                f"weight, which is not supported; {_INSTEAD}"
            )
        super().check(args)


def _header(path: Path, args: ModelArgs) -> dict[str, FileTensor]:
    """A file's tensors under the names that they have in a model with a head."""
    tensors: dict[str, FileTensor] = {}
    for name, tensor in READERS[path.suffix](path).items():
        full_name = hf_full_name(name, family_of(args).names)
        if full_name in tensors:
            base = full_name.partition(".")[0]
            raise CheckpointError(
                f"{path}: holds {full_name!r:.200} with and without the '{base}.'; remove one"
            )
        tensors[full_name] = tensor
    return tensors


def _require_index(
    index: Path, headers: dict[Path, dict[str, FileTensor]], args: ModelArgs
) -> None:
    """Check that the index names every tensor of the files, each in the file that holds it."""
    weight_map = read_json_object(index, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
        raise CheckpointError(f"{index}: needs a weight_map from tensor names to file names")
    names = family_of(args).names
    listing = {hf_full_name(n, names): index.parent / file for n, file in weight_map.items()}
    held = {name: path for path, header in headers.items() for name in header}
    wrong = [
        f"{name!r} should be in {file.name!r} and is "
        + (f"in {held[name].name!r}" if name in held else "in none of the files")
        for name, file in listing.items()
        if held.get(name) != file
    ]
    unlisted = [
        repr(name)
        for name in held
        if name not in listing and not family_of(args).skips(name, "hf", args)
    ]
    if wrong or unlisted:
        parts = [listed(wrong)] if wrong else []
        parts += [f"not listed: {listed(unlisted)}"] if unlisted else []
        raise CheckpointError(
            f"{index}: does not fit the files beside it; {'; '.join(parts)}; fetch them again"
        )
