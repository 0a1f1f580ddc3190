"""`reshard --merge-adapter` writes W + scaling * B @ A, for every layout of base and target."""

import json
import re
import shutil
from contextlib import closing
from pathlib import Path

import peft
import pytest
import torch
from adapters import (
    PATTERNED,
    PREFIX,
    edit,
    edit_tensors,
    merged_weights,
    write_adapter,
    write_merged,
)
from checkpoint_samples import hf_name
from converted_gguf import rounded
from float64_mode import float64_throughout
from reshard_samples import hashes_of, moved, read, tensors_of
from safetensors.torch import load_file
from tiny_models import TINY_MODELS, TinyModel, write_hf
from torch import Tensor
from transformers_oracle import load_transformers, loaded_logits, reference_logits

from parallel_llama.checkpoint import canonical, reading
from parallel_llama.checkpoint.manifest import read_manifest
from parallel_llama.checkpoint.merged import MergedCheckpoint
from parallel_llama.checkpoint.reading import open_checkpoint
from parallel_llama.cli.main import main
from parallel_llama.config.adapter import load_adapter
from parallel_llama.config.layouts import load_model_args
from parallel_llama.errors import DamagedWeights, UsageError
from parallel_llama.families import parameters
from parallel_llama.files.gguf_header import read_gguf_header
from parallel_llama.files.model_files import find_model

TOKENS = list(range(3, 90, 3))
LINEAR = r"model\.layers\..*_proj"
EVERY = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An HF folder in float64 with values of float32, which a GGUF file holds too."""
    return rounded(write_hf(TINY_MODELS["9/3"], tmp_path_factory.mktemp("base") / "hf"))


@pytest.fixture(scope="module")
def adapter(base: Path) -> Path:
    return write_adapter(base.parent / "adapter", base, LINEAR, target_modules=EVERY)


@pytest.fixture(scope="module")
def merged(base: Path, adapter: Path) -> Path:
    return moved(base, base.parent / "merged", "hf", 5, merge_adapter=adapter)


def same_logits(folder: Path, expected: Tensor) -> None:
    config = folder / "config.json"
    # Families have padding ids of their own, beyond this small vocabulary.
    config.write_text(json.dumps({**json.loads(config.read_text()), "pad_token_id": 0}))
    torch.testing.assert_close(loaded_logits(folder, TOKENS), expected, rtol=0, atol=1e-10)


def same_tensors(folder: Path, expected: dict[str, Tensor]) -> None:
    torch.testing.assert_close(tensors_of(folder), expected, rtol=0, atol=1e-13)


def test_merged_logits_equal_transformers_on_the_summed_weights(base, adapter, merged, tmp_path):
    folder = write_merged(tmp_path / "sum", base, merged_weights(base, adapter))
    same_logits(merged, reference_logits(folder, TOKENS))


@pytest.mark.parametrize("layout", ["native", "meta"])
def test_every_base_and_target_layout_merges_to_the_same_bits(
    base, adapter, merged, layout, tmp_path
):
    source = moved(base, tmp_path / "source", layout, 3)
    target = moved(source, tmp_path / "target", "hf", 5, merge_adapter=adapter)
    hashes = [read_manifest(folder).tensors for folder in (merged, target)]
    target = moved(base, tmp_path / "other", layout, 7, merge_adapter=adapter)
    assert hashes[0] == hashes[1] == read_manifest(target).tensors


def test_gguf_file_can_be_base_and_target_of_a_merge(base, adapter, merged, tmp_path):
    source = moved(base, tmp_path / "source.gguf", "gguf", dtype="float32")
    wanted = read(merged)
    target = moved(source, tmp_path / "target.gguf", "gguf", merge_adapter=adapter)
    assert {tensor.dtype for tensor in read_gguf_header(target).tensors.values()} == {"F32"}
    for name, tensor in read(target).items():
        torch.testing.assert_close(tensor, wanted[name].float(), rtol=3e-7, atol=0)


FUSED = {
    "phi3": TinyModel(9, 3, 6, 54, family="phi3", own={"pad_token_id": 0}),
    "falcon": TINY_MODELS["8/2 falcon, two norms, biases"],
    "glm": TINY_MODELS["8/2 glm"],
    "gemma": TINY_MODELS["8/1 gemma"],
}


@pytest.mark.parametrize("name", FUSED)
def test_one_lora_pair_merges_into_a_whole_fused_projection(name, tmp_path, monkeypatch):
    """Pieces of few rows begin inside a fused tensor, and inside a group of its heads."""
    monkeypatch.setattr(canonical, "ROW_PIECE_VALUES", 300)
    monkeypatch.setattr(reading, "PIECE_ALIGNMENT", 1)
    source = write_hf(FUSED[name], tmp_path / "hf")
    linear = r".*\.(\w+_proj|query_key_value|dense\w*)"
    adapter = write_adapter(tmp_path / "adapter", source, linear, target_modules="all-linear")
    wanted = merged_weights(source, adapter)
    target = moved(source, tmp_path / "target", "hf", merge_adapter=adapter)
    same_tensors(target, wanted)
    if name == "phi3":
        folder = write_merged(tmp_path / "sum", source, wanted)
        same_logits(target, reference_logits(folder, TOKENS))


SETTINGS = {
    "a list of ends": ({"target_modules": ["q_proj", "mlp.up_proj"]}, r".*(q|up)_proj", {}),
    "a pattern": (
        {"target_modules": r".*\.1\.mlp\.(up|down)_proj"},
        r".*\.1\.mlp.*(p|wn)_proj",
        {},
    ),
    "rsLoRA": ({"target_modules": ["v_proj"], "use_rslora": True}, ".*v_proj", {".*": 8 / 3**0.5}),
    "patterns": (
        {
            "target_modules": ["o_proj", "k_proj"],
            "rank_pattern": {r"layers\.1\.self_attn\.o_proj": 5, "k_proj": 2},
            "alpha_pattern": {"^model.layers.0.self_attn.o_proj": 11, r".*\.k_proj": 0.5},
        },
        ".*[ok]_proj",
        {r".*0.*o_proj": 11 / 3, r".*1.*o_proj": 8 / 5, ".*k_proj": 0.5 / 2},
    ),
    "layers": ({"target_modules": EVERY, "layers_to_transform": [1]}, r".*\.1\..*_proj", {}),
    "one layer": (
        {"target_modules": ["q_proj"], "layers_to_transform": 0, "layers_pattern": "layers"},
        r".*\.0\..*q_proj",
        {},
    ),
    "exclusion": (
        {"target_modules": "all-linear", "exclude_modules": ["0.mlp.up_proj", "v_proj"]},
        r".*(?<!0\.mlp)\.(?!v_)\w+_proj|.*0.mlp.(gate|down)_proj",
        {},
    ),
}


def merged_by_name(base: Path, adapter: Path) -> dict[str, Tensor]:
    """All weights of a Llama model in the HF folder `base`, merged, by HF's names."""
    files = find_model(str(base))
    args = load_model_args(files)
    loaded = load_adapter(adapter, args)
    params = [*parameters(loaded.args)]
    dtypes = {param.name: torch.float64 for param in params}
    with closing(MergedCheckpoint(open_checkpoint(files, args), loaded, dtypes)) as checkpoint:
        checkpoint.check(loaded.args)
        return {
            hf_name(param.name): checkpoint.read(param, range(param.shape[param.dim]))
            for param in params
        }


