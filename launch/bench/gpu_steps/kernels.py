"""Compares kernels with torch, most in float64, checks batch invariance, and measures their speed.

Shares relate the bytes that a kernel reads and writes to the measured bandwidths; for prompts, they
are fractions of the measured rate of matrix products. A kernel has no figure in a dtype in which it
is wrong.
"""

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import islice, product
from typing import Any

import torch
import torch.nn.functional as F
from paged_samples import POISON, Sample, make_sample
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.runtime.jit import JITFunction

from launch.bench.gpu_steps import Row, Rows, Setting, attempt
from launch.bench.gpu_steps.checked import CACHED, alike, dtype_name, dtypes, hold, moved, normal
from launch.bench.gpu_steps.clock import device_seconds, in_us, measured
from parallel_llama.ops import SamplingKeys, TorchOps, kv_rows
from parallel_llama.ops.cuda_ops import CUDAOps
from parallel_llama.ops.filters import Filters
from parallel_llama.ops.part_sums import Product

# The matrices of a layer of Llama 3 8B, and its output head: (inputs, outputs).
_MATRICES = ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096), (4096, 128256))
_COMPILERS = 8  # processes; each takes half a gigabyte of the GPU
_COMPILE_S = 40.0  # time limit for all of these processes


def products(setting: Setting) -> Rows:
    """Products with every matrix of a layer of 8B, for 1 row and for 16."""
    shapes = ((48, 70),) if setting.is_rehearsal else _MATRICES
    for dtype in dtypes(setting):
        for n_inputs, n_outputs in shapes:
            for n_rows in (1, setting.pick(16, 2)):
                name = f"product {n_inputs} to {n_outputs}, {n_rows} rows, {dtype_name(dtype)}"
                yield from attempt(
                    name, lambda a=(name, n_rows, n_inputs, n_outputs, dtype): _product(*a, setting)
                )


