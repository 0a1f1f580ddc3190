"""Decode steps and prefill in the shapes of 1B and 8B with random weights.

Shares of decode are fractions of the speed at which weights, keys and values could be read at the
measured copy bandwidth. Shares of prefill are fractions of the measured rate of matrix products. A
shape has a figure only if two of its layers agree with torch's operators.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from launch.bench.gpu_steps import Row, Rows, Setting, attempt
from launch.bench.gpu_steps.clock import eager_seconds
from launch.bench.gpu_steps.models import Texts, half, named, require_right
from launch.bench.machine import prefill_flops
from parallel_llama import LLM, SamplingParams
from parallel_llama.engine.kv_blocks import STEP_TOKENS
from parallel_llama.memory import kv_bytes_per_token

_BATCHES, _CONTEXTS, _PREFILL = (1, 16, 64, 256), (512, 2048, 4096), 8192
_QUANTS = {"llama-3.2-1b": ("none",), "llama-3-8b": ("none", "int8", "int4")}
_TARGETS = {
    ("llama-3.2-1b", 1, 512): "at least 0.70",
    ("llama-3-8b", 1, 512): "at least 0.80",
    ("llama-3-8b", 64, 2048): "at least 0.7",
}


def rows(setting: Setting, name: str) -> Rows:
    plain_ms: float | None = None
    for quant in _QUANTS[name]:
        label = f"{name}, {half(setting) if quant == 'none' else quant}"
        for row in attempt(label, lambda a=(name, quant, label): _measured(*a, setting)):
            if row.name.endswith("batch 1, context 512") and row.value:
                if quant == "none":
                    plain_ms = row.value
                elif plain_ms:
                    times = {"int8": "1.6x", "int4": "2.2x"}[quant]
                    note = f"{plain_ms / row.value:.2f}x of 16 bits; target {times}"
                    row = replace(row, note=note)
            yield row


@dataclass(frozen=True)
class _Model:
    """A whole model on the device, and the bytes that its steps read."""

    llm: LLM
    name: str
    label: str

    def floor_s(self, batch: int, context: int, setting: Setting) -> float:
        shard, form = self.llm.engine.runner.shard, self.llm.kv_format
        kv_bytes = batch * context * sum(kv_bytes_per_token(self.llm.args, shard, form))
        n_bytes = self.llm.weight_bytes_per_step(batch) + kv_bytes
        return n_bytes / setting.copy_bytes_per_s

    def has_room(self, batch: int, context: int) -> bool:
        return batch * (context + 32) <= self.llm.engine.capacity.n_tokens


def _measured(name: str, quant: str, label: str, setting: Setting) -> Rows:
    require_right(name, setting, quant=quant)
    n_tokens = setting.pick(_PREFILL, 96)
    options = {"dtype": half(setting), "quant": quant, "max_seq_len": n_tokens, "max_drafts": 0}
    with (
        named(name, setting) as path,
        LLM(path, slice_of=(0, 1), device=setting.device.type, **options) as llm,
    ):
        model = _Model(llm, name, label)
        for context in _CONTEXTS if not setting.is_rehearsal else (24,):
            for batch in _BATCHES if not setting.is_rehearsal else (1, 2):
                if quant != "none" and (batch, context) not in ((1, 512), (16, 512)):
                    continue
                yield from attempt(
                    f"{label}: batch {batch}, context {context}",
                    lambda b=batch, c=context: _decode(model, b, c, setting),
                )
        yield from attempt(f"{label}: gap", lambda: _gap(model, setting))
        yield from attempt(f"{label}: prefill", lambda: _prefill(model, setting))
        if quant == "none":
            yield from attempt(f"{label}: kernels", lambda: _kernels(model, setting))


def _decode(model: _Model, batch: int, context: int, setting: Setting) -> Rows:
    name = f"{model.label}: batch {batch}, context {context}"
    if not model.has_room(batch, context):
        yield Row(name, note="no room for its keys and values")
        return
    step = Texts(batch, context + 16).step(model.llm.engine.runner, context - 1)
    seconds = _median_seconds(step, setting)
    share = model.floor_s(batch, context, setting) / seconds
    target = _TARGETS.get((model.name, batch, context), "")
    yield Row(name, seconds * 1e3, "ms", share, target, f"{batch / seconds:,.0f} tokens/s")


def _median_seconds(step: Callable[[], object], setting: Setting) -> float:
    """Median seconds of a step as the engine runs it, with its inputs, launch and wait."""
    return statistics.median(eager_seconds(step, setting) for _ in range(setting.pick(5, 1)))


def _gap(model: _Model, setting: Setting) -> Rows:
    """The time of an engine step beyond the model step, for one sequence."""
    n_prompt, n_new = setting.pick(500, 9), setting.pick(64, 4)
    params = SamplingParams(max_tokens=n_new, ignore_eos=True)
    ticks: list[float] = []
    for _ in range(2):  # the first warms
        requests = model.llm.input_processor.requests([list(range(1, n_prompt + 1))], params)
        ticks = [time.perf_counter() for _ in model.llm.run(requests)]
    engine_s = statistics.median(b - a for a, b in pairwise(ticks[1:]))
    step = Texts(1, n_prompt + n_new).step(model.llm.engine.runner, n_prompt + n_new // 2)
    model_s = _median_seconds(step, setting)
    name = f"{model.label}: step of the engine, one sequence"
    yield Row(name, engine_s * 1e3, "ms", model.floor_s(1, n_prompt, setting) / engine_s)
    gap_us = max(0.0, engine_s - model_s) * 1e6
    yield Row(f"{model.label}: gap between steps", gap_us, "us", target="at most 20 us")


def _prefill(model: _Model, setting: Setting) -> Rows:
    """Prefill of a prompt in the chunks of the engine, and in one step."""
    n, runner = setting.pick(_PREFILL, 40), model.llm.engine.runner
    texts, size = Texts(1, n), setting.pick(STEP_TOKENS["cuda"], 20)
    for n_new in (size, n):  # and the whole prompt
        steps = [texts.step(runner, start, min(n_new, n - start)) for start in range(0, n, n_new)]
        seconds = eager_seconds(lambda steps=steps: [step() for step in steps], setting)
        share = prefill_flops(model.llm.args, [n]) / seconds / setting.matrix_flops
        name = f"{model.label}: prefill of {n} tokens, {n_new} per step"
        yield Row(name, n / seconds, "tokens/s", share, "at least 0.6" if n_new == n else "")


def _kernels(model: _Model, setting: Setting) -> Rows:
    """The number of kernels in a decode step of one sequence, by torch's profiler."""
    kind = torch.profiler.ProfilerActivity
    step = Texts(1, 64).step(model.llm.engine.runner, 40)
    step()
    with torch.profiler.profile(
        activities=[kind.CPU] if setting.is_rehearsal else [kind.CPU, kind.CUDA]
    ) as profile:
        step()
        if not setting.is_rehearsal:
            torch.cuda.synchronize()
    on_device = torch.autograd.DeviceType.CUDA
    events = [each for each in profile.events() if each.device_type == on_device]
    yield Row(f"{model.label}: kernels of a step", float(len(events)), "kernels")
