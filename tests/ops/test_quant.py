"""Quantised matrices: what is stored, and that kernels give the results of torch."""

from functools import cache

import pytest
import torch
from quant_samples import (
    BLOCKS,
    EVERY,
    FORMS,
    FP8,
    INT4_MIN,
    INT8,
    INTEGER_FORMS,
    INTEGERS,
    a_matrix,
    blocks_of,
    every_float,
    factors_of,
    integers,
)

from parallel_llama.dtypes import QUANT_GROUP_SIZE
from parallel_llama.ops import quant
from parallel_llama.ops.cpu.embedding import QuantEmbeddingKernel
from parallel_llama.ops.cpu.gemm import GemmKernel
from parallel_llama.ops.cpu.gemv import GemvKernel
from parallel_llama.ops.cpu.jit import CPUFeatures, openmp, this_machine
from parallel_llama.ops.cpu.quant_gemm import QuantGemmKernel
from parallel_llama.ops.formats import DenseWeight, QuantWeight, concat_outputs
from parallel_llama.ops.quant import (
    PanelShape,
    QuantMatrix,
    joined,
    quant_gemm,
    quantise,
    quantise_inputs,
)
from parallel_llama.ops.torch_ops import TorchOps

CPU = torch.device("cpu")
# Vectors of each width, with each kind of byte dot products that such a CPU may have.
MACHINES = [
    machine
    for machine in (
        CPUFeatures(64, 32, "vnni"),
        CPUFeatures(64, 32, "madd"),
        CPUFeatures(32, 16, "vnni"),
        CPUFeatures(32, 16, "madd"),
        CPUFeatures(16, 16, "plain"),
    )
    if machine.vector_bytes <= this_machine().vector_bytes
    and (machine.byte_dots != "vnni" or this_machine().byte_dots == "vnni")
]
needs_kernels = pytest.mark.skipif(openmp() is None, reason="kernels need torch's own GNU OpenMP")


@cache
def kernel_for(form, machine):
    return QuantGemmKernel(form, machine)


# A kernel takes a second to compile, and most formats differ between machines in the same way.
PAIRS = [
    (machine, form)
    for machine in MACHINES
    for form in EVERY
    if machine == MACHINES[0] or form in (INT8, INT4_MIN, BLOCKS["Q6_K"], FP8)
]


def on_machines(forms):
    pairs = [(machine, form) for machine, form in PAIRS if form in forms]
    return pytest.mark.parametrize(
        ("machine", "form"), pairs, ids=lambda each: each.name if each in EVERY else str(each)
    )


def multiplied(kernel, x, weight):
    shape = PanelShape(weight.form, weight.shape[1], kernel.n_rows, weight.n_before)
    whole = torch.full((len(x), weight.shape[0] + 7), 5.0)
    kernel(x, shape.pack(weight), shape, whole[:, 3:-4])
    assert (whole[:, :3] == 5).all() and (whole[:, -4:] == 5).all()
    return whole[:, 3:-4]


def test_int8_error_is_at_most_half_a_step():
    values = torch.randn(40, 96) * torch.rand(40, 1)
    kept = quantise(values, INT8)
    largest = values.view(40, 3, QUANT_GROUP_SIZE).abs().amax(-1)
    torch.testing.assert_close(kept.scales.float(), largest / 127, rtol=1e-3, atol=2**-25)
    steps = kept.scales.float().repeat_interleave(QUANT_GROUP_SIZE, 1)
    assert ((kept.values() - values).abs() <= steps / 2 * 1.01).all()


def test_int4_error_is_below_that_of_full_range_steps():
    values = torch.randn(200, 320, generator=torch.Generator().manual_seed(0))
    groups = values.view(200, -1, QUANT_GROUP_SIZE)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    steps = (high - low) / 15
    plain = (((groups - low) / steps).round() * steps + low).view(200, 320)
    error = (quantise(values, INT4_MIN).values() - values).square().mean()
    assert error < 0.92 * (plain - values).square().mean()


def test_int4_keeps_values_that_are_already_on_16_steps():
    values = a_matrix(INT4_MIN, 40, 96)
    values.integers.view(40, 3, 32)[:, :, :2] = torch.tensor([0, 15], dtype=torch.int8)
    kept = quantise(values.values(), INT4_MIN).values()
    torch.testing.assert_close(kept, values.values(), rtol=1e-3, atol=1e-5)


