"""Errors of a user or of a damaged download, from the command line to the exit code.

Exit code 2: the error is found before any weight is read. Exit code 1: only reading the weights
or running the model shows the error. In both cases the message has the value and the remedy, and
stdout stays empty. Command lines that are refused without any model are in test_arguments.
"""

import json
import os
import shutil
import struct
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf_builder
import pytest
import torch
from checkpoint_samples import TINY as META_ARGS
from checkpoint_samples import meta_shards, weights_of, write_meta
from commands import ROOT, run_command
from safetensors.torch import load_file, save_file

from parallel_llama.cli.main import main

TEXT = ("--prompt", "Hi", "--max-tokens", "2")


@pytest.fixture
def folder(model: Path, tmp_path: Path) -> Path:
    """A copy of a good model, to be damaged."""
    return Path(shutil.copytree(model, tmp_path / "chat"))


Refused = Callable[..., str]


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    """Runs a command that must fail in this process, checks its error, and returns stderr."""

    def refused(*argv: str, code: int = 2, says: Sequence[str]) -> str:
        capsys.readouterr()
        assert main(argv) == code
        out, err = capsys.readouterr()
        assert out == ""
        hold(err, says)
        return err

    return refused


def hold(err: str, says: Sequence[str]) -> None:
    assert "Traceback" not in err
    messages = [line for line in err.splitlines() if line.startswith("parallel-llama:")]
    assert len(messages) == 1, err
    for words in says:
        assert words in messages[0]


def test_undamaged_model_runs(model, capsys):
    """Other tests damage copies of this folder, which must run without damage."""
    assert main(["generate", "--model", str(model), *TEXT, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["n_prompt_tokens"] == 3


FLAGS: list[tuple[tuple[str, ...], Sequence[str]]] = [
    (("--nproc", "10"), ["9 query heads cannot be split over 10 ranks"]),
    (("--max-seq-len", "513"), ["513", "512"]),
    (("--max-tokens", "511"), ["3 prompt tokens and 511 new", "512", "ask for at most 509 new"]),
    (("--prompt", ""), ["prompt 1 is empty", "at least one character"]),
    (("--prompt", "x" * 600), ["prompt 1", "601 prompt tokens", "512", "at most 511 tokens"]),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "says"), FLAGS, ids=lambda case: " ".join(case)[:30])
def test_flag_value_that_the_model_does_not_allow_is_refused(model, refused, flags, says):
    refused("generate", "--model", str(model), "--prompt", "Hi", *flags, says=says)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the refusal is of a host without a GPU")
def test_cuda_without_a_gpu_is_a_usage_error(model, refused):
    says = ["--device cuda: torch sees no CUDA device here"]
    refused("generate", "--model", str(model), "--prompt", "Hi", "--device", "cuda", says=says)


def test_a_stride_that_leaves_tokens_without_context_is_refused(model, tmp_path, refused):
    file = tmp_path / "tokens.json"
    file.write_text("[1, 2]")
    given = ("score", "--model", str(model), "--tokens-file", str(file), "--stride")
    refused(*given, "512", says=["--stride 512", "the context of 512", "511"])
    refused(*given, "0", says=["--stride", "1"])


def test_too_long_prompt_is_refused_before_weights_are_opened(folder, refused):
    (folder / "model.safetensors").write_bytes(b"")
    refused("generate", "--model", str(folder), "--prompt", "x" * 600, says=["601 prompt", "512"])


def edit_json(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def edit_weights(folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def cut(file: Path, share: float) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * share)])


NORM = "model.layers.1.post_attention_layernorm.weight"


def remove_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def lose_a_file_of_the_index(folder: Path) -> None:
    names = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    weight_map = dict.fromkeys(names, "model-1.safetensors") | {NORM: "model-2.safetensors"}
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def truncate(folder: Path) -> None:
    cut(folder / "model.safetensors", 0.7)


