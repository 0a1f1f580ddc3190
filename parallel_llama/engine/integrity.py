"""Detects flipped bits and wrong products while the engine runs, and names the rank at fault.

Four checks run beside the steps, on the CPU:

* Weights: for every 128 KiB, a sum of 64-bit words is computed after loading. Any single
  flipped bit changes the sum. The sums are compared in rotation.
* KV cache: such a sum is computed for each full block, and compared in the same rotation.
* Residual stream: all ranks compute the same values, so every 96 steps they exchange a running
  digest of the rows that forward passes return.
* Products, with exact sums: every 96 steps, ranks compare products of a weight (see
  `product_check`).

A part of the memory is compared after every 32nd step. All ranks do this after the same step: in
every step all ranks wait for the slowest one, so comparisons in different steps would delay more
steps. The time for comparisons is a fixed fraction of the time of steps. A step of one sequence
reads all weights once, so this fraction determines how many steps a rotation takes.

Other faults are not found, such as a bit that flips and flips back between two comparisons, or a
wrong result that is the same on all ranks or never reaches the residual stream.
"""

import math
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from parallel_llama.engine.product_check import ProductCheck
from parallel_llama.errors import TEST_MEMORY
from parallel_llama.model.adapters import low_rank_matrices
from parallel_llama.model.kv_cache import KVCache
from parallel_llama.model.transformer import Transformer
from parallel_llama.model.weights import stored_weights
from parallel_llama.parallel.collectives import Communicator
from parallel_llama.parallel.failures import IntegrityError, differing_ranks

# The time for comparisons and for sums of new blocks, as a fraction of the time of steps.
_TIME_FRACTION = 0.0015

# A comparison that exceeds its time delays later comparisons by the excess, up to this time.
# Without the limit, a rank preempted within a comparison would check nothing for a long time.
_MAX_DEBT_S = 1e-3

# Steps between two comparisons of memory. A call takes longest when a step has just evicted its
# code and data from the caches, so few calls that each do more are cheaper.
_MEMORY_STEPS = 32

# Steps between two exchanges with other ranks, a multiple of _MEMORY_STEPS.
_EXCHANGE_STEPS = 96

_DIGEST_BYTES = 8

# The words that are summed at once, in about 20 microseconds.
_WORDS = (128 << 10) // 8

Words = npt.NDArray[np.unsignedinteger]


class IntegrityCheck:
    """The checks of one rank, for a model on the CPU.

    Args:
        caches: the KV caches that are checked.
        exact: whether products have the same bits on all ranks.

    Attributes:
        n_rounds: how often all weights and all full blocks of the KV cache have been compared.
        products: the check of products, if there is one.
    """

    def __init__(
        self, model: Transformer, caches: Sequence[KVCache], comm: Communicator, *, exact: bool
    ) -> None:
        self._comm, self.n_rounds = comm, -1
        weights = stored_weights(model)
        # By name, of weights and of the matrices of adapters.
        self._stored = {name: _StoredSums(weight.values) for name, weight in weights.items()}
        self._model, self._adapters = model, set[str]()
        self.watch_adapters()
        self._blocks = [_BlockSums(cache) for cache in caches]
        self.products = ProductCheck(model, comm) if exact and comm.size > 1 else None
        self._dim, self._dtype = model.tok_embeddings.dim, model.tok_embeddings.weight.computed
        self._rotation: Iterator[str | None] = iter(())
        self._n_steps = self._digest = 0
        self._time_left_s = 0.0
        self._residual = memoryview(b"")  # of the last forward pass
        # The slots that each forward pass since `_update_blocks` has written, by KV group.
        self._written: list[Sequence[Sequence[int]]] = []
        self._failure: IntegrityError | None = None

    def record_step(self, slots: Sequence[Sequence[int]], residual: memoryview) -> None:
        """Record what a forward pass wrote.

        Args:
            slots: the slots of its tokens in each KV group.
            residual: the bytes of the residual stream after the last block; the next step may
                overwrite them.

        Raises: IntegrityError, again, if one was raised before.
        """
        if self._failure is not None:
            raise self._failure
        # Without numpy or torch: a step evicts their code from the CPU's caches, which makes a
        # call ten times slower. CRC-32 would also read its evicted tables.
        self._digest = zlib.adler32(residual, self._digest)
        self._residual = residual
        self._written.append(slots)
        if len(self._written) > _MEMORY_STEPS:
            self._update_blocks()

    def after_step(self, seconds: float) -> None:
        """Compare a part of the memory, after a step that took `seconds`.

        Call it before the next forward pass, which may overwrite the recorded residual stream.

        Raises: IntegrityError for memory that has changed; on all ranks, if ranks differ.
        Collective: in every 96th step one all_gather, and those of `ProductCheck.message`.
        """
        self._n_steps += 1
        self._time_left_s += seconds * _TIME_FRACTION
        if self._n_steps % _MEMORY_STEPS:
            return
        self._update_blocks()
        if self._n_steps % _EXCHANGE_STEPS == 0 and self._comm.size > 1:
            self._compare_ranks()
        now_s = time.perf_counter()
        stop_s = now_s + self._time_left_s
        while now_s < stop_s:
            self._compare_part()
            now_s = time.perf_counter()
        self._time_left_s = max(stop_s - now_s, -_MAX_DEBT_S)

    def watch_adapters(self) -> None:
        """Compute the sums of new adapters of the model, and release removed adapters."""
        matrices = dict(low_rank_matrices(self._model))
        for name in self._adapters - matrices.keys():
            del self._stored[name]
        for name, values in matrices.items():
            if name not in self._adapters:
                self._stored[name] = _StoredSums(values)
        self._adapters = set(matrices)

    def forget_blocks(self) -> None:
        """Drop the sums of the KV cache: a forward pass that failed may have written any block."""
        self._written.clear()
        for sums in self._blocks:
            sums.forget()

    def compare_memory(self) -> None:
        """Compare all memory of this rank, to find the cause of NaN or Inf.

        Raises: IntegrityError for memory that has changed.
        """
        self._update_blocks()
        for finding in _findings(self._stored, self._blocks):
            if finding is not None:
                raise self._error(finding)

    def compare_products(self) -> None:
        """Compare a product of each weight between ranks, to find the cause of NaN or Inf.

        Raises: IntegrityError, on all ranks, if they differ.
        Collective: as `ProductCheck.compare_all`.
        """
        if self.products is not None:
            # The residual stream may be NaN everywhere, so the row has other values.
            self.products.compare_all(torch.linspace(-1, 1, self._dim, dtype=self._dtype))

    def _update_blocks(self) -> None:
        """Update the sums of the blocks that were written."""
        for slots in self._written:
            for sums, slots_of_group in zip(self._blocks, slots, strict=True):
                sums.update(slots_of_group)
        self._written.clear()

    def _compare_part(self) -> None:
        """Compute the sum of one block of each KV cache that lacks it, and compare the next part.

        Raises: IntegrityError.
        """
        for sums in self._blocks:
            sums.compute_next()
        try:
            finding = next(self._rotation)
        except StopIteration:
            self.n_rounds += 1
            self._rotation = _findings(self._stored, self._blocks)
            finding = next(self._rotation)
        if finding is not None:
            raise self._error(finding)

    def _compare_ranks(self) -> None:
        message = torch.tensor([self._digest]).view(torch.uint8)
        if self.products is not None:
            message = torch.cat([message, self.products.message()])
        messages = self._comm.all_gather(message)
        digests, products = messages[:, :_DIGEST_BYTES], messages[:, _DIGEST_BYTES:]
        differing = differing_ranks([digest.numpy().tobytes() for digest in digests])
        if differing is not None:
            raise IntegrityError(
                f"{differing} in the residual stream, which all ranks compute alike: {TEST_MEMORY}"
            )
        if self.products is not None:
            row = bytearray(self._residual[-self._dim * self._dtype.itemsize :])
            self.products.receive(products, torch.frombuffer(row, dtype=self._dtype))

    def _error(self, finding: str) -> IntegrityError:
        rank, size = self._comm.rank, self._comm.size
        self._failure = IntegrityError(f"rank {rank} of {size}: {finding}: {TEST_MEMORY}")
        return self._failure


