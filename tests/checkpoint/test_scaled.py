"""HF folders of compressed-tensors and fp8: the same numbers on any number of ranks."""

import json
import re
import shutil
from contextlib import closing
from pathlib import Path

import pytest
import torch
from packed_folders import meant_by
from packed_samples import sample
from reshard_samples import moved
from safetensors.torch import load_file
from scaled_folders import KINDS, quantization_config, write_scaled
from test_gptq_and_awq import TINY as WITH_HEADS_OF_32
from test_gptq_and_awq import loaded, logits_of, precision_of, rewritten
from thread_ranks import run_on_threads
from tiny_models import TinyModel, write_hf
from transformers_oracle import reference_logits

from parallel_llama import LLM
from parallel_llama.checkpoint.byte_ranges import MatrixBlock
from parallel_llama.checkpoint.reading import open_checkpoint
from parallel_llama.checkpoint.scaled import ScaledMatrix
from parallel_llama.checkpoint.verify import verify
from parallel_llama.cli.main import main
from parallel_llama.config.layouts import (
    default_quant,
    load_model_args,
    stored_formats,
    why_decoded,
    why_own_kv_scales,
)
from parallel_llama.config.quantised import HF_QUANTS, packing_of, stored_form
from parallel_llama.config.scaled import Scheme
from parallel_llama.dtypes import QuantFormat
from parallel_llama.engine.llm_config import LLMConfig
from parallel_llama.engine.setup import ModelSetup
from parallel_llama.errors import CheckpointError, DamagedWeights, UsageError
from parallel_llama.families import parameters
from parallel_llama.families.stored_slices import StoredSlice
from parallel_llama.files.model_files import find_model
from parallel_llama.plan import make_plan

# Heads of 24 and shards of channels end inside blocks of 128 and groups of 32; odd word counts.
TINY = TinyModel(8, 2, 24, 160, ffn_dim=224, vocab_size=101)
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 89, 79, 32, 38]
TP_SIZES = (1, 2, 3, 5, 7)
STORED = {
    "packed 4, group": HF_QUANTS[32],
    "packed 4, group, zeros": HF_QUANTS[32],
    "packed 4, group of 64, zeros": HF_QUANTS[64],
    "packed 4, channel": QuantFormat(4),
    "packed 8, channel": QuantFormat(8),
    "int channel": QuantFormat(8),
    "int tensor": QuantFormat(8),
}
Q_PROJ = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf(TINY, tmp_path_factory.mktemp("source") / "hf")


