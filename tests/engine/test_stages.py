"""Pipeline parallelism: stages of consecutive layers compute what one rank computes."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from adapters import write_adapter
from hypothesis import given
from hypothesis import strategies as st
from parity_steps import cut_logits, load_runner, logits_in_pieces
from plan_output import Capture, plan
from thread_ranks import ThreadComm, run_on_threads
from tiny_models import TinyModel, write_hf
from torch import Tensor
from transformers_oracle import reference_logits

from parallel_llama import LLM, SamplingParams
from parallel_llama.config.layouts import load_model_args
from parallel_llama.dtypes import KVFormat, Precision
from parallel_llama.engine.llm_config import LLMConfig
from parallel_llama.engine.pipeline_pieces import cut_step
from parallel_llama.engine.step_buffer import Chunk
from parallel_llama.errors import UsageError
from parallel_llama.files.model_files import find_model
from parallel_llama.memory import kv_bytes_per_token, values_of_stages, weight_bytes
from parallel_llama.model.transformer import Transformer
from parallel_llama.model.weights import stored_weights
from parallel_llama.ops.cpu.jit import openmp
from parallel_llama.ops.cpu.replay import Recording
from parallel_llama.parallel.collectives import Communicator, Solo
from parallel_llama.parallel.failures import RankError
from parallel_llama.parallel.stage_group import stage_group
from parallel_llama.parallel.timeouts import Timeouts
from parallel_llama.plan import make_plan, stage_sizes

_WINDOWS = ["full_attention" if layer == 2 else "sliding_attention" for layer in range(5)]

MODELS = {
    "llama": TinyModel(6, 2, 32, 96, ffn_dim=160, n_layers=5),
    # On most stages all layers have a window, so one of the two KV groups has no layer there.
    "gemma3": TinyModel(
        6, 3, 8, 48, tied=True, n_layers=5, family="gemma3_text",
        own={"query_pre_attn_scalar": 13, "sliding_window": 5, "layer_types": _WINDOWS},
    ),
    "mixtral": TinyModel(
        6, 2, 8, 48, n_layers=3, family="mixtral",
        own={"num_local_experts": 5, "num_experts_per_tok": 2},
    ),
}  # fmt: skip
# Ranks and stages: whole stages of 1, 2 and 3 ranks, and stages that differ by a rank.
SIZES = [(2, 2), (3, 2), (3, 3), (5, 2), (6, 2), (7, 3)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        name: write_hf(tiny, tmp_path_factory.mktemp("hf"), seed)
        for seed, (name, tiny) in enumerate(MODELS.items())
    }


@pytest.mark.parametrize("name", MODELS)
def test_logits_of_stages_equal_transformers_and_have_the_bits_of_one_rank(folders, name):
    """More ranks than KV heads in a stage, stages of unequal size, and ranks without experts."""
    folder, tokens = folders[name], MODELS[name].tokens
    expected = reference_logits(folder, tokens)
    alone = cut_logits(Solo(), folder, tokens, {"exact": True})
    torch.testing.assert_close(alone, expected, rtol=0, atol=1e-10)
    for size, pp in SIZES:
        for exact in (False, True):
            found = run_on_threads(size, cut_logits, folder, tokens, {"exact": exact, "pp": pp})
            for logits in found:
                torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)
                assert torch.equal(logits, alone) or not exact


def decoded(
    comm: Communicator, folder: Path, tokens: Sequence[int], cut: Mapping[str, Any]
) -> tuple[Tensor, int, int]:
    """Logits of a prompt and decode steps; the number of recorded steps and of their host calls."""
    runner = load_runner(comm, folder, len(tokens), cut)
    with pytest.MonkeyPatch.context() as monkeypatch:
        host_call = Mock(side_effect=Recording.host_call)
        monkeypatch.setattr(Recording, "host_call", lambda *args: host_call(*args))
        logits = logits_in_pieces(runner, tokens, range(8, len(tokens)))
    n_recorded = sum(step is not None for step in runner._calls._steps.values())
    return logits, n_recorded, host_call.call_count


@pytest.mark.parametrize("shared_memory", [True, False])
def test_recorded_decode_steps_of_processes_have_the_bits_of_one_rank(
    ranks, folders, shared_memory
):
    """Ranks of a stage use shared memory, whatever transport all ranks use together."""
    folder, tokens = folders["llama"], MODELS["llama"].tokens
    alone, n_alone, _ = decoded(Solo(), folder, tokens, {"exact": True})
    assert n_alone > 0 or openmp() is None
    cut = {"exact": True, "pp": 2}
    for logits, n_recorded, n_calls in ranks(3, shared_memory).run(decoded, folder, tokens, cut):
        assert torch.equal(logits, alone)
        assert n_recorded == n_alone
        assert n_calls == 0 or not shared_memory  # kernels exchange, unless through gloo


def counts_of_a_step(comm: ThreadComm, folder: Path, pp: int) -> Counter[str]:
    runner = load_runner(comm, folder, 8, {"pp": pp})
    comm.counts.clear()
    logits_in_pieces(runner, range(5))
    return comm.counts


def test_all_ranks_exchange_once_per_stage_beside_embedding_and_head(folders):
    """The slow link carries these exchanges only."""
    for counts in run_on_threads(4, counts_of_a_step, folders["llama"], 2):
        assert counts == {"all_reduce": 1, "broadcast": 2, "all_gather": 1}


def held_bytes(comm: Communicator, folder: Path, pp: int) -> tuple[int, int]:
    """The bytes of a rank's weights, and of a block of its KV cache."""
    runner = load_runner(comm, folder, 1, {"pp": pp})
    weights = stored_weights(runner.model).values()
    return sum(w.values.nbytes for w in weights), sum(c.as_bytes().nbytes for c in runner.caches)


