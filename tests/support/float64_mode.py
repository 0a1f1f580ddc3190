"""Runs a third-party model in float64 although its code casts to float32."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


@contextmanager
def float64_throughout() -> Iterator[None]:
    """Replaces float32 by float64 while a model is built and run in the block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Float64Mode():
            yield
    finally:
        torch.set_default_dtype(before)


class _Float64Mode(TorchFunctionMode):
    """Turns every request for float32 into float64, and rejects narrower results.

    It changes: `x.float()` becomes `x.double()`, and a torch.float32 among the arguments of
    any torch function (`dtype=`, `.to(...)`) becomes torch.float64.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        result = func(*map(_widened, args), **{k: _widened(v) for k, v in (kwargs or {}).items()})
        if isinstance(result, Tensor):
            assert result.dtype not in _NARROW, f"{func} gave {result.dtype}"
        return result


_NARROW = (torch.float32, torch.bfloat16, torch.float16, torch.complex64)


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
