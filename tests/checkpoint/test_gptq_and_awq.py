"""HF folders quantised by GPTQ and AWQ, kept in their formats on any number of ranks."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from packed_folders import KINDS, is_projection, meant_by, random_matrix, write_packed
from reshard_samples import moved
from safetensors.torch import load_file, save_file
from thread_ranks import run_on_threads
from tiny_models import TinyModel, write_hf
from transformers_oracle import reference_logits

from parallel_llama import LLM, SamplingParams
from parallel_llama.checkpoint.byte_ranges import MatrixBlock
from parallel_llama.checkpoint.quantised import PackedMatrix, read_packed
from parallel_llama.checkpoint.reading import load, open_checkpoint
from parallel_llama.checkpoint.verify import verify
from parallel_llama.cli.main import main
from parallel_llama.config.layouts import (
    default_quant,
    load_model_args,
    stored_formats,
    why_decoded,
)
from parallel_llama.config.quantised import HF_QUANTS, packing_of
from parallel_llama.dtypes import Precision, make_precision
from parallel_llama.engine.model_runner import ModelRunner
from parallel_llama.engine.step_buffer import Chunk
from parallel_llama.errors import CheckpointError, DamagedWeights, UsageError
from parallel_llama.families import parameters
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.families.stored_slices import StoredSlice
from parallel_llama.files.model_files import find_model
from parallel_llama.memory import values_by_form, weight_bytes
from parallel_llama.ops.quant import QuantMatrix
from parallel_llama.parallel.collectives import Solo
from parallel_llama.plan import make_plan

# Heads of 32 end inside groups of 128; rows of w2 have five groups.
TINY = TinyModel(8, 2, 32, 256, ffn_dim=640, vocab_size=101, attention_bias=True)
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 89, 79, 32, 38]
TP_SIZES = (1, 2, 3, 5, 8)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf(TINY, tmp_path_factory.mktemp("source") / "hf")


@pytest.fixture(scope="module")
def made(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of each kind."""
    home = tmp_path_factory.mktemp("made")
    return {kind: write_packed(source, home / kind, kind) for kind in KINDS}


def precision_of(path: Path, quant: str | None = None, dtype: str = "float32") -> Precision:
    files = find_model(str(path))
    args = load_model_args(files)
    found = stored_formats(files, args)
    return make_precision(args, dtype, "cpu", quant or default_quant(files, args, dtype), found)


def loaded(path: Path, tp_size: int, quant: str | None = None) -> list[list[torch.Tensor]]:
    """The values that every rank holds, in the order in which it loads them."""
    files, precision = find_model(str(path)), precision_of(path, quant)
    args = load_model_args(files)
    checkpoint = open_checkpoint(files, args)
    shards = make_plan(args, tp_size, quant_group_size=precision.quant_group_size).shards
    ranks = []
    for shard in shards:
        counts: list[int] = []
        parts = list(load(checkpoint, args, shard, precision, CPU, counts.append))
        assert sum(counts) == weight_bytes(shard, values_by_form(args, precision))
        ranks.append([p.values() if isinstance(p, QuantMatrix) else p.float() for _, p in parts])
    checkpoint.close()
    return ranks


def logits_of(comm: Solo, path: Path, quant: str | None = None, dtype: str = "float32"):
    files, precision = find_model(str(path)), precision_of(path, quant, dtype)
    args = load_model_args(files)
    plan = make_plan(args, comm.size, quant_group_size=precision.quant_group_size)
    checkpoint = open_checkpoint(files, args)
    runner = ModelRunner.load(args, checkpoint, plan, comm, precision=precision, device=CPU)
    runner.reserve([4] * len(runner.kv_groups), 8)
    tables = [range(4)] * len(runner.kv_groups)
    return runner.logits(runner.forward([Chunk(TOKENS, 0, tables, len(TOKENS))]))


# The packing of integers


