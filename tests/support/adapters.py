"""LoRA adapters in the form that PEFT saves, and the weights that they are merged into.

Written without code of the package: names, settings and the sum are repeated here.
"""

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

# Settings with patterns of modules, and of their ranks and alphas.
PATTERNED: dict[str, Any] = {
    "target_modules": r".*\.(q_proj|qkv_proj|down_proj)",
    "use_rslora": True,
    "rank_pattern": {r"layers\.1\..*": 5},
    "alpha_pattern": {r"layers\.0\..*": 11},
}

# What peft 0.21 writes besides the settings of a test.
USUAL = {
    "alora_invocation_tokens": None,
    "base_model_name_or_path": None,
    "bias": "none",
    "corda_config": None,
    "exclude_modules": None,
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "layer_replication": None,
    "layers_to_transform": None,
    "loftq_config": {},
    "lora_alpha": 8,
    "lora_bias": False,
    "lora_dropout": 0.05,
    "megatron_core": "megatron.core",
    "modules_to_save": None,
    "peft_type": "LORA",
    "qalora_group_size": 16,
    "r": 3,
    "target_parameters": None,
    "task_type": "CAUSAL_LM",
    "use_dora": False,
    "use_rslora": False,
}
PREFIX = "base_model.model."

Ranks = Callable[[str], int]


def write_adapter(
    folder: Path,
    base: Path,
    modules: str,
    rank: Ranks = lambda _: 3,
    whole: Mapping[str, Tensor] | None = None,
    dtype: torch.dtype = torch.float64,
    seed: int = 5,
    **settings: Any,
) -> Path:
    """An adapter with random A and B for the modules of an HF folder that match a pattern."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(seed)
    tensors = {f"{PREFIX}{name}": tensor for name, tensor in (whole or {}).items()}
    for name, weight in load_file(base / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if re.fullmatch(modules, module):
            n_outputs, n_inputs = weight.shape
            for part, shape in (
                ("A", (rank(module), n_inputs)),
                ("B", (n_outputs, rank(module))),
            ):
                drawn = 0.3 * torch.randn(shape, generator=generator, dtype=torch.float64)
                tensors[f"{PREFIX}{module}.lora_{part}.weight"] = drawn.to(dtype)
    save_file(tensors, folder / "adapter_model.safetensors")
    text = json.dumps({**USUAL, **settings})
    (folder / "adapter_config.json").write_text(text)
    return folder


def merged_weights(
    base: Path, adapter: Path, scaling: Callable[[str], float] = lambda _: 8 / 3
) -> dict[str, Tensor]:
    """W + scaling * B @ A of every module of an HF folder, in float64, and whole tensors."""
    weights = {name: w.double() for name, w in load_file(base / "model.safetensors").items()}
    tensors = {
        name.removeprefix(PREFIX): tensor.double()
        for name, tensor in load_file(adapter / "adapter_model.safetensors").items()
    }
    for name, tensor in tensors.items():
        if name.endswith(".lora_B.weight"):
            module = name.removesuffix(".lora_B.weight")
            delta = tensor @ tensors[f"{module}.lora_A.weight"]
            weights[f"{module}.weight"] = weights[f"{module}.weight"] + scaling(module) * delta
        elif ".lora_A." not in name:
            weights[name] = tensor
    return weights


def write_merged(folder: Path, base: Path, weights: Mapping[str, Tensor]) -> Path:
    """The HF folder `base` with other weights, for transformers."""
    shutil.copytree(base, folder)
    save_file(dict(weights), folder / "model.safetensors")
    return folder


def edit(adapter: Path, **settings: Any) -> Path:
    """Change settings of an adapter; returns its folder."""
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    return adapter


def edit_tensors(adapter: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    """Change the dictionary of an adapter's tensors in place; returns its folder."""
    path = adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    return adapter
