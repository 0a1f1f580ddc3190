"""The checks of kernels and whole models in `launch.bench.gpu`, on a GPU: `pytest -m gpu`."""

import importlib

import pytest
import torch

from launch.bench.gpu_steps import Setting

PARTS = {
    "kernels": (
        "products",
        "attention",
        "products with few bits",
        "prompts",
        "routed products",
        "norms and gates",
        "attention checks",
    ),
    "parity": ("transformers", "recorded", "in any batch", "ranks"),
}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    ("step", "part"), [(step, part) for step, parts in PARTS.items() for part in parts]
)
def test_nothing_is_wrong_on_a_gpu(step, part):
    module = importlib.import_module(f"launch.bench.gpu_steps.{step}")
    assert list(module.PARTS) == list(PARTS[step])
    rows = list(module.PARTS[part](Setting(torch.device("cuda", 0), is_rehearsal=False)))
    assert rows and not [row for row in rows if row.wrong]
