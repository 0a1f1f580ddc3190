"""Models with random weights on the device, and their steps at any sequence length.

The cache holds noise, with which a step takes as long as with real keys and values. So decode steps
need no prefill.
"""

import json
import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from launch.bench.gpu_steps import Setting, Wrong
from parallel_llama.checkpoint.checkpoint import random_checkpoint
from parallel_llama.config.layouts import load_model_args
from parallel_llama.dtypes import kv_format, make_precision
from parallel_llama.engine import recorded_steps
from parallel_llama.engine.model_runner import ModelRunner
from parallel_llama.engine.recorded_steps import Logits
from parallel_llama.engine.step_buffer import Chunk
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.files.model_files import find_model
from parallel_llama.ops import Scores, TorchOps, kv_rows
from parallel_llama.parallel.collectives import Communicator, Slice, Solo
from parallel_llama.parallel.cuda_graphs import GraphRecorder
from parallel_llama.plan import make_plan

BLOCK_SIZE = 16
_NOISE_ROWS = 1 << 20  # rows of noise that are drawn at once


def named_args(name: str) -> ModelArgs:
    """A shape of configs/models."""
    return load_model_args(find_model(name))


def shape(name: str, setting: Setting) -> ModelArgs:
    """A shape of configs/models; a rehearsal replaces its sizes with tiny ones."""
    args = named_args(name)
    if not setting.is_rehearsal:
        return args
    sizes = {"dim": 64, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "head_dim": 32}
    return replace(args, **sizes, ffn_dim=64, vocab_size=70, max_seq_len=96)


@contextmanager
def named(name: str, setting: Setting) -> Iterator[str]:
    """A value of `--model`: the name, or a file with the shape of a rehearsal."""
    if not setting.is_rehearsal:
        yield name
        return
    with params_file(shape(name, setting), name) as path:
        yield path


@contextmanager
def params_file(args: ModelArgs, name: str) -> Iterator[str]:
    """A file with the sizes of a model, in Meta's format."""
    keys = "dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "norm_eps"
    sizes = {key: getattr(args, key) for key in keys}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"{name}.json")
        path.write_text(json.dumps({**sizes, "multiple_of": 32}))
        yield str(path)


def transformers_config(args: ModelArgs) -> Any:
    """The shape as a configuration of transformers, which must be installed."""
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=args.dim,
        intermediate_size=args.ffn_dim,
        num_hidden_layers=args.n_layers,
        num_attention_heads=args.n_heads,
        num_key_value_heads=args.n_kv_heads,
        head_dim=args.head_dim,
        vocab_size=args.vocab_size,
        max_position_embeddings=args.max_seq_len,
        tie_word_embeddings=args.tied_embeddings,
    )


def half(setting: Setting) -> str:
    """bfloat16, or float32 in a rehearsal: Triton's interpreter has no bfloat16 products."""
    return "float32" if setting.is_rehearsal else "bfloat16"


def ours(args: ModelArgs) -> TorchOps:
    """The operators of the GPU, which need Triton."""
    from parallel_llama.ops.cuda_ops import CUDAOps

    return CUDAOps(Scores(args.attention_scale, args.attention_soft_cap, args.sink_logits))


def torchs(args: ModelArgs) -> TorchOps:
    return TorchOps(Scores(args.attention_scale, args.attention_soft_cap, args.sink_logits))


def load(
    args: ModelArgs,
    ops: TorchOps,
    setting: Setting,
    dtype: str | None = None,
    comm: Communicator | None = None,
    quant: str = "none",
    shard_of: int = 0,
    *,
    kv_cache_dtype: str = "auto",
    device: torch.device | None = None,
    drawn_on: torch.device | None = None,
) -> ModelRunner:
    """A rank's shard with random weights, without a cache.

    Args:
        comm: by default that of a single rank.
        shard_of: the rank whose shard is loaded, if `comm` is a Slice.
        device, drawn_on: where the model is, and where its weights are drawn, which determines
            their values; by default the setting's device.
    """
    comm, device = comm or Solo(), device or setting.device
    precision = make_precision(args, dtype or half(setting), device.type, quant)
    plan = make_plan(args, comm.size, quant_group_size=precision.quant_group_size)
    return ModelRunner.load(
        args,
        random_checkpoint(args, 0, drawn_on or setting.device),
        plan.alone(shard_of) if isinstance(comm, Slice) else plan,
        comm,
        precision=precision,
        device=device,
        kv_format=kv_format(kv_cache_dtype, precision.computed),
        ops=ops,
    )


