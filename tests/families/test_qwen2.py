"""Qwen2 from GGUF files, and what its configuration may not say; for HF see test_parity."""

import json
from pathlib import Path

import pytest
import torch
from converted_gguf import convert
from parity_steps import logits_of_models
from safetensors.torch import load_file
from thread_ranks import run_on_threads
from tiny_models import TINY_MODELS, write_hf
from transformers_oracle import loaded_logits

from parallel_llama.config.layouts import load_model_args
from parallel_llama.errors import UsageError
from parallel_llama.files.model_files import find_model
from parallel_llama.reshard.reshard import reshard

TINY = TINY_MODELS["8/2 qwen2"]
TOKENS = [(7 * at + 3) % TINY.vocab_size for at in range(24)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_hf(TINY, tmp_path / "source")


def test_a_gguf_file_computes_what_transformers_does_at_every_tp_size(
    folder: Path, tmp_path: Path
) -> None:
    path = convert(folder, tmp_path / "tiny.gguf")
    expected = loaded_logits(tmp_path, TOKENS, gguf_file=path.name)
    for tp_size in range(1, 9):
        for (logits,) in run_on_threads(tp_size, logits_of_models, [(path, TOKENS)]):
            torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)


def test_a_gguf_file_is_resharded_into_the_folder_that_it_came_from(
    folder: Path, tmp_path: Path
) -> None:
    path = convert(folder, tmp_path / "tiny.gguf")
    for layout in ("hf", "meta", "native"):
        reshard(find_model(str(path)), tmp_path / layout, layout=layout, n_parts=3)
    meta = find_model(str(tmp_path / "meta"))
    reshard(meta, tmp_path / "back", layout="hf", n_parts=1)
    args = load_model_args(find_model(str(tmp_path / "native")))
    assert (args.family, args.attention_bias, args.has_wo_bias) == ("qwen2", True, False)
    stored = {name: w.float() for name, w in load_file(folder / "model.safetensors").items()}
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == stored.keys()
    assert all(torch.equal(back[name], weight) for name, weight in stored.items())
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("qwen2", ["Qwen2ForCausalLM"])
    assert "attention_bias" not in config


def edit(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_a_window_counts_only_where_it_is_switched_on(folder: Path) -> None:
    edit(folder, sliding_window=16, layer_types=None)
    assert load_model_args(find_model(str(folder))).sliding_window is None
    edit(folder, use_sliding_window=True, max_window_layers=1)
    args = load_model_args(find_model(str(folder)))
    assert (args.sliding_window, args.full_layers) == (16, (0,))


def test_a_class_and_a_type_of_two_families_are_refused(folder: Path) -> None:
    edit(folder, model_type="llama")
    with pytest.raises(UsageError, match=r"Qwen2ForCausalLM.*model_type='llama'"):
        load_model_args(find_model(str(folder)))