class _StoredSums:
    """The sums of memory that does not change, in parts of _WORDS words."""

    def __init__(self, values: Tensor) -> None:
        assert values.is_contiguous()
        data = values.view(-1).view(torch.uint8).numpy()
        n_whole = len(data) // 8 * 8
        words = data[:n_whole].view(np.uint64)
        self._parts = [words[start : start + _WORDS] for start in range(0, len(words), _WORDS)]
        if n_whole < len(data):
            self._parts.append(data[n_whole:])
        self._sums = [_sum(part) for part in self._parts]

    @property
    def n_parts(self) -> int:
        return len(self._parts)

    def is_unchanged(self, number: int) -> bool:
        return _sum(self._parts[number]) == self._sums[number]


class _BlockSums:
    """The sums of full blocks of a KV cache."""

    def __init__(self, cache: KVCache) -> None:
        rows = cache.as_bytes().numpy()  # [n_layers * 2 * K, n_slots, bytes]
        self._words = rows.view(f"u{math.gcd(rows.shape[2], 8)}")
        self._block_size = cache.block_size
        self._sums: dict[int, int] = {}
        self._pending: dict[int, None] = {}  # blocks that are full and have no sum yet

    def update(self, slots: Sequence[int]) -> None:
        """Drop the sums of blocks that were written, and queue blocks that became full."""
        size = self._block_size
        for block in {slot // size for slot in slots}:
            self._sums.pop(block, None)
            self._pending.pop(block, None)
        self._pending.update({slot // size: None for slot in slots if slot % size == size - 1})

    def compute_next(self) -> None:
        """Compute the sum of the block that has waited longest, if any."""
        if self._pending:
            block = next(iter(self._pending))
            del self._pending[block]
            self._sums[block] = self._sum_of(block)

    def forget(self) -> None:
        """Compare no block until it is written again."""
        self._sums.clear()
        self._pending.clear()

    def blocks(self) -> list[int]:
        """The blocks that have a sum."""
        return list(self._sums)

    def is_unchanged(self, block: int) -> bool:
        """Whether a block has not changed since its sum was taken, or has no sum any more."""
        return block not in self._sums or self._sum_of(block) == self._sums[block]

    def _sum_of(self, block: int) -> int:
        start = block * self._block_size
        return _sum(self._words[:, start : start + self._block_size])


def _findings(
    stored: Mapping[str, _StoredSums], caches: Sequence[_BlockSums]
) -> Iterator[str | None]:
    """Compare all memory. Yields: for each part, the fault or None.

    Between two parts `stored` may change. So this generator keeps no reference to a _StoredSums,
    which would keep the memory of an unloaded adapter allocated.
    """
    for name in list(stored):
        number = 0
        while name in stored and number < stored[name].n_parts:
            is_unchanged = stored[name].is_unchanged(number)
            number += 1
            yield None if is_unchanged else f"{name} has changed in memory since it was loaded"
    for sums in caches:
        for block in sums.blocks():
            is_unchanged = sums.is_unchanged(block)
            yield None if is_unchanged else f"block {block} of its KV cache has changed in memory"


def _sum(words: Words) -> int:
    return int(words.sum(dtype=np.uint64))
