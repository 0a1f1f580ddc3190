"""The steps of every rank in the parity tests; quick to import, for rank processes."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from thread_ranks import ThreadComm, run_on_threads
from torch import Tensor

from parallel_llama.checkpoint.reading import open_checkpoint
from parallel_llama.config.hf import args_from_hf, hf_config
from parallel_llama.config.layouts import load_model_args
from parallel_llama.dtypes import Precision
from parallel_llama.engine.model_runner import ModelRunner
from parallel_llama.engine.step_buffer import Chunk
from parallel_llama.files.model_files import find_model
from parallel_llama.ops import Scores, TorchOps
from parallel_llama.parallel.collectives import Communicator, Solo
from parallel_llama.parallel.stage_group import stage_group
from parallel_llama.parallel.timeouts import Timeouts
from parallel_llama.plan import make_plan
from parallel_llama.sampling.scoring import gather_logits

BLOCK_SIZE = 4

# Whether the models of the tests run on torch's operators, or the fastest of this machine.
on_torch = False


def use_torch_operators(_: object = None) -> None:
    """Makes the models of this process run on torch's operators."""
    global on_torch
    on_torch = True


def load_runner(
    comm: Communicator,
    folder: Path,
    n_slots: int,
    cut: Mapping[str, Any] | None = None,
    **changed: Any,
) -> ModelRunner:
    """This rank's shard of a tiny model in float64, and one block of cache.

    Args:
        cut: arguments of `make_plan` beside the number of ranks.
        changed: model arguments that differ from those of the folder.
    """
    files = find_model(str(folder))
    args = replace(load_model_args(files), **changed)
    scores = Scores(args.attention_scale, args.attention_soft_cap, args.sink_logits)
    plan = make_plan(args, comm.size, **(cut or {}))
    runner = ModelRunner.load(
        args,
        open_checkpoint(files, args),
        plan,
        comm,
        stage_comm=make_stage_comm(comm, [stage.ranks for stage in plan.stages]),
        precision=Precision.plain("float64"),
        device=torch.device("cpu"),
        ops=TorchOps(scores) if on_torch else None,
    )
    runner.reserve([1] * len(runner.kv_groups), n_slots)
    return runner


def make_stage_comm(comm: Communicator, stages: Sequence[range]) -> Communicator:
    """The communicator of this rank's stage."""
    if len(stages) == 1:
        return comm
    if isinstance(comm, ThreadComm):
        return comm.part(next(ranks for ranks in stages if comm.rank in ranks))
    return stage_group(comm, stages, Timeouts(60.0, 60.0))


def full_logits(runner: ModelRunner, hidden: Tensor) -> Tensor:
    """Scores of the whole vocabulary. Shapes: [n, dim] replicated -> [n, vocab_size]."""
    vocabs = [shard.vocab for shard in runner.plan.shards]
    return gather_logits(runner.logits(hidden), vocabs, runner.comm)


def whole_chunk(
    runner: ModelRunner, tokens: Sequence[int], start: int, blocks: Sequence[int], n_prompt: int
) -> Chunk:
    """A chunk of a sequence that keeps all its tokens, in the same blocks of every KV group."""
    return Chunk(tokens, start, [blocks] * len(runner.kv_groups), n_prompt)


def logits_in_pieces(
    runner: ModelRunner, tokens: Sequence[int], cuts: Sequence[int] = ()
) -> Tensor:
    """Logits of all positions of one sequence, whose tokens are fed in pieces that end at cuts."""
    hidden = [
        runner.forward([whole_chunk(runner, tokens[start:stop], start, [0], len(tokens))])
        for start, stop in pairwise([0, *cuts, len(tokens)])
    ]
    return full_logits(runner, torch.cat(hidden))


def cut_logits(
    comm: Communicator,
    folder: Path,
    tokens: Sequence[int],
    cut: Mapping[str, Any],
    n_slots: int | None = None,
) -> Tensor:
    """Logits of one sequence in two pieces, with these arguments of `make_plan`.

    Args:
        n_slots: the slots of the cache; by default one per token.
    """
    runner = load_runner(comm, folder, n_slots or len(tokens), cut)
    return logits_in_pieces(runner, tokens, [9])


