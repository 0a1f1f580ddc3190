"""The oracle for models with quantised activations: transformers in float64, with rounded inputs.

The published formula is written out here in torch; its numbers equal those of compressed-tensors
0.20 bit for bit.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from float64_mode import float64_throughout
from torch import Tensor, nn
from transformers_oracle import load_transformers

from parallel_llama.dtypes import InputFormat


def rounded(x: Tensor, form: InputFormat) -> Tensor:
    """The published formula. Shapes: [..., n]."""
    least, most = (-448, 448) if form.numbers == "e4m3" else (-128, 127)
    parts = []
    for part in x.split(form.group or x.shape[-1], -1):
        low, high = part.amin(-1, keepdim=True), part.amax(-1, keepdim=True)
        low, high = low.minimum(low * 0), high.maximum(high * 0)
        scale, zero = (high - low) / 255, low * 0 + form.zero
        if form.scale is not None:
            scale = low * 0 + form.scale
        elif form.has_zeros:
            zero = (-128 - low / scale).round().clamp(-128, 127)
        else:
            largest = high.maximum(-low).clamp(max=form.most or torch.inf)
            scale = largest / ((most - least) / 2)
        numbers = (part / scale + zero).clamp(least, most)
        if form.numbers == "int8":
            numbers = numbers.round()
        else:
            numbers = numbers.to(torch.float8_e4m3fn).to(x.dtype)
        parts.append((numbers - zero) * scale)
    return torch.cat(parts, -1)


@torch.no_grad()
def logits_with_rounded_inputs(
    folder: Path, tokens: Sequence[int], formats: Mapping[str, InputFormat]
) -> Tensor:
    """As `reference_logits`, with the inputs of the modules in `formats` rounded."""
    with float64_throughout():
        model = load_transformers(folder)
        for name, module in model.named_modules():
            if name in formats:
                assert isinstance(module, nn.Linear)
                module.register_forward_pre_hook(
                    lambda _, inputs, form=formats[name]: (rounded(inputs[0], form),)
                )
        logits: Tensor = model(torch.tensor([list(tokens)]), use_cache=False).logits[0]
        return logits
