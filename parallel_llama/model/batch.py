"""The tokens of one forward pass, and the keys of the KV cache that each token attends to.

A batch holds chunks of sequences end to end, [T, ...] without padding. In a layer with a sliding
window a token attends to the keys in the window and to attention sinks only.

Source: sliding windows, Longformer, arXiv 2004.05150, and Mistral, arXiv 2310.06825.
"""

from dataclasses import dataclass

from torch import Tensor

from parallel_llama.model.low_rank import Adapters
from parallel_llama.ops import PartTile, Plan, QueryTile, SamplingKeys, SinkPlan


@dataclass(frozen=True)
class SinkTile:
    """Queries that attend to their window, and to sinks as if these came right before the window.

    Args:
        plan: The queries.
        back_rotations: [t, 1, D / 2] complex, rotates the queries back by the gap between the sinks
            and the window.

    Source: positions within the cache, StreamingLLM, arXiv 2309.17453, section 3.2.
    """

    plan: SinkPlan
    back_rotations: Tensor


@dataclass(frozen=True)
class KVGroupBatch:
    """The batch in the layers of one KV group: the slots of its tokens, and their queries.

    Args:
        slots: [T] int64 replicated, the slot of each token.
        rotations: [T, 1, head_dim / 2] complex, replicated, the rotary embedding of each token.
        plan: The queries that are not in `sink_tiles`.
        sink_tiles: The queries that attend to attention sinks outside of their window.
        tiles: If the cache is sharded by token: the queries with keys on this rank; then `plan` and
            `sink_tiles` are unused.
        part_tiles: If sums are exact too: all queries, with their keys in parts of PART_KEYS;
            then `plan`, `sink_tiles` and `tiles` are unused.
    """

    slots: Tensor
    rotations: Tensor
    plan: Plan | None = None
    sink_tiles: tuple[SinkTile, ...] = ()
    tiles: tuple[QueryTile, ...] = ()
    part_tiles: tuple[PartTile, ...] = ()


@dataclass(frozen=True)
class Batch:
    """The tokens of one forward pass, sequences end to end.

    Args:
        tokens: [T] int64 replicated.
        kv_groups: The batch in the layers of each KV group.
        rows: [n] int64 replicated, the rows whose result is wanted; None for all.
        sampling_keys: The random keys and the temperatures of these rows, if their tokens are
            sampled on the device.
        adapters: The tokens that run with each adapter.
        adapters_of_rows: The tokens of `rows` that run with each adapter, as indices into `rows`.
        query_scales: [T], the factor on the queries of each token in layers that scale queries;
            None if all factors are 1.
    """

    tokens: Tensor
    kv_groups: tuple[KVGroupBatch, ...]
    rows: Tensor | None
    sampling_keys: SamplingKeys | None = None
    adapters: Adapters = ()
    adapters_of_rows: Adapters = ()
    query_scales: Tensor | None = None