def test_fp8_matches_torch_rounding_with_group_maximum_at_448():
    values = torch.randn(40, 96) * torch.logspace(-4, 4, 40)[:, None]
    kept = quantise(values, FP8)
    scales = kept.scales.float().repeat_interleave(QUANT_GROUP_SIZE, 1)
    largest = values.view(40, 3, QUANT_GROUP_SIZE).abs().amax(-1)
    torch.testing.assert_close(kept.scales.float(), largest / 448, rtol=1e-3, atol=2**-25)
    rounded = (values / scales).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(kept.values(), rounded.float() * scales)
    assert torch.equal(kept.integers.view(torch.uint8), rounded.view(torch.uint8))


def test_fp8_saturates_if_the_rounded_scale_is_too_small():
    """3.49 steps of the smallest float16 are rounded to 3, too small for 448."""
    least = torch.finfo(torch.float16).smallest_normal * 2.0**-10
    kept = quantise(torch.full((1, 32), 448 * 3.49 * least), FP8)
    assert torch.equal(kept.values(), torch.full((1, 32), 448 * 3 * least))


@needs_kernels
@pytest.mark.parametrize("machine", MACHINES, ids=str)
def test_every_fp8_value_is_decoded_exactly(machine):
    weight, x = every_float(), torch.eye(32)
    expected = weight.values().T
    assert expected.abs().max() == 448 and len(expected.unique()) == 253  # 0 has two encodings
    assert torch.equal(multiplied(kernel_for(FP8, machine), x, weight), expected)
    assert torch.equal(quant_gemm(x, weight), expected)


@needs_kernels
@pytest.mark.parametrize("machine", MACHINES, ids=str)
def test_inputs_of_fp8_products_are_not_rounded(machine):
    """A sum may be close to 0, so the tolerance is relative to its terms."""
    x, weight = torch.randn(9, 320), a_matrix(FP8, 33, 320)
    exact = x.double() @ weight.values().double().T
    atol = 1e-6 * x.norm(dim=1).max().item() * weight.values().norm(dim=1).max().item()
    for ours in (multiplied(kernel_for(FP8, machine), x, weight), quant_gemm(x, weight)):
        torch.testing.assert_close(ours.double(), exact, rtol=0, atol=atol)
    wide = quant_gemm(x.double(), weight)
    torch.testing.assert_close(wide, exact, rtol=0, atol=1e-10)


@pytest.mark.parametrize("form", [INT8, INT4_MIN, FP8], ids=lambda form: form.name)
def test_group_of_zeros_stays_zero_and_changes_no_other_group(form):
    values = torch.randn(3, 64)
    values[1, 32:] = 0
    kept = quantise(values, form)
    assert not kept.values()[1, 32:].any()
    assert torch.equal(kept.values()[:, :32], quantise(values[:, :32], form).values())


@FORMS
@pytest.mark.parametrize("n_rows", [4, 8, 16])
def test_panels_round_trip_in_the_planned_bytes(form, n_rows):
    weight = a_matrix(form, 48, 4096)  # large enough that no cache line is padded
    shape = PanelShape(form, 4096, n_rows)
    panels = shape.pack(weight)
    for n_outputs in (48, 47, 33):
        back = shape.unpack(panels, n_outputs)
        assert torch.equal(back.integers, weight.integers[:n_outputs])
        assert torch.equal(back.scales, weight.scales[:n_outputs])
        for part, whole in ((back.mins, weight.mins), (back.factors, weight.factors)):
            assert (part is None) == (whole is None)
            assert part is None or torch.equal(part, whole[:n_outputs])
    assert panels.nbytes == form.n_bytes(48 * 4096)


@FORMS
@pytest.mark.parametrize("n_before", [0, 3, 7])
def test_column_slices_keep_values_and_can_be_joined(form, n_before):
    weight = a_matrix(form, 9, 640, n_before)
    for inputs in (range(640), range(32, 64), range(160, 544), range(224, 640), range(96, 96)):
        part = weight.columns(inputs)
        assert torch.equal(part.values(), weight.values()[:, inputs.start : inputs.stop])
        assert part.scales.shape[1] == blocks_of(form, len(inputs), part.n_before)
    parts = [
        weight.columns(range(32 * a, 32 * b)) for a, b in ((0, 8 - n_before), (8 - n_before, 20))
    ]
    assert torch.equal(joined(parts, 1).values(), weight.values())


