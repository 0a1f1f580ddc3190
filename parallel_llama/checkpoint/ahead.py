"""A generator that runs in a thread of its own, a little ahead of whoever takes its items."""

from collections import deque
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import TypeVar

T = TypeVar("T")


def ahead(items: Generator[T, None, None], n_ahead: int) -> Generator[T, None, None]:
    """The same items; at most `n_ahead` are made before they are asked for.

    What making one raises is raised where it is taken. Closed early, it waits for those on their
    way and closes `items`.
    """
    with closing(items), ThreadPoolExecutor(1) as thread:
        made = deque(thread.submit(next, items, None) for _ in range(n_ahead))
        while (item := made.popleft().result()) is not None:
            made.append(thread.submit(next, items, None))
            yield item
            del item  # the taker may be the last to hold it
