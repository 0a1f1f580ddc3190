"""A fair lock for threads that share an engine. Without torch."""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress


class FairLock:
    """A lock that threads acquire in the order in which they ask for it.

    With threading.Lock, a thread that acquires the lock in a loop could overtake threads that have
    waited longer.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._threads: deque[int] = deque()  # the first thread holds the lock, the others wait

    @property
    def is_held_or_awaited_here(self) -> bool:
        """Whether this thread holds the lock or waits for it."""
        with self._changed:
            return threading.get_ident() in self._threads

    @contextmanager
    def acquired(self, is_needless: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """Waits for the lock, and holds it in the context.

        Args:
            is_needless: ends the wait, without the lock, once it returns true.
        """
        this = threading.get_ident()
        assert not self.is_held_or_awaited_here, "it would wait for itself"
        try:
            with self._changed:
                self._threads.append(this)
                self._changed.wait_for(lambda: self._threads[0] == this or is_needless())
            yield
        finally:
            with self._changed:
                with suppress(ValueError):  # an interrupt before the append
                    self._threads.remove(this)
                self._changed.notify_all()
