"""Computes the size of the KV cache from the free memory of all ranks."""

import hashlib
import math
import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from operator import add, mul
from types import TracebackType

import torch

from parallel_llama.dtypes import KVFormat
from parallel_llama.engine.available_memory import available_memory
from parallel_llama.engine.kv_blocks import STEP_TOKENS
from parallel_llama.errors import OutOfMemory, UsageError
from parallel_llama.families.model_args import ModelArgs, kv_groups
from parallel_llama.memory import (
    GIB,
    blocks_held,
    default_cache_bytes,
    kv_bytes_per_token,
    most_blocks,
    pool_sizes,
)
from parallel_llama.parallel.collectives import Communicator
from parallel_llama.parallel.device_choice import DeviceKind
from parallel_llama.parallel.failures import RankError
from parallel_llama.parallel.shared_memory import host_id
from parallel_llama.plan import ShardPlan

_NO_MEMORY = re.compile(
    r"can('t|not) allocate memory|not enough memory|out of memory", re.IGNORECASE
)


def _gib(n_bytes: int) -> str:
    """GiB, rounded up, so that a limit of the printed size is enough."""
    return f"{math.ceil(n_bytes / GIB * 1000) / 1000:.3f}"


@dataclass(frozen=True)
class Capacity:
    """The size of the KV cache, equal on every rank.

    Args:
        n_blocks: the blocks of each KV group.
        n_bytes: the size on the rank with the largest cache.
        windows: the number of keys that a token sees in each KV group, besides attention sinks;
            None for full attention.
        n_sinks: the number of attention sinks.
    """

    n_blocks: tuple[int, ...]
    block_size: int
    n_bytes: int
    windows: tuple[int | None, ...] = (None,)
    n_sinks: int = 0
    step_tokens: int = STEP_TOKENS["cpu"]

    @property
    def n_tokens(self) -> int:
        """The number of tokens that fit into the first KV group."""
        return self.n_blocks[0] * self.block_size

    def longest(self, max_seq_len: int) -> int:
        """The length of the longest sequence that fits, at most `max_seq_len` tokens."""
        lengths = range(1, max_seq_len + 1)
        return bisect_left(lengths, 1, key=lambda length: self.n_full_requests(length) == 0)

    def n_full_requests(self, max_seq_len: int) -> int:
        """The number of requests of `max_seq_len` tokens that fit at the same time."""
        return min(
            n // blocks_held(max_seq_len, self.block_size, window, self.step_tokens, self.n_sinks)
            for n, window in zip(self.n_blocks, self.windows, strict=True)
        )


@dataclass(frozen=True)
class DeviceMemory:
    """The free memory of a rank's device.

    Args:
        n_free: in bytes.
        gpu: a number that identifies the GPU; 0 for the CPU.
        host: a number that identifies the host of a rank on the CPU; 0 for a GPU.
    """

    n_free: int
    gpu: int = 0
    host: int = 0


def memory_of(device: torch.device) -> DeviceMemory:
    """The free memory of a device, including what torch has cached in this process."""
    if device.type != "cuda":
        return DeviceMemory(available_memory(), host=_number_of(host_id()))
    torch.cuda.empty_cache()
    n_free, _ = torch.cuda.mem_get_info(device)
    return DeviceMemory(n_free, _number_of(str(torch.cuda.get_device_properties(device).uuid)))


def _number_of(name: str) -> int:
    """A number above 0 that identifies a GPU or a host, for `all_gather`."""
    digest = hashlib.blake2b(name.encode(), digest_size=7).digest()
    return 1 + int.from_bytes(digest, "little")


@dataclass(frozen=True)
class _Pool:
    """Free memory that ranks share: of a GPU, or of a host with ranks on the CPU.

    Args:
        n_free: in bytes.
        ranks: the ranks that share the memory.
    """

    device: DeviceKind
    n_free: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class MemoryLimit:
    """The bytes that the user allows a rank, and how many it needs besides the KV cache.

    Args:
        working: everything except weights and KV cache; see `memory.working_bytes`.
    """

    total: int
    weights: int
    working: int

    @property
    def cache(self) -> int:
        """Bytes that are left for the KV cache; below 0 if the weights do not fit."""
        return self.total - self.weights - self.working