@pytest.mark.slow
@needs_kernels
@on_machines(INTEGERS)
def test_product_with_unit_scales_is_the_exact_integer(form, machine):
    """Inputs with a largest value of 127 in every group are quantised exactly."""
    ones = torch.ones(37, blocks_of(form, 96, 0), dtype=torch.float16)
    mins = -5 * ones if form.has_min else None
    weight = QuantMatrix(form, integers(form, 37, 96), ones, mins, factors_of(form, 37, 96))
    for n in (1, 2, 3, 6, 13, 40):
        x = integers(INT8, n, 96)
        x[:, ::32] = 127
        exact = x.long() @ weight.values().long().T
        assert torch.equal(multiplied(kernel_for(form, machine), x.float(), weight).long(), exact)


@needs_kernels
@on_machines(EVERY)
def test_product_matches_torch_for_any_shape(form, machine):
    for n, k, m in [(1, 32, 1), (2, 64, 48), (7, 96, 33), (9, 32, 100), (33, 320, 17), (5, 64, 0)]:
        x, weight = torch.randn(n, k), a_matrix(form, m, k, n_before=n + k // 32)
        expected = quant_gemm(x, weight)
        result = multiplied(kernel_for(form, machine), x, weight)
        # A sum may be close to 0, so the tolerance is relative to its terms.
        longest = weight.values().norm(dim=1).max().item() if m else 0
        atol = 1e-5 * x.norm(dim=1).max().item() * longest
        torch.testing.assert_close(result, expected, rtol=0, atol=atol)


@needs_kernels
@FORMS
def test_row_is_bitwise_equal_in_any_batch_and_for_any_thread_count(form):
    kernel, weight, x = (
        kernel_for(form, this_machine()),
        a_matrix(form, 70, 128),
        torch.randn(29, 128),
    )
    alone = torch.cat([multiplied(kernel, row[None], weight) for row in x])
    before = torch.get_num_threads()
    try:
        for n_threads in (1, 2, 3):
            torch.set_num_threads(n_threads)
            for n in (2, 5, 12, 29):
                assert torch.equal(multiplied(kernel, x[:n], weight), alone[:n])
    finally:
        torch.set_num_threads(before)


@needs_kernels
@FORMS
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_nan_or_inf_input_affects_only_its_own_row(form, wrong):
    x, weight = torch.randn(3, 64), a_matrix(form, 20, 64)
    x[1, 40] = wrong
    for result in (multiplied(kernel_for(form, this_machine()), x, weight), quant_gemm(x, weight)):
        assert not result[1].isfinite().any() and result[[0, 2]].isfinite().all()


@needs_kernels
def test_inputs_are_rounded_alike_by_kernels_and_torch():
    x = torch.randn(5, 64) * torch.tensor([1e-38, 1e-31, 1e-20, 1.0, 1e30])[:, None]
    weight = QuantMatrix(INT8, torch.eye(64).to(torch.int8), torch.ones(64, 2, dtype=torch.float16))
    rounded, scales = quantise_inputs(x)
    expected = (rounded.float() * scales[..., None]).flatten(1)
    assert torch.equal(multiplied(kernel_for(INT8, this_machine()), x, weight), expected)


@FORMS
def test_tokens_are_looked_up_in_any_order(form):
    weight = a_matrix(form, 37, 64)
    rows = torch.tensor([36, 0, 17, 0, 5])
    assert torch.equal(QuantWeight(weight, 16).lookup(rows, 0, TorchOps()), weight.values()[rows])


@needs_kernels
@on_machines(EVERY)
def test_embedding_kernel_matches_torch(form, machine):
    kernel = QuantEmbeddingKernel(form, machine)
    for n_outputs, n_before in ((37, 0), (33, 3), (1, 1)):
        weight = a_matrix(form, n_outputs, 96, n_before)
        shape = PanelShape(form, 96, machine.lanes(torch.float32).width, weight.n_before)
        tokens = torch.tensor([7 + n_outputs - 1, 7, 6, 7 + n_outputs, 7 + n_outputs // 2, 0])
        given = tokens, shape.pack(weight), shape
        expected = TorchOps().quant_embedding(*given, n_outputs, 7)
        assert expected[:2].any() and not expected[2:4].any()
        assert torch.equal(kernel(*given, 7, n_outputs), expected)


@FORMS
def test_tokens_of_other_ranks_are_looked_up_as_zeros(form):
    weight, tokens = a_matrix(form, 37, 64), torch.tensor([50, 8, 51, 14, 7, 0])
    found = QuantWeight(weight, 16).lookup(tokens, 14, TorchOps())
    zeros = torch.zeros(64)
    expected = [weight.values()[36], zeros, zeros, weight.values()[0], zeros, zeros]
    assert torch.equal(found, torch.stack(expected))
    none = QuantWeight(weight.select_rows(slice(0)), 16).lookup(tokens, 14, TorchOps())
    assert torch.equal(none, torch.zeros(6, 64))


@FORMS
def test_concat_outputs_gives_the_outputs_of_each_matrix(form):
    parts = [a_matrix(form, n, 64) for n in (24, 8, 3)]
    whole = QuantWeight.concat_outputs([QuantWeight(part, 16) for part in parts])
    x = torch.randn(3, 64)
    expected = torch.cat([quant_gemm(x, part) for part in parts], 1)
    torch.testing.assert_close(whole.apply(x, TorchOps()), expected)


def test_concat_outputs_accepts_matrices_of_several_formats():
    groups = [a_matrix(form, n, 256) for form, n in ((INT8, 24), (BLOCKS["Q6_K"], 8))]
    dense = DenseWeight((5, 256), dtype=torch.float32, device=torch.device("meta"))
    dense.load(torch.randn(5, 256))
    whole = concat_outputs([*(QuantWeight(part, 16) for part in groups), dense])
    x, bias = torch.randn(3, 256), DenseWeight((37,), dtype=torch.float32, device=CPU)
    bias.values.copy_(torch.randn(37))
    parts = [*(quant_gemm(x, part) for part in groups), x @ dense.values.T]
    assert torch.equal(whole.apply(x, TorchOps(), bias), torch.cat(parts, 1) + bias.values)


@needs_kernels
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("machine", MACHINES, ids=str)
@pytest.mark.parametrize("kernel", [GemvKernel, GemmKernel], ids=["few", "many"])
def test_16_bit_matrix_gives_same_bits_as_its_float32_copy(kernel, stored, machine):
    narrow = kernel(torch.float32, stored, machine)
    wide = kernel(torch.float32, torch.float32, machine)
    for n, k, m in [(1, 64, 48), (2, 5, 7), (7, 33, 1), (13, 100, 29)]:
        x, weight = torch.randn(n, k), torch.randn(m, k).to(stored)
        assert torch.equal(narrow(x, weight), wide(x, weight.float()))


@INTEGER_FORMS
@pytest.mark.parametrize("n_at_once", [1, 3, 16, 300])
def test_torch_product_has_equal_bits_for_any_number_of_rows_at_once(monkeypatch, form, n_at_once):
    """Torch summed the groups of a row in an order that depended on the number of rows.

    Matrices without outputs or inputs are included: a rank may have none.
    """
    for k, m in ((320, 17), (4096, 33), (64, 0), (0, 5)):
        x, weight = torch.randn(41, k), a_matrix(form, m, k)
        whole = quant_gemm(x, weight)
        n_terms = n_at_once * m * (k // QUANT_GROUP_SIZE) * form.n_parts
        monkeypatch.setattr(quant, "_TERMS_AT_ONCE", n_terms)
        assert torch.equal(quant_gemm(x, weight), whole)
        for n_rows in (0, 1, 2, 7, 40):
            assert torch.equal(quant_gemm(x[:n_rows], weight), whole[:n_rows])


def test_terms_of_torch_product_are_limited_for_any_number_of_rows(monkeypatch):
    """The terms of a prompt of a few hundred tokens exhausted a GPU without Triton."""
    sizes: list[int] = []
    einsum = torch.einsum

    def measure(*args):
        dots = einsum(*args)
        sizes.append(dots.numel())
        return dots

    monkeypatch.setattr(quant, "_TERMS_AT_ONCE", 1000)
    monkeypatch.setattr(torch, "einsum", measure)
    quant_gemm(torch.randn(100, 96), a_matrix(INT4_MIN, 40, 96))
    assert max(sizes) <= 1000 and sum(sizes) == 100 * 40 * 3
