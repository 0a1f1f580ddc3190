"""HF folders of random weights to reshard, with a handwritten configuration."""

import json
from collections.abc import Mapping
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from checkpoint_samples import TINY, weights_of, write_hf
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from parallel_llama.checkpoint.checkpoint import Checkpoint
from parallel_llama.checkpoint.reading import open_checkpoint
from parallel_llama.config.layouts import load_model_args
from parallel_llama.families import parameters
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.files.model_files import ModelFiles, find_model
from parallel_llama.reshard.layout import Layout
from parallel_llama.reshard.reshard import reshard

HEADS = [(9, 3), (8, 1), (40, 10), (12, 4), (64, 8)]
FILES = [1, 2, 3, 5, 8]


@st.composite
def shapes(draw: st.DrawFn) -> ModelArgs:
    """Small models with sizes that have no common divisors."""
    n_heads, n_kv_heads = draw(st.sampled_from(HEADS))
    head_dim = draw(st.sampled_from([2, 4, 6]))
    return ModelArgs(
        dim=n_heads * head_dim,
        n_layers=draw(st.integers(1, 2)),
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        ffn_dim=draw(st.integers(1, 1100)),
        vocab_size=draw(st.integers(1, 700)),
        tied_embeddings=draw(st.booleans()),
        attention_bias=draw(st.booleans()),
        mlp_bias=draw(st.booleans()),
        dtype=draw(st.sampled_from(["bfloat16", "float16", "float32", "float64"])),
    )


def model_of(n_bytes: int) -> ModelArgs:
    """A model of about `n_bytes` in bfloat16."""
    args = ModelArgs(
        dim=512, n_layers=1, n_heads=8, n_kv_heads=2, head_dim=64, ffn_dim=1408, vocab_size=1009
    )
    per_layer = 2 * (512 * 512 * 2 + 2 * 512 * 128 + 3 * 512 * 1408)
    return replace(args, n_layers=max(1, n_bytes // per_layer))


def write_model(folder: Path, args: ModelArgs, n_files: int = 1, **dtypes: torch.dtype) -> Path:
    """A complete HF folder; `dtypes` gives dtypes by a part of the name."""
    folder.mkdir(parents=True)
    weights = weights_of(args, getattr(torch, args.dtype))
    for part, dtype in dtypes.items():
        weights = {n: t.to(dtype) if part in n else t for n, t in weights.items()}
    write_hf(folder, weights, n_files)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": args.dim,
        "num_hidden_layers": args.n_layers,
        "num_attention_heads": args.n_heads,
        "num_key_value_heads": args.n_kv_heads,
        "head_dim": args.head_dim,
        "intermediate_size": args.ffn_dim,
        "vocab_size": args.vocab_size,
        "rms_norm_eps": args.norm_eps,
        "max_position_embeddings": args.max_seq_len,
        "tie_word_embeddings": args.tied_embeddings,
        "attention_bias": args.attention_bias,
        "mlp_bias": args.mlp_bias,
        "torch_dtype": args.dtype,
        "eos_token_id": 2,
        "bos_token_id": None,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write(layout: Layout, args: ModelArgs, tensors: Mapping[str, Tensor], folder: Path) -> Path:
    """Writes a folder with the methods of `layout` only."""
    folder.mkdir()
    layout.create(folder)
    fill(layout, args, tensors, folder)
    layout.finish(folder)
    for name, content in layout.metadata().items():
        (folder / name).write_bytes(content)
    return folder


def fill(layout: Layout, args: ModelArgs, tensors: Mapping[str, Tensor], folder: Path) -> None:
    for param in parameters(args):
        if param.name in tensors:
            for name, offset, part in layout.parts(param, [(tensors[param.name],)]):
                assert part.is_contiguous()
                with (folder / name).open("r+b") as file:
                    file.seek(offset)
                    file.write(part.view(-1).view(torch.uint8).numpy().data)


def moved(source: Path, target: Path, layout: str, n_parts: int = 1, **options: Any) -> Path:
    reshard(find_model(str(source)), target, layout=layout, n_parts=n_parts, **options)
    return target


def opened(files: ModelFiles, args: ModelArgs = TINY) -> Checkpoint:
    checkpoint = open_checkpoint(files, args)
    checkpoint.check(args)
    return checkpoint


def read(folder: Path) -> dict[str, Tensor]:
    """Every whole tensor as read by the package."""
    files = find_model(str(folder))
    args = load_model_args(files)
    checkpoint = opened(files, args)
    tensors = {p.name: checkpoint.read(p, range(p.shape[p.dim])) for p in parameters(args)}
    checkpoint.close()
    return tensors


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a folder's safetensors files, read by the safetensors library."""
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dictionary)
                assert name not in tensors
                tensors[name] = file.get_tensor(name)
    return tensors


def same_bytes(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether both have the same tensors, at least one, with equal bytes."""
    return one.keys() == other.keys() != set() and all(
        tensor.dtype == other[name].dtype
        and tensor.shape == other[name].shape
        and tensor.view(-1).view(torch.uint8).equal(other[name].view(-1).view(torch.uint8))
        for name, tensor in one.items()
    )


def hashes_of(folder: Path) -> dict[str, str]:
    """The hash of every file below a folder."""
    return {
        path.relative_to(folder).as_posix(): sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def through_every_layout(source: Path, home: Path) -> Path:
    """The HF folder that comes back from a native and a Meta folder, with equal weights."""
    args, folder = load_model_args(find_model(str(source))), source
    for layout, n_parts in (("native", 2), ("meta", 3), ("hf", 1)):
        reshard(find_model(str(folder)), home / layout, layout=layout, n_parts=n_parts)
        folder = home / layout
        assert load_model_args(find_model(str(folder))) == args
    stored, back = (load_file(each / "model.safetensors") for each in (source, folder))
    assert back.keys() == stored.keys()
    assert all(torch.equal(back[key], weight) for key, weight in stored.items())
    return folder