@pytest.mark.parametrize("size", HF_QUANTS)
@pytest.mark.parametrize("kind", KINDS)
def test_slices_of_quantised_matrices_have_exact_values(kind, size):
    matrix = random_matrix(40, 384, size)
    tensors = matrix.packed(kind)
    packing = packing_of({"quantization_config": {**KINDS[kind], "group_size": size}})

    def read(end: str, rows: range, columns: range) -> torch.Tensor:
        held = tensors[end][rows.start : rows.stop, columns.start : columns.stop]
        return held.contiguous().view(torch.uint8)

    for rows in (range(40), range(8, 24), range(3, 9), range(17, 18), range(5, 5)):
        for columns in (range(384), range(32, 64), range(96, 320), range(160, 160)):
            groups = read_packed(packing, packing.form, MatrixBlock(384, rows, columns), read)
            assert groups.form == HF_QUANTS[size]
            expected = matrix.values[rows.start : rows.stop, columns.start : columns.stop]
            assert torch.equal(groups.values().double(), expected)


# Only GPTQ has these: bits, group_size and desc_act of matrices that are decoded.
DECODED = [(8, 128, False), (4, 128, True), (8, 32, True), (2, 64, False), (4, -1, False)]


@pytest.mark.parametrize("kind", ["gptq", "gptq_v2"])
@pytest.mark.parametrize(("n_bits", "size", "any_order"), DECODED)
def test_slices_of_decoded_matrices_have_exact_values(n_bits, size, any_order, kind):
    size_or_all = 384 if size == -1 else size
    groups = torch.randperm(384).numpy() // size_or_all if any_order else None
    matrix = random_matrix(48, 384, size_or_all, n_bits, groups)
    tensors = matrix.packed(kind)
    stated = {"bits": n_bits, "group_size": size, "desc_act": any_order}
    packing = packing_of({"quantization_config": {**KINDS[kind], **stated}})
    packed = PackedMatrix(packing, StoredSlice("weight", (48, 384), 0, 1, 1))

    def read(end: str, rows: range, columns: range) -> torch.Tensor:
        held = tensors[end].view(-1, tensors[end].shape[-1])[rows.start : rows.stop]
        return held[:, columns.start : columns.stop].contiguous().view(torch.uint8)

    for rows in (range(48), range(16, 32), range(3, 21), range(17, 18), range(5, 5)):
        for columns in (range(384), range(32, 64), range(5, 301), range(160, 160)):
            part = packed.values(MatrixBlock(384, rows, columns), read)
            expected = matrix.values[rows.start : rows.stop, columns.start : columns.stop]
            assert torch.equal(part.double(), expected)