def assert_equal_bits(
    folder: Path, tokens: Sequence[int], tp_sizes: Sequence[int], n_slots: int | None = None
) -> None:
    """Compare the bits of logits with exact sums on one rank and on these numbers of ranks."""
    cut = {"exact": True}
    alone = cut_logits(Solo(), folder, tokens, cut, n_slots)
    for tp_size in tp_sizes:
        for logits in run_on_threads(tp_size, cut_logits, folder, tokens, cut, n_slots):
            assert torch.equal(logits, alone)


def logits_of_models(
    comm: Communicator, models: Sequence[tuple[Path, Sequence[int]]]
) -> list[Tensor]:
    """Logits of one sequence, prefilled at once, for each of several models."""
    return [
        logits_in_pieces(load_runner(comm, folder, len(tokens)), tokens)
        for folder, tokens in models
    ]


def logits_by_cuts(
    comm: Communicator, folder: Path, tokens: Sequence[int], all_cuts: Sequence[Sequence[int]]
) -> list[Tensor]:
    """Logits of one sequence for each way of cutting it into pieces."""
    runner = load_runner(comm, folder, len(tokens))
    return [logits_in_pieces(runner, tokens, cuts) for cuts in all_cuts]


def logits_alone_and_together(
    comm: Communicator, folder: Path, prompts: Sequence[Sequence[int]]
) -> tuple[list[Tensor], list[Tensor]]:
    """Logits of each sequence alone, and of all sequences in shared forwards.

    Sequence i joins at forward i with the first half of its tokens, then adds up to 3 and then one
    per forward, so that most forwards mix prefill with decode steps. The blocks of half of the
    sequences are consecutive, and those of the others are scattered.
    """
    runner = load_runner(comm, folder, max(map(len, prompts)))
    alone = [logits_in_pieces(runner, prompt) for prompt in prompts]
    tables = _block_tables([-(-len(prompt) // BLOCK_SIZE) for prompt in prompts])
    runner.reserve([sum(map(len, tables))] * len(runner.kv_groups), BLOCK_SIZE)
    together: list[list[Tensor]] = [[] for _ in prompts]
    waiting = [_batched(prompt) for prompt in prompts]
    n_forwards = 0
    while any(waiting):
        present = [i for i in range(min(n_forwards + 1, len(prompts))) if waiting[i]]
        turn = n_forwards % len(present)
        present = present[turn:] + present[:turn]  # neighbours and rows change with each forward
        pieces = []
        for i in present:
            start, tokens = waiting[i].pop(0)
            pieces.append(whole_chunk(runner, tokens, start, tables[i], len(prompts[i])))
        hidden = runner.forward(pieces)
        rows = hidden.split_with_sizes([len(piece.tokens) for piece in pieces])
        for i, part in zip(present, rows, strict=True):
            together[i].append(part)
        n_forwards += 1
    return alone, [full_logits(runner, torch.cat(parts)) for parts in together]


def _block_tables(sizes: Sequence[int]) -> list[list[int]]:
    """Every second table takes consecutive blocks, the others every second remaining block."""
    blocks = list(range(sum(sizes)))
    tables: list[list[int]] = []
    for number, n in enumerate(sizes):
        step = 1 if number % 2 == 0 or 2 * n > len(blocks) else 2
        tables.append(blocks[: step * n : step])
        blocks = [block for block in blocks if block not in tables[-1]]
    return tables


def _batched(prompt: Sequence[int]) -> list[tuple[int, Sequence[int]]]:
    """(start, tokens): half of the prompt, up to 3 more, then one by one."""
    half = max(1, len(prompt) // 2)
    more = min(half + 3, len(prompt))
    cuts = sorted({0, half, *range(more, len(prompt) + 1)})
    return [(start, prompt[start:stop]) for start, stop in pairwise(cuts)]


def assert_parity(
    folder: Path, tokens: Sequence[int], expected: Tensor, tp_sizes: Sequence[int]
) -> None:
    """Compares logits in float64 on these numbers of ranks, and in pieces, with `expected`.

    Also compares the model's arguments with those that a written config.json gives.
    """
    for tp_size in tp_sizes:
        for (logits,) in run_on_threads(tp_size, logits_of_models, [(folder, tokens)]):
            torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)
    args = load_model_args(find_model(str(folder)))
    assert args_from_hf(json.loads(json.dumps(hf_config(args)))) == args
    cuts = [[5, *range(9, len(tokens))]]  # a prompt in two chunks, then tokens one by one
    (logits,) = logits_by_cuts(Solo(), folder, tokens, cuts)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)
