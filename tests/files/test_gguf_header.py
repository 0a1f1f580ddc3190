"""The GGUF reader: valid files, files with one fault, and thousands of randomly damaged files."""

import contextlib
import os
import struct
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from broken_gguf import BROKEN, array, extra
from gguf_builder import F16, GGUF, STRING, TINY_FIELDS, UINT8, Tensor, mutations, string

from parallel_llama.errors import CheckpointError
from parallel_llama.files import gguf_header
from parallel_llama.files.gguf_header import MAX_ARRAY_VALUES, read_gguf_header


def write(path: Path, content: GGUF | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.to_bytes())
    return path


class MemoryFile:
    """A file without a disk, where thousands of versions are written one over the other."""

    def __init__(self) -> None:
        self._file = os.memfd_create("gguf")
        self.path = Path(f"/proc/self/fd/{self._file}")

    def write(self, data: bytes) -> None:
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, data, 0)

    def close(self) -> None:
        os.close(self._file)


@pytest.fixture
def memory_file() -> Iterator[MemoryFile]:
    with contextlib.closing(MemoryFile()) as file:
        yield file


def test_valid_file_is_read(tmp_path):
    path = write(tmp_path / "m.gguf", GGUF())
    header = read_gguf_header(path)
    assert header.fields["llama.attention.head_count"] == 2
    assert header.fields["tokenizer.ggml.tokens"] == ["<s>", "</s>", "a", "b", "c"]
    assert header.fields["tokenizer.ggml.scores"] == [0.0, 0.0, -1.0, -2.0, -3.0]
    assert header.fields["tokenizer.ggml.add_bos_token"] is True
    norm = header.tensors["blk.0.attn_norm.weight"]
    assert (norm.shape, norm.dtype, norm.n_bytes) == ((8,), "F32", 32)
    assert header.tensors["token_embd.weight"].shape == (5, 8)
    assert norm.offset - header.tensors["token_embd.weight"].offset == 160


def test_data_starts_at_the_alignment_that_the_file_states(tmp_path):
    fields = {**TINY_FIELDS, "general.alignment": 256}
    data = struct.pack("<2e", 1.5, -2.0)
    content = GGUF(fields=fields, tensors=[Tensor("t", (2,), F16, data=data)], alignment=256)
    path = write(tmp_path / "m.gguf", content)
    place = read_gguf_header(path).tensors["t"]
    assert place.offset % 256 == 0
    assert path.read_bytes()[place.offset :][:4] == data


def test_version_2_and_empty_arrays_are_read(tmp_path):
    content = GGUF(version=2, fields={**TINY_FIELDS, "x.empty": []})
    assert read_gguf_header(write(tmp_path / "m.gguf", content)).fields["x.empty"] == []


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_refused_with_its_reason(tmp_path, name):
    content, reason = BROKEN[name]
    with pytest.raises(CheckpointError) as caught:
        read_gguf_header(write(tmp_path / "m.gguf", content))
    assert reason in str(caught.value)
    assert len(str(caught.value)) < 600
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    for path in (tmp_path / "none.gguf", tmp_path):
        with pytest.raises(CheckpointError, match="cannot be read"):
            read_gguf_header(path)


def test_every_truncation_is_refused(memory_file):
    whole = GGUF().to_bytes()
    for length in range(len(whole)):
        memory_file.write(whole[:length])
        with pytest.raises(CheckpointError):
            read_gguf_header(memory_file.path)


def test_random_damage_is_refused_or_read_in_bounded_time(memory_file):
    """Any other exception fails: damage must never look like a bug in the program."""
    refused = 0
    started = time.process_time()
    for data in mutations(GGUF().to_bytes(), 4000):
        memory_file.write(data)
        try:
            read_gguf_header(memory_file.path)
        except CheckpointError:
            refused += 1
    assert time.process_time() - started < 100
    assert 2000 < refused < 4000  # most damage shows; a changed number cannot


def test_random_damage_takes_bounded_memory(memory_file):
    tracemalloc.start()
    for data in mutations(GGUF().to_bytes(), 300):
        memory_file.write(data)
        with contextlib.suppress(CheckpointError):
            read_gguf_header(memory_file.path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 << 20, "the file has 2 kB"


def test_huge_sparse_file_is_refused_in_bounded_memory(tmp_path):
    """The counts are checked against the header's limit and not only against the file's size."""
    path = write(tmp_path / "m.gguf", extra(array(UINT8, MAX_ARRAY_VALUES + 1)))
    os.truncate(path, 1 << 40)
    tracemalloc.start()
    with pytest.raises(CheckpointError, match="the arrays up to field"):
        read_gguf_header(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


def test_strings_are_read_whole_wherever_the_window_ends(tmp_path, monkeypatch):
    texts = ["", "a", "\u00e9\U0001f600" * 9, "x" * 300, *map(str, range(200))]
    content = GGUF(fields={**TINY_FIELDS, "x.texts": texts, "x.numbers": list(range(50))})
    path = write(tmp_path / "m.gguf", content)
    whole = read_gguf_header(path)
    assert whole.fields["x.texts"] == texts
    for n_bytes in (1, 7, 8, 9, 64, 301):
        monkeypatch.setattr(gguf_header, "WINDOW_BYTES", n_bytes)
        assert read_gguf_header(path) == whole


def test_non_utf8_string_in_array_is_refused(tmp_path):
    data = string("good") + string(b"\xc3\x28") + string("good")
    path = write(tmp_path / "m.gguf", extra(array(STRING, 3, data)))
    with pytest.raises(CheckpointError, match=r"field 'x.array' is not UTF-8 text"):
        read_gguf_header(path)


def test_a_header_is_parsed_again_only_after_its_file_changed(tmp_path):
    """Regression: each part of a model's start parsed the header again."""
    path = write(tmp_path / "m.gguf", GGUF())
    os.utime(path, ns=(0, 1_000_000_000))
    kept = read_gguf_header(path)
    assert read_gguf_header(path) is kept
    changed = path.read_bytes().replace(b"</s>", b"<eo>")
    path.write_bytes(changed)
    os.utime(path, ns=(0, 1_000_000_001))
    assert read_gguf_header(path).fields["tokenizer.ggml.tokens"][1] == "<eo>"
    other = write(tmp_path / "other", GGUF(fields={**TINY_FIELDS, "general.architecture": "alpac"}))
    os.utime(other, ns=(0, 1_000_000_001))
    other.replace(path)
    assert read_gguf_header(path).fields["general.architecture"] == "alpac"


def test_a_file_that_was_just_written_is_read_anew_each_time(tmp_path):
    """Two writes within one tick of the clock leave the same time, size and inode."""
    path = write(tmp_path / "m.gguf", GGUF())
    now = time.time_ns()
    os.utime(path, ns=(now, now))
    assert read_gguf_header(path).fields["tokenizer.ggml.tokens"][1] == "</s>"
    path.write_bytes(path.read_bytes().replace(b"</s>", b"<eo>"))
    os.utime(path, ns=(now, now))
    assert read_gguf_header(path).fields["tokenizer.ggml.tokens"][1] == "<eo>"
