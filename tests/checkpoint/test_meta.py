"""Meta folders: any number of files gives the same weights, and no file is trusted."""

import logging
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoint_samples import TINY, meta_shards, weights_of, write_meta
from reshard_samples import opened
from torch_archives import assert_not_run, rewritten

from parallel_llama.checkpoint.meta_folder import meta_vocab_size
from parallel_llama.checkpoint.reading import open_checkpoint
from parallel_llama.errors import CheckpointError
from parallel_llama.families import parameters
from parallel_llama.plan import make_plan

# Its heads divide by 1, 2, 4 and 8 files; 8 files hold each of its 4 KV heads twice.
EIGHT = replace(TINY, n_heads=8, n_kv_heads=4, dim=32)


def assert_reads(checkpoint, args, weights, tp_sizes):
    for tp_size in tp_sizes:
        for shard in make_plan(args, tp_size).shards:
            for param in parameters(args):
                rows = shard.rows_of(param)
                part = checkpoint.read(param, rows)
                assert part.is_contiguous()
                whole = weights[param.name].narrow(param.dim, rows.start, len(rows))
                assert torch.equal(part, whole), param.name


@pytest.mark.parametrize("embedding_dim", [0, 1])
@pytest.mark.parametrize("n_files", [1, 2, 4, 8])
def test_any_number_of_files_gives_the_same_weights(tmp_path, n_files, embedding_dim):
    """8 files store each of the 4 KV heads twice, in the order 0, 0, 1, 1 and not 0, 1, 0, 1."""
    weights = weights_of(EIGHT, torch.bfloat16)
    files = write_meta(tmp_path, meta_shards(EIGHT, weights, n_files, embedding_dim))
    assert_reads(opened(files, EIGHT), EIGHT, weights, (1, 3, 8))
    assert meta_vocab_size(files) == EIGHT.vocab_size


@pytest.mark.parametrize("n_files", [2, 3])
def test_files_of_unequal_size_are_joined(tmp_path, n_files):
    """9 heads, 3 KV heads and 50 channels over 2 files; 101 vocabulary rows over 3."""
    weights = weights_of(TINY)
    files = write_meta(tmp_path, meta_shards(TINY, weights, n_files))
    assert_reads(opened(files, TINY), TINY, weights, range(1, 10))


def test_slice_that_cuts_a_head_is_read_in_half_split_order(tmp_path):
    weights = weights_of(TINY)
    checkpoint = opened(write_meta(tmp_path, meta_shards(TINY, weights, 2)), TINY)
    for param in parameters(TINY):
        if ".wq." in param.name:
            part = checkpoint.read(param, range(3, 22))
            assert torch.equal(part, weights[param.name][3:22])


def test_read_tensors_do_not_keep_the_file_mapped(tmp_path):
    weights = weights_of(TINY)
    files = write_meta(tmp_path, meta_shards(TINY, weights, 1))
    checkpoint = opened(files, TINY)
    parts = [checkpoint.read(p, range(p.shape[p.dim])) for p in parameters(TINY)]
    checkpoint.close()
    assert str(files.weights[0]) not in Path("/proc/self/maps").read_text()
    assert torch.equal(parts[0], weights["tok_embeddings.weight"])


def test_rope_freqs_tensors_are_ignored(tmp_path):
    shards = meta_shards(TINY, weights_of(TINY), 2)
    for shard in shards:
        shard["rope.freqs"] = torch.ones(2)
        shard["layers.0.attention.inner_attention.rope.freqs"] = torch.ones(2)
    opened(write_meta(tmp_path, shards), TINY)


def test_norms_that_differ_between_files_cause_one_warning(tmp_path, caplog):
    weights = weights_of(TINY)
    shards = meta_shards(TINY, weights, 2)
    shards[1]["norm.weight"] += 0.5
    shards[1]["layers.1.ffn_norm.weight"] += 0.5
    checkpoint = opened(write_meta(tmp_path, shards), TINY)
    with caplog.at_level(logging.WARNING):
        assert_reads(checkpoint, TINY, weights, (1,))
    assert [record.args[0] for record in caplog.records] == ["layers.1.ffn_norm.weight"]


def test_copies_of_a_kv_head_that_differ_are_refused(tmp_path):
    shards = meta_shards(EIGHT, weights_of(EIGHT), 8)
    shards[3]["layers.0.attention.wv.weight"] += 1
    checkpoint = opened(write_meta(tmp_path, shards), EIGHT)
    with pytest.raises(
        CheckpointError, match=r"03\.pth: layers\.0\.attention\.wv.*differs.*02\.pth"
    ):
        assert_reads(checkpoint, EIGHT, weights_of(EIGHT), (1,))


def test_tensor_faults_are_listed_with_files_or_shapes(tmp_path):
    shards = meta_shards(TINY, weights_of(TINY), 2)
    del shards[1]["layers.1.attention.wq.bias"]
    shards[0]["layers.0.attention.wq.scale"] = torch.ones(1)
    shards[1]["norm.weight"] = torch.ones(37)
    checkpoint = open_checkpoint(write_meta(tmp_path, shards), TINY)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.check(TINY)
    text = str(caught.value)
    assert "missing: layers.1.attention.wq.bias (consolidated.01.pth);" in text
    assert "extra: 'layers.0.attention.wq.scale' (consolidated.00.pth);" in text
    assert "misshapen: norm.weight is [36], [37] in the files, expected [36];" in text


