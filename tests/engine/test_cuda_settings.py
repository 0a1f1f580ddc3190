"""torch's CUDA options are set when a model is created on a GPU, and are otherwise unchanged."""

import pytest
import torch
from mixes import ARGS

from parallel_llama.checkpoint.checkpoint import random_checkpoint
from parallel_llama.dtypes import Precision
from parallel_llama.engine import model_runner
from parallel_llama.engine.model_runner import ModelRunner, set_cuda_options
from parallel_llama.parallel.collectives import Solo
from parallel_llama.plan import make_plan

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def settings() -> tuple[object, ...]:
    matmul = torch.backends.cuda.matmul
    return (
        torch.backends.cuda.cudnn_sdp_enabled(),
        matmul.allow_bf16_reduced_precision_reduction,
        matmul.allow_fp16_reduced_precision_reduction,
        torch.get_float32_matmul_precision(),
    )


def set_all(on: bool, precision: str) -> None:
    matmul = torch.backends.cuda.matmul
    torch.backends.cuda.enable_cudnn_sdp(on)
    matmul.allow_bf16_reduced_precision_reduction = on
    matmul.allow_fp16_reduced_precision_reduction = on
    torch.set_float32_matmul_precision(precision)


def test_load_on_gpu_disables_reduced_precision_and_cudnn_sdp(monkeypatch):
    """Regression: bf16 sums lost precision, and cuDNN planned for 55 to 440 ms per new length."""
    before = settings()

    class Loads(Exception):
        pass

    def load(*_: object, **__: object) -> None:
        raise Loads

    monkeypatch.setattr(model_runner, "load", load)
    monkeypatch.setattr(model_runner, "use_device", lambda _: None)

    def make(device: torch.device) -> None:
        plan, precision = make_plan(ARGS, 1), Precision.plain("float64")
        checkpoint = random_checkpoint(ARGS, 1)
        with pytest.raises(Loads):
            ModelRunner.load(ARGS, checkpoint, plan, Solo(), precision=precision, device=device)

    try:
        set_all(True, "medium")
        make(CPU)
        assert settings() == (True, True, True, "medium")
        make(GPU)
        assert settings() == (False, False, False, "highest")
        set_cuda_options()  # a second model
        assert settings() == (False, False, False, "highest")
    finally:
        torch.backends.cuda.enable_cudnn_sdp(bool(before[0]))
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = bool(before[1])
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = bool(before[2])
        torch.set_float32_matmul_precision(str(before[3]))
