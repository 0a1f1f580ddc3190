"""Runs `parallel-llama` as several ranks, in which a signal starts a fault at any moment.

    python -m launch.soak.faulty_rank KIND NPROC LOG_DIR COMMAND [flags]

The rank that receives SIGUSR1 has the fault KIND, one of `FAULTS`.
"""

import ctypes
import itertools
import signal
import sys
from collections.abc import Callable
from typing import Any

from parallel_llama.parallel.launch import run_ranks, threads_per_rank, unblock_ctrl_c
from parallel_llama.parallel.rank_env import is_started_as_rank


def loop_in_python() -> None:
    while True:
        pass


def loop_in_c() -> None:
    """Computes forever, and never releases the GIL."""
    sum(itertools.repeat(0))


def sleep_in_c() -> None:
    """Holds the GIL and waits forever: it locks a mutex that it has already locked."""
    lock, mutex = ctypes.PyDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)
    lock(mutex)
    lock(mutex)


def crash_in_c() -> None:
    ctypes.string_at(0)


def skip() -> None:
    """Makes the next all_gather return only this rank's values, without the other ranks."""
    _replace_next(lambda _: lambda self, x: x.expand(self.size, *x.shape).clone(), ("all_gather",))


def other_size() -> None:
    """Makes the tensor of the next all_reduce longer by one value."""
    _replace_next(lambda method: lambda self, x: (method(self, _longer(x)), x)[1], ("all_reduce",))


def other_operation() -> None:
    """Replaces the next collective by a barrier."""
    _replace_next(lambda _: lambda self, x, *_args, **_options: (self.barrier(), x)[1])


FAULTS = {
    "loop in Python": loop_in_python,
    "loop in C": loop_in_c,
    "sleep in C": sleep_in_c,
    "crash in C": crash_in_c,
    "skipped collective": skip,
    "collective of another size": other_size,
    "another collective": other_operation,
}


def _longer(x: Any) -> Any:
    return x.new_zeros(x.numel() + 1)


def _replace_next(
    fault: Callable[[Callable[..., Any]], Callable[..., Any]],
    names: tuple[str, ...] = ("all_reduce", "all_gather", "gather_columns", "broadcast"),
) -> None:
    """Replaces the next call of one of the collectives `names`, and then restores them."""
    from parallel_llama.parallel.shared_memory import SharedMemory

    methods = {name: getattr(SharedMemory, name) for name in names}

    def once(name: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            for own_name, method in methods.items():
                setattr(SharedMemory, own_name, method)
            return fault(methods[name])(*args, **options)

        return call

    for name in names:
        setattr(SharedMemory, name, once(name))


def main() -> int:
    kind, nproc, log_dir, *argv = sys.argv[1:]
    if not is_started_as_rank():
        module = "launch.soak.faulty_rank"
        threads = threads_per_rank(int(nproc))
        return run_ranks(sys.argv[1:], int(nproc), threads, module=module, log_dir=log_dir)
    unblock_ctrl_c()
    signal.signal(signal.SIGUSR1, lambda *_: FAULTS[kind]())
    from parallel_llama.cli.main import main as command

    return command(argv)


if __name__ == "__main__":
    sys.exit(main())
