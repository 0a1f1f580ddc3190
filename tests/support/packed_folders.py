"""HF folders as AutoGPTQ and AutoAWQ write them, packed here from integers known in advance.

This module does not use the package: it packs one integer at a time.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

# quantization_config of each kind, without its group_size.
KINDS: dict[str, dict[str, Any]] = {
    "gptq": {"quant_method": "gptq", "bits": 4, "desc_act": False, "sym": False},
    "gptq_v2": {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"},
    "awq": {"quant_method": "awq", "bits": 4, "zero_point": True, "version": "gemm"},
}

# The output, of eight, that each four bits of AWQ's words belong to.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Matrix:
    """Integers [out, in], and zeros and scales [out, groups], the last in float16.

    `groups` has the group of each input; None if the inputs of a group are consecutive.
    """

    integers: np.ndarray
    zeros: np.ndarray
    scales: np.ndarray
    n_bits: int = 4
    groups: np.ndarray | None = None

    @property
    def group_of(self) -> np.ndarray:
        n_inputs, n_groups = self.integers.shape[1], self.zeros.shape[1]
        in_order = np.arange(n_inputs) // (n_inputs // n_groups)
        return in_order if self.groups is None else self.groups

    @property
    def values(self) -> Tensor:
        """The dequantised values, exactly. Shapes: [out, in] float64."""
        zeros, scales = (each[:, self.group_of] for each in (self.zeros, self.scales))
        return torch.from_numpy((self.integers - zeros.astype(float)) * scales.astype(float))

    def packed(self, kind: str) -> dict[str, Tensor]:
        """The tensors of a kind of folder, by the ends of their names."""
        integers, zeros = self.integers.astype(np.uint32), self.zeros.astype(np.uint32)
        if kind == "awq":
            words = {"qweight": _across(integers, _AWQ_ORDER), "qzeros": _across(zeros, _AWQ_ORDER)}
        else:
            if kind == "gptq":
                n_values = 1 << self.n_bits
                zeros = (zeros + n_values - 1) % n_values  # one less, and 0 becomes the largest
            words = {
                "qweight": _along(integers, self.n_bits),
                "qzeros": _across(zeros, range(32 // self.n_bits)),
                "g_idx": self.group_of.astype(np.uint32),
            }
        tensors = {name: torch.from_numpy(each.view(np.int32)) for name, each in words.items()}
        return {**tensors, "scales": torch.from_numpy(self.scales.T.copy())}


def _along(integers: np.ndarray, n_bits: int) -> np.ndarray:
    """Eight inputs of 4 bits in a word. Shapes: [out, in] -> [in / 8, out]."""
    per_word = 32 // n_bits
    words = np.zeros((integers.shape[1] // per_word, len(integers)), dtype=np.uint32)
    for at, of_outputs in enumerate(integers.T):
        words[at // per_word] |= of_outputs << np.uint32(n_bits * (at % per_word))
    return words


def _across(integers: np.ndarray, order: Sequence[int]) -> np.ndarray:
    """Eight outputs of 4 bits in a word. Shapes: [out, n] -> [n, out / 8]."""
    per_word = len(order)
    words = np.zeros((integers.shape[1], len(integers) // per_word), dtype=np.uint32)
    for word in range(words.shape[1]):
        for place, output in enumerate(order):
            at = per_word * word + output
            words[:, word] |= integers[at] << np.uint32(32 // per_word * place)
    return words


def random_matrix(
    n_outputs: int, n_inputs: int, size: int, n_bits: int = 4, groups: np.ndarray | None = None
) -> Matrix:
    """A matrix of random integers and zeros, with all values."""
    rng, shape = np.random.default_rng(0), (n_outputs, n_inputs // size)
    return Matrix(
        rng.integers(0, 1 << n_bits, (n_outputs, n_inputs)),
        rng.integers(0, 1 << n_bits, shape),
        rng.uniform(0.01, 0.1, shape).astype(np.float16),
        n_bits,
        groups,
    )


def rounded(values: Tensor, size: int, n_bits: int = 4, any_order: bool = False) -> Matrix:
    """A matrix near these values, with all integers over the range of each group.

    With `any_order`, the groups have inputs from everywhere.
    """
    n_inputs, most = values.shape[1], (1 << n_bits) - 1
    order = np.random.default_rng(n_inputs).permutation(n_inputs)
    order = order if any_order else np.arange(n_inputs)
    by_group = values.numpy()[:, order].reshape(len(values), -1, size)
    low, high = by_group.min(2).clip(max=0), by_group.max(2).clip(min=0)
    scales = ((high - low) / most).astype(np.float16)
    zeros = (-low / scales).round().clip(0, most).astype(np.int64)
    integers = (by_group / scales[..., None]).round() + zeros[..., None]
    integers = integers.clip(0, most).astype(np.int64).reshape(values.shape)
    back = np.argsort(order)
    groups = back // size if any_order else None
    return Matrix(integers[:, back], zeros, scales, n_bits, groups)


def is_projection(name: str) -> bool:
    return name.endswith("_proj.weight")


def write_packed(
    source: Path,
    folder: Path,
    kind: str,
    size: int = 128,
    is_quantised: Callable[[str], bool] = is_projection,
    **own: Any,
) -> Path:
    """Writes an HF folder's model with matrices of one of KINDS, as `write_quantised`."""

    stated = {**KINDS[kind], "group_size": size, **own}

    def quantise(values: Tensor) -> tuple[Mapping[str, Tensor], Tensor]:
        width = values.shape[1] if size == -1 else size
        matrix = rounded(values, width, stated["bits"], stated.get("desc_act", False))
        return matrix.packed(kind), matrix.values

    return write_quantised(source, folder, quantise, stated, torch.float16, is_quantised)


def write_quantised(
    source: Path,
    folder: Path,
    quantise: Callable[[Tensor], tuple[Mapping[str, Tensor], Tensor]],
    stated: Mapping[str, Any],
    dtype: torch.dtype,
    is_quantised: Callable[[str], bool] = is_projection,
) -> Path:
    """Writes an HF folder's model with quantised matrices and all else in `dtype`.

    The folder `meant` beside it holds the same model in float64 with the dequantised values.
    `quantise` returns a matrix's tensors by the suffixes of their names, and its dequantised
    values.
    """
    stored: dict[str, Tensor] = {}
    meant: dict[str, Tensor] = {}
    for name, values in load_file(source / "model.safetensors").items():
        if is_quantised(name):
            tensors, meant[name] = quantise(values)
            base = name.removesuffix("weight")
            stored |= {base + end: tensor for end, tensor in tensors.items()}
        else:
            stored[name] = values.to(dtype)
            meant[name] = stored[name].double()
    config = json.loads((source / "config.json").read_text())
    in_files = str(dtype).removeprefix("torch.")
    _write(folder, stored, {**config, "dtype": in_files, "quantization_config": stated})
    _write(meant_by(folder), meant, config)
    return folder


def meant_by(folder: Path) -> Path:
    """The folder with the dequantised values of another folder."""
    return folder.with_name(f"{folder.name}-meant")


def _write(folder: Path, tensors: dict[str, Tensor], config: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True)
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
