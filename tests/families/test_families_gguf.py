"""GGUF files of every family that llama.cpp writes, against the HF folder that each came from."""

from dataclasses import fields as dataclass_fields
from typing import Any

import gguf
import pytest
import torch
from converted_gguf import convert, rounded
from gguf_models import MODELS
from parity_steps import logits_of_models
from safetensors.torch import load_file
from thread_ranks import run_on_threads
from tiny_models import TinyModel, write_hf
from transformers_oracle import reference_logits

from parallel_llama.checkpoint.reading import open_checkpoint
from parallel_llama.checkpoint.verify import verify
from parallel_llama.config.layouts import load_model_args
from parallel_llama.errors import CheckpointError, UsageError
from parallel_llama.families import Family, parameters
from parallel_llama.families.family import gguf_full_layers
from parallel_llama.families.gemma import GEMMA2, GEMMA3
from parallel_llama.families.qwen import QWEN3_MOE
from parallel_llama.files import gguf_header
from parallel_llama.files.fields import Fields
from parallel_llama.files.model_files import find_model
from parallel_llama.reshard.reshard import reshard

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", MODELS)
def test_gguf_logits_match_source_folder_at_every_tp_size(name, tmp_path):
    tiny = MODELS[name]
    folder = rounded(write_hf(tiny, tmp_path / "hf", seed=2))
    path, tokens = convert(folder, tmp_path / "tiny.gguf"), tiny.tokens
    expected = reference_logits(folder, tokens)
    for tp_size in range(1, min(8, tiny.n_heads) + 1):
        for (logits,) in run_on_threads(tp_size, logits_of_models, [(path, tokens)]):
            torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", MODELS)
def test_gguf_header_gives_same_model_args_as_config_json(name, tmp_path):
    folder = write_hf(MODELS[name], tmp_path / "hf")
    path = convert(folder, tmp_path / "tiny.gguf")
    told, stated = (load_model_args(find_model(str(at))) for at in (path, folder))
    for field in dataclass_fields(stated):
        if field.name == "dtype" or (name in ("mistral", "granite 4") and field.name == "family"):
            continue  # the file has float32, and llama.cpp stores a Mistral as a Llama
        expected = getattr(stated, field.name)
        if isinstance(expected, float):
            expected = pytest.approx(expected, rel=1e-6)
        assert getattr(told, field.name) == expected, field.name


# The factors of phi3 are in one of the parts; the output of gemma2 is its embedding.
@pytest.mark.parametrize("name", ["phi3", "mixtral", "gemma2"])
def test_split_file_equals_the_whole_file(name, tmp_path):
    folder = rounded(write_hf(MODELS[name], tmp_path / "hf", seed=2))
    whole = convert(folder, tmp_path / "tiny.gguf")
    parts = find_model(str(convert(folder, tmp_path / "split.gguf", part_tensors=4)))
    assert len(parts.weights) > 4
    assert load_model_args(parts) == load_model_args(find_model(str(whole)))
    report = verify(str(parts.weights[2]), against=str(whole))
    assert report.ok, report.problems
    assert report.files == len(parts.weights)
    reshard(parts, tmp_path / "joined.gguf", layout="gguf", n_parts=1) if name != "phi3" else None
    tokens = MODELS[name].tokens
    for source in (parts.weights[1], *tmp_path.glob("joined.gguf")):
        for (logits,) in run_on_threads(3, logits_of_models, [(source, tokens)]):
            torch.testing.assert_close(logits, reference_logits(folder, tokens), rtol=0, atol=1e-10)


def test_parts_that_do_not_belong_together_are_refused(tmp_path, monkeypatch):
    folder = rounded(write_hf(MODELS["llama"], tmp_path / "hf", seed=2))
    first = convert(folder, tmp_path / "m.gguf", part_tensors=12)
    _, second, *_ = parts = find_model(str(first)).weights
    bytes_of_second = second.read_bytes()
    second.write_bytes(parts[0].read_bytes())
    with pytest.raises(CheckpointError, match=r"is part 1 of 2, but by its name part 2 of 2"):
        load_model_args(find_model(str(first)))
    second.write_bytes(bytes_of_second)
    monkeypatch.setattr(gguf_header, "MAX_TENSORS", 20)
    with pytest.raises(CheckpointError, match=r"00002-of-00002.gguf: tensor 21; at most 20 are"):
        load_model_args(find_model(str(first)))
    alone = first.rename(tmp_path / "alone.gguf")
    with pytest.raises(UsageError, match=r"alone.gguf: one of 2 parts; give all parts the names"):
        load_model_args(find_model(str(alone)))


