"""Written GGUF files, compared with the gguf package, llama.cpp's conversion and transformers."""

import errno
import json
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from checkpoint_samples import weights_of, write_gguf
from converted_gguf import convert, rounded
from gguf import GGMLQuantizationType
from reshard_samples import moved, read, same_bytes, write_model
from safetensors.torch import load_file, save_file
from test_quantised_folders import ARGS, loaded
from tiny_folder import write_tokenizer
from tiny_models import TINY_MODELS, TinyModel, write_hf
from tokenizer_data import MISTRAL_V1, SMOLLM2
from tokenizers import Tokenizer, decoders, models
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from parallel_llama.checkpoint.reading import load, open_checkpoint
from parallel_llama.cli.main import main
from parallel_llama.config.generation import GenerationDefaults
from parallel_llama.config.layouts import load_generation_defaults, load_model_args
from parallel_llama.dtypes import Precision
from parallel_llama.errors import UsageError, WriteError
from parallel_llama.files.gguf_header import read_gguf_header
from parallel_llama.files.model_files import ModelFiles, find_model
from parallel_llama.plan import make_plan
from parallel_llama.reshard import tensor_writer
from parallel_llama.reshard.sidecar_files import gguf_file_fields, sidecar_files
from parallel_llama.reshard.target_folder import partial_path
from parallel_llama.reshard.tensor_writer import DirectFile
from parallel_llama.tokenizer import load_tokenizer
from parallel_llama.tokenizer.gguf import export_gguf_tokenizer
from parallel_llama.tokenizer.gguf_fields import tokenizer_fields
from parallel_llama.tokenizer.spm import parse_spm

MODELS = {
    name: TINY_MODELS[name]
    for name in (
        "9/3", "10/2 all biases, tied", "10/2 linear", "12/4 yarn, wide heads", "8/2 mistral",
        "8/2 qwen2", "8/4 qwen3, bias, tied", "8/1 gemma", "8/2 mixtral", "8/2 qwen3_moe",
    )
} | {
    "gemma2": TinyModel(
        8, 4, 8, 56, tied=True, n_layers=3, family="gemma2",
        own={"query_pre_attn_scalar": 8, "sliding_window": 9, "attn_logit_softcapping": 2.0},
    ),
    "qwen2_moe": TinyModel(
        8, 2, 6, 56, family="qwen2_moe",
        own={
            "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 18,
            "shared_expert_intermediate_size": 37,
        },
    ),
    "gemma3": TinyModel(
        8, 2, 8, 56, tied=True, n_layers=7, family="gemma3_text",
        own={"query_pre_attn_scalar": 8, "sliding_window": 5},
    ),
    "gpt_oss": TinyModel(
        5, 1, 16, 34, ffn_dim=19, n_layers=3, max_seq_len=64, family="gpt_oss",
        own={
            "pad_token_id": 0, "num_local_experts": 6, "num_experts_per_tok": 3,
            "sliding_window": 9,
        },
        rope={**TINY_MODELS["12/4 yarn, wide heads"].rope, "truncate": False},
    ),
    "llama4": TinyModel(
        5, 1, 6, 34, ffn_dim=19, n_layers=5, family="llama4_text",
        own={
            "interleave_moe_layer_step": 2, "intermediate_size_mlp": 41, "num_local_experts": 5,
        },
    ),
    "cohere": TinyModel(9, 3, 6, 40, tied=True, family="cohere", own={"use_qk_norm": True}),
    "cohere2": TinyModel(
        5, 1, 6, 30, tied=True, n_layers=5, family="cohere2",
        own={"sliding_window": 5, "logit_scale": 0.25},
    ),
}  # fmt: skip
CPU = torch.device("cpu")
TOKENS = [[3, 1, 4, 1, 5, 9, 2, 6]]


def tensors_of(path: Path) -> dict[str, tuple[str, bytes]]:
    """Type and bytes of every tensor, as the gguf package reads them."""
    return {
        tensor.name: (tensor.tensor_type.name, tensor.data.tobytes())
        for tensor in gguf.GGUFReader(path).tensors
    }


def fields_of(path: Path) -> dict[str, object]:
    return {key: field.contents() for key, field in gguf.GGUFReader(path).fields.items()}


def written(source: Path, target: Path, **options: object) -> Path:
    return moved(source, target, "gguf", **options)


