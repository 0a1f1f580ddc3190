"""transformers with a static cache, for one sequence in the shape of 1B.

Compilation and the first steps are not counted.
"""

import time
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch

from launch.bench.gpu_steps import Row, Rows, Setting
from launch.bench.gpu_steps.clock import Seconds, in_ms, synchronous_seconds
from launch.bench.gpu_steps.models import half, shape, transformers_config

_OURS = "llama-3.2-1b, bfloat16: step of the engine, one sequence"
_WARM_UP = 4  # steps: compilation, and the capture of a graph at the second and third step


def rows(setting: Setting, way: str) -> Rows:
    """A step of one sequence; `way` is "eager" or "compiled"."""
    if find_spec("transformers") is None:
        yield Row("transformers", note="not installed")
        return
    from transformers import LlamaForCausalLM, StaticCache

    args = shape("llama-3.2-1b", setting)
    config = transformers_config(args)
    config._attn_implementation = "sdpa"
    with torch.device(setting.device):
        model: Any = LlamaForCausalLM(config).to(getattr(torch, half(setting))).eval()
    first, n_steps = setting.pick(500, 8), setting.pick(32, 2)
    cache = StaticCache(config=config, max_cache_len=first + _WARM_UP + n_steps)
    token = torch.ones(1, 1, dtype=torch.int64, device=setting.device)
    call = model
    if way == "compiled" and not setting.is_rehearsal:
        call = torch.compile(model, mode="reduce-overhead", fullgraph=False)

    def step(at: int) -> None:
        place = torch.tensor([at], device=setting.device)
        call(input_ids=token, past_key_values=cache, position_ids=place[None], cache_position=place)

    with torch.no_grad():  # torch.compile does not support all of inference mode
        prompt = torch.ones(1, first, dtype=torch.int64, device=setting.device)
        model(input_ids=prompt, past_key_values=cache)
        started = time.perf_counter()
        for at in range(first, first + _WARM_UP):
            synchronous_seconds(partial(step, at), setting)
        note = f"after a warm-up of {time.perf_counter() - started:.3g} s"
        steps = range(first + _WARM_UP, first + _WARM_UP + n_steps)
        seconds = Seconds.of(synchronous_seconds(partial(step, at), setting) for at in steps)
    row = Row(f"1B, one sequence: transformers, {way}", note=note, than=_OURS)
    yield in_ms(row, seconds)
