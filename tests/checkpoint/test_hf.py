"""HF folders: reads of every slice of every tensor, and errors for every kind of wrong file."""

import json
from dataclasses import replace

import pytest
import torch
from checkpoint_samples import TINY, hf_name, weights_of, write_hf, write_safetensors
from reshard_samples import opened

from parallel_llama.checkpoint import byte_ranges
from parallel_llama.checkpoint.reading import open_checkpoint
from parallel_llama.checkpoint.torch_file import read_torch_header
from parallel_llama.errors import CheckpointError
from parallel_llama.families import parameters
from parallel_llama.files import safetensors_header as header_module
from parallel_llama.files.safetensors_header import read_safetensors_header
from parallel_llama.plan import make_plan


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_the_ranks_together_read_every_weight(tmp_path, dtype):
    weights = weights_of(TINY, dtype)
    checkpoint = opened(write_hf(tmp_path, weights, n_files=3))
    for tp_size in range(1, 10):
        for param in parameters(TINY):
            whole, held = weights[param.name], set()
            for shard in make_plan(TINY, tp_size).shards:
                rows = shard.rows_of(param)
                part = checkpoint.read(param, rows)
                assert part.dtype == dtype and part.is_contiguous()
                assert torch.equal(part, whole.narrow(param.dim, rows.start, len(rows)))
                held.update(rows)
            assert held == set(range(param.shape[param.dim]))


def test_read_continues_after_a_short_system_call(tmp_path, monkeypatch):
    """A read returns at most 2 GiB, and may return less than requested at any time."""
    whole_read = byte_ranges.os.preadv
    monkeypatch.setattr(
        byte_ranges.os, "preadv", lambda fd, to, at: whole_read(fd, [to[0][:100]], at)
    )
    weights = weights_of(TINY)
    checkpoint = opened(write_hf(tmp_path, weights))
    for param in parameters(TINY):
        rows = range(param.shape[param.dim])
        assert torch.equal(checkpoint.read(param, rows), weights[param.name])


def test_known_extra_tensors_are_ignored(tmp_path):
    args = replace(TINY, tied_embeddings=True)
    tensors = {hf_name(name): whole for name, whole in weights_of(args).items()}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.1.self_attn.rotary_emb.inv_freq"] = torch.ones(2)
    opened(write_safetensors(tmp_path, tensors), args)


def test_missing_extra_and_misshapen_tensors_are_listed_together(tmp_path):
    tensors = {hf_name(name): whole for name, whole in weights_of(TINY).items()}
    del tensors["model.layers.1.self_attn.q_proj.bias"]
    tensors["model.layers.0.mlp.up_proj.scale"] = torch.ones(1)
    tensors["model.norm.weight"] = torch.ones(37)
    checkpoint = open_checkpoint(write_safetensors(tmp_path, tensors), TINY)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.check(TINY)
    text = str(caught.value)
    assert "missing: model.layers.1.self_attn.q_proj.bias;" in text
    assert "extra: 'model.layers.0.mlp.up_proj.scale';" in text
    assert "misshapen: model.norm.weight is [37], expected [36];" in text


def test_a_long_list_of_faults_is_cut(tmp_path):
    files = write_hf(tmp_path, weights_of(TINY))
    args = replace(TINY, n_layers=5)
    with pytest.raises(CheckpointError, match=r"\.\.\. and 38 more"):
        open_checkpoint(files, args).check(args)


def test_lm_head_is_accepted_for_untied_and_tied_models(tmp_path):
    files = write_hf(tmp_path, weights_of(TINY))
    opened(files)
    opened(files, replace(TINY, tied_embeddings=True))


