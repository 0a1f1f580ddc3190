"""The mixture of experts: every placement against transformers, routing, ties, and other rows."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from mixes import ARGS, run_mixes
from parity_steps import load_runner, logits_in_pieces
from safetensors.torch import load_file, save_file
from thread_ranks import run_on_threads
from tiny_models import TINY_MODELS, write_hf
from torch import Tensor
from transformers_oracle import reference_logits

from parallel_llama.dtypes import QuantFormat
from parallel_llama.errors import UsageError
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.model.layers import Backend
from parallel_llama.model.moe import MixtureOfExperts
from parallel_llama.ops import CPUOps, TorchOps
from parallel_llama.ops.formats import DenseWeight, QuantWeight, grouped_linear
from parallel_llama.ops.quant import quantise
from parallel_llama.parallel.collectives import Communicator, Solo
from parallel_llama.plan import make_plan

TINY = TINY_MODELS["8/2 mixtral"]
TOKENS = [(31 * at + 7) % TINY.vocab_size for at in range(40)]
EXPERTS = replace(ARGS, n_experts=6, n_active_experts=2)
FLOAT64 = torch.float64


def assert_same(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf(TINY, tmp_path_factory.mktemp("hf"))


@pytest.fixture(scope="module")
def expected(folder: Path) -> Tensor:
    return reference_logits(folder, TOKENS)


def logits_and_collectives(
    comm: Communicator, folder: Path, cut: dict[str, Any]
) -> tuple[str, Tensor, Any]:
    runner = load_runner(comm, folder, len(TOKENS), cut)
    logits = logits_in_pieces(runner, TOKENS, [7, 8, 9])
    return runner.plan.placement.kind, logits, getattr(comm, "counts", None)


@pytest.mark.parametrize(
    ("tp_size", "ranks_per_expert", "kind"),
    [
        *((tp_size, tp_size, "tensor") for tp_size in (1, 2, 3, 5, 7, 8)),
        *((tp_size, 1, "expert") for tp_size in (2, 3, 5)),
        *((tp_size, 1, "mixed") for tp_size in (6, 8)),
        (3, 2, "mixed"),
        (5, 3, "mixed"),
        (7, 4, "mixed"),
        (8, 5, "mixed"),
    ],
)
def test_logits_equal_transformers_for_any_expert_placement(
    folder, expected, tp_size, ranks_per_expert, kind
):
    cut = {"ranks_per_expert": ranks_per_expert}
    for placement, logits, _ in run_on_threads(tp_size, logits_and_collectives, folder, cut):
        assert placement == kind
        assert_same(logits, expected)


@pytest.mark.parametrize("memory", [[80, 80, 40], [1, 6, 3], [10, 1, 1]])
@pytest.mark.parametrize("ranks_per_expert", [1, 2, 3])
def test_logits_equal_transformers_on_ranks_of_uneven_memory(
    folder, expected, memory, ranks_per_expert
):
    cut = {"shares": memory, "ranks_per_expert": ranks_per_expert}
    for _, logits, _ in run_on_threads(3, logits_and_collectives, folder, cut):
        assert_same(logits, expected)


def test_a_rank_may_hold_no_channel_of_any_expert(tmp_path):
    narrow = write_hf(replace(TINY, ffn_dim=3), tmp_path)
    expected = reference_logits(narrow, TOKENS)
    cut = {"ranks_per_expert": 8}
    for _, logits, _ in run_on_threads(8, logits_and_collectives, narrow, cut):
        assert_same(logits, expected)


@pytest.mark.parametrize("ranks_per_expert", [1, 2])
def test_logits_on_processes_equal_transformers_for_any_placement(
    ranks, folder, expected, ranks_per_expert
):
    cut = {"ranks_per_expert": ranks_per_expert}
    for _, logits, _ in ranks(3).run(logits_and_collectives, folder, cut):
        assert_same(logits, expected)


@pytest.mark.parametrize("ranks_per_expert", [1, 2, 3])
def test_experts_need_no_extra_collectives(folder, ranks_per_expert):
    cut = {"ranks_per_expert": ranks_per_expert}
    for _, _, counts in run_on_threads(3, logits_and_collectives, folder, cut):
        assert counts["all_reduce"] == 4 * (2 * TINY.n_layers + 1)  # four pieces
        assert counts["all_gather"] == 1  # of the logits


# Routing


def all_ops() -> list[TorchOps]:
    return [TorchOps(), CPUOps(FLOAT64, 4, {1})]


every_ops = pytest.mark.parametrize("ops", all_ops(), ids=lambda ops: type(ops).__name__)


def routed(ops: TorchOps, scores: Tensor, n_active: int, *, normed: bool) -> tuple[Tensor, Tensor]:
    """Routing with these scores."""
    return ops.route(scores, torch.eye(scores.shape[1], dtype=FLOAT64), n_active, normed=normed)


@every_ops
def test_ties_choose_the_expert_with_lowest_number(ops):
    scores = torch.tensor([[1.0, 3, 2, 3, 3], [0, 0, 0, 0, 0], [2, 1, 2, 9, 2]], dtype=FLOAT64)
    routing_weights, experts = routed(ops, scores, 2, normed=True)
    assert experts.tolist() == [[1, 3], [0, 1], [3, 0]]
    assert_same(routing_weights[:2], torch.full((2, 2), 0.5, dtype=FLOAT64))


@every_ops
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("n_experts", [3, 7, 40])
def test_routing_weights_are_softmax_of_expert_scores(ops, normed, n_experts):
    scores = 9 * torch.randn(50, n_experts, dtype=FLOAT64) - 20
    routing_weights, experts = routed(ops, scores, 3, normed=normed)
    expected, indices = scores.softmax(-1).topk(3)
    if normed:
        assert_same(routing_weights.sum(-1), torch.ones(50, dtype=FLOAT64))
        expected = scores.gather(1, indices).softmax(-1)
    assert torch.equal(experts, indices)
    assert_same(routing_weights, expected)


@every_ops
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("groups", [(1, 1), (4, 2)])
def test_biased_sigmoid_routing_chooses_from_the_best_groups(ops, normed, groups):
    """The bias affects only the choice; no two groups have equal sums."""
    x, gate = torch.randn(50, 13, dtype=FLOAT64), torch.randn(12, 13, dtype=FLOAT64)
    bias = torch.randn(12, dtype=FLOAT64)
    routing_weights, experts = ops.sigmoid_route(x, gate, bias, 3, groups, 1.7, normed=normed)
    scores = (x @ gate.T).sigmoid()
    for row, own in enumerate((scores + bias).tolist()):
        size = 12 // groups[0]
        parts = [range(start, start + size) for start in range(0, 12, size)]
        parts.sort(key=lambda part: -sum(sorted(own[e] for e in part)[-2:]))
        allowed = [expert for part in parts[: groups[1]] for expert in part]
        chosen = sorted(allowed, key=lambda expert: -own[expert])[:3]
        assert experts[row].tolist() == chosen
        expected = scores[row, chosen]
        assert_same(routing_weights[row], 1.7 * expected / (expected.sum() if normed else 1))


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("groups", [(1, 1), (4, 2)])
def test_sigmoid_routing_is_bitwise_equal_alone_and_in_batch(groups, has_bias):
    """Regression: torch's sigmoid gave different last bits at the end of a tensor."""
    ops = CPUOps(torch.float32, 4, {1})
    x, gate, bias = torch.randn(37, 13), torch.randn(12, 13), torch.randn(12)
    more = (gate, bias if has_bias else None, 3, groups, 1.7)
    together = ops.sigmoid_route(x, *more, normed=False)
    for row in range(37):
        alone = ops.sigmoid_route(x[row : row + 1], *more, normed=False)
        assert all(
            torch.equal(one[0], many[row]) for one, many in zip(alone, together, strict=True)
        )