@pytest.fixture(scope="module")
def made(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of each kind."""
    home = tmp_path_factory.mktemp("made")
    return {kind: write_scaled(source, home / kind, kind) for kind in KINDS}


@pytest.fixture(scope="module")
def grouped(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of each kind of STORED. Heads of 32 fit the groups; smaller heads cause decoding."""
    home = tmp_path_factory.mktemp("grouped")
    source = write_hf(WITH_HEADS_OF_32, home / "hf")
    return {kind: write_scaled(source, home / kind, kind) for kind in STORED}


@pytest.mark.parametrize("kind", KINDS)
def test_every_rank_loads_its_slice_of_decoded_matrices_bit_for_bit(kind, made):
    args = load_model_args(find_model(str(made[kind])))
    (wholes,) = loaded(meant_by(made[kind]), 1)
    for tp_size in TP_SIZES:
        shards = make_plan(args, tp_size).shards
        for shard, ours in zip(shards, loaded(made[kind], tp_size, "none"), strict=True):
            for param, part, whole in zip(parameters(args), ours, wholes, strict=True):
                rows = shard.rows_of(param)
                assert torch.equal(part, whole.narrow(param.dim, rows.start, len(rows)))


@pytest.mark.parametrize("kind", STORED)
def test_every_rank_loads_its_slice_of_matrices_kept_as_stored(kind, grouped):
    args = load_model_args(find_model(str(grouped[kind])))
    precision = precision_of(grouped[kind])
    assert {*precision.stored.values()} == {STORED[kind]}
    (wholes,) = loaded(meant_by(grouped[kind]), 1)
    for tp_size in TP_SIZES:
        shards = make_plan(args, tp_size, quant_group_size=precision.quant_group_size).shards
        for shard, ours in zip(shards, loaded(grouped[kind], tp_size), strict=True):
            for param, part, whole in zip(parameters(args), ours, wholes, strict=True):
                rows = shard.rows_of(param)
                assert torch.equal(part, whole.narrow(param.dim, rows.start, len(rows)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["packed 4, group of 64, zeros", "int channel"])
def test_logits_as_stored_match_transformers_up_to_rounded_inputs(kind, grouped):
    folder = grouped[kind]
    expected = reference_logits(meant_by(folder), TOKENS)
    for tp_size in (1, 3):
        ours = torch.cat(run_on_threads(tp_size, logits_of, folder), 1)
        error = float((ours - expected).norm() / expected.norm())
        assert 1e-4 < error < 0.02  # decoded weights would have 1e-6


def test_scale_that_float16_cannot_hold_is_refused_unless_decoded(grouped, tmp_path):
    folder = shutil.copytree(grouped["packed 4, group"], tmp_path / "model")
    scales = load_file(folder / "model.safetensors")[f"{Q_PROJ}.weight_scale"]
    scales[3, 1] = 1e-9
    rewritten(folder, {f"{Q_PROJ}.weight_scale": scales})
    with pytest.raises(
        CheckpointError, match=r"q_proj\.weight_scale' has the scale 9.* --quant none"
    ):
        loaded(folder, 1)
    loaded(folder, 1, "none")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "tp_size"),
    [
        ("fp8", 7),
        ("float channel", 5),
        ("int channel", 2),
        ("packed 4, group, zeros", 3),
        ("packed 8, channel, zeros", 1),
        ("packed 4, actorder", 1),
        ("packed 4, actorder", 3),
        ("packed 4, actorder", 7),
    ],
)
def test_logits_match_transformers_with_dequantised_weights(kind, tp_size, made):
    """Few tp_sizes per kind, because the matrices themselves are compared at every tp_size."""
    expected = reference_logits(meant_by(made[kind]), TOKENS)
    ours = torch.cat(run_on_threads(tp_size, logits_of, made[kind], "none", "float64"), 1)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", ["packed 4, group, float32", "int channel, float32"])
def test_integers_with_float32_scales_are_decoded_and_reported(kind, made):
    """The formats that stay as stored have float16 scales, which do not hold a float32."""
    files = find_model(str(made[kind]))
    args = load_model_args(files)
    assert stored_formats(files, args) == {} and default_quant(files, args, "bfloat16") == "none"
    line = why_decoded(files, args, "bfloat16") or ""
    assert re.search("in int[48] are decoded to bfloat16; only .* integers with 16-bit sc", line)


def test_stored_integers_with_float32_scales_are_not_used_for_quant_int8(made):
    """Regression: --quant int8 took the stored integers, and then refused their scales."""
    files = find_model(str(made["int channel, float32"]))
    args = load_model_args(files)
    param = next(each for each in parameters(args) if each.name == "layers.0.attention.wo.weight")
    with closing(open_checkpoint(files, args)) as checkpoint:
        assert checkpoint.groups(param, range(param.shape[param.dim]), QuantFormat(8)) is None


@pytest.mark.parametrize("order", ["weight", "static", "group", "Dynamic", True])
def test_matrices_without_g_idx_stay_as_stored_whatever_actorder_is(order, grouped, tmp_path):
    """compressed-tensors writes no weight_g_idx for groups in order, nor for `weight`."""
    folder = shutil.copytree(grouped["packed 4, group, zeros"], tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["actorder"] = order
    (folder / "config.json").write_text(json.dumps(config))
    assert {*precision_of(folder).stored.values()} == {HF_QUANTS[32]}


def test_matrices_with_actorder_are_reported_as_decoded(made):
    files = find_model(str(made["packed 4, actorder"]))
    line = why_decoded(files, load_model_args(files), "bfloat16") or ""
    assert "matrices in int4 with actorder are decoded to bfloat16" in line


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4"])
def test_fp4_logits_match_transformers_with_dequantised_weights(kind, made):
    expected = reference_logits(meant_by(made[kind]), TOKENS)
    for tp_size in (1, 2, 3, 5):
        ours = torch.cat(run_on_threads(tp_size, logits_of, made[kind], "none", "float64"), 1)
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-10)
    files = find_model(str(made[kind]))
    line = why_decoded(files, load_model_args(files), "bfloat16") or ""
    assert f"in {kind} are decoded to bfloat16" in line


