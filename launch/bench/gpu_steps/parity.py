"""Compares whole models: with transformers, over ranks, recorded and launched, alone and batched.

The model is small, with random weights, and has enough layers to show errors.
"""

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from thread_ranks import ThreadComm, run_on_threads
from torch import Tensor

from launch.bench.gpu_steps import Row, Rows, Setting, attempt
from launch.bench.gpu_steps.models import (
    Texts,
    decode_logits,
    difference,
    load,
    ours,
    record,
    reserve,
    torchs,
    transformers_config,
)
from parallel_llama import LLM, SamplingParams
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.parallel.collectives import Communicator, Slice, Solo
from parallel_llama.plan import make_plan
from parallel_llama.sampling.scoring import gather_logits


def shape_of(setting: Setting) -> ModelArgs:
    """A model with a number of heads that 2, 5 and 7 do not divide."""
    dim, ffn_dim = setting.pick(576, 54), setting.pick(1000, 40)
    return ModelArgs(
        dim=dim,
        n_layers=setting.pick(4, 1),
        n_heads=9,
        n_kv_heads=3,
        head_dim=setting.pick(64, 16),
        ffn_dim=ffn_dim,
        vocab_size=setting.pick(1001, 61),
        max_seq_len=512,
        dtype="float32",
    )


def against_transformers(setting: Setting) -> Rows:
    """Compares log-probabilities and greedy tokens with transformers in float64 on the CPU."""
    if find_spec("transformers") is None:
        yield Row("transformers", note="not installed")
        return
    from transformers import LlamaForCausalLM

    args = shape_of(setting)
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(transformers_config(args))
    n_prompt, n_new = setting.pick(100, 12), setting.pick(32, 4)
    prompt = torch.randint(args.vocab_size, (n_prompt,)).tolist()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        whole = model.double().eval()
        for dtype, most in (("float32", 1e-3), ("bfloat16", 0.2)):
            yield from attempt(
                f"transformers, {dtype}",
                lambda a=(dtype, most): _as_whole(whole, Path(folder), prompt, n_new, *a, setting),
            )


