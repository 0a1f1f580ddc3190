"""Reading a Mistral folder: consolidated.safetensors, Meta's names with every weight whole."""

from parallel_llama.checkpoint.byte_ranges import Empty, new_memory
from parallel_llama.checkpoint.tensor_files import TensorFiles, merged
from parallel_llama.config import ModelArgs
from parallel_llama.dtypes import STORED
from parallel_llama.files.model_files import ModelFiles
from parallel_llama.files.safetensors_header import read_safetensors_header


class MistralFolder(TensorFiles):
    """The tensors of a Mistral folder, of one file or several.

    Raises: CheckpointError if a file is damaged or a tensor is in two of them.
    """

    layout = "meta"
    readable = f"readable are {', '.join(STORED)}; use the unquantised model"

    def __init__(self, files: ModelFiles, args: ModelArgs, empty: Empty = new_memory) -> None:
        headers = {path: read_safetensors_header(path) for path in files.weights}
        super().__init__(files, args, merged(files.path, headers), empty)
