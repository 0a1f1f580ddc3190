"""HF folders of bitsandbytes: the values that it dequantises, on any number of ranks."""

import random
import re
import shutil
from pathlib import Path

import pytest
import torch
from bitsandbytes_folders import KINDS, as_bytes, quant_state, write_bitsandbytes
from packed_folders import meant_by
from packed_samples import sample
from safetensors.torch import load_file
from test_gptq_and_awq import loaded, logits_of, rewritten
from thread_ranks import run_on_threads
from tiny_models import TinyModel, write_hf
from transformers_oracle import reference_logits

from parallel_llama.checkpoint.bitsandbytes import FourBitMatrix, Int8Matrix
from parallel_llama.checkpoint.byte_ranges import MatrixBlock
from parallel_llama.config.bitsandbytes import MAX_STATE_BYTES, QuantState
from parallel_llama.config.layouts import load_model_args, why_decoded
from parallel_llama.errors import CheckpointError, DamagedWeights
from parallel_llama.families import parameters
from parallel_llama.families.stored_slices import whole
from parallel_llama.files.model_files import find_model
from parallel_llama.plan import make_plan

# Blocks of 64 values end inside rows; heads of 24 and shards of channels end inside blocks.
TINY = TinyModel(8, 2, 24, 160, ffn_dim=224, vocab_size=101)
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 89, 79, 32, 38]
Q_PROJ = "model.layers.0.self_attn.q_proj"
STATE = "weight.quant_state.bitsandbytes__nf4"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of each kind."""
    home = tmp_path_factory.mktemp("made")
    source = write_hf(TINY, home / "hf")
    return {kind: write_bitsandbytes(source, home / kind, kind) for kind in KINDS}


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_matrix_slices_equal_the_values_dequantised_by_bitsandbytes(kind):
    tensors = sample(kind)
    meant = tensors.pop("values")
    n_rows, n_columns = meant.shape
    stored_slice = whole("weight", (n_rows, n_columns))
    matrix = Int8Matrix(stored_slice, has_format=False)
    if kind == "nf4":
        text = bytes(tensors[STATE].tolist()).decode()
        offset = float(re.search(r'"nested_offset": ([\d.]+)', text)[1])
        matrix = FourBitMatrix(stored_slice, QuantState("nf4", 64, 256, offset), "U8")

    def read(end: str, row_bytes: int, rows: range, columns: range) -> torch.Tensor:
        starts = torch.arange(rows.start, rows.stop)[:, None] * row_bytes
        places = starts + torch.arange(columns.start, columns.stop)
        return tensors[end].flatten().view(torch.uint8)[places]

    matrix.check(read)
    for rows in (range(n_rows), range(1, 3), range(2, 3), range(2, 2)):
        for columns in (range(n_columns), range(3, 8), range(4, 7), range(5, 5)):
            part = matrix.values(MatrixBlock(n_columns, rows, columns), read)
            expected = meant[rows.start : rows.stop, columns.start : columns.stop]
            assert torch.equal(part, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_every_rank_loads_its_slice_of_decoded_matrices_bit_for_bit(kind, made, monkeypatch):
    """Matrices are decoded in pieces of a few rows, as large matrices are."""
    monkeypatch.setattr("parallel_llama.checkpoint.bitsandbytes._DECODED_AT_ONCE", 5000)
    args = load_model_args(find_model(str(made[kind])))
    (wholes,) = loaded(meant_by(made[kind]), 1)
    for tp_size in (1, 2, 3, 5):
        shards = make_plan(args, tp_size).shards
        for shard, ours in zip(shards, loaded(made[kind], tp_size, "none"), strict=True):
            for param, part, complete in zip(parameters(args), ours, wholes, strict=True):
                rows = shard.rows_of(param)
                assert torch.equal(part, complete.narrow(param.dim, rows.start, len(rows)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nf4", "nf4 nested", "int8"])
def test_logits_match_transformers_with_dequantised_weights(kind, made):
    expected = reference_logits(meant_by(made[kind]), TOKENS)
    for tp_size in (1, 2, 3, 5):
        ours = torch.cat(run_on_threads(tp_size, logits_of, made[kind], "none", "float64"), 1)
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-10)


def test_message_reports_decoded_matrices_and_unrounded_int8_activations(made):
    lines = {}
    for kind in ("nf4 nested", "fp4", "int8"):
        files = find_model(str(made[kind]))
        lines[kind] = why_decoded(files, load_model_args(files), "bfloat16") or ""
    assert "in nf4 are decoded to bfloat16; only 4-bit GPTQ" in lines["nf4 nested"]
    assert "in fp4 are decoded to bfloat16" in lines["fp4"]
    assert "in int8 are decoded to bfloat16; only 4-bit GPTQ" in lines["int8"]
    assert lines["int8"].endswith("; not applied from config.json: the rounding of activations")


@pytest.mark.parametrize(
    ("kind", "end", "tensor", "expected"),
    [
        ("int8", "SCB", None, r"missing: .*q_proj\.SCB"),
        ("int8", "SCB", torch.ones(3), r"q_proj\.SCB is \[3\], expected \[192\]"),
        ("int8", "SCB", torch.ones(192).half(), r"q_proj\.SCB' has the dtype F16; .* F32"),
        ("int8", "weight", torch.ones(192, 160), r"q_proj\.weight' has the dtype F32; .* I8"),
        ("int8", "weight_format", torch.tensor(2, dtype=torch.uint8), r"weight_format' is 2, exp"),
        ("nf4", "weight", None, r"missing: .*q_proj\.weight"),
        ("nf4", "weight", torch.ones(9, 1).byte(), r"q_proj\.weight is \[9, 1\], .*\[15360, 1\]"),
        ("nf4", "weight", torch.ones(7680, 1).short(), r"q_proj\.weight' has the dtype I16"),
        ("nf4", "weight.absmax", None, r"missing: .*q_proj\.weight\.absmax"),
        ("nf4", "weight.absmax", torch.ones(480).byte(), r"weight\.absmax' has the dtype U8"),
        ("nf4 nested", "weight.absmax", torch.ones(480), r"weight\.absmax' has the dtype F32"),
        ("nf4", "weight.quant_map", torch.ones(16), r"weight\.quant_map' differs"),
        ("nf4", "weight.quant_map", torch.full((16,), torch.nan), r"weight\.quant_map' differs"),
        ("nf4", "weight.quant_map", None, r"missing: .*weight\.quant_map"),
        ("nf4 nested", "weight.nested_absmax", None, r"missing: .*weight\.nested_absmax"),
        ("nf4 nested", "weight.nested_quant_map", torch.ones(9), r"nested_quant_map is \[9\]"),
        ("nf4", "weight.nested_absmax", torch.ones(2), r"extra: .*weight\.nested_absmax"),
        ("nf4", STATE, None, r"bitsandbytes__': needs exactly one tensor .* and has 0"),
        ("nf4", STATE[:-3] + "fp4", as_bytes("{}"), r"bitsandbytes__': needs .* and has 2"),
        ("nf4", STATE, torch.ones(9), r"__nf4' has 36 bytes and the dtype F32"),
        ("nf4", STATE, torch.ones(MAX_STATE_BYTES + 1).byte(), r"__nf4' has 4097 bytes"),
        ("nf4", STATE, as_bytes("[1]"), r"__nf4' is not a JSON object"),
        ("nf4", STATE, as_bytes("[" * 4000), r"__nf4' is not JSON"),
        ("nf4", STATE, as_bytes('{"shape": 1, "shape": 2}'), r"'shape' appears twice"),
    ],
)
def test_missing_extra_or_wrong_tensor_is_refused_by_name(
    kind, end, tensor, expected, made, tmp_path
):
    folder = shutil.copytree(made[kind], tmp_path / "model")
    rewritten(folder, {f"{Q_PROJ}.{end}": tensor})
    with pytest.raises(CheckpointError, match=expected):
        loaded(folder, 1, "none")


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({"blocksize": 0}, "blocksize=0 is not supported; 32, 64"),
        ({"blocksize": 2**70}, "blocksize=.* is too large"),
        ({"blocksize": None}, "lacks the key 'blocksize'"),
        ({"shape": [160, 192]}, r"shape=\[160, 192\], expected \[192, 160\]"),
        ({"quant_type": "fp4"}, "quant_type='fp4', expected 'nf4'"),
        ({"nested_blocksize": 3}, "nested_blocksize=3 is not supported"),
        ({"nested_offset": float("nan")}, "nested_offset=nan is not a finite"),
        ({"nested_offset": None}, "lacks the key 'nested_offset'"),
        ({"nested_dtype": "float16"}, "nested_dtype='float16' is not supported"),
        ({"transposed": True}, "unknown key 'transposed'"),
    ],
)
def test_invalid_quant_state_is_refused_by_tensor_and_field(own, expected, made, tmp_path):
    folder = shutil.copytree(made["nf4 nested"], tmp_path / "model")
    state = quant_state(torch.empty(192, 160), KINDS["nf4 nested"], **own)
    rewritten(folder, {f"{Q_PROJ}.{STATE}": state})
    with pytest.raises(CheckpointError, match=rf"{re.escape(STATE)}'?: {expected}"):
        loaded(folder, 1, "none")


def test_random_bytes_in_a_quant_state_raise_only_checkpoint_errors(made, tmp_path):
    folder = shutil.copytree(made["nf4 nested"], tmp_path / "model")
    path, rng = folder / "model.safetensors", random.Random(5)
    data, refused = path.read_bytes(), 0
    at = data.index(b'{"quant_type"')
    for _ in range(60):
        damaged = bytearray(data)
        for _ in range(rng.randint(1, 4)):
            damaged[at + rng.randrange(150)] = rng.randrange(256)
        path.write_bytes(damaged)
        try:
            loaded(folder, 1, "none")
        except CheckpointError as error:
            assert STATE in str(error)
            refused += 1
    assert refused > 50


@pytest.mark.parametrize(
    ("kind", "end"), [("int8", "SCB"), ("nf4", "weight.absmax"), ("nf4 nested", "nested_absmax")]
)
def test_a_scale_that_is_not_finite_is_refused(kind, end, made, tmp_path):
    folder = shutil.copytree(made[kind], tmp_path / "model")
    end = end if "." in end or end == "SCB" else f"weight.{end}"
    name = f"{Q_PROJ}.{end}"
    scales = load_file(folder / "model.safetensors")[name]
    scales[1] = torch.inf
    rewritten(folder, {name: scales})
    with pytest.raises(DamagedWeights, match=f"'{re.escape(name)}' has a scale that is NaN or Inf"):
        loaded(folder, 1, "none")
