"""Compares prefill of a sliding-window layer: our tiles and three methods from the literature.

    python -m launch.bench.windows [--window 512] [--lengths 1024,2048,4096,8192,16384]
                                   [--repeat 3] [--threads 1] [--svg launch/bench/windows.svg]

`tiles` is the engine's method: steps of 512 tokens, and small blocks of queries over the keys that
they see. `mask` computes the scores of all pairs and masks those outside the window. `loop` takes
one query after another. `chunks` is Longformer's method: blocks of one window of queries over two
windows of keys. Time is the median of the rounds. Memory is the peak of a separate process, without
queries, keys and values. A method whose scores would take more than 512 MiB is left out.

Source: Longformer, arXiv 2004.05150, section 3.1 and appendix A.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from launch.bench.plot import Chart, svg
from parallel_llama.checkpoint.checkpoint import random_checkpoint
from parallel_llama.dtypes import Precision
from parallel_llama.engine.kv_blocks import STEP_TOKENS
from parallel_llama.engine.model_runner import Chunk, ModelRunner
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.ops.formats import dtype_name
from parallel_llama.parallel.collectives import Solo
from parallel_llama.plan import make_plan

N_HEADS, HEAD_DIM = 8, 64
MAX_SCORE_BYTES = 1 << 29

# Attention of queries, keys and values. Shapes: all arguments and the result [H, T, D].
Way = Callable[[Tensor, Tensor, Tensor], Tensor]


def tiles(n_tokens: int, window: int, dtype: torch.dtype) -> Way:
    """The engine's method; every query head has its own KV head, as in the other methods."""
    args = ModelArgs(
        dim=N_HEADS * HEAD_DIM, n_layers=1, n_heads=N_HEADS, n_kv_heads=N_HEADS,
        head_dim=HEAD_DIM, ffn_dim=8, vocab_size=8, sliding_window=window,
    )  # fmt: skip
    runner = ModelRunner.load(
        args,
        random_checkpoint(args, seed=0),
        make_plan(args, 1),
        Solo(),
        precision=Precision.plain(dtype_name(dtype)),
        device=torch.device("cpu"),
    )
    runner.reserve([1], n_tokens)
    cache = runner.caches[0]
    for held in (cache.k, cache.v):  # as when an engine starts
        held.zero_()

    def way(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cache.k[0].copy_(k)
        cache.v[0].copy_(v)
        o = torch.empty_like(q)
        for start in range(0, n_tokens, STEP_TOKENS["cpu"]):
            queries = q[:, start : start + STEP_TOKENS["cpu"]].transpose(0, 1).contiguous()
            chunk = Chunk([0] * len(queries), start, [[0]], n_tokens)
            kv_group = runner.batch([chunk]).kv_groups[0]
            part = torch.empty_like(queries)
            assert kv_group.plan is not None
            runner.model.ops.attention(queries, *cache.layer(0), kv_group.plan, cache.heads, part)
            o[:, start : start + len(queries)] = part.transpose(0, 1)
        return o

    return way


def mask(n_tokens: int, window: int, dtype: torch.dtype) -> Way:
    del dtype

    def way(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT * HEAD_DIM**-0.5
        at = torch.arange(n_tokens)
        back = at[:, None] - at
        return scores.masked_fill_((back < 0) | (back >= window), -torch.inf).softmax(-1) @ v

    return way


def loop(n_tokens: int, window: int, dtype: torch.dtype) -> Way:
    del dtype

    def way(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o = torch.empty_like(q)
        for at in range(n_tokens):
            seen, own = slice(max(at - window + 1, 0), at + 1), slice(at, at + 1)
            o[:, own] = F.scaled_dot_product_attention(q[:, own], k[:, seen], v[:, seen])
        return o

    return way


def chunks(n_tokens: int, window: int, dtype: torch.dtype) -> Way:
    del dtype
    n_chunks = -(-n_tokens // window)
    n_short = n_chunks * window - n_tokens
    ahead, back = torch.arange(window)[:, None] + window, torch.arange(2 * window)
    hidden = (back > ahead) | (back <= ahead - window)  # [window, 2 window]
    hidden_first = hidden | (back < window)  # there are no keys before the first chunk

    def way(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        queries = F.pad(q, (0, 0, 0, n_short)).unflatten(1, (n_chunks, window))
        keys, values = (
            F.pad(each, (0, 0, window, n_short)).unfold(1, 2 * window, window).mT for each in (k, v)
        )  # [H, n_chunks, 2 window, D]
        scores = queries @ keys.mT * HEAD_DIM**-0.5
        scores[:, 1:].masked_fill_(hidden, -torch.inf)
        scores[:, 0].masked_fill_(hidden_first, -torch.inf)
        return (scores.softmax(-1) @ values).flatten(1, 2)[:, :n_tokens]

    return way


WAYS = {"tiles": tiles, "mask": mask, "loop": loop, "chunks": chunks}


def score_bytes(name: str, n_tokens: int, window: int) -> int:
    """Bytes of all scores that exist at the same time, in float32."""
    keys = {"mask": n_tokens, "chunks": 2 * window}.get(name, 0)
    return 4 * N_HEADS * n_tokens * keys


def measure(name: str, n_tokens: int, window: int, n_rounds: int) -> dict[str, float]:
    """Seconds of the median round and peak bytes of one method in this process."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, N_HEADS, n_tokens, HEAD_DIM, generator=generator)
    way = WAYS[name](n_tokens, window, torch.float32)
    before = _memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    seconds = []
    for _ in range(n_rounds):
        started = time.perf_counter()
        way(q, k, v)
        seconds.append(time.perf_counter() - started)
    return {"s": statistics.median(seconds), "bytes": max(_memory("VmHWM") - before, 1 << 12)}


def _memory(key: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{key}:")[1].split()[0]) << 10


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m launch.bench.windows")
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--lengths", default="1024,2048,4096,8192,16384")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--svg", type=Path)
    parser.add_argument("--only", choices=WAYS, help="one way, one length, in this process")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    lengths = [int(length) for length in options.lengths.split(",")]
    if options.only:
        with torch.inference_mode():
            found = measure(options.only, lengths[0], options.window, options.repeat)
        print(json.dumps(found))
        return
    figures = {
        name: {
            length: _in_a_process(name, length, options)
            for length in lengths
            if score_bytes(name, length, options.window) <= MAX_SCORE_BYTES
        }
        for name in WAYS
    }
    for name, own in figures.items():
        for length, found in own.items():
            print(
                f"{name:7} {length:6} {found['s'] * 1e3:10.1f} ms {found['bytes'] / 1e6:10.1f} MB"
            )
    if options.svg:
        options.svg.write_text(svg([_chart(figures, *each, options.window) for each in _AXES]))


_AXES = ("s", "seconds", 1.0), ("bytes", "megabytes", 1e-6)


def _chart(
    figures: dict[str, dict[int, dict[str, float]]], key: str, unit: str, scale: float, window: int
) -> Chart:
    lines = {
        name: [(length, found[key] * scale) for length, found in own.items()]
        for name, own in figures.items()
    }
    return Chart(f"prefill with a window of {window}, {unit}", "tokens", lines)


def _in_a_process(name: str, length: int, options: argparse.Namespace) -> dict[str, float]:
    command = [sys.executable, "-m", "launch.bench.windows", "--only", name]
    command += ["--lengths", str(length), "--window", str(options.window)]
    command += ["--repeat", str(options.repeat), "--threads", str(options.threads)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    main()
