"""Waiting with a limit for what has none of its own. Imports no torch."""

import threading
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

Result = TypeVar("Result")

_LOOK_S = 0.1


def within(
    limit_s: float, function: Callable[[], Result], look: Callable[[], None] = lambda: None
) -> Result:
    """What a function gives, called in a thread of its own; `look` is called while it is awaited.

    torch's store answers nothing, for ever, once the process that keeps it is stopped or cut off,
    and some of its calls have no limit. A function that is given up may go on; it must harm nobody.

    Raises: TimeoutError at the limit; what `function` or `look` raise.
    """
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    deadline = time.monotonic() + limit_s
    thread.start()
    while thread.is_alive():
        thread.join(max(0.0, min(_LOOK_S, deadline - time.monotonic())))
        if thread.is_alive() and time.monotonic() >= deadline:
            raise TimeoutError
        look()
    for error in errors:
        raise error
    return results[0]


def listed(ranks: Iterable[int]) -> str:
    """Some numbers of ranks as a message names them: '1, 2', and '...' beyond eight."""
    numbers = sorted(ranks)
    return ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
