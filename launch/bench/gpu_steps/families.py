"""Compares tiny models of several families on the GPU with torch's operators on the CPU.

The weights are the same, drawn on the CPU. Replayed decode steps must equal launched ones bit for
bit. Each tiny model makes its family's features visible in the logits.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from launch.bench.gpu_steps import Row, Rows, Setting, attempt
from launch.bench.gpu_steps.models import (
    Texts,
    decode_logits,
    difference,
    load,
    named_args,
    ours,
    record,
    reserve,
    torchs,
)
from parallel_llama.engine.model_runner import ModelRunner
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.ops import TorchOps
from parallel_llama.plan import why_unrecorded

CPU = torch.device("cpu")
# The largest allowed error, relative to the largest logit.
TOLERANCE = 1e-4
# The allowed mean error with few bits. If sums differ in their last bits, an input or a key may be
# rounded to another integer, and a token may get another expert, which changes a few logits a lot.
_ROUNDED_TOLERANCE = 5e-3
# The scale of attention scores. With random weights and the usual scale, all scores are near 0.
_SHARP = 2.0


@dataclass(frozen=True)
class Sample:
    """A tiny model, and the formats of its weights and of its KV cache."""

    args: ModelArgs
    quant: str = "none"
    kv_cache_dtype: str = "auto"


def samples(setting: Setting) -> dict[str, Sample]:
    """The samples by name; a rehearsal combines the features that need most code."""
    windows = {"sliding_window": setting.pick(24, 3), "full_layers": (1,), "n_layers": 2}
    caps = {"attention_soft_cap": 0.5, "logit_soft_cap": 1.0}
    gemma = _tiny("gemma-2-9b", setting, **windows, **caps)
    if setting.is_rehearsal:
        return {"Gemma 2, int8": Sample(gemma, "int8", "int8")}
    llama = _tiny("llama-3-8b", setting)
    mixtral = _tiny("mixtral-8x7b", setting, n_experts=5)
    moe, shared = {"n_experts": 11, "n_active_experts": 3}, {"shared_ffn_dim": 96}
    groups = {"sigmoid_router": True, "n_expert_groups": 3, "n_active_groups": 2, "n_experts": 6}
    return {
        "Gemma 2": Sample(gemma),
        "Gemma 3": Sample(_tiny("gemma-3-1b", setting, **windows)),
        "Qwen 3 MoE": Sample(_tiny("qwen3-30b-a3b", setting, **moe)),
        "Qwen 2 MoE, shared expert": Sample(_tiny("qwen1.5-moe-a2.7b", setting, **moe, **shared)),
        "Mixtral": Sample(mixtral),
        "groups of experts": Sample(replace(mixtral, **groups)),
        "Falcon, parallel block": Sample(_tiny("falcon-7b", setting, n_kv_heads=1)),
        "Falcon, two norms": Sample(_tiny("falcon-40b", setting)),
        "int8 weights": Sample(llama, "int8"),
        "int4 weights": Sample(llama, "int4"),
        "fp8 weights": Sample(llama, "fp8"),
        "int8 weights, experts": Sample(mixtral, "int8"),
        "int8 KV cache": Sample(llama, kv_cache_dtype="int8"),
        "fp8 KV cache": Sample(llama, kv_cache_dtype="fp8"),
    }


def _tiny(name: str, setting: Setting, **features: object) -> ModelArgs:
    """A shape of configs/models with tiny sizes. Quantised rows need multiples of 32 values."""
    sizes = {
        "dim": setting.pick(192, 64),
        "n_layers": setting.pick(2, 1),
        "n_heads": setting.pick(6, 2),
        "n_kv_heads": setting.pick(2, 1),
        "head_dim": setting.pick(64, 32),
        "ffn_dim": setting.pick(160, 64),
        "vocab_size": setting.pick(1001, 70),
        "max_seq_len": 512,
        "full_layers": (),
        "sliding_window": None,
        "attention_scale": _SHARP,
        "dtype": "float32",
    }
    return replace(named_args(name), **{**sizes, **features})


def rows(setting: Setting) -> Rows:
    for name, sample in samples(setting).items():
        yield from attempt(name, partial(_compared, name, sample, setting))


def _compared(name: str, sample: Sample, setting: Setting) -> Rows:
    texts, args = Texts(setting.pick(3, 1), setting.pick(64, 16)), sample.args
    # Kernels round the inputs of up to 16 rows to integers, as torch's operators do for all rows.
    is_integer = sample.quant in ("int8", "int4")
    sizes = setting.pick(14 if is_integer else 40, 4), setting.pick(5, 1)
    decode: Callable[..., torch.Tensor] = partial(decode_logits, texts=texts, sizes=sizes)
    expected = decode(loaded(sample, torchs(args), CPU, texts, setting))
    runner = loaded(sample, ours(args), setting.device, texts, setting)
    launched = decode(runner)
    errors = (launched.cpu() - expected).abs() / expected.abs().max()
    is_rounded = sample.quant != "none" or sample.kv_cache_dtype != "auto"
    error = float(errors.mean() if is_rounded else errors.max())
    if not error <= (_ROUNDED_TOLERANCE if is_rounded else TOLERANCE):
        yield Row(name, wrong=f"logits are off by {error:.3g} of the largest")
        return
    unit = f"of the largest logit{' on average' if is_rounded else ' at most'}"
    row = Row(name, error, unit, note="replayed as launched, bit for bit")
    recorded = record(runner, setting)
    if recorded.replay(texts.n_sequences) is None:
        why = why_unrecorded(args, 1, "cuda") or recorded.why_not or "no step could be recorded"
        # Decode steps with quantised experts wait for the device.
        is_expected = why_unrecorded(args, 1, "cuda") or (args.n_experts and sample.quant != "none")
        yield replace(row, note=why) if is_expected else Row(name, wrong=why)
    elif differs := difference(decode(runner), launched):
        yield Row(name, wrong=f"logits differ from launched steps: {differs}")
    else:
        yield row


def loaded(
    sample: Sample, ops: TorchOps, device: torch.device, texts: Texts, setting: Setting
) -> ModelRunner:
    """The model of a sample, with a cache of noise for some texts."""
    runner = load(
        sample.args,
        ops,
        setting,
        "float32",
        quant=sample.quant,
        kv_cache_dtype=sample.kv_cache_dtype,
        device=device,
        drawn_on=CPU,
    )
    reserve(runner, texts.n_sequences, texts.n_tokens)
    return runner
