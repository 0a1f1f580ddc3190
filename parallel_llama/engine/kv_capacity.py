"""The size of the KV cache, from the free memory of all ranks."""

import hashlib
import math
import re
from bisect import bisect_left
from collections import Counter
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
from parallel_llama.parallel.failures import RankError
from parallel_llama.plan import ShardPlan

_NO_MEMORY = re.compile(
    r"can('t|not) allocate memory|not enough memory|out of memory", re.IGNORECASE
)


def _gib(n_bytes: int) -> str:
    """Rounded up, so that an entry of the printed size is enough."""
    return f"{math.ceil(n_bytes / GIB * 1000) / 1000:.3f}"


@dataclass(frozen=True)
class Capacity:
    """The size of the KV cache, the same on every rank.

    `n_blocks` are the blocks of each KV group. `windows` is the number of keys that a token sees in
    each KV group, None for all, in addition to the first `n_sinks` tokens of a sequence. `n_bytes`
    is the size on the rank with the largest cache.
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
    """Free bytes of a rank's device, and a number that identifies its GPU; 0 for the CPU."""

    n_free: int
    gpu: int = 0


def memory_of(device: torch.device) -> DeviceMemory:
    """The free memory of a device, including what torch has cached in this process."""
    if device.type != "cuda":
        return DeviceMemory(available_memory())
    torch.cuda.empty_cache()
    n_free, _ = torch.cuda.mem_get_info(device)
    name = str(torch.cuda.get_device_properties(device).uuid)
    digest = hashlib.blake2b(name.encode(), digest_size=7).digest()
    return DeviceMemory(n_free, 1 + int.from_bytes(digest, "little"))


@dataclass(frozen=True)
class MemoryLimit:
    """The bytes that a rank may take, and the bytes of its weights and of its working memory.

    `working` has the bytes of everything except weights and KV cache; see `memory.working_bytes`.
    """

    total: int
    weights: int
    working: int

    @property
    def cache(self) -> int:
        """Bytes that are left for the KV cache; below 0 if the weights do not fit."""
        return self.total - self.weights - self.working


