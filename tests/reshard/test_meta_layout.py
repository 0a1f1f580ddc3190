"""Written Meta folders: sharded as by Meta if sizes allow it, and every byte can be restored."""

import json
import logging
import zipfile
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoint_samples import TINY, meta_shards, weights_of, write_meta
from meta_oracle import fairscale_alone, meta_logits
from reshard_samples import fill, hashes_of, moved, read, write, write_model
from tiny_models import META_SCALED_ROPE, TINY_MODELS, TinyModel, write_hf
from tokenizer_data import MISTRAL_V1
from torch import Tensor
from transformers_oracle import reference_logits

from parallel_llama.checkpoint.meta_folder import NORM_VARIANTS, differing_norms, norm_variants
from parallel_llama.checkpoint.verify import locations, verify
from parallel_llama.config.layouts import load_model_args
from parallel_llama.errors import CheckpointError, UsageError
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.files.model_files import ModelFiles, find_model
from parallel_llama.reshard.meta_layout import MetaLayout, pth_layout
from parallel_llama.tokenizer import load_chat_template, load_tokenizer
from parallel_llama.tokenizer.chat_formats import Llama2Chat

N_FILES = (1, 2, 3, 5, 7, 8, 10, 16)


def shape(n_heads: int, n_kv_heads: int, **changes: object) -> ModelArgs:
    args = replace(TINY, n_heads=n_heads, n_kv_heads=n_kv_heads, head_dim=4, dim=4 * n_heads)
    return replace(args, **changes)


SHAPES = {
    "9/3": TINY,
    "8/1 tied": shape(8, 1, tied_embeddings=True),
    "40/10": shape(40, 10, n_layers=1),
    "12/4": shape(12, 4, attention_bias=False, mlp_bias=False),
    "64/8": shape(64, 8, n_layers=1, vocab_size=203),
    "6/2 files without rows": shape(6, 2, ffn_dim=3, vocab_size=5),
}


def dtypes_of(tensors: Mapping[str, Tensor]) -> dict[str, torch.dtype]:
    return {name: tensor.dtype for name, tensor in tensors.items()}


