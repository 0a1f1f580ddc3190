"""Computes log-probabilities of tokens and their alternatives from the logits of all ranks."""

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from parallel_llama.errors import NumericalError, UsageError
from parallel_llama.ops.filters import merge_top_k
from parallel_llama.ops.gumbel import TILE
from parallel_llama.parallel.collectives import Communicator
from parallel_llama.request import TokenLogprob
from parallel_llama.sampling.tiles import Tiles

# Logits that are converted to float64 at once, few enough for a core's own cache.
_CHUNK = 1 << 16

# An exchange is one float64 row per token and rank: fixed columns, K values and K token ids.
N_LOCAL = 0  # the first column: the size of the rank's vocabulary shard

# The other fixed column of the exchange for scores.
_TARGET = 1  # the target's logit, -inf if another rank holds it
_N_FIXED = 2


def score(logits: Tensor, vocab: range, targets: Tensor, comm: Communicator) -> Tensor:
    """Natural-log probabilities of the targets, one per row.

    Shapes: logits [n, V_local] local; targets [n] int64 replicated; returns [n] float64 replicated.
    Raises: NumericalError if a row has NaN or +inf, or only -inf; UsageError for a target outside
    the vocabulary.
    Collective: two all_gathers.
    """
    if not len(targets):
        return torch.empty(0, dtype=torch.float64, device=logits.device)
    blocks = _exchange(logits, vocab, targets, 0, comm)
    return blocks[:, :, _TARGET].amax(0) - _finite_lse(logits, vocab, blocks, comm)


def score_tokens(
    logits: Tensor, vocab: range, targets: Tensor, n_top: Sequence[int], comm: Communicator
) -> list[TokenLogprob]:
    """Natural-log probabilities of the targets and of the `n_top` best alternatives of each row.

    Shapes and Raises: as in `score`.
    Collective: two all_gathers.
    """
    if not len(targets):
        return []
    k = max(n_top) + 1 if any(n_top) else 0  # one more, since the target may be among them
    blocks = _exchange(logits, vocab, targets, k, comm)
    lse = _finite_lse(logits, vocab, blocks, comm)
    logprobs = (blocks[:, :, _TARGET].amax(0) - lse).tolist()
    values, tokens = merge_top_k(blocks, _N_FIXED)
    top_logprobs, top_tokens = (values - lse[:, None]).tolist(), tokens.tolist()
    scored = []
    for row, target in enumerate(targets.tolist()):
        top = [
            (token, logprob)
            for token, logprob in zip(top_tokens[row], top_logprobs[row], strict=True)
            if token != target and logprob > -math.inf
        ]
        scored.append(TokenLogprob(target, logprobs[row], tuple(top[: n_top[row]])))
    return scored


def gather_logits(logits: Tensor, vocabs: Sequence[range], comm: Communicator) -> Tensor:
    """Whole rows of logits on every rank.

    Shapes: logits [n, V_local] local; vocabs, one range per rank, ascending; returns
    [n, vocab_size] replicated.
    Collective: one all_gather, rows padded to the longest local vocabulary.
    """
    longest = max(map(len, vocabs))
    padded = F.pad(logits, (0, longest - logits.shape[1]))
    blocks = comm.all_gather(padded)  # [tp_size, n, longest]
    parts = [block[:, : len(vocab)] for block, vocab in zip(blocks, vocabs, strict=True)]
    return torch.cat(parts, dim=1)


def new_block(n: int, n_fixed: int, k: int, vocab: range, device: torch.device) -> Tensor:
    """A rank's part of an exchange, with only N_LOCAL filled in. Shapes: [n, n_fixed + 2 k]."""
    block = torch.full((n, n_fixed + 2 * k), -math.inf, dtype=torch.float64, device=device)
    block[:, N_LOCAL] = len(vocab)
    block[:, n_fixed + k :] = -1
    return block


