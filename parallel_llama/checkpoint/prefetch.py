"""Threads that read weights: a prefetching generator, and workers that share pieces of a weight."""

from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

import torch

from parallel_llama.ops.cpu.jit import compute_alone, openmp

T = TypeVar("T")
P = ParamSpec("P")

# More workers would cost memory without saving much time.
_MAX_WORKERS = 8


def prefetch(
    items: Generator[T, None, None], n_prefetched: int, begin: Callable[[], None] = lambda: None
) -> Generator[T, None, None]:
    """Yields the items of a generator; a background thread reads at most `n_prefetched` ahead.

    The thread calls `begin` first. An exception from `items` is raised at the `next` that would
    have returned the item. Closing waits for the items in flight and closes `items`.
    """
    with started_thread(begin) as thread:
        try:
            made = deque(thread.submit(next, items, None) for _ in range(n_prefetched))
            while (item := made.popleft().result()) is not None:
                made.append(thread.submit(next, items, None))
                yield item
                del item  # the consumer may hold the last reference
        finally:
            # Submitted to the same thread, so it runs after the items in flight, even after a
            # Ctrl-C.
            thread.submit(items.close).result()


def started_thread(begin: Callable[[], None] = lambda: None) -> ThreadPoolExecutor:
    """An executor whose one thread has already started and called `begin`.

    A Ctrl-C while a thread starts leaves a thread that the executor does not know. Here the thread
    starts before any work is submitted, so an unknown thread has no work.
    """
    executor = ThreadPoolExecutor(1, initializer=begin)
    executor.submit(int).result()
    return executor


class _CallingThread(Executor):
    """Runs each call in the thread that submits it, and so wakes no other thread."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future = Future[T]()
        future.set_result(fn(*args, **kwargs))
        return future


def workers() -> Executor:
    """Threads for the pieces of a weight, in which torch runs single-threaded.

    A rank with one thread uses the calling thread: waking another one for each piece takes longer.
    """
    n_threads = min(torch.get_num_threads(), _MAX_WORKERS) if openmp() else 1
    if n_threads == 1:
        return _CallingThread()
    return ThreadPoolExecutor(n_threads, initializer=compute_alone)
