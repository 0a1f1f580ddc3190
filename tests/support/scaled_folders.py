"""HF folders as compressed-tensors, DeepSeek and fbgemm write them, packed here.

The published packing is written out; no package that writes these formats is used.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from packed_folders import is_projection, write_quantised
from torch import Tensor

# By kind: rows and columns that share a scale (0 for all), bits, whether they are floats, whether
# they are packed, whether there are zero points, and the dtype of scales.
KINDS: dict[str, tuple[tuple[int, int], int, bool, bool, bool, torch.dtype]] = {
    "fp8": ((128, 128), 8, True, False, False, torch.float32),
    "fbgemm_fp8": ((1, 0), 8, True, False, False, torch.float32),
    "float tensor": ((0, 0), 8, True, False, False, torch.bfloat16),
    "float channel": ((1, 0), 8, True, False, False, torch.bfloat16),
    "float block": ((128, 128), 8, True, False, False, torch.float32),
    "int channel": ((1, 0), 8, False, False, False, torch.bfloat16),
    "int channel, float32": ((1, 0), 8, False, False, False, torch.float32),
    "int tensor": ((0, 0), 8, False, False, False, torch.bfloat16),
    "int tensor, zeros": ((0, 0), 8, False, False, True, torch.float32),
    "packed 4, group": ((1, 32), 4, False, True, False, torch.bfloat16),
    "packed 4, group, zeros": ((1, 32), 4, False, True, True, torch.float16),
    "packed 4, group of 64, zeros": ((1, 64), 4, False, True, True, torch.bfloat16),
    "packed 4, actorder": ((1, 32), 4, False, True, True, torch.bfloat16),
    "packed 4, group, float32": ((1, 32), 4, False, True, False, torch.float32),
    "packed 4, channel": ((1, 0), 4, False, True, False, torch.bfloat16),
    "packed 8, channel": ((1, 0), 8, False, True, False, torch.float16),
    "packed 8, channel, zeros": ((1, 0), 8, False, True, True, torch.bfloat16),
    "nvfp4": ((1, 16), 4, True, True, False, torch.float8_e4m3fn),
    "mxfp4": ((1, 32), 4, True, True, False, torch.uint8),
    "packed 8, tensor": ((0, 0), 8, False, True, False, torch.float32),
}

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def write_scaled(
    source: Path,
    folder: Path,
    kind: str,
    is_quantised: Callable[[str], bool] = is_projection,
    **own: Any,
) -> Path:
    """Writes an HF folder's model with matrices of one of KINDS, as `write_quantised`."""
    stated = {**quantization_config(kind), **own}

    def quantise(values: Tensor) -> tuple[Mapping[str, Tensor], Tensor]:
        return scaled(values.float(), kind)

    return write_quantised(source, folder, quantise, stated, torch.bfloat16, is_quantised)