def _product(
    name: str, n_rows: int, n_inputs: int, n_outputs: int, dtype: torch.dtype, setting: Setting
) -> Rows:
    ops = CUDAOps()
    x = normal((n_rows, n_inputs), dtype, setting)
    weights = [normal((n_outputs, n_inputs), dtype, setting) for _ in range(2)]
    y = ops.linear(x, weights[0])
    hold(y, x.double() @ weights[0].double().T, dtype)
    alike(y, torch.cat([ops.linear(row[None], weights[0]) for row in x]))
    n = max(2, CACHED // weights[0].nbytes) if not setting.is_rehearsal else 1
    weights += [weights[0].clone() for _ in range(n - 2)]
    seconds = device_seconds([lambda w=w: ops.linear(x, w) for w in weights], setting)
    yield moved(name, weights[0].nbytes + x.nbytes + y.nbytes, seconds, setting)


def part_sums(setting: Setting) -> Rows:
    """One row of Llama 3 8B: a product (split-K), and an operator that adds its partial sums.

    In the rows "added first", a kernel of its own adds the partial sums: one more launch.
    """
    dim, n_gates = (48, 40) if setting.is_rehearsal else (4096, 3584)
    for dtype in dtypes(setting):
        stream = normal((1, dim), dtype, setting)
        for name, n_outputs, read in (
            (
                "wo and norm",
                dim,
                lambda ops, y, s=stream: ops.add_rms_norm(s.clone(), y, s[0], 1e-5),
            ),
            ("w1, w3 and gate of 1 of 8 ranks", n_gates, lambda ops, y: ops.silu_and_mul(y)),
        ):
            label, weight = f"{name}, {dtype_name(dtype)}", normal((n_outputs, dim), dtype, setting)
            yield from attempt(
                label, lambda a=(label, stream, weight, read): _part_sums(*a, setting)
            )


def _part_sums(
    name: str,
    x: Tensor,
    weight: Tensor,
    read: Callable[[TorchOps, Product], Tensor],
    setting: Setting,
) -> Rows:
    ops, torchs = CUDAOps(), TorchOps()
    y = read(ops, ops.product(x, weight))
    alike(y, read(ops, ops.linear(x, weight)))
    hold(y, read(torchs, torchs.linear(x, weight)), x.dtype)
    for label, multiply in ((name, ops.product), (f"{name}, added first", ops.linear)):
        calls = [lambda m=multiply: read(ops, m(x, weight))] * setting.pick(50, 1)
        yield in_us(Row(label), device_seconds(calls, setting))


def elementwise(setting: Setting) -> Rows:
    """Norms, gates and sampling for 16 rows of 8B."""
    dim, n_channels, n_vocab = (48, 40, 70) if setting.is_rehearsal else (4096, 14336, 128256)
    n_rows = setting.pick(16, 2)
    ours, torchs = CUDAOps(), TorchOps()
    keys = torch.zeros(n_rows, dtype=torch.int64, device=setting.device)  # equal for all rows
    zeros, ones = keys.double(), keys.double() + 1

    def draw(ops: TorchOps, x: Tensor, temperatures: Tensor) -> Tensor:
        return ops.draw(x, SamplingKeys(keys[: len(x)], temperatures[: len(x)]))

    def draw_filtered(ops: TorchOps, x: Tensor) -> Tensor:
        n = len(x)
        found = ops.candidates(x, ones[:n], 64)
        filters = Filters(
            SamplingKeys(keys[:n], ones[:n]), keys[:n] + 40, ones[:n] * 0.9, zeros[:n]
        )
        return ops.draw_filtered(found[None], filters, n_vocab)[:, None].double()

    for dtype in dtypes(setting):
        for name, call, width in (
            ("norm", lambda ops, x, w: ops.rms_norm(x, w, 1e-5), dim),
            ("sum and norm", lambda ops, x, w: ops.add_rms_norm(x, x, w, 1e-5), dim),
            ("gate", lambda ops, x, _: ops.silu_and_mul(x), 2 * n_channels),
            ("greedy sampling", lambda ops, x, _: draw(ops, x, zeros), n_vocab),
            ("plain sampling", lambda ops, x, _: draw(ops, x, ones), n_vocab),
            ("sampling with top_k and top_p", lambda ops, x, _: draw_filtered(ops, x), n_vocab),
        ):
            label = f"{name} of {n_rows} rows, {dtype_name(dtype)}"
            x = normal((n_rows, width), dtype, setting)
            yield from attempt(
                label, lambda a=(label, call, x): _elementwise(*a, ours, torchs, setting)
            )


def _elementwise(
    name: str,
    call: Callable[[TorchOps, Tensor, Tensor], Tensor],
    x: Tensor,
    ours: TorchOps,
    torchs: TorchOps,
    setting: Setting,
) -> Rows:
    weight, timed = x[0].clone(), x.clone()  # the call may overwrite x
    y = call(ours, x.clone(), weight)
    hold(y, call(torchs, x.double(), weight.double()), x.dtype)
    alike(y, torch.cat([call(ours, row[None].clone(), weight) for row in x]))
    seconds = device_seconds([lambda: call(ours, timed, weight)] * setting.pick(50, 1), setting)
    yield in_us(Row(name), seconds)


def attention(setting: Setting) -> Rows:
    """The speed of decode attention over scattered blocks."""
    keys = setting.pick(65536, 40)
    for name, ranges, target in (
        (
            f"decode attention, 1 sequence of {keys} keys",
            [(1, keys - 1)],
            "at least 0.80 of the copy bandwidth",
        ),
        ("decode attention, 16 sequences", [(1, keys // 16)] * setting.pick(16, 2), ""),
    ):
        yield from attempt(name, lambda a=(name, ranges, target): _attention(*a, setting))


def attention_checks(setting: Setting) -> Rows:
    """Attention over scattered blocks with uneven KV groups, head sizes and formats of the cache.

    Most of the time is compilation, so several processes compile the kernels first.
    """
    if not setting.is_rehearsal:
        _compile_at_once(setting)
    for name, of_sample in _samples(setting):
        yield from attempt(name, lambda n=name, s=of_sample: _attention_is_right(n, s))


def _compile_at_once(setting: Setting) -> None:
    """Fills Triton's cache. A kernel that fails here fails again in its check, which reports it."""
    n = min(len(os.sched_getaffinity(0)), _COMPILERS)
    context = multiprocessing.get_context("spawn")  # a fork cannot use the GPU
    workers = [context.Process(target=compile_samples, args=(setting, i, n)) for i in range(n)]
    for worker in workers:
        worker.start()
    deadline = time.monotonic() + _COMPILE_S
    for worker in workers:
        worker.join(max(deadline - time.monotonic(), 0.0))
        worker.kill()


def compile_samples(setting: Setting, first: int, step: int) -> None:
    """Compiles the kernels of every `step`-th check without launching them."""
    run = JITFunction.run

    def compile_only(kernel: Any, *arguments: Any, **how: Any) -> Any:
        return run(kernel, *arguments, **{**how, "warmup": True})

    JITFunction.run = compile_only
    for _, of_sample in islice(_samples(setting), first, None, step):
        with suppress(Exception):
            make_sample(**of_sample).run(CUDAOps())


def _samples(setting: Setting) -> Iterator[tuple[str, dict[str, Any]]]:
    """The samples by name. Every pair of values of two properties occurs in at least one sample."""
    decoded, chunks = ((1, 0), (1, 37), (0, 5), (1, 100)), ((5, 0), (40, 19), (0, 0), (17, 64))
    if setting.is_rehearsal:
        decoded, chunks = ((1, 0), (1, 6)), ((3, 2),)
    heads_per_kv = ((3, 2),) if setting.is_rehearsal else ((4,) * 8, (3, 2), (1, 3, 3, 2), (7,))
    caches = (None,) if setting.is_rehearsal else (None, torch.int8, torch.float8_e4m3fn)
    sizes = (16,) if setting.is_rehearsal else (64, 80, 128)
    of_properties = list(map(range, map(len, (dtypes(setting), heads_per_kv, sizes, caches))))
    for kind, ranges in (("decode", decoded), ("prefill", chunks)):
        # 36 of 108 combinations: the first three properties of a sample select the fourth, the
        # format of its cache.
        for a, b, c, d in product(*of_properties):
            if (a + b + c + d) % len(caches):
                continue
            dtype, group, head_dim, cache = dtypes(setting)[a], heads_per_kv[b], sizes[c], caches[d]
            stored = f", cache in {dtype_name(cache)}" if cache else ""
            name = f"{kind} attention, groups {group}, heads of {head_dim}, {dtype_name(dtype)}"
            yield (
                name + stored,
                {
                    "ranges": ranges,
                    "heads_per_kv": group,
                    "head_dim": head_dim,
                    "dtype": dtype,
                    "cache_dtype": cache,
                    "block_size": 4 if setting.is_rehearsal else 16,
                    "device": setting.device,
                },
            )


def _attention_is_right(name: str, of_sample: dict[str, Any]) -> Rows:
    sample, ops = make_sample(**of_sample), CUDAOps()
    out = _hold_sample(sample, ops)
    if sample.queries.max_queries == 1:
        for range_ in sample.queries.rows:
            one = replace(sample.queries, rows=range_[None])
            row = slice(int(range_[0]), int(range_[0]) + int(range_[1]))
            alike(out[row], replace(sample, queries=one).run(ops)[row])
    yield Row(name, note="right")


def _attention(name: str, ranges: list[tuple[int, int]], target: str, setting: Setting) -> Rows:
    dtype = torch.float32 if setting.is_rehearsal else torch.bfloat16
    heads_per_kv, head_dim = ((2,), 16) if setting.is_rehearsal else ((4,) * 8, 128)
    sample = make_sample(
        ranges, heads_per_kv, head_dim, dtype=dtype, block_size=16, device=setting.device
    )
    ops, heads = CUDAOps(), sample.heads  # created before a graph is recorded
    out = _hold_sample(sample, ops)

    def attend() -> None:
        ops.attention(sample.q, sample.k, sample.v, sample.plan, heads, out)

    n_keys = sum(n + start for n, start in ranges)
    n_bytes = 2 * n_keys * len(heads_per_kv) * head_dim * dtype.itemsize
    seconds = device_seconds([attend] * setting.pick(10, 1), setting)
    yield moved(name, n_bytes, seconds, setting, target)


def prompts(setting: Setting) -> Rows:
    """A whole prompt with an empty cache, in our kernel and in torch's flash attention.

    torch's attention takes contiguous keys, either as a layer computes them or gathered from their
    blocks. For uneven KV groups the keys are repeated for each head.
    """
    n, head_dim = setting.pick(4096, 24), setting.pick(128, 16)
    dtype = torch.float32 if setting.is_rehearsal else torch.bfloat16
    for heads_per_kv in ((4,) * setting.pick(8, 2), (3, 2)):
        own = {"dtype": dtype, "block_size": 16, "device": setting.device}
        sample = make_sample([(n, 0)], heads_per_kv, head_dim, **own)
        n_flops = 2 * n * n * sum(heads_per_kv) * head_dim
        for way, attend in _ways(sample, setting).items():
            name = f"prompt of {n} tokens, groups {heads_per_kv}, {way}"
            yield from attempt(name, lambda a=(name, attend, sample, n_flops): _prompt(*a, setting))


def _prompt(
    name: str, attend: Callable[[], Tensor], sample: Sample, n_flops: int, setting: Setting
) -> Rows:
    hold(attend(), sample.expected(), sample.q.dtype)
    seconds = device_seconds([attend] * setting.pick(10, 1), setting)
    row = Row(name, share=n_flops / seconds.median / setting.matrix_flops)
    yield measured(row, seconds, lambda s: n_flops / s / 1e12, "TFLOP/s")


def _ways(sample: Sample, setting: Setting) -> dict[str, Callable[[], Tensor]]:
    """The methods of attention to compare, for a sample with one range of queries."""
    ops, heads, out = CUDAOps(), sample.heads, torch.empty_like(sample.q)
    # A rehearsal has no GPU for flash attention.
    backend = SDPBackend.MATH if setting.is_rehearsal else SDPBackend.FLASH_ATTENTION
    is_even = len(set(sample.heads_per_kv)) == 1
    kv_head_of = [i for i, n in enumerate(sample.heads_per_kv) for _ in range(n)]
    of_heads = torch.tensor(kv_head_of, device=setting.device)

    def paged() -> Tensor:
        ops.attention(sample.q, sample.k, sample.v, sample.plan, heads, out)
        return out

    def flash(k: Tensor, v: Tensor) -> Tensor:
        if not is_even:
            k, v = k[of_heads], v[of_heads]
        q = sample.q.transpose(0, 1)
        with sdpa_kernel(backend):
            o = F.scaled_dot_product_attention(
                q[None], k[None], v[None], is_causal=True, enable_gqa=is_even
            )
        return o[0].transpose(0, 1)

    def gathered() -> Tensor:
        slots = sample.queries.slots_of(0, range(len(sample.q)))
        return flash(kv_rows.take(sample.k, slots), kv_rows.take(sample.v, slots))

    return {
        "keys in blocks": paged,
        "torch's flash attention": lambda: flash(sample.keys[0], sample.values[0]),
        "torch's flash attention, keys gathered": gathered,
    }


def routed_products(setting: Setting) -> Rows:
    """The first product of the experts of a Mixtral layer, 2 of 8 for each token."""
    for n_rows in (3,) if setting.is_rehearsal else (1, 16, 64):
        name = f"routed product, {n_rows} rows"
        yield from attempt(name, lambda a=(name, n_rows): _routed(*a, setting))


def _routed(name: str, n_rows: int, setting: Setting) -> Rows:
    n_inputs, n_outputs = (48, 70) if setting.is_rehearsal else (4096, 28672)
    ops, dtype = CUDAOps(), dtypes(setting)[-1]
    x = normal((n_rows, n_inputs), dtype, setting)
    weights = [normal((n_outputs, n_inputs), dtype, setting) for _ in range(8)]
    experts = torch.rand(n_rows, 8, device=setting.device).topk(2).indices
    dispatch, _ = ops.expert_dispatch(experts, range(8))
    y = ops.routed_linear(x, weights, dispatch)
    chosen = sorted(experts.flatten().tolist())
    pairs = [
        (x[row][None], weights[expert])
        for row, expert in zip(dispatch.sources, chosen, strict=True)
    ]
    hold(y, torch.cat([row.double() @ weight.double().T for row, weight in pairs]), dtype)
    alike(y, torch.cat([ops.linear(row, weight) for row, weight in pairs]))
    calls = [lambda: ops.routed_linear(x, weights, dispatch)] * setting.pick(10, 1)
    n_bytes = len({*chosen}) * weights[0].nbytes + x.nbytes + y.nbytes
    yield moved(name, n_bytes, device_seconds(calls, setting), setting)


# The checks of attention take most of the time, so they come after the speeds.
PARTS = {
    "products": products,
    "sums over parts": part_sums,
    "attention": attention,
    "prompts": prompts,
    "routed products": routed_products,
    "norms and gates": elementwise,
    "attention checks": attention_checks,
}


def _hold_sample(sample: Sample, ops: TorchOps) -> Tensor:
    out, expected = sample.run(ops), sample.expected()
    is_row = expected != POISON
    hold(out.where(is_row, 0), expected.where(is_row, 0), out.dtype)
    return out
