"""Writes a folder with a published quantisation tool, and scores tokens with the tool's numbers.

    PYTHON launch/soak/tool_folders.py KIND SOURCE FOLDER TOKENS_FILE

SOURCE is a Hugging Face folder. The tool dequantises the weights, with scales widened to float32,
and rounds the activations; transformers computes all else in float64. The last line of stdout is
two lists of log-probabilities in JSON; for the second, the last bits of the inputs of all matrices
have been changed. PYTHON needs the tool, transformers and accelerate, and not this package.
"""

import json
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2] / "tests/support"))
from float64_mode import float64_throughout

GROUPS = {"strategy": "group", "group_size": 64}
INT4, FLOAT8 = {"num_bits": 4, "type": "int"}, {"num_bits": 8, "type": "float"}
BY_TOKEN = {"num_bits": 8, "strategy": "token", "dynamic": True}

# By kind: the preset of compressed-tensors, or the settings of weights and activations.
SCHEMES: dict[str, str | tuple[Mapping[str, Any], Mapping[str, Any] | None]] = {
    "W4A16, groups of 64": ({**INT4, **GROUPS}, None),
    "W4A16, groups of 64, zeros": ({**INT4, **GROUPS, "symmetric": False}, None),
    "W4A16, groups of 32, GPTQ": ({**INT4, **GROUPS, "group_size": 32}, None),
    "W4A16, GPTQ, actorder": ({**INT4, **GROUPS, "actorder": "weight"}, None),
    "W8A16, channels": ({"num_bits": 8, "strategy": "channel"}, None),
    "W8A16, channels, zeros": ({"num_bits": 8, "strategy": "channel", "symmetric": False}, None),
    "W4A8": ({**INT4, **GROUPS}, BY_TOKEN),
    "W4AFP8": ({**INT4, **GROUPS}, {**BY_TOKEN, "type": "float"}),
    "W8A8, static, zeros": (
        {"num_bits": 8, "strategy": "tensor"},
        {"num_bits": 8, "strategy": "tensor", "symmetric": False},
    ),
    "W8A8, by token, zeros": (
        {"num_bits": 8, "strategy": "channel"},
        {**BY_TOKEN, "symmetric": False},
    ),
    "FP8, blocks of 64": (
        {**FLOAT8, "strategy": "block", "block_structure": [64, 64]},
        {**FLOAT8, **GROUPS, "dynamic": True},
    ),
    **{kind: kind for kind in ("INT8", "FP8", "FP8_DYNAMIC", "NVFP4A16", "MXFP4A16")},
}
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
BITSANDBYTES: dict[str, dict[str, Any]] = {
    "nf4": NF4,
    "nf4, nested": {**NF4, "bnb_4bit_use_double_quant": True},
    "fp4": {**NF4, "bnb_4bit_quant_type": "fp4"},
    "int8": {"load_in_8bit": True},
}
GPTQMODEL: dict[str, dict[str, Any]] = {
    "4 bits": {"bits": 4, "group_size": 64},
    "4 bits, desc_act": {"bits": 4, "group_size": 64, "desc_act": True},
    "8 bits": {"bits": 8, "group_size": 32},
}
AUTOAWQ = {"gemm": {"w_bit": 4, "q_group_size": 64, "zero_point": True, "version": "GEMM"}}


def main(kind: str, *paths: str) -> None:
    """Writes the folder and prints the log-probabilities."""
    source, folder, tokens_file = map(Path, paths)
    tokens = json.loads(tokens_file.read_text())
    model = KINDS[kind](source=source, folder=folder, tokens=tokens)
    ids = torch.tensor([tokens])
    found = []
    for _ in ("as they are", "changed"):
        with torch.no_grad(), float64_throughout():
            found.append(logprobs(model(ids, use_cache=False).logits[0], tokens))
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_pre_hook(with_changed_bits)
    print(json.dumps(found))


def with_changed_bits(_: nn.Module, inputs: tuple[Tensor]) -> Tensor:
    """The inputs of a module with other last bits."""
    return inputs[0] * (1 + 1e-13 * torch.randn_like(inputs[0]))


def logprobs(logits: Tensor, tokens: list[int]) -> list[float]:
    """The log-probability of each token after the first. Shapes: [T, vocab_size] float64."""
    following = torch.tensor(tokens[1:])[:, None]
    return logits.log_softmax(-1)[:-1].gather(1, following)[:, 0].tolist()


def llm_compressor(kind: str, source: Path, folder: Path, tokens: list[int]) -> nn.Module:
    """Writes a folder with LLM Compressor. Returns: its model in float64."""
    from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
    from transformers import AutoModelForCausalLM

    scheme, settings = SCHEMES[kind], {"targets": ["Linear"], "ignore": ["lm_head"]}
    if isinstance(scheme, str):
        settings["scheme"] = scheme
    else:
        weights, inputs = scheme
        group = QuantizationScheme(targets=["Linear"], weights=weights, input_activations=inputs)
        settings = {"config_groups": {"group_0": group}, "ignore": ["lm_head"]}
    modifier = (GPTQModifier if "GPTQ" in kind else QuantizationModifier)(**settings)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    dataset = Dataset.from_dict({"input_ids": [tokens], "attention_mask": [[1] * len(tokens)]})
    model = oneshot(model=model, dataset=dataset, recipe=modifier, num_calibration_samples=1)
    model.save_pretrained(folder, save_compressed=True)
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    return compressed_model(folder, QuantizationConfig.model_validate(config))