@every_ops
@pytest.mark.parametrize("normed", [True, False])
def test_sigmoid_routing_without_bias_chooses_largest_scores(ops, normed):
    """Sigmoids of large scores round to equal values."""
    scores = torch.tensor([[50.0, 60, -1, 55], [-3, 0, 2, -2]], dtype=FLOAT64)
    routing_weights, experts = ops.sigmoid_route(
        scores, torch.eye(4, dtype=FLOAT64), None, 2, (1, 1), 1.0, normed=normed
    )
    assert experts.tolist() == [[1, 3], [2, 1]]
    expected = torch.tensor([[60.0, 55], [2, 0]], dtype=FLOAT64).sigmoid()
    assert_same(routing_weights, expected / (expected.sum(1, keepdim=True) if normed else 1))


@every_ops
@pytest.mark.parametrize("groups", [(1, 1), (2, 1)])
def test_sigmoid_ties_choose_the_expert_with_lowest_number(ops, groups):
    scores = torch.tensor([[1.0, 3, 2, 3, 3, 2], [0, 0, 0, 0, 0, 0]], dtype=FLOAT64)
    eye, bias = torch.eye(6, dtype=FLOAT64), torch.zeros(6, dtype=FLOAT64)
    _, experts = ops.sigmoid_route(scores, eye, bias, 2, groups, 1.0, normed=True)
    assert experts.tolist() == [[1, 3] if groups == (1, 1) else [3, 4], [0, 1]]