@pytest.mark.parametrize("name", ["mixtral", "qwen2", "gemma", "falcon 40B"])
def test_reshard_from_gguf_restores_weights_of_source_folder(name, tmp_path):
    folder = rounded(write_hf(MODELS[name], tmp_path / "hf", seed=2))
    path = convert(folder, tmp_path / "tiny.gguf")
    reshard(find_model(str(path)), tmp_path / "meta", layout="meta", n_parts=3)
    reshard(find_model(str(tmp_path / "meta")), tmp_path / "back", layout="hf", n_parts=1)
    stored = load_file(folder / "model.safetensors")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == stored.keys()
    assert all(torch.equal(back[key].double(), weight) for key, weight in stored.items())


@pytest.mark.parametrize("name", ["mistral", "mixtral", "qwen3moe", "gemma2", "falcon 7B"])
def test_verify_finds_gguf_file_equal_to_its_source_folder(name, tmp_path):
    folder = rounded(write_hf(MODELS[name], tmp_path / "hf", seed=2))
    path = convert(folder, tmp_path / "tiny.gguf")
    reshard(
        find_model(str(folder)),
        narrow := tmp_path / "narrow",
        layout="hf",
        n_parts=1,
        dtype="float32",
    )
    report = verify(str(path), against=str(narrow))
    assert report.ok, report.problems


def test_all_rows_and_columns_of_quantised_experts_are_read(tmp_path):
    tiny = TinyModel(
        4, 2, 8, 64, ffn_dim=96, family="mixtral", own={"num_local_experts": 3}, n_layers=1
    )
    path = convert(write_hf(tiny, tmp_path / "hf"), tmp_path / "tiny.gguf", quantised="_exps")
    held = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    files = find_model(str(path))
    args = load_model_args(files)
    checkpoint = open_checkpoint(files, args)
    checkpoint.check(args)
    stems = {"w1": "ffn_gate_exps", "w2": "ffn_down_exps", "w3": "ffn_up_exps"}
    for param in parameters(args):
        if ".experts." not in param.name:
            continue
        *_, number, leaf, _ = param.name.split(".")
        tensor = held[f"blk.0.{stems[leaf]}.weight"]
        whole = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(3, *param.shape)
        for rows in (range(96), range(5, 40), range(31, 33), range(95, 96)):
            expected = torch.from_numpy(whole[int(number)]).narrow(param.dim, rows.start, len(rows))
            assert torch.equal(checkpoint.read(param, rows), expected), (param.name, rows)


def test_offset_of_1_is_subtracted_from_quantised_norms(tmp_path):
    """No converter quantises norms, but ignoring the offset would silently be wrong."""
    tiny = TinyModel(4, 2, 8, 64, tied=True, n_layers=1, family="gemma")
    path = convert(write_hf(tiny, tmp_path / "hf"), tmp_path / "m.gguf", quantised="attn_norm")
    held = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    norm = held["blk.0.attn_norm.weight"]
    files = find_model(str(path))
    args = load_model_args(files)
    param = next(p for p in parameters(args) if p.name == "layers.0.attention_norm.weight")
    values = torch.from_numpy(gguf.quants.dequantize(norm.data, norm.tensor_type))
    assert torch.equal(open_checkpoint(files, args).read(param, range(64)), values - 1)


def test_qwen3moe_reads_a_width_of_shared_experts_only_if_it_is_0():
    """llama.cpp's converter writes the width for Qwen3-Coder, because config.json has it."""
    keys = {"expert_feed_forward_length": 32, "expert_shared_feed_forward_length": 0}

    def features(**own: int) -> dict[str, Any]:
        fields = Fields({f"qwen3moe.{key}": value for key, value in {**keys, **own}.items()})
        return dict(QWEN3_MOE.gguf.features(fields, ()))

    assert features() == {"qk_norm": True, "ffn_dim": 32}
    assert "expert_shared_feed_forward_length" in QWEN3_MOE.gguf.reads
    with pytest.raises(UsageError, match="shared_feed_forward_length=64 is not supported"):
        features(expert_shared_feed_forward_length=64)


