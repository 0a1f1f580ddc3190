"""Queries over keys in scattered blocks, in memory that is otherwise filled with NaN."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel_llama.ops import HeadMap, PagedPlan, PagedQueries, Scores, TorchOps, kv_rows
from parallel_llama.ops.attention import PLAIN
from parallel_llama.plan import HeadRun

POISON = -7.0  # marks results that were not written


def runs_of(heads_per_kv: Sequence[int]) -> tuple[HeadRun, ...]:
    """A run for each KV head, with the given numbers of query heads."""
    ends = [sum(heads_per_kv[: i + 1]) for i in range(len(heads_per_kv))]
    return tuple(
        HeadRun(range(end - n, end), range(i, i + 1))
        for i, (n, end) in enumerate(zip(heads_per_kv, ends, strict=True))
    )


@dataclass(frozen=True)
class Sample:
    """Ranges of queries, the keys of each range from position 0 on, and the cache that holds them.

    Shapes: `q` [T, H, D], a slice of a wider product; `k`, `v` [K, n_slots, W]; the `keys` and
    `values` of a range [K, S, D], as read from the cache.
    """

    heads_per_kv: Sequence[int]
    q: Tensor
    k: Tensor
    v: Tensor
    queries: PagedQueries
    keys: list[Tensor]
    values: list[Tensor]

    @property
    def heads(self) -> HeadMap:
        return HeadMap.of(runs_of(self.heads_per_kv), self.q.device)

    @property
    def plan(self) -> PagedPlan:
        return PagedPlan((self.queries,))

    def run(self, ops: TorchOps, sinks: Tensor | None = None) -> Tensor:
        """The result, with POISON in rows without a query; asserts that nothing else is written."""
        n_rows, n_heads, head_dim = self.q.shape
        wide = self.q.new_full((n_rows + 1, n_heads + 1, head_dim), POISON)
        out = wide[:-1, :-1]
        own = (self.q, self.k, self.v, self.plan, self.heads, out)
        ops.attention(*own) if sinks is None else ops.attention(*own, sinks)
        assert (wide[-1] == POISON).all() and (wide[:, -1] == POISON).all()
        return out

    def expected(self, scores: Scores = PLAIN, sinks: Tensor | None = None) -> Tensor:
        """The expected result in float64, from each whole sequence."""
        result = torch.full_like(self.q, POISON, dtype=torch.float64)
        for range_, keys, values in zip(
            self.queries.rows.tolist(), self.keys, self.values, strict=True
        ):
            row, n_queries, start, *_ = range_
            own, first = slice(row, row + n_queries), 0
            for head, heads_per_kv in enumerate(self.heads_per_kv):
                group = slice(first, first + heads_per_kv)
                q = self.q[own, group].transpose(0, 1).double()  # [G, n_queries, D]
                seen = slice(start + n_queries)
                k, v = keys[head, seen].double(), values[head, seen].double()
                mask = _visible(start, n_queries, self.queries.window).to(q.device)
                of_group = None if sinks is None else sinks[group].double()
                result[own, group] = _attention(q, k, v, mask, scores, of_group).transpose(0, 1)
                first += heads_per_kv
        return result


def _visible(start: int, n_queries: int, window: int | None) -> Tensor:
    behind = torch.arange(start, start + n_queries)[:, None] - torch.arange(start + n_queries)
    return (behind >= 0) & (behind < (window or start + n_queries))


def _attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scores: Scores, sinks: Tensor | None
) -> Tensor:
    if sinks is not None:  # a column of scores without a value
        products = (q @ k.T * scores.scale_of(q.shape[-1])).masked_fill(~mask, -torch.inf)
        column = sinks[:, None, None].expand(-1, q.shape[1], -1)
        return torch.cat((products, column), -1).softmax(-1)[..., :-1] @ v
    if (cap := scores.soft_cap) is None:
        k, v = (each.expand(len(q), -1, -1) for each in (k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scores.scale)
    products = q @ k.T * scores.scale_of(q.shape[-1])
    products = cap * (products / cap).tanh()
    return products.masked_fill(~mask, -torch.inf).softmax(-1) @ v


def make_sample(
    ranges: Sequence[tuple[int, int]],
    heads_per_kv: Sequence[int],
    head_dim: int,
    *,
    dtype: torch.dtype,
    cache_dtype: torch.dtype | None = None,
    window: int | None = None,
    block_size: int = 4,
    device: torch.device | str = "cpu",
) -> Sample:
    """Makes ranges of (number of queries, position of the first), each of another sequence.

    Blocks are shuffled, and the rows of the batch are not in the order of the ranges. Everything
    that no query may see is NaN: free blocks, slots after the last query, blocks before a window.
    """
    stored = cache_dtype or dtype
    n_kv_heads = len(heads_per_kv)
    n_blocks = sum(-(-(n + start) // block_size) for n, start in ranges) + 3
    width = kv_rows.row_width(head_dim, stored)
    nothing = torch.full((2, n_kv_heads, n_blocks * block_size, head_dim), torch.nan)
    cache = kv_rows.pack(nothing, stored).to(device)
    assert cache.shape[-1] == width
    free = iter((1 + torch.randperm(n_blocks - 1)).tolist())  # block 0 is easily read by mistake
    firsts = dict(_rows_of(ranges))
    rows: list[tuple[int, ...]] = []
    blocks: list[int] = []
    keys, values = [], []
    for number, (n_queries, start) in enumerate(ranges):
        n_keys = start + n_queries
        seen = 0 if window is None else max(start - window + 1, 0)
        first_key = seen // block_size * block_size
        own = [next(free) for _ in range(first_key, n_keys, block_size)] if n_queries else []
        rows.append((firsts[number], n_queries, start, first_key, len(blocks)))
        kv = torch.randn(2, n_kv_heads, n_keys, head_dim).to(device=device, dtype=dtype)
        packed = kv_rows.pack(kv, stored)
        keys.append(kv_rows.unpack(packed[0], dtype))
        values.append(kv_rows.unpack(packed[1], dtype))
        for at in range(seen, n_keys if n_queries else seen):
            slot = own[(at - first_key) // block_size] * block_size + at % block_size
            cache[:, :, slot] = packed[:, :, at]
        blocks += own
    n_rows, n_heads = sum(n for n, _ in ranges), sum(heads_per_kv)
    q = torch.randn(n_rows, n_heads + 2, head_dim).to(device=device, dtype=dtype)[:, 1:-1]
    queries = PagedQueries(
        torch.tensor(rows, dtype=torch.int32, device=device).view(-1, 5),
        torch.tensor(blocks, dtype=torch.int32, device=device),
        block_size,
        max((n for n, _ in ranges), default=1) or 1,
        window,
    )
    return Sample(heads_per_kv, q, cache[0], cache[1], queries, keys, values)


def _rows_of(ranges: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The first row of a range in the batch; the last range has the first rows."""
    row = 0
    for number, (n_queries, _) in reversed(list(enumerate(ranges))):
        yield number, row
        row += n_queries
