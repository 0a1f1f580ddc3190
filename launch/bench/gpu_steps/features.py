"""Checks that features of the engine do not change tokens, and that its memory is returned.

The model is tiny, in float32, with the same random weights on every device.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from launch.bench.gpu_steps import Row, Rows, Setting, Wrong, attempt
from launch.bench.gpu_steps.models import params_file
from launch.bench.gpu_steps.parity import shape_of
from parallel_llama import LLM, SamplingParams

Tokens = list[tuple[int, ...]]

_GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)
_CACHE_BYTES = 64 << 20
# More than what CUDA's libraries keep, and less than the KV cache that a closed LLM has held.
_KEPT_MIB = 512.0


def rows(setting: Setting) -> Rows:
    plain: dict[str, Tokens] = {}
    yield from attempt("sampling", lambda: _sampling(plain, setting))
    for name, part in (
        ("prefix cache", _prefix_cache),
        ("preemption", partial(_preempted, plain)),
        ("prompt lookup", partial(_looked_up, plain)),
        ("two LLMs", _two),
    ):
        yield from attempt(name, partial(part, setting))


@contextmanager
def _llm(setting: Setting, **options: Any) -> Iterator[LLM]:
    settings = {
        "dtype": "float32",
        "device": setting.device.type,
        "random_weights": 0,
        "max_seq_len": 128,
        "max_drafts": 0,
        "kv_cache_bytes": _CACHE_BYTES,
    }
    with (
        params_file(shape_of(setting), "tiny") as path,
        LLM(path, **{**settings, **options}) as llm,
    ):
        yield llm


def _prompts(setting: Setting, n_tokens: int = 24) -> list[list[int]]:
    texts = range(setting.pick(12, 5))
    return [[(5 * text + 3 * at) % 60 + 1 for at in range(n_tokens)] for text in texts]


def _tokens(
    llm: LLM, setting: Setting, params: SamplingParams | Sequence[SamplingParams] = _GREEDY
) -> Tokens:
    return [found.tokens for found in llm.generate(_prompts(setting), params)]


def _repeating(llm: LLM) -> tuple[Tokens, float]:
    """The greedy tokens after prompts that repeat themselves, and the mean tokens per step."""
    prompts = [[text + 1, text + 2, text + 3, text + 4] * 10 for text in range(2)]
    requests = llm.input_processor.requests(prompts, _GREEDY)
    outputs = list(llm.run(requests))
    completions = [each.completion for each in outputs if each.completion is not None]
    found = {each.index: each.tokens for each in completions}
    n_steps = sum(bool(each.tokens) for each in outputs)
    tokens = [found[number] for number in range(len(requests))]
    return tokens, sum(map(len, tokens)) / n_steps


def _require_same(found: Tokens, expected: Tokens) -> None:
    """Raises: Wrong."""
    for number, (own, other) in enumerate(zip(found, expected, strict=True)):
        if own != other:
            pairs = zip(own, other, strict=False)
            at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(own), len(other)))
            raise Wrong(f"text {number} has different tokens, the first at token {at}")


def _sampling(plain: dict[str, Tokens], setting: Setting) -> Rows:
    """Compares sampled tokens with the CPU's, and keeps the greedy tokens for other checks."""
    drawn = replace(_GREEDY, temperature=0.8)
    ways = [
        {},
        {"top_k": 20},
        {"top_p": 0.9},
        {"min_p": 0.02},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5},
        {"top_k": 40, "top_p": 0.7, "logit_bias": {7: 2.0}},
    ]
    params = [replace(drawn, seed=n, **ways[n % len(ways)]) for n in range(len(_prompts(setting)))]
    with _llm(setting) as llm:
        plain["greedy"] = _tokens(llm, setting)
        plain["repeating"], _ = _repeating(llm)
        found = _tokens(llm, setting, params)
    with _llm(setting, device="cpu") as llm:
        greedy, expected = _tokens(llm, setting), _tokens(llm, setting, params)
    yield from attempt("greedy tokens", partial(_same, "greedy tokens", plain["greedy"], greedy))
    yield from attempt("sampled tokens", partial(_same, "sampled tokens", found, expected))


def _same(name: str, found: Tokens, expected: Tokens) -> Rows:
    _require_same(found, expected)
    n = sum(map(len, found))
    yield Row(name, note=f"{n} tokens as on the CPU")


def _prefix_cache(setting: Setting) -> Rows:
    """Checks the same prompts with and without a hit in the prefix cache."""
    with _llm(setting) as llm:
        first, again, other = (
            llm.generate(_prompts(setting, 40), replace(_GREEDY, cache_salt=salt))
            for salt in ("one", "one", "other")
        )
    n_found = sum(each.n_cached_tokens for each in again)
    if not n_found or any(each.n_cached_tokens for each in other):
        raise Wrong("the prefix cache has not been used as expected")
    for found in (again, other):
        _require_same([each.tokens for each in found], [each.tokens for each in first])
    yield Row("prefix cache", note=f"same tokens, with {n_found} tokens from the cache")


def _preempted(plain: dict[str, Tokens], setting: Setting) -> Rows:
    """Checks preemption: the KV cache is too small for all texts at once."""
    args = shape_of(setting)
    head_dim = args.dim // args.n_heads  # as in the file
    n_bytes = 160 * 2 * args.n_layers * args.n_kv_heads * head_dim * 4  # for 160 tokens
    with _llm(setting, kv_cache_bytes=n_bytes) as llm:
        found = _tokens(llm, setting)
        n_preempted = llm.engine.statistics().n_preempted
    if not n_preempted:
        raise Wrong("no request was preempted")
    _require_same(found, plain["greedy"])
    yield Row("preemption", note=f"same tokens; requests preempted: {n_preempted}")


def _looked_up(plain: dict[str, Tokens], setting: Setting) -> Rows:
    """Checks draft tokens from prompt lookup."""
    with _llm(setting, max_drafts=8) as llm:
        found, per_step = _repeating(llm)
    _require_same(found, plain["repeating"])
    yield Row("prompt lookup", note=f"same tokens; {per_step:.3g} tokens per step")


def _two(setting: Setting) -> Rows:
    """Checks two LLMs one after another, each with as large a KV cache as fits into memory."""
    cache = {"kv_cache_bytes": _CACHE_BYTES if setting.is_rehearsal else None}
    found, n_tokens = [], []
    for number in (1, 2):
        tokens, room = _opened(setting, cache)
        found.append(tokens)
        n_tokens.append(room)
        if number == 1 and not setting.is_rehearsal:
            yield _kept_memory()
    _require_same(*found)
    if not n_tokens[1] >= 0.95 * n_tokens[0]:
        raise Wrong(f"the KV cache has room for {n_tokens[1]} tokens, down from {n_tokens[0]}")
    yield Row("a second LLM", note=f"same tokens; room for {n_tokens[1]:,} tokens of KV cache")


def _opened(setting: Setting, cache: dict[str, Any]) -> tuple[Tokens, int]:
    with _llm(setting, **cache) as llm:
        return _tokens(llm, setting), llm.engine.capacity.n_tokens


def _kept_memory() -> Row:
    """Measures the memory of torch's allocator after the only LLM was closed and deleted."""
    mib = torch.cuda.memory_allocated() / 2**20
    name = "memory after an LLM is closed"
    if mib > _KEPT_MIB:
        return Row(name, wrong=f"{mib:.0f} MiB are still allocated")
    reserved = torch.cuda.memory_reserved() / 2**20
    return Row(name, mib, "MiB", note=f"{reserved:.0f} MiB in torch's allocator")