@pytest.mark.parametrize("name", SETTINGS)
def test_adapter_setting_selects_the_modules_or_the_scaling(base, name, tmp_path):
    settings, modules, scalings = SETTINGS[name]
    ranks = settings.get("rank_pattern", {})

    def of(module: str, values: dict[str, float], usual: float) -> float:
        return next((v for p, v in values.items() if re.search(f"{p}$", module)), usual)

    adapter = write_adapter(
        tmp_path / "adapter", base, modules, lambda module: of(module, ranks, 3), **settings
    )
    wanted = merged_weights(base, adapter, lambda module: of(module, scalings, 8 / 3))
    plain = load_file(base / "model.safetensors")
    assert any(not wanted[key].equal(plain[key]) for key in plain)
    torch.testing.assert_close(merged_by_name(base, adapter), wanted, rtol=0, atol=1e-14)


def test_adapter_names_without_the_model_prefix_are_accepted(base, adapter, tmp_path):
    """PEFT on AutoModel, which has no head, does not write `model.`."""

    def shorten(tensors: dict[str, Tensor]) -> None:
        for name in [*tensors]:
            tensors[name.replace("model.model.", "model.")] = tensors.pop(name)

    short = edit_tensors(shutil.copytree(adapter, tmp_path / "short"), shorten)
    edit(short, alpha_pattern={r"^layers\.0\.mlp\.up_proj": 3})
    wanted = merged_weights(base, adapter, lambda module: 1 if ".0.mlp.up" in module else 8 / 3)
    torch.testing.assert_close(merged_by_name(base, short), wanted, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    "prefix", ["language_model.model.", "model.language_model.", "language_model."]
)
def test_adapter_of_a_model_of_text_and_images_is_accepted(prefix, tmp_path):
    """Regression: only multimodal models of Llama 4 are published, and their adapters failed."""
    base = write_hf(STACKED["Llama 4"], tmp_path / "hf")
    adapter = write_adapter(
        tmp_path / "adapter", base, r".*\.[qv]_proj",
        target_modules=r".*language_model.*\.(q_proj|v_proj)",
        alpha_pattern={rf"^{re.escape(prefix)}layers\.0\.self_attn\.q_proj": 6},
    )  # fmt: skip

    def rename(tensors: dict[str, Tensor]) -> None:
        for name in [*tensors]:
            text = name.removeprefix(f"{PREFIX}model.")
            tensors[f"{PREFIX}{prefix}{text}"] = tensors.pop(name)
        vision = f"{PREFIX}{prefix.partition('language_model')[0]}vision_model.layers.0.q_proj"
        tensors[f"{vision}.lora_A.weight"] = torch.ones(3, 8)

    first = 0, "q_proj"  # alpha 6, and rank 3
    loaded = load_adapter(edit_tensors(adapter, rename), load_model_args(find_model(str(base))))
    assert {name: pair.scaling for name, pair in loaded.pairs.items()} == {
        f"model.layers.{layer}.self_attn.{module}.weight": 2 if (layer, module) == first else 8 / 3
        for layer in range(STACKED["Llama 4"].n_layers)
        for module in ("q_proj", "v_proj")
    }


