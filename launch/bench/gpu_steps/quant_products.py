"""Compares products with 8-bit and 4-bit weights with torch's, and measures their bytes per second.

Shares relate the bytes that a product reads and writes to the measured bandwidths.
"""

import torch
from torch import Tensor

from launch.bench.gpu_steps import Rows, Setting, attempt
from launch.bench.gpu_steps.checked import CACHED, alike, dtypes, hold, moved, normal
from launch.bench.gpu_steps.clock import device_seconds
from parallel_llama.dtypes import QUANT_FORMATS, QuantFormat
from parallel_llama.ops.cuda_ops import CUDAOps
from parallel_llama.ops.quant import PanelShape, quantise
from parallel_llama.ops.quant import quant_gemm as torch_quant_gemm


def rows(setting: Setting) -> Rows:
    """The largest matrix of a layer of 8B, for 1 row and for 16."""
    n_inputs, n_outputs = (64, 70) if setting.is_rehearsal else (4096, 28672)
    for form in QUANT_FORMATS.values():
        for n_rows in (1, setting.pick(16, 2)):
            name = f"product {n_inputs} to {n_outputs}, {n_rows} rows, {form.name}"
            yield from attempt(
                name, lambda a=(name, form, n_rows, n_inputs, n_outputs): _product(*a, setting)
            )


def _product(
    name: str, form: QuantFormat, n_rows: int, n_inputs: int, n_outputs: int, setting: Setting
) -> Rows:
    # Integer weights are multiplied as integers, and floats in the dtype of the inputs.
    ops, dtype = CUDAOps(), dtypes(setting)[-1] if form.is_float else torch.float32
    x = normal((n_rows, n_inputs), dtype, setting)
    weight = quantise(normal((n_outputs, n_inputs), dtype, setting), form)
    shape = PanelShape(form, n_inputs, ops.panel_rows, weight.n_before)
    panels = shape.pack(weight)

    def multiply(x: Tensor, panels: Tensor) -> Tensor:
        out = x.new_empty(len(x), n_outputs)
        ops.quant_gemm(x, panels, shape, out)
        return out

    y = multiply(x, panels)
    hold(y, torch_quant_gemm(x, weight).double(), dtype)
    alike(y, torch.cat([multiply(row[None], panels) for row in x]))
    n = 1 if setting.is_rehearsal else max(2, CACHED // panels.nbytes)
    copies = [panels, *(panels.clone() for _ in range(n - 1))]
    seconds = device_seconds([lambda p=p: multiply(x, p) for p in copies], setting)
    yield moved(name, panels.nbytes + x.nbytes + y.nbytes, seconds, setting)