@torch.inference_mode()
def _as_whole(
    whole: Any,
    folder: Path,
    prompt: list[int],
    n_new: int,
    dtype: str,
    most: float,
    setting: Setting,
) -> Rows:
    with LLM(str(folder), dtype=dtype, device=setting.device.type, max_drafts=0) as llm:
        scores = torch.tensor(llm.score([prompt])[0], dtype=torch.float64)
        params = SamplingParams(max_tokens=n_new, ignore_eos=True)
        tokens = list(llm.generate([prompt], params)[0].tokens)
    logprobs = whole(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
    expected = logprobs.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    error = float((scores[-len(expected) :] - expected).abs().max())
    if not error <= most:
        yield Row(f"transformers, {dtype}", wrong=f"log-probabilities are off by {error:.3g}")
        return
    # Each token is compared after the same text, so that a near tie does not affect later tokens.
    logits = whole(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
    behind = logits.amax(1) - logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    if not float(behind.max()) <= most:
        worst = f"a token's logit is {float(behind.max()):.3g} below the largest"
        yield Row(f"transformers, {dtype}", wrong=worst)
        return
    yield Row(f"transformers, {dtype}", error, "nats at most", note=f"{n_new} greedy tokens right")


def over_ranks(setting: Setting) -> Rows:
    """Compares ranks, as threads on one GPU, with one rank on torch's operators."""
    for kind, args in _kinds(setting).items():
        expected = _logits(Solo(), args, setting, is_ours=False)
        for tp_size in (3,) if setting.is_rehearsal else (1, 2, 3, 5, 7):
            name = f"{tp_size} rank{'s' * (tp_size > 1)}{kind}"
            yield from attempt(name, lambda a=(name, tp_size, args, expected): _over(*a, setting))


def _over(name: str, tp_size: int, args: ModelArgs, expected: Tensor, setting: Setting) -> Rows:
    for rank in range(tp_size):  # compile the kernels of each rank, one after another
        for _ in _local_logits(Slice(tp_size), args, setting, is_ours=True, shard_of=rank):
            pass
    # Triton's interpreter is not thread-safe.
    parts = run_on_threads(tp_size, _logits, args, setting, is_ours=not setting.is_rehearsal)
    error = max(float((part - expected).abs().max()) for part in parts)
    if not error <= 1e-3 * float(expected.abs().max()):
        yield Row(name, wrong=f"logits are off by {error:.3g}")
    elif not all(torch.equal(part, parts[0]) for part in parts):
        yield Row(name, wrong="ranks have different logits")
    else:
        yield Row(name, error, "off at most")


def recorded(setting: Setting) -> Rows:
    """Checks that the logits of a replayed step equal those of a launched step bit for bit."""
    for kind, args in _kinds(setting).items():
        name = f"recorded{kind}"
        yield from attempt(name, lambda a=(name, args): _recorded(*a, setting))


def _recorded(name: str, args: ModelArgs, setting: Setting) -> Rows:
    runner, texts = load(args, ours(args), setting, "float32"), Texts(setting.pick(3, 2), 40)
    reserve(runner, texts.n_sequences, texts.n_tokens)
    decode = partial(decode_logits, runner, texts, _sizes(setting))
    launched = decode()
    recorded = record(runner, setting)
    if not recorded.replay(texts.n_sequences):
        yield Row(name, wrong=recorded.why_not or "no step could be recorded")
    elif differs := difference(decode(), launched):
        yield Row(name, wrong=f"logits differ from launched steps: {differs}")
    else:
        yield Row(name, note="bit for bit as launched")


def in_any_batch(setting: Setting) -> Rows:
    """Checks that the logits of a text do not depend on the other texts of its batch."""
    for kind, args in _kinds(setting).items():
        name = f"in any batch{kind}"
        yield from attempt(name, lambda a=(name, args): _in_any_batch(*a, setting))


def _in_any_batch(name: str, args: ModelArgs, setting: Setting) -> Rows:
    runner = load(args, ours(args), setting, "float32")
    found = []
    # The first text is the same in both batches, but its blocks are elsewhere.
    for n_texts in (1, setting.pick(16, 2)):
        reserve(runner, n_texts, 40)
        found.append(decode_logits(runner, Texts(n_texts, 40), _sizes(setting))[:, :1])
    if differs := difference(found[1], found[0]):
        yield Row(name, wrong=f"logits differ from the text alone: {differs}")
    else:
        yield Row(name, note="bit for bit as alone")


def _sizes(setting: Setting) -> tuple[int, int]:
    """The tokens of a prompt, and the decode steps after it."""
    return setting.pick(16, 2), setting.pick(4, 1)


def _kinds(setting: Setting) -> dict[str, ModelArgs]:
    """The model and the same model with experts, by a suffix of row names.

    A rehearsal takes only the model with experts; other steps rehearse one without.
    """
    args = shape_of(setting)
    dense = {} if setting.is_rehearsal else {"": args}
    return dense | {", experts": replace(args, n_experts=6, n_active_experts=2)}


# The check of ranks comes last, because its threads launch kernels concurrently.
PARTS = {
    "transformers": against_transformers,
    "recorded": recorded,
    "in any batch": in_any_batch,
    "ranks": over_ranks,
}


def _logits(
    comm: Communicator | ThreadComm, args: ModelArgs, setting: Setting, *, is_ours: bool
) -> Tensor:
    """Logits of a prompt and two steps. Shapes: [steps, vocabulary], on every rank."""
    vocabs = [shard.vocab for shard in make_plan(args, comm.size).shards]
    local = _local_logits(comm, args, setting, is_ours=is_ours)
    return torch.cat([gather_logits(logits, vocabs, comm) for logits in local])


def _local_logits(
    comm: Communicator | ThreadComm,
    args: ModelArgs,
    setting: Setting,
    *,
    is_ours: bool,
    shard_of: int = 0,
) -> Iterator[Tensor]:
    """Yields the logits of a prompt and of two steps. Shapes: [1, V_local].

    Args:
        shard_of: With a Slice, the rank whose shard it holds. A Slice has no other ranks from which
            `_logits` could gather the rest of the vocabulary.
    """
    ops = (ours if is_ours else torchs)(args)
    runner = load(args, ops, setting, "float32", comm, shard_of=shard_of)
    texts = Texts(1, 40)
    reserve(runner, 1, texts.n_tokens)
    n_prompt = setting.pick(20, 5)
    for start, n_new in ((0, n_prompt), (n_prompt, 1), (n_prompt + 1, 1)):
        yield texts.step(runner, start, n_new)().clone()