@pytest.mark.parametrize("name", MODELS)
def test_a_rank_holds_the_bytes_that_the_plan_says(folders, name):
    """A rank holds no layer of another stage, neither its weights nor its KV cache."""
    args = load_model_args(find_model(str(folders[name])))
    precision = Precision.plain("float64")
    shards = make_plan(args, 5, pp=3).shards
    values = values_of_stages(args, precision, make_plan(args, 5, pp=3))
    assert run_on_threads(5, held_bytes, folders[name], 3) == [
        (
            weight_bytes(shard, values[shard.stage]),
            sum(kv_bytes_per_token(args, shard, KVFormat("float64"))),
        )
        for shard in shards
    ]


def layers_of(n_layers: int, size: int, pp: int, shares: Sequence[float] | None = None) -> Any:
    args = load_model_args(find_model("llama-3.2-1b"))
    plan = make_plan(args, size, shares, pp=pp)
    assert args.n_layers == n_layers
    return [(list(stage.ranks), len(stage.layers)) for stage in plan.stages]


def test_layers_are_in_proportion_to_the_ranks_or_the_memory_of_a_stage():
    """Equal layers on stages of 3 and 2 ranks would make two ranks do half of the work."""
    assert stage_sizes(8, 3) == [3, 3, 2]
    assert layers_of(16, 3, 3) == [([0], 6), ([1], 5), ([2], 5)]
    assert layers_of(16, 5, 2) == [([0, 1, 2], 10), ([3, 4], 6)]
    assert layers_of(16, 4, 2, [3, 3, 1, 1]) == [([0, 1], 12), ([2, 3], 4)]


def test_a_plan_shows_stages_and_the_bytes_of_each_rank(capsys: Capture):
    asked = ["llama-3.2-1b", "--nproc", "5", "--pp", "2", "--memory", "64"]
    found = plan(capsys, *asked)
    assert found["pp"] == 2
    assert [rank["stage"] for rank in found["ranks"]] == [0, 0, 0, 1, 1]
    assert [rank["layers"] for rank in found["ranks"]] == [[0, 10]] * 3 + [[10, 16]] * 2
    alone = plan(capsys, "llama-3.2-1b", "--memory", "64")
    kv = sum(rank["kv_bytes_per_token"] for rank in found["ranks"])
    assert kv == alone["ranks"][0]["kv_bytes_per_token"]
    # Every rank holds the norms of its layers and the last norm: 2048 values of 4 bytes each.
    norms = 4 * 2048 * sum(2 * n + 1 for n in (10, 10, 10, 6, 6))
    assert found["weight_bytes"] == alone["weight_bytes"] - 4 * 2048 * 33 + norms
    assert found["predicted"] is None and "--calibration" in found["unpredicted"]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"pp": 0}, "a pipeline of 0 stages: use a whole number from 1"),
        ({"pp": 1.5}, r"a pipeline of 1\.5 stages: use a whole number"),
        ({"pp": 2, "elastic": True}, r"a pipeline \(pp\) and elastic cannot be combined"),
        ({"pp": 2, "device": "cuda"}, r"a pipeline \(pp\) on GPUs is not supported; use the CPU"),
        (
            {"pp": 2, "kv_split": "sequence"},
            "a pipeline .* and a KV cache sharded by sequence cannot be combined",
        ),
        ({"pp": 2, "slice_of": (0, 2)}, r"a pipeline \(pp\) and a slice cannot be combined"),
    ],
)
def test_invalid_pipeline_settings_are_refused(settings, reason):
    with pytest.raises(UsageError, match=reason):
        LLMConfig(**settings)


