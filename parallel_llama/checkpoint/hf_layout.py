"""Writing a Hugging Face folder: safetensors under HF's names, their index, config.json."""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from parallel_llama.checkpoint.layout import TargetFile
from parallel_llama.checkpoint.names import renamed
from parallel_llama.checkpoint.safetensors_layout import StoredTensor, place
from parallel_llama.config import GenerationDefaults, ModelArgs
from parallel_llama.config.hf_writing import hf_config
from parallel_llama.plan import Param, parameters


class HFLayout:
    """A HF folder of `n_parts` files; `dtypes` are the tensors' by Meta's names.

    Raises: UsageError if there are more files than tensors, or config.json cannot say what the
    model is.
    """

    kind: Literal["hf"] = "hf"

    def __init__(
        self,
        args: ModelArgs,
        dtypes: Mapping[str, torch.dtype],
        n_parts: int,
        ids: GenerationDefaults | None = None,
    ) -> None:
        self._config = hf_config(args, ids)
        stored = [
            StoredTensor(renamed(param.name, "meta", "hf"), dtypes[param.name], param.shape)
            for param in parameters(args)
        ]
        numbers = range(1, n_parts + 1)
        names = [f"model-{number:05}-of-{n_parts:05}.safetensors" for number in numbers]
        self._placed = place(stored, names if n_parts > 1 else ["model.safetensors"])
        self._n_bytes = sum(tensor.n_bytes for tensor in stored)

    @property
    def files(self) -> tuple[TargetFile, ...]:
        return self._placed.files

    def create(self, folder: Path) -> None:
        self._placed.create(folder)

    def parts(self, param: Param, pieces: Iterable[Tensor]) -> Iterator[tuple[str, int, Tensor]]:
        return self._placed.parts(renamed(param.name, "meta", "hf"), pieces)

    def finish(self, folder: Path) -> None:
        """Nothing is left to do."""

    def metadata(self) -> dict[str, bytes]:
        files = {"config.json": _spelled(self._config)}
        if len(self.files) > 1:
            weight_map = {name: file for name, (file, _) in self._placed.places.items()}
            index = {"metadata": {"total_size": self._n_bytes}, "weight_map": weight_map}
            files["model.safetensors.index.json"] = _spelled(index)
        return files


def _spelled(value: object) -> bytes:
    return json.dumps(value, indent=2).encode() + b"\n"
