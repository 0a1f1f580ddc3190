"""Decode steps of one growing sequence with torch's operators and with ours.

torch's operators run once with cuDNN's attention, which makes a plan for each new shape, and once
without it. Our steps are launched one by one, and replayed if they can be recorded.
"""

import torch

from launch.bench.gpu_steps import Row, Rows, Setting, attempt
from launch.bench.gpu_steps.clock import Seconds, in_ms, synchronous_seconds
from launch.bench.gpu_steps.models import (
    Texts,
    load,
    ours,
    record,
    require_right,
    reserve,
    shape,
    torchs,
)
from parallel_llama.engine.model_runner import ModelRunner


def rows(setting: Setting) -> Rows:
    for name, has_cudnn in (("torch, cuDNN on", True), ("torch, cuDNN off", False)):
        yield from attempt(name, lambda n=name, c=has_cudnn: _torchs(n, c, setting))
    yield from attempt("ours", lambda: _ours(setting))


def _torchs(name: str, has_cudnn: bool, setting: Setting) -> Rows:
    args = shape("llama-3.2-1b", setting)
    torch.backends.cuda.enable_cudnn_sdp(has_cudnn)
    yield from _timed(name, load(args, torchs(args), setting), setting)


def _ours(setting: Setting) -> Rows:
    require_right("llama-3.2-1b", setting)
    args = shape("llama-3.2-1b", setting)
    runner = load(args, ours(args), setting)
    yield from _timed("ours, launched", runner, setting)
    recorded = record(runner, setting)
    if recorded.replay(1):
        yield from _timed("ours, recorded", runner, setting, is_reserved=True)
    else:
        yield Row("ours, recorded", wrong=recorded.why_not or "no step could be recorded")


def _timed(name: str, runner: ModelRunner, setting: Setting, is_reserved: bool = False) -> Rows:
    """Measures steps at increasing lengths from 500 tokens on, in the shape of 1B."""
    first, n_steps = setting.pick(500, 5), setting.pick(48, 3)
    texts = Texts(1, first + n_steps)
    if not is_reserved:
        reserve(runner, 1, texts.n_tokens)
    steps = range(first, first + n_steps)
    first_s, *seconds = [synchronous_seconds(texts.step(runner, at), setting) for at in steps]
    row = Row(f"1B, step of one row: {name}", note=f"first {first_s * 1e3:.3g} ms, with set-up")
    yield in_ms(row, Seconds.of(seconds))