@pytest.mark.parametrize(("n_bits", "size", "any_order"), DECODED[:3])
def test_decoded_gptq_logits_match_transformers_and_bad_g_idx_is_refused(
    n_bits, size, any_order, source, tmp_path
):
    """Regression: folders of these formats were refused."""
    stated = {"bits": n_bits, "desc_act": any_order}
    folder = write_packed(source, tmp_path / "gptq", "gptq", size, **stated)
    expected = reference_logits(meant_by(folder), TOKENS)
    for tp_size in (1, 3, 7):
        ours = torch.cat(run_on_threads(tp_size, logits_of, folder, None, "float64"), 1)
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-10)
    files = find_model(str(folder))
    line = why_decoded(files, load_model_args(files), "bfloat16") or ""
    assert f"in GPTQ int{n_bits}{any_order * ' with desc_act'} are decoded to bfloat16" in line
    if any_order:
        rewritten(folder, {f"{Q_PROJ}.g_idx": torch.full((256,), 256 // size, dtype=torch.int32)})
        with pytest.raises(DamagedWeights, match=r"q_proj\.g_idx' has input 0 in group \d of \d"):
            loaded(folder, 1)
        rewritten(folder, {f"{Q_PROJ}.g_idx": None})
        with pytest.raises(CheckpointError, match=r"missing: .*q_proj\.g_idx"):
            loaded(folder, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_every_rank_loads_its_slice_of_dequantised_weights_exactly(kind, made):
    args = load_model_args(find_model(str(made[kind])))
    (wholes,) = loaded(meant_by(made[kind]), 1)
    for tp_size in TP_SIZES:
        for quant, group in (("stored", 128), ("none", 1)):
            shards = make_plan(args, tp_size, quant_group_size=group).shards
            for shard, ours in zip(shards, loaded(made[kind], tp_size, quant), strict=True):
                for param, part, whole in zip(parameters(args), ours, wholes, strict=True):
                    rows = shard.rows_of(param)
                    assert torch.equal(part, whole.narrow(param.dim, rows.start, len(rows)))


def test_channels_are_sharded_in_whole_quant_groups(made):
    """Some of the 8 ranks get no group; Qwen 2.5 72B has 231 groups."""
    precision = precision_of(made["awq"])
    assert precision.quant_group_size == 128
    args = load_model_args(find_model(str(made["awq"])))
    shards = make_plan(args, 8, quant_group_size=precision.quant_group_size).shards
    assert sorted(len(shard.ffn) for shard in shards) == [0, 0, 0, *[128] * 5]
    large = ModelArgs(
        dim=8192, n_layers=80, n_heads=64, n_kv_heads=8, head_dim=128, ffn_dim=29568,
        vocab_size=152064,
    )  # fmt: skip
    shards = make_plan(large, 2, quant_group_size=precision.quant_group_size).shards
    assert [len(shard.ffn) // 128 for shard in shards] == [116, 115]


# Logits and tokens


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_logits_match_transformers_with_dequantised_weights(kind, made):
    """Within 1e-10 in float64; matrices that run as stored also round inputs to 8 bits."""
    expected = reference_logits(meant_by(made[kind]), TOKENS)
    whole = logits_of(Solo(), made[kind])
    assert (whole - expected).norm() < 0.02 * expected.norm()
    assert torch.equal(whole.argmax(1), expected.argmax(1))
    for tp_size in TP_SIZES:
        exact = torch.cat(run_on_threads(tp_size, logits_of, made[kind], "none", "float64"), 1)
        torch.testing.assert_close(exact, expected, rtol=0, atol=1e-10)
        ours = torch.cat(run_on_threads(tp_size, logits_of, made[kind]), 1)
        assert (ours - whole).norm() < 0.01 * whole.norm()
        assert torch.equal(ours.argmax(1), expected.argmax(1))


@pytest.mark.slow
def test_greedy_tokens_of_three_ranks_equal_those_of_one_rank(made):
    """No flag is needed to run the folder as stored."""
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)

    def tokens(tp_size: int) -> tuple[int, ...]:
        with LLM(str(made["awq"]), tp_size=tp_size, device="cpu", kv_cache_bytes=4 << 20) as llm:
            assert llm.quant == "stored"
            return llm.generate([TOKENS], params)[0].tokens

    expected = tokens(1)
    assert len(expected) == 12
    assert tokens(3) == expected


@pytest.mark.slow
def test_unconverted_modules_stay_plain_and_lm_head_may_be_quantised(source, tmp_path):
    """modules_to_not_convert excludes a part of a layer."""

    def is_quantised(name: str) -> bool:
        return name == "lm_head.weight" or (is_projection(name) and "layers.1.mlp" not in name)

    source = write_hf(TinyModel(8, 2, 32, 256, ffn_dim=640, vocab_size=104), tmp_path / "hf")
    folder = write_packed(
        source, tmp_path / "awq", "awq", 64, is_quantised, modules_to_not_convert=["layers.1.mlp"]
    )
    stored = precision_of(folder).stored or {}
    assert stored.keys() == {
        param.name
        for param in parameters(load_model_args(find_model(str(folder))))
        if param.kind == "matrix" and "layers.1.feed_forward" not in param.name
    } | {"output.weight"}
    expected = reference_logits(meant_by(folder), TOKENS)
    for tp_size in (1, 3):
        ours = torch.cat(run_on_threads(tp_size, logits_of, folder), 1)
        assert (ours - expected).norm() < 0.02 * expected.norm()


# Rules of GPTQModel, and the 8-bit and smaller groups that they give to modules of `with_rules`.
RULES = {
    r"-:.*\.1\.mlp\.down_proj": {},
    r"+:.*\.0\.mlp\.(gate|up)_proj$": {"bits": 8, "group_size": 64},
    r".*\.0\.mlp": {"group_size": 32, "mse": 0.0},
    r"model\.layers\.1\.self_attn\.[vo]": {"desc_act": True},
    r"+:proj": {"bits": 3},
}
BY_RULE = [
    (r"0\.mlp\.(gate|up)", {"size": 64, "bits": 8}),
    (r"0\.mlp\.down", {"size": 32}),
    (r"1\.self_attn\.[vo]", {"desc_act": True}),
]


def with_rules(source: Path, folder: Path) -> Path:
    """Writes a GPTQ folder. RULES say how each module is quantised."""
    is_plain = re.compile(r"1\.mlp\.down")

    def is_quantised(name: str) -> bool:
        return is_projection(name) and not is_plain.search(name)

    write_packed(source, folder, "gptq", is_quantised=is_quantised, dynamic=RULES)
    for number, (modules, own) in enumerate(BY_RULE):
        other = write_packed(source, folder.with_name(f"{number}"), "gptq", **own)
        for to, of in ((folder, other), (meant_by(folder), meant_by(other))):
            tensors = load_file(of / "model.safetensors")
            rewritten(to, {n: t for n, t in tensors.items() if re.search(modules, n)})
    return folder


def test_gptq_modules_have_the_bits_and_groups_of_their_dynamic_rule(source, tmp_path):
    """Regression: rules were ignored, and the tensors called misshapen."""
    folder = with_rules(source, tmp_path / "gptq")
    files = find_model(str(folder))
    args = load_model_args(files)
    stored = stored_formats(files, args)
    assert stored["layers.0.feed_forward.w2.weight"] == HF_QUANTS[32]
    assert stored["layers.0.attention.wq.weight"] == HF_QUANTS[128]
    assert "layers.1.feed_forward.w2.weight" not in stored
    line = why_decoded(files, args, "bfloat16") or ""
    assert "in GPTQ int4 with desc_act, GPTQ int8 are decoded" in line
    (wholes,) = loaded(meant_by(folder), 1)
    for tp_size in (1, 3):
        group = precision_of(folder).quant_group_size
        shards = make_plan(args, tp_size, quant_group_size=group).shards
        for shard, ours in zip(shards, loaded(folder, tp_size), strict=True):
            for param, part, whole in zip(parameters(args), ours, wholes, strict=True):
                rows = shard.rows_of(param)
                assert torch.equal(part, whole.narrow(param.dim, rows.start, len(rows)))


@pytest.mark.parametrize(
    ("dynamic", "message"),
    [
        (
            {r"+:.*\.0\..*q_proj": {"bits": 3}},
            r"model\.layers\.0\.self_attn\.q_proj: by the rule '\+:\.\*\\\\\.0.*q_proj' of dynamic "
            r"in quantization_config: bits=3 is not supported; 2, 4, 8 are; use the unquantised",
        ),
        ({"+:(a+)+": {"bits": 8}}, r"the pattern .* is not supported"),
        ({"+:a": 8}, r"\+:a=8 is not an object"),
        ([], "dynamic=<list of 0> is not an object"),
    ],
)
def test_dynamic_rule_that_cannot_be_read_is_refused_by_name(dynamic, message, made, tmp_path):
    folder = shutil.copytree(made["gptq"], tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["dynamic"] = dynamic
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises((CheckpointError, UsageError), match=message):
        precision_of(folder)


FAMILIES = {
    "falcon": TinyModel(
        8, 2, 32, 256, ffn_dim=512, vocab_size=101, family="falcon",
        own={"new_decoder_architecture": True, "bias": True},
    ),
    "qwen3_moe": TinyModel(
        4, 2, 32, 128, ffn_dim=256, vocab_size=101, family="qwen3_moe",
        own={"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 256},
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ("gptq", "awq"))
def test_logits_of_fused_tensors_and_experts_match_transformers(kind, family, tmp_path):
    """Falcon stores queries, keys and values in one tensor, KV head by KV head."""

    def is_quantised(name: str) -> bool:
        is_plain = "norm" in name or ".ln_" in name or name.endswith((".gate.weight", ".bias"))
        return not is_plain and (".layers." in name or ".h." in name)

    source = write_hf(FAMILIES[family], tmp_path / "hf")
    folder = write_packed(source, tmp_path / kind, kind, 64, is_quantised)
    expected = reference_logits(meant_by(folder), TOKENS)
    for tp_size in (1, 3):
        exact = torch.cat(run_on_threads(tp_size, logits_of, folder, "none", "float64"), 1)
        torch.testing.assert_close(exact, expected, rtol=0, atol=1e-10)
        ours = torch.cat(run_on_threads(tp_size, logits_of, folder), 1)
        assert (ours - expected).norm() < 0.02 * expected.norm()


def test_unexpected_bias_is_ignored_only_if_it_is_zero(tmp_path):
    """Early GPTQ programs wrote a bias of zeros for every matrix."""
    source = write_hf(TinyModel(4, 2, 32, 128, ffn_dim=128), tmp_path / "hf")
    folder = write_packed(source, tmp_path / "gptq", "gptq")
    name = "model.layers.1.self_attn.o_proj.bias"
    rewritten(folder, {name: torch.zeros(128, dtype=torch.float16)})
    assert len(loaded(folder, 2)) == 2
    rewritten(folder, {name: torch.ones(128, dtype=torch.float16)})
    with pytest.raises(CheckpointError, match=rf"'{name}' is not zero, and the model .* no such"):
        loaded(folder, 1)


# Other layouts, and commands


@pytest.mark.slow
@pytest.mark.parametrize("kind", ("gptq", "awq"))
def test_decoded_values_after_reshard_equal_loaded_values_bit_for_bit(kind, made, tmp_path):
    """Folders of two and three files, loaded by one and by three ranks."""
    hf = moved(made[kind], tmp_path / "hf", "hf", 2, dtype="float32")
    assert "quantization_config" not in json.loads((hf / "config.json").read_text())
    native = moved(made[kind], tmp_path / "native", "native", 3, quant="none", dtype="float32")
    for folder in (hf, native, moved(native, tmp_path / "meta", "meta", 2)):
        for tp_size in (1, 3):
            pairs = zip(loaded(folder, tp_size), loaded(made[kind], tp_size, "none"), strict=True)
            for ours, theirs in pairs:
                assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert verify(str(made[kind])).ok
    assert verify(str(hf), str(native)).ok


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("hf", r"with --dtype, or keep the weights quantised with --format native --quant stored$"),
        ("meta --dtype float16 --quant stored", "only native folders and GGUF files support quant"),
        (
            "gguf",
            r"wq\.weight: is in int4 with minima by 128, and written GGUF files support int8, .*; "
            "use --quant int8 or int4, or --quant none with a --dtype",
        ),
    ],
)
def test_reshard_refuses_formats_that_cannot_hold_the_quant_groups(
    flags, expected, made, tmp_path, capsys
):
    argv = ["reshard", str(made["gptq"]), str(tmp_path / "x.gguf"), "--tp", "1", "--format"]
    assert main([*argv, *flags.split()]) == 2
    assert re.search(expected, capsys.readouterr().err.strip())
    assert not list(tmp_path.iterdir())


def test_plan_reports_stored_quant_and_weight_bytes_of_every_rank(made, capsys):
    argv = ["plan", "--model", str(made["awq"]), "--nproc", "3", "--device", "cpu", "--json"]
    assert main(argv) == 0
    answer = json.loads(capsys.readouterr().out)
    precision = precision_of(made["awq"])
    args = load_model_args(find_model(str(made["awq"])))
    shards = make_plan(args, 3, quant_group_size=128, exact=True).shards
    values = values_by_form(args, precision, exact=True)
    expected = [weight_bytes(shard, values) for shard in shards]
    assert answer["quant"] == "stored"
    assert [rank["weight_bytes"] for rank in answer["ranks"]] == expected
    # 4 bits, a zero for every 32 inputs, and 4 bytes for every 128.
    assert HF_QUANTS[128].n_bytes(1024) == 512 + 32 + 32


# Folders that are refused


def rewritten(folder: Path, changed: dict[str, torch.Tensor | None]) -> None:
    """Replace tensors of a folder; a tensor that is None is removed."""
    path = folder / "model.safetensors"
    tensors = {**load_file(path), **changed}
    save_file({name: t for name, t in tensors.items() if t is not None}, path, {"format": "pt"})


Q_PROJ = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (
            {f"{Q_PROJ}.g_idx": torch.arange(256, dtype=torch.int32) % 2},
            "q_proj.g_idx' has input 1 in group 1, expected 0: .*states desc_act=true",
        ),
        ({f"{Q_PROJ}.qzeros": None}, r"missing: .*q_proj\.qzeros"),
        ({f"{Q_PROJ}.weight": torch.zeros(256, 256)}, r"extra: '.*q_proj\.weight'"),
        (
            {f"{Q_PROJ}.scales": torch.zeros(4, 256, dtype=torch.float16)},
            r"misshapen: .*q_proj\.scales is \[4, 256\], expected \[2, 256\]",
        ),
        (
            {f"{Q_PROJ}.scales": torch.zeros(2, 256, dtype=torch.bfloat16)},
            r"q_proj\.scales' has the dtype BF16; .* F16 for scales",
        ),
        (
            {f"{Q_PROJ}.qzeros": torch.zeros(2, 32, dtype=torch.int64)},
            r"q_proj\.qzeros' has the dtype I64",
        ),
        (
            {"model.layers.0.mlp.gate.qweight": torch.zeros(2, 32, dtype=torch.int32)},
            "gate.qweight' is part of a quantised weight",
        ),
        (
            {f"{Q_PROJ}.qweight": None},
            r"q_proj\.\w+' is part of a quantised weight.* its other tensors are missing",
        ),
    ],
)
def test_tensors_that_contradict_config_json_are_refused(changed, expected, made, tmp_path):
    folder = shutil.copytree(made["gptq"], tmp_path / "model")
    rewritten(folder, changed)
    with pytest.raises(CheckpointError, match=expected):
        loaded(folder, 1)


def test_infinite_scale_is_refused(made, tmp_path):
    folder = shutil.copytree(made["awq"], tmp_path / "model")
    scales = load_file(folder / "model.safetensors")[f"{Q_PROJ}.scales"]
    scales[1, 7] = torch.inf
    rewritten(folder, {f"{Q_PROJ}.scales": scales})
    for quant in ("stored", "none"):
        with pytest.raises(DamagedWeights, match=r"wq\.weight: .* NaN or Inf"):
            loaded(folder, 1, quant)


def test_pickled_files_and_sizes_that_do_not_fill_words_are_refused(made, tmp_path):
    folder = shutil.copytree(made["awq"], tmp_path / "model")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="'awq' are read from safetensors only"):
        precision_of(folder)
    source = write_hf(TinyModel(4, 2, 32, 128, ffn_dim=128, vocab_size=101), tmp_path / "odd")
    odd = write_packed(source, tmp_path / "odd-gptq", "gptq")
    words = torch.zeros(16, 101, dtype=torch.int32)
    rewritten(odd, {"lm_head.qweight": words, "lm_head.weight": None})
    with pytest.raises(CheckpointError, match=r"lm_head\.qweight: has 101 outputs and 128 inputs"):
        precision_of(odd)


def test_plain_tensors_stay_plain_despite_quantization_config(source, tmp_path):
    """The tensors show which matrices are quantised; config.json states how."""
    folder = write_packed(source, tmp_path / "model", "awq", is_quantised=lambda _: False)
    assert precision_of(folder).quant == "none"
    with pytest.raises(UsageError, match="use int8, int4 or fp8"):
        precision_of(folder, "stored")
