"""Turns of threads that share an engine, in order of arrival. Without torch."""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress


class Turns:
    """Exclusive turns of threads.

    With a lock, a thread that takes turns in a loop could take the next one before threads that
    have waited longer.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._threads: deque[int] = deque()  # the first thread has the turn, the others wait

    @property
    def includes_this_thread(self) -> bool:
        """Whether this thread has the turn or waits for it."""
        with self._changed:
            return threading.get_ident() in self._threads

    @contextmanager
    def turn(self, is_needless: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """Waits for a turn of this thread, which ends with the context.

        Args:
            is_needless: ends the wait, without a turn, once it returns true.
        """
        this = threading.get_ident()
        assert not self.includes_this_thread, "it would wait for itself"
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
