"""What ranks do together between two steps of the engine, and how rank 0 sends them to it.

Each errand is called on rank 0, which does its part itself; the other ranks are in `follow`.
"""

from collections.abc import Sequence
from contextlib import suppress

import msgspec
import torch

from parallel_llama.engine import Engine
from parallel_llama.errors import NumericalError
from parallel_llama.machine import Machine, measure
from parallel_llama.runner import Piece
from parallel_llama.sampling import score

_SCORED_AT_ONCE = 256  # positions whose logits exist at once

_SCORE, _MEASURE, _CLOSE = b"s", b"m", b"c"


def follow(engine: Engine) -> None:
    """Serve rank 0, with steps and errands, until it closes; for ranks above 0."""
    while True:
        with suppress(NumericalError):  # rank 0 has it too, and is the one to tell
            engine.step()
            errand, body = engine.errand[:1], engine.errand[1:]
            if errand == _CLOSE:
                return
            if errand == _MEASURE:
                measure(engine.comm, engine.runner.device)
            elif errand == _SCORE:
                _score(engine, msgspec.msgpack.decode(body, type=list[int]))


def score_sequence(engine: Engine, tokens: Sequence[int]) -> list[float]:
    """Natural-log probabilities of every token after the first, given those before it.

    The cache must have room for them.
    """
    engine.send(_SCORE + msgspec.msgpack.encode(tokens))
    return _score(engine, tokens)


def measure_machine(engine: Engine) -> Machine:
    """How fast the ranks read their memory, and how much of it they have held."""
    engine.send(_MEASURE)
    return measure(engine.comm, engine.runner.device)


def close(engine: Engine) -> None:
    """Let the other ranks leave `follow`."""
    engine.send(_CLOSE)


def _score(engine: Engine, tokens: Sequence[int]) -> list[float]:
    """Every rank's part."""
    pool = engine.pool
    blocks = pool.take(-(-len(tokens) // pool.block_size))
    try:
        return _score_in(engine, tokens, blocks)
    finally:
        pool.release(blocks)


def _score_in(engine: Engine, tokens: Sequence[int], blocks: Sequence[int]) -> list[float]:
    """The prompt in pieces, logits a few rows at a time."""
    runner = engine.runner
    logprobs: list[float] = []
    for start in range(0, len(tokens) - 1, _SCORED_AT_ONCE):
        piece = tuple(tokens[start : min(start + _SCORED_AT_ONCE, len(tokens) - 1)])
        hidden = runner.forward([Piece(piece, start, blocks, len(tokens))])
        targets = torch.tensor(tokens[start + 1 : start + 1 + len(piece)], device=runner.device)
        logits = runner.logits(hidden)
        logprobs += score(logits, runner.share.vocab, targets, engine.comm).tolist()
    return logprobs
