"""PaLM compared with a model written from its paper, since none is published."""

import json
import math
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from parity_steps import load_runner, logits_of_models
from safetensors.torch import save_file
from thread_ranks import ThreadComm, run_on_threads
from torch import Tensor

from parallel_llama.engine.step_buffer import Chunk

DIM, N_HEADS, HEAD_DIM, FFN_DIM, VOCAB_SIZE, N_LAYERS = 42, 7, 6, 91, 97, 3
TOKENS = [(11 * at + 5) % VOCAB_SIZE for at in range(30)]

CONFIG = {
    "model_type": "palm",
    "architectures": ["PaLMForCausalLM"],
    "hidden_size": DIM,
    "num_hidden_layers": N_LAYERS,
    "num_attention_heads": N_HEADS,
    "head_dim": HEAD_DIM,
    "intermediate_size": FFN_DIM,
    "vocab_size": VOCAB_SIZE,
    "layer_norm_eps": 1e-5,
    "torch_dtype": "float64",
}


@pytest.fixture
def weights(tmp_path: Path) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    made = {"model.embed_tokens.weight": random(VOCAB_SIZE, DIM)}
    made["model.norm.weight"] = 1 + 0.1 * random(DIM)
    shapes = {
        "self_attn.q_proj": (N_HEADS * HEAD_DIM, DIM),
        "self_attn.k_proj": (HEAD_DIM, DIM),
        "self_attn.v_proj": (HEAD_DIM, DIM),
        "self_attn.o_proj": (DIM, N_HEADS * HEAD_DIM),
        "mlp.gate_proj": (FFN_DIM, DIM),
        "mlp.up_proj": (FFN_DIM, DIM),
        "mlp.down_proj": (DIM, FFN_DIM),
    }
    for layer in range(N_LAYERS):
        made[f"model.layers.{layer}.input_layernorm.weight"] = 1 + 0.1 * random(DIM)
        for name, shape in shapes.items():
            weight = random(*shape) / shape[1] ** 0.5
            made[f"model.layers.{layer}.{name}.weight"] = weight
    folder = tmp_path / "palm"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(made, folder / "model.safetensors")
    return made


def layer_norm(x: Tensor, weight: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def rotated(x: Tensor) -> Tensor:
    """RoFormer's rotation of the halves of each head. Shapes: x [T, H, D]."""
    half = HEAD_DIM // 2
    freqs = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(len(x), dtype=torch.float64)[:, None, None] * freqs
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


def palm(weights: Mapping[str, Tensor], tokens: list[int]) -> Tensor:
    """y = x + MLP(LayerNorm(x)) + Attention(LayerNorm(x)), one key and value for all heads."""
    x = weights["model.embed_tokens.weight"][tokens]
    hidden = torch.full((len(tokens), len(tokens)), -math.inf, dtype=torch.float64).triu(1)
    for layer in range(N_LAYERS):

        def of(name: str, y: Tensor, layer: int = layer) -> Tensor:
            return y @ weights[f"model.layers.{layer}.{name}.weight"].T

        normed = layer_norm(x, weights[f"model.layers.{layer}.input_layernorm.weight"])
        q = rotated(of("self_attn.q_proj", normed).view(len(tokens), N_HEADS, HEAD_DIM))
        k = rotated(of("self_attn.k_proj", normed)[:, None])[:, 0]
        v = of("self_attn.v_proj", normed)
        scores = torch.einsum("thd,sd->hts", q, k) / HEAD_DIM**0.5 + hidden
        heads = torch.einsum("hts,sd->thd", scores.softmax(-1), v).flatten(1)
        gate, up = of("mlp.gate_proj", normed), of("mlp.up_proj", normed)
        ffn = of("mlp.down_proj", gate * gate.sigmoid() * up)
        x = x + ffn + of("self_attn.o_proj", heads)
    logits = layer_norm(x, weights["model.norm.weight"]) @ weights["model.embed_tokens.weight"].T
    return logits / DIM**0.5


def test_logits_match_reference_from_paper_at_every_tp_size(weights, tmp_path):
    expected = palm(weights, TOKENS)
    for tp_size in range(1, N_HEADS + 1):
        work = [(tmp_path / "palm", TOKENS)]
        for (logits,) in run_on_threads(tp_size, logits_of_models, work):
            torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)


def all_reduces_of_a_forward(comm: ThreadComm, folder: Path) -> int:
    runner = load_runner(comm, folder, len(TOKENS))
    runner.forward([Chunk(TOKENS, 0, [[0]], len(TOKENS))])
    return comm.counts["all_reduce"]


@pytest.mark.usefixtures("weights")
def test_parallel_block_costs_one_all_reduce(tmp_path):
    counts = run_on_threads(3, all_reduces_of_a_forward, tmp_path / "palm")
    assert counts == [N_LAYERS + 1] * 3
