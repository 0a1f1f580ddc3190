"""All engines load equal weights: a GGUF file and conversions of it."""

import importlib.util
import json
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_folder import TINY, write_tokenizer
from tiny_models import TINY_MODELS, write_hf

from launch.bench.compare import main
from launch.bench.weights import Weights, write_gguf
from parallel_llama.checkpoint.meta_folder import meta_vocab_size
from parallel_llama.checkpoint.reading import open_checkpoint
from parallel_llama.config.layouts import load_model_args
from parallel_llama.errors import UsageError
from parallel_llama.families import parameters
from parallel_llama.files.model_files import find_model


def weights_of(name: str, folder: Path) -> Weights:
    write_hf(TINY_MODELS[name], folder / "hf")
    files = find_model(str(folder / "hf"))
    (folder / "made").mkdir()
    return Weights(files, load_model_args(files, meta_vocab_size), folder / "made")


@pytest.mark.parametrize(
    "name", ["9/3", "10/2 all biases, tied", "8/2 qwen2", "8/4 qwen3, bias, tied"]
)
def test_gguf_file_has_the_same_weights_as_the_folder(name, tmp_path):
    made = weights_of(name, tmp_path)
    write_gguf(made.files, made.args, tmp_path / "model.gguf")
    files = find_model(str(tmp_path / "model.gguf"))
    args = load_model_args(files, meta_vocab_size)
    sizes = "dim", "n_heads", "n_kv_heads", "head_dim", "ffn_dim", "vocab_size", "max_seq_len"
    for key in (*sizes, "norm_eps", "rope_theta"):
        assert getattr(args, key) == pytest.approx(getattr(made.args, key), rel=1e-7), key
    with (
        closing(open_checkpoint(files, args)) as read,
        closing(open_checkpoint(made.files, made.args)) as source,
    ):
        read.check(args)
        for param in parameters(made.args):
            rows = range(param.shape[param.dim])
            expected = source.read(param, rows).float()
            torch.testing.assert_close(read.read(param, rows), expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["8/1 gemma", "8/2 qwen2, window", "9/3 llama3, wide heads"])
def test_write_gguf_refuses_models_with_special_features(name, tmp_path):
    made = weights_of(name, tmp_path)
    with pytest.raises(UsageError, match="plain models"):
        write_gguf(made.files, made.args, tmp_path / "model.gguf")
    assert not (tmp_path / "model.gguf").exists()


PEERS = {
    "llama_cpp": "llama.cpp,llama.cpp@Q8_0,ours:2@Q8_0",
    "ctranslate2": "ctranslate2,ctranslate2@int8",
}


@pytest.mark.parametrize("package", PEERS)
def test_peers_match_tokens_in_float32_and_perplexity_in_8_bits(package, tmp_path, capfd):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    folder = tmp_path / "tiny"
    # The inputs of every weight are a multiple of 32, which some of these formats require.
    write_hf(replace(TINY, head_dim=32, dim=288, ffn_dim=96), folder)
    write_tokenizer(folder)
    arguments = [f"--model={folder}", f"--engines=ours:1,{PEERS[package]}", "--streams=3"]
    arguments += ["--prompt-tokens=19", "--new-tokens=5", "--repeat=1", "--json"]
    code = main([*arguments, f"--peers-python={sys.executable}"])
    captured = capfd.readouterr()
    assert code == 0, captured.err
    ours, exact, *eights = json.loads(captured.out)["engines"].values()
    assert exact["agreement"]["wrong"] == 0
    assert exact["perplexity"] == pytest.approx(ours["perplexity"], rel=1e-3)
    for eight in eights:
        assert eight["perplexity"] == pytest.approx(ours["perplexity"], rel=0.05)
        assert eight["weight_bytes_per_step"] < exact["weight_bytes_per_step"] * 0.6
