"""Capturing a CUDA graph, with stand-ins for torch.cuda: what must hold after a failed capture."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from parallel_llama.parallel.cuda_graphs import GraphRecorder, NotCapturable, require_capturable


class GPU:
    """The state of one GPU in torch and in the allocator.

    As in torch, a capture that has become invalid raises when it ends, before the allocator is
    called and before the stream of the caller is current again.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stream: Any = self._stream("own")
        self.captures: list[object] = []  # in progress, by their pools
        self.pools: list[object] = []  # of graphs that exist
        self.streams: list[object] = []  # of steps, captured or not
        self.is_valid = True
        cuda = torch.cuda
        for name, value in (
            ("graph_pool_handle", object),
            ("Stream", lambda: self._stream("side")),
            ("current_stream", lambda: self.stream),
            ("set_stream", lambda stream: setattr(self, "stream", stream)),
            ("stream", self._on),
            ("current_device", lambda: 0),
            ("CUDAGraph", lambda: SimpleNamespace(replay=lambda: "replayed")),
            ("graph", self._capture),
        ):
            monkeypatch.setattr(cuda, name, value)
        ends = {"_cuda_endAllocateToPool": self.captures, "_cuda_releasePool": self.pools}
        for name, known in ends.items():
            monkeypatch.setattr(
                torch._C, name, lambda _, pool, known=known: self._take(known, pool), raising=False
            )

    def _take(self, known: list[object], pool: object) -> None:
        if pool not in known:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        known.remove(pool)

    def _stream(self, name: str) -> Any:
        return SimpleNamespace(name=name, wait_stream=lambda _: None)

    @contextmanager
    def _on(self, stream: Any) -> Iterator[None]:
        before, self.stream = self.stream, stream
        self.streams.append(stream)
        yield
        self.stream = before

    @contextmanager
    def _capture(
        self, _: Any, pool: object, stream: object, capture_error_mode: str
    ) -> Iterator[None]:
        assert capture_error_mode == "thread_local"
        self.captures.append(pool)
        self.pools.append(pool)
        self.streams.append(stream)
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            if not self.is_valid:
                raise RuntimeError("operation failed due to a previous error during capture")
            self.captures.remove(pool)
            self.stream = before


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> GPU:
    return GPU(monkeypatch)


def test_graphs_of_one_model_share_their_memory(gpu: GPU) -> None:
    """Regression: each of nine graphs kept its own intermediates and its own cuBLAS workspace."""
    record = GraphRecorder()
    for number in range(3):
        result, replay = record(lambda number=number: number)
        assert result == number and replay() == "replayed"
    assert len(gpu.pools) == 3 and len({*map(id, gpu.pools)}) == 1
    assert len(gpu.streams) == 6 and len({*map(id, gpu.streams)}) == 1
    assert not gpu.captures and gpu.stream.name == "own"


def test_a_failed_capture_leaves_a_usable_allocator(gpu: GPU) -> None:
    """Regression: the allocator assumed a capture, and freed no memory used by other streams."""
    record = GraphRecorder()
    gpu.is_valid = False
    with pytest.raises(RuntimeError, match="previous error during capture"):
        record(lambda: None)
    assert not gpu.captures and not gpu.pools and gpu.stream.name == "own"


def test_step_that_raises_in_a_capture_ends_the_capture_once(gpu: GPU) -> None:
    def step() -> None:
        if gpu.captures:
            raise torch.OutOfMemoryError("no memory")

    with pytest.raises(torch.OutOfMemoryError):
        GraphRecorder()(step)
    assert not gpu.captures and len(gpu.pools) == 1 and gpu.stream.name == "own"


@pytest.mark.parametrize("is_inference", [False, True])
@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.tolist(),
        lambda x: x.sum().item(),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.__setitem__(x > 0, 1),
        lambda x: torch.where(x > 0),
        lambda x: bool(x.any()),
        lambda x: x + torch.ones(3).to("meta"),
    ],
    ids=["list", "number", "places", "mask", "masked write", "where", "bool", "copy"],
)
def test_an_operator_that_waits_for_the_device_is_named(
    read: Callable[[Tensor], object], is_inference: bool
) -> None:
    """In inference mode torch does not decompose some operators, so they have other names."""
    with torch.inference_mode(is_inference):
        x, places = torch.ones(3, device="meta"), torch.zeros(2, dtype=torch.int64, device="meta")
        require_capturable(lambda: torch.where(x > 0, x.double(), 0.0)[places].softmax(0))
        with pytest.raises(NotCapturable, match=r"the operator aten\.\w+.* waits for the device"):
            require_capturable(lambda: read(x))


def test_require_capturable_passes_other_errors_through() -> None:
    def step() -> None:
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory") as raised:
        require_capturable(step)
    assert not isinstance(raised.value, NotCapturable)