class CacheSize:
    """The wanted size of each rank's KV cache: `n_bytes`, or as much as fits.

    `max_seq_len` is the length of the longest sequences, `working` the bytes that each rank's GPU
    must keep free (empty on the CPU), `step_tokens` the maximum tokens per step, `limits` the
    memory that the user gives each rank (empty for no limit). `draft_bytes` are the bytes per token
    of a draft model's KV cache, for each rank and each KV group of the model.

    Raises: UsageError if `n_bytes` is less than one block of each KV group, or a rank's limit is
    less than its weights, the wanted cache and its working memory together.
    """

    def __init__(
        self,
        args: ModelArgs,
        plan: ShardPlan,
        form: KVFormat,
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
        token_bytes = [kv_bytes_per_token(args, shard, form) for shard in plan.shards]
        for rank, drafts in enumerate(draft_bytes):
            token_bytes[rank] = tuple(map(add, token_bytes[rank], drafts))
        self._block_bytes = [[n * block_size for n in own] for own in token_bytes]
        widest = max(map(sum, self._block_bytes))
        if n_bytes is not None and n_bytes < widest:
            raise UsageError(
                f"kv_cache_bytes={n_bytes}, but one block of {block_size} tokens takes {widest} "
                "bytes on a rank; raise kv_cache_bytes, lower block_size, or use more ranks"
            )
        self._limits = limits
        self._require_limits()

    def _require_limits(self) -> None:
        """Raises: UsageError, naming the first rank that cannot keep to its limit."""
        n_blocks = 1
        if self.n_bytes is not None:
            n_blocks = min(self._n_blocks([self.n_bytes] * len(self._block_bytes)))
        sizes = self._sizes(n_blocks)
        for rank, limit in enumerate(self._limits):
            cache = sum(map(mul, sizes, self._block_bytes[rank]))
            if cache > limit.cache:
                lower = ", lower kv_cache_bytes" if self.n_bytes else ""
                raise UsageError(
                    f"rank {rank} of {len(self._limits)} needs "
                    f"{_gib(limit.total - limit.cache + cache)} GiB, and its entry in memory is "
                    f"{_gib(limit.total)} GiB: {_gib(limit.weights)} for weights, {_gib(cache)} "
                    f"for the KV cache of {n_blocks * self.block_size} tokens, "
                    f"{_gib(limit.working)} for its process and the tensors of a step; raise its "
                    f"entry{lower}, use --quant int8, a smaller dtype or more ranks"
                )

    def require_room(
        self, comm: Communicator, memory: DeviceMemory, weights: Sequence[int]
    ) -> None:
        """Check that each rank's GPU has room for weights, working memory and the smallest cache.

        Raises: UsageError, on all ranks, naming a rank whose GPU is too small.
        Collective: one all_gather.
        """
        for rank, (n_free, _) in enumerate(self._agreed(comm, memory)):
            cache, working = self.n_bytes or sum(self._block_bytes[rank]), self._working[rank]
            needed = weights[rank] + cache + working
            if needed > n_free:
                lower = " or lower kv_cache_bytes" if self.n_bytes else ""
                raise UsageError(
                    f"rank {rank} of {comm.size} needs {needed} bytes of its GPU, which has "
                    f"{n_free} free: {weights[rank]} for weights, {cache} for the KV cache, "
                    f"{working} as workspace; use more ranks, --quant int8, a smaller dtype{lower}"
                )

    def agree(self, comm: Communicator, memory: DeviceMemory) -> Capacity:
        """The capacity: as many blocks as fit on every rank.

        `memory` is this rank's, after the weights have been loaded.

        Raises: UsageError, on all ranks, if not even one block fits, or a rank has less free memory
        than `n_bytes`.
        Collective: one all_gather.
        """
        agreed = self._agreed(comm, memory)
        frees = [n_free - work for (n_free, _), work in zip(agreed, self._working, strict=True)]
        least = frees.index(min(frees))
        if self.n_bytes is not None and self.n_bytes > frees[least]:
            raise UsageError(
                f"kv_cache_bytes={self.n_bytes}, but rank {least} has {frees[least]} bytes of free "
                "memory; lower kv_cache_bytes"
            )
        rooms = [
            default_cache_bytes("cuda" if gpu else "cpu", n_free, work, comm.size)
            if self.n_bytes is None
            else self.n_bytes
            for (n_free, gpu), work in zip(agreed, self._working, strict=True)
        ]
        if self._limits:
            rooms = [
                min(pair) for pair in zip(rooms, [each.cache for each in self._limits], strict=True)
            ]
        n_blocks = self._n_blocks(rooms)
        tightest = n_blocks.index(min(n_blocks))
        if n_blocks[tightest] < 1:
            raise UsageError(
                f"rank {tightest} has {rooms[tightest]} bytes for its KV cache, but one block of "
                f"{self.block_size} tokens takes {sum(self._block_bytes[tightest])}; free some "
                "memory, or use more ranks on more hosts"
            )
        sizes = self._sizes(n_blocks[tightest])
        n_bytes = max(sum(map(mul, sizes, each)) for each in self._block_bytes)
        windows = tuple(kv_group.window for kv_group in kv_groups(self.args))
        n_sinks, tokens = self.args.attention_sinks, self._step_tokens
        return Capacity(sizes, self.block_size, n_bytes, windows, n_sinks, tokens)

    def _agreed(self, comm: Communicator, memory: DeviceMemory) -> list[tuple[int, int]]:
        """The free bytes and the GPU of each rank; ranks that share a GPU share its memory."""
        rows = comm.all_gather(torch.tensor([memory.n_free, memory.gpu])).tolist()
        sharing = Counter(gpu for _, gpu in rows if gpu)
        return [(n_free // max(1, sharing[gpu]), gpu) for n_free, gpu in rows]

    def _n_blocks(self, rooms: Sequence[int]) -> list[int]:
        """The most blocks of the first KV group that each rank can hold in its room."""
        return [
            most_blocks(self._sizes, each, room)
            for room, each in zip(rooms, self._block_bytes, strict=True)
        ]

    def _sizes(self, n_blocks: int) -> tuple[int, ...]:
        longest, tokens = self.max_seq_len, self._step_tokens
        return pool_sizes(self.args, n_blocks, self.block_size, longest, tokens)


@dataclass(frozen=True)
class MemoryFor:
    """A context manager that turns a failed allocation into an error with the purpose and a remedy.

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
            asked = re.search(r"(\d+) bytes", text)
            size = f" ({asked[1]} bytes at once)" if asked else ""
            raise OutOfMemory(f"there is no memory for {self.what}{size}; {self.remedy}") from error