def random_embeddings(base: Path) -> Tensor:
    like = load_file(base / "model.safetensors")["model.embed_tokens.weight"]
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(9)).double()


EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf(TINY_MODELS["9/3 tied"], tmp_path_factory.mktemp("tied") / "hf")


@pytest.mark.parametrize("saved", ["lm_head", "embed_tokens", "lm_head embed_tokens"])
def test_tied_embeddings_become_two_weights_if_one_module_was_trained(tied, saved, tmp_path):
    """PEFT replaces one of two modules that share a weight; the other keeps the old weight."""
    values, plain = random_embeddings(tied), load_file(tied / "model.safetensors")[EMBED]
    values = {HEAD: values, EMBED: 2 * values}
    whole = {name: each for name, each in values.items() if name.split(".")[-2] in saved}
    adapter = write_adapter(
        tmp_path / "adapter", tied, ".*q_proj", whole=whole,
        target_modules=["q_proj"], modules_to_save=saved.split(),
    )  # fmt: skip
    wanted = {HEAD: plain, **merged_weights(tied, adapter)}
    if len(whole) == 1:
        torch.testing.assert_close(merged_by_name(tied, adapter), wanted, rtol=0, atol=1e-14)
        return
    target = moved(tied, tmp_path / "target", "hf", merge_adapter=adapter)
    same_tensors(target, wanted)
    assert not json.loads((target / "config.json").read_text())["tie_word_embeddings"]


def test_lora_of_a_tied_output_does_not_change_the_embeddings(tied, tmp_path):
    """PEFT saves the output's own weight beside its A and B."""
    plain = load_file(tied / "model.safetensors")[EMBED]
    a, b = torch.randn(3, plain.shape[1]).double(), torch.randn(len(plain), 3).double()
    whole = {
        "lm_head.base_layer.weight": plain,
        "lm_head.lora_A.weight": a,
        "lm_head.lora_B.weight": b,
    }
    adapter = write_adapter(tmp_path / "a", tied, "", whole=whole, target_modules=["lm_head"])
    written = merged_by_name(tied, adapter)
    torch.testing.assert_close(written[HEAD], plain + 8 / 3 * b @ a, rtol=0, atol=1e-13)
    assert written[EMBED].equal(plain)


def test_embeddings_stay_tied_with_ensure_weight_tying(tied, tmp_path):
    """PEFT then saves the same values under both names."""
    values = random_embeddings(tied)
    adapter = write_adapter(
        tmp_path / "adapter", tied, ".*q_proj", whole={EMBED: values, HEAD: values.clone()},
        target_modules=["q_proj"], modules_to_save=["embed_tokens"], ensure_weight_tying=True,
    )  # fmt: skip
    written = merged_by_name(tied, adapter)
    assert written[EMBED].equal(values) and HEAD not in written


