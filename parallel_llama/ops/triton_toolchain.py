"""Checks whether a host has what Triton needs to launch kernels.

Before the first launch, Triton compiles a small C module with the host's C compiler and Python's
headers. Slim containers often have neither.
"""

import os
import shutil
import sysconfig
from importlib.util import find_spec
from pathlib import Path

from parallel_llama.files.bounded_files import is_file


def why_unusable() -> str | None:
    """Why Triton cannot launch kernels on this host, and the remedy; None if it can."""
    missing = [each for each in (_triton(), _compiler(), _headers()) if each]
    if not missing:
        return None
    lacks, remedies = zip(*missing, strict=True)
    return (
        "the model runs on torch's operators, and several times slower, because Triton needs "
        f"{' and '.join(lacks)} to launch kernels; use: {'; '.join(remedies)}"
    )


# Each function returns what is missing and the command that installs it, or None.


def _triton() -> tuple[str, str] | None:
    return None if find_spec("triton") else ("the package triton", "pip install triton")


def _compiler() -> tuple[str, str] | None:
    given = os.environ.get("CC")
    if given is not None:
        return None if shutil.which(given) else (f"the C compiler CC={given}", "unset CC")
    names = ("gcc", "clang")
    return None if any(map(shutil.which, names)) else ("a C compiler", "apt install gcc")


def _headers() -> tuple[str, str] | None:
    scheme = sysconfig.get_default_scheme()
    # posix_local is Debian's default scheme, but no package installs headers in its folder. Triton
    # also replaces it by posix_prefix.
    scheme = "posix_prefix" if scheme == "posix_local" else scheme
    header = Path(sysconfig.get_path("include", scheme), "Python.h")
    return None if is_file(header) else (str(header), "apt install python3-dev")
