"""Adapters that cannot be served beside their base model are refused by name, before any read."""

import re
from pathlib import Path

import pytest
import torch
from adapters import edit, write_adapter
from commands import run_python
from safetensors.torch import load_file
from tiny_models import TINY_MODELS, TinyModel, write_hf

from parallel_llama.config.adapter import MAX_SERVED_RANK, load_served_adapter
from parallel_llama.config.layouts import load_model_args
from parallel_llama.errors import UsageError
from parallel_llama.files.model_files import find_model

MERGE = "merge the adapter with reshard --merge-adapter"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf(TINY_MODELS["9/3"], tmp_path_factory.mktemp("base") / "hf")


def refused(base: Path, adapter: Path, expected: str) -> None:
    args = load_model_args(find_model(str(base)))
    with pytest.raises(UsageError, match=expected) as caught:
        load_served_adapter(adapter, args)
    assert MERGE in str(caught.value)


def test_adapter_with_whole_weights_is_refused(base, tmp_path):
    whole = {
        "lm_head.weight": torch.zeros_like(load_file(base / "model.safetensors")["lm_head.weight"])
    }
    adapter = write_adapter(
        tmp_path / "a", base, r".*\.q_proj", whole=whole, target_modules=["q_proj"],
        modules_to_save=["lm_head"],
    )  # fmt: skip
    refused(base, adapter, r"has whole weights: lm_head\.weight")


def test_adapter_of_lm_head_is_refused(base, tmp_path):
    adapter = write_adapter(
        tmp_path / "a", base, r".*\.q_proj|lm_head", target_modules=["q_proj", "lm_head"]
    )
    refused(base, adapter, r"A and B for lm_head\.weight; an adapter that is served may change")


def test_adapter_rank_above_the_limit_is_refused(base, tmp_path):
    rank = MAX_SERVED_RANK + 1
    adapter = write_adapter(
        tmp_path / "a", base, r".*\.q_proj", lambda _: rank, r=rank, target_modules=["q_proj"]
    )
    refused(base, adapter, r"layers\.0\.self_attn\.q_proj\.weight has the rank 513, over the limit")
    edit(adapter, r=3)  # the weights' own rank must equal r of the settings
    args = load_model_args(find_model(str(base)))
    with pytest.raises(ValueError, match=re.escape("is [513, 72], expected [3, 72]")):
        load_served_adapter(adapter, args)


@pytest.mark.parametrize("module", ["experts.2.w1", "gate"])
def test_adapter_of_experts_or_router_is_refused(module, tmp_path):
    base = write_hf(
        TinyModel(
            8, 2, 8, 64, ffn_dim=24, family="mixtral",
            own={"num_local_experts": 5, "num_experts_per_tok": 2},
        ),
        tmp_path / "hf",
    )  # fmt: skip
    name = next(n for n in load_file(base / "model.safetensors") if f".{module}." in n)
    module = name.removesuffix(".weight")
    adapter = write_adapter(tmp_path / "a", base, re.escape(module), target_modules=[module])
    refused(base, adapter, rf"A and B for {re.escape(name)}; an adapter that is served")


WRONG_FLAGS = {
    "not NAME=FOLDER, such as": ["serve", "--adapter=x"],
    "adapter 'x': nowhere: not a folder": ["serve", "--adapter=x=nowhere"],
    "the name is given twice": ["serve", "--adapter=x={a}", "--adapter=x={a}"],
    "the model has this name": ["serve", "--adapter=hf={a}"],
    "generate uses one": ["generate", "--prompt=a", "--adapter=x={a}", "--adapter=y={a}"],
}


@pytest.mark.slow
def test_wrong_flags_end_with_code_2_before_torch_is_loaded(base, tmp_path):
    adapter = write_adapter(tmp_path / "a", base, r".*\.q_proj", target_modules=["q_proj"])
    commands = [
        [flag.format(a=adapter) for flag in (*flags, f"--model={base}")]
        for flags in WRONG_FLAGS.values()
    ]
    code = (
        "import sys; from parallel_llama.cli.main import main\n"
        f"print([main(command) for command in {commands!r}], 'torch' in sys.modules)\n"
    )
    result = run_python("-c", code)
    assert result.stdout == "[2, 2, 2, 2, 2] False\n", result.stderr
    assert [text for text in WRONG_FLAGS if text not in result.stderr] == []
