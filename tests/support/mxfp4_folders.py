"""HF folders of gpt-oss with experts in MXFP4, drawn at random."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tiny_models import TinyModel, write_hf
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

# The experts' matrices.
MATRICES = "gate_up_proj", "down_proj"


def write_mxfp4(home: Path, tiny: TinyModel) -> tuple[Path, Path]:
    """A folder with experts in MXFP4, and the folder that transformers' dequantisation gives."""
    meant = write_hf(tiny, home / "meant", seed=5)
    packed = home / "packed"
    shutil.copytree(meant, packed)
    tensors = load_file(meant / "model.safetensors")
    generator, decoded = torch.Generator().manual_seed(7), dict(tensors)
    for name in [name for name in tensors if name.endswith(MATRICES)]:
        n_experts, n_inputs, n_outputs = tensors.pop(name).shape
        shape = (n_experts, n_outputs, n_inputs // 32)
        draw = {"generator": generator, "dtype": torch.uint8}
        blocks = torch.randint(0, 256, (*shape, 16), **draw)
        scales = torch.randint(121, 126, shape, **draw)
        scales[:, ::5] = torch.randint(0, 100, scales[:, ::5].shape, **draw)
        tensors[name + "_blocks"], tensors[name + "_scales"] = blocks, scales
        decoded[name] = convert_moe_packed_tensors(blocks, scales).double()
    save_file(tensors, packed / "model.safetensors", {"format": "pt"})
    save_file(decoded, meant / "model.safetensors", {"format": "pt"})
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
    }
    (packed / "config.json").write_text(json.dumps(config))
    return packed, meant
