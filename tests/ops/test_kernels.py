"""Kernels give the results of torch, and a row's result does not depend on other rows."""

from array import array
from functools import cache, partial

import pytest
import torch

from parallel_llama.ops.cpu.elementwise import ActivationKernel, NormKernel
from parallel_llama.ops.cpu.gemm import GemmKernel
from parallel_llama.ops.cpu.gemv import MAX_ROWS, GemvKernel, RoutedGemvKernel
from parallel_llama.ops.cpu.jit import CPUFeatures, openmp, this_machine
from parallel_llama.ops.cpu.rotary import RotaryKernel
from parallel_llama.ops.dispatch import Dispatch

MACHINES = [
    this_machine(),
    CPUFeatures(64, 32),
    CPUFeatures(32, 16),
    CPUFeatures(16, 32),
    CPUFeatures(16, 16),
]
CLOSE = {torch.float32: {"rtol": 2e-5, "atol": 2e-5}, torch.float64: {"rtol": 1e-13, "atol": 1e-13}}


pytestmark = pytest.mark.skipif(openmp() is None, reason="kernels need torch's own GNU OpenMP")


@cache
def linear_for(kernel, dtype, machine):
    return kernel(dtype, dtype, machine)


@cache
def routed_linear_for(dtype, machine):
    return RoutedGemvKernel(dtype, dtype, machine)


@pytest.fixture(params=[1, 2, 3], ids=lambda n: f"{n} threads")
def n_threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def on_machines(test):
    """Runs a test for every machine, with 1 to 3 threads in rotation."""
    pairs = [(machine, 1 + at % 3) for at, machine in enumerate(MACHINES)]
    of_pairs = pytest.mark.parametrize(
        ("machine", "n_threads"), pairs, indirect=["n_threads"], ids=str
    )
    return of_pairs(pytest.mark.usefixtures("n_threads")(test))


@pytest.fixture(params=[torch.float32, torch.float64], ids=["float32", "float64"])
def dtype(request):
    return request.param


@pytest.fixture(params=[GemvKernel, GemmKernel], ids=["few rows", "many rows"])
def kernel(request):
    return request.param


@on_machines
def test_product_matches_torch_for_any_shape(kernel, machine, dtype):
    """Partial groups of rows, partial tiles of columns and partial vectors of inputs."""
    linear = linear_for(kernel, dtype, machine)
    for n, k, m in [(1, 64, 48), (2, 5, 7), (6, 576, 24), (7, 33, 1), (13, 100, 29), (32, 17, 96)]:
        x, weight = torch.randn(n, k, dtype=dtype), torch.randn(m, k, dtype=dtype)
        torch.testing.assert_close(linear(x, weight), x @ weight.T, **CLOSE[dtype])


def test_product_with_an_empty_dimension_is_zero_or_empty(kernel, dtype):
    """A rank without heads has no columns; a step that samples nothing has no rows."""
    linear = linear_for(kernel, dtype, this_machine())
    for n, k, m in [(3, 0, 5), (0, 4, 5), (3, 4, 0)]:
        x, weight = torch.ones(n, k, dtype=dtype), torch.ones(m, k, dtype=dtype)
        assert torch.equal(linear(x, weight), torch.zeros(n, m, dtype=dtype))


def test_product_of_views_does_not_read_neighbouring_values(kernel, dtype):
    """Neighbours are NaN: reading one shows even if it is multiplied by 0."""
    linear = linear_for(kernel, dtype, this_machine())
    around = torch.full((9, 50), torch.nan, dtype=dtype)
    x = around[1:8, 4:41]
    x.normal_()
    weights = torch.full((23, 37), torch.nan, dtype=dtype)
    weight = weights[3:20]
    weight.normal_()
    torch.testing.assert_close(linear(x, weight), x @ weight.T, **CLOSE[dtype])


@pytest.mark.usefixtures("n_threads")
def test_product_of_a_row_is_bitwise_equal_in_any_batch(kernel, dtype):
    linear = linear_for(kernel, dtype, this_machine())
    x, weight = torch.randn(MAX_ROWS, 201, dtype=dtype), torch.randn(61, 201, dtype=dtype)
    alone = torch.cat([linear(row[None], weight) for row in x])
    for n in range(1, MAX_ROWS + 1):
        assert torch.equal(linear(x[:n], weight), alone[:n])


@on_machines
def test_gemv_and_gemm_give_bitwise_equal_products(machine, dtype):
    """Regression: from 33 rows on, sums had another order, so tokens depended on the batch."""
    few, many = (linear_for(each, dtype, machine) for each in (GemvKernel, GemmKernel))
    for n, k, m in [(1, 1, 1), (33, 7, 5), (40, 576, 97), (9, 1024, 50), (13, 2500, 31)]:
        x, weight = torch.randn(n, k, dtype=dtype), torch.randn(m, k, dtype=dtype)
        assert torch.equal(few(x, weight), many(x, weight))


def test_the_number_of_threads_does_not_change_a_bit(kernel, dtype):
    linear = linear_for(kernel, dtype, this_machine())
    x, weight = torch.randn(7, 130, dtype=dtype), torch.randn(101, 130, dtype=dtype)
    before, results = torch.get_num_threads(), []
    for n_threads in (1, 2, 3):
        torch.set_num_threads(n_threads)
        results.append(linear(x, weight))
    torch.set_num_threads(before)
    assert all(torch.equal(result, results[0]) for result in results)


