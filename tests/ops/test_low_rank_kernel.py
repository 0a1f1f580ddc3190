"""The low-rank products of all adapters of a batch have the bits of `linear`, row by row."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from parallel_llama.ops import AdapterAddresses, AdapterRoom, CPUOps
from parallel_llama.ops.cpu.jit import openmp

pytestmark = pytest.mark.skipif(openmp() is None, reason="kernels need torch's own GNU OpenMP")

N_INPUTS, N_OUTPUTS = 37, (40, 0, 21)

# A, and for each part of the outputs the first output and B.
Matrices = tuple[Tensor, list[tuple[int, Tensor]]]


def matrices(dtype: torch.dtype, *ranks: int) -> Matrices:
    """Random matrices of an adapter with these ranks; parts with the rank 0 have no matrices."""
    parts = [
        (sum(N_OUTPUTS[:at]), torch.randn(N_OUTPUTS[at], rank, dtype=dtype))
        for at, rank in enumerate(ranks)
        if rank
    ]
    return torch.randn(sum(ranks), N_INPUTS, dtype=dtype), parts


@pytest.fixture(params=[1, 2, 7])
def n_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n_rows", [1, 8, 32, 100])
def test_each_row_gets_the_products_of_its_adapter(dtype, n_rows, n_threads):
    """In neighbouring rows, in scattered rows, and beside rows that no adapter changes."""
    torch.manual_seed(n_rows + n_threads)
    ops = CPUOps(dtype, 16, {3})
    every = [matrices(dtype, *ranks) for ranks in ((8, 0, 3), (16, 5, 16), (0, 0, 70))]
    # Another layer of the same adapters; the last adapter has no matrices in either layer.
    others = [matrices(dtype, 1, 2, 3) for _ in every]
    loaded = [AdapterAddresses(2) for _ in (*every, None)]
    for adapter, own, other in zip(loaded, every, others, strict=False):
        adapter.add(0, *other)
        adapter.add(1, *own)
    room = AdapterRoom(n_rows, dtype)
    for mix in ([0, 1, None, 2, 3], [2], [None, 1], [None], [1, 0, 0, 3, 1]):
        chosen = [mix[row % len(mix)] for row in range(n_rows)]
        x, y = torch.randn(n_rows, N_INPUTS, dtype=dtype), torch.randn(n_rows, 61, dtype=dtype)
        expected = y.clone()
        in_float64 = y.double().clone()
        for row, number in enumerate(chosen):
            if number is None or number == len(every):
                continue
            a, parts = every[number]
            for (first, b), rows in zip(
                parts, a.split([b.shape[1] for _, b in parts]), strict=True
            ):
                own = slice(first, first + len(b))
                expected[row, own] += ops.linear(ops.linear(x[row : row + 1], rows), b)[0]
                in_float64[row, own] += b.double() @ (rows.double() @ x[row].double())
        room.fill([None if n is None else loaded[n] for n in chosen])
        ops.add_low_ranks_(y, x, room, 1)
        assert torch.equal(y, expected)
        tolerance = 1e-10 if dtype == torch.float64 else 1e-3
        torch.testing.assert_close(y.double(), in_float64, rtol=tolerance, atol=tolerance)