def assert_same_bytes(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def states(folder: Path) -> list[dict[str, Tensor]]:
    return [torch.load(p, weights_only=True) for p in sorted(folder.glob("*.pth"))]


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_any_number_of_files_is_read_back_exactly(tmp_path, name):
    args = SHAPES[name]
    tensors = weights_of(args, torch.bfloat16)
    for n_files in (n for n in (*N_FILES, args.n_heads) if n <= args.n_heads):
        folder = tmp_path / str(n_files)
        if not folder.exists():
            layout = MetaLayout(args, dtypes_of(tensors), n_files)
            assert_same_bytes(read(write(layout, args, tensors, folder)), tensors)
            sizes = {file.name: file.n_bytes for file in layout.files}
            assert sizes == {p.name: p.stat().st_size for p in folder.glob("*.pth")}


@pytest.mark.parametrize("embeddings_dim", [0, 1])
@pytest.mark.parametrize(("n_heads", "n_kv_heads"), [(8, 4), (8, 8), (8, 1)])
@pytest.mark.parametrize("n_files", [1, 4, 8])
def test_shards_equal_those_of_meta_if_all_sizes_divide(
    tmp_path, n_files, n_heads, n_kv_heads, embeddings_dim
):
    """The plan would cut the vocabulary at its units, 12 + 4 rows of 16 blocks; Meta never does."""
    args = shape(n_heads, n_kv_heads, ffn_dim=72, vocab_size=104)
    tensors = weights_of(args)
    layout = MetaLayout(args, dtypes_of(tensors), n_files, embeddings_dim)
    folder = write(layout, args, tensors, tmp_path / "meta")
    expected = meta_shards(args, tensors, n_files, embeddings_dim)
    for state, shard in zip(states(folder), expected, strict=True):
        assert_same_bytes(state, shard)
    assert_same_bytes(read(folder), tensors)


@pytest.mark.parametrize("name", ["9/3", "40/10"])
def test_embeddings_cut_on_dim_1_may_have_uneven_widths(tmp_path, name):
    args = SHAPES[name]
    tensors = weights_of(args)
    for n_files in (5, 7):
        layout = MetaLayout(args, dtypes_of(tensors), n_files, 1)
        folder = write(layout, args, tensors, tmp_path / str(n_files))
        widths = [state["tok_embeddings.weight"].shape[1] for state in states(folder)]
        assert sum(widths) == args.dim and max(widths) - min(widths) <= 1
        assert_same_bytes(read(folder), tensors)


@pytest.mark.parametrize(("n_heads", "n_kv_heads"), [(9, 3), (40, 10), (64, 8)])
def test_every_query_head_finds_its_kv_head_in_its_own_file(tmp_path, n_heads, n_kv_heads):
    """The values of each head are the number of the head, which identifies a misplaced head."""
    args = shape(n_heads, n_kv_heads, n_layers=1, attention_bias=False, mlp_bias=False)
    tensors = weights_of(args)
    for part, count in (("wq", n_heads), ("wk", n_kv_heads), ("wv", n_kv_heads)):
        numbers = torch.arange(count, dtype=torch.float32).repeat_interleave(args.head_dim)
        tensors[f"layers.0.attention.{part}.weight"][:] = numbers[:, None]

    def numbers_in(state: dict[str, Tensor], part: str) -> list[int]:
        heads = state[f"layers.0.attention.{part}.weight"].view(-1, args.head_dim * args.dim)
        assert (heads == heads[:, :1]).all()
        return heads[:, 0].int().tolist()

    previous = tensors
    for n_files in (n for n in (8, 10, 3, 1, 16) if n <= n_heads):  # each from the one before
        layout = MetaLayout(args, dtypes_of(previous), n_files)
        folder = write(layout, args, previous, tmp_path / str(n_files))
        seen = []
        for number, state in enumerate(states(folder)):
            queries, keys = numbers_in(state, "wq"), numbers_in(state, "wk")
            assert keys == numbers_in(state, "wv")
            assert keys == sorted({head // (n_heads // n_kv_heads) for head in queries})
            if n_files % n_kv_heads == 0 and n_heads % n_files == 0:
                assert keys == [number * n_kv_heads // n_files]
            seen += queries
        assert seen == list(range(n_heads))
        previous = read(folder)
        assert_same_bytes(previous, tensors)


def test_replicated_kv_head_that_differs_between_files_is_refused(tmp_path):
    """9 heads of 3 KV heads over 2 files: both hold KV head 1, whole."""
    tensors = weights_of(TINY)
    folder = write(MetaLayout(TINY, dtypes_of(tensors), 2), TINY, tensors, tmp_path / "meta")
    shards = states(folder)
    assert [len(s["layers.0.attention.wk.weight"]) // TINY.head_dim for s in shards] == [2, 2]
    shards[1]["layers.0.attention.wk.weight"][0] += 1
    write_meta(folder, shards)
    with pytest.raises(CheckpointError, match=r"01\.pth: layers\.0\.attention\.wk\.weight differs"):
        read(folder)


def test_tied_embeddings_are_written_as_two_weights_but_read_as_one(tmp_path):
    args = replace(SHAPES["12/4"], tied_embeddings=True)
    tensors = weights_of(args)
    folder = write(MetaLayout(args, dtypes_of(tensors), 2, 1), args, tensors, tmp_path / "meta")
    assert_same_bytes(read(folder), tensors)
    (folder / "config.json").unlink()  # params.json is left, which cannot tie weights
    alone = read(folder)
    assert torch.equal(alone.pop("output.weight"), tensors["tok_embeddings.weight"])
    assert_same_bytes(alone, tensors)


def test_each_tensor_keeps_its_own_dtype(tmp_path):
    tensors = weights_of(TINY, torch.bfloat16)
    tensors["norm.weight"] = tensors["norm.weight"].float()
    tensors["output.weight"] = tensors["output.weight"].double()
    folder = write(MetaLayout(TINY, dtypes_of(tensors), 3), TINY, tensors, tmp_path / "meta")
    assert_same_bytes(read(folder), tensors)


def test_written_files_pass_torch_load_and_zip_checksums(tmp_path):
    tensors = weights_of(TINY)
    folder = write(MetaLayout(TINY, dtypes_of(tensors), 2), TINY, tensors, tmp_path / "meta")
    for path in sorted(folder.glob("*.pth")):
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None
        mapped = torch.load(path, weights_only=True, mmap=True)
        assert_same_bytes(mapped, torch.load(path, weights_only=True, mmap=False))
    with path.open("r+b") as file:  # the test can fail: one bit of data
        offset = path.read_bytes().index(tensors["norm.weight"].numpy().tobytes())
        file.seek(offset)
        file.write(bytes([path.read_bytes()[offset] ^ 1]))
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is not None


def test_resumed_run_writes_the_same_bytes(tmp_path):
    """Another process continues an unfinished run, or calls `finish` a second time."""
    args = SHAPES["8/1 tied"]
    tensors = weights_of(args)
    names = list(tensors)

    def layout() -> MetaLayout:
        return MetaLayout(args, dtypes_of(tensors), 3)

    whole = write(layout(), args, tensors, tmp_path / "whole")
    again = write(layout(), args, tensors, tmp_path / "again")
    assert hashes_of(whole) == hashes_of(again)
    resumed = tmp_path / "resumed"
    resumed.mkdir()
    first = layout()
    first.create(resumed)
    fill(first, args, {name: tensors[name] for name in names[:7]}, resumed)
    write_rest = layout()
    write_rest.create(resumed)
    fill(write_rest, args, {name: tensors[name] for name in names[7:]}, resumed)
    write_rest.finish(resumed)
    last = layout()
    last.create(resumed)
    last.finish(resumed)
    for name, content in last.metadata().items():
        (resumed / name).write_bytes(content)
    assert hashes_of(resumed) == hashes_of(whole)


def test_finish_refuses_a_truncated_file(tmp_path):
    tensors = weights_of(TINY)
    layout = MetaLayout(TINY, dtypes_of(tensors), 1)
    layout.create(tmp_path)
    path = tmp_path / layout.files[0].name
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)
    with pytest.raises(CheckpointError, match=r"expected .*; start again"):
        layout.finish(tmp_path)


def test_pth_layout_holds_no_data_and_has_offsets_above_4_gib(tmp_path):
    """2 x 6 GiB: large archives store sizes and offsets in ZIP64 records."""
    large = ((3 << 10, 1 << 20), torch.bfloat16)
    layout = pth_layout({"a": large, "none": ((0, 3), torch.float32), "b": large})
    assert sum(len(piece) for _, piece in layout.pieces) < 1 << 12
    path = tmp_path / "consolidated.00.pth"
    with path.open("wb") as file:
        file.truncate(layout.n_bytes)
        for offset, piece in layout.pieces:
            file.seek(offset)
            file.write(piece)
        for name, record in layout.records.items():
            if record.n_bytes:
                file.seek(record.offset)
                file.write(name.encode())
                for offset in (record.checksum, record.listed_checksum):
                    file.seek(offset)
                    file.write(name.encode() * 4)
    with zipfile.ZipFile(path) as archive:
        checksums = {i.filename: i.CRC for i in archive.infolist() if "/data/" in i.filename}
    assert list(checksums.values()) == [0x61616161, 0, 0x62626262]
    state = torch.load(path, weights_only=True, mmap=True)
    assert [state[name].view(-1)[:1].view(torch.uint8)[0].item() for name in "ab"] == [97, 98]


@pytest.mark.parametrize("n_files", [0, 10])
def test_zero_files_or_more_files_than_query_heads_are_refused(n_files):
    with pytest.raises(UsageError, match="query heads cannot be split over"):
        MetaLayout(TINY, dtypes_of(weights_of(TINY)), n_files)


@pytest.fixture
def two_norms(tmp_path: Path) -> ModelFiles:
    """A Meta folder of 2 files in which two norms differ, one only in the sign of a 0."""
    tensors = weights_of(TINY)
    tensors["layers.1.ffn_norm.weight"][0] = 0.0
    folder = write(MetaLayout(TINY, dtypes_of(tensors), 2), TINY, tensors, tmp_path / "source")
    shards = states(folder)
    shards[1]["norm.weight"][3] += 0.5
    shards[1]["layers.1.ffn_norm.weight"][0] = -0.0
    write_meta(folder, shards)
    return find_model(str(folder))


def test_norms_that_differ_between_files_are_found_and_logged(two_norms, caplog):
    with caplog.at_level(logging.WARNING):
        variants = norm_variants(two_norms)
    assert sorted(variants) == ["layers.1.ffn_norm.weight", "norm.weight"]
    assert "2 replicated norms differ" in caplog.text
    assert "norm.weight, by up to 0.5" in caplog.text


def test_differing_norms_are_restored_with_the_original_file_count(two_norms, tmp_path):
    """2 files to 3 and back: no file of the 3 can hold both copies, so a separate file does."""
    expected = states(two_norms.path)
    three, two = tmp_path / "three", tmp_path / "two"
    for source, folder, n_files in ((two_norms.path, three, 3), (three, two, 2)):
        tensors = read(source)
        variants = norm_variants(find_model(str(source)))
        layout = MetaLayout(TINY, dtypes_of(tensors), n_files, variants=variants)
        write(layout, TINY, tensors, folder)
    assert (three / NORM_VARIANTS).exists() and not (two / NORM_VARIANTS).exists()
    assert not differing_norms(find_model(str(three)))
    for state, shard in zip(states(two), expected, strict=True):
        for name, tensor in shard.items():
            assert state[name].numpy().tobytes() == tensor.numpy().tobytes(), name


def test_norms_of_later_files_are_not_reported_as_damaged(two_norms, tmp_path):
    """Regression: norms that differ between files were reported beside the damaged tensor."""
    folder = moved(two_norms.path, tmp_path / "out", "meta", 2)
    path = folder / "consolidated.01.pth"
    flip_byte_of(path, "layers.1.attention.wq.weight")
    (problem,) = verify(str(folder)).problems
    assert problem.startswith(f"{path.name}: damaged in layers.1.attention.wq.weight, bytes")


@pytest.mark.parametrize("n_files", [1, 2])
def test_damage_in_the_copy_of_tied_embeddings_is_reported(tmp_path, n_files):
    """Regression: the report said that the damage was outside the tensors."""
    source = write_model(tmp_path / "hf", replace(TINY, tied_embeddings=True))
    folder = moved(source, tmp_path / "meta", "meta", n_files)
    flip_byte_of(folder / "consolidated.00.pth", "output.weight")
    (problem,) = verify(str(folder)).problems
    assert "damaged in output.weight, its copy of the tied embeddings, or outside" in problem


def flip_byte_of(path: Path, tensor: str) -> None:
    at = dict(locations(path, None, None))[tensor].start
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_equal_norms_write_no_variants_file(tmp_path):
    tensors = weights_of(TINY)
    folder = write(MetaLayout(TINY, dtypes_of(tensors), 3), TINY, tensors, tmp_path / "meta")
    assert norm_variants(find_model(str(folder))) == {}
    assert sorted(p.name for p in folder.iterdir() if p.suffix != ".pth") == [
        "config.json",
        "params.json",
    ]


def test_llama2_chat_format_is_kept_in_every_folder_made_from_a_meta_folder(tmp_path):
    """Regression: an HF folder had no chat format, because params.json was not copied."""
    source = write_model(tmp_path / "source", TINY)
    folder = moved(source, tmp_path / "meta", "meta")
    (folder / "tokenizer.model").symlink_to(MISTRAL_V1)
    for number, layout in enumerate(("hf", "native", "hf", "meta")):
        folder = moved(folder, tmp_path / f"{number} {layout}", layout)
        assert find_model(str(folder)).kind == layout
        assert isinstance(load_chat_template(folder, load_tokenizer(folder)), Llama2Chat)


def test_damaged_norm_variants_are_refused(tmp_path):
    tensors = weights_of(TINY)
    folder = write(MetaLayout(TINY, dtypes_of(tensors), 1), TINY, tensors, tmp_path / "meta")
    (folder / NORM_VARIANTS).write_bytes(b"\x10" + bytes(30))
    with pytest.raises(CheckpointError, match=r"norm_variants\.safetensors: damaged"):
        norm_variants(find_model(str(folder)))


def test_features_that_metas_program_cannot_run_are_logged(caplog):
    with caplog.at_level(logging.WARNING):
        MetaLayout(SHAPES["12/4"], dtypes_of(weights_of(SHAPES["12/4"])), 1)
        assert not caplog.records
        layout = MetaLayout(TINY, dtypes_of(weights_of(TINY)), 1)
    assert "biases of the attention, biases of the feed-forward" in caplog.text
    own = json.loads(layout.metadata()["config.json"])["parallel_llama"]
    assert len(own["beyond_params_json"]) == 2


META_MODELS = {
    "plain": TinyModel(12, 4, 8, 96, ffn_dim=92, vocab_size=212),
    "tied, odd feed-forward, scaled": TinyModel(
        8,
        4,
        16,
        128,
        ffn_dim=100,
        vocab_size=204,
        tied=True,
        max_seq_len=16384,
        rope=META_SCALED_ROPE,
    ),
}


@pytest.mark.parametrize("name", META_MODELS)
def test_metas_own_program_computes_equal_logits_from_the_files(ranks, tmp_path, name):
    tiny = META_MODELS[name]
    hf_folder = write_hf(tiny, tmp_path / "hf")
    args = load_model_args(find_model(str(hf_folder)))
    tensors = read(hf_folder)
    tokens = [(7 * at + 3) % tiny.vocab_size for at in range(24)]
    expected = reference_logits(hf_folder, tokens)
    for n_files in (1, 2, 4):
        layout = MetaLayout(args, dtypes_of(tensors), n_files)
        folder = write(layout, args, tensors, tmp_path / str(n_files))
        with fairscale_alone() if n_files == 1 else nullcontext():
            for logits in ranks(n_files).run(meta_logits, folder, tokens):
                torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)


# One model of every family and kind of rope scaling, tied and untied.
KINDS = {(each.family, each.tied, each.rope["rope_type"]): n for n, each in TINY_MODELS.items()}


@pytest.mark.parametrize("name", KINDS.values())
def test_meta_folder_restores_tensors_and_arguments_of_hf_folder(tmp_path, name):
    """Ties, biases, context, rope scaling and heads wider than dim / n_heads included."""
    hf_folder = write_hf(TINY_MODELS[name], tmp_path / "hf")
    args, tensors = load_model_args(find_model(str(hf_folder))), read(hf_folder)
    layout = MetaLayout(args, dtypes_of(tensors), 5)
    folder = write(layout, args, tensors, tmp_path / "meta")
    assert load_model_args(find_model(str(folder))) == args
    assert_same_bytes(read(folder), tensors)