def cut_inside_the_header(folder: Path) -> None:
    cut(folder / "model.safetensors", 0.001)


def lose_a_tensor(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.__delitem__(NORM))


def add_a_tensor(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.update({"model.extra.weight": torch.ones(3)}))


def misshape_a_tensor(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.update({NORM: torch.ones(71).double()}))


def store_whole_numbers(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.update({NORM: torch.ones(72).int()}))


def damage_the_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": ')


def ask_for_unknown_rope(folder: Path) -> None:
    edit_json(folder / "config.json", rope_parameters={"rope_type": "yarm", "rope_theta": 1e4})


def name_another_architecture(folder: Path) -> None:
    edit_json(folder / "config.json", architectures=["GPT2LMHeadModel"], model_type="gpt2")


def add_an_unknown_key(folder: Path) -> None:
    edit_json(folder / "config.json", sliding_windows=4096)


def lose_the_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def damage_the_tokenizer(folder: Path) -> None:
    cut(folder / "tokenizer.json", 0.5)


def forget_what_a_tokenizer_is(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"model": 3}')


def damage_the_generation_config(folder: Path) -> None:
    edit_json(folder / "generation_config.json", do_sample=True, temperature="hot")


def save_a_pickle(folder: Path) -> None:
    remove_weights(folder)
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02.")


DAMAGES: list[tuple[Callable[[Path], None], Sequence[str]]] = [
    (remove_weights, ["model.safetensors", "fetch"]),
    (save_a_pickle, ["pytorch_model.bin", "running its code", "safetensors"]),
    (lose_a_file_of_the_index, ["1 of the 2 files", "model-2.safetensors", "fetch"]),
    (truncate, ["model.safetensors", "fetch it again"]),
    (cut_inside_the_header, ["model.safetensors", "truncated", "fetch it again"]),
    (lose_a_tensor, [f"missing: {NORM}", "fetch the files again"]),
    (add_a_tensor, ["extra: 'model.extra.weight'"]),
    (misshape_a_tensor, [f"misshapen: {NORM} is [71], expected [72]"]),
    (store_whole_numbers, [NORM, "I32", "BF16"]),
    (damage_the_config, ["config.json", "not JSON"]),
    (ask_for_unknown_rope, ["rope_type='yarm'", "did you mean 'yarn'"]),
    (name_another_architecture, ["gpt2", "learned position embeddings"]),
    (add_an_unknown_key, ["sliding_windows"]),
    (lose_the_tokenizer, ["no tokenizer", "tokenizer.json"]),
    (damage_the_tokenizer, ["tokenizer.json"]),
    (forget_what_a_tokenizer_is, ["tokenizer.json"]),
    (damage_the_generation_config, ["generation_config.json", "temperature"]),
]


@pytest.mark.parametrize(
    ("damage", "says"), DAMAGES, ids=lambda case: getattr(case, "__name__", "")
)
def test_a_damaged_folder_is_refused_before_a_weight_is_read(folder, refused, damage, says):
    damage(folder)
    refused("generate", "--model", str(folder), *TEXT, says=says)


TEMPLATES: list[tuple[str, Sequence[str]]] = [
    ("{% for m in messages %}", ["chat template", "does not parse"]),
    ("{{ raise_exception('only one turn') }}", ["only one turn"]),
    ("{% for i in range(10**9) %}x{% endfor %}", ["chat template"]),
]


@pytest.mark.parametrize(("template", "says"), TEMPLATES)
def test_a_damaged_chat_template_is_refused(folder, refused, template, says):
    edit_json(folder / "tokenizer_config.json", chat_template=template)
    refused("generate", "--model", str(folder), "--chat", *TEXT, says=says)


@pytest.mark.parametrize("verb", ["chat", "generate"])
def test_a_model_without_a_template_cannot_chat(folder, refused, verb):
    edit_json(folder / "tokenizer_config.json", chat_template=None)
    flags = () if verb == "chat" else ("--chat", *TEXT)
    refused(verb, "--model", str(folder), *flags, says=["no chat template", "chat model"])


