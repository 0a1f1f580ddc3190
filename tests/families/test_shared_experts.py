"""Families with a shared expert, which computes every token, compared with transformers."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from converted_gguf import convert, rounded
from family_models import SHARED_EXPERTS
from mixes import OF_FAMILIES
from parity_steps import (
    assert_equal_bits,
    assert_parity,
    cut_logits,
    load_runner,
    logits_in_pieces,
    logits_of_models,
)
from reshard_samples import through_every_layout
from safetensors.torch import load_file, save_file
from thread_ranks import ThreadComm, run_on_threads
from tiny_models import write_hf
from torch import Tensor
from transformers_oracle import loaded_logits, reference_logits

from parallel_llama.checkpoint.reading import load, open_checkpoint
from parallel_llama.config.layouts import load_model_args
from parallel_llama.dtypes import Precision
from parallel_llama.errors import UsageError
from parallel_llama.files.model_files import find_model
from parallel_llama.memory import values_by_form, weight_bytes
from parallel_llama.parallel.collectives import Solo
from parallel_llama.plan import make_plan


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        name: write_hf(tiny, tmp_path_factory.mktemp("hf"), seed=3)
        for name, tiny in SHARED_EXPERTS.items()
    }


@pytest.mark.parametrize("name", SHARED_EXPERTS)
def test_logits_match_transformers_at_each_tp_size(name, folders):
    folder, tokens = folders[name], SHARED_EXPERTS[name].tokens
    assert_parity(folder, tokens, reference_logits(folder, tokens), (1, 2, 3, 5, 7))


@pytest.mark.parametrize(
    "cut",
    [{"ranks_per_expert": 1}, {"ranks_per_expert": 2}, {"shares": [10, 1, 6]}],
    ids=["expert", "mixed", "uneven"],
)
def test_shared_expert_is_sharded_over_all_ranks_in_every_split(folders, cut):
    name = "qwen2_moe, dense layers, tied"
    folder, tokens = folders[name], SHARED_EXPERTS[name].tokens
    expected = reference_logits(folder, tokens)
    for logits in run_on_threads(3, cut_logits, folder, tokens, cut):
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)
    args = load_model_args(find_model(str(folder)))
    shards = make_plan(args, 3, **cut).shards
    for axis, size in (("shared_ffn", args.shared_ffn_dim), ("dense_ffn", args.dense_ffn_dim)):
        assert [n for shard in shards for n in shard.extent(axis)] == list(range(size))


@pytest.mark.parametrize("name", SHARED_EXPERTS)
def test_exact_sums_give_the_same_bits_on_any_number_of_ranks(name, folders):
    folder, tokens = folders[name], SHARED_EXPERTS[name].tokens
    assert_equal_bits(folder, tokens, (3, 5))


def test_window_layers_match_transformers_without_layer_types(folders, tmp_path):
    """transformers writes layer_types, and Qwen's own files lack this key."""
    path = shutil.copytree(folders["qwen2_moe, windows"], tmp_path / "copy") / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({k: value for k, value in config.items() if k != "layer_types"}))
    args = load_model_args(find_model(str(path.parent)))
    assert args.full_layers == tuple(
        layer for layer, kind in enumerate(config["layer_types"]) if kind == "full_attention"
    )


def logits_and_counts(
    comm: ThreadComm, folder: Path, tokens: Sequence[int]
) -> tuple[Tensor, dict[str, int]]:
    runner = load_runner(comm, folder, len(tokens))
    comm.counts.clear()
    return logits_in_pieces(runner, tokens), dict(comm.counts)


def test_a_shared_expert_costs_no_collective(folders):
    name = "qwen2_moe"
    folder, tokens = folders[name], SHARED_EXPERTS[name].tokens
    for _, counts in run_on_threads(3, logits_and_counts, folder, tokens):
        assert counts == {"all_reduce": 2 * SHARED_EXPERTS[name].n_layers + 1, "all_gather": 1}


