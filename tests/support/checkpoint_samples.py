"""Small checkpoints in every layout, written from one set of weights.

This module does not use the package's readers: it repeats the rotary order, the names and the cuts
of Meta's files, so that a wrong reader cannot pass its own test.
"""

import itertools
import json
import math
from pathlib import Path

import gguf
import torch
from safetensors.torch import save_file
from torch import Tensor

from parallel_llama.families import parameters
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.files.model_files import ModelFiles

# 9 heads, 3 KV heads, 50 channels and 101 rows: sizes that no number of ranks but 1, 3, 9 divides.
TINY = ModelArgs(
    dim=36,
    n_layers=2,
    n_heads=9,
    n_kv_heads=3,
    head_dim=4,
    ffn_dim=50,
    vocab_size=101,
    attention_bias=True,
    mlp_bias=True,
    dtype="float32",
)

HF_NAMES = {
    "tok_embeddings.": "model.embed_tokens.",
    "attention_norm.": "input_layernorm.",
    "attention.wq.": "self_attn.q_proj.",
    "attention.wk.": "self_attn.k_proj.",
    "attention.wv.": "self_attn.v_proj.",
    "attention.wo.": "self_attn.o_proj.",
    "ffn_norm.": "post_attention_layernorm.",
    "feed_forward.w1.": "mlp.gate_proj.",
    "feed_forward.w2.": "mlp.down_proj.",
    "feed_forward.w3.": "mlp.up_proj.",
    "output.": "lm_head.",
}
GGUF_NAMES = {
    "tok_embeddings.": "token_embd.",
    "attention_norm.": "attn_norm.",
    "attention.wq.": "attn_q.",
    "attention.wk.": "attn_k.",
    "attention.wv.": "attn_v.",
    "attention.wo.": "attn_output.",
    "feed_forward.w1.": "ffn_gate.",
    "feed_forward.w2.": "ffn_down.",
    "feed_forward.w3.": "ffn_up.",
}