@pytest.mark.parametrize("name", MODELS)
def test_written_file_equals_the_conversion_of_llama_cpp(name, tmp_path):
    """Names, the order of rows, norms that have 1 added, and the fields of the model's sizes."""
    folder = rounded(write_hf(MODELS[name], tmp_path / "hf"))
    converted = convert(folder, tmp_path / "converted.gguf")
    path = written(folder, tmp_path / "written.gguf", dtype="float32")
    assert tensors_of(path) == tensors_of(converted)
    ours, theirs = fields_of(path), fields_of(converted)
    arch = theirs["general.architecture"]
    own = {key: value for key, value in theirs.items() if key.startswith(f"{arch}.")}
    if "_moe" in name:
        del own[f"{arch}.feed_forward_length"]  # of layers without experts; this model has none
    assert own.items() <= ours.items()
    assert load_model_args(find_model(str(path))) == load_model_args(find_model(str(converted)))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_every_rank_reads_the_values_of_the_source(dtype, tmp_path):
    source = write_model(tmp_path / "hf", ARGS)
    source = moved(source, tmp_path / dtype, "hf", dtype=dtype)
    path = written(source, tmp_path / "written.gguf")
    assert {kind for kind, _ in tensors_of(path).values()} == {
        "F32", {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}[dtype],
    }  # fmt: skip
    for tp_size in (1, 3):
        ours, theirs = (shards_of(own, tp_size) for own in (path, source))
        assert len(ours) == len(theirs)
        assert all(map(torch.equal, ours, theirs))


def shards_of(path: Path, tp_size: int) -> list[torch.Tensor]:
    files = find_model(str(path))
    args = load_model_args(files)
    checkpoint = open_checkpoint(files, args)
    return [
        tensor
        for shard in make_plan(args, tp_size).shards
        for _, tensor in load(checkpoint, args, shard, Precision.plain("float32"), CPU)
    ]


@pytest.mark.parametrize(
    "tiny",
    [
        TINY_MODELS["9/3 tied"],
        TINY_MODELS["8/2 qwen2"],
        TinyModel(2, 1, 128, 32, family="qwen3"),  # transformers assumes this size of heads
    ],
)
def test_transformers_computes_equal_logits_from_file_and_folder(tiny, tmp_path):
    folder = rounded(write_hf(tiny, tmp_path / "hf"))
    written(folder, tmp_path / "written.gguf", dtype="float32")
    expected, found = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **own)
        for path, own in ((folder, {}), (tmp_path, {"gguf_file": "written.gguf"}))
    )
    with torch.no_grad():
        one, other = (model(torch.tensor(TOKENS)).logits for model in (expected, found))
    torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


@pytest.mark.parametrize("quant", ["q8_0", "q4_0", "q4_1"])
def test_quantised_blocks_equal_those_of_the_gguf_package(quant, tmp_path):
    folder = write_model(tmp_path / "hf", ARGS)
    plain = gguf.GGUFReader(written(folder, tmp_path / "plain.gguf", dtype="float32"))
    blocks = tensors_of(written(folder, tmp_path / "blocks.gguf", quant=quant))
    for tensor in plain.tensors:
        kind = quant.upper() if tensor.name.startswith("blk.") else "Q8_0"
        values = np.array(tensor.data)
        if values.ndim == 1:
            assert blocks[tensor.name] == ("F32", values.tobytes())
        else:
            quantised = gguf.quants.quantize(values, GGMLQuantizationType[kind])
            assert blocks[tensor.name] == (kind, quantised.tobytes())
    assert (
        fields_of(tmp_path / "blocks.gguf")["general.file_type"]
        == ({"q8_0": 7, "q4_0": 2, "q4_1": 3}[quant])
    )


@pytest.mark.parametrize("quant", ["int8", "int4"])
def test_int8_and_int4_files_equal_quantising_at_load(quant, tmp_path):
    folder = write_model(tmp_path / "hf", ARGS)
    path = written(folder, tmp_path / "written.gguf", quant=quant)
    native = moved(folder, tmp_path / "native", "native", quant=quant)
    again = written(native, tmp_path / "again.gguf")
    assert tensors_of(again) == tensors_of(path)
    for tp_size in (1, 3):
        ours, theirs = loaded(path, tp_size, "stored"), loaded(folder, tp_size, quant)
        assert len(ours) == len(theirs)
        assert all(map(torch.equal, ours, theirs))