def test_stages_without_a_rank_or_a_layer_are_refused(folders):
    args = load_model_args(find_model(str(folders["mixtral"])))
    with pytest.raises(UsageError, match=r"2 ranks and 3 layers .* use 1 to 2 stages, or more"):
        make_plan(args, 2, pp=3)
    with pytest.raises(UsageError, match=r"8 ranks and 3 layers .* 4 stages; use 1 to 3 stages$"):
        make_plan(args, 8, pp=4)
    with pytest.raises(UsageError, match=r"6 query heads .* the 7 ranks of .* at most 12 ranks"):
        make_plan(args, 13, pp=2)


def late_in_a_stage(comm: Communicator) -> str:
    group = stage_group(comm, [range(1), range(1, 3)], Timeouts(0.3, 60.0))
    message = ""
    if comm.rank == 1:
        with pytest.raises(RankError) as raised:
            group.all_reduce(torch.ones(2))
        message = str(raised.value)
    comm.barrier()
    group.close()
    return message


def test_a_late_rank_is_named_by_its_number_among_all_ranks(ranks):
    """A rank has another number within its stage, which other stages do not know."""
    _, message, _ = ranks(3).run(late_in_a_stage)
    assert "rank 2 of 3 is late" in message
    assert "rank 1 is in exchange 1" in message


def test_pipelined_llm_gives_the_tokens_and_logprobs_of_one_rank(folders, tmp_path):
    """Also with a LoRA adapter: a rank loads its matrices for the layers of the stage."""
    folder = folders["llama"]
    names = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]
    adapter = write_adapter(
        tmp_path / "adapter", folder, rf".*\.({'|'.join(names)})", target_modules=names
    )
    settings: dict[str, Any] = {
        "dtype": "float32", "kv_cache_bytes": 4 << 20, "adapters": {"one": str(adapter)},
        "quant": "int8",
    }  # fmt: skip
    prompts = [[5, 6, 7], list(range(3, 40)), [5, 6, 7]]
    params = SamplingParams(max_tokens=8, logprobs=2, ignore_eos=True)
    found = []
    for size, pp in ((1, 1), (3, 2)):
        with LLM(str(folder), tp_size=size, pp=pp, **settings) as llm:
            own = llm.generate(prompts, params, adapter=[None, "one", "one"])
        found.append([(one.tokens, one.logprobs) for one in own])
    assert found[0] == found[1]


