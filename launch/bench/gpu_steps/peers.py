"""transformers with a static cache, eager and compiled, for one sequence in the shape of 1B."""

import statistics
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch

from launch.bench.gpu_steps import Row, Rows, Setting
from launch.bench.gpu_steps.clock import synchronous_seconds
from launch.bench.gpu_steps.models import half, shape, transformers_config


def rows(setting: Setting) -> Rows:
    if find_spec("transformers") is None:
        yield Row("transformers", note="not installed")
        return
    from transformers import LlamaForCausalLM, StaticCache

    args = shape("llama-3.2-1b", setting)
    config = transformers_config(args)
    config._attn_implementation = "sdpa"
    with torch.device(setting.device):
        model: Any = LlamaForCausalLM(config).to(getattr(torch, half(setting))).eval()
    first, n_steps = setting.pick(512, 8), setting.pick(32, 3)
    cache = StaticCache(config=config, max_cache_len=first + n_steps + 8)
    token = torch.ones(1, 1, dtype=torch.int64, device=setting.device)

    def step(at: int) -> None:
        place = torch.tensor([at], device=setting.device)
        call(input_ids=token, past_key_values=cache, position_ids=place[None], cache_position=place)

    call = model
    with torch.inference_mode():
        prompt = torch.ones(1, first, dtype=torch.int64, device=setting.device)
        model(input_ids=prompt, past_key_values=cache)
        yield Row("1B, one sequence: transformers", _median_ms(step, first, n_steps, setting), "ms")
        if not setting.is_rehearsal:
            call = torch.compile(model, mode="reduce-overhead", fullgraph=False)
            ms = _median_ms(step, first, n_steps, setting)
            yield Row("1B, one sequence: transformers, compiled", ms, "ms")


def _median_ms(step: Any, first: int, n_steps: int, setting: Setting) -> float:
    steps = range(first, first + n_steps)
    seconds = [synchronous_seconds(partial(step, at), setting) for at in steps]
    return statistics.median(seconds[n_steps // 2 :]) * 1e3
