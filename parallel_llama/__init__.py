"""A tensor-parallel inference runtime for Llama-family models."""

from typing import Any

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncLLM", "Completion", "SamplingParams"]


def __getattr__(name: str) -> Any:
    # torch is loaded when a name needs it, so that commands without a model start at once.
    if name == "LLM":
        from parallel_llama.llm import LLM

        return LLM
    if name == "AsyncLLM":
        from parallel_llama.async_llm import AsyncLLM

        return AsyncLLM
    if name in ("SamplingParams", "Completion"):
        from parallel_llama import request

        return getattr(request, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
