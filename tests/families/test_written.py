"""transformers reads the written config.json of every family as the same model."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import TINY_MODELS, write_hf
from transformers_oracle import loaded_logits, reference_logits

from parallel_llama.checkpoint.verify import locations, verify
from parallel_llama.config.layouts import load_model_args
from parallel_llama.files.model_files import find_model
from parallel_llama.reshard.reshard import reshard

pytestmark = pytest.mark.slow

NAMES = [name for name, tiny in TINY_MODELS.items() if tiny.family != "llama"]
# One model of each family, and one for each family and value of `tied`.
OF_FAMILIES = {TINY_MODELS[name].family: name for name in NAMES}
KINDS = {(TINY_MODELS[name].family, TINY_MODELS[name].tied): name for name in NAMES}
TOKENS = list(range(3, 90, 3))


@pytest.mark.parametrize("name", KINDS.values())
def test_reshard_through_every_layout_keeps_transformers_logits(tmp_path, name):
    source = write_hf(TINY_MODELS[name], tmp_path / "source", seed=4)
    folder, args = source, load_model_args(find_model(str(source)))
    for layout, n_parts in (("native", 2), ("meta", 3), ("hf", 2)):
        target = tmp_path / layout
        reshard(find_model(str(folder)), target, layout=layout, n_parts=n_parts)
        assert load_model_args(find_model(str(target))) == args
        folder = target
    tensors = [
        json.loads((tmp_path / layout / "manifest.json").read_text())["tensors"]
        for layout in ("native", "meta", "hf")
    ]
    assert tensors[0] == tensors[1] == tensors[2]
    # transformers has a padding id of its own for a family, beyond this small vocabulary.
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "pad_token_id": 0}))
    # Not bit for bit: torch's products may depend on the alignment of a weight.
    logits, expected = loaded_logits(folder, TOKENS), reference_logits(source, TOKENS)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-12)


def written_with_damage(name: str, folder: Path) -> Path:
    """A folder in HF's layout with a bit flipped in the first norm of layer 1."""
    target = folder / "hf"
    source = write_hf(TINY_MODELS[name], folder / "source")
    reshard(find_model(str(source)), target, layout="hf", n_parts=1)
    path = target / "model.safetensors"
    norm = next(
        weight
        for stored, weight in load_file(path).items()
        if re.search(r"\.1\.(input_layernorm|ln_attn)\.weight", stored)
    )
    data = bytearray(path.read_bytes())
    data[data.index(norm.numpy().tobytes()) + 8] ^= 1
    path.write_bytes(data)
    return target


@pytest.mark.parametrize("name", OF_FAMILIES.values())
def test_verify_names_only_the_damaged_weight(tmp_path, name):
    """Regression: verify named the wrong weight in families with other names or row orders."""
    (problem,) = verify(str(written_with_damage(name, tmp_path))).problems
    assert "damaged in layers.1.attention_norm.weight, bytes" in problem


def test_verify_names_damaged_weight_if_config_json_is_damaged_too(tmp_path):
    """Without config.json, the weight gets the name that all families have for it."""
    folder = written_with_damage("8/2 qwen3", tmp_path)
    (folder / "config.json").write_text("{")
    problems = verify(str(folder)).problems
    assert any("damaged in layers.1.attention_norm.weight, bytes" in line for line in problems)


@pytest.mark.parametrize("name", ["8/2 qwen3", "8/2 gemma3"])
def test_verify_of_meta_files_names_damaged_weight_not_qk_norms(tmp_path, name):
    """Regression: the row order of Meta's files made verify name the wrong weight."""
    source, folder = write_hf(TINY_MODELS[name], tmp_path / "source"), tmp_path / "meta"
    reshard(find_model(str(source)), folder, layout="meta", n_parts=1)
    path, weight = folder / "consolidated.00.pth", "layers.0.feed_forward.w2.weight"
    args = load_model_args(find_model(str(folder)))
    held = dict(locations(path, None, args))[weight]
    data = bytearray(path.read_bytes())
    data[held.start + 9] ^= 1
    path.write_bytes(data)
    (line,) = verify(str(folder)).problems
    assert line.startswith(f"{path.name}: damaged in {weight}, bytes {held.start} to {held.stop}")
