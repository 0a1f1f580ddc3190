"""Which operators `choose_ops` gives a model."""

import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from parallel_llama.ops import CPUOps, TorchOps, choose_ops

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
HALVES = (torch.bfloat16, torch.float16)


def chosen(dtype: torch.dtype, device: torch.device) -> type[TorchOps]:
    return type(choose_ops(dtype, device, 16, {3}))


def test_kernels_are_chosen_for_the_types_they_compute_in():
    assert {chosen(dtype, CPU) for dtype in (torch.float32, torch.float64)} == {CPUOps}
    assert {chosen(dtype, CPU) for dtype in HALVES} == {TorchOps}
    assert chosen(torch.float64, CUDA) is TorchOps


def test_a_cuda_device_has_kernels_where_triton_is(monkeypatch):
    if find_spec("triton"):
        names = {chosen(dtype, CUDA).__name__ for dtype in (torch.float32, *HALVES)}
        assert names == {"CUDAOps"}
    monkeypatch.setattr("parallel_llama.ops.find_spec", lambda _: None)
    assert {chosen(dtype, CUDA) for dtype in (torch.float32, *HALVES)} == {TorchOps}


@pytest.mark.slow
def test_a_cpu_loads_no_triton():
    code = (
        "import sys, torch; from parallel_llama.ops import choose_ops;"
        "choose_ops(torch.bfloat16, torch.device('cpu'), 16, {3});"
        "sys.exit(any(name.split('.')[0] == 'triton' for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
