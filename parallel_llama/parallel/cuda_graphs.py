"""Captures decode steps in CUDA graphs, and finds steps that cannot be captured.

A step that waits for the device cannot be captured, and its capture fails only at the end of the
step. Torch's allocator then still assumes that a capture is in progress, and no longer frees memory
that another stream has used. So `require_capturable` first runs the step and checks its operators;
if a capture fails anyway, `GraphRecorder` also ends the capture in the allocator.

Source: CUDA C++ Programming Guide, CUDA graphs; torch.cuda.graph.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Result = TypeVar("Result")

# Names of operators: of composite operators, and of those that they decompose to, because inference
# mode does not decompose some composite operators.
_COPIES = ("to", "_to_copy", "copy_")
_INDEXING = ("index", "index_put", "index_put_")
# Operators that read values of a tensor on the host, for example to size their result.
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


class _OperatorWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the first operator that waits for the device.

    The operator still runs, because other ranks may be about to enter the step's collectives.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.waiting_operator: str | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.waiting_operator is None and _waits_for_device(func, args, kwargs):
            self.waiting_operator = str(func)
        return func(*args, **kwargs)


def _waits_for_device(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operator copies between devices, or reads values of a GPU's tensor on the host."""
    name, operands = func.overloadpacket.__name__, (*args, *kwargs.values())
    devices = {operand.device.type for operand in operands if isinstance(operand, Tensor)}
    if name in _COPIES:
        target = {operand.type for operand in operands if isinstance(operand, torch.device)}
        return len(devices | target) > 1
    if name in _INDEXING:
        masks = (torch.bool, torch.uint8)
        return any(index is not None and index.dtype in masks for index in args[1])
    if name == "where":
        return len(args) == 1  # as nonzero
    return name in _READS and devices != {"cpu"}


def require_capturable(step: Callable[[], object]) -> None:
    """Runs a step. Raises: NotCapturable if one of its operators waits for the device."""
    with _OperatorWatch() as watch:
        try:
            step()
        except RuntimeError as error:
            if watch.waiting_operator is None:
                raise
            raise NotCapturable(_message(watch.waiting_operator)) from error
    if watch.waiting_operator is not None:
        raise NotCapturable(_message(watch.waiting_operator))


def _message(operator: str) -> str:
    return f"the operator {operator} waits for the device"


class GraphRecorder:
    """Captures steps in CUDA graphs that share the memory of their intermediates.

    A replay may overwrite the intermediates of other graphs, but not results, because the caller
    holds them. All graphs are of one device, and must be replayed on one stream.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        # One stream for all graphs: cuBLAS keeps a workspace of 32 MiB for each stream.
        self._stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self, step: Callable[[], Result]) -> tuple[Result, Callable[[], object]]:
        """Runs `step` twice, then captures what it launches.

        Returns: the result of the captured step, and a function that replays it.

        Raises: NotCapturable; RuntimeError if the capture fails.
        """
        caller_stream = torch.cuda.current_stream()
        self._stream.wait_stream(caller_stream)
        with torch.cuda.stream(self._stream):
            # The first run compiles kernels, copies tables to the device and allocates workspaces,
            # which a capture does not allow.
            step()
            require_capturable(step)
        caller_stream.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads may launch kernels meanwhile, which are not captured.
            with torch.cuda.graph(
                graph, self._pool, self._stream, capture_error_mode="thread_local"
            ):
                result = step()
        except RuntimeError:
            torch.cuda.set_stream(caller_stream)
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
