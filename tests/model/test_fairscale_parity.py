"""The parallel layers equal fairscale's where fairscale can run: even shards, 1 to 4 ranks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from fairscale.nn.model_parallel import layers as fairscale_layers
from meta_oracle import fairscale_alone
from ranks import Pools
from torch import Tensor

from parallel_llama.model import layers
from parallel_llama.model.layers import Backend
from parallel_llama.ops import TorchOps
from parallel_llama.ops.formats import DenseWeight
from parallel_llama.parallel.collectives import Communicator, Solo

DIM, FFN_DIM, VOCAB_SIZE, N_TOKENS = 24, 36, 60, 11  # all but the last divide by 1, 2, 3 and 4
OPS = TorchOps()

Pair = tuple[Tensor, Tensor]  # our output and fairscale's
Run = Callable[..., list[Pair]]
Cut = Callable[[Communicator, int], range]


@pytest.fixture(scope="module", params=[1, 2, 3, 4])
def on_each_rank(request: pytest.FixtureRequest, ranks: Pools) -> Iterator[Run]:
    with fairscale_alone() if request.param == 1 else nullcontext():
        yield ranks(request.param).run


def assert_same(pairs: list[Pair]) -> None:
    for ours, theirs in pairs:
        assert theirs.dtype == torch.float64
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@contextmanager
def float64_by_default() -> Iterator[None]:
    """fairscale's layers take no dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def random(*shape: int, seed: int) -> Tensor:
    """The same numbers on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def even_range(comm: Communicator, size: int) -> range:
    return range(size * comm.rank // comm.size, size * (comm.rank + 1) // comm.size)


def uneven_range(comm: Communicator, size: int) -> range:
    """Every other rank holds 5, and rank 0 holds the rest."""
    borders = [0, *(size - 5 * (comm.size - rank) for rank in range(1, comm.size)), size]
    return range(borders[comm.rank], borders[comm.rank + 1])


def fill(module: object, weight: Tensor, bias: Tensor | None) -> None:
    for name, value in (("weight", weight), ("bias", bias)):
        if value is not None:
            own = getattr(module, name)
            own.load(value) if isinstance(own, DenseWeight) else own.data.copy_(value)


def run_column_parallel(comm: Communicator, has_bias: bool) -> Pair:
    weight, bias = random(FFN_DIM, DIM, seed=1), random(FFN_DIM, seed=2)
    own = even_range(comm, FFN_DIM)
    with float64_by_default():
        theirs = fairscale_layers.ColumnParallelLinear(
            DIM, FFN_DIM, bias=has_bias, gather_output=False, init_method=lambda w: w
        )
    ours = layers.ColumnParallelLinear(DIM, own, Backend(comm, OPS, torch.float64), bias=has_bias)
    for module in (ours, theirs):
        fill(module, weight[own.start : own.stop], bias[own.start : own.stop] if has_bias else None)
    x = random(N_TOKENS, DIM, seed=3)
    with torch.no_grad():
        return ours(x), theirs(x)


def run_row_parallel(comm: Communicator, has_bias: bool, cut: Cut) -> Pair:
    """Our layer is cut by `cut`, fairscale's evenly, as it must be; both sum the same inputs."""
    weight, bias = random(DIM, FFN_DIM, seed=4), random(DIM, seed=5)
    x = random(N_TOKENS, FFN_DIM, seed=6)
    own, even = cut(comm, FFN_DIM), even_range(comm, FFN_DIM)
    with float64_by_default():
        theirs = fairscale_layers.RowParallelLinear(
            FFN_DIM, DIM, bias=has_bias, input_is_parallel=True, init_method=lambda w: w
        )
    backend = Backend(comm, OPS, torch.float64)
    ours = layers.RowParallelLinear(layers.RowCut(len(own)), DIM, backend, bias=has_bias)
    fill(ours, weight[:, own.start : own.stop], bias if has_bias else None)
    fill(theirs, weight[:, even.start : even.stop], bias if has_bias else None)
    with torch.no_grad():
        return ours(x[:, own.start : own.stop]), theirs(x[:, even.start : even.stop])


def run_embedding(comm: Communicator, cut: Cut) -> Pair:
    weight = random(VOCAB_SIZE, DIM, seed=7)
    own, even = cut(comm, VOCAB_SIZE), even_range(comm, VOCAB_SIZE)
    with float64_by_default():
        theirs = fairscale_layers.VocabParallelEmbedding(VOCAB_SIZE, DIM, init_method=lambda w: w)
    ours = layers.VocabParallelEmbedding(own, DIM, Backend(comm, OPS, torch.float64))
    fill(ours, weight[own.start : own.stop], None)
    fill(theirs, weight[even.start : even.stop], None)
    tokens = torch.arange(VOCAB_SIZE)
    with torch.no_grad():
        return ours(tokens), theirs(tokens)


@pytest.mark.parametrize("has_bias", [False, True])
def test_column_parallel_linear_matches_fairscale(on_each_rank, has_bias):
    assert_same(on_each_rank(run_column_parallel, has_bias))


@pytest.mark.parametrize("cut", [even_range, uneven_range])
@pytest.mark.parametrize("has_bias", [False, True])
def test_row_parallel_linear_matches_fairscale(on_each_rank, has_bias, cut):
    """A bias added before the reduce would count once per rank."""
    assert_same(on_each_rank(run_row_parallel, has_bias, cut))


@pytest.mark.parametrize("cut", [even_range, uneven_range])
def test_vocab_parallel_embedding_matches_fairscale(on_each_rank, cut):
    assert_same(on_each_rank(run_embedding, cut))


def test_layers_on_the_meta_device_allocate_nothing():
    """fairscale's layers fail there at 2 ranks: they copy from a whole weight on the CPU."""
    layer = layers.ColumnParallelLinear(
        DIM, range(5), Backend(Solo(), OPS, torch.float64), bias=True
    )
    assert layer.weight.values.is_meta and layer.weight.values.shape == (5, DIM)
    assert layer.bias is not None and layer.bias.values.is_meta