def test_tokenizer_with_an_id_beyond_the_embeddings_is_refused(folder, refused):
    """The command ends with a message instead of an index error in a rank."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["H"] = 5000
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    refused("generate", "--model", str(folder), *TEXT, says=["5000", "210"])


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("nowhere/at-all", ["'nowhere/at-all'", "not a path that exists"]),
        ("smollm", ["'smollm'", "did you mean 'smollm2'"]),
        ("llama-3.2-1b", ["without weights", "--random-weights"]),
        (str(ROOT / "README.md"), ["README.md", "not a model", "a .gguf file"]),
        (str(ROOT / "tests"), ["config.json", "params.json"]),
    ],
)
def test_model_argument_that_is_not_a_model_is_refused(refused, model, says):
    refused("generate", "--model", model, *TEXT, says=says)


def test_text_prompt_for_shape_without_tokenizer_is_refused(refused):
    model = ("--model", "llama-3.2-1b", "--random-weights", "1")
    refused("generate", *model, *TEXT, says=["without a tokenizer", "token ids"])


@pytest.mark.parametrize("share", [0.3, 0.9])
def test_a_truncated_gguf_file_is_refused(tmp_path, refused, share):
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_builder.GGUF().to_bytes())
    cut(path, share)
    refused("generate", "--model", str(path), *TEXT, says=["model.gguf"])


def test_a_gguf_file_without_most_of_its_tensors_is_refused(tmp_path, refused):
    path, prompts = tmp_path / "model.gguf", tmp_path / "prompts.jsonl"
    path.write_bytes(gguf_builder.GGUF().to_bytes())
    prompts.write_text('{"tokens": [2, 3]}')
    argv = ("--model", str(path), "--prompts", str(prompts), "--max-tokens", "2")
    refused("generate", *argv, says=["missing: ", "fetch the files again"])


@pytest.fixture
def meta(tmp_path: Path) -> Path:
    """A Meta folder without a tokenizer, in two files."""
    args = replace(META_ARGS, attention_bias=False, mlp_bias=False, n_heads=8, n_kv_heads=4, dim=32)
    write_meta(tmp_path, meta_shards(args, weights_of(args), 2))
    params = {"dim": 32, "n_layers": 2, "n_heads": 8, "n_kv_heads": 4, "vocab_size": 101}
    params |= {"multiple_of": 2, "ffn_dim_multiplier": 49.5 / 85, "norm_eps": 1e-5}
    (tmp_path / "params.json").write_text(json.dumps(params))
    (tmp_path / "prompts.jsonl").write_text('{"tokens": [2, 3]}')
    return tmp_path


def meta_argv(meta: Path) -> tuple[str, ...]:
    prompts = str(meta / "prompts.jsonl")
    return ("generate", "--model", str(meta), "--prompts", prompts, "--max-tokens", "2")


def test_the_meta_folder_runs(meta):
    assert main(meta_argv(meta)) == 0


def test_a_truncated_pth_file_is_refused(meta, refused):
    cut(meta / "consolidated.01.pth", 0.8)
    says = ["consolidated.01.pth", "truncated or damaged", "fetch it again"]
    refused(*meta_argv(meta), says=says)


def test_a_missing_pth_file_is_refused(meta, refused):
    (meta / "consolidated.00.pth").unlink()
    refused(*meta_argv(meta), says=["lacks consolidated.00.pth", "fetch"])


def put_in_row_0(folder: Path, value: float) -> None:
    """Sets a value in the first row of the embeddings, which only rank 0 of two ranks reads."""

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.embed_tokens.weight"][0, 1] = value

    edit_weights(folder, edit)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_or_inf_weight_is_found_while_reading(folder, refused, value):
    put_in_row_0(folder, value)
    says = ["tok_embeddings.weight: 1 of", "NaN or Inf", "fetch them again"]
    refused("generate", "--model", str(folder), *TEXT, code=1, says=says)


def test_weight_beyond_dtype_range_is_found_while_reading(folder, refused):
    put_in_row_0(folder, 1e6)
    argv = ("generate", "--model", str(folder), *TEXT, "--dtype", "float16")
    refused(*argv, code=1, says=["1e+06", "into float16; use a dtype of a larger range"])


@pytest.mark.parametrize("nproc", ["1", "2"])
@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.v_proj.weight",
        "model.layers.0.self_attn.o_proj.weight",
        "model.layers.0.mlp.down_proj.weight",
        "model.layers.1.input_layernorm.weight",
    ],
)
def test_weight_that_overflows_the_computation_exits_with_1(folder, refused, name, nproc):
    """Regression: squares overflowed float32, the norm gave zeros, and token 0 was generated."""

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name].view(-1)[1] = 3e38

    edit_weights(folder, edit)
    argv = ("generate", "--model", str(folder), *TEXT, "--dtype", "float32", "--nproc", nproc)
    refused(*argv, code=1, says=["the largest of its logits is", "the weights are damaged or"])


def test_file_truncated_while_it_is_read_exits_with_1(folder, refused, monkeypatch):
    from parallel_llama.checkpoint.hf_folder import HFFolder

    check = HFFolder.check

    def check_and_cut(self: HFFolder, args: Any) -> None:
        check(self, args)
        cut(folder / "model.safetensors", 0.5)

    monkeypatch.setattr(HFFolder, "check", check_and_cut)
    says = ["model.safetensors: ends at byte", "changed while it was read"]
    refused("generate", "--model", str(folder), *TEXT, code=1, says=says)


@pytest.mark.parametrize(
    ("rank", "size", "says"),
    [
        ("0", "3", ["--nproc 2", "3 ranks", "omit --nproc"]),
        ("3", "3", ["RANK='3'", "WORLD_SIZE='3'", "0 <= RANK < WORLD_SIZE"]),
        ("zero", "2", ["RANK='zero'"]),
        ("0", None, ["WORLD_SIZE=None"]),
    ],
)
def test_invalid_or_conflicting_rank_env_is_refused(model, refused, monkeypatch, rank, size, says):
    monkeypatch.setenv("RANK", rank)
    if size is not None:
        monkeypatch.setenv("WORLD_SIZE", size)
    refused("generate", "--model", str(model), *TEXT, "--nproc", "2", says=says)


def on_two_ranks(folder: Path) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    argv = ("generate", "--model", str(folder), *TEXT, "--json", "--nproc", "2")
    return run_command(*argv, env=clean)


@pytest.mark.parametrize(
    ("damage", "code", "says"),
    [
        (lose_a_tensor, 2, [f"missing: {NORM}"]),
        (truncate, 2, ["model.safetensors", "fetch it again"]),
        (misshape_a_tensor, 2, ["is [71], expected [72]"]),
        (lambda folder: put_in_row_0(folder, float("nan")), 1, ["[rank 0]", "NaN or Inf"]),
        (damage_the_tokenizer, 2, ["tokenizer.json"]),
        (ask_for_unknown_rope, 2, ["rope_type='yarm'"]),
    ],
    ids=["missing", "truncated", "misshapen", "nan", "tokenizer", "rope"],
)
def test_two_ranks_report_damage_once_with_the_expected_exit_code(folder, damage, code, says):
    """Regression: structural damage that a rank found ended with exit code 1 instead of 2."""
    damage(folder)
    done = on_two_ranks(folder)
    assert (done.returncode, done.stdout) == (code, "")
    hold(done.stderr, says)


def test_safetensors_header_beyond_the_maximum_size_is_refused(folder, refused):
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 62) + b"{}")
    refused("generate", "--model", str(folder), *TEXT, says=[str(1 << 62), "at most"])