def test_a_gguf_file_is_copied_block_for_block(tmp_path):
    """Includes types that this project cannot quantise to, unquantised types, and experts."""
    args = replace(ARGS, dim=256, n_heads=8, n_kv_heads=2)
    types = {
        "wq.weight": "Q4_K", "wk.weight": "Q6_K", "wo.weight": "IQ4_XS", "w1.weight": "Q5_1",
        "w3.weight": "Q5_0", "w2.weight": "Q8_0", "tok_embeddings.weight": "F16",
        "output.weight": "BF16", "wv.weight": "Q2_K",
    }  # fmt: skip
    write_gguf(tmp_path / "source.gguf", args, weights_of(args), types)
    source = tensors_of(tmp_path / "source.gguf")
    assert {kind for kind, _ in source.values()} == {*types.values(), "F32"}
    for number, options in enumerate(({}, {"quant": "stored"})):
        path = written(tmp_path / "source.gguf", tmp_path / f"{number}.gguf", **options)
        assert tensors_of(path) == source
    experts = convert(
        write_hf(TINY_MODELS["8/2 mixtral"], tmp_path / "hf"), tmp_path / "experts.gguf"
    )
    assert tensors_of(written(experts, tmp_path / "copy.gguf")) == tensors_of(experts)


def test_quantised_vector_is_refused_unless_decoded(tmp_path, capsys):
    """Regression: a block's bytes were divided by its values, so the vector ended in zeros."""
    source, target = tmp_path / "source.gguf", tmp_path / "copy.gguf"
    write_gguf(source, ARGS, weights_of(ARGS), {"ffn_norm.weight": "Q8_0"})
    argv = ["reshard", str(source), str(target), "--format", "gguf"]
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert "'blk.0.ffn_norm.weight' is a vector in Q8_0" in error and "--quant none" in error
    assert not target.exists() and not partial_path(target).exists()
    decoded = written(source, target, quant="none", dtype="float32")
    assert same_bytes(read(decoded), read(source))


def test_a_full_folder_of_temporary_files_is_named(tmp_path, monkeypatch, capsys):
    """Regression: the message said that stdout cannot be written."""

    def write_header(_: gguf.GGUFWriter) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    source = write_model(tmp_path / "hf", replace(ARGS, dtype="float32"))
    monkeypatch.setattr(gguf.GGUFWriter, "write_header_to_file", write_header)
    argv = ["reshard", str(source), str(tmp_path / "x.gguf"), "--format", "gguf"]
    assert main(argv) == 1
    assert "temporary files: No space left on device; free space" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_llama3_scaling_becomes_a_tensor_of_factors(tmp_path):
    folder = rounded(write_hf(TINY_MODELS["9/3 llama3, wide heads"], tmp_path / "hf"))
    path = written(folder, tmp_path / "written.gguf", dtype="float32")
    _, data = tensors_of(path)["rope_freqs.weight"]
    config = AutoConfig.from_pretrained(folder)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, CPU)
    plain = config.rope_parameters["rope_theta"] ** -(
        torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    )
    torch.testing.assert_close(
        torch.from_numpy(np.frombuffer(data, np.float32).copy()), (plain / scaled).float()
    )
    assert tensors_of(written(path, tmp_path / "again.gguf")) == tensors_of(path)
    assert same_bytes(read(path), {name: own.float() for name, own in read(folder).items()})


@pytest.mark.parametrize(
    ("share", "copies"), [(0.0, False), (0.5, False), (0.99, False), (0.5, True)]
)
def test_an_interrupted_run_leaves_no_file_and_is_continued(share, copies, tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_writer, "FLUSH_BYTES", 1 << 12)
    folder = write_model(tmp_path / "hf", ARGS)
    if copies:
        folder = written(folder, tmp_path / "copied.gguf", quant="q4_0")
    expected = written(folder, tmp_path / "expected.gguf").read_bytes()
    left, write = [int(share * len(expected))], DirectFile.write

    def full(self: DirectFile, data: memoryview, offset: int) -> None:
        left[0] -= len(data)
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, data, offset)

    target = tmp_path / "target.gguf"
    with monkeypatch.context() as patched:
        patched.setattr(DirectFile, "write", full)
        with pytest.raises(WriteError, match="no space"):
            written(folder, target)
    assert not target.exists()
    with pytest.raises(UsageError, match="--resume"):
        written(folder, target)
    with pytest.raises(UsageError, match="unfinished run had"):
        written(folder, target, quant="q8_0", resume=True)
    written(folder, target, resume=True)
    assert target.read_bytes() == expected
    assert not partial_path(target).exists()