@pytest.mark.parametrize("end", ["qweight", "qzeros", "weight.absmax", "weight_scale_inv"])
def test_quantised_tensors_without_quantization_config_are_named(tmp_path, end):
    name = f"model.layers.0.mlp.up_proj.{end}"
    tensors = {hf_name(n): t for n, t in weights_of(TINY).items()}
    files = write_safetensors(tmp_path, {**tensors, name: torch.zeros(3, dtype=torch.int32)})
    files.config.write_text("{}")
    expected = rf"model\.safetensors: tensor '{name}' is part of a quantised.*or a GGUF file of it"
    with pytest.raises(CheckpointError, match=expected):
        opened(files)


def test_non_float_dtype_is_refused_with_the_tensor_name(tmp_path):
    weights = weights_of(TINY)
    weights["layers.0.feed_forward.w1.weight"] = torch.ones(50, 36, dtype=torch.int8)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.gate_proj\.weight.* dtype I8"):
        opened(write_hf(tmp_path, weights))


@pytest.mark.parametrize("left", [0, 7, 8, 500, -1])
def test_a_truncated_file_is_refused_with_both_sizes(tmp_path, left):
    path = write_hf(tmp_path, weights_of(TINY)).weights[0]
    data = path.read_bytes()
    path.write_bytes(data[:left])
    with pytest.raises(
        CheckpointError, match=rf"truncated: has {len(data[:left])} bytes, expected"
    ):
        read_safetensors_header(path)


def test_a_file_that_shrinks_after_opening_is_refused(tmp_path):
    files = write_hf(tmp_path, weights_of(TINY))
    checkpoint = opened(files)
    files.weights[0].write_bytes(b"")
    with pytest.raises(CheckpointError, match="changed while it was read"):
        for param in parameters(TINY):
            checkpoint.read(param, range(param.shape[param.dim]))


def test_a_long_header_is_refused_before_it_is_read(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes((1 << 62).to_bytes(8, "little") + b"{}")
    with pytest.raises(CheckpointError, match="claims a header of 4611686018427387904 bytes"):
        read_safetensors_header(path)


GOOD = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
SECOND = {"dtype": "F32", "shape": [2], "data_offsets": [16, 24]}


@pytest.mark.parametrize(
    ("header", "fault"),
    [
        ({"a": {**GOOD, "data_offsets": [0, 12]}}, "claims 12 bytes"),
        ({"a": {**GOOD, "shape": [2, -2]}}, "not a list of at most 8 sizes"),
        ({"a": {**GOOD, "shape": [True, 4]}}, "not a list of at most 8 sizes"),
        ({"a": {**GOOD, "shape": [1 << 64, 4]}}, "not a list of at most 8 sizes"),
        ({"a": {**GOOD, "shape": [1] * 9}}, "not a list of at most 8 sizes"),
        ({"a": {**GOOD, "data_offsets": [16, 0]}}, "not two ascending numbers"),
        ({"a": {**GOOD, "data_offsets": [0]}}, "not two ascending numbers"),
        ({"a": {**GOOD, "data_offsets": [0.0, 16.0]}}, "not two ascending numbers"),
        ({"a": {**GOOD, "dtype": "F33"}}, "unknown dtype 'F33'"),
        ({"a": {**GOOD, "dtype": ["F32"]}}, "unknown dtype"),
        ({"a": {"dtype": "F32", "shape": [2, 2]}}, "needs exactly dtype"),
        ({"a": 7}, "needs exactly dtype"),
        ({"a": GOOD, "b": GOOD}, "overlaps"),
        ({"a": GOOD, "b": {**SECOND, "data_offsets": [20, 28]}}, "leaves a gap"),
        ({"a": {**GOOD, "data_offsets": [8, 24]}}, "leaves a gap"),
        ({"a": GOOD}, "bytes after the last"),
        ([1], "not a JSON object"),
        ("[" * 100_000, "not valid JSON"),
        ("{", "not valid JSON"),
        (b'{"\xff": 1}', "not valid JSON"),
        ('{"a": 1, "a": 2}', "appears twice"),
        ('{"a": ' + "9" * 5000 + "}", "damaged|not valid JSON"),
    ],
)
def test_a_forged_header_is_refused(tmp_path, header, fault):
    path = tmp_path / "model.safetensors"
    text = header if isinstance(header, bytes | str) else json.dumps(header)
    text = text if isinstance(text, bytes) else text.encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(24))
    with pytest.raises(CheckpointError, match=fault):
        read_safetensors_header(path)