@every_ops
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_invalid_scores_give_nan_weights_and_valid_experts(ops, normed, bad):
    """NaN makes the step fail with an error; the experts are valid numbers."""
    scores = torch.randn(3, 5, dtype=FLOAT64)
    scores[0, 2] = scores[2] = bad
    routing_weights, experts = routed(ops, scores, 3, normed=normed)
    assert routing_weights[[0, 2]].isnan().all() and not routing_weights[1].isnan().any()
    assert ((experts >= 0) & (experts < 5)).all()


def test_bfloat16_expert_outputs_are_summed_in_float32():
    """In bfloat16, 256 + 1 would be 256."""
    zeros = torch.zeros(4, 4, dtype=torch.bfloat16)
    routing_weights, _ = TorchOps().route(zeros[:1], zeros, 3, normed=True)
    assert routing_weights.dtype == torch.float32
    parts = torch.tensor([[768.0], [3.0], [3.0]], dtype=torch.bfloat16)
    assert TorchOps().weighted_sum(parts, routing_weights).tolist() == [[258.0]]


@pytest.fixture(scope="module")
def tied(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with equal scores for experts 1, 2 and 4, which are often the second best.

    Their gate rows have one nonzero value: sums of several terms may round differently by column.
    """
    copy = tmp_path_factory.mktemp("tied")
    (copy / "config.json").write_bytes((folder / "config.json").read_bytes())
    weights = load_file(folder / "model.safetensors")
    for layer in range(TINY.n_layers):
        gate = weights[f"model.layers.{layer}.block_sparse_moe.gate.weight"]
        one = torch.zeros_like(gate[1])
        one[layer] = gate[1].norm()
        gate[1] = gate[2] = gate[4] = one
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    return copy


class _Lowest:
    """Replaces torch.topk by one that takes the first of equal values."""

    def __enter__(self) -> None:
        self._topk = torch.topk
        torch.topk = lambda x, n, dim=-1: tuple(
            each[..., :n] for each in x.sort(dim=dim, descending=True, stable=True)
        )

    def __exit__(self, *_: object) -> None:
        torch.topk = self._topk


@pytest.mark.parametrize("ranks_per_expert", [1, 2, 3])
def test_ties_at_the_top_k_cutoff_are_broken_alike_on_all_ranks(tied, ranks_per_expert):
    """Compares with transformers; torch.topk is patched to take the first of equal values."""
    with _Lowest():
        expected = reference_logits(tied, TOKENS)
    cut = {"ranks_per_expert": ranks_per_expert}
    for _, logits, _ in run_on_threads(3, logits_and_collectives, tied, cut):
        assert_same(logits, expected)


# One token in a batch


@every_ops
@pytest.mark.parametrize("n_tokens", [0, 3, 50])
def test_routed_linear_multiplies_each_token_by_its_experts(ops, n_tokens):
    """Some of the experts belong to another rank, and one is not chosen."""
    own, n_active = range(1, 5), 3
    experts = torch.randn(n_tokens, 6).topk(n_active).indices
    experts = experts.where(experts != 2, 5)
    x = torch.randn(n_tokens, 13, dtype=FLOAT64)
    first, second = (
        [torch.randn(shape, dtype=FLOAT64) for _ in own] for shape in ((17, 13), (11, 17))
    )
    to_experts, back = ops.expert_dispatch(experts, own)
    h = ops.routed_linear(x, first, to_experts)
    actual = ops.routed_linear(h, second, back)
    expected = torch.zeros(n_tokens * n_active, 11, dtype=FLOAT64)
    for pair, expert in enumerate(experts.flatten().tolist()):
        if expert in own:
            place = expert - own.start
            expected[pair] = second[place] @ (first[place] @ x[pair // n_active])
    assert_same(actual, expected)


@pytest.mark.parametrize("rows", [3, 40])
def test_each_expert_may_have_its_own_weight_format(rows):
    ops = CPUOps(torch.float32, 4, {1}, matrices=[torch.bfloat16, QuantFormat(8)])
    dense = [DenseWeight((8, 64), dtype=torch.float32, device=torch.device("cpu")) for _ in "ab"]
    dense[0].values, dense[1].values = torch.randn(8, 64), torch.randn(8, 64).to(torch.bfloat16)
    small = QuantWeight(quantise(torch.randn(8, 64), QuantFormat(8)), ops.panel_rows)
    x = torch.randn(rows, 64)
    for weights in (dense, [*dense, small]):
        experts = torch.arange(rows)[:, None] % len(weights)
        to_experts, back = ops.expert_dispatch(experts, range(len(weights)))
        dispatch = replace(back, sources=to_experts.sources)
        y = grouped_linear(x, weights, dispatch, ops)
        for number, weight in enumerate(weights):
            own = slice(number, None, len(weights))
            assert torch.equal(y[own], weight.apply(x[own], ops))


def a_layer(args: ModelArgs, ops: TorchOps) -> MixtureOfExperts:
    layer = MixtureOfExperts(args, make_plan(args, 1).shards[0], Backend(Solo(), ops, FLOAT64))
    generator = torch.Generator().manual_seed(3)
    matrices = [layer.gate]
    for expert in layer.experts.values():
        matrices += [expert.w1, expert.w3, expert.w2]
    if layer.shared_expert is not None:
        shared = layer.shared_expert
        matrices += [shared.w1, shared.w3, shared.w2, layer.shared_gate]
    for matrix in matrices:
        shape = matrix.weight.values.shape
        matrix.weight.load(torch.randn(shape, generator=generator, dtype=FLOAT64))
    for expert in layer.experts.values():
        expert.fuse()
    layer.fuse()
    return layer


@pytest.mark.parametrize("shared", [{}, {"shared_ffn_dim": 43, "shared_gate": True}], ids=str)
def test_result_of_a_token_is_bitwise_equal_alone_and_in_batch(shared):
    """True as long as no expert has more rows than kernels take."""
    args = replace(EXPERTS, n_experts=9, n_active_experts=3, **shared)
    layer = a_layer(args, CPUOps(FLOAT64, args.head_dim, {3}))
    x = torch.randn(31, args.dim, dtype=FLOAT64)
    together = layer(x.clone())
    for row in range(len(x)):
        assert torch.equal(layer(x[row : row + 1].clone()), together[row : row + 1])


def test_the_experts_of_a_token_do_not_depend_on_the_batch():
    gate, x = torch.randn(8, 300, dtype=FLOAT64), torch.randn(700, 300, dtype=FLOAT64)
    ops = CPUOps(FLOAT64, 4, {1})
    routing_weights, experts = ops.route(x, gate, 2, normed=True)
    for row in range(0, len(x), 50):
        alone = ops.route(x[row : row + 1], gate, 2, normed=True)
        assert torch.equal(alone[0], routing_weights[row : row + 1])
        assert torch.equal(alone[1], experts[row : row + 1])


@pytest.mark.slow
@pytest.mark.parametrize(("tp_size", "seeds"), [(1, range(12)), (3, range(40, 46))])
def test_request_gives_same_result_alone_and_in_any_mix(tp_size, seeds):
    assert not run_on_threads(tp_size, run_mixes, seeds, EXPERTS)[0]


# What is refused


@pytest.mark.parametrize(
    ("n_experts", "n_active"), [(-1, 0), (1 << 13, 1), (4, 0), (4, 5), (0, 2), (4, -1)]
)
def test_impossible_expert_counts_are_refused(n_experts, n_active):
    with pytest.raises(UsageError, match="n_experts"):
        replace(ARGS, n_experts=n_experts, n_active_experts=n_active)
