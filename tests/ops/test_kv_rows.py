"""How the KV cache stores keys and values; kernels store the same bytes as torch."""

from functools import cache

import pytest
import torch
from torch import Tensor

from parallel_llama.dtypes import KV_DTYPES, kv_format
from parallel_llama.ops import Scores, kv_rows
from parallel_llama.ops.cpu.attention_plan import DecodeBatch
from parallel_llama.ops.cpu.decode_attention import DecodeAttentionKernel
from parallel_llama.ops.cpu.jit import CPUFeatures, openmp, this_machine
from parallel_llama.ops.cpu.kv_rows import UnpackKernel
from parallel_llama.ops.cpu.rotary import RotaryKernel
from parallel_llama.ops.formats import kv_dtype

NARROW = torch.bfloat16, torch.int8, torch.float8_e4m3fn
MACHINES = [this_machine(), CPUFeatures(64, 32), CPUFeatures(32, 16), CPUFeatures(16, 16)]

needs_kernels = pytest.mark.skipif(openmp() is None, reason="kernels need torch's own GNU OpenMP")
rotary_for = cache(RotaryKernel)


@pytest.fixture(params=[torch.float32, torch.float64], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    torch.manual_seed(0)
    return request.param


def hard_rows(dtype: torch.dtype, head_dim: int) -> Tensor:
    """Rows of all magnitudes, and numbers halfway between stored ones. Shapes: [T, D]."""
    x = torch.randn(600, head_dim, dtype=torch.float64)
    x[:200] *= torch.logspace(-42, 36, 200, dtype=torch.float64)[:, None]
    x[200:400] = torch.randint(-254, 255, (200, head_dim)) / 2  # halves of integers
    x[200:400, 0] = 127
    x[400:500] = (
        torch.randint(-960, 961, (100, head_dim)) / 2.0**10
    )  # about 2^-9, the smallest e4m3
    x[400:500, 0] = 448
    x[500], x[501, 1:] = 0, 0
    return x.to(dtype)


@pytest.mark.parametrize("stored", NARROW, ids=str)
def test_stored_values_are_as_close_as_the_format_allows(
    dtype: torch.dtype, stored: torch.dtype
) -> None:
    x = hard_rows(dtype, 64).double()
    largest = x.abs().amax(-1, keepdim=True)
    whole = ((largest == 0) | (largest > 1e-30))[:, 0]  # rows with a normal number as scale
    x, largest = x[whole], largest[whole]
    allowed = {
        torch.bfloat16: x.abs() * 2.0**-8,
        torch.int8: (largest / 254).expand_as(x),
        torch.float8_e4m3fn: torch.maximum(x.abs() * 2.0**-4, largest / 448 * 2.0**-10),
    }[stored]
    kept = kv_rows.unpack(kv_rows.pack(x.to(dtype), stored), torch.float64)
    assert ((kept - x).abs() <= allowed * (1 + 1e-6)).all()


@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_row_with_nan_or_inf_is_stored_as_nan(stored: torch.dtype, bad: float) -> None:
    """An overflow must not turn into plausible numbers."""
    x = torch.randn(3, 8)
    x[1, 5] = bad
    kept = kv_rows.unpack(kv_rows.pack(x, stored), torch.float32)
    assert kept[1].isnan().all() and kept[[0, 2]].isfinite().all()


@pytest.mark.parametrize("head_dim", [2, 6, 64, 128])
@pytest.mark.parametrize("name", KV_DTYPES)
def test_row_size_matches_planned_bytes(name: str, head_dim: int) -> None:
    form = kv_format(name, "float32")
    row = kv_rows.pack(torch.randn(1, head_dim), kv_dtype(form))
    assert row.nbytes == form.n_bytes(head_dim)


@needs_kernels
@pytest.mark.parametrize(
    ("stored", "head_dim", "machine"),
    [
        (stored, (2, 6, 64, 80)[(number + at) % 4], machine)
        for number, stored in enumerate(NARROW)
        for at, machine in enumerate(MACHINES)
    ],
    ids=str,
)
def test_kernels_store_same_bytes_as_torch(
    dtype: torch.dtype, stored: torch.dtype, head_dim: int, machine: CPUFeatures
) -> None:
    """For rotations by an angle of 0."""
    x = hard_rows(dtype, head_dim)
    qkv = torch.stack((x, x, x.flip(0)), 1)  # one head of each
    turns = torch.ones(len(x), 1, head_dim // 2, dtype=dtype.to_complex())
    slots = torch.randperm(len(x) + 5)[: len(x)]
    k, v, k_twin, v_twin = torch.zeros(
        4, 1, len(x) + 5, kv_rows.row_width(head_dim, stored), dtype=stored
    )
    kv_rows.store(qkv[:, 1:2], slots, k_twin)
    kv_rows.store(qkv[:, 2:3], slots, v_twin)
    rotary_for(dtype, stored, head_dim, machine)(qkv.clone(), turns, slots, k, v)
    for ours, twin in ((k, k_twin), (v, v_twin)):
        assert torch.equal(ours.view(torch.uint8), twin.view(torch.uint8))


@needs_kernels
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("stored", NARROW, ids=str)
def test_kernels_never_store_nan_or_inf_as_finite(
    dtype: torch.dtype, stored: torch.dtype, bad: float
) -> None:
    qkv = torch.randn(1, 3, 64, dtype=dtype)
    qkv[0, :, 37] = bad
    turns = torch.ones(1, 1, 32, dtype=dtype.to_complex())
    k, v = torch.zeros(2, 1, 1, kv_rows.row_width(64, stored), dtype=stored)
    rotary_for(dtype, stored, 64, this_machine())(qkv, turns, torch.tensor([0]), k, v)
    for rows in (k, v):
        assert not kv_rows.unpack(rows, dtype)[0, 0, 37].isfinite()


def rows_of_all_numbers(stored: torch.dtype) -> Tensor:
    """Every number that a byte can represent, with random scales. Shapes: [1, n, W]."""
    if stored == torch.bfloat16:
        return torch.randn(1, 64, 64).bfloat16()
    numbers = torch.arange(-127 if stored == torch.int8 else 0, 127)
    numbers = torch.cat((numbers, numbers + 128)) if stored != torch.int8 else numbers
    rows = kv_rows.pack(torch.randn(1, len(numbers), 64), stored)
    rows.view(torch.uint8)[0, :, :64] = numbers.to(torch.uint8)[:, None]
    return rows


@needs_kernels
@pytest.mark.parametrize("machine", MACHINES, ids=str)
@pytest.mark.parametrize("stored", NARROW, ids=str)
def test_kernels_read_every_number_as_torch_does(
    dtype: torch.dtype, stored: torch.dtype, machine: CPUFeatures
) -> None:
    """A query that sees one key returns exactly the value of that key."""
    rows = rows_of_all_numbers(stored)
    n = rows.shape[1]
    attention = DecodeAttentionKernel(dtype, stored, 64, 1, Scores(), machine)
    out = torch.empty(n, 1, 64, dtype=dtype)
    keys = kv_rows.pack(torch.randn(1, n, 64), stored)
    own = DecodeBatch.of({slot: (0, [slice(slot, slot + 1)]) for slot in range(n)})
    attention(torch.randn(n, 1, 64, dtype=dtype), keys, rows, own, out)
    assert torch.equal(out[:, 0], kv_rows.unpack(rows, dtype)[0])


@needs_kernels
@pytest.mark.parametrize("machine", MACHINES, ids=str)
@pytest.mark.parametrize("stored", NARROW, ids=str)
def test_unpack_kernel_is_bitwise_equal_to_torch(
    dtype: torch.dtype, stored: torch.dtype, machine: CPUFeatures
) -> None:
    """For some heads and slots of a larger cache, on all threads."""
    some = rows_of_all_numbers(stored).view(torch.uint8)
    cache = torch.cat((some, some.flip(1), some.roll(3, 1))).repeat(1, 20, 1).view(stored)
    rows = cache[None, 1:, 7:-5]
    ours = UnpackKernel(dtype, stored, 64, machine)(rows)
    assert torch.equal(ours, kv_rows.unpack(rows, dtype))
