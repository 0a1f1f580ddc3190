"""HF folders as bitsandbytes writes them, packed here; the package is not used."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from packed_folders import is_projection, write_quantised
from torch import Tensor

BLOCK, NESTED_BLOCK = 64, 256
OFFSET = 0.03125

# fmt: off
NF4 = torch.tensor([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
])
# fmt: on
FP4 = torch.tensor([0, 0.0625, 8, 12, 4, 6, 2, 3, 0, -0.0625, -8, -12, -4, -6, -2, -3]) / 12
NESTED_MAP = torch.linspace(-1, 1, 256) ** 3


@dataclass(frozen=True)
class Kind:
    """How matrices are stored: int8, or a code with perhaps quantised scales."""

    code: str
    is_nested: bool = False
    storage: torch.dtype = torch.uint8


KINDS = {
    "int8": Kind("int8"),
    "nf4": Kind("nf4"),
    "nf4 nested": Kind("nf4", is_nested=True),
    "nf4 in bfloat16": Kind("nf4", storage=torch.bfloat16),
    "fp4": Kind("fp4"),
}


def write_bitsandbytes(
    source: Path, folder: Path, kind: str, is_quantised: Callable[[str], bool] = is_projection
) -> Path:
    """Writes an HF folder's model with matrices of one of KINDS, as `write_quantised`."""
    is_int8 = kind == "int8"
    stated = {
        "quant_method": "bitsandbytes",
        "load_in_8bit": is_int8,
        "load_in_4bit": not is_int8,
        "llm_int8_skip_modules": None,
        "llm_int8_threshold": 6.0,
    }

    def quantise(values: Tensor) -> tuple[Mapping[str, Tensor], Tensor]:
        return _int8(values.float()) if is_int8 else _four_bits(values.float(), KINDS[kind])

    return write_quantised(source, folder, quantise, stated, torch.bfloat16, is_quantised)


def _int8(values: Tensor) -> tuple[Mapping[str, Tensor], Tensor]:
    largest = values.abs().amax(1)
    stored = (values * (127 / largest)[:, None]).round().to(torch.int8)
    stored[:, 0] = -127
    format_ = torch.tensor(0, dtype=torch.uint8)
    meant = stored.float() * largest[:, None] * 7.874015718698502e-3
    return {"weight": stored, "SCB": largest, "weight_format": format_}, meant.double()


def _four_bits(values: Tensor, kind: Kind) -> tuple[Mapping[str, Tensor], Tensor]:
    table = {"nf4": NF4, "fp4": FP4}[kind.code]
    flat = values.flatten()
    padded = torch.cat([flat, torch.zeros(-len(flat) % BLOCK)])
    absmax = padded.view(-1, BLOCK).abs().amax(1)
    tensors = {"weight.quant_map": table.clone()}
    if kind.is_nested:
        nested, absmax = _nested(absmax)
        tensors |= nested
    else:
        tensors["weight.absmax"] = absmax
    every = absmax.repeat_interleave(BLOCK)[: len(flat)]
    codes = (flat / every)[:, None].sub(table).abs().argmin(1).to(torch.uint8)
    codes[::7] = torch.arange(len(codes[::7]), dtype=torch.uint8) % 16  # all codes occur
    packed = codes[::2] * 16 + codes[1::2]
    tensors["weight"] = packed.view(kind.storage)[:, None]
    tensors[f"weight.quant_state.bitsandbytes__{kind.code}"] = quant_state(values, kind)
    return tensors, (table[codes.long()] * every).view(values.shape).double()


def _nested(absmax: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of quantised scales, and their dequantised values."""
    outer = torch.stack([part.abs().max() for part in absmax.split(NESTED_BLOCK)])
    every = outer.repeat_interleave(NESTED_BLOCK)[: len(absmax)]
    codes = ((absmax - OFFSET) / every)[:, None].sub(NESTED_MAP).abs().argmin(1)
    tensors = {
        "weight.absmax": codes.to(torch.uint8),
        "weight.nested_absmax": outer,
        "weight.nested_quant_map": NESTED_MAP.clone(),
    }
    return tensors, NESTED_MAP[codes] * every + OFFSET


def quant_state(values: Tensor, kind: Kind, **own: Any) -> Tensor:
    """The quant_state of a matrix, with other values where `own` has them."""
    stated: dict[str, Any] = {
        "quant_type": kind.code,
        "blocksize": BLOCK,
        "dtype": "bfloat16",
        "shape": [*values.shape],
    }
    if kind.is_nested:
        stated |= {
            "nested_blocksize": NESTED_BLOCK,
            "nested_dtype": "float32",
            "nested_offset": OFFSET,
        }
    return as_bytes(json.dumps({**stated, **own}))


def as_bytes(text: str) -> Tensor:
    return torch.tensor([*text.encode()], dtype=torch.uint8)