SAMPLES = {
    "nvfp4": Scheme(True, 4, (1, 16)),
    "mxfp4": Scheme(True, 4, (1, 32)),
    "packed 4, actorder": Scheme(False, 4, (1, 16), is_packed=True, has_zeros=True, any_order=True),
    "packed 4, negative": Scheme(False, 4, (1, 32), is_packed=True),
    "int 8, negative": Scheme(False, 8, (1, 0)),
}


@pytest.mark.parametrize("kind", SAMPLES)
def test_matrix_slices_equal_values_dequantised_by_compressed_tensors(kind):
    tensors = sample(kind)
    meant = tensors.pop("values")
    n_rows, n_columns = meant.shape
    stored_slice = StoredSlice("weight", (n_rows, n_columns), 0, 1, 1)
    matrix = ScaledMatrix(SAMPLES[kind], stored_slice)

    def read(end: str, n_columns: int, rows: range, columns: range) -> torch.Tensor:
        numbers = tensors[end].view(-1, n_columns)[rows.start : rows.stop]
        return numbers[:, columns.start : columns.stop].contiguous()

    for rows in (range(n_rows), range(1, 3), range(2, 2)):
        for columns in (range(n_columns), range(3, 38), range(4, 5), range(5, 5)):
            part = matrix.values(MatrixBlock(64, rows, columns), read)
            expected = meant[rows.start : rows.stop, columns.start : columns.stop]
            assert torch.equal(part.to(torch.bfloat16), expected)
    form = stored_form(SAMPLES[kind], n_columns)
    assert (form is not None) == kind.endswith("negative")
    if form is not None:
        groups = matrix.quantised(form, MatrixBlock(n_columns, range(n_rows), range(32)), read)
        assert torch.equal(groups.values().to(torch.bfloat16), meant[:, :32])


@pytest.mark.parametrize("kind", ["packed 4, group", "int channel"])
def test_negative_scales_are_loaded_scored_and_resharded_correctly(kind, grouped, tmp_path):
    """The format allows negative scales, and compressed-tensors applies them like all others.

    Regression: `verify` reported zeros as different, because one folder stored negative zeros.
    """
    folder = shutil.copytree(grouped[kind], tmp_path / "model")
    shutil.copytree(meant_by(grouped[kind]), meant_by(folder))
    scales = load_file(folder / "model.safetensors")
    meant = load_file(meant_by(folder) / "model.safetensors")
    changed: dict[str, torch.Tensor] = {}
    for name in scales:
        if name.endswith("weight_scale"):
            signs = (1 - 2 * (torch.arange(scales[name].numel()) % 2)).view(scales[name].shape)
            changed[name] = scales[name] * signs
            weight = name.removesuffix("_scale")
            width = meant[weight].shape[1] // signs.shape[1]
            meant[weight] *= signs.repeat_interleave(width, 1)
    rewritten(folder, changed)
    rewritten(meant_by(folder), meant)
    expected = reference_logits(meant_by(folder), TOKENS)
    ours = torch.cat(run_on_threads(3, logits_of, folder, "none", "float64"), 1)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-10)
    logprobs = expected.log_softmax(-1)[range(len(TOKENS) - 1), TOKENS[1:]]
    with LLM(str(folder), tp_size=1) as llm:
        assert llm.quant == "stored"
        error = torch.tensor(llm.score([TOKENS])[0]) - logprobs
    assert error.norm() < 0.02 * logprobs.norm()
    native = moved(folder, tmp_path / "native", "native", 2, quant="stored")
    assert verify(str(native), str(folder)).ok


