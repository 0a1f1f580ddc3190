"""Finds flipped bits while the engine runs, and names the rank whose memory is faulty.

Three checks run beside the steps, on the CPU:

* Weights: every 128 KiB has a sum of its 64-bit words, taken after loading, which changes with any
  single bit. A few are compared after each step, all in turn.
* KV cache: the rows of a token have such a sum, taken once 16 tokens are new. They are compared in
  the same rotation.
* Residual stream: it is the same on all ranks, so every 16 steps ranks exchange a digest of all
  rows that it had.

The rotation compares at least one part after each step, and as many as fit into a fraction of the
step's time. A step of one sequence reads the whole memory once, so the fraction says how many steps
a rotation takes.

No other kind of fault is found: a bit that flips and flips back between two comparisons, or a wrong
result that is the same on all ranks or never reaches the residual stream.
"""

import math
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from parallel_llama.errors import TEST_MEMORY, listed_ranks
from parallel_llama.model.kv_cache import KVCache
from parallel_llama.model.transformer import Transformer
from parallel_llama.model.weights import stored_weights
from parallel_llama.parallel.collectives import Communicator
from parallel_llama.parallel.failures import IntegrityError

# The part of the time of steps in which memory is compared.
_TIME_FRACTION = 0.002

# What is compared at once: some 20 microseconds.
_WORDS = (128 << 10) // 8
_SLOTS = 64

# Slots that are summed in one call, because a call for one slot takes as long.
_PENDING_SLOTS = 16

# Steps between two exchanges of digests.
_EXCHANGE_STEPS = 16

Words = npt.NDArray[np.unsignedinteger]
Sums = npt.NDArray[np.uint64]


class IntegrityCheck:
    """The checks of one rank, for a model on the CPU.

    Attributes:
        n_rounds: how often all weights, and the KV cache as far as it is used, have been compared.
    """

    def __init__(self, model: Transformer, caches: Sequence[KVCache], comm: Communicator) -> None:
        self._comm, self.n_rounds = comm, -1
        weights = stored_weights(model)
        self._weights = {name: _StoredSums(weight.values) for name, weight in weights.items()}
        self._slots = [_SlotSums(cache) for cache in caches]
        self._rotation: Iterator[str | None] = iter(())
        self._n_steps = self._digest = 0
        self._failure: IntegrityError | None = None

    def forwarded(self, slots: Sequence[Sequence[int]], residual: npt.NDArray[np.uint8]) -> None:
        """Take the sums of what a forward pass wrote, and add its result to the digest.

        `slots` are those of its tokens in each KV group, and `residual` the bytes of the rows of
        the residual stream after the last block.

        Raises: IntegrityError, again, if one was raised before.
        """
        if self._failure is not None:
            raise self._failure
        for sums, own in zip(self._slots, slots, strict=True):
            sums.update(own)
        self._digest = zlib.crc32(residual.data, self._digest)

    def after_step(self, seconds: float) -> None:
        """Compare a part of the memory, after a step that took this time.

        Raises: IntegrityError for memory that has changed; on all ranks, if digests differ.
        Collective: one all_gather in every 16th step.
        """
        self._n_steps += 1
        if self._n_steps % _EXCHANGE_STEPS == 0 and self._comm.size > 1:
            self._compare_ranks()
        stop_s = time.perf_counter() + seconds * _TIME_FRACTION
        self._compare_part()
        while time.perf_counter() < stop_s:
            self._compare_part()

    def forget_slots(self) -> None:
        """Forget what the KV cache has: a forward pass that failed may have written any slot."""
        for sums in self._slots:
            sums.forget()

    def compare_all(self) -> None:
        """Compare all memory, to explain numbers that are not finite.

        Raises: IntegrityError for memory that has changed.
        """
        for finding in _findings(self._weights, self._slots):
            if finding is not None:
                raise self._error(finding)

    def _compare_part(self) -> None:
        """Compare the next part of memory.

        Raises: IntegrityError.
        """
        try:
            finding = next(self._rotation)
        except StopIteration:
            self.n_rounds += 1
            self._rotation = _findings(self._weights, self._slots)
            finding = next(self._rotation)
        if finding is not None:
            raise self._error(finding)

    def _compare_ranks(self) -> None:
        digests = self._comm.all_gather(torch.tensor([self._digest])).flatten().tolist()
        ((common, n_equal), *others) = Counter(digests).most_common()
        if not others:
            return
        if n_equal > self._comm.size // 2:
            ranks = [rank for rank, digest in enumerate(digests) if digest != common]
            differing = f"rank {listed_ranks(ranks)} of {self._comm.size} differs from the others"
        else:
            differing = f"ranks {listed_ranks(range(self._comm.size))} differ from each other"
        raise IntegrityError(
            f"{differing} in the residual stream, which all ranks compute alike: {TEST_MEMORY}"
        )

    def _error(self, finding: str) -> IntegrityError:
        rank, size = self._comm.rank, self._comm.size
        self._failure = IntegrityError(f"rank {rank} of {size}: {finding}: {TEST_MEMORY}")
        return self._failure


