"""The kernel that rounds inputs has the bits of its definition, also in a recorded step."""

import math

import pytest
import torch

from parallel_llama.dtypes import InputFormat
from parallel_llama.ops import CPUOps, Dispatch, TorchOps
from parallel_llama.ops.formats import DenseWeight, concat_outputs, grouped_linear
from parallel_llama.ops.inputs import round_inputs

FORMS = [
    InputFormat("e4m3"),
    InputFormat("e4m3", 32),
    InputFormat("e4m3", most=1.5),
    InputFormat("e4m3", scale=0.013),
    InputFormat("int8"),
    InputFormat("int8", 128),
    InputFormat("int8", 32, has_zeros=True),
    InputFormat("int8", has_zeros=True),
    InputFormat("int8", scale=0.013),
    InputFormat("int8", has_zeros=True, scale=0.02, zero=-7),
]


def samples(n_rows: int, n_inputs: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of very different sizes, with zeros, a NaN, and numbers of one sign."""
    x = torch.randn(n_rows, n_inputs + 3, dtype=dtype)[:, :n_inputs]
    x *= torch.logspace(-6, 2, n_rows, dtype=dtype)[:, None]
    if n_rows > 4:
        x[1], x[2, 0] = 0, math.nan
        x[3].abs_()
        x[4].abs_().neg_()
    return x


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kernel_and_its_recording_equal_reference_exactly(form, dtype):
    ops = CPUOps(dtype, 16, {1})
    for shape in ((0, 8), (1, 160), (7, 224), (5, 1), (40, 33), (6, 4096)):
        x = samples(*shape, dtype)
        expected = round_inputs(x, form)
        torch.testing.assert_close(
            ops.round_inputs(x, form), expected, rtol=0, atol=0, equal_nan=True
        )
        with ops.recording() as recording:
            recorded = ops.round_inputs(x, form)
        recording.replay()
        torch.testing.assert_close(recorded, expected, rtol=0, atol=0, equal_nan=True)


def test_rounding_error_is_at_most_half_a_step_or_one_with_zero_points():
    """A rounded zero point may move the ends of the range by half a step more."""
    x = torch.randn(50, 256, dtype=torch.float64)
    for form in (InputFormat("int8"), InputFormat("int8", 32), InputFormat("int8", 0, True)):
        error = (round_inputs(x, form) - x).abs().view(50, -1, form.group or 256).amax(-1)
        groups = x.view(50, -1, form.group or 256)
        if form.has_zeros:
            most = (groups.amax(-1) - groups.amin(-1)) / 255
        else:  # the largest value itself is half a step beyond 127
            most = groups.abs().amax(-1) / 255 * (1 + 1e-12)
        assert (error <= most).all() and (error > most / 4).any()


@pytest.mark.parametrize("scales", [(0.25, 0.25, 0.25), (0.25, 0.5, 0.125)])
def test_fused_matrices_and_experts_use_their_own_input_scales(scales):
    x, ops = torch.randn(4, 8, dtype=torch.float64), TorchOps()
    weights, expected = [], []
    for scale in scales:
        weight = DenseWeight((6, 8), dtype=torch.float64, device=torch.device("meta"))
        weight.load(torch.randn(6, 8, dtype=torch.float64))
        weight.inputs = InputFormat("int8", scale=scale)
        weights.append(weight)
        expected.append(round_inputs(x, weight.inputs) @ weight.values.T)
    rows = torch.tensor([2, 0, 1, 3])
    dispatch = Dispatch(rows, torch.arange(4), torch.tensor([0, 1, 3, 4]), 4)
    y = grouped_linear(x, weights, dispatch, ops)
    experts = [0, 1, 1, 2]
    by_expert = [expected[expert][row] for expert, row in zip(experts, rows, strict=True)]
    torch.testing.assert_close(y, torch.stack(by_expert), rtol=0, atol=1e-12)
    y = concat_outputs(weights).apply(x, ops)
    torch.testing.assert_close(y, torch.cat(expected, 1), rtol=0, atol=1e-12)