def test_resume_rewrites_all_data_if_a_run_ended_after_its_rename(tmp_path, monkeypatch):
    """A journal that outlives its file would let --resume skip tensors of a new, empty file."""
    folder, target = write_model(tmp_path / "hf", ARGS), tmp_path / "target.gguf"
    expected = written(folder, tmp_path / "expected.gguf").read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr("shutil.rmtree", lambda *_, **__: None)  # ends after the rename
        written(folder, target)
    assert target.read_bytes() == expected
    target.unlink()
    written(folder, target, resume=True)
    assert target.read_bytes() == expected


def test_byte_level_bpe_tokenizer_restores_its_gguf_fields(tmp_path):
    for name, data in export_gguf_tokenizer(SMOLLM2).items():
        (tmp_path / name).write_bytes(data)
    original = read_gguf_header(SMOLLM2).fields
    defaults = load_generation_defaults(find_model(str(SMOLLM2)))
    fields = tokenizer_fields(tmp_path, 49152, defaults)
    assert fields == {key: original[key] for key in fields} | {
        "tokenizer.ggml.add_bos_token": False
    }
    longer = tokenizer_fields(tmp_path, 49155, defaults)
    assert longer["tokenizer.ggml.tokens"][-3:] == ["[PAD49152]", "[PAD49153]", "[PAD49154]"]
    assert longer["tokenizer.ggml.token_type"][-3:] == [5, 5, 5]


def test_a_sentencepiece_tokenizer_is_written_with_its_scores(tmp_path):
    """The model has more rows than the tokenizer has tokens."""
    folder = write_model(tmp_path / "hf", replace(ARGS, vocab_size=1003))
    proto = parse_spm(MISTRAL_V1.read_bytes(), "v1")
    del proto.pieces[1000:]
    (folder / "tokenizer.model").write_bytes(proto.SerializeToString())
    path = written(folder, tmp_path / "written.gguf", dtype="bfloat16")
    text = " Hello  World's\n\t123 \u4f60\u597d \U0001f600"
    one, other = load_tokenizer(folder), load_tokenizer(path)
    assert one.encode(text) == other.encode(text)
    assert (one.bos_id, one.eos_ids) == (other.bos_id, other.eos_ids)
    fields = fields_of(path)
    assert fields["tokenizer.ggml.model"] == "llama"
    for key, values in {
        "tokens": [piece.piece for piece in proto.pieces]
        + [f"[PAD{id}]" for id in range(1000, 1003)],
        "scores": [piece.score for piece in proto.pieces] + [-10000.0] * 3,
        "token_type": [piece.type for piece in proto.pieces] + [5] * 3,
    }.items():
        assert fields[f"tokenizer.ggml.{key}"] == values


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("8/2 mistral, window", "sliding_window=7: a GGUF file of the architecture 'llama' cannot"),
        ("8/4 qwen3_moe, tied", "normed_experts=False"),
        (
            "8/2 glm",
            "'glm' models cannot be written as GGUF; supported: llama, llama4_text, mistral,",
        ),
        ("6/6 dynamic", "rope_scaling=.*'dynamic'.* cannot state this"),
        ("8/4 gemma2", "attention_scale=0.277"),
        ("9/3", "is in float64, which llama.cpp does not read; use --dtype float32"),
    ],
)
def test_model_that_gguf_cannot_express_is_refused(name, message, tmp_path):
    folder = write_hf(TINY_MODELS[name], tmp_path / "hf")
    dtype = None if "float64" in message else "float32"
    with pytest.raises(UsageError, match=message):
        written(folder, tmp_path / "target.gguf", dtype=dtype)
    assert not [path for path in tmp_path.iterdir() if "target" in path.name]


