"""Rounds the inputs of a matrix to an `InputFormat`, in torch; `ops.cpu.inputs` has the kernel.

In a format with zero points, a group's scale and zero point map the range of the group, extended to
contain 0, to the range of the format. Without zero points, the scale maps the group's largest
absolute value to half of the width of the format's range; a static scale is the same for all
groups. 0 stays exactly 0. A group with a NaN becomes NaN.

Source: compressed-tensors 0.20, calculate_qparams and fake_quantize.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel_llama.dtypes import InputFormat

# The smallest and the largest number of each type.
RANGE = {"e4m3": (-448.0, 448.0), "int8": (-128.0, 127.0)}


def round_inputs(x: Tensor, form: InputFormat) -> Tensor:
    """The inputs, rounded in at least float32. Shapes: [T, in] -> [T, in]."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if form.scale is not None:
        scale, zero = wide.new_full((), form.scale), wide.new_full((), form.zero)
        return _rounded(wide, scale, zero, form).to(x.dtype)
    n_inputs = x.shape[1]
    group = min(form.group or n_inputs, n_inputs) or 1
    padded = F.pad(wide, (0, -n_inputs % group))  # zeros do not change a scale
    groups = padded.reshape(len(x), padded.shape[1] // group, group)
    return _rounded(groups, *_scales(groups, form), form).flatten(1)[:, :n_inputs].to(x.dtype)


def _scales(groups: Tensor, form: InputFormat) -> tuple[Tensor, Tensor]:
    """The scales and zero points. Shapes: [T, n, group] -> [T, n, 1] both."""
    least, most = RANGE[form.numbers]
    if not form.has_zeros:
        largest = groups.abs().amax(-1, keepdim=True)
        if form.most is not None:
            largest = largest.clamp(max=form.most)
        return _divisor(largest / ((most - least) / 2)), torch.zeros_like(largest)
    low, high = groups.amin(-1, keepdim=True).clamp(max=0), groups.amax(-1, keepdim=True)
    scale = _divisor((high.clamp(min=0) - low) / (most - least))
    return scale, (least - low / scale).clamp(least, most).round()


def _divisor(scale: Tensor) -> Tensor:
    """The scale, but 1 for a group of zeros."""
    return torch.where(scale == 0, 1, scale)


def _rounded(x: Tensor, scale: Tensor, zero: Tensor, form: InputFormat) -> Tensor:
    numbers = (x / scale).add_(zero).clamp_(*RANGE[form.numbers])
    if form.numbers == "int8":
        numbers.round_()
    else:
        numbers.copy_(numbers.to(torch.float8_e4m3fn))
    return numbers.sub_(zero).mul_(scale)
