"""The checks of kernels and whole models in `launch.bench.gpu`, on a GPU: `pytest -m gpu`."""

import pytest
import torch

from launch.bench.gpu_steps import Setting
from launch.bench.gpu_steps.__main__ import parts_of

PARTS = {
    "kernels": (
        "products",
        "sums over parts",
        "attention",
        "prompts",
        "routed products",
        "norms and gates",
        "attention checks",
    ),
    "parity": ("transformers", "recorded", "in any batch", "ranks"),
    "quant_products": ("quant_products",),
    "families": ("families",),
    "features": ("features",),
}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    ("step", "part"), [(step, part) for step, parts in PARTS.items() for part in parts]
)
def test_gpu_checks_report_nothing_wrong(step, part):
    parts = parts_of(step)
    assert list(parts) == list(PARTS[step])
    rows = list(parts[part](Setting(torch.device("cuda", 0), is_rehearsal=False)))
    assert rows and not [row for row in rows if row.wrong]