def test_experts_of_one_tensor_in_two_dtypes_are_refused(tmp_path):
    """Experts with rows of different lengths in bytes would overwrite each other."""
    made = write_hf(TINY_MODELS["8/2 mixtral"], tmp_path / "made")
    folder = moved(made, tmp_path / "hf", "hf", dtype="float32")
    (path,) = folder.glob("*.safetensors")
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith("experts.1.w2.weight"))
    save_file(tensors | {name: tensors[name].bfloat16()}, path)
    message = r"experts\.1\.w2\.weight: would be BF16, and .*experts\.0\.w2\.weight would be F32"
    with pytest.raises(UsageError, match=message):
        written(folder, tmp_path / "target.gguf")
    written(folder, tmp_path / "target.gguf", dtype="float32")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["folder", "--format", "gguf"], "use a name that ends in .gguf"),
        (["a.gguf", "--format", "gguf", "--tp", "2"], "writes one file; leave out --tp"),
        (["a.gguf", "--format", "gguf", "--quant", "fp8"], "written GGUF files support"),
        (["folder", "--format", "native", "--tp", "1", "--quant", "Q8_0"], "only GGUF files have"),
        (["folder", "--format", "native"], "reshard needs --tp N"),
    ],
)
def test_incompatible_flags_are_refused_and_nothing_is_written(
    flags, message, tmp_path, monkeypatch, capsys
):
    write_model(tmp_path / "hf", ARGS)
    monkeypatch.chdir(tmp_path)
    assert main(["reshard", "hf", *flags]) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_dtype_with_quant_stored_between_gguf_files_is_refused(tmp_path):
    write_gguf(tmp_path / "source.gguf", ARGS, weights_of(ARGS), {"wq.weight": "Q8_0"})
    with pytest.raises(UsageError, match="copied unchanged from one GGUF file to another"):
        written(tmp_path / "source.gguf", tmp_path / "a.gguf", quant="stored", dtype="float16")


def test_tokenizer_that_gguf_cannot_express_is_refused(tmp_path):
    """Another type of tokenizer, too many tokens for the model, and an unknown pre-tokenizer."""
    words = Tokenizer(models.BPE({"a": 0}, []))
    words.decoder = decoders.Metaspace()
    words.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UsageError, match="tokenizer cannot be written to a GGUF file"):
        tokenizer_fields(tmp_path, 10, GenerationDefaults())
    write_tokenizer(tmp_path)
    with pytest.raises(UsageError, match="has 211 tokens and the model 210"):
        tokenizer_fields(tmp_path, 210, GenerationDefaults())
    contents = json.loads((tmp_path / "tokenizer.json").read_text())
    contents["pre_tokenizer"]["add_prefix_space"] = True
    (tmp_path / "tokenizer.json").write_text(json.dumps(contents))
    with pytest.raises(UsageError, match="splits text by a rule that has no known name"):
        tokenizer_fields(tmp_path, 211, GenerationDefaults())


@pytest.mark.parametrize("sampled", [{}, {"do_sample": True, "temperature": 0.5, "top_k": 20}])
def test_sampling_settings_are_written_with_the_repetition_penalty(tmp_path, sampled):
    """Regression: the penalty was left out."""
    folder = write_model(tmp_path / "hf", ARGS)
    settings = {**sampled, "repetition_penalty": 1.25}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    path = written(folder, tmp_path / "written.gguf")
    assert fields_of(path)["general.sampling.penalty_last_n"] == -1
    settings.pop("do_sample", None)
    assert load_generation_defaults(find_model(str(path))).sampling == settings


def test_settings_of_smollm2_that_its_file_does_not_state_are_written(tmp_path):
    """Regression: they were left out, so the written file decoded greedily."""

    def sampling(source: ModelFiles) -> dict[str, object]:
        fields = gguf_file_fields(source, load_model_args(source), {"output.weight": "Q8_0"})
        start = "general.sampling."
        return {key.removeprefix(start): fields[key] for key in fields if key.startswith(start)}

    smollm2 = find_model("smollm2")
    assert sampling(smollm2) == {"temp": 0.2, "top_p": 0.9}
    assert sampling(replace(smollm2, sampling={})) == {}
    folder = write_model(tmp_path / "hf", ARGS)
    settings = {"do_sample": True, "temperature": 0.5, "top_k": 20}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    own = find_model(str(written(folder, tmp_path / "own.gguf")))
    assert sampling(replace(own, sampling=smollm2.sampling)) == {
        "temp": 0.5, "top_p": 0.9, "top_k": 20,
    }  # fmt: skip


@pytest.mark.parametrize("temperature", [None, 0.5])
def test_filters_of_a_gguf_file_without_temperature_are_left_out_with_a_warning(
    caplog, temperature
):
    """generation_config.json has filters only with do_sample, which also sets a temperature."""
    defaults = GenerationDefaults(temperature, top_k=64, repetition_penalty=1.25)
    files = sidecar_files(find_model(str(SMOLLM2)), defaults)
    expected = {"do_sample": False, "repetition_penalty": 1.25}
    if temperature:
        expected |= {"do_sample": True, "temperature": 0.5, "top_k": 64}
    assert json.loads(files["generation_config.json"]) == expected
    assert ("written without top_k of" in caplog.text) == (not temperature)
