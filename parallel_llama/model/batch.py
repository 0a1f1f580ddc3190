"""The tokens of one forward pass, and what each of them sees of the KV cache.

A batch holds chunks of sequences end to end, [T, ...] without padding. In a layer with a sliding
window a token sees no more of its past than the window.

Source: sliding windows, Longformer, arXiv 2004.05150, and Mistral, arXiv 2310.06825.
"""

from dataclasses import dataclass

from torch import Tensor

from parallel_llama.model.kv_cache import Past
from parallel_llama.ops import DecodeBatch, Noise, PagedQueries, QueryChunk


@dataclass(frozen=True)
class QueryTile:
    """What consecutive queries of one sequence see: their rows of the batch, and their past.

    Shapes: `queries` is a slice of the batch's T tokens; `pasts`, one per run of heads, hold the
    sequence from the first token that one of the queries sees to the last query's; `mask` is
    [len(queries), S], 0 where a query may look and -inf elsewhere.
    """

    queries: slice
    pasts: tuple[Past, ...]
    mask: Tensor


@dataclass(frozen=True)
class SinkTile:
    """Consecutive queries with first tokens of their sequence before their window.

    They see their window, and those tokens as if these lay right before it: `turns` rotates the
    queries back by as much as is missing between.

    Shapes: turns [len(queries), 1, D / 2] complex.
    Source: positions within the cache, StreamingLLM, arXiv 2309.17453, section 3.2.
    """

    window: QueryTile
    sinks: QueryTile
    turns: Tensor


@dataclass(frozen=True)
class GroupBatch:
    """The batch to the layers of one group: where its tokens are kept, and what they see.

    Each token is in one of the `chunks` or the `sink_tiles`, or a row of `decode`. For operators
    that find keys by their blocks it is among the `paged` queries; where the cache's tokens are
    spread over the ranks it is in one of the `tiles`, if any of its keys is here.

    Shapes: slots [T] int64, rotations [T, 1, head_dim / 2] complex; replicated.
    """

    slots: Tensor
    rotations: Tensor
    chunks: tuple[QueryChunk, ...] = ()
    decode: DecodeBatch | None = None
    sink_tiles: tuple[SinkTile, ...] = ()
    paged: tuple[PagedQueries, ...] = ()
    tiles: tuple[QueryTile, ...] = ()


@dataclass(frozen=True)
class Batch:
    """The tokens of one forward pass, sequences end to end, and what they are to each group.

    With `noise`, which is that of the rows whose result is wanted, their draws are made as well.

    Shapes: tokens [T] int64, rows [n] int64 (those whose result is wanted, None for all); all
    replicated.
    """

    tokens: Tensor
    groups: tuple[GroupBatch, ...]
    rows: Tensor | None
    noise: Noise | None = None