def test_config_groups_select_matrices_and_ignored_ones_stay_plain(source, tmp_path):
    """Several config_groups select matrices by name, by pattern and by class."""
    stated = quantization_config("float channel")
    (group,) = stated["config_groups"].values()
    other = {**group, "targets": ["re:.*mlp.*down_proj$"], "weights": {"num_bits": 8}}
    packing = packing_of(
        {
            "quantization_config": {
                **stated,
                "format": "naive-quantized",
                "config_groups": {"a": group, "b": other, "c": {**other, "targets": [Q_PROJ]}},
                "ignore": ["lm_head", "re:.*layers\\.1\\..*"],
            }
        }
    )
    names = [Q_PROJ, "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"]
    assert [packing.of(name).name for name in names] == ["int8", "fp8", "int8"]
    assert packing.of("lm_head") is None and packing.of("model.layers.1.mlp.up_proj") is None
    folder = write_scaled(
        source,
        tmp_path / "model",
        "float channel",
        lambda name: name.endswith("_proj.weight") and "layers.1" not in name,
        ignore=["lm_head", "re:.*layers\\.1\\..*"],
    )
    (ours,), (meant,) = loaded(folder, 1, "none"), loaded(meant_by(folder), 1)
    assert all(torch.equal(a, b) for a, b in zip(ours, meant, strict=True))
    rewritten(folder, {"lm_head.weight_scale": torch.ones(101, 1)})
    with pytest.raises(CheckpointError, match=r"'lm_head\.weight' is quantised, and config.json"):
        loaded(folder, 1, "none")


def test_output_and_kv_cache_scales_are_ignored_and_reported(made, tmp_path):
    folder = shutil.copytree(made["float tensor"], tmp_path / "model")
    one = torch.ones(1)
    rewritten(
        folder,
        {
            "model.layers.0.self_attn.k_scale": one,
            "model.layers.0.self_attn.k_proj.output_scale": one.clone(),
        },
    )
    config = json.loads((folder / "config.json").read_text())
    stated = config["quantization_config"]
    stated["config_groups"]["group_0"]["output_activations"] = {"num_bits": 8, "type": "float"}
    stated["kv_cache_scheme"] = {"num_bits": 8, "type": "float"}
    (folder / "config.json").write_text(json.dumps(config))
    (ours,), (meant,) = loaded(folder, 1, "none"), loaded(meant_by(made["float tensor"]), 1)
    assert all(torch.equal(a, b) for a, b in zip(ours, meant, strict=True))
    files = find_model(str(folder))
    assert re.search(
        "in fp8 are decoded to bfloat16; only .* stay as stored; not applied from config.json: the "
        "rounding of outputs of layers and the KV cache$",
        why_decoded(files, load_model_args(files), "bfloat16") or "",
    )
    assert "the KV cache is not quantised as config.json states" in (why_own_kv_scales(files) or "")
    assert why_own_kv_scales(find_model(str(made["float tensor"]))) is None


def test_kv_scales_of_autofp8_are_ignored_and_reported(made, tmp_path):
    """Regression: the folder was refused because of its tensors kv_scale."""
    folder = shutil.copytree(made["fp8"], tmp_path / "model")
    rewritten(folder, {"model.layers.0.self_attn.kv_scale": torch.ones(1)})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["kv_cache_scheme"] = "static"
    (folder / "config.json").write_text(json.dumps(config))
    (ours,), (meant,) = loaded(folder, 1, "none"), loaded(meant_by(made["fp8"]), 1)
    assert all(torch.equal(a, b) for a, b in zip(ours, meant, strict=True))
    assert "the KV cache is not quantised as config.json states" in (
        why_own_kv_scales(find_model(str(folder))) or ""
    )


