"""The lock of an engine that several threads share."""

import threading

from parallel_llama.engine.fair_lock import FairLock

LIMIT_S = 30


def test_threads_hold_the_lock_in_the_order_in_which_they_ask():
    lock, order = FairLock(), []

    def ask(name: str, waits: threading.Event) -> None:
        with lock.acquired(is_needless=lambda: bool(waits.set())):
            order.append(name)

    threads = []
    with lock.acquired():
        for name in "bcd":
            waits = threading.Event()
            threads.append(threading.Thread(target=ask, args=(name, waits)))
            threads[-1].start()
            assert waits.wait(LIMIT_S)
    with lock.acquired():  # asks again at once, and must not overtake the others
        order.append("a")
    for thread in threads:
        thread.join(LIMIT_S)
    assert order == ["b", "c", "d", "a"]