@on_machines
def test_slices_of_a_large_product_are_bitwise_equal(machine):
    """More inputs than a panel has, and more rows than a chunk has."""
    linear = linear_for(GemmKernel, torch.float64, machine)
    x = torch.randn(1031, 1301, dtype=torch.float64)
    weight = torch.randn(67, 1301, dtype=torch.float64)
    whole = linear(x, weight)
    torch.testing.assert_close(whole, x @ weight.T, rtol=1e-12, atol=1e-12)
    for rows in (slice(0, 1), slice(509, 519), slice(700, 1031)):
        assert torch.equal(linear(x[rows], weight), whole[rows])
    assert torch.equal(linear(x[:9], weight[41:]), whole[:9, 41:])


@on_machines
def test_routed_product_is_bitwise_equal_to_separate_products(machine, dtype):
    """For any number of rows per weight, in any order; rows without a weight become zeros."""
    x, counts = torch.full((40, 60), torch.nan, dtype=dtype)[:, 2:35], [2, 0, 32, 1, 7]
    x.normal_()
    weights = [torch.randn(29, 33, dtype=dtype) for _ in counts]
    starts = torch.tensor([0, *counts]).cumsum(0)
    sources, targets = torch.randint(0, 40, (45,)), torch.randperm(45)
    dispatch = Dispatch(sources, targets, starts, 32)
    addresses = array("q", (weight.data_ptr() for weight in weights))
    actual = routed_linear_for(dtype, machine)(x, addresses, 29, dispatch)[targets]
    linear = linear_for(GemvKernel, dtype, machine)
    for weight, start, stop in zip(weights, *dispatch.bounds(), strict=True):
        assert torch.equal(actual[start:stop], linear(x[sources[start:stop]], weight))
    assert not actual[starts[-1] :].any()


@pytest.mark.parametrize("machine", MACHINES, ids=str)
def test_rms_norm_matches_definition(machine, dtype):
    norm = NormKernel(dtype, machine)
    for n, dim in [(1, 64), (5, 33), (32, 7)]:
        x = torch.full((n, dim + 3), torch.nan, dtype=dtype)[:, 1 : dim + 1]
        x.normal_()
        weight = torch.randn(dim, dtype=dtype)
        wide = x.double()
        normed = wide / (wide.square().mean(-1, keepdim=True) + 0.01).sqrt()
        for offset in (0.0, 1.0):
            expected = (normed * (weight + offset)).to(dtype)
            torch.testing.assert_close(norm(x, weight, 0.01, offset), expected, **CLOSE[dtype])


DEFINITIONS = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": partial(torch.nn.functional.gelu, approximate="tanh"),
}


@pytest.mark.parametrize("kind", DEFINITIONS)
@pytest.mark.parametrize("machine", MACHINES, ids=str)
def test_activation_matches_definition_even_if_exp_overflows(machine, dtype, kind):
    gated = ActivationKernel(dtype, kind, machine, gated=True)
    alone = ActivationKernel(dtype, kind, machine, gated=False)
    for n, channels in [(1, 64), (5, 33), (32, 7)]:
        both = 20 * torch.randn(n, 2 * channels, dtype=dtype)
        both[0, :3] = torch.tensor([-1e4, 1e4, 0])
        gate, up = both.double().chunk(2, dim=-1)
        expected = DEFINITIONS[kind](gate)
        torch.testing.assert_close(gated(both), (expected * up).to(dtype), **CLOSE[dtype])
        assert gated(both)[0, 0] == 0
        gate = gate.to(dtype).contiguous()
        torch.testing.assert_close(alone(gate), expected.to(dtype), **CLOSE[dtype])
        # The bits of a result do not depend on its position.
        assert torch.equal(alone(gate[:, 3:].contiguous()), alone(gate)[:, 3:])
    both[:] = torch.nan
    assert gated(both).isnan().all()


@pytest.mark.slow
@on_machines
@pytest.mark.parametrize(("n_heads", "n_kv_heads"), [(3, 1), (5, 2), (2, 0)])
def test_rotary_kernel_rotates_heads_and_stores_keys_and_values(
    machine, dtype, n_heads, n_kv_heads
):
    for n, head_dim in [(1, 2), (3, 12), (700, 64)]:
        qkv = torch.randn(n, n_heads + 2 * n_kv_heads, head_dim, dtype=dtype)
        angles = torch.rand(n, 1, head_dim // 2, dtype=torch.float64)
        turns = torch.polar(torch.ones_like(angles), angles).to(dtype.to_complex())
        slots = torch.randperm(n + 5)[:n]
        kv = torch.full((2, n_kv_heads, n + 5, head_dim), -7, dtype=dtype)
        k, v = kv.clone()
        pairs = torch.view_as_complex(qkv.view(n, -1, head_dim // 2, 2))
        turned = torch.view_as_real(pairs * turns).flatten(2)
        expected = kv.clone()
        own = slice(n_heads, n_heads + n_kv_heads)
        expected[0][:, slots] = turned[:, own].transpose(0, 1)
        expected[1][:, slots] = qkv[:, own.stop :].transpose(0, 1)
        RotaryKernel(dtype, dtype, head_dim, machine)(qkv, turns, slots, k, v)
        torch.testing.assert_close(qkv[:, :n_heads], turned[:, :n_heads], **CLOSE[dtype])
        torch.testing.assert_close(torch.stack((k, v)), expected, **CLOSE[dtype])
