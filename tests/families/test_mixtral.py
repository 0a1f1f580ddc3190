"""Mixtral: its configuration, and its experts in every layout; for its logits see test_moe."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import TINY_MODELS, write_hf

from parallel_llama.checkpoint.reading import load, open_checkpoint
from parallel_llama.config.layouts import load_model_args
from parallel_llama.dtypes import Precision
from parallel_llama.errors import CheckpointError, UsageError
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.files.model_files import find_model
from parallel_llama.memory import values_by_form, weight_bytes
from parallel_llama.plan import make_plan
from parallel_llama.reshard.reshard import reshard

TINY = TINY_MODELS["8/2 mixtral"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf(TINY, tmp_path_factory.mktemp("hf"))


def args_of(folder: Path) -> ModelArgs:
    return load_model_args(find_model(str(folder)))


def edited(folder: Path, target: Path, **values: Any) -> Path:
    shutil.copytree(folder, target)
    config = {**json.loads((folder / "config.json").read_text()), **values}
    (target / "config.json").write_text(json.dumps(config))
    return target


def test_number_of_experts_is_read_from_config_or_defaulted(folder, tmp_path):
    args = args_of(folder)
    assert (args.family, args.n_experts, args.n_active_experts) == ("mixtral", 5, 2)
    assert args.normed_experts and args.ffn_dim == TINY.ffn_dim
    usual = args_of(
        edited(folder, tmp_path / "usual", num_local_experts=None, num_experts_per_tok=None)
    )
    assert (usual.n_experts, usual.n_active_experts) == (8, 2)


def test_training_only_keys_are_ignored_without_warning(folder, tmp_path, caplog):
    keys = {"router_jitter_noise": 0.1, "output_router_logits": True, "router_aux_loss_coef": 0.02}
    assert args_of(edited(folder, tmp_path / "trained", **keys)) == args_of(folder)
    assert not caplog.records


def test_dense_model_with_expert_keys_is_refused(folder, tmp_path):
    dense = edited(folder, tmp_path / "x", architectures=["LlamaForCausalLM"], model_type="llama")
    with pytest.raises(UsageError, match="num_local_experts=5"):
        args_of(dense)


def test_reshard_to_meta_layout_warns_about_mixture_of_experts(folder, tmp_path, caplog):
    reshard(find_model(str(folder)), tmp_path / "meta", layout="meta", n_parts=2)
    assert "a mixture of experts" in caplog.text
    config = json.loads((tmp_path / "meta" / "config.json").read_text())
    assert "a mixture of experts" in config["parallel_llama"]["beyond_params_json"]


def test_each_of_metas_files_has_channels_of_every_expert(folder, tmp_path):
    reshard(find_model(str(folder)), tmp_path / "meta", layout="meta", n_parts=3)
    for number in range(3):
        file = torch.load(tmp_path / "meta" / f"consolidated.{number:02}.pth", weights_only=True)
        for expert in range(5):
            w2 = file[f"layers.1.feed_forward.experts.{expert}.w2.weight"]
            assert abs(w2.shape[1] - TINY.ffn_dim / 3) < 2


@pytest.mark.parametrize("ranks_per_expert", [1, 2, 8])
def test_the_plan_counts_every_byte_that_a_rank_loads(folder, ranks_per_expert):
    args, files = args_of(folder), find_model(str(folder))
    checkpoint = open_checkpoint(files, args)
    for tp_size in (1, 3, 8):
        plan = make_plan(args, tp_size, ranks_per_expert=ranks_per_expert)
        for shard in plan.shards:
            loaded = load(checkpoint, args, shard, Precision.plain("float32"), torch.device("cpu"))
            values = dict(loaded)
            expected = weight_bytes(shard, values_by_form(args, Precision.plain("float32")))
            assert sum(value.nbytes for value in values.values()) == expected
            numbers = {int(n) for name in values for n in re.findall(r"experts\.(\d+)", name)}
            assert numbers == set(shard.experts)


def test_missing_expert_weight_is_refused_by_name(folder, tmp_path):
    args = args_of(edited(folder, tmp_path / "more", num_local_experts=6))
    checkpoint = open_checkpoint(find_model(str(folder)), args)
    with pytest.raises(CheckpointError, match=r"block_sparse_moe\.experts\.5\.w1\.weight"):
        checkpoint.check(args)