def reserve(runner: ModelRunner, n_sequences: int, n_tokens: int) -> None:
    """Allocates a cache of noise for `n_sequences` of `n_tokens`."""
    n_blocks = n_sequences * -(-n_tokens // BLOCK_SIZE)
    runner.reserve([n_blocks] * len(runner.kv_groups), BLOCK_SIZE)
    fill_with_noise(runner)


def fill_with_noise(runner: ModelRunner) -> None:
    """Writes noise to all slots of the caches. A GPU reads zeros at a higher rate than noise."""
    width = runner.args.head_dim
    for cache, kv_group in zip(runner.caches, runner.kv_groups, strict=True):
        for layer in range(len(kv_group.layers)):
            for part in cache.layer(layer):
                for slots in part.unbind():  # head by head, because little memory may be left
                    for rows in slots.split(_NOISE_ROWS):
                        noise = torch.randn(len(rows), width, device=rows.device)
                        packed = kv_rows.pack(noise, rows.dtype)
                        rows.view(torch.uint8).copy_(packed.view(torch.uint8))


@dataclass(frozen=True)
class Texts:
    """Sequences of at most `n_tokens` with interleaved blocks."""

    n_sequences: int
    n_tokens: int

    def chunks(self, runner: ModelRunner, start: int, n_new: int = 1) -> list[Chunk]:
        """A chunk of `n_new` tokens of each sequence from position `start` on."""
        n_blocks = -(-self.n_tokens // BLOCK_SIZE)
        return [
            Chunk(
                [
                    (7 * sequence + at) % runner.args.vocab_size
                    for at in range(start, start + n_new)
                ],
                start,
                [range(sequence, self.n_sequences * n_blocks, self.n_sequences)]
                * len(runner.kv_groups),
                start,
            )
            for sequence in range(self.n_sequences)
        ]

    def step(self, runner: ModelRunner, start: int, n_new: int = 1) -> Callable[[], Any]:
        """A step that returns the last logits of each sequence."""
        chunks = self.chunks(runner, start, n_new)
        rows = [number * n_new + n_new - 1 for number in range(self.n_sequences)]
        return lambda: runner.step(chunks, rows)[0].values


def decode_logits(runner: ModelRunner, texts: Texts, sizes: tuple[int, int]) -> Tensor:
    """Prefills texts one by one, then decodes all together.

    Args:
        sizes: the tokens of each prompt, and the decode steps.

    Shapes: [steps, texts, vocabulary].
    """
    n_prompt, n_steps = sizes
    for chunk in texts.chunks(runner, 0, n_prompt):
        runner.step([chunk], [n_prompt - 1])
    steps = range(n_prompt, n_prompt + n_steps)
    return torch.stack([texts.step(runner, at)().clone() for at in steps])


def difference(found: Tensor, expected: Tensor) -> str:
    """Says where and by how much the results of `decode_logits` differ; empty if they are equal."""
    if torch.equal(found, expected):
        return ""
    errors = (found.double() - expected.double()).abs().amax(-1)
    rows = [f"step {step} of text {text}" for step, text in (errors != 0).nonzero().tolist()]
    most = float(errors.max() / expected.double().abs().max())
    return f"{len(rows)} of {errors.numel()} rows differ, first {rows[0]}, by at most {most:.3g}"


@dataclass(frozen=True)
class Recorded:
    """The decode steps of a runner that are recorded.

    Args:
        replays: by number of rows; a call replays the last step that used this recording.
        why_not: why there are no recordings for more rows; empty if all are recorded.
    """

    replays: Mapping[int, Callable[[], object]]
    why_not: str = ""

    def replay(self, n_rows: int) -> Callable[[], object] | None:
        """The replay that a step with this number of rows uses; None if it is not recorded."""
        return self.replays.get(min((n for n in self.replays if n >= n_rows), default=0))


class _Messages(logging.Handler):
    """Keeps the messages of a logger."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@contextmanager
def why_not_recorded() -> Iterator[list[str]]:
    """Collects the reasons why steps inside the block are not recorded."""
    logger, messages = logging.getLogger(recorded_steps.__name__), _Messages()
    logger.addHandler(messages)
    try:
        yield messages.texts
    finally:
        logger.removeHandler(messages)


def record(runner: ModelRunner, setting: Setting) -> Recorded:
    """Records the decode steps of a runner, again if they are already recorded."""
    replays: dict[int, Callable[[], object]] = {}
    record_one = _rehearse if setting.is_rehearsal else GraphRecorder()
    n_rows = 0

    def note(n: int) -> None:
        nonlocal n_rows
        n_rows = n

    def recorder(step: Callable[[], Logits]) -> tuple[Logits, Callable[[], object]]:
        logits, replays[n_rows] = record_one(step)
        return logits, replays[n_rows]

    with why_not_recorded() as reasons:
        runner.record(recorder, note)
    return Recorded(replays, "; ".join(reasons))


def require_right(
    name: str, setting: Setting, *, quant: str = "none", n_ranks: int | None = None
) -> None:
    """Checks that two layers of a shape, or of rank 0's shard of it, give the logits of torch.

    Raises: Wrong.
    """
    args = shape(name, setting)
    args = replace(args, n_layers=min(args.n_layers, 2))
    found = []
    for ops, dtype in ((torchs(args), "float32"), (ours(args), half(setting))):
        comm = Solo() if n_ranks is None else Slice(n_ranks)
        runner = load(args, ops, setting, dtype, comm, quant)
        n_prompt = setting.pick(20, 2)
        texts = Texts(2, 48)
        reserve(runner, 2, 48)
        parts = [texts.step(runner, 0, n_prompt)().float(), texts.step(runner, n_prompt)().float()]
        found.append(torch.cat(parts).clone())
        del runner
    error = float((found[0] - found[1]).abs().max() / found[0].abs().max())
    # A rounded input may be another integer if sums differ in their last bits.
    is_rounded = quant != "none" or half(setting) != "float32"
    if not error <= (0.05 if is_rounded else 1e-3):
        raise Wrong(f"logits of two layers are off by {error:.3g} of the largest")


class _Later:
    """The logits of a step that a rehearsal runs again, as it has no graph to replay."""

    logits: Any = None

    def rows(self, which: slice) -> Any:
        return self.logits.rows(which)


def _rehearse(step: Callable[[], Any]) -> Any:
    found = _Later()

    def replay() -> None:
        found.logits = step()

    return found, replay
