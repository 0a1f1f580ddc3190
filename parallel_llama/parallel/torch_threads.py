"""Threads that call torch's stores and groups, and that end before the interpreter ends.

Until Python 3.14, a daemon thread that returns to Python while the interpreter ends is unwound
through the C++ frames of torch, which calls std::terminate: the process dies of SIGABRT ("terminate
called without an active exception") after all its work is done.
"""

import atexit
import threading
import time
from collections.abc import Callable

_LIMIT_S = 1.0  # some calls of torch have no time limit

_stops: dict[threading.Thread, Callable[[], None]] = {}


def start_thread(
    function: Callable[[], None], name: str, stop: Callable[[], None] = lambda: None
) -> None:
    """Starts a daemon thread. At exit, the interpreter waits for it, at most a second.

    Args:
        stop: makes `function` return soon; called at exit.
    """

    def run() -> None:
        try:
            function()
        finally:
            _stops.pop(threading.current_thread(), None)

    thread = threading.Thread(target=run, name=name, daemon=True)
    _stops[thread] = stop
    thread.start()


def _end_threads() -> None:
    stops = dict(_stops)
    for stop in stops.values():
        stop()
    deadline = time.monotonic() + _LIMIT_S
    for thread in stops:
        thread.join(max(0.0, deadline - time.monotonic()))


atexit.register(_end_threads)
