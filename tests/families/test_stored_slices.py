"""Stored slices of weights that share a tensor, compared with slices of that tensor."""

import pytest
import torch
from torch import Tensor

from parallel_llama.families import stored_slices
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.families.stored_slices import StoredSlice, shared, whole
from parallel_llama.families.weights import Param


def taken(stored: Tensor, part: StoredSlice, rows: range) -> Tensor:
    """Rows of a weight from the matrix of its stored tensor."""
    return torch.cat([stored[run.start : run.stop] for run in part.runs(rows)])


@pytest.mark.parametrize(("n_heads", "n_kv_heads"), [(71, 1), (12, 4), (9, 3), (6, 6)])
def test_qkv_slices_are_interleaved_by_kv_head(n_heads, n_kv_heads):
    head_dim, dim, heads_per_kv = 4, 5, n_heads // n_kv_heads
    stored = torch.arange((n_heads + 2 * n_kv_heads) * head_dim * dim).view(-1, dim)
    groups = stored.view(n_kv_heads, heads_per_kv + 2, head_dim, dim)
    expected = groups[:, :-2], groups[:, -2], groups[:, -1]
    sizes = [n * head_dim for n in (n_heads, n_kv_heads, n_kv_heads)]
    weights = [Param(f"w{n}", (size, dim)) for n, size in enumerate(sizes)]
    slices = dict(shared("qkv", weights, n_groups=n_kv_heads))
    for weight, rows_of_all in zip(weights, expected, strict=True):
        part, n_rows = slices[weight.name], weight.shape[0]
        assert part.shape == stored.shape
        for rows in (range(n_rows), range(3, n_rows), range(1, min(7, n_rows)), range(2, 2)):
            if rows:
                expected_rows = rows_of_all.reshape(-1, dim)[rows.start : rows.stop]
                assert torch.equal(taken(stored, part, rows), expected_rows)
        assert part.extent.start == next(iter(part.runs(range(n_rows)))).start
        assert part.extent.stop == list(part.runs(range(n_rows)))[-1].stop
    assert not list(slices["w0"].runs(range(2, 2)))


def test_each_weight_is_one_slice_of_a_3d_tensor():
    stored = torch.arange(4 * 6 * 5).view(4, 6, 5)
    weights = [Param(f"e{number}", (6, 5)) for number in range(4)]
    for number, (_, part) in enumerate(shared("all", weights, n_slices=4)):
        assert part.shape == (4, 6, 5)
        assert torch.equal(taken(stored.view(-1, 5), part, range(6)), stored[number])


def test_weight_in_its_own_tensor_is_one_run():
    assert list(whole("a", (6, 5)).runs(range(1, 6))) == [range(1, 6)]
    assert whole("a", (6,)).extent == range(6)


@pytest.mark.parametrize("layout", ["hf", "gguf"])
def test_stored_slices_are_cached(layout):
    args = ModelArgs(
        dim=8, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=4, ffn_dim=6, vocab_size=5
    )
    assert stored_slices(args, layout) is stored_slices(args, layout)