def test_gemma_windows_and_scales_match_llama_cpp_constants():
    """The header lacks the layers with a window, their RoPE base and the scale of the 27B."""

    def features(family: Family, n_layers: int, **own: Any) -> dict[str, Any]:
        arch = family.gguf.architecture
        sizes = {"embedding_length": 5376, "attention.head_count": 32, "context_length": 8192}
        keys = {**sizes, "attention.key_length": 128, "block_count": n_layers, **own}
        fields = Fields({f"{arch}.{key}": value for key, value in keys.items()})
        return dict(family.gguf.features(fields, ()))

    two = features(GEMMA2, 42)
    assert (two["sliding_window"], two["full_layers"]) == (4096, tuple(range(1, 42, 2)))
    assert (two["attention_soft_cap"], two["logit_soft_cap"]) == (50, 30)
    assert two["attention_scale"] == 128**-0.5
    assert features(GEMMA2, 46)["attention_scale"] == 168**-0.5
    window = {"attention.sliding_window": 1024}
    three = features(GEMMA3, 62, **window)
    assert (three["sliding_window"], three["local_rope_theta"]) == (1024, 10000)
    assert three["full_layers"] == tuple(range(5, 62, 6))
    assert three["attention_scale"] == 168**-0.5
    assert features(GEMMA3, 48, **window)["attention_scale"] == 128**-0.5
    assert "sliding_window" not in features(GEMMA3, 48)
    base = features(GEMMA3, 48, **window, **{"rope.freq_base_swa": 500.0})
    assert base["local_rope_theta"] == 500


def test_layers_with_a_window_are_every_nth_or_listed():
    """Source: load_swa_pattern and set_swa_pattern of llama.cpp."""

    def full(**own: object) -> tuple[int, ...]:
        fields = Fields({f"olmo2.attention.{key}": value for key, value in own.items()})
        return gguf_full_layers(fields, "olmo2", 8)

    assert full() == (3, 7)
    assert full(sliding_window_pattern=3) == (2, 5)
    assert full(sliding_window_pattern=[False] + [True] * 7) == (0,)
    for wrong in ([True] * 7, 0, "LLLG", True):
        with pytest.raises(UsageError, match=r"sliding_window_pattern=.*: use a number above 0"):
            full(sliding_window_pattern=wrong)


def test_expert_tensor_of_wrong_shape_is_refused(tmp_path):
    tiny = MODELS["mixtral"]
    folder = write_hf(tiny, tmp_path / "hf")
    path = convert(folder, tmp_path / "tiny.gguf")
    args = load_model_args(find_model(str(path)))
    flat = tmp_path / "flat.gguf"
    data = path.read_bytes()
    name = b"blk.1.ffn_up_exps.weight"
    at = data.index(name) + len(name)
    n_experts = args.n_experts.to_bytes(8, "little")
    at = data.index(n_experts, at)
    flat.write_bytes(data[:at] + (1).to_bytes(8, "little") + data[at + 8 :])
    files = find_model(str(flat))
    with pytest.raises(CheckpointError, match=r"ffn_up_exps\.weight is \[1, 89, 56\], expected"):
        open_checkpoint(files, args).check(args)


def test_longrope_factors_without_the_long_set_are_refused(tmp_path):
    """Otherwise the model would run without RoPE scaling."""
    path = convert(write_hf(MODELS["phi3"], tmp_path / "hf"), tmp_path / "tiny.gguf")
    path.write_bytes(path.read_bytes().replace(b"rope_factors_long", b"rope_factors_lost"))
    with pytest.raises(UsageError, match="only both rope_factors_short"):
        load_model_args(find_model(str(path)))


def test_experts_in_dense_family_are_refused(tmp_path):
    path = convert(
        write_hf(MODELS["qwen2"], tmp_path / "hf"), tmp_path / "tiny.gguf", expert_count=4
    )
    with pytest.raises(UsageError, match="'qwen2' with experts is not supported; supported: 'a"):
        load_model_args(find_model(str(path)))
