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


def _n_kept_bytes(case: str) -> int:
    command = [sys.executable, "-c", _KEPT, case]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc tells what it keeps")
def test_memory_of_freed_tensors_is_kept_for_reuse() -> None:
    # Regression: glibc returned the memory, and the kernel cleared new pages for each layer, which
    # took 12 % of a prompt's time.
    assert _n_kept_bytes("returned") < 16 << 20 < 60 << 20 < _n_kept_bytes("kept")