@pytest.mark.parametrize("name", SHARED_EXPERTS)
def test_reshard_through_every_layout_keeps_transformers_logits(name, folders, tmp_path):
    folder, tokens = through_every_layout(folders[name], tmp_path), SHARED_EXPERTS[name].tokens
    logits, expected = loaded_logits(folder, tokens), reference_logits(folders[name], tokens)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-12)


def test_multi_token_prediction_layers_are_ignored(folders, tmp_path):
    """These layers follow the last layer; a GGUF header counts them, config.json does not."""
    tokens = SHARED_EXPERTS["glm4_moe"].tokens
    folder = rounded(shutil.copytree(folders["glm4_moe"], tmp_path / "copy"))
    expected = reference_logits(folder, tokens)
    weights = load_file(folder / "model.safetensors")
    extra = {key: weight for key, weight in weights.items() if ".layers.2." in key}
    extra = {key.replace(".2.", ".3.", 1): 2 * weight for key, weight in extra.items()}
    extra["model.layers.3.eh_proj.weight"] = torch.ones(56, 112, dtype=torch.float64)
    save_file({**weights, **extra}, folder / "model.safetensors", {"format": "pt"})
    files = [folder, convert(folder, tmp_path / "tiny.gguf")]
    for logits in logits_of_models(Solo(), [(file, tokens) for file in files]):
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"n_shared_experts": 0}, "n_shared_experts is 0: use 1"),
        ({"n_routed_experts": 0}, "the number of experts is 0: use 1"),
        ({"first_k_dense_replace": 3}, "first_k_dense_replace=3 of 3 layers: use 0 to 2"),
        ({"n_group": 4}, "n_expert_groups=4 and n_experts=6"),
        ({"n_group": 6}, "n_expert_groups=6 and n_experts=6: use groups of .* 2 or more"),
        ({"n_group": 3, "topk_group": 4}, "n_active_groups=4 and n_expert_groups=3: use at least"),
        ({"n_group": 3}, "n_active_experts=3 in 1 groups of 2 experts: use at most 2"),
        ({"routed_scaling_factor": 0.0}, "routed_scale=0.0: use a finite number above 0"),
        ({"partial_rotary_factor": 2.0, "rope_parameters": None}, "at most 1"),
    ],
)
def test_invalid_or_unsupported_config_is_refused(folders, tmp_path, values, expected):
    path = shutil.copytree(folders["glm4_moe"], tmp_path / "copy") / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    with pytest.raises(UsageError, match=expected):
        load_model_args(find_model(str(path.parent)))


@pytest.mark.parametrize("exact", [False, True])
def test_the_plan_counts_every_byte_that_a_rank_loads(folders, exact):
    files = find_model(str(folders["qwen2_moe, dense layers, tied"]))
    args = load_model_args(files)
    checkpoint, precision = open_checkpoint(files, args), Precision.plain("float32")
    for tp_size in (1, 3, 7):
        for shard in make_plan(args, tp_size, exact=exact).shards:
            loaded = load(checkpoint, args, shard, precision, torch.device("cpu"))
            expected = weight_bytes(shard, values_by_form(args, precision, exact=exact))
            assert sum(value.nbytes for _, value in loaded) == expected


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"n_experts": 0, "n_active_experts": 0}, "shared_ffn_dim needs n_experts"),
        ({"shared_ffn_dim": 0}, "shared_gate needs shared_ffn_dim"),
        ({"shared_ffn_dim": -1}, "shared_ffn_dim=-1: use a whole number from 0"),
        ({"shared_ffn_dim": 1 << 30}, "shared_ffn_dim=1073741824: use a whole number from 0"),
        ({"dense_ffn_dim": 0}, "dense_layers and dense_ffn_dim need each other"),
        ({"dense_layers": (0, 1)}, "n_experts needs a layer that is not in dense_layers"),
        ({"dense_layers": (2,)}, r"dense_layers=\[2\]: use numbers from 0 to 1"),
    ],
)
def test_invalid_model_args_are_refused(changed, expected):
    with pytest.raises(UsageError, match=expected):
        replace(OF_FAMILIES["qwen2_moe"], **changed)