def compressed_model(folder: Path, config: Any) -> nn.Module:
    """The model of a folder of compressed-tensors, which rounds activations as it states."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.nvfp4 import base
    from compressed_tensors.quantization import QuantizationStatus, apply_quantization_config
    from compressed_tensors.quantization.utils import helpers

    base.unpack_fp4_from_uint8 = partial(base.unpack_fp4_from_uint8, dtype=torch.float32)
    stored = load_safetensors(folder)
    model = empty_model(folder)
    config.quantization_status = QuantizationStatus.INITIALIZED
    apply_quantization_config(model, config)
    for name, module in model.named_modules():
        scheme = getattr(module, "quantization_scheme", None)
        if scheme is None:
            continue
        keys = [key for key in stored if key.startswith(f"{name}.")]
        own = {key.removeprefix(f"{name}."): widened(stored.pop(key)) for key in keys}
        form = scheme.format or config.format
        compressor = BaseCompressor.get_value_from_registry(getattr(form, "value", form))
        stored[f"{name}.weight"] = compressor.decompress(own, scheme)["weight"]
        for key, tensor in own.items():
            if key.startswith("input_"):
                setattr(module, key, nn.Parameter(tensor, requires_grad=False))
        module.quantization_status = QuantizationStatus.COMPRESSED  # no rounding of the weight
    helpers._calculate_range.cache_clear()  # it holds float32
    return filled(model, stored)


def bitsandbytes(kind: str, source: Path, folder: Path, **_: Any) -> nn.Module:
    """Writes a folder with bitsandbytes. Returns: its model in float64."""
    from bitsandbytes import functional
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    settings = BitsAndBytesConfig(**BITSANDBYTES[kind])
    model = AutoModelForCausalLM.from_pretrained(
        source, quantization_config=settings, dtype=torch.bfloat16, device_map="cpu"
    )
    model.save_pretrained(folder)
    stored = load_safetensors(folder)
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if hasattr(weight, "quant_state"):
            weight.quant_state.dtype = torch.float32
            stored[f"{name}.weight"] = functional.dequantize_4bit(weight.data, weight.quant_state)
        elif hasattr(weight, "SCB"):
            stored[f"{name}.weight"] = functional.int8_vectorwise_dequant(weight.data, weight.SCB)
    return filled(empty_model(folder), stored)


def gptqmodel(kind: str, source: Path, folder: Path, tokens: list[int]) -> nn.Module:
    """Writes a folder with GPTQModel. Returns: its model in float64."""
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # fewer are refused
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig

    model = GPTQModel.load(str(source), QuantizeConfig(**GPTQMODEL[kind]))
    model.quantize([{"input_ids": tokens, "attention_mask": [1] * len(tokens)}] * 2, batch_size=1)
    model.save(str(folder))
    loaded = GPTQModel.load(str(folder), backend=BACKEND.TORCH, device="cpu")
    stored = load_safetensors(folder)
    for name, module in loaded.model.named_modules():
        if hasattr(module, "dequantize_weight"):
            module.scales = stored[f"{name}.scales"].float()  # loaded as the model's dtype
            stored[f"{name}.weight"] = module.dequantize_weight().T
    return filled(empty_model(folder), stored)


def autoawq(kind: str, source: Path, folder: Path, tokens: list[int]) -> nn.Module:
    """Writes a folder with AutoAWQ. Returns: its model in float64."""
    from awq import AutoAWQForCausalLM
    from awq.utils.packing_utils import dequantize_gemm
    from transformers import AutoTokenizer

    model = AutoAWQForCausalLM.from_pretrained(str(source), device_map="cpu")
    tokenizer = AutoTokenizer.from_pretrained(source)
    text = tokenizer.decode(tokens)
    calibration = {"calib_data": [text] * 8, "max_calib_seq_len": 128, "apply_clip": False}
    model.quantize(tokenizer, AUTOAWQ[kind], **calibration)  # clipping takes minutes per layer
    model.save_quantized(str(folder))
    stored = load_safetensors(folder)
    for name in [key.removesuffix(".qweight") for key in stored if key.endswith(".qweight")]:
        words, zeros, scales = (
            stored.pop(f"{name}.{end}") for end in ("qweight", "qzeros", "scales")
        )
        stored[f"{name}.weight"] = dequantize_gemm(words, zeros, scales.float(), 4, 64).T
    return filled(empty_model(folder), stored)


def load_safetensors(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    files = [load_file(path) for path in folder.glob("*.safetensors")]
    return {name: tensor for file in files for name, tensor in file.items()}


def widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def empty_model(folder: Path) -> nn.Module:
    """transformers' model of the folder before quantisation, with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder, dtype=torch.float64)
    del config.quantization_config
    with float64_throughout():
        return AutoModelForCausalLM.from_config(config, attn_implementation="eager").double()


def filled(model: nn.Module, stored: dict[str, Tensor]) -> nn.Module:
    """The model with the weights of `stored`, which also has other tensors."""
    lost = {*dict(model.named_parameters())} - {*stored}
    assert all("input_" in name or "weight_" in name for name in lost), lost
    model.load_state_dict(stored, strict=False)
    return model.double().eval()


TOOLS: dict[str, tuple[Callable[..., nn.Module], Mapping[str, Any]]] = {
    "llmcompressor": (llm_compressor, SCHEMES),
    "bitsandbytes": (bitsandbytes, BITSANDBYTES),
    "gptqmodel": (gptqmodel, GPTQMODEL),
    "autoawq": (autoawq, AUTOAWQ),
}
KINDS = {
    f"{tool} {kind}": partial(write, kind)
    for tool, (write, kinds) in TOOLS.items()
    for kind in kinds
}

if __name__ == "__main__":
    main(*sys.argv[1:])
