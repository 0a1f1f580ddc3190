"""Mistral's own folders, consolidated.safetensors and params.json, against the HF folder."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from parity_steps import logits_of_models
from safetensors.torch import load_file, save_file
from thread_ranks import run_on_threads
from tiny_models import TINY_MODELS, TinyModel, interleaved, write_hf
from tokenizer_data import MISTRAL_V1
from torch import Tensor
from transformers_oracle import reference_logits

from parallel_llama.checkpoint.verify import verify
from parallel_llama.config.layouts import load_model_args
from parallel_llama.errors import CheckpointError, UsageError
from parallel_llama.files.model_files import find_model
from parallel_llama.reshard.reshard import reshard
from parallel_llama.tokenizer import load_tokenizer
from parallel_llama.tokenizer.chat_formats import MistralChat
from parallel_llama.tokenizer.loading import load_chat_template

DENSE, EXPERTS = TINY_MODELS["8/2 mistral"], TINY_MODELS["8/2 mixtral"]
FILE, INDEX = "consolidated.safetensors", "consolidated.safetensors.index.json"
TOKENS = list(range(5, 150, 6))

# Parts of tensor names: HF's and Mistral's.
RENAMED = {
    "model.embed_tokens": "tok_embeddings",
    "model.layers": "layers",
    "model.norm": "norm",
    "lm_head": "output",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "block_sparse_moe": "feed_forward",
}


def params_of(tiny: TinyModel, **own: Any) -> dict[str, Any]:
    params = {
        "dim": tiny.dim,
        "n_layers": tiny.n_layers,
        "head_dim": tiny.head_dim,
        "hidden_dim": tiny.ffn_dim,
        "n_heads": tiny.n_heads,
        "n_kv_heads": tiny.n_kv_heads,
        "norm_eps": 1e-05,
        "vocab_size": tiny.vocab_size,
        "rope_theta": 10000.0,
        "max_seq_len": tiny.max_seq_len,
    }
    if tiny.family == "mixtral":
        params["moe"] = {
            "num_experts": tiny.own["num_local_experts"],
            "num_experts_per_tok": tiny.own["num_experts_per_tok"],
        }
    return {**params, **own}


def weights_of(tiny: TinyModel, hf_folder: Path) -> dict[str, Tensor]:
    weights = {}
    for name, weight in load_file(hf_folder / "model.safetensors").items():
        is_rotary = ".q_proj." in name or ".k_proj." in name
        for word, other in RENAMED.items():
            name = name.replace(word, other)
        weights[name] = interleaved(weight, tiny.head_dim) if is_rotary else weight
    return weights


def write(tiny: TinyModel, hf_folder: Path, folder: Path, n_files: int = 1) -> Path:
    folder.mkdir()
    (folder / "params.json").write_text(json.dumps(params_of(tiny)))
    weights = weights_of(tiny, hf_folder)
    if n_files == 1:
        save_file(weights, folder / FILE)
        return folder
    names = [f"consolidated-{n + 1:05}-of-{n_files:05}.safetensors" for n in range(n_files)]
    for number, name in enumerate(names):
        save_file({key: weights[key] for key in list(weights)[number::n_files]}, folder / name)
    listing = {key: names[number % n_files] for number, key in enumerate(weights)}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": listing}))
    return folder


@pytest.mark.parametrize("tiny", [DENSE, EXPERTS], ids=["mistral", "mixtral"])
@pytest.mark.parametrize("n_files", [1, 3])
def test_logits_of_a_mistral_folder_match_those_of_its_hf_folder(tiny, n_files, tmp_path):
    hf = write_hf(tiny, tmp_path / "hf", seed=5)
    folder = write(tiny, hf, tmp_path / "mistral", n_files)
    expected = reference_logits(hf, TOKENS)
    for tp_size in (1, 2, 3, 5, 8):
        for (logits,) in run_on_threads(tp_size, logits_of_models, [(folder, TOKENS)]):
            torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("tiny", [DENSE, EXPERTS], ids=["mistral", "mixtral"])
def test_mistral_folder_reshards_to_the_exact_hf_tensors(tiny, tmp_path):
    hf = write_hf(tiny, tmp_path / "hf", seed=5)
    folder = write(tiny, hf, tmp_path / "mistral")
    files = find_model(str(folder))
    for layout in ("native", "meta"):
        reshard(files, tmp_path / layout, layout=layout, n_parts=2)
    reshard(find_model(str(tmp_path / "native")), tmp_path / "back", layout="hf", n_parts=1)
    stored, back = (load_file(at / "model.safetensors") for at in (hf, tmp_path / "back"))
    assert back.keys() == stored.keys()
    assert all(torch.equal(back[name], weight) for name, weight in stored.items())
    assert verify(str(folder), against=str(hf)).ok
    assert verify(str(tmp_path / "meta"), against=str(folder)).ok


def test_hf_files_take_precedence_over_mistral_files(tmp_path, caplog):
    hf = write_hf(DENSE, tmp_path / "hf")
    folder = write(DENSE, hf, tmp_path / "mistral")
    for name in ("config.json", "model.safetensors"):
        shutil.copy(hf / name, folder)
    assert find_model(str(folder)).kind == "hf"
    assert "holds an HF and a Meta checkpoint" in caplog.text
    (folder / "model.safetensors").unlink()
    assert find_model(str(folder)).weights == (folder / FILE,)


def test_files_of_the_index_must_exist_inside_the_folder(tmp_path):
    folder = write(DENSE, write_hf(DENSE, tmp_path / "hf"), tmp_path / "mistral", 2)
    (folder / "consolidated-00002-of-00002.safetensors").unlink()
    with pytest.raises(UsageError, match=r"1 of the 2 files that .*index\.json names are missing"):
        find_model(str(folder))
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": "../x.safetensors"}}))
    with pytest.raises(UsageError, match="outside the folder"):
        find_model(str(folder))


def args_of(tmp_path: Path, **own: Any) -> Any:
    path = tmp_path / "shape.json"
    path.write_text(json.dumps(params_of(DENSE, **own)))
    return load_model_args(find_model(str(path)))


def test_params_json_defaults_are_those_of_the_published_models(tmp_path):
    open_values: dict[str, Any] = {"rope_theta": None, "max_seq_len": None, "head_dim": None}
    args = args_of(tmp_path, **open_values, n_heads=6)
    assert (args.rope_theta, args.max_seq_len, args.head_dim) == (1e6, 32768, 8)
    assert args_of(tmp_path, rope_theta=None, sliding_window=4096).rope_theta == 1e4
    assert args_of(tmp_path, sliding_window=512).sliding_window is None  # as long as the context
    assert args_of(tmp_path, tied_embeddings=True).tied_embeddings
    assert (args.family, args_of(tmp_path, moe=params_of(EXPERTS)["moe"]).family) == (
        "mistral",
        "mixtral",
    )


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({"use_biases": True}, "use_biases=true is not supported"),
        ({"model_type": "mamba"}, "model_type='mamba' is not supported"),
        ({"quantization": {"qformat_weight": "fp8_e4m3"}}, "use the unquantised model"),
        ({"vision_encoder": {"hidden_size": 8}}, "only text is supported"),
        ({"moe": {"num_experts": 8}}, "lacks the key 'num_experts_per_tok'"),
        ({"moe": {"num_experts": 8, "num_expert_per_tok": 2}}, "did you mean 'num_experts_per_t"),
        ({"sliding_window": [4096, None]}, "sliding_window=<list of 2> is not a whole number"),
        ({"hiden_dim": 5}, "unknown key 'hiden_dim'; did you mean 'hidden_dim'"),
        ({"yarn": {"factor": 4}}, "unknown key 'yarn'"),
    ],
)
def test_unsupported_or_invalid_params_json_is_refused(own, expected, tmp_path):
    with pytest.raises(UsageError, match=re.escape(expected)):
        args_of(tmp_path, **own)


def test_missing_extra_and_misshapen_tensors_are_listed(tmp_path):
    folder = write(DENSE, write_hf(DENSE, tmp_path / "hf"), tmp_path / "mistral")
    weights = load_file(folder / FILE)
    weights["layers.0.attention.wk.weight"] = weights["layers.0.attention.wk.weight"][:-1].clone()
    weights["layers.0.attention.wz.weight"] = weights.pop("layers.1.ffn_norm.weight")
    save_file(weights, folder / FILE)
    expected = r"missing: layers\.1\.ffn_norm.*extra: .*wz.*misshapen: .*wk\.weight is \[15, 48\]"
    with pytest.raises(CheckpointError, match=expected):
        run_on_threads(1, logits_of_models, [(folder, TOKENS)])


@pytest.mark.parametrize("tiny", [DENSE, EXPERTS], ids=["mistral", "mixtral"])
def test_chat_format_is_mistrals_after_resharding(tiny, tmp_path):
    """Regression: Meta's keys in params.json meant Llama 2's format, also for Mistral's models.

    HF folders had no chat format, because params.json was not copied.
    """
    folder = write(tiny, write_hf(tiny, tmp_path / "hf", seed=5), tmp_path / "mistral")
    shutil.copy(MISTRAL_V1, folder / "tokenizer.model")
    for number, layout in enumerate(("hf", "native", "meta", "hf", "hf", "native")):
        target = tmp_path / f"{number} {layout}"
        reshard(find_model(str(folder)), target, layout=layout, n_parts=1)
        assert find_model(str(target)).kind == layout
        assert verify(str(target)).ok
        assert isinstance(load_chat_template(target, load_tokenizer(target)), MistralChat)
        folder = target
