"""Capturing decode steps in CUDA graphs, and finding steps that cannot be captured.

A step that waits for the device cannot be captured. Such a capture fails only when it ends, and
leaves torch's allocator in a state in which a capture is still in progress: from then on it frees
no memory that another stream has used. So a step runs first with its operators watched, and a
capture that fails anyway is ended in the allocator too.

Source: CUDA C++ Programming Guide, CUDA graphs; torch.cuda.graph.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Result = TypeVar("Result")

# By name, since inference mode leaves out the decomposition of some operators.
_COPIES = ("to", "_to_copy", "copy_")
_INDEXING = ("index", "index_put", "index_put_")
# The shape of the result, or a number on the host, depends on the values of a tensor.
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
    """Notes the first operator that waits for the device.

    It lets that operator run, since other ranks may be about to enter a collective.
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
    """Whether an operator waits for the device of its tensors, or for the host."""
    name, given = func.overloadpacket.__name__, (*args, *kwargs.values())
    tensors = [each for each in given if isinstance(each, Tensor)]
    devices = {each.device.type for each in tensors}
    if name in _COPIES:
        return len(devices | {each.type for each in given if isinstance(each, torch.device)}) > 1
    if name in _INDEXING:
        return any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in args[1])
    if name == "where":
        return len(args) == 1  # the same as nonzero
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

    So a replay may overwrite the intermediates of other graphs, but not their results, which the
    recordings hold. The graphs must be replayed on one stream.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, step: Callable[[], Result]) -> tuple[Result, Callable[[], object]]:
        """Runs `step` twice, then captures what it launches.

        Returns: the result of the captured step, and a function that replays it.

        Raises: NotCapturable; RuntimeError if the capture fails.
        """
        side: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        own = torch.cuda.current_stream()
        side.wait_stream(own)
        with torch.cuda.stream(side):
            # Compiles kernels, copies tables to the device and allocates workspaces, which is not
            # allowed in a capture.
            step()
            require_capturable(step)
        own.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads may launch kernels meanwhile, which are not captured.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                result = step()
        except RuntimeError:
            torch.cuda.set_stream(own)
            self._end_capture()
            raise
        return result, graph.replay

    def _end_capture(self) -> None:
        """Ends a failed capture in the allocator.

        CUDA reports the failure when the capture ends. torch raises it there, before it calls the
        allocator and before it returns to the stream of the caller. If the allocator knows already
        that the capture has ended, the first call raises and changes nothing.
        """
        device, pool = torch.cuda.current_device(), self._pool
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(device, pool)
            torch._C._cuda_releasePool(device, pool)