def put_top_k(
    block: Tensor, rows: slice | list[int], n_fixed: int, values: Tensor, tokens: Tensor
) -> None:
    """Fill in this rank's candidates. Shapes: values and tokens [len(rows), at most K]."""
    first_token = (n_fixed + block.shape[1]) // 2
    block[rows, n_fixed : n_fixed + values.shape[1]] = values.double()
    block[rows, first_token : first_token + values.shape[1]] = tokens.double()


def chunks(logits: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """The logits some rows at a time, so that a float64 copy stays small."""
    step = max(1, _CHUNK // max(1, logits.shape[1]))
    for start in range(0, len(logits), step):
        rows = slice(start, start + step)
        yield rows, logits[rows]


def _exchange(logits: Tensor, vocab: range, targets: Tensor, k: int, comm: Communicator) -> Tensor:
    """The blocks of all ranks. Shapes: [tp_size, n, _N_FIXED + 2 k] float64."""
    assert logits.shape == (len(targets), len(vocab))
    block = new_block(len(targets), _N_FIXED, k, vocab, logits.device)
    for rows, x in chunks(logits) if k and len(vocab) else ():
        put_top_k(block, rows, _N_FIXED, *Tiles.of(x, vocab).top_k(k))
    local_rows = ((targets >= vocab.start) & (targets < vocab.stop)).nonzero()[:, 0]
    block[local_rows, _TARGET] = logits[local_rows, targets[local_rows] - vocab.start].double()
    blocks = comm.all_gather(block)
    _check_targets(targets, int(blocks[:, 0, N_LOCAL].sum()))
    return blocks


def _check_targets(targets: Tensor, vocab_size: int) -> None:
    for token in (int(targets.min()), int(targets.max())):
        if not 0 <= token < vocab_size:
            raise UsageError(
                f"token id {token} is not in the vocabulary; use 0 to {vocab_size - 1}"
            )


def vocabs_of(blocks: Tensor) -> list[range]:
    """The shard of the vocabulary of each rank, from an exchange [tp_size, n, ..]."""
    borders = accumulate((int(size) for size in blocks[:, 0, N_LOCAL]), initial=0)
    return [range(start, stop) for start, stop in pairwise(borders)]


def log_sum_exp(
    logits: Tensor,
    vocab: range,
    vocabs: Sequence[range],
    comm: Communicator,
    temperatures: Tensor | None = None,
) -> Tensor:
    """The log-sum-exp of the logits of all ranks; `temperatures` divide the logits first.

    Tiles of the vocabulary are summed first, then all tiles in order, so the bits do not depend on
    the shards if these end between tiles.

    Shapes: logits [n, V_local] local; temperatures [n]; returns [n] float64 replicated.
    Collective: one all_gather.
    """
    tiles_of_ranks, own_tiles = [_tiles_of(shard) for shard in vocabs], _tiles_of(vocab)
    tile_lse = torch.empty((len(logits), len(own_tiles)), dtype=torch.float64, device=logits.device)
    for rows, x in chunks(logits) if own_tiles else ():
        tiles = Tiles.of(x, vocab).logits.double()
        if temperatures is not None:
            tiles = tiles / temperatures[rows, None, None].to(tiles.device)
        tile_lse[rows] = tiles.logsumexp(-1)
    return gather_logits(tile_lse, tiles_of_ranks, comm).logsumexp(-1)


def _tiles_of(vocab: range) -> range:
    """The tiles of a rank; none for an empty range, which may begin within a tile."""
    return range(vocab.start // TILE, -(-vocab.stop // TILE)) if vocab else range(0)


def _finite_lse(logits: Tensor, vocab: range, blocks: Tensor, comm: Communicator) -> Tensor:
    """The log-sum-exp of each row. Shapes: blocks [tp_size, n, ...] -> [n]."""
    lse = log_sum_exp(logits, vocab, vocabs_of(blocks), comm)
    for row, value in enumerate(lse.tolist()):
        if not math.isfinite(value):
            raise NumericalError(
                f"scored row {row}: the log-sum-exp of its logits is {value}; the weights are "
                "damaged or overflow their dtype: verify the checkpoint, or use a wider dtype"
            )
    return lse