def test_ignored_kv_cache_scheme_of_stored_integers_is_logged(grouped, tmp_path, caplog):
    """Regression: without decoded matrices, kv_cache_scheme was ignored without a log line."""
    folder = shutil.copytree(grouped["int channel"], tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["kv_cache_scheme"] = {"num_bits": 8, "type": "float"}
    (folder / "config.json").write_text(json.dumps(config))
    setup = ModelSetup(LLMConfig(str(folder), tp_size=1))
    assert setup.quant == "stored"
    assert "the KV cache is not quantised as config.json states" in caplog.text


KV_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
ATTENTION = {"weights": None, "input_activations": {**KV_SCHEME, "strategy": "attn_head"}}


@pytest.mark.parametrize(
    "stated",
    [
        {"config_groups": {}, "kv_cache_scheme": KV_SCHEME},
        {"config_groups": {"group_0": {**ATTENTION, "targets": ["LlamaAttention"]}}},
        {"config_groups": {"group_0": {**ATTENTION, "targets": ["re:.*self_attn$"]}}},
    ],
    ids=["KV cache", "attention", "attention by pattern"],
)
def test_folder_that_quantises_only_kv_cache_loads_plain_weights(stated, source, tmp_path):
    """Regression: such a folder was refused, also because of its tensors k_scale."""
    folder = shutil.copytree(source, tmp_path / "model")
    scales = {f"model.layers.0.self_attn.{part}_scale": torch.ones(1) for part in "qkv"}
    rewritten(folder, scales)
    path = folder / "config.json"
    config = {"quant_method": "compressed-tensors", "format": "dense", "ignore": [], **stated}
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": config}))
    (ours,), (meant,) = loaded(folder, 1), loaded(source, 1)
    assert all(torch.equal(a, b) for a, b in zip(ours, meant, strict=True))
    line = why_own_kv_scales(find_model(str(folder))) or ""
    assert "the KV cache is not quantised as config.json states" in line


def test_plan_counts_decoded_bytes_and_reshard_writes_decoded_values(made, tmp_path, capsys):
    folder = made["fp8"]
    argv = ["plan", "--model", str(folder), "--nproc", "1", "--device", "cpu", "--json"]
    assert main(argv) == 0
    answer = json.loads(capsys.readouterr().out)
    values = sum(
        tensor.numel() for tensor in load_file(meant_by(folder) / "model.safetensors").values()
    )
    norms = 5 * TINY.dim
    assert answer["ranks"][0]["weight_bytes"] == 2 * (values - norms) + 4 * norms
    argv = ["reshard", str(folder), str(tmp_path / "hf"), "--tp", "2", "--format", "hf"]
    assert main([*argv, "--quant", "none", "--dtype", "float32"]) == 0
    (ours,), (meant,) = loaded(tmp_path / "hf", 1), loaded(meant_by(folder), 1)
    assert all(torch.equal(a, b) for a, b in zip(ours, meant, strict=True))


@pytest.mark.parametrize(
    ("kind", "changed", "expected"),
    [
        ("float channel", {f"{Q_PROJ}.weight_scale": None}, r"missing: .*q_proj\.weight_scale"),
        (
            "float channel",
            {f"{Q_PROJ}.weight_scale": torch.ones(2, 1)},
            r"misshapen: .*q_proj\.weight_scale is \[2, 1\], expected \[192, 1\]",
        ),
        (
            "fp8",
            {f"{Q_PROJ}.weight_scale_inv": torch.ones(2, 2, dtype=torch.int32)},
            r"q_proj\.weight_scale_inv' has the dtype I32; .* F32 or BF16 or F16",
        ),
        (
            "int channel",
            {f"{Q_PROJ}.weight": torch.ones(192, 160, dtype=torch.float8_e4m3fn)},
            r"q_proj\.weight' has the dtype F8_E4M3; .* asks for I8",
        ),
        ("nvfp4", {f"{Q_PROJ}.weight_packed": None}, r"missing: .*q_proj\.weight_packed"),
        ("nvfp4", {f"{Q_PROJ}.weight_scale": None}, r"missing: .*q_proj\.weight_scale"),
        ("nvfp4", {f"{Q_PROJ}.weight_global_scale": None}, r"missing: .*weight_global_scale"),
        (
            "nvfp4",
            {f"{Q_PROJ}.weight_global_scale": torch.ones(2)},
            r"weight_global_scale is \[2\], expected \[1\]",
        ),
        (
            "nvfp4",
            {f"{Q_PROJ}.weight_scale": torch.ones(192, 10)},
            r"q_proj\.weight_scale' has the dtype F32; .* F8_E4M3",
        ),
        (
            "mxfp4",
            {f"{Q_PROJ}.weight_scale": torch.ones(192, 10).byte()},
            r"q_proj\.weight_scale is \[192, 10\], expected \[192, 5\]",
        ),
        (
            "mxfp4",
            {f"{Q_PROJ}.weight_packed": torch.ones(192, 80)},
            r"q_proj\.weight_packed' has the dtype F32; .* U8",
        ),
        (
            "mxfp4",
            {f"{Q_PROJ}.weight_global_scale": torch.ones(1)},
            r"extra: .*q_proj\.weight_global_scale",
        ),
        (
            "packed 4, group",
            {f"{Q_PROJ}.weight_shape": torch.tensor([160, 192])},
            r"q_proj\.weight_shape' is \[160, 192\], expected \[192, 160\]",
        ),
        (
            "packed 4, group",
            {f"{Q_PROJ}.weight_g_idx": torch.arange(160, dtype=torch.int32) % 5},
            r"q_proj\.weight_g_idx' has input 1 in group 1, expected 0",
        ),
        (
            "packed 4, actorder",
            {f"{Q_PROJ}.weight_g_idx": torch.arange(128, dtype=torch.int32) // 32},
            r"misshapen: .*q_proj\.weight_g_idx is \[128\], expected \[160\]",
        ),
        (
            "packed 4, actorder",
            {f"{Q_PROJ}.weight_g_idx": torch.arange(160) // 32},
            r"q_proj\.weight_g_idx' has the dtype I64; .* asks for I32",
        ),
        (
            "packed 4, actorder",
            {f"{Q_PROJ}.weight_g_idx": (torch.arange(160, dtype=torch.int32) + 1) // 32},
            r"q_proj\.weight_g_idx' has input 159 in group 5 of 5; the weights are damaged",
        ),
        (
            "packed 4, actorder",
            {f"{Q_PROJ}.weight_g_idx": torch.full((160,), -1, dtype=torch.int32)},
            r"q_proj\.weight_g_idx' has input 0 in group -1 of 5",
        ),
        (
            "packed 4, actorder",
            {f"{Q_PROJ}.weight_g_idx": torch.arange(160, dtype=torch.int32) % 4},
            r"q_proj\.weight_g_idx' has 40 inputs in group 0, expected 32",
        ),
    ],
)
def test_tensors_that_do_not_fit_config_json_are_refused(kind, changed, expected, made, tmp_path):
    folder = shutil.copytree(made[kind], tmp_path / "model")
    rewritten(folder, changed)
    with pytest.raises(CheckpointError, match=expected):
        loaded(folder, 1, "none")


@pytest.mark.parametrize("kind", ["fp8", "packed 4, group"])
def test_a_scale_that_is_not_finite_is_refused(kind, made, tmp_path):
    folder = shutil.copytree(made[kind], tmp_path / "model")
    name = f"{Q_PROJ}.weight_scale" + "_inv" * (kind == "fp8")
    scales = load_file(folder / "model.safetensors")[name]
    scales[1, 1] = torch.nan
    rewritten(folder, {name: scales})
    with pytest.raises(DamagedWeights, match=f"'{re.escape(name)}' has a scale that is NaN or Inf"):
        loaded(folder, 1, "none")


@pytest.mark.parametrize(
    ("kind", "end", "value", "expected"),
    [
        ("mxfp4", "weight_scale", 255, "has a scale that is NaN or Inf"),
        ("nvfp4", "weight_global_scale", 0, "is 0, which cannot divide scales"),
        ("nvfp4", "weight_global_scale", torch.nan, "is nan, which cannot divide scales"),
    ],
)
def test_non_finite_fp4_scale_or_zero_global_scale_is_refused(
    kind, end, value, expected, made, tmp_path
):
    folder = shutil.copytree(made[kind], tmp_path / "model")
    name = f"{Q_PROJ}.{end}"
    scales = load_file(folder / "model.safetensors")[name]
    scales.flatten()[0] = value
    rewritten(folder, {name: scales})
    with pytest.raises(DamagedWeights, match=f"'{re.escape(name)}' {expected}"):
        loaded(folder, 1, "none")


COMPRESSED = quantization_config("packed 4, group")
WEIGHTS = COMPRESSED["config_groups"]["group_0"]["weights"]


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ({"format": "mxfp6-pack-quantized"}, "'mxfp6-pack-quantized' is not supported; pack-qua"),
        ({"format": "nvfp4-pack-quantized"}, "nvfp4-pack-quantized with type='int'"),
        (
            {"format": "nvfp4-pack-quantized", "weights": {"type": "float"}},
            "strategy='group', group_size=32 and symmetric=true is not supported; 'tensor_group'",
        ),
        (
            {"format": "mxfp4-pack-quantized", "weights": {"type": "float", "symmetric": False}},
            "group_size=32 and symmetric=false is not supported; 'group', 32 and true are",
        ),
        ({"format": "marlin-24"}, "'marlin-24' is not supported"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "'sparse-24-bitmask'; dense is"),
        (
            {"transform_config": {"config_groups": {"R1": {"type": "hadamard", "apply": []}}}},
            "transform_config': rotations",
        ),
        ({"transform_config": []}, "transform_config=<list of 0> is not an object"),
        ({"config_groups": {}}, "no group with weights, and there is no kv_cache_scheme"),
        (
            {"config_groups": {"group_0": {**ATTENTION, "targets": ["re:.*self_attn.q_proj$"]}}},
            "no group with weights, and there is no kv_cache_scheme",
        ),
        ({"config_groups": {"W4A16": ["Linear"]}}, "'W4A16' must be an object"),
        ({"weights": {"strategy": "tensor_group"}}, "strategy='tensor_group' .*; tensor, channel"),
        ({"weights": {"num_bits": 3}}, "num_bits=3 is not supported; supported: int with 4 bits"),
        ({"weights": {"type": "float"}}, "type='float' and num_bits=4"),
        ({"weights": {"group_size": None}}, "group_size=0; it must be at least 1"),
        ({"weights": {"dynamic": True}}, "dynamic=true"),
        ({"weights": {"actorder": "column"}}, "actorder='column' is not supported; weight, static"),
        ({"ignore": ["re:(a+)+$"]}, "no repeated groups"),
        ({"ignore": ["re:(a"]}, "is not valid"),
        ({"ignore": [f"re:.*{n}" for n in range(65)]}, "more than 64 patterns with repetitions"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size=<list of 1>"),
        ({"quant_method": "fp8", "expert_dtype": "fp4"}, "expert_dtype='fp4'"),
    ],
)
def test_unsupported_config_is_refused_with_value_and_remedy(stated, expected):
    group = {"targets": ["Linear"], "weights": {**WEIGHTS, **stated.get("weights", {})}}
    config = {**COMPRESSED, "config_groups": {"group_0": group}, **stated}
    with pytest.raises(UsageError, match=f"{expected}.*; use the unquantised model"):
        packing_of({"quantization_config": config})


@pytest.mark.parametrize("transforms", [{}, {"config_groups": {}}, None])
def test_empty_transform_config_is_read_as_no_rotations(transforms):
    """Regression: `{}`, which llm-compressor writes for every model, was refused."""
    config = {**COMPRESSED, "sparsity_config": {}, "transform_config": transforms}
    expected = packing_of({"quantization_config": COMPRESSED})
    assert packing_of({"quantization_config": config}) == expected