def test_missing_file_is_detected_from_the_shapes(tmp_path):
    shards = meta_shards(TINY, weights_of(TINY), 3)
    checkpoint = open_checkpoint(write_meta(tmp_path, shards[:2]), TINY)
    with pytest.raises(CheckpointError, match=r"misshapen: tok_embeddings.weight"):
        checkpoint.check(TINY)


def test_a_dtype_that_is_not_a_float_is_refused(tmp_path):
    shards = meta_shards(TINY, weights_of(TINY), 1)
    shards[0]["norm.weight"] = torch.ones(36, dtype=torch.int8)
    with pytest.raises(CheckpointError, match=r"'norm.weight' has the dtype torch.int8"):
        opened(write_meta(tmp_path, shards), TINY)


def test_vocab_size_of_an_incomplete_set_of_files_is_refused(tmp_path):
    shards = meta_shards(TINY, weights_of(TINY), 3, embedding_dim=1)
    with pytest.raises(CheckpointError, match="do not form rows of 36"):
        meta_vocab_size(write_meta(tmp_path, shards[:2]))


@pytest.fixture
def one_file(tmp_path):
    return write_meta(tmp_path, meta_shards(TINY, weights_of(TINY), 1))


def refused(files, match):
    with pytest.raises(CheckpointError, match=match):
        open_checkpoint(files, TINY)


@pytest.mark.parametrize("left", [10, 5000, -1000, -1])
def test_a_truncated_file_is_refused(one_file, left):
    path = one_file.weights[0]
    path.write_bytes(path.read_bytes()[:left])
    refused(one_file, "truncated or damaged")


def test_file_from_before_torch_1_6_is_refused_with_a_remedy(one_file):
    torch.save({"a": torch.ones(2)}, one_file.weights[0], _use_new_zipfile_serialization=False)
    refused(one_file, "not a zip archive.*save it again")


def test_a_pickle_with_code_is_refused_and_not_run(one_file, tmp_path):
    path, trace = one_file.weights[0], tmp_path / "trace"
    assert_not_run(path, trace, lambda: refused(one_file, "cannot be read as plain weights"))


@pytest.mark.parametrize(
    "content", [[torch.ones(2)], {"a": 1}, {"model": {"a": torch.ones(2)}}, {1: torch.ones(2)}]
)
def test_anything_but_a_flat_dictionary_of_tensors_is_refused(one_file, content):
    torch.save(content, one_file.weights[0])
    refused(one_file, "expected a dict of tensors|expected a tensor")


@pytest.mark.parametrize("tensor", [torch.ones(2, 2).to_sparse(), torch.ones(2, device="meta")])
def test_sparse_and_meta_device_tensors_are_refused(one_file, tensor):
    torch.save({"a": tensor}, one_file.weights[0])
    refused(one_file, "plain")


def shortened(records):
    records["consolidated.00/data/0"] = records["consolidated.00/data/0"][:64]


def test_a_record_shorter_than_its_tensor_is_refused(one_file):
    """torch.load with mmap reads bytes of the next records as the rest of the weight."""
    rewritten(one_file.weights[0], shortened)
    torch.load(one_file.weights[0], weights_only=True, mmap=True)  # torch accepts the file
    refused(one_file, "are not the records")


def test_record_that_no_tensor_uses_is_refused(one_file):
    rewritten(one_file.weights[0], lambda records: records.update({"consolidated.00/data/x": b"1"}))
    refused(one_file, "are not the records")


def test_a_compressed_archive_is_refused(one_file):
    rewritten(one_file.weights[0], lambda _: None, zipfile.ZIP_DEFLATED)
    refused(one_file, "is compressed")


def test_records_that_overlap_are_refused(one_file):
    """The zip directory gives record 1 the offset of record 0."""
    path = one_file.weights[0]
    with zipfile.ZipFile(path) as archive:
        first, second = (archive.getinfo(f"consolidated.00/data/{n}").header_offset for n in (0, 1))
    data = bytearray(path.read_bytes())
    entry = data.rindex(second.to_bytes(4, "little"))
    data[entry : entry + 4] = first.to_bytes(4, "little")
    path.write_bytes(data)
    refused(one_file, "truncated or forged|damaged")


def test_a_record_beyond_the_end_of_the_file_is_refused(one_file):
    path = one_file.weights[0]
    with zipfile.ZipFile(path) as archive:
        offset = archive.getinfo("consolidated.00/data/1").header_offset
    data = bytearray(path.read_bytes())
    entry = data.rindex(offset.to_bytes(4, "little"))
    data[entry : entry + 4] = (len(data) - 5).to_bytes(4, "little")
    path.write_bytes(data)
    refused(one_file, "forged or damaged|truncated or forged|damaged zip")
