"""A runner reads a sequence's past from any blocks, and computes only the requested rows."""

from pathlib import Path

import pytest
import torch
from parity_steps import load_runner
from thread_ranks import ThreadComm, run_on_threads
from tiny_models import TINY_MODELS, write_hf
from torch import Tensor

from parallel_llama.engine.model_runner import ModelRunner
from parallel_llama.engine.step_buffer import Chunk

NAME = "9/3 attention bias"
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9]
N, HEAD_DIM = len(PROMPT), TINY_MODELS[NAME].head_dim


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf(TINY_MODELS[NAME], tmp_path_factory.mktemp("runner"), 0)


def rows_and_all(comm: ThreadComm, folder: Path) -> tuple[Tensor, Tensor, Tensor, int]:
    runner = load_runner(comm, folder, 2 * N)
    runner.reserve([2], N)
    pieces = [Chunk(PROMPT, 0, [[1]], N), Chunk(PROMPT[:5], 0, [[0]], N)]
    whole = runner.forward(pieces)
    rows = runner.forward(pieces, [N + 4, 2])
    comm.counts.clear()
    none = runner.forward(pieces, [])
    return whole, rows, none, comm.counts["all_reduce"]


@pytest.mark.parametrize("tp_size", [2, 5])
def test_requested_rows_equal_rows_of_full_output_and_may_be_empty(folder, tp_size):
    """A step that only fills the cache still takes part in every collective."""
    for whole, rows, none, n_all_reduces in run_on_threads(tp_size, rows_and_all, folder):
        torch.testing.assert_close(rows, whole[[N + 4, 2]], rtol=0, atol=1e-12)
        assert len(none) == 0
        assert n_all_reduces == 2 * TINY_MODELS[NAME].n_layers + 1


def hidden_by_blocks(comm: ThreadComm, folder: Path) -> list[Tensor]:
    """The last rows for each block size and block order, after a prefix that is written once."""
    runner = load_runner(comm, folder, N)
    results = [runner.forward([Chunk(PROMPT, 0, [[0]], N)])[8:]]
    for block_size in (1, 2, 4):
        runner.reserve([2 * N], block_size)
        for values in (runner.caches[0].k, runner.caches[0].v):
            values.fill_(torch.nan)
        n_shared = 8 // block_size
        shared = list(range(n_shared, 0, -1))
        runner.forward([Chunk(PROMPT[:8], 0, [shared], N)], [])
        n_tail = -(-(N - 8) // block_size)
        after = range(n_shared + 1, n_shared + 1 + n_tail)
        backwards = range(2 * N - 1, 2 * N - 1 - n_tail, -1)
        for table in ([*shared, *after], [*shared, *backwards]):
            results.append(runner.forward([Chunk(PROMPT[8:], 8, [table], N)]))
    return results


@pytest.mark.parametrize("tp_size", [1, 2])
def test_block_size_and_block_order_do_not_change_results(folder, tp_size):
    for whole, *others in run_on_threads(tp_size, hidden_by_blocks, folder):
        for other in others:
            torch.testing.assert_close(other, whole, rtol=0, atol=1e-12)


def hidden_by_tiles(
    comm: ThreadComm, folder: Path, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> list[Tensor]:
    runner = load_runner(comm, folder, N)
    results = []
    for size in sizes:
        monkeypatch.setattr("parallel_llama.ops.torch_ops.MAX_QUERIES", size)
        whole = runner.forward([Chunk(PROMPT, 0, [[0]], N)])
        runner.forward([Chunk(PROMPT[:4], 0, [[0]], N)], [])
        rest = runner.forward([Chunk(PROMPT[4:], 4, [[0]], N)])
        results += [whole, torch.cat((whole[:4], rest))]
    return results


def test_query_tile_size_does_not_change_results(folder, monkeypatch):
    """With torch's operators; the kernels have tiles of their own."""
    monkeypatch.setattr("parity_steps.on_torch", True)
    sizes = [N, 5, 4, 1]
    ((first, *others),) = run_on_threads(1, hidden_by_tiles, folder, sizes, monkeypatch)
    for other in others:
        torch.testing.assert_close(other, first, rtol=0, atol=1e-12)


def hidden_by_scale(comm: ThreadComm, folder: Path) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs with a doubled attention scale, with doubled queries, and with capped scores."""

    def hidden(runner: ModelRunner) -> Tensor:
        pieces = [Chunk(PROMPT[:12], 0, [[0]], N)], [Chunk(PROMPT[12:], 12, [[0]], N)]
        return torch.cat([runner.forward(each) for each in pieces])

    scaled = load_runner(comm, folder, N, attention_scale=2 * HEAD_DIM**-0.5)
    capped = load_runner(comm, folder, N, attention_soft_cap=0.01)
    turned = load_runner(comm, folder, N)
    for block in turned.model.layers.values():
        block.attention.wq.weight.values *= 2
        block.attention.wq.bias.values *= 2
    return hidden(scaled), hidden(turned), hidden(capped)


@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_model_attends_with_its_own_scale_and_cap(folder, tp_size):
    for scaled, turned, capped in run_on_threads(tp_size, hidden_by_scale, folder):
        torch.testing.assert_close(scaled, turned, rtol=0, atol=1e-12)
        assert (capped - turned).abs().max() > 1e-3
