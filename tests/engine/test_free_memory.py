"""Memory that tensors have freed."""

import platform
import subprocess
import sys

import pytest

_KEPT = """
import sys
import torch
from parallel_llama.engine.free_memory import keep_freed_memory, n_kept_bytes

if sys.argv[1] == "kept":
    keep_freed_memory()
tensors = [torch.empty(1 << 20, dtype=torch.uint8).fill_(1) for _ in range(64)]
del tensors
print(n_kept_bytes())
"""

_FREED_BY_A_THREAD = """
import re
import sys
import threading
from pathlib import Path

import torch

from parallel_llama.engine import free_memory

def n_resident_bytes():
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"RssAnon:\\s+(\\d+) kB", status)[1]) << 10

def load():
    # Small tensors leave gaps for the objects of the large ones, which are then last in the arena.
    [torch.empty(1) for _ in range(1000)]
    tensors = [torch.empty(1 << 19, dtype=torch.uint8).fill_(1) for _ in range(112)]

free_memory.keep_freed_memory()  # after the model has been loaded once
if sys.argv[1] == "returned":
    free_memory.return_freed_memory()
before = n_resident_bytes()
thread = threading.Thread(target=load)
thread.start()
thread.join()
free_memory.give_back_memory()
print(n_resident_bytes() - before)
"""

_on_glibc = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="only glibc tells what it keeps"
)


def _printed_bytes(program: str, case: str) -> int:
    command = [sys.executable, "-c", program, case]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@_on_glibc
def test_memory_of_freed_tensors_is_kept_for_reuse() -> None:
    # Regression: glibc returned the memory, and the kernel cleared new pages for each layer, which
    # took 12 % of a prompt's time.
    returned, kept = _printed_bytes(_KEPT, "returned"), _printed_bytes(_KEPT, "kept")
    assert returned < 16 << 20 < 60 << 20 < kept


@_on_glibc
def test_memory_that_a_thread_freed_while_loading_is_returned() -> None:
    # Regression: up to 64 MiB of the thread that prefetches weights stayed resident in each rank.
    returned = _printed_bytes(_FREED_BY_A_THREAD, "returned")
    kept = _printed_bytes(_FREED_BY_A_THREAD, "kept")
    assert returned < 16 << 20 < 40 << 20 < kept
