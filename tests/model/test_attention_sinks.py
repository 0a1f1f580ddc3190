"""Attention sinks: first tokens in addition to a sliding window, for sequences of any length."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from mixes import ARGS, make_runner
from parity_steps import full_logits
from thread_ranks import run_on_threads
from tiny_folder import write_chat_folder
from torch import Tensor

from parallel_llama import LLM, SamplingParams
from parallel_llama.checkpoint.checkpoint import random_checkpoint
from parallel_llama.engine.block_pool import BlockPool
from parallel_llama.engine.kv_blocks import KVGroupBlocks
from parallel_llama.engine.step_buffer import Chunk
from parallel_llama.errors import UsageError
from parallel_llama.families import parameters
from parallel_llama.families.model_args import ModelArgs, RopeScaling, with_sinks
from parallel_llama.parallel.collectives import Communicator, Solo
from parallel_llama.plan import make_plan

N_SINKS, WINDOW = 3, 7
TOKENS = [(11 * at + 5) % ARGS.vocab_size for at in range(60)]
SINKING = replace(ARGS, sliding_window=WINDOW, attention_sinks=N_SINKS)


def reference(args: ModelArgs, tokens: list[int]) -> Tensor:
    """The definition: the keys of each token are concatenated and numbered from 0.

    Every token has its own cache: sinks and window, at positions 0, 1, 2, ..., with keys rotated
    anew. Only the weights are read by code of the package.
    """
    checkpoint = random_checkpoint(args, seed=1)
    weights = {
        param.name: checkpoint.read(param, range(param.shape[param.dim]), "interleaved")
        for param in parameters(args)
    }
    n, kv_group = len(tokens), args.n_heads // args.n_kv_heads

    def norm(x: Tensor, name: str) -> Tensor:
        rms = (x.square().mean(-1, keepdim=True) + args.norm_eps).sqrt()
        return x / rms * weights[name]

    def rotated(x: Tensor, at: Tensor) -> Tensor:  # [T, H, D]
        pair = torch.arange(0, args.head_dim, 2, dtype=torch.float64)
        angles = at[:, None].double() * args.rope_theta ** (-pair / args.head_dim)
        turn = torch.polar(torch.ones_like(angles), angles)[:, None]
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2).contiguous())
        return torch.view_as_real(pairs * turn).flatten(-2)

    x = weights["tok_embeddings.weight"][tokens]
    for layer in range(args.n_layers):
        name = f"layers.{layer}"
        y = norm(x, f"{name}.attention_norm.weight")
        q, k, v = (
            (y @ weights[f"{name}.attention.{w}.weight"].T).view(n, -1, args.head_dim)
            for w in ("wq", "wk", "wv")
        )
        heads = torch.empty_like(q)
        for at in range(n):
            seen = sorted({*range(min(N_SINKS, at + 1)), *range(max(0, at - WINDOW + 1), at + 1)})
            own_q = rotated(q[at : at + 1], torch.tensor([len(seen) - 1]))[0]
            own_k = rotated(k[seen], torch.arange(len(seen))).repeat_interleave(kv_group, 1)
            scores = torch.einsum("hd,shd->hs", own_q, own_k) / args.head_dim**0.5
            values = v[seen].repeat_interleave(kv_group, 1)
            heads[at] = torch.einsum("hs,shd->hd", scores.softmax(-1), values)
        x = x + heads.flatten(1) @ weights[f"{name}.attention.wo.weight"].T
        y = norm(x, f"{name}.ffn_norm.weight")
        gate, up = (y @ weights[f"{name}.feed_forward.{w}.weight"].T for w in ("w1", "w3"))
        x = x + (gate * gate.sigmoid() * up) @ weights[f"{name}.feed_forward.w2.weight"].T
    return norm(x, "norm.weight") @ weights["output.weight"].T


def sinking_logits(comm: Communicator, cuts: list[int], args: ModelArgs = SINKING) -> Tensor:
    runner = make_runner(comm, args)
    runner.reserve([len(TOKENS)], 1)
    table = [range(len(TOKENS))]
    pieces = zip([0, *cuts], [*cuts, len(TOKENS)], strict=True)
    hidden = [
        runner.forward([Chunk(TOKENS[start:stop], start, table, len(TOKENS))])
        for start, stop in pieces
    ]
    return full_logits(runner, torch.cat(hidden))


@pytest.mark.parametrize("tp_size", [1, 2, 3, 5])
@pytest.mark.parametrize("cuts", [[], [5, 21], list(range(2, 60))], ids=["whole", "three", "each"])
def test_logits_match_reference_with_cache_positions(tp_size, cuts):
    expected = reference(SINKING, TOKENS)
    for logits in run_on_threads(tp_size, sinking_logits, cuts):
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)


def test_sinks_have_the_rotary_base_of_layers_with_a_window():
    """Regression: queries were rotated back to the sinks with the base of full attention."""
    args = replace(SINKING, local_rope_theta=100.0)
    expected = reference(replace(SINKING, rope_theta=100.0), TOKENS)
    logits = sinking_logits(Solo(), [5, 21], args)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)


def test_sink_blocks_are_kept_while_the_window_slides():
    pool = BlockPool(40, 2)
    kv_group = KVGroupBlocks(pool, window=6, step_tokens=4, n_sinks=3)
    table = kv_group.prefix([])
    kv_group.start(table, 4, 1000)
    sinks = table.blocks[:2]
    for start in range(0, 400, 4):
        kv_group.extend(table, start, start + 4, 1000)
        assert [table[0], table[1]] == sinks
        assert len(table.blocks) <= kv_group.n_held(1000)
        seen = range(max((start - 5) // 2, 2), (start + 3) // 2 + 1)
        assert not {table[number] for number in seen} & set(sinks)
    kv_group.release(table)
    assert pool.n_used == 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_folder(tmp_path_factory.mktemp("sinks") / "model")


def test_generation_with_sinks_continues_beyond_the_context(folder):
    """The answer exceeds four contexts of 64 tokens; without sinks the request is refused."""
    params = SamplingParams(max_tokens=300, ignore_eos=True)
    options = {"dtype": "float64", "max_seq_len": 64, "kv_cache_bytes": 1 << 22, "block_size": 4}
    with LLM(str(folder), **options) as bounded, pytest.raises(UsageError, match="context"):
        bounded.generate([[1, 2, 3]], params)
    with LLM(str(folder), **options, attention_sinks=4) as endless:
        (one,) = endless.generate([[1, 2, 3]], params)
        assert len(one.tokens) == 300
        both = endless.generate([[1, 2, 3], [5, 6, 7, 8]], params)
        assert both[0].tokens == one.tokens


def test_unsupported_attention_sinks_are_refused():
    hybrid = replace(ARGS, sliding_window=5, full_layers=(0,))
    with pytest.raises(UsageError, match="attention_sinks=4: some layers attend to all keys"):
        with_sinks(hybrid, 4, 2048)
    dynamic = replace(ARGS, rope_scaling=RopeScaling("dynamic", 2.0, 2048))
    with pytest.raises(UsageError, match="dynamic rope scaling"):
        with_sinks(dynamic, 4, 2048)
    with pytest.raises(UsageError, match="layers without rotary embeddings"):
        with_sinks(replace(ARGS, unrotated_layers=(1,)), 4, 2048)
    with pytest.raises(UsageError, match="attention_sinks=64: use 1 to 63"):
        with_sinks(ARGS, 64, 64)
    with pytest.raises(UsageError, match="attention sinks cannot be combined with sharding"):
        make_plan(with_sinks(replace(ARGS, n_kv_heads=1), 4, 64), 3, kv_split="sequence")
    assert with_sinks(ARGS, 4, 64).sliding_window == 60
