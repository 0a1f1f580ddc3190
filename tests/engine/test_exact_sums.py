"""Exact sums: the same bits on any number of ranks, in every family and format."""

import hashlib
import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from parity_steps import logits_in_pieces
from ranks import Ranks
from reshard_samples import moved
from thread_ranks import run_on_threads
from tiny_models import TINY_MODELS, TinyModel, write_hf
from torch import Tensor

from parallel_llama import LLM, SamplingParams
from parallel_llama.checkpoint.reading import open_checkpoint
from parallel_llama.config import load_model_args
from parallel_llama.config.layouts import default_dtype
from parallel_llama.dtypes import kv_format, make_precision
from parallel_llama.engine.model_runner import ModelRunner
from parallel_llama.errors import UsageError
from parallel_llama.families import parameters
from parallel_llama.families.weights import cut_by_outputs
from parallel_llama.files.model_files import find_model
from parallel_llama.memory import values_by_form, weight_bytes
from parallel_llama.parallel.collectives import Communicator, Solo
from parallel_llama.plan import make_plan, resolve_exact
from parallel_llama.sampling.scoring import log_sum_exp

N_TOKENS = 32
# Heads and channels in whole groups of 32 inputs, so that every format can hold it.
WIDE = TinyModel(9, 3, 32, 288, ffn_dim=416, vocab_size=700)
EXPERTS = TinyModel(
    8, 2, 32, 256, ffn_dim=96, family="mixtral",
    own={"num_local_experts": 5, "num_experts_per_tok": 2},
)  # fmt: skip
SHARED = TinyModel(
    8, 2, 32, 256, ffn_dim=416, family="qwen2_moe",
    own={
        "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 96,
        "shared_expert_intermediate_size": 288, "mlp_only_layers": [1],
    },
)  # fmt: skip


def logits_of(
    comm: Communicator,
    folder: Path,
    dtype: str,
    quant: str = "none",
    kv_cache_dtype: str = "auto",
    memory: Sequence[float] | None = None,
    exact: bool = True,
) -> str:
    """A hash of a sequence's logits: prefilled at once, in random pieces, and token by token."""
    files = find_model(str(folder))
    args = load_model_args(files)
    precision = make_precision(args, dtype, "cpu", quant, None)
    plan = make_plan(args, comm.size, memory, precision.quant_group_size, exact=exact)
    runner = ModelRunner.load(
        args, open_checkpoint(files, args), plan, comm, precision=precision,
        device=torch.device("cpu"), kv_format=kv_format(kv_cache_dtype, precision.computed),
    )  # fmt: skip
    values = values_by_form(args, precision, exact=exact)
    held = sum(
        getattr(*runner_place(runner, param.name)).values.nbytes
        for param in parameters(args)
        if quant == "none"
    )
    assert quant != "none" or held == weight_bytes(runner.shard, values)
    rng = random.Random(1)
    tokens = [rng.randrange(args.vocab_size) for _ in range(N_TOKENS)]
    runner.reserve([1] * len(runner.kv_groups), N_TOKENS)
    cuts = sorted(rng.sample(range(1, N_TOKENS), 3))
    ways = [logits_in_pieces(runner, tokens, each) for each in ((), cuts)]
    # Decoding, token by token, at the end.
    ways.append(logits_in_pieces(runner, tokens, range(N_TOKENS - 8, N_TOKENS)))
    assert torch.equal(ways[0], ways[1]) and torch.equal(ways[0], ways[2])
    return hashlib.sha256(ways[0].numpy().tobytes()).hexdigest()


def runner_place(runner: ModelRunner, name: str) -> tuple[object, str]:
    """The layer that holds a weight, and the attribute."""
    part: object = runner.model
    *path, leaf = name.split(".")
    for each in path:
        part = part[int(each)] if each.isdecimal() else getattr(part, each)  # type: ignore[index]
    return part, leaf


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    tiny = {**TINY_MODELS, "wide": WIDE, "experts": EXPERTS, "shared expert": SHARED}
    return {
        name: write_hf(model, tmp_path_factory.mktemp("hf"), seed)
        for seed, (name, model) in enumerate(tiny.items())
    }


