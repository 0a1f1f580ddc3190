"""Matrices of small integers or floats in every format, of any size."""

import pytest
import torch

from parallel_llama.config.quantised import HF_QUANTS
from parallel_llama.dtypes import GGUF_QUANTS, QUANT_FORMATS, QUANT_GROUP_SIZE, QuantFormat
from parallel_llama.ops.quant import QuantMatrix

INT8, INT4, INT4_MIN = QuantFormat(8), QuantFormat(4), QuantFormat(4, has_min=True)
FP8 = QUANT_FORMATS["fp8"]
# All bit widths, and all features of a block with several groups.
BLOCKS = {name: GGUF_QUANTS[name] for name in ("Q2_K", "Q3_K", "Q4_K", "Q5_0", "Q6_K")}
INTEGERS = [INT8, INT4, INT4_MIN, *BLOCKS.values(), HF_QUANTS[32], HF_QUANTS[128]]
EVERY = [*INTEGERS, FP8]
INTEGER_FORMS = pytest.mark.parametrize("form", INTEGERS, ids=lambda form: form.name)
FORMS = pytest.mark.parametrize("form", EVERY, ids=lambda form: form.name)


def integers(form, *shape):
    """Random integers of a format; for floats, random bits without the two NaNs."""
    if form.is_float:
        bits = torch.randint(0, 127, shape, dtype=torch.int8)
        return torch.where(torch.rand(shape) < 0.5, bits, bits - 128)
    least = -127 if form.n_bits == 8 else -form.zero
    return torch.randint(least, -form.zero + (1 << form.n_bits), shape, dtype=torch.int8)


def every_float():
    """A matrix whose rows are one group, with every finite fp8 number."""
    bits = torch.arange(256, dtype=torch.uint8).view(torch.int8)
    finite = bits[(bits & 127) != 127].repeat(2)[:256].view(8, 32)
    return QuantMatrix(FP8, finite, torch.ones(8, 1, dtype=torch.float16))


def blocks_of(form, n_inputs, n_before):
    return -(-(n_before + n_inputs // QUANT_GROUP_SIZE) // form.n_shared)


def factors_of(form, n_outputs, n_inputs):
    if not form.n_factors:
        return None
    n_factors = n_inputs // QUANT_GROUP_SIZE * form.n_factors
    return torch.randint(-32, 64, (n_outputs, n_factors), dtype=torch.int8)


def a_matrix(form, n_outputs, n_inputs, n_before=0):
    n_before %= form.n_shared
    scales = torch.rand(n_outputs, blocks_of(form, n_inputs, n_before)).add(0.1).div(100)
    scales = scales.to(torch.float16)
    mins = scales * -7 if form.has_min else None
    factors = factors_of(form, n_outputs, n_inputs)
    return QuantMatrix(form, integers(form, n_outputs, n_inputs), scales, mins, factors, n_before)