def test_norms_and_biases_can_be_trained_whole(tmp_path):
    base = write_hf(TINY_MODELS["8/2 qwen2"], tmp_path / "hf")
    plain = load_file(base / "model.safetensors")
    names = [n for n in plain if n.startswith("model.layers.1.self_attn.q_proj")]
    whole = {name: plain[name] + 0.1 for name in (*names, "model.norm.weight")}
    adapter = write_adapter(
        tmp_path / "adapter", base, ".*v_proj", whole=whole,
        target_modules=["v_proj"], modules_to_save=["1.self_attn.q_proj", "model.norm"],
    )  # fmt: skip
    torch.testing.assert_close(
        merged_by_name(base, adapter), merged_weights(base, adapter), rtol=0, atol=1e-14
    )


STACKED = {
    "gpt-oss": TinyModel(
        4, 2, 8, 32, ffn_dim=24, family="gpt_oss",
        own={"num_local_experts": 3, "num_experts_per_tok": 2, "pad_token_id": 0},
    ),
    "Llama 4": TinyModel(
        4, 2, 8, 32, ffn_dim=24, family="llama4_text",
        own={
            "num_local_experts": 3, "num_experts_per_tok": 1, "intermediate_size_mlp": 24,
            "interleave_moe_layer_step": 1, "attention_chunk_size": 16, "pad_token_id": 0,
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("model", STACKED)
def test_experts_can_be_trained_whole(model, tmp_path):
    """Their matrices are stacked and transposed in the file."""
    base = write_hf(STACKED[model], tmp_path / "hf")
    plain = load_file(base / "model.safetensors")
    whole = {name: each + 0.1 for name, each in plain.items() if ".experts." in name}
    assert any(each.dim() == 3 for each in whole.values())
    adapter = write_adapter(
        tmp_path / "adapter", base, ".*q_proj", whole=whole,
        target_modules=["q_proj"], modules_to_save=["experts"],
    )  # fmt: skip
    merged = tensors_of(moved(base, tmp_path / "merged", "hf", merge_adapter=adapter))
    for name, expected in whole.items():
        assert merged[name].equal(expected), name


def test_the_sum_is_rounded_once_to_the_dtype_of_the_base(base, tmp_path):
    """A product in bfloat16 would lose small deltas, and a second rounding would change ties."""
    half = moved(base, tmp_path / "half", "hf", dtype="bfloat16")
    adapter = write_adapter(
        tmp_path / "adapter", half, LINEAR, dtype=torch.bfloat16, target_modules=EVERY
    )
    wanted = {name: each.bfloat16() for name, each in merged_weights(half, adapter).items()}
    written = tensors_of(moved(half, tmp_path / "hf", "hf", merge_adapter=adapter))
    differing = sum(int((written[name] != each).sum()) for name, each in wanted.items())
    assert {each.dtype for each in written.values()} == {torch.bfloat16}
    assert differing < 1e-4 * sum(each.numel() for each in wanted.values())


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An adapter, and a base model with matrices that divide into blocks of 32 values."""
    home = tmp_path_factory.mktemp("blocks")
    base = write_hf(TinyModel(2, 1, 32, 64, ffn_dim=96, n_layers=1), home / "hf")
    return base, write_adapter(home / "adapter", base, LINEAR, target_modules=EVERY)


def test_a_merged_model_is_quantised_after_the_sum(blocks, tmp_path):
    base, adapter = blocks
    plain = moved(base, tmp_path / "plain", "hf", dtype="float32", merge_adapter=adapter)
    options = {"quant": "int8", "dtype": "float32"}
    one = moved(base, tmp_path / "one", "native", **options, merge_adapter=adapter)
    other = moved(plain, tmp_path / "other", "native", **options)
    assert read_manifest(one).tensors == read_manifest(other).tensors


def test_quantised_base_needs_dtype_and_refuses_quant_stored(blocks, tmp_path):
    base, adapter = blocks
    packed = moved(base, tmp_path / "int8", "native", quant="int8", dtype="float32")
    for layout in ("native", "hf"):
        with pytest.raises(UsageError, match=r"dtype of the decoded values with --dtype$"):
            moved(packed, tmp_path / "x", layout, merge_adapter=adapter)
    with pytest.raises(UsageError, match="--quant stored and --merge-adapter"):
        moved(packed, tmp_path / "x", "native", quant="stored", merge_adapter=adapter)
    plain = moved(packed, tmp_path / "plain", "hf", dtype="float64")
    target = moved(packed, tmp_path / "y", "hf", dtype="float64", merge_adapter=adapter)
    same_tensors(target, merged_weights(plain, adapter))


def test_an_interrupted_run_continues_only_with_the_same_adapter(base, adapter, tmp_path):
    def stop(_: int) -> None:
        raise KeyboardInterrupt

    target = tmp_path / "hf"
    with pytest.raises(KeyboardInterrupt):
        moved(base, target, "hf", merge_adapter=adapter, on_bytes=stop)
    with pytest.raises(UsageError, match="the unfinished run had source adapter_"):
        moved(base, target, "hf", resume=True)
    moved(base, target, "hf", merge_adapter=adapter, resume=True)
    whole = moved(base, tmp_path / "whole", "hf", merge_adapter=adapter)
    assert hashes_of(target) == hashes_of(whole)


REFUSED = [
    ({"use_dora": True}, "use_dora=True is not supported.*merge the adapter with peft"),
    ({"bias": "all"}, "bias='all' is not supported, only 'none'"),
    ({"lora_bias": True}, "lora_bias=True is not supported"),
    ({"fan_in_fan_out": True}, "fan_in_fan_out=True is not supported"),
    ({"peft_type": "IA3"}, "peft_type='IA3' is not supported, only 'LORA'"),
    ({"peft_type": None}, "lacks the key 'peft_type'"),
    ({"target_parameters": ["mlp.experts.down_proj"]}, "target_parameters=<list of 1> is not"),
    ({"trainable_token_indices": [1]}, "trainable_token_indices"),
    ({"layer_replication": [[0, 2]]}, "layer_replication"),
    ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights='pissa_niter_4' .*base weights"),
    ({"a_later_setting": 3}, "a_later_setting=3 is not supported"),
    ({"target_modules": [*EVERY, "embed_tokens"]}, "'model.embed_tokens': LoRA of embeddings"),
    ({"target_modules": ["c_attn"]}, "names no linear module of the base model"),
    ({"target_modules": None}, "target_modules names no module"),
    ({"target_modules": "(.*a)+"}, "no repeated groups"),
    ({"target_modules": "(proj"}, "the pattern '\\(proj' is not valid"),
    ({"rank_pattern": {"q_proj": 0}}, "rank_pattern q_proj=0: a rank is at least 1"),
    ({"rank_pattern": {f"q.*{n}": 1 for n in range(17)}}, "more than 16 patterns"),
    ({"alpha_pattern": {"q_proj": "a"}}, "alpha_pattern q_proj='a' is not a number"),
    ({"r": 2.5}, "r=2.5 is not a whole number"),
    ({"lora_alpha": 1e999}, "lora_alpha=inf is not a finite number"),
    ({"r": 4}, r"down_proj.lora_A.weight is \[3, 89\], expected \[4, 89\]"),
    ({"target_modules": EVERY[1:]}, r"not named by target_modules .*0\.self_attn\.q_proj\.lora_A"),
    ({"modules_to_save": ["lm_head"]}, "missing: base_model.model.lm_head.weight"),
    ({"layers_to_transform": [0]}, r"not named by target_modules .*layers\.1\."),
]


def refusal(base: Path, adapter: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The error of a command that must write nothing."""
    before = sorted(folder.rglob("*"))
    argv = ["reshard", base, folder / "out", "--tp=2", "--format=hf", "--merge-adapter", adapter]
    assert main([*map(str, argv)]) == 2
    assert sorted(folder.rglob("*")) == before
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return error


@pytest.mark.parametrize(("settings", "expected"), REFUSED)
def test_a_setting_that_is_not_supported_is_named(
    base, adapter, settings, expected, tmp_path, capsys
):
    changed = edit(shutil.copytree(adapter, tmp_path / "adapter"), **settings)
    error = refusal(base, changed, tmp_path, capsys)
    assert re.search(expected, error), error
    assert "adapter" in error


A = f"{PREFIX}model.layers.1.mlp.up_proj.lora_A.weight"
DAMAGED = {
    "missing": (lambda tensors: tensors.pop(A), f"missing: {A}"),
    "extra": (
        lambda tensors: tensors.update({f"{PREFIX}score.weight": torch.ones(2, 2)}),
        f"'{PREFIX}score.weight'",
    ),
    "shape": (
        lambda tensors: tensors.update({A: torch.ones(3, 71)}),
        r"up_proj.lora_A.weight is \[3, 71\], expected \[3, 72\]",
    ),
    "dtype": (
        lambda tensors: tensors.update({A: torch.ones(3, 72, dtype=torch.int16)}),
        f"{A}' has the dtype I16",
    ),
    "prefix": (lambda tensors: tensors.update({"a.b": tensors.pop(A)}), "'a.b' does not begin"),
    "twice": (
        lambda tensors: tensors.update({A.replace("model.model", "model"): tensors[A].clone()}),
        "two tensors for 'model.layers.1.mlp.up_proj.lora_A.weight'",
    ),
    "DoRA": (
        lambda tensors: tensors.update({A.replace("A.weight", "magnitude_vector"): torch.ones(2)}),
        "lora_magnitude_vector' belongs to use_dora",
    ),
    "embeddings": (
        lambda tensors: tensors.update(
            {f"{PREFIX}model.embed_tokens.lora_embedding_A": torch.ones(3, 211)}
        ),
        "lora_embedding_A' belongs to LoRA of embeddings",
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_invalid_adapter_tensor_is_named(base, adapter, name, tmp_path, capsys):
    change, expected = DAMAGED[name]
    damaged = edit_tensors(shutil.copytree(adapter, tmp_path / "adapter"), change)
    error = refusal(base, damaged, tmp_path, capsys)
    assert re.search(expected, error), error


def test_a_damaged_file_is_named(base, adapter, tmp_path, capsys):
    folder = shutil.copytree(adapter, tmp_path / "adapter")
    weights, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    data = weights.read_bytes()
    for content in (b"", data[:40], data[:-1], data + b"x", b"\xff" * 100):
        weights.write_bytes(content)
        assert str(weights) in refusal(base, folder, tmp_path, capsys)
    weights.write_bytes(data)
    for text in ("", "[]", "{", '{"r": 1, "r": 2}', '{"peft_type": 3}', '{"a": ' + "[" * 10**5):
        config.write_text(text)
        assert str(config) in refusal(base, folder, tmp_path, capsys)
    config.unlink()
    assert "has no adapter_config.json" in refusal(base, folder, tmp_path, capsys)
    config.write_text("{}")
    weights.rename(folder / "adapter_model.bin")
    assert "adapter_model.bin, which is not read" in refusal(base, folder, tmp_path, capsys)
    assert "not a folder" in refusal(base, folder / "no", tmp_path, capsys)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (float("nan"), rf"{re.escape(A)}: 1 of 216 values are NaN or Inf"),
        (1.7e308, r"layers\.1\.feed_forward\.w3\.weight: \d\d of 6408 values are NaN or Inf"),
    ],
)
def test_a_value_or_a_sum_that_is_not_finite_is_named(base, adapter, value, expected, tmp_path):
    def damage(tensors: dict[str, Tensor]) -> None:
        tensors[A][1, 2] = value

    damaged = edit_tensors(shutil.copytree(adapter, tmp_path / "adapter"), damage)
    edit(damaged, lora_alpha=24)
    with pytest.raises(DamagedWeights, match=expected):
        moved(base, tmp_path / "out", "hf", merge_adapter=damaged)
    assert not (tmp_path / "out").exists()


PEFT_SETTINGS = [
    {"target_modules": "all-linear", "modules_to_save": ["lm_head", "embed_tokens"]},
    PATTERNED,
]


@pytest.mark.parametrize("settings", PEFT_SETTINGS)
@pytest.mark.parametrize("name", ["9/3 tied", "8/2 gemma3", "phi3"])
def test_peft_merges_to_the_same_logits(name, settings, tmp_path):
    """Compares with PEFT, which defines the format."""
    base = write_hf({**TINY_MODELS, **FUSED}[name], tmp_path / "hf")
    config = peft.LoraConfig(r=3, lora_alpha=7, init_lora_weights=False, **settings)
    with float64_throughout(), torch.no_grad():
        model = peft.get_peft_model(load_transformers(base), config).double()
        for weight in filter(lambda each: each.requires_grad, model.parameters()):
            weight.copy_(torch.randn(weight.shape) * 0.3)
        model.save_pretrained(tmp_path / "adapter")
        merged = model.merge_and_unload().eval()
        expected = merged(torch.tensor([TOKENS])).logits[0]
    same_logits(
        moved(base, tmp_path / "target", "hf", 2, merge_adapter=tmp_path / "adapter"), expected
    )