class _StoredSums:
    """The sums of memory that does not change, in parts of _WORDS words."""

    def __init__(self, values: Tensor) -> None:
        assert values.is_contiguous()
        own = values.view(-1).view(torch.uint8).numpy()
        n_whole = len(own) // 8 * 8
        words = own[:n_whole].view(np.uint64)
        self._parts = [words[start : start + _WORDS] for start in range(0, len(words), _WORDS)]
        if n_whole < len(own):
            self._parts.append(own[n_whole:])
        self._sums = [_sum(part) for part in self._parts]

    @property
    def n_parts(self) -> int:
        return len(self._parts)

    def is_sound(self, number: int) -> bool:
        return _sum(self._parts[number]) == self._sums[number]


class _SlotSums:
    """The sums of the rows of each slot that was written."""

    def __init__(self, cache: KVCache) -> None:
        rows = cache.as_bytes().numpy()  # [n_layers * 2 * K, n_slots, bytes]
        self._words = rows.view(f"u{math.gcd(rows.shape[2], 8)}")
        self._sums = np.zeros(cache.n_slots, dtype=np.uint64)
        self._is_written = np.zeros(cache.n_slots, dtype=bool)
        self._pending: list[int] = []
        self._n_used = 0

    def update(self, slots: Sequence[int]) -> None:
        """Take the sums of slots that were written, at once or with those of the next steps."""
        self._is_written[slots] = False
        self._pending.extend(slots)
        if len(self._pending) < _PENDING_SLOTS:
            return
        for start in range(0, len(self._pending), _SLOTS):
            own = np.array(self._pending[start : start + _SLOTS])
            self._sums[own] = self._sums_of(own)
            self._is_written[own] = True
        self._n_used = max(self._n_used, 1 + max(self._pending))
        self._pending.clear()

    def forget(self) -> None:
        """Compare no slot until it is written again."""
        self._is_written[:] = False
        self._pending.clear()

    def parts(self) -> Iterator[int]:
        """Yields the first slot of each part that has been written."""
        for start in range(0, self._n_used, _SLOTS):
            if self._is_written[start : start + _SLOTS].any():
                yield start

    def changed(self, start: int) -> int | None:
        """The first slot of a part that has changed since it was written; None if none has."""
        part = slice(start, start + _SLOTS)
        differs = (self._sums_of(part) != self._sums[part]) & self._is_written[part]
        return start + int(differs.argmax()) if differs.any() else None

    def _sums_of(self, slots: slice | npt.NDArray[np.int64]) -> Sums:
        sums: Sums = self._words[:, slots].sum(axis=(0, 2), dtype=np.uint64)
        return sums


def _findings(
    weights: Mapping[str, _StoredSums], slots: Sequence[_SlotSums]
) -> Iterator[str | None]:
    """Compare all memory. Yields: for each part what is wrong, or None."""
    for name, stored in weights.items():
        for number in range(stored.n_parts):
            is_sound = stored.is_sound(number)
            yield None if is_sound else f"{name} has changed in memory since it was loaded"
    for sums in slots:
        for start in sums.parts():
            slot = sums.changed(start)
            yield None if slot is None else f"slot {slot} of its KV cache has changed in memory"


def _sum(words: Words) -> int:
    return int(np.add.reduce(words, dtype=np.uint64))