def weights_of(args: ModelArgs, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Random whole weights under Meta's names, wq and wk in the half-split order."""
    generator = torch.Generator().manual_seed(1)
    return {
        param.name: torch.randn(param.shape, generator=generator).to(dtype)
        for param in parameters(args)
    }


def hf_name(name: str) -> str:
    for meta, hf in HF_NAMES.items():
        name = name.replace(meta, hf)
    return f"model.{name}" if name.startswith(("layers.", "norm.")) else name


def gguf_name(name: str) -> str:
    for meta, gguf_part in GGUF_NAMES.items():
        name = name.replace(meta, gguf_part)
    return name.replace("layers.", "blk.") if name != "norm.weight" else "output_norm.weight"


def interleaved(name: str, whole: Tensor, head_dim: int) -> Tensor:
    """wq and wk as Meta stores them: row 2p of a head is row p of the half-split order."""
    if ".wq." not in name and ".wk." not in name:
        return whole
    order = [
        head * head_dim + pair + half * head_dim // 2
        for head in range(len(whole) // head_dim)
        for pair in range(head_dim // 2)
        for half in range(2)
    ]
    return whole[order]


def write_hf(folder: Path, tensors: dict[str, Tensor], n_files: int = 1) -> ModelFiles:
    """An HF folder of tensors given with Meta's names."""
    return write_safetensors(folder, {hf_name(name): t for name, t in tensors.items()}, n_files)


def write_safetensors(folder: Path, tensors: dict[str, Tensor], n_files: int = 1) -> ModelFiles:
    """An HF folder of tensors with HF's names, distributed over several files."""
    config = folder / "config.json"
    if n_files == 1:
        path = folder / "model.safetensors"
        save_file(tensors, path)
        return ModelFiles("hf", folder, config, (path,), None)
    files = [f"model-{n + 1:05}-of-{n_files:05}.safetensors" for n in range(n_files)]
    for number, file in enumerate(files):
        save_file({name: tensors[name] for name in list(tensors)[number::n_files]}, folder / file)
    index = folder / "model.safetensors.index.json"
    listing = {name: files[at % n_files] for at, name in enumerate(tensors)}
    index.write_text(json.dumps({"metadata": {}, "weight_map": listing}))
    return ModelFiles("hf", folder, config, tuple(folder / file for file in files), index)


def meta_shards(
    args: ModelArgs, tensors: dict[str, Tensor], n_files: int, embedding_dim: int = 0
) -> list[dict[str, Tensor]]:
    """The tensors of each file of a Meta folder: near-even cuts of every sharded tensor."""
    shards: list[dict[str, Tensor]] = [{} for _ in range(n_files)]
    for param in parameters(args):
        whole = interleaved(param.name, tensors[param.name], args.head_dim)
        if param.axis is None:
            pieces = [whole] * n_files
        elif param.axis == "kv_heads" and n_files > args.n_kv_heads:
            copies = n_files // args.n_kv_heads
            heads = whole.split(args.head_dim)
            pieces = [heads[file // copies] for file in range(n_files)]
        else:
            dim = embedding_dim if param.name == "tok_embeddings.weight" else param.dim
            unit = param.unit if dim == param.dim else 1
            n_units = whole.shape[dim] // unit
            cuts = [file * n_units // n_files * unit for file in range(n_files + 1)]
            pieces = [whole.narrow(dim, a, b - a) for a, b in itertools.pairwise(cuts)]
        for shard, piece in zip(shards, pieces, strict=True):
            shard[param.name] = piece.clone()
    return shards


def write_meta(folder: Path, shards: list[dict[str, Tensor]]) -> ModelFiles:
    paths = [folder / f"consolidated.{number:02}.pth" for number in range(len(shards))]
    for path, shard in zip(paths, shards, strict=True):
        torch.save(shard, path)
    return ModelFiles("meta", folder, folder / "params.json", tuple(paths), None)


def write_gguf(
    path: Path, args: ModelArgs, tensors: dict[str, Tensor], types: dict[str, str]
) -> ModelFiles:
    """A GGUF file; `types` gives the ggml type of each tensor by the end of its name, else F32.

    Types that the gguf package cannot write get random blocks with small finite scales.
    """
    writer = gguf.GGUFWriter(path, "llama")
    sizes = {
        "context_length": args.max_seq_len,
        "embedding_length": args.dim,
        "block_count": args.n_layers,
        "feed_forward_length": args.ffn_dim,
        "head_count": args.n_heads,
        "head_count_kv": args.n_kv_heads,
        "key_length": args.head_dim,
        "value_length": args.head_dim,
        "rope_dimension_count": args.head_dim,
        "rope_freq_base": args.rope_theta,
        "layer_norm_rms_eps": args.norm_eps,
        "vocab_size": args.vocab_size,
    }
    for name, size in sizes.items():
        getattr(writer, f"add_{name}")(size)
    for name, whole in tensors.items():
        values = interleaved(name, whole, args.head_dim).float().numpy()
        hits = [kind for end, kind in types.items() if name.endswith(end)]
        kind = gguf.GGMLQuantizationType[hits[0] if hits else "F32"]
        block, _ = gguf.GGML_QUANT_SIZES[kind]
        try:
            data = gguf.quants.quantize(values, kind)
        except NotImplementedError:
            n_blocks = math.prod(values.shape) // block
            data = random_blocks(kind.name, n_blocks).reshape(*values.shape[:-1], -1).numpy()
        writer.add_tensor(gguf_name(name), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return ModelFiles("gguf", path, path, (path,), None)


# Offsets in a block of the high bytes of its float16 scales. IQ1_M has a scale in the high halves
# of four bytes, and all small floats of NVFP4 are finite.
SCALES = {"Q2_K": (81, 83), "Q3_K": (109,), "Q4_K": (1, 3), "Q5_K": (1, 3), "Q6_K": (209,)}
SCALES |= {"IQ1_M": (55,), "NVFP4": ()}


def random_blocks(kind: str, n_blocks: int) -> Tensor:
    """Random blocks of any bytes, with finite scales."""
    block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
    generator = torch.Generator().manual_seed(2)
    blocks = torch.randint(0, 256, (n_blocks, block_bytes), dtype=torch.uint8, generator=generator)
    for at in SCALES.get(kind, (1,)):
        blocks[:, at] = 0x2C  # 0.0625 to 0.125
    return blocks
