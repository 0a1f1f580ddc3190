"""HF folders that ask for quantised activations: inputs of matrices are rounded as stated."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from packed_folders import meant_by
from reshard_samples import moved
from rounded_inputs import logits_with_rounded_inputs, rounded
from safetensors.torch import load_file
from scaled_folders import quantization_config, write_scaled
from test_gptq_and_awq import CPU, rewritten
from thread_ranks import run_on_threads
from tiny_models import TinyModel, write_hf
from torch import Tensor
from transformers_oracle import reference_logits

from parallel_llama import LLM
from parallel_llama.checkpoint.reading import open_checkpoint
from parallel_llama.config.layouts import input_formats, load_model_args, why_decoded
from parallel_llama.config.native import native_inputs
from parallel_llama.dtypes import InputFormat, make_precision
from parallel_llama.engine.llm_config import LLMConfig
from parallel_llama.engine.model_runner import ModelRunner
from parallel_llama.engine.setup import ModelSetup
from parallel_llama.engine.step_buffer import Chunk
from parallel_llama.errors import CheckpointError, DamagedWeights, UsageError
from parallel_llama.files.model_files import find_model
from parallel_llama.ops.inputs import round_inputs
from parallel_llama.parallel.collectives import Solo
from parallel_llama.plan import make_plan

# Heads of 24 and shards of channels end inside groups of 64 and 128; the last group is short.
TINY = TinyModel(8, 2, 24, 160, ffn_dim=224, vocab_size=101)
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 89, 79, 32, 38]
PROJECTIONS = [
    f"model.layers.{layer}.{name}"
    for layer in range(2)
    for name in (
        *(f"self_attn.{leaf}_proj" for leaf in "qkvo"),
        *(f"mlp.{leaf}_proj" for leaf in ("gate", "up", "down")),
    )
]
WO = "layers.0.attention.wo.weight"
E4M3, INT8 = {"num_bits": 8, "type": "float"}, {"num_bits": 8, "type": "int"}

# By kind: the stored matrices, what config.json states, and the format of inputs. "own" scales
# differ between all matrices, "fused" scales only between matrices with different inputs.
ASKED: dict[str, tuple[str, dict[str, Any], InputFormat | str]] = {
    "fp8, blocks": ("fp8", {}, InputFormat("e4m3", 128)),
    "fp8, static": ("fp8", {"activation_scheme": "static"}, "fused"),
    "fp8, other scales": ("fp8", {"activation_scheme": "static"}, "own"),
    "fbgemm": (
        "fbgemm_fp8",
        {"activation_scale_ub": 1.25},
        InputFormat("e4m3", most=1.25),
    ),
    "e4m3 by token": (
        "float channel",
        {**E4M3, "strategy": "token", "dynamic": True},
        InputFormat("e4m3"),
    ),
    "e4m3 by batch": (
        "float tensor",
        {**E4M3, "strategy": "tensor", "dynamic": True},
        InputFormat("e4m3"),
    ),
    "int8 by token": (
        "int channel, float32",
        {**INT8, "strategy": "token", "dynamic": True},
        InputFormat("int8"),
    ),
    "int8 by token, zeros": (
        "int channel, float32",
        {**INT8, "strategy": "token", "dynamic": True, "symmetric": False},
        InputFormat("int8", has_zeros=True),
    ),
    "int8 by group": (
        "int channel, float32",
        {**INT8, "strategy": "group", "group_size": 32, "dynamic": True},
        InputFormat("int8", 32),
    ),
    "int8, static zeros": ("int tensor, zeros", {**INT8, "symmetric": False}, "fused"),
}

# The scale is the largest absolute value divided by 127.5, so -127.5 is the nearest number to both
# -127 and -128, and the last bit of an input decides.
HAS_TIES = "int8 by token", "int8 by group"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf(TINY, tmp_path_factory.mktemp("source") / "hf")


@pytest.fixture(scope="module")
def made(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("made")
    return {kind: write_asking(source, home / kind, kind) for kind in ASKED}


def write_asking(source: Path, folder: Path, kind: str) -> Path:
    """Writes the folder of one kind of ASKED, with the tensors of stored scales."""
    stored, stated, form = ASKED[kind]
    if stored not in ("fp8", "fbgemm_fp8"):
        (group,) = quantization_config(stored)["config_groups"].values()
        stated = {"config_groups": {"group_0": {**group, "input_activations": stated}}}
    write_scaled(source, folder, stored, **stated)
    if isinstance(form, str):
        end = "activation_scale" if stored == "fp8" else "input_scale"
        scales: dict[str, Tensor] = {}
        for name, form_of in formats_of(kind).items():
            scales[f"{name}.{end}"] = torch.tensor([form_of.scale])
            if form_of.has_zeros:
                zero = torch.tensor([form_of.zero], dtype=torch.int8)
                scales[f"{name}.input_zero_point"] = zero
        rewritten(folder, scales)
    return folder


def formats_of(kind: str) -> Mapping[str, InputFormat]:
    """The format of the inputs of each projection."""
    stored, _, form = ASKED[kind]
    if isinstance(form, InputFormat):
        return dict.fromkeys(PROJECTIONS, form)
    found = {}
    for number, name in enumerate(PROJECTIONS):
        share = name.replace("k_proj", "q_proj").replace("v_proj", "q_proj")
        at = number if form == "own" else PROJECTIONS.index(share.replace("up_proj", "gate_proj"))
        if "int" in stored:
            found[name] = InputFormat("int8", 0, True, scale=(at + 9) / 512, zero=at - 9)
        else:
            found[name] = InputFormat("e4m3", scale=(at + 3) / 2048)
    return found


def runner_of(comm: Solo, folder: Path, dtype: str = "float64") -> ModelRunner:
    files = find_model(str(folder))
    args = load_model_args(files)
    inputs = input_formats(files, args)
    precision = make_precision(args, dtype, "cpu", "none", None, inputs)
    plan = make_plan(args, comm.size, exact=True)
    checkpoint = open_checkpoint(files, args)
    runner = ModelRunner.load(args, checkpoint, plan, comm, precision=precision, device=CPU)
    runner.reserve([8] * len(runner.kv_groups), 8)
    return runner


def chunk(runner: ModelRunner, tokens: list[int], first: int, blocks: range) -> Chunk:
    return Chunk(tokens, first, [blocks] * len(runner.kv_groups), len(tokens))


def logits_of(comm: Solo, folder: Path) -> Tensor:
    runner = runner_of(comm, folder)
    return runner.logits(runner.forward([chunk(runner, TOKENS, 0, range(4))]))


@pytest.mark.parametrize("kind", ASKED)
def test_round_inputs_equals_the_published_formula_bit_for_bit(kind):
    x = torch.randn(20, 224, dtype=torch.float64) * torch.logspace(-3, 2, 20)[:, None]
    x[3].abs_()
    x[4].abs_().neg_()
    for form in formats_of(kind).values():
        assert torch.equal(round_inputs(x, form), rounded(x, form))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ASKED)
def test_logits_match_transformers_with_rounded_inputs_at_every_tp_size(kind, made):
    meant = meant_by(made[kind])
    expected = logits_with_rounded_inputs(meant, TOKENS, formats_of(kind))
    plain = reference_logits(meant, TOKENS)
    assert (expected - plain).norm() > 1e-3 * plain.norm()
    alone = logits_of(Solo(), made[kind])
    if kind in HAS_TIES:
        assert (alone - expected).norm() < 0.5 * (expected - plain).norm()
    else:
        torch.testing.assert_close(alone, expected, rtol=0, atol=1e-10)
    for tp_size in (2, 3, 5):
        ours = torch.cat(run_on_threads(tp_size, logits_of, made[kind]), 1)
        assert torch.equal(ours, alone)


@pytest.mark.parametrize("kind", ["e4m3 by batch", "int8 by group", "int8, static zeros"])
def test_logits_are_bitwise_equal_alone_batched_and_in_chunks(kind, made):
    """Includes a config.json that asks for one scale for all tokens of a batch."""
    runner = runner_of(Solo(), made[kind], "float32")
    alone = runner.logits(runner.forward([chunk(runner, TOKENS, 0, range(4))]))
    others = chunk(runner, [97, 11, 60], 0, range(4, 8))
    both = runner.forward([others, chunk(runner, TOKENS, 0, range(4))])
    assert torch.equal(runner.logits(both)[3:], alone)
    for start in range(0, len(TOKENS), 4):
        piece = chunk(runner, TOKENS[start : start + 4], start, range(4))
        assert torch.equal(runner.logits(runner.forward([piece])), alone[start : start + 4])


@pytest.mark.slow
def test_scores_with_rounded_inputs_are_equal_on_one_and_two_ranks(made):
    scores = []
    for tp_size in (1, 2):
        with LLM(str(made["fp8, blocks"]), tp_size=tp_size, dtype="float32") as llm:
            assert llm.precision.inputs
            scores.append(llm.score([TOKENS, TOKENS[5:]]))
    assert scores[0] == scores[1]


def test_dynamic_input_scales_without_exact_sums_are_skipped_and_logged(made, caplog):
    for kind, is_applied in (("e4m3 by token", False), ("fp8, static", True)):
        caplog.clear()
        setup = ModelSetup(LLMConfig(str(made[kind]), tp_size=2, exact=False))
        assert bool(setup.precision.inputs) == is_applied
        assert ("activations are not rounded" in caplog.text) == (not is_applied)
    for tp_size, exact in ((1, False), (2, True)):
        caplog.clear()
        setup = ModelSetup(LLMConfig(str(made["e4m3 by token"]), tp_size=tp_size, exact=exact))
        assert setup.precision.inputs and "not rounded" not in caplog.text


def test_different_scales_of_fused_matrices_log_slower_decoding(made, caplog):
    ModelSetup(LLMConfig(str(made["fp8, static"]), tp_size=1))
    assert "operator by operator" not in caplog.text
    ModelSetup(LLMConfig(str(made["fp8, other scales"]), tp_size=1))
    assert "operator by operator: matrices that share an input" in caplog.text


def test_input_formats_apply_to_decoded_but_not_to_stored_integers(tmp_path, caplog):
    home = write_hf(TinyModel(4, 2, 32, 128, ffn_dim=160, vocab_size=101), tmp_path / "hf")
    (group,) = quantization_config("int channel")["config_groups"].values()
    stated = {**group, "input_activations": {**INT8, "strategy": "token", "dynamic": True}}
    folder = write_scaled(home, tmp_path / "int8", "int channel", config_groups={"group_0": stated})
    assert not ModelSetup(LLMConfig(str(folder), tp_size=1)).precision.inputs
    assert ModelSetup(LLMConfig(str(folder), tp_size=1, quant="none")).precision.inputs
    ModelSetup(LLMConfig(str(folder), tp_size=2, exact=False))
    assert "not rounded" not in caplog.text


@pytest.mark.parametrize(
    "stated",
    [
        {**E4M3, "num_bits": 4, "dynamic": "local", "strategy": "tensor_group", "group_size": 16},
        {**E4M3, "strategy": "channel"},
        {**E4M3, "symmetric": False, "dynamic": True, "strategy": "token"},
        {**E4M3, "dynamic": True, "strategy": "token", "scale_dtype": "torch.uint8"},
    ],
)
def test_unsupported_input_format_is_ignored_and_reported(stated, made, tmp_path):
    folder = shutil.copytree(made["e4m3 by token"], tmp_path / "model")
    changed(folder, input_activations=stated)
    files = find_model(str(folder))
    args = load_model_args(files)
    assert input_formats(files, args) == {}
    line = why_decoded(files, args, "bfloat16") or ""
    assert line.endswith("; not applied from config.json: the rounding of activations")


def changed(folder: Path, **own: Any) -> None:
    """Changes the only group of config.json."""
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"] |= own
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("tensor", "error", "expected"),
    [
        (None, CheckpointError, "input_scale' is missing, and config.json states"),
        (torch.ones(2), CheckpointError, r"activation_scale' is \[2\] of F32, expected one number"),
        (torch.ones(1).char(), None, ""),
        (torch.zeros(1), DamagedWeights, "activation_scale' is 0, which cannot divide inputs"),
        (torch.tensor(torch.nan), DamagedWeights, "is nan, which cannot divide"),
        (torch.tensor(0.5, dtype=torch.bfloat16), None, ""),
        (torch.tensor([0.5], dtype=torch.float16), None, ""),
    ],
)
def test_stored_input_scale_is_read_or_refused_if_unusable(tensor, error, expected, made, tmp_path):
    folder = shutil.copytree(made["fp8, static"], tmp_path / "model")
    rewritten(folder, {f"{PROJECTIONS[3]}.activation_scale": tensor})
    files = find_model(str(folder))
    args = load_model_args(files)
    if error is not None:
        with pytest.raises(error, match=expected):
            input_formats(files, args)
        return
    stored = load_file(folder / "model.safetensors")[f"{PROJECTIONS[3]}.activation_scale"]
    form = input_formats(files, args)[WO]
    assert form == InputFormat("e4m3", scale=stored.item())


def test_per_tensor_weight_scale_implies_per_token_input_scale(made, tmp_path):
    """AutoFP8 writes such matrices; the other matrices of this folder have block scales."""
    folder = shutil.copytree(made["fp8, blocks"], tmp_path / "model")
    name = f"{PROJECTIONS[3]}.weight_scale"
    rewritten(folder, {f"{name}_inv": None, name: torch.tensor(1.0)})
    files = find_model(str(folder))
    forms = input_formats(files, load_model_args(files))
    assert forms.pop(WO) == InputFormat("e4m3")
    assert {*forms.values()} == {InputFormat("e4m3", 128)}


@pytest.mark.parametrize("zero", [128.0, torch.nan])
def test_stored_zero_point_that_does_not_fit_int8_is_refused(zero, made, tmp_path):
    folder = shutil.copytree(made["int8, static zeros"], tmp_path / "model")
    rewritten(folder, {f"{PROJECTIONS[3]}.input_zero_point": torch.tensor([zero])})
    files = find_model(str(folder))
    with pytest.raises(DamagedWeights, match=r"input_zero_point' is .*, expected -128 to 127"):
        input_formats(files, load_model_args(files))


@pytest.mark.parametrize("kind", ["fbgemm", "int8 by group", "int8, static zeros"])
def test_native_folders_keep_the_formats_of_inputs(kind, made, tmp_path):
    folder = moved(made[kind], tmp_path / "native", "native", 2)
    files, original = find_model(str(folder)), find_model(str(made[kind]))
    args = load_model_args(files)
    assert input_formats(files, args) == input_formats(original, load_model_args(original))
    assert len(input_formats(files, args)) == len(PROJECTIONS)
    plain = moved(made[kind], tmp_path / "plain", "native", 1, quant="none", dtype="float32")
    assert input_formats(find_model(str(plain)), args) == {}


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ({"numbers": "e5m2"}, "Invalid enum value 'e5m2'"),
        ({"numbers": "e4m3", "has_zeros": True}, "is not supported; write the folder again"),
        ({"numbers": "int8", "scale": 0.0}, "is not supported; write the folder again"),
        ({"numbers": "int8", "group": -1}, "is not supported; write the folder again"),
        ({"numbers": "e4m3", "most": -2.0}, "most=-2 must be positive"),
        ({"numbers": "e4m3", "strategy": "token"}, "unknown key 'strategy'"),
        ([], "Expected `object`"),
    ],
)
def test_invalid_input_format_in_native_json_is_refused(stated, expected):
    with pytest.raises(UsageError, match=expected):
        native_inputs({"inputs": {WO: stated}}, [WO])
    with pytest.raises(UsageError, match="not a matrix of the model"):
        native_inputs({"inputs": {"norm.weight": {"numbers": "int8"}}}, [WO])


def test_activation_scale_ub_must_be_positive(made, tmp_path):
    folder = shutil.copytree(made["fbgemm"], tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["activation_scale_ub"] = -1.0
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises((UsageError, CheckpointError), match="activation_scale_ub=-1 must be posit"):
        files = find_model(str(folder))
        input_formats(files, load_model_args(files))