def quantization_config(kind: str) -> dict[str, Any]:
    block, n_bits, is_float, is_packed, has_zeros, _ = KINDS[kind]
    if kind == "fp8":
        return {"quant_method": "fp8", "weight_block_size": [*block], "fmt": "e4m3"}
    if kind == "fbgemm_fp8":
        return {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}
    is_fp4 = is_float and n_bits == 4
    strategy = {
        (1, 16): "tensor_group",
        (0, 0): "tensor",
        (1, 0): "channel",
        (128, 128): "block",
    }.get(block, "group")
    weights: dict[str, Any] = {
        "type": "float" if is_float else "int",
        "num_bits": n_bits,
        "symmetric": not has_zeros,
        "strategy": strategy,
        "group_size": block[1] if strategy in ("group", "tensor_group") else None,
        "block_structure": [*block] if strategy == "block" else None,
        "actorder": "group" if kind.endswith("actorder") else None,
    }
    form = "float-quantized" if is_float else "pack-quantized" if is_packed else "int-quantized"
    form = f"{kind}-pack-quantized" if is_fp4 else form
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def scaled(values: Tensor, kind: str) -> tuple[Mapping[str, Tensor], Tensor]:
    """The tensors of a matrix by suffix, and its dequantised values in float64."""
    block, n_bits, is_float, is_packed, has_zeros, dtype = KINDS[kind]
    if is_float and n_bits == 4:
        return _four_bit_floats(values, block[1], dtype)
    height, width = (side or size for side, size in zip(block, values.shape, strict=True))
    n_rows, n_columns = -(-len(values) // height), -(-values.shape[1] // width)
    row_of = torch.arange(len(values)) // height
    column_of = torch.arange(values.shape[1]) // width
    generator = torch.Generator().manual_seed(values.numel())
    any_order = kind.endswith("actorder")
    if any_order:
        column_of = column_of[torch.randperm(len(column_of), generator=generator)]
    top = 448.0 if is_float else float((1 << (n_bits - 1)) - 1)
    sizes = values.abs()[:, column_of.argsort(stable=True)]
    short = -values.shape[1] % width, -len(values) % height
    sizes = F.pad(sizes, (0, short[0], 0, short[1])).view(n_rows, height, n_columns, width)
    scales = sizes.amax((1, 3)) / top
    scales = scales.to(dtype)
    every = scales.float()[row_of][:, column_of]
    zeros = torch.zeros(n_rows, n_columns, dtype=torch.int32)
    if has_zeros:
        zeros = torch.randint(-3, 4, zeros.shape, generator=generator, dtype=torch.int32)
    if is_float:
        stored = (values / every).to(torch.float8_e4m3fn)
        meant = stored.float() * every
    else:
        of_each = zeros[row_of][:, column_of]
        stored = ((values / every).round() + of_each).clamp(-top - 1, top).to(torch.int32)
        stored[:, 0] = int(-top - 1)
        meant = (stored - of_each).float() * every
        stored = stored if is_packed else stored.to(torch.int8)
    scale = scales if block != (0, 0) else scales.reshape(1)
    tensors = {"weight_scale_inv" if kind == "fp8" else "weight_scale": scale}
    if is_packed:
        tensors["weight_packed"] = packed(stored, n_bits)
        tensors["weight_shape"] = torch.tensor(values.shape)
    else:
        tensors["weight"] = stored
    if has_zeros:
        whole = packed(zeros.T, n_bits).T if is_packed else zeros.to(torch.int8).reshape(1)
        tensors["weight_zero_point"] = whole
    if any_order:
        tensors["weight_g_idx"] = column_of.int()
    return tensors, meant.double()


def _four_bit_floats(
    values: Tensor, size: int, dtype: torch.dtype
) -> tuple[Mapping[str, Tensor], Tensor]:
    """As `scaled`, in groups of `size` with scales in e4m3, or exponents in uint8."""
    groups = values.view(len(values), -1, size)
    largest = groups.abs().amax(2) / 6
    if dtype == torch.uint8:
        exponents = largest.log2().ceil()
        tensors, scales = {"weight_scale": (exponents + 127).to(dtype)}, exponents.exp2()
    else:
        divisor = (448 / largest.max()).reshape(1)
        stored = (largest * divisor).to(dtype)
        tensors = {"weight_scale": stored, "weight_global_scale": divisor}
        scales = stored.float() / divisor
    near = (groups.abs() / scales[..., None])[..., None].sub(E2M1).abs().argmin(-1)
    codes = near + 8 * (groups < 0)
    meant = torch.cat((E2M1, -E2M1))[codes] * scales[..., None]
    codes = codes.view(values.shape).to(torch.uint8)
    tensors["weight_packed"] = codes[:, ::2] + 16 * codes[:, 1::2]
    return tensors, meant.view(values.shape).double()


def packed(integers: Tensor, n_bits: int) -> Tensor:
    """Signed integers in 32-bit words, the first in the lowest bits. Shapes: [n, m] -> [n, words].

    compressed-tensors adds half the range, so that no integer has a sign.
    """
    per_word = 32 // n_bits
    words = torch.zeros(len(integers), -(-integers.shape[1] // per_word), dtype=torch.int64)
    for at in range(per_word):
        part = integers[:, at::per_word].long() + (1 << (n_bits - 1))
        words[:, : part.shape[1]] |= part << (n_bits * at)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