class CacheSize:
    """The requested size of each rank's KV cache, which `agree` turns into a `Capacity`.

    Args:
        n_bytes: the size on each rank; None for as much as fits.
        max_seq_len: the length of the longest sequences.
        working: the bytes that each rank's GPU must keep free; empty on the CPU.
        step_tokens: maximum tokens per step.
        limits: the memory that the user allows each rank; empty without limits.
        draft_bytes: the bytes per token of a draft model's KV cache, by rank and by KV group of the
            model.

    Raises: UsageError if `n_bytes` is less than one block of each KV group, or if the weights, the
    requested cache and the working memory of a rank exceed its limit.
    """

    def __init__(
        self,
        args: ModelArgs,
        plan: ShardPlan,
        kv_format: KVFormat,
        block_size: int,
        n_bytes: int | None,
        max_seq_len: int,
        working: Sequence[int] = (),
        step_tokens: int = STEP_TOKENS["cpu"],
        limits: Sequence[MemoryLimit] = (),
        draft_bytes: Sequence[Sequence[int]] = (),
    ) -> None:
        if block_size < 1:
            raise UsageError(f"block_size={block_size}: a block holds at least 1 token")
        self._working, self._step_tokens = working or [0] * plan.tp_size, step_tokens
        self.args, self.max_seq_len = args, max_seq_len
        self.block_size, self.n_bytes = block_size, n_bytes
        token_bytes = [kv_bytes_per_token(args, shard, kv_format) for shard in plan.shards]
        for rank, drafts in enumerate(draft_bytes):
            token_bytes[rank] = tuple(map(add, token_bytes[rank], drafts))
        self._block_bytes = [[n * block_size for n in group_bytes] for group_bytes in token_bytes]
        largest = max(map(sum, self._block_bytes))
        if n_bytes is not None and n_bytes < largest:
            raise UsageError(
                f"a KV cache of {n_bytes} bytes is too small: one block of {block_size} tokens "
                f"takes {largest} bytes on a rank; use a larger KV cache, smaller blocks, or more "
                "ranks"
            )
        # The smallest cache is the requested one, or one block of each KV group. All ranks have
        # the same number of blocks, so a rank with fewer KV heads needs less than `n_bytes`.
        n_blocks = 1
        if n_bytes is not None:
            n_blocks = min(self._n_blocks([n_bytes] * len(self._block_bytes)))
        self._min_tokens, self._min_bytes = n_blocks * block_size, self._cache_bytes(n_blocks)
        self._limits = limits
        self._require_limits()

    def _require_limits(self) -> None:
        """Raises: UsageError, naming the first rank that cannot keep to its limit."""
        for rank, limit in enumerate(self._limits):
            cache = self._min_bytes[rank]
            if cache > limit.cache:
                remedy = ", use a smaller KV cache" if self.n_bytes else ""
                raise UsageError(
                    f"rank {rank} of {len(self._limits)} needs "
                    f"{_gib(limit.total - limit.cache + cache)} GiB, but its limit (memory) is "
                    f"{_gib(limit.total)} GiB: it needs {_gib(limit.weights)} for weights, "
                    f"{_gib(cache)} for the KV cache of {self._min_tokens} tokens, "
                    f"{_gib(limit.working)} for its process and the tensors of a step; raise the "
                    f"limit{remedy}, use --quant int8, a smaller dtype or more ranks"
                )

    def require_room(
        self, comm: Communicator, memory: DeviceMemory, weights: Sequence[int]
    ) -> None:
        """Check that each rank's GPU has room for weights, working memory and the smallest cache.

        Raises: UsageError, on all ranks, naming a rank whose GPU is too small.
        Collective: one all_gather.
        """
        for pool in self._gather_pools(comm, memory):
            cache, working, model = (
                sum(n_bytes[rank] for rank in pool.ranks)
                for n_bytes in (self._min_bytes, self._working, weights)
            )
            needed = model + cache + working
            if needed > pool.n_free:
                remedy = ", a smaller KV cache" if self.n_bytes else ""
                raise UsageError(
                    f"rank {pool.ranks[0]} of {comm.size} needs {needed} bytes of its GPU, which "
                    f"has {pool.n_free} free: {model} for weights, {cache} for the KV cache, "
                    f"{working} as workspace; use more ranks, --quant int8{remedy} or a smaller "
                    "dtype"
                )

    def agree(self, comm: Communicator, memory: DeviceMemory) -> Capacity:
        """The capacity: as many blocks as fit on every rank.

        Args:
            memory: of this rank, after the weights have been loaded.

        Raises: UsageError, on all ranks, if not even one block fits, or ranks that share memory
        have less free memory than their caches of `n_bytes` need.
        Collective: one all_gather.
        """
        cache_limits = [self.n_bytes or 0] * comm.size
        for pool in self._gather_pools(comm, memory):
            if self.n_bytes is not None:
                self._require_pool(pool)
                continue
            for rank in pool.ranks:
                working, n_sharing = self._working[rank], len(pool.ranks)
                cache_limits[rank] = default_cache_bytes(
                    pool.device, pool.n_free, working, n_sharing
                )
        if self._limits:
            cache_limits = [
                min(pair)
                for pair in zip(cache_limits, [each.cache for each in self._limits], strict=True)
            ]
        n_blocks = self._n_blocks(cache_limits)
        rank = n_blocks.index(min(n_blocks))
        if n_blocks[rank] < 1:
            raise UsageError(
                f"rank {rank} has {cache_limits[rank]} bytes for its KV cache, but one block of "
                f"{self.block_size} tokens takes {sum(self._block_bytes[rank])}; free some "
                "memory, or use more ranks on more hosts"
            )
        sizes, n_bytes = self._sizes(n_blocks[rank]), max(self._cache_bytes(n_blocks[rank]))
        windows = tuple(kv_group.window for kv_group in kv_groups(self.args))
        n_sinks, step_tokens = self.args.attention_sinks, self._step_tokens
        return Capacity(sizes, self.block_size, n_bytes, windows, n_sinks, step_tokens)

    def _require_pool(self, pool: _Pool) -> None:
        """Raises: UsageError if the requested caches of the ranks do not fit into their memory."""
        n_free = pool.n_free - sum(self._working[rank] for rank in pool.ranks)
        needed = sum(self._min_bytes[rank] for rank in pool.ranks)
        if needed > n_free:
            raise UsageError(
                f"a KV cache of {self.n_bytes} bytes is too large: rank {pool.ranks[0]} has "
                f"{n_free} bytes of free memory, but the KV caches in this memory need {needed}; "
                "use a smaller KV cache"
            )

    def _gather_pools(self, comm: Communicator, memory: DeviceMemory) -> list[_Pool]:
        """The free memory of all GPUs and hosts, equal on all ranks. Collective: one all_gather."""
        row = torch.tensor([memory.n_free, memory.gpu, memory.host])
        rows = comm.all_gather(row).tolist()
        ranks_of: dict[tuple[int, int], list[int]] = {}
        for rank, (_, gpu, host) in enumerate(rows):
            ranks_of.setdefault((gpu, host), []).append(rank)
        return [
            _Pool("cuda" if gpu else "cpu", min(rows[rank][0] for rank in ranks), tuple(ranks))
            for (gpu, _), ranks in ranks_of.items()
        ]

    def _cache_bytes(self, n_blocks: int) -> list[int]:
        """For each rank, the bytes of its cache if the first KV group has `n_blocks` blocks."""
        sizes = self._sizes(n_blocks)
        return [sum(map(mul, sizes, block_bytes)) for block_bytes in self._block_bytes]

    def _n_blocks(self, cache_bytes: Sequence[int]) -> list[int]:
        """For each rank, the maximum blocks of the first KV group that fit into its bytes."""
        return [
            most_blocks(self._sizes, block_bytes, n_bytes)
            for n_bytes, block_bytes in zip(cache_bytes, self._block_bytes, strict=True)
        ]

    def _sizes(self, n_blocks: int) -> tuple[int, ...]:
        longest, tokens = self.max_seq_len, self._step_tokens
        return pool_sizes(self.args, n_blocks, self.block_size, longest, tokens)


@dataclass(frozen=True)
class MemoryFor:
    """A context manager that turns a failed allocation into an error with purpose and remedy.

    Raises: OutOfMemory.
    """

    what: str
    remedy: str

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None
    ) -> None:
        # A RankError may report that another rank is out of memory.
        if isinstance(error, RankError) or not isinstance(
            error, (MemoryError, OSError, RuntimeError)
        ):
            return
        text = str(error)
        # torch raises a plain RuntimeError for the CPU's memory.
        if isinstance(error, MemoryError) or _NO_MEMORY.search(text):
            size_match = re.search(r"(\d+) bytes", text)
            size = f" ({size_match[1]} bytes at once)" if size_match else ""
            raise OutOfMemory(f"there is no memory for {self.what}{size}; {self.remedy}") from error
