"""The oracle for logits: transformers in float64.

transformers casts norms, rotary tables and softmax to float32, which hides errors below 1e-6;
`float64_throughout` removes these casts. No code is shared with the package.
"""

import fcntl
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from float64_mode import float64_throughout
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel

from parallel_llama.files.model_files import find_model


def load_transformers(folder: Path) -> PreTrainedModel:
    """transformers' model of an HF folder with eager attention and float64 weights.

    Built inside `float64_throughout` its rotary buffers are float64 too.
    """
    config = AutoConfig.from_pretrained(folder)
    if any(getattr(config, key, 0) for key in ("num_local_experts", "num_experts")):
        # transformers keeps experts in another form than the files.
        return _from_pretrained(folder)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").double()
    weights = load_file(folder / "model.safetensors")
    if config.tie_word_embeddings:
        weights["lm_head.weight"] = next(w for name, w in weights.items() if "embed" in name)
    model.load_state_dict(weights)
    return model.eval()  # without the dropout that some configurations state


def decoded_smollm2(folder: Path) -> PreTrainedModel:
    """The embedded model in float32, as transformers decodes its GGUF file.

    The first call stores it in `folder`, because decoding takes 14 s.
    """
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "config.json").exists():
            source = find_model("smollm2").path
            model = AutoModelForCausalLM.from_pretrained(
                source.parent, gguf_file=source.name, dtype=torch.float32
            )
            model.hf_quantizer = None  # transformers 5 saves no such model while it is there
            model.save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@torch.no_grad()
def reference_logits(folder: Path, tokens: Sequence[int]) -> Tensor:
    """transformers' logits of all positions, computed in float64 throughout.

    Shapes: [T, vocab_size] float64.
    """
    with float64_throughout():
        return _all_at_once(load_transformers(folder), tokens)


@torch.no_grad()
def reference_logits_token_by_token(folder: Path, tokens: Sequence[int]) -> Tensor:
    """Like `reference_logits`, with transformers' own KV cache and one token per forward."""
    with float64_throughout():
        model = load_transformers(folder)
        cache = DynamicCache(config=model.config)
        steps = [model(torch.tensor([[t]]), past_key_values=cache, use_cache=True) for t in tokens]
        return torch.cat([step.logits[0] for step in steps])


@torch.no_grad()
def unpatched_logits(folder: Path, tokens: Sequence[int]) -> Tensor:
    """transformers' logits with float64 weights and with its float32 casts."""
    return _all_at_once(load_transformers(folder), tokens)


def _all_at_once(model: PreTrainedModel, tokens: Sequence[int]) -> Tensor:
    logits: Tensor = model(torch.tensor([list(tokens)]), use_cache=False).logits[0]
    assert logits.dtype == torch.float64
    return logits


@torch.no_grad()
def loaded_logits(folder: Path, tokens: Sequence[int], **options: Any) -> Tensor:
    """The logits of the model that transformers loads from a folder, in float64 throughout.

    `options` are for its from_pretrained. Shapes: [T, vocab_size] float64.
    """
    with float64_throughout():
        return _all_at_once(_from_pretrained(folder, **options), tokens)


def _from_pretrained(folder: Path, **options: Any) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float64,
        attn_implementation="eager",
        experts_implementation="eager",
        **options,
    )
    return model