QUICK = {"9/3", "8/4 gemma2, window", "8/2 mixtral", "7/1 falcon, tied"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in TINY_MODELS],
)
def test_every_family_has_the_same_bits_on_any_number_of_ranks(folders, name):
    """The families alternate between float32 and float64."""
    at = list(TINY_MODELS).index(name)
    dtype, tp_size = f"float{32 << at % 2}", (3, min(9, TINY_MODELS[name].n_heads))[at // 2 % 2]
    alone = logits_of(Solo(), folders[name], dtype)
    assert run_on_threads(tp_size, logits_of, folders[name], dtype) == [alone] * tp_size


@pytest.mark.parametrize(
    ("name", "quant", "kv_cache_dtype"),
    [
        *(("wide", quant, "auto") for quant in ("none", "int8", "int4", "fp8")),
        ("wide", "none", "bfloat16"),
        ("wide", "int8", "int8"),
        ("wide", "int4", "fp8"),
        ("experts", "none", "auto"),
        ("experts", "fp8", "auto"),
        ("experts", "int8", "bfloat16"),
        ("experts", "int4", "int8"),
        *(("shared expert", quant, "auto") for quant in ("none", "int8", "int4")),
    ],
)
def test_every_format_has_the_same_bits_on_any_number_of_ranks(
    folders, name, quant, kv_cache_dtype
):
    alone = logits_of(Solo(), folders[name], "float32", quant, kv_cache_dtype)
    on_ranks = run_on_threads(7, logits_of, folders[name], "float32", quant, kv_cache_dtype)
    assert on_ranks == [alone] * 7


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_weights_give_the_bits_of_float32_on_1_and_3_ranks(folders, tmp_path, dtype):
    """So a folder with 16-bit weights keeps their dtype by default."""
    half = moved(folders["wide"], tmp_path / "half", "hf", dtype=dtype)
    files = find_model(str(half))
    assert default_dtype(files, load_model_args(files), "cpu") == dtype
    alone = logits_of(Solo(), half, "float32")
    assert alone == logits_of(Solo(), half, dtype)
    assert run_on_threads(3, logits_of, half, dtype) == [alone] * 3


@pytest.mark.parametrize("memory", [(1, 4, 2), (9, 1), (1, 1, 1, 1, 6)])
def test_uneven_plans_have_the_same_bits(folders, memory):
    alone = logits_of(Solo(), folders["wide"], "float32")
    on_ranks = run_on_threads(len(memory), logits_of, folders["wide"], "float32", memory=memory)
    assert on_ranks == [alone] * len(memory)


def test_sums_split_between_ranks_have_other_bits(folders):
    """Shows that the tests above would fail if a sum were split between ranks."""
    alone = logits_of(Solo(), folders["wide"], "float32")
    assert alone not in run_on_threads(3, logits_of, folders["wide"], "float32", exact=False)


TEMPERATURES = torch.tensor([0.7, 1.3, 1.0] * 20, dtype=torch.float64)


def tile_sums(comm: Communicator, logits: Tensor, vocabs: Sequence[range]) -> Tensor:
    own = vocabs[comm.rank]
    return log_sum_exp(logits[:, own.start : own.stop], own, vocabs, comm, TEMPERATURES)


def test_vocabulary_softmax_has_same_bits_for_any_shard_borders():
    torch.manual_seed(0)
    logits = 2 * torch.randn(60, 1000)
    logits[1, 128:256] = -torch.inf
    whole = tile_sums(Solo(), logits, [range(1000)])
    exact = logits.double() / TEMPERATURES[:, None]
    torch.testing.assert_close(whole, exact.logsumexp(-1), rtol=1e-14, atol=0)
    for borders in ((0, 128, 1000), (0, 0, 512, 640, 1000), (0, 896, 896, 1000)):
        vocabs = [range(a, b) for a, b in pairwise(borders)]
        for found in run_on_threads(len(vocabs), tile_sums, logits, vocabs):
            assert torch.equal(found, whole)


def test_ranks_without_vocabulary_add_nothing_to_the_softmax():
    """With more ranks than tiles, the empty range of the last ranks begins within a tile."""
    torch.manual_seed(0)
    logits = 2 * torch.randn(60, 748)
    whole = tile_sums(Solo(), logits, [range(748)])
    vocabs = [range(a, b) for a, b in pairwise((*range(0, 748, 128), 748, 748, 748))]
    for found in run_on_threads(len(vocabs), tile_sums, logits, vocabs):
        assert torch.equal(found, whole)


def test_exact_with_incompatible_settings_is_refused(folders):
    args = load_model_args(find_model(str(folders["experts"])))
    with pytest.raises(UsageError, match="drop one"):
        make_plan(args, 4, ranks_per_expert=2, exact=True)
    with pytest.raises(UsageError, match="leave --exact out"):
        resolve_exact(True, args, 2, "cuda")


@pytest.mark.parametrize(
    ("name", "tp_size", "device", "expected"),
    [
        ("wide", 3, "cpu", True),
        ("wide", 3, "cuda", False),
        ("experts", 3, "cpu", False),
        ("experts", 1, "cpu", True),
    ],
)
def test_exact_is_off_by_default_on_gpus_and_for_sharded_experts(
    folders, name, tp_size, device, expected
):
    args = load_model_args(find_model(str(folders[name])))
    assert resolve_exact(None, args, tp_size, device) == expected
    assert not resolve_exact(False, args, tp_size, device)


def answers(tp_size: int, quant: str) -> str:
    """A hash of tokens and log-probabilities, greedy and drawn, of prompts of several lengths."""
    prompts = [
        "The capital of France is",
        "def add(a, b):\n" * 12,
        [1, 2, 3],
        "Once upon a time" * 9,
    ]
    greedy = SamplingParams(max_tokens=6, logprobs=3, prompt_logprobs=1)
    drawn = SamplingParams(max_tokens=6, temperature=0.9, top_p=0.8, seed=5, logprobs=1)
    digest = hashlib.sha256()
    with LLM("smollm2", tp_size=tp_size, quant=quant) as llm:
        for params in (greedy, drawn):
            for done in llm.generate(prompts, params):
                digest.update(repr((done.tokens, done.logprobs, done.prompt_logprobs)).encode())
    return digest.hexdigest()


@pytest.mark.slow
def test_smollm2_answers_with_the_same_bits_on_many_ranks():
    """By default, with real processes, recorded decode steps and shared memory."""
    assert answers(3, "stored") == answers(1, "stored")


def gathered(comm: Communicator, widths: Sequence[int], n_rows: int) -> bool:
    """Whether the gathered columns equal those of all ranks in order."""
    parts = [
        torch.arange(n_rows * width, dtype=torch.float32).view(n_rows, width) + 1000 * rank
        for rank, width in enumerate(widths)
    ]
    return torch.equal(comm.gather_columns(parts[comm.rank], widths), torch.cat(parts, 1))


@pytest.mark.parametrize("shared_memory", [True, False])
def test_gather_columns_concatenates_unequal_widths(ranks: type[Ranks], shared_memory):
    """Covers more data than a slot of shared memory, a rank without columns, and no rows."""
    pool = ranks(3, shared_memory=shared_memory)
    for widths, n_rows in (((3, 1, 2), 5), ((700, 0, 40), 1000), ((1, 2, 3), 0), ((0, 0, 1), 1)):
        assert pool.run(gathered, widths, n_rows) == [True] * 3


@pytest.mark.parametrize(
    ("layout", "n_parts", "options"),
    [
        ("native", 3, {}),
        ("native", 1, {"quant": "int8"}),
        ("native", 1, {"quant": "int4"}),
        ("meta", 2, {}),
        ("hf", 1, {}),
    ],
)
def test_row_parallel_weights_of_every_layout_are_read_by_outputs(
    folders, tmp_path, layout, n_parts, options
):
    moved(folders["wide"], tmp_path / "moved", layout, n_parts, dtype="float32", **options)
    files = find_model(str(tmp_path / "moved"))
    args = load_model_args(files)
    checkpoint = open_checkpoint(files, args)
    row_parallel = [param for param in parameters(args) if param.dim == 1]
    assert len(row_parallel) == 2 * args.n_layers
    for param in row_parallel:
        whole = checkpoint.read(param, range(param.shape[1]))
        for rows in (range(3), range(37, 288), range(5, 5)):
            read = checkpoint.read(cut_by_outputs(param), rows)
            assert torch.equal(read, whole[rows.start : rows.stop])
