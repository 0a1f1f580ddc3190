"""The comparison of the output with the embeddings in HF folders with tied embeddings."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoint_samples import TINY, hf_name, weights_of
from reshard_samples import write_model
from safetensors.torch import load_file, save_file

from parallel_llama.config import tied
from parallel_llama.config.layouts import load_model_args
from parallel_llama.config.tied import with_embeddings
from parallel_llama.files.model_files import find_model
from parallel_llama.files.safetensors_header import FileTensor

TIED = replace(TINY, tied_embeddings=True)
EMBEDDINGS, HEAD = hf_name("tok_embeddings.weight"), hf_name("output.weight")


def is_tied(folder: Path, head: torch.Tensor) -> bool:
    """Whether a tied model is still tied if its file also has this output."""
    path = folder / "model.safetensors"
    save_file({**load_file(path), HEAD: head}, path)
    return load_model_args(find_model(str(folder))).tied_embeddings


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model(tmp_path / "hf", TIED)


@pytest.mark.parametrize("n_bytes", [1, 4096, 1 << 18])
def test_model_is_untied_if_any_value_of_the_output_differs(folder, monkeypatch, n_bytes):
    monkeypatch.setattr(tied, "_AT_ONCE", n_bytes)
    embeddings = weights_of(TIED)["tok_embeddings.weight"]
    assert is_tied(folder, embeddings.clone())
    for row in (0, 50, 100):
        head = embeddings.clone()
        head[row, -1] += 1
        assert not is_tied(folder, head)


def test_model_is_untied_if_the_output_has_another_dtype(folder):
    assert not is_tied(folder, weights_of(TIED)["tok_embeddings.weight"].double())


def test_quantised_output_is_not_compared(folder):
    embeddings = weights_of(TIED)["tok_embeddings.weight"]
    assert is_tied(folder, embeddings.to(torch.int8))
    assert is_tied(folder, embeddings.to(torch.float8_e4m3fn))


def test_damaged_header_leaves_the_arguments_of_config_json(folder):
    (folder / "model.safetensors").write_bytes(b"\xff" * 9)
    assert load_model_args(find_model(str(folder))).tied_embeddings


@pytest.mark.parametrize("embeddings", [EMBEDDINGS, f"{EMBEDDINGS}_packed"])
def test_embeddings_of_the_files_are_not_replaced_by_the_output(embeddings):
    names = {embeddings: "I32", HEAD: "BF16"}
    tensors = {n: (Path("a"), FileTensor(n, dtype, (1,), 0, 4)) for n, dtype in names.items()}
    assert with_embeddings(tensors, TIED) == tensors


def test_output_replaces_missing_embeddings_only_if_tied_and_not_quantised():
    def with_output(dtype: str, is_tied: bool) -> bool:
        tensor = Path("a"), FileTensor(HEAD, dtype, (1,), 0, 4)
        found = with_embeddings({HEAD: tensor}, replace(TIED, tied_embeddings=is_tied))
        return found.get(EMBEDDINGS) == tensor

    assert with_output("BF16", is_tied=True)
    assert not with_output("BF16", is_tied=False)
    assert not with_output("F8_E4M3", is_tied=True)
