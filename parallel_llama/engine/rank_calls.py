"""What ranks do together between two steps of the engine, and how rank 0 sends them to it.

Each is called on rank 0, which does its part itself; the other ranks are in `serve_rank`.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress

import msgspec
import torch

from parallel_llama.engine.block_group import BlockTable
from parallel_llama.engine.chunk import Chunk
from parallel_llama.engine.engine import SCORE_ROWS, Engine
from parallel_llama.engine.machine import Machine, measure
from parallel_llama.errors import NumericalError
from parallel_llama.sampling import score

_SCORE, _MEASURE, _CLOSE = b"s", b"m", b"c"


def serve_rank(engine: Engine) -> None:
    """Serve rank 0, with steps and calls, until it closes; for ranks above 0."""
    while True:
        with suppress(NumericalError):  # rank 0 has it too, and is the one to tell
            engine.step()
            call, body = engine.call[:1], engine.call[1:]
            if call == _CLOSE:
                return
            if call == _MEASURE:
                measure(engine.comm, engine.runner.device)
            elif call == _SCORE:
                _score(engine, msgspec.msgpack.decode(body, type=list[int]))


def score_sequence(engine: Engine, tokens: Sequence[int]) -> list[float]:
    """Natural-log probabilities of every token after the first, given those before it.

    The cache must have room for them.
    """
    engine.send(_SCORE + msgspec.msgpack.encode(tokens))
    return _score(engine, tokens)


def windows(n_tokens: int, longest: int, stride: int) -> Iterator[range]:
    """The parts of a sequence that are scored one after the other, of at most `longest` tokens.

    Every window begins `stride` tokens after the one before. The tokens that are new in a window
    have at least `longest - stride` tokens before them. Source: "Perplexity of fixed-length models"
    in the documentation of transformers.
    """
    start, stop = 0, min(longest, n_tokens)
    yield range(start, stop)
    while stop < n_tokens:
        start, stop = start + stride, min(stop + stride, n_tokens)
        yield range(start, stop)


def measure_machine(engine: Engine) -> Machine:
    """How fast the ranks read their memory, and how much of it they have held."""
    engine.send(_MEASURE)
    return measure(engine.comm, engine.runner.device)


def close(engine: Engine) -> None:
    """Let the other ranks leave `serve_rank`."""
    engine.send(_CLOSE)


def _score(engine: Engine, tokens: Sequence[int]) -> list[float]:
    """Every rank's part, in chunks.

    The chunks, and the order of their rows, are those of a request that is alone and wants the
    probabilities of its prompt: it gets the same to the last bit.
    """
    runner, groups = engine.runner, engine.scheduler.groups
    tables = [BlockTable() for _ in groups]
    n_scored = len(tokens) - 1
    logprobs: list[float] = []
    try:
        for start in range(0, n_scored, engine.step_tokens):
            stop = min(start + engine.step_tokens, len(tokens))
            for group, table in zip(groups, tables, strict=True):
                group.extend(table, start, stop, len(tokens))
            chunk = Chunk(tokens[start:stop], start, tables, len(tokens))
            last = [n_scored - start] if stop == len(tokens) else []  # which would be drawn from
            hidden = runner.forward([chunk], [*last, *range(min(stop, n_scored) - start)])
            for at in range(len(last), len(hidden), SCORE_ROWS):
                rows, first = hidden[at : at + SCORE_ROWS], 1 + len(logprobs)
                targets = torch.tensor(tokens[first : first + len(rows)], device=runner.device)
                logits = runner.logits(rows)
                logprobs += score(logits, runner.share.vocab, targets, engine.comm).tolist()
    finally:
        for group, table in zip(groups, tables, strict=True):
            group.release(table)
    return logprobs
