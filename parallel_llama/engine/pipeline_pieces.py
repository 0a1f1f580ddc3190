"""Cuts a step into pieces, so that all stages of a pipeline work at the same time.

    tick         0   1   2   3   4        4 pieces in 2 stages
    stage 0      0   1   2   3
    stage 1          0   1   2   3

A piece is a range of the step's tokens. Each piece reads the weights of a stage once, so steps of
few tokens, such as decode steps, are one piece.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from parallel_llama.engine.step_buffer import MAX_DECODED, Chunk
from parallel_llama.plan import count_pieces


@dataclass(frozen=True)
class Piece:
    """A part of a step.

    Args:
        rows: the wanted output rows, as indices into the tokens of the piece; None for all.
    """

    chunks: Sequence[Chunk]
    rows: Sequence[int] | None


def cut_step(
    chunks: Sequence[Chunk], rows: Sequence[int] | None, n_stages: int
) -> tuple[list[Piece], list[int] | None]:
    """Cut a step into pieces for the stages of a pipeline.

    Args:
        rows: the wanted rows of the step, in any order; None for all.

    Returns: the pieces, and the index of each wanted row in the concatenated results of all
        pieces; None if the results are in order. A piece has at least one row, so results may have
        rows that are not wanted.
    """
    n_tokens = sum(len(chunk.tokens) for chunk in chunks)
    n_pieces = count_pieces(n_tokens, n_stages)
    if n_pieces == 1:
        return [Piece(chunks, rows)], None
    parts = _cut(chunks, n_tokens, n_pieces)
    if rows is None:
        return [Piece(part, None) for part in parts], None
    pieces: list[Piece] = []
    indices = [0] * len(rows)
    first = n_results = 0
    for part in parts:
        stop = first + sum(len(chunk.tokens) for chunk in part)
        rows_of_piece = [index for index, row in enumerate(rows) if first <= row < stop]
        for result, index in enumerate(rows_of_piece, n_results):
            indices[index] = result
        pieces.append(Piece(part, [rows[index] - first for index in rows_of_piece] or [0]))
        n_results += max(len(rows_of_piece), 1)
        first = stop
    return pieces, indices


def _cut(chunks: Sequence[Chunk], n_tokens: int, n_pieces: int) -> list[list[Chunk]]:
    """Divide the chunks into parts of about equal size.

    A decoded chunk is not cut. Other chunks are not cut into parts so short that they count as
    decoded.
    """
    parts: list[list[Chunk]] = [[]]
    n_done = 0
    for chunk in chunks:
        rest = chunk
        while True:
            n_wanted = n_tokens * len(parts) // n_pieces - n_done
            if n_wanted <= 0 or (n_wanted <= MAX_DECODED and not rest.is_decoded):
                parts.append([])
                continue
            if len(rest.tokens) - n_wanted <= MAX_DECODED:
                break
            parts[-1].append(replace(rest, tokens=rest.tokens[:n_wanted]))
            rest = replace(rest, tokens=rest.tokens[n_wanted:], start=rest.start + n_wanted)
            n_done += n_wanted
        parts[-1].append(rest)
        n_done += len(rest.tokens)
    return [part for part in parts if part]
