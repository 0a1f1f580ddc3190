"""Decode steps and prefill in the shapes of 1B and 8B with random weights.

Shares of decode relate the bytes of weights, keys and values to the measured bandwidths. Shares of
prefill are fractions of the measured rate of matrix products. A shape has a figure only if two of
its layers agree with torch's operators.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise, product

import torch

from launch.bench.gpu_steps import Row, Rows, Setting, attempt
from launch.bench.gpu_steps.clock import Seconds, eager_seconds, in_ms, measured, queued_seconds
from launch.bench.gpu_steps.models import (
    Recorded,
    Texts,
    fill_with_noise,
    half,
    named,
    record,
    require_right,
)
from launch.bench.machine import prefill_flops
from parallel_llama import LLM, SamplingParams
from parallel_llama.engine.kv_blocks import STEP_TOKENS
from parallel_llama.memory import kv_bytes_per_token

_BATCHES, _CONTEXTS, _PREFILL = (1, 16, 64, 256), (512, 2048, 4096), 8192
# (batch, context) of the first measurements; later steps of the benchmark have the others.
_FIRST = ((1, 512), (16, 512), (64, 512))
_OF_COPIES = "of the copy bandwidth"
_TARGETS = {
    ("llama-3.2-1b", 1, 512): f"at least 0.70 {_OF_COPIES}",
    ("llama-3-8b", 1, 512): f"at least 0.80 {_OF_COPIES}",
    ("llama-3-8b", 64, 2048): f"at least 0.7 {_OF_COPIES}",
}
_TIMES = {"int8": "1.6 times as fast as 16 bits", "int4": "2.2 times as fast as 16 bits"}


def rows(setting: Setting, name: str, quant: str, which: str = "first") -> Rows:
    """One shape in one format of weights; `which` is "first" or "rest"."""
    require_right(name, setting, quant=quant)
    label = f"{name}, {half(setting) if quant == 'none' else quant}"
    n_tokens = setting.pick(_PREFILL, 96)
    options = {"dtype": half(setting), "quant": quant, "max_seq_len": n_tokens, "max_drafts": 0}
    if setting.is_rehearsal:  # by default the cache takes a part of the host's free memory
        options["kv_cache_bytes"] = 1 << 20
    with (
        named(name, setting) as path,
        LLM(path, slice_of=(0, 1), device=setting.device.type, **options) as llm,
    ):
        runner = llm.engine.runner
        fill_with_noise(runner)
        recorded = record(runner, setting)
        if setting.is_rehearsal:  # a CPU has no graphs; this rehearses the rows about them
            recorded = Recorded({1: lambda: None}, "a rehearsal")
        model = _Model(llm, name, label, quant, recorded)
        for batch, context in _sizes(which, setting):
            yield from attempt(
                f"{label}: batch {batch}, context {context}",
                lambda b=batch, c=context: _decode(model, b, c, setting),
            )
        if which != "first":
            return
        yield from attempt(f"{label}: engine", lambda: _engine(model, setting))
        yield from attempt(f"{label}: prefill", lambda: _prefill(model, setting))
        yield from attempt(f"{label}: kernels", lambda: _kernels(model, setting))


def _sizes(which: str, setting: Setting) -> Iterator[tuple[int, int]]:
    """The (batch, context) of a part of the measurements."""
    if setting.is_rehearsal:
        yield from ((1, 24), (2, 24))
    elif which == "first":
        yield from _FIRST
    else:
        sizes = ((batch, context) for context, batch in product(_CONTEXTS, _BATCHES))
        yield from (size for size in sizes if size not in _FIRST)


@dataclass(frozen=True)
class _Model:
    """A whole model on the device, and the bytes that its steps read."""

    llm: LLM
    name: str
    label: str
    quant: str
    recorded: Recorded

    def bytes_read(self, batch: int, context: int) -> int:
        shard, form = self.llm.engine.runner.shard, self.llm.kv_format
        kv_bytes = batch * context * sum(kv_bytes_per_token(self.llm.args, shard, form))
        return self.llm.weight_bytes_per_step(batch) + kv_bytes

    def has_room(self, batch: int, context: int) -> bool:
        return batch * (context + 32) <= self.llm.engine.capacity.n_tokens

    def replay_seconds(self, n_rows: int, setting: Setting) -> Seconds | None:
        """Seconds of the last step on the device alone, without inputs; None if not recorded."""
        replay = self.recorded.replay(n_rows)
        return replay and queued_seconds(replay, setting)

    def how_run(self, n_rows: int) -> str:
        """Says that steps of this many rows are launched operator by operator; else empty."""
        if self.recorded.replay(n_rows):
            return ""
        return f"LAUNCHED OPERATOR BY OPERATOR: {self.recorded.why_not or 'not recorded'}"


def _decode(model: _Model, batch: int, context: int, setting: Setting) -> Rows:
    """A step as the engine runs it, with its inputs and launch."""
    row = Row(
        f"{model.label}: batch {batch}, context {context}",
        target=_TARGETS.get((model.name, batch, context), "") if model.quant == "none" else "",
    )
    if not model.has_room(batch, context):
        yield replace(row, note="no room for its keys and values")
        return
    seconds = eager_seconds(
        Texts(batch, context + 16).step(model.llm.engine.runner, context - 1), setting
    )
    notes = [f"{batch / seconds.median:,.0f} tokens/s"]
    if replay := model.replay_seconds(batch, setting):
        notes.append(f"replay alone {replay.median * 1e3:.4g} ms")
    row = replace(row, note="; ".join(filter(None, (*notes, model.how_run(batch)))))
    if model.quant != "none" and batch == 1:
        than = f"{model.name}, {half(setting)}: batch {batch}, context {context}"
        row = replace(row, than=than, target=_TIMES.get(model.quant, ""))
    row = setting.moved(row, model.bytes_read(batch, context), seconds.median)
    yield in_ms(row, seconds)


def _engine(model: _Model, setting: Setting) -> Rows:
    """Steps of the engine with one sequence, and replays of such a step alone on the device."""
    n_prompt, n_new = setting.pick(500, 9), setting.pick(64, 4)
    params = SamplingParams(max_tokens=n_new, ignore_eos=True)
    ticks: list[float] = []
    for _ in range(2):  # the first is a warm-up
        requests = model.llm.input_processor.requests([list(range(1, n_prompt + 1))], params)
        ticks = [time.perf_counter() for _ in model.llm.run(requests)]
    own = Seconds.of(b - a for a, b in pairwise(ticks[1:]))
    n_bytes = model.bytes_read(1, n_prompt + n_new // 2)
    name = f"{model.label}: step of the engine, one sequence"
    yield in_ms(setting.moved(Row(name, note=model.how_run(1)), n_bytes, own.median), own)
    Texts(1, n_prompt + n_new).step(model.llm.engine.runner, n_prompt + n_new // 2)()
    replay = model.replay_seconds(1, setting)
    if replay is None:
        return
    name = f"{model.label}: replay on the device, one sequence"
    yield in_ms(setting.moved(Row(name), n_bytes, replay.median), replay)
    difference_us = (own.median - replay.median) * 1e6
    note = "the difference of the two medians"
    name = f"{model.label}: step of the engine beyond the replay"
    yield Row(name, difference_us, "us", target="at most 20 us", note=note)


def _prefill(model: _Model, setting: Setting) -> Rows:
    """Prefill of a prompt in the chunks of the engine, and in one step."""
    n, runner = setting.pick(_PREFILL, 40), model.llm.engine.runner
    texts, size = Texts(1, n), setting.pick(STEP_TOKENS["cuda"], 20)
    for n_new in (size, n):  # and the whole prompt
        steps = [texts.step(runner, start, min(n_new, n - start)) for start in range(0, n, n_new)]
        seconds = eager_seconds(lambda steps=steps: [step() for step in steps], setting)
        share = prefill_flops(model.llm.args, [n]) / seconds.median / setting.matrix_flops
        row = Row(
            f"{model.label}: prefill of {n} tokens, {n_new} per step",
            share=share,
            target="at least 0.6" if n_new == n else "",
        )
        yield measured(row, seconds, lambda s: n / s, "tokens/s")


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
