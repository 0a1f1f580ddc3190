"""A tensor-parallel inference runtime for Llama-family models."""

import gc
import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parallel_llama.async_llm import AsyncLLM
    from parallel_llama.errors import (
        CheckpointError,
        DamagedWeights,
        NumericalError,
        OutOfMemory,
        UsageError,
    )
    from parallel_llama.llm import LLM
    from parallel_llama.parallel.failures import IntegrityError, RankError
    from parallel_llama.request import Completion, CompletionOutput, Grammar, SamplingParams
    from parallel_llama.tokenizer import Chat, Tokenizer, load_tokenizer

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncLLM",
    "Chat",
    "CheckpointError",
    "Completion",
    "CompletionOutput",
    "DamagedWeights",
    "Grammar",
    "IntegrityError",
    "NumericalError",
    "OutOfMemory",
    "RankError",
    "SamplingParams",
    "Tokenizer",
    "UsageError",
    "load_tokenizer",
]

_MODULE_OF = {
    "LLM": "llm",
    "AsyncLLM": "async_llm",
    **dict.fromkeys(("IntegrityError", "RankError"), "parallel.failures"),
    **dict.fromkeys(("Completion", "CompletionOutput", "Grammar", "SamplingParams"), "request"),
    **dict.fromkeys(("Chat", "Tokenizer", "load_tokenizer"), "tokenizer"),
    **dict.fromkeys(
        ("CheckpointError", "DamagedWeights", "NumericalError", "OutOfMemory", "UsageError"),
        "errors",
    ),
}


def __getattr__(name: str) -> Any:
    # torch is loaded when a name needs it, so that commands without a model start fast.
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_import(f"{__name__}.{_MODULE_OF[name]}"), name)


def _import(name: str) -> ModuleType:
    """Import a module with the garbage collector off, because imported objects are never freed.

    Scanning them takes a sixth of the time to import torch and this package.
    """
    if name in sys.modules or not gc.isenabled():
        return import_module(name)
    gc.disable()
    try:
        return import_module(name)
    finally:
        gc.enable()


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
