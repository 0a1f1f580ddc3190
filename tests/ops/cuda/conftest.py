"""Kernels run on a GPU where there is one, else in Triton's interpreter: tests/conftest.py."""

import pytest
import torch


@pytest.fixture
def device() -> torch.device:
    torch.manual_seed(0)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
