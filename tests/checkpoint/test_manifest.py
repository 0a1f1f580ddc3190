"""The manifest: hashes of files and tensors, in an encoding that detects every changed byte."""

import os
import re
from pathlib import Path

import pytest
import torch
from blake3 import blake3

from parallel_llama.checkpoint import manifest as module
from parallel_llama.checkpoint.manifest import (
    MANIFEST,
    FileEntry,
    Manifest,
    Source,
    TensorEntry,
    encode_manifest,
    hash_bytes,
    hash_file,
    read_manifest,
    tensor_bytes,
    write_manifest,
)
from parallel_llama.errors import CheckpointError

SMALL = Manifest(
    "native",
    {"norm.weight": TensorEntry("bfloat16", (8,), hash_bytes(b"norm"))},
    {"weights.safetensors": FileEntry(16, hash_bytes(b"weights"))},
    {"norm.weight": [hash_bytes(b"unit")]},
    Source("gguf", {"model.gguf": 7}, {"norm.weight": hash_bytes(b"before")}),
)


def text_of(folder: Path) -> str:
    return (folder / MANIFEST).read_text()


def refused(folder: Path, data: bytes) -> bool:
    (folder / MANIFEST).write_bytes(data)
    try:
        read_manifest(folder)
    except CheckpointError as error:
        assert len(str(error)) < 1000
        return True
    return False


def test_written_manifest_is_read_back(tmp_path):
    assert read_manifest(tmp_path) is None
    write_manifest(tmp_path, SMALL)
    found = read_manifest(tmp_path)
    assert (found.tensors, found.files, found.units) == (SMALL.tensors, SMALL.files, SMALL.units)
    assert found.source == SMALL.source
    assert '"format": "parallel_llama manifest 1"' in text_of(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [MANIFEST]


@pytest.mark.slow
def test_every_single_flipped_bit_is_detected(tmp_path):
    """Includes bits of white space, and of a hash that nothing else compares."""
    data = bytearray(encode_manifest(SMALL))
    for at in range(len(data) * 8):
        data[at // 8] ^= 1 << at % 8
        assert refused(tmp_path, data), f"bit {at}"
        data[at // 8] ^= 1 << at % 8
    assert not refused(tmp_path, data)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"layout": "native"', '"layout": "onnx"'),
        ('"layout": "native"', '"layout": "native", "extra": 1'),
        ('"layout": "native"', '"layout": "native", "layout": "native"'),
        ("manifest 1", "manifest 2"),
        ('"bytes": 16', '"bytes": -1'),
        ('"bytes": 16', '"bytes": 1e300'),
        ('"bytes": 16', '"bytes": "16"'),
        ('"bytes": 16', f'"bytes": {"9" * 5000}'),
        ('"bfloat16"', '"int8"'),
        ('"weights.safetensors"', '"../weights.safetensors"'),
        ('"weights.safetensors"', '"/etc/passwd"'),
        ('"weights.safetensors"', '"a\\u0000b"'),
        ('"weights.safetensors"', '""'),
        ('"layout"', " " + "[" * 100_000 + '"layout"'),
    ],
)
def test_a_forged_manifest_is_refused(tmp_path, old, new):
    """The forger computes the hash of the changed manifest."""
    assert not refused(tmp_path, forged('"bytes": 16', '"bytes": 17'))
    assert refused(tmp_path, forged(old, new))


def forged(old: str, new: str) -> bytes:
    """A changed manifest with its own hash."""
    text, bare = encode_manifest(SMALL), module._encoded(SMALL)
    assert old.encode() in bare
    hashed = hash_bytes(bare.replace(old.encode(), new.encode(), 1))
    own = hash_bytes(bare).encode()
    assert own in text
    return text.replace(old.encode(), new.encode(), 1).replace(own, hashed.encode())


@pytest.mark.parametrize("name", ["../out", "/etc/passwd", "a/../../b", ""])
def test_file_name_outside_the_folder_is_refused_independently_of_the_hash(tmp_path, name):
    """A forger can compute the hash of a manifest, so decoding must refuse the name itself."""
    with pytest.raises(ValueError, match="outside the folder"):
        Manifest("hf", {}, {name: FileEntry(0, hash_bytes(b""))})
    text = encode_manifest(SMALL).decode().replace("weights.safetensors", name)
    (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(CheckpointError, match="outside the folder"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b"null", b"\xff", b"{", b"1"])
def test_invalid_manifest_is_refused(tmp_path, text):
    assert refused(tmp_path, text)


def test_manifest_larger_than_the_limit_is_refused(tmp_path, monkeypatch):
    write_manifest(tmp_path, SMALL)
    monkeypatch.setattr(module, "MAX_MANIFEST_BYTES", 100)
    with pytest.raises(CheckpointError, match="larger than 100 bytes"):
        read_manifest(tmp_path)


def test_manifest_that_is_a_folder_or_dangling_link_is_refused(tmp_path):
    (tmp_path / MANIFEST).mkdir()
    with pytest.raises(CheckpointError, match="not a file"):
        read_manifest(tmp_path)
    (tmp_path / MANIFEST).rmdir()
    (tmp_path / MANIFEST).symlink_to("nowhere")
    with pytest.raises(CheckpointError, match="not a file"):
        read_manifest(tmp_path)


def test_a_write_that_fails_leaves_the_old_manifest(tmp_path, monkeypatch):
    write_manifest(tmp_path, SMALL)
    before = text_of(tmp_path)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_manifest(tmp_path, Manifest("hf", {}, {}))
    assert text_of(tmp_path) == before


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (5,), (3, 4), (600, 1000)])
def test_tensor_hash_equals_the_hash_of_its_bytes(dtype, shape):
    tensor = torch.randn(shape).to(dtype)
    raw = bytes(tensor.reshape(-1).view(torch.uint8).tolist()) if tensor.numel() < 100 else None
    data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    assert raw is None or raw == data
    assert hash_bytes(tensor_bytes(tensor)) == blake3(data).hexdigest()


def test_a_transposed_tensor_is_hashed_row_by_row():
    tensor = torch.arange(6.0).view(2, 3)
    assert tensor_bytes(tensor.t()) == tensor_bytes(torch.tensor([[0.0, 3], [1, 4], [2, 5]]))


def test_a_contiguous_tensor_is_not_copied_to_be_hashed():
    tensor = torch.zeros(4)
    data = tensor_bytes(tensor)
    tensor[0] = 1.0
    assert bytes(data[:4]) == b"\0\0\x80?"


@pytest.mark.parametrize("size", [0, 1, 1000, (8 << 20) + 5])
def test_a_file_is_hashed_whole_and_in_spans(tmp_path, size):
    path, data = tmp_path / "f", os.urandom(size)
    path.write_bytes(data)
    seen: list[int] = []
    assert hash_file(path, seen.append) == blake3(data).hexdigest()
    assert sum(seen) == size
    for span in (range(0), range(size // 3, size), range(size)):
        assert hash_file(path, span=span) == blake3(data[span.start : span.stop]).hexdigest()


def test_hash_file_refuses_short_file_folder_and_missing_path(tmp_path):
    (tmp_path / "f").write_bytes(b"12345")
    with pytest.raises(CheckpointError, match="ends at byte 5, expected 9"):
        hash_file(tmp_path / "f", span=range(2, 9))
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(CheckpointError, match=re.escape(f"{path}: cannot be read")):
            hash_file(path)
