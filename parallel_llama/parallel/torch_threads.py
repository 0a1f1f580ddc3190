"""Starts threads that call torch.distributed, and joins them before the interpreter ends.

Until Python 3.14, a daemon thread that returns to Python while the interpreter ends is unwound
through the C++ frames of torch, which calls std::terminate: the process dies of SIGABRT ("terminate
called without an active exception") after all its work is done.
"""

import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

_JOIN_S = 1.0  # some calls of torch have no time limit

_stop_functions: dict[threading.Thread, Callable[[], None]] = {}


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
            _stop_functions.pop(threading.current_thread(), None)

    thread = threading.Thread(target=run, name=name, daemon=True)
    _stop_functions[thread] = stop
    thread.start()


def exit_process(code: int) -> NoReturn:
    """Ends this process as sys.exit does, or immediately if a thread does not end within a second.

    Over a slow network, a request to torch's store can take longer.
    """
    if _end_threads():
        sys.exit(code)
    with contextlib.suppress(OSError):  # the reader of the output has gone
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _end_threads() -> bool:
    """Returns: whether all threads have ended."""
    stop_functions = dict(_stop_functions)
    for stop in stop_functions.values():
        stop()
    deadline = time.monotonic() + _JOIN_S
    for thread in stop_functions:
        thread.join(max(0.0, deadline - time.monotonic()))
    return not any(thread.is_alive() for thread in stop_functions)


atexit.register(_end_threads)