def test_header_with_more_than_max_tensors_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(header_module, "MAX_TENSORS", 1)
    path = write_hf(tmp_path, weights_of(TINY)).weights[0]
    with pytest.raises(CheckpointError, match="claims more than 1 tensors"):
        read_safetensors_header(path)


def edit_listing(files, change):
    content = json.loads(files.index.read_text())
    change(content["weight_map"])
    files.index.write_text(json.dumps(content))


def test_an_index_that_names_the_wrong_file_is_refused(tmp_path):
    files = write_hf(tmp_path, weights_of(TINY), n_files=2)
    edit_listing(files, lambda listing: listing.update({"lm_head.weight": files.weights[1].name}))
    with pytest.raises(CheckpointError, match=r"'lm_head.weight' should be in 'model-00002.*00001"):
        open_checkpoint(files, TINY)


def test_index_that_lists_a_tensor_absent_from_all_files_is_refused(tmp_path):
    files = write_hf(tmp_path, weights_of(TINY), n_files=2)
    edit_listing(files, lambda listing: listing.update({"ghost": "../ghost.safetensors"}))
    with pytest.raises(CheckpointError, match=r"'ghost' should be in .* in none of the files"):
        open_checkpoint(files, TINY)


def test_an_index_that_leaves_a_tensor_out_is_refused(tmp_path):
    files = write_hf(tmp_path, weights_of(TINY), n_files=2)
    edit_listing(files, lambda listing: listing.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"not listed: 'lm_head\.weight'"):
        open_checkpoint(files, TINY)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": {"a": 1}}', "[" * 100_000])
def test_index_without_a_valid_weight_map_is_refused(tmp_path, text):
    files = write_hf(tmp_path, weights_of(TINY), n_files=2)
    files.index.write_text(text)
    with pytest.raises(CheckpointError, match=r"not JSON|not an object|needs a weight_map"):
        open_checkpoint(files, TINY)


def test_a_tensor_in_two_files_is_refused(tmp_path):
    files = write_hf(tmp_path, weights_of(TINY), n_files=2)
    files.weights[1].write_bytes(files.weights[0].read_bytes())
    with pytest.raises(CheckpointError, match=r"is in model-00001\S* and in model-00002"):
        open_checkpoint(files, TINY)


def test_error_messages_truncate_long_tensor_names(tmp_path):
    """Regression: a tensor name as long as the header was printed in full."""
    tensors = {hf_name(name): whole for name, whole in weights_of(TINY).items()}
    (tmp_path / "safe").mkdir()
    (tmp_path / "torch").mkdir()
    long = "x" * 100_000
    safe = write_safetensors(tmp_path / "safe", {**tensors, long: torch.ones(1)})
    torch_file = tmp_path / "torch" / "pytorch_model.bin"
    torch.save({**tensors, long: torch.ones(1)}, torch_file)
    for files in (safe, replace(safe, path=torch_file.parent, weights=(torch_file,))):
        with pytest.raises(CheckpointError, match="extra: 'xxx") as caught:
            opened(files)
        assert len(str(caught.value)) < 1000
    torch.save({long: "no tensor"}, torch_file)
    header = json.dumps({long: {**GOOD, "dtype": long}}).encode()
    safe.weights[0].write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    for path, read in ((safe.weights[0], read_safetensors_header), (torch_file, read_torch_header)):
        with pytest.raises(CheckpointError, match=r"unknown dtype|expected a tensor") as caught:
            read(path)
        assert len(str(caught.value)) < 1000