def forwarded(
    comm: Communicator, folder: Path, lengths: Sequence[int], cut: Mapping[str, Any]
) -> list[Tensor]:
    """All rows of a step of several prompts, and some rows of a second step in another order."""
    runner = load_runner(comm, folder, 8, cut)
    most = -(-2 * max(lengths) // 8)
    runner.reserve([most * len(lengths)] * len(runner.kv_groups), 8)
    results = []
    for step in range(2):
        chunks = []
        for number, n in enumerate(lengths):
            tokens = [(7 * at + number + step) % 200 for at in range(n)]
            blocks = range(number * most, (number + 1) * most)
            chunks.append(Chunk(tokens, step * n, [blocks] * len(runner.kv_groups), 2 * n))
        n_tokens = sum(lengths)
        results.append(runner.forward(chunks, [n_tokens - 1, 3, 0, 40][: 4 * step] or None))
    return results


@pytest.mark.parametrize("name", MODELS)
def test_pieces_of_a_step_have_the_bits_of_the_whole_step(folders, name, monkeypatch):
    """Stages run different pieces at the same time; a piece sees the keys of the pieces before."""
    lengths = [37, 3, 50, 1, 12]
    alone = forwarded(Solo(), folders[name], lengths, {"exact": True})
    monkeypatch.setattr("parallel_llama.plan.MIN_PIECE_TOKENS", 16)
    for size, pp in ((2, 2), (5, 3)):
        found = run_on_threads(size, forwarded, folders[name], lengths, {"exact": True, "pp": pp})
        assert all(torch.equal(*pair) for own in found for pair in zip(own, alone, strict=True))


def test_stages_run_pieces_of_a_step_at_the_same_time(folders, monkeypatch):
    """Regression: a stage ran a whole step while the other stages waited."""
    monkeypatch.setattr("parallel_llama.plan.MIN_PIECE_TOKENS", 16)
    began: list[tuple[int, int]] = []
    run = Transformer._own_blocks

    def note(model: Transformer, x: Tensor, *arguments: Any) -> Tensor:
        began.append((model.stages.index(model.stage), model.comm.counts["broadcast"]))
        return run(model, x, *arguments)

    monkeypatch.setattr(Transformer, "_own_blocks", note)
    run_on_threads(2, counts_of_a_step_of_64, folders["llama"])
    # After broadcasts 1, 3, 5 of both stages, both run the next piece.
    assert sorted(began) == [(0, 0), (0, 1), (0, 3), (0, 5), (1, 1), (1, 3), (1, 5), (1, 7)]


def counts_of_a_step_of_64(comm: ThreadComm, folder: Path) -> None:
    runner = load_runner(comm, folder, 64, {"pp": 2})
    comm.counts.clear()
    logits_in_pieces(runner, range(64))


@given(st.lists(st.integers(1, 90), min_size=1, max_size=12), st.integers(2, 4), st.data())
def test_pieces_of_a_step_have_all_its_tokens_in_order(lengths, n_stages, data):
    """Cutting a prefilled chunk leaves no part for the decode kernel."""
    chunks = [Chunk(range(n), 100 * at, (), n) for at, n in enumerate(lengths)]
    n_tokens = sum(lengths)
    rows = data.draw(st.none() | st.permutations(range(min(n_tokens, 20))))
    pieces, places = cut_step(chunks, rows, n_stages)
    parts = [chunk for piece in pieces for chunk in piece.chunks]
    tokens = [(c.start + at, token) for c in parts for at, token in enumerate(c.tokens)]
    assert tokens == [(c.start + at, token) for c in chunks for at, token in enumerate(c.tokens)]
    assert sum(part.is_decoded for part in parts) == sum(chunk.is_decoded for chunk in chunks)
    n_pieces = min(n_tokens // 64, 4 * n_stages)
    assert len(pieces) <= max(1, n_pieces)
    firsts = accumulate((sum(len(c.tokens) for c in p.chunks) for p in pieces), initial=0)
    given_rows = zip(firsts, pieces, strict=False)
    results = [first + row for first, piece in given_rows for row in piece.rows or ()]
    if places is None:
        assert len(pieces) == 1 or rows is None
    else:
        assert [results[place] for place in places] == rows


def compared(comm: Communicator, folder: Path) -> list[str]:
    """The names of the weights that the product check has used."""
    runner = load_runner(comm, folder, 4, {"pp": 2, "exact": True})
    check = runner.check_integrity()
    logits_in_pieces(runner, range(4))
    check.compare_memory()
    assert check.products is not None
    for _ in range(20):
        messages = comm.all_gather(check.products.message())
        check.products.receive(messages, torch.linspace(-1, 1, 48, dtype=torch.float64))
    assert check.products.n_multiplied == 20
    return [name for name, _ in check.products._weights]


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_ranks_of_all_stages_compare_products_of_their_own_layers(folders, name):
    """Regression: ranks shared no layer by name, so only the embedding was compared."""
    first, same, other = run_on_threads(3, compared, folders[name])
    assert first == same
    assert len(other) == len(first) > 6
    assert "layers.1.attention.wo.weight" in first
    assert "layers.4.attention.wo.weight" in other
