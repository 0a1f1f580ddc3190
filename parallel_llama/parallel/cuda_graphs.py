"""Captures decode steps in CUDA graphs, and finds steps that cannot be captured.

A step that waits for the device cannot be captured, and its capture fails only at the end of the
step. Torch's allocator then still assumes a capture in progress, and no longer frees memory that
another stream has used. So a step first runs with its operators watched; if a capture fails anyway,
it is ended in the allocator too.

Source: CUDA C++ Programming Guide, CUDA graphs; torch.cuda.graph.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Result = TypeVar("Result")

# Operators by name. In inference mode some are not decomposed, so names of both forms are here.
_COPIES = ("to", "_to_copy", "copy_")
_INDEXING = ("index", "index_put", "index_put_")
# Operators that read values of a tensor on the host, or for the shape of their result.
_READS = (
    "item",
    "_local_scalar_dense",
    "is_nonzero",
    "equal",
    "nonzero",
    "masked_select",
    "_unique2",
    "repeat_interleave",
)


class NotCapturable(RuntimeError):
    """An operator of a step waits for the device."""


class _WatchedOperators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the first operator that waits for the device.

    The operator still runs, because other ranks may be about to enter the step's collectives.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.waiting: str | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.waiting is None and _waits(func, args, kwargs):
            self.waiting = str(func)
        return func(*args, **kwargs)


def _waits(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operator copies between devices, or reads values of a GPU's tensor on the host."""
    name, given = func.overloadpacket.__name__, (*args, *kwargs.values())
    tensors = [each for each in given if isinstance(each, Tensor)]
    devices = {each.device.type for each in tensors}
    if name in _COPIES:
        return len(devices | {each.type for each in given if isinstance(each, torch.device)}) > 1
    if name in _INDEXING:
        return any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in args[1])
    if name == "where":
        return len(args) == 1  # as nonzero
    return name in _READS and devices != {"cpu"}


def require_capturable(step: Callable[[], object]) -> None:
    """Runs a step. Raises: NotCapturable if one of its operators waits for the device."""
    with _WatchedOperators() as watched:
        try:
            step()
        except RuntimeError as error:
            if watched.waiting is None:
                raise
            raise NotCapturable(_why(watched.waiting)) from error
    if watched.waiting is not None:
        raise NotCapturable(_why(watched.waiting))


def _why(operator: str) -> str:
    return f"the operator {operator} waits for the device"


class GraphRecorder:
    """Captures steps in CUDA graphs of one device, which share the memory of their intermediates.

    So a replay may overwrite the intermediates of other graphs. Results are not overwritten,
    because the caller holds them. The graphs must be replayed on one stream.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        # One for all graphs: cuBLAS keeps a workspace of 32 MiB for every stream that it has used.
        self._stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self, step: Callable[[], Result]) -> tuple[Result, Callable[[], object]]:
        """Runs `step` twice, then captures what it launches.

        Returns: the result of the captured step, and a function that replays it.

        Raises: NotCapturable; RuntimeError if the capture fails.
        """
        own = torch.cuda.current_stream()
        self._stream.wait_stream(own)
        with torch.cuda.stream(self._stream):
            # The first run compiles kernels, copies tables to the device and allocates workspaces,
            # which a capture does not allow.
            step()
            require_capturable(step)
        own.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads may launch kernels meanwhile, which are not captured.
            with torch.cuda.graph(
                graph, self._pool, self._stream, capture_error_mode="thread_local"
            ):
                result = step()
        except RuntimeError:
            torch.cuda.set_stream(own)
            self._end_capture()
            raise
        return result, graph.replay

    def _end_capture(self) -> None:
        """Ends a failed capture in the allocator.

        CUDA reports the failure when the capture ends. torch then raises before it informs the
        allocator and before it restores the caller's stream. If the allocator already knows that
        the capture has ended, the first call raises and changes nothing.
        """
        device, pool = torch.cuda.current_device(), self._pool
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(device, pool)
            torch._C._cuda_releasePool(device, pool)
