"""Builds the sampling rows of a step's scheduled tokens, and samples them.

A sequence that samples has one row for its last known token and one for each draft token. The row
of a draft token samples the next token; it counts only if all draft tokens up to there are
accepted.
"""

from collections import abc
from itertools import takewhile

import numpy as np
import numpy.typing as npt
from torch import Tensor

from parallel_llama.engine.scheduler import ScheduledTokens, Sequence
from parallel_llama.engine.step_buffer import SamplingKey
from parallel_llama.parallel.collectives import Communicator
from parallel_llama.request import SamplingParams
from parallel_llama.sampling.draw import (
    History,
    NoTokenLeft,
    SampledToken,
    SamplingRow,
    row_sampling_key,
)
from parallel_llama.sampling.sampler import sample


def sampling_rows_of(
    item: ScheduledTokens, history: History | None, mask: bytes | None
) -> list[SamplingRow]:
    """The sampling rows of one sequence.

    Args:
        mask: of the tokens that are allowed next.
    """
    drafts, params = item.drafts, item.request.params
    return [
        sampling_row(item.sequence, params, drafts[:n], history, mask)
        for n in range(1 + len(drafts))
    ]


def sampling_row(
    sequence: Sequence,
    params: SamplingParams,
    drafts: tuple[int, ...],
    history: History | None,
    mask: bytes | None,
) -> SamplingRow:
    """The row that samples the token after a sequence and `drafts`."""
    request = sequence.request
    banned = request.banned_ids(sequence.n_drawn + len(drafts))
    if request.bad_ids:
        banned |= request.ends_of_bad_words([*sequence.tokens[sequence.n_prompt :], *drafts])
    return SamplingRow(
        params,
        request.seed,
        sequence.number,
        len(sequence.tokens) + len(drafts),
        request.index,
        history,
        drafts,
        banned,
        mask,
    )


def sampling_keys_of(item: ScheduledTokens, n_later: int = 0) -> list[SamplingKey]:
    """The sampling keys of one sequence's draws, with positions shifted by `n_later`."""
    sequence, request, n_tokens = item.sequence, item.request, len(item.sequence.tokens) + n_later
    return [
        row_sampling_key(request.params, request.seed, sequence.number, n_tokens + n)
        for n in range(1 + item.n_drafts)
    ]


def draw_each(
    logits: Tensor,
    vocab: range,
    draws: abc.Sequence[abc.Sequence[SamplingRow]],
    comm: Communicator,
    best: Tensor | npt.NDArray[np.float64] | None = None,
) -> list[list[SampledToken]]:
    """Sample the draws of each sequence, up to the first draw without an allowed token.

    Shapes: logits [n, V_local] local, one row per draw, sequence after sequence; best as in
    `sample`.
    Collective: as `sample`; again, for the other rows, if a row has no allowed token.
    """
    rows = [draw for draws_of_sequence in draws for draw in draws_of_sequence]
    try:
        drawn = dict(enumerate(sample(logits, vocab, rows, comm, best)))
    except NoTokenLeft as error:
        allowed_rows = [row for row in range(len(rows)) if row not in error.rows]
        others = sample(logits[allowed_rows], vocab, [rows[row] for row in allowed_rows], comm)
        drawn = dict(zip(allowed_rows, others, strict=True))
    tokens = []
    stop = 0
    for draws_of_sequence in draws:
        start, stop = stop, stop + len(draws_of_sequence)
        tokens.append([drawn[row] for row in takewhile(drawn.__contains__, range(start, stop))])
    return tokens
