"""Work in other threads: a generator a little ahead of who takes its items, and pieces shared."""

from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from parallel_llama.ops.cpu.jit import compute_alone, openmp

T = TypeVar("T")

# Beyond these the memory that they take is felt sooner than the time.
_MAX_WORKERS = 8


def ahead(
    items: Generator[T, None, None], n_ahead: int, begin: Callable[[], None] = lambda: None
) -> Generator[T, None, None]:
    """The same items; at most `n_ahead` are made before they are asked for.

    They are made in one thread, which calls `begin` first.

    What making one raises is raised where it is taken. Closed early, it waits for those on their
    way and closes `items`.
    """
    with started_thread(begin) as thread:
        try:
            made = deque(thread.submit(next, items, None) for _ in range(n_ahead))
            while (item := made.popleft().result()) is not None:
                made.append(thread.submit(next, items, None))
                yield item
                del item  # the taker may be the last to hold it
        finally:
            # In that thread nothing can come before those on their way, not even by Ctrl-C.
            thread.submit(items.close).result()


def started_thread(begin: Callable[[], None] = lambda: None) -> ThreadPoolExecutor:
    """An executor that has its one thread already, and waits for all that is submitted.

    The thread calls `begin` first.

    A Ctrl-C while the thread starts would leave one that the executor does not know of; it comes
    here, where there is no work yet.
    """
    executor = ThreadPoolExecutor(1, initializer=begin)
    executor.submit(int).result()
    return executor


def workers() -> ThreadPoolExecutor:
    """Threads that share pieces of a weight, in each of which torch computes alone."""
    n_threads = min(torch.get_num_threads(), _MAX_WORKERS) if openmp() else 1
    return ThreadPoolExecutor(n_threads, initializer=compute_alone)
