"""A GPU that runs queued work late: streams, events, graphs and copies, without a GPU.

CUDA queues work and returns at once. The stand-ins for torch.cuda in other tests run everything at
once, so they cannot show the host overwriting memory that a queued copy has not read, or reading a
result too early. Here a `DeviceTensor` has values in CPU memory, and every operator and copy is
queued in the current stream. Queued work runs in an order that a seeded random generator picks
among the legal ones: in each stream in order, and otherwise whenever a call of torch, an event or a
synchronisation gives it the opportunity. At worst nothing runs until the host waits for it.

* Copies read their source when they run, in two halves.
* Memory of a dead tensor is reused at once by the next tensor of its stream or of its graph pool,
  as in torch's allocator. New memory holds large numbers.
* A captured graph queues its operators again, at the same addresses.
* Page-locked memory is never reused: torch does that only after the copies have ended.

Source: CUDA C++ Programming Guide, asynchronous concurrent execution; torch, notes on CUDA
semantics.
"""

import random
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from parallel_llama.ops import (
    HeadMap,
    PagedPlan,
    Plan,
    SamplingKeys,
    TorchOps,
)
from parallel_llama.ops.filters import Filters
from parallel_llama.ops.part_sums import Product

CUDA = torch.device("cuda", 0)
_FRESH = 0x5A  # the bytes of new memory: no valid token, slot or position

Call = Callable[[], object]


@dataclass
class _Mark:
    """A point in a stream, such as an event's record."""

    stream: "Stream"
    is_reached: bool = False


class Stream:
    """A queue of work; an entry that is a mark waits for that mark of another stream."""

    def __init__(self, gpu: "LateDevice", **_: object) -> None:
        self.gpu = gpu
        self.queue: deque[Call | _Mark] = deque()
        self.captured: list[Call] | None = None
        gpu.streams.append(self)

    def wait_event(self, event: "Event") -> None:
        if event.mark is not None:
            self.queue.append(event.mark)

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event(self.gpu)
        event.record(self)
        return event

    def wait_stream(self, other: "Stream") -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        self.record_event().synchronize()


class Event:
    """As torch.cuda.Event: waits for its last record, and for nothing before the first."""

    def __init__(self, gpu: "LateDevice", **_: object) -> None:
        self.gpu = gpu
        self.mark: _Mark | None = None

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self.gpu.stream
        mark = self.mark = _Mark(stream)

        def reach() -> None:
            mark.is_reached = True

        assert stream.captured is None
        stream.queue.append(reach)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self.gpu.stream).wait_event(self)

    def query(self) -> bool:
        self.gpu.pass_time()
        if self.mark is not None and not self.mark.is_reached:
            self.gpu.advance(self.mark.stream)  # a loop that polls must end
        return self.mark is None or self.mark.is_reached

    def synchronize(self) -> None:
        self.gpu.pass_time()
        if self.mark is not None:
            self.gpu.run_until(self.mark)

    def elapsed_time(self, later: "Event") -> float:
        assert self.query() and later.query()
        return 1.0


class Graph:
    """A captured sequence of calls."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.gpu: LateDevice | None = None

    def replay(self) -> None:
        assert self.gpu is not None
        self.gpu.pass_time()
        for call in self.calls:
            self.gpu.launch(call)


@dataclass
class _Memory:
    """The memory of a tensor and its views; free for others when the host drops the last one."""

    values: Tensor
    free: list[Tensor]

    def __del__(self) -> None:
        self.free.append(self.values)


@dataclass
class Order:
    """Picks which work runs, and when.

    Args:
        seed: of the random generator; None to run all work at once.
    """

    seed: int | None
    rng: random.Random = field(init=False)
    likelihood: float = field(init=False)  # that work runs while the host calls torch
    longest: int = field(init=False)  # most entries of a stream that then run
    others: float = field(init=False)  # likelihood that the last stream runs, and not the first

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.likelihood = self.rng.choice([0.0, 0.0, 0.01, 0.1, 0.5])
        if self.seed is None:
            self.likelihood = 1.0
        self.longest = self.rng.choice([1, 5, 40])
        self.others = self.rng.choice([0.0, 0.003, 0.03, 0.5, 0.97])

    def streams(self, streams: Sequence[Stream]) -> Sequence[Stream]:
        """The streams that run now."""
        if self.seed is None:
            return streams
        if self.rng.random() >= self.likelihood:
            return ()
        return streams[-1:] if self.rng.random() < self.others else streams[:1]

    def n_entries(self) -> int:
        """How many entries of the stream run, at most."""
        return sys.maxsize if self.seed is None else self.rng.randint(1, self.longest)


class LateDevice:
    """Streams and their work, memory, and the stand-ins for torch.cuda."""

    def __init__(self) -> None:
        self.order = Order(None)
        self.streams: list[Stream] = []
        self.stream = Stream(self)
        self.n_waits = 0  # how often the host waited for work that had not run
        self._pool: object | None = None  # of the capture in progress
        self._free: dict[tuple[object, int], list[Tensor]] = defaultdict(list)
        self._pinned: dict[int, Tensor] = {}  # by address; kept, so that no address is reused
        self._shapes: dict[object, Any] = {}
        self._is_running = False

    @contextmanager
    def installed(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """Replaces torch.cuda, and torch's functions that create or copy tensors on the GPU."""
        for name, value in (
            ("Event", lambda **options: Event(self, **options)),
            ("Stream", lambda **options: Stream(self, **options)),
            ("current_stream", lambda *_: self.stream),
            ("set_stream", lambda stream: setattr(self, "stream", stream)),
            ("stream", self._on),
            ("synchronize", lambda *_: self.synchronize()),
            ("CUDAGraph", Graph),
            ("graph", self._capture),
            ("graph_pool_handle", object),
            ("current_device", lambda: 0),
            ("set_device", lambda _: None),
        ):
            monkeypatch.setattr(torch.cuda, name, value)
        with self.calls():
            yield

    def calls(self) -> TorchFunctionMode:
        """The mode that a thread needs to use the device."""
        return _Calls(self)

    # Streams

    def launch(self, call: Call) -> None:
        """Queue some work in the current stream, or add it to the capture."""
        if self.stream.captured is not None:
            self.stream.captured.append(call)
        else:
            self.stream.queue.append(call)
            self.pass_time()

    def pass_time(self) -> None:
        """Let queued work run, as much as the order wants."""
        if self._is_running or not self.order.likelihood:
            return
        for stream in self.order.streams(self.streams):
            for _ in range(self.order.n_entries()):
                if not self.advance(stream):
                    break

    def advance(self, stream: Stream) -> bool:
        """Run the next entry of a stream. Returns: False if the stream is empty, or must wait."""
        if not stream.queue or self._is_running:
            return False
        head = stream.queue[0]
        if isinstance(head, _Mark):
            if not head.is_reached:
                return False
            stream.queue.popleft()
            return True
        stream.queue.popleft()
        self._is_running = True
        try:
            with torch._C.DisableTorchFunction(), torch.inference_mode():
                head()
        finally:
            self._is_running = False
        return True

    def run_until(self, mark: _Mark) -> None:
        """Run what a mark needs, and no more; the host waits."""
        self.n_waits += not mark.is_reached
        while not mark.is_reached:
            head = mark.stream.queue[0]
            if isinstance(head, _Mark):
                self.run_until(head)
            self.advance(mark.stream)

    def synchronize(self) -> None:
        for stream in self.streams:
            stream.synchronize()

    def read(self) -> None:
        """Wait until all work of the current stream has run."""
        if self.stream.captured is not None:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.stream.synchronize()

    @contextmanager
    def _on(self, stream: Stream) -> Iterator[None]:
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    @contextmanager
    def _capture(
        self, graph: Graph, pool: object, stream: Stream, capture_error_mode: str
    ) -> Iterator[None]:
        # torch.cuda.graph synchronises here. This does not, so that nothing may rely on it.
        assert capture_error_mode == "thread_local"
        with self._on(stream):
            stream.captured, self._pool, graph.gpu = graph.calls, pool, self
            try:
                yield
            finally:
                stream.captured = self._pool = None

    # Memory

    def empty(
        self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype
    ) -> "DeviceTensor":
        """A tensor without values, in the memory of the current stream or capture."""
        n_values = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        n_bytes = max(0 if 0 in size else n_values * dtype.itemsize, 1)
        n_bytes = -(-n_bytes // 512) * 512  # as torch's allocator rounds
        free = self._free[self._pool or self.stream, n_bytes]
        values = free.pop() if free else torch.full((n_bytes,), _FRESH, dtype=torch.uint8)
        typed = values.view(dtype).as_strided(size, stride)
        return DeviceTensor(self, typed, _Memory(values, free))

    def contiguous(self, size: Sequence[int], dtype: torch.dtype) -> "DeviceTensor":
        meta = torch.empty(*size, device="meta")
        return self.empty(size, meta.stride(), dtype)

    def pin(self, x: Tensor) -> Tensor:
        self._pinned[x.untyped_storage().data_ptr()] = x
        return x

    def upload(self, x: Tensor) -> "DeviceTensor":
        """Copy values of the host that no other code can change."""
        there = self.empty(x.size(), x.contiguous().stride(), x.dtype)
        self.launch(lambda: there.values.copy_(x))
        return there

    def copy(self, target: Tensor, source: Tensor, *, non_blocking: bool) -> None:
        """`target.copy_(source)`, where one tensor or both are on the device."""
        up, down = (isinstance(each, DeviceTensor) for each in (target, source))
        host = source if not down else None if up else target
        is_late = host is None or (
            non_blocking and host.untyped_storage().data_ptr() in self._pinned
        )
        to, of = (
            each.values if isinstance(each, DeviceTensor) else each for each in (target, source)
        )
        if is_late:
            for a, b in _halves(to, of):
                self.launch(lambda a=a, b=b: a.copy_(b))
        elif up:
            of = of.clone()  # staged by the driver before the call returns
            self.launch(lambda: to.copy_(of))
        else:
            self.read()
            to.copy_(of)

    # Operators

    def run(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """An operator with at least one tensor of the device."""
        kind = _KINDS.get(func) or _KINDS.setdefault(func, _kind(func))
        if kind == "copy":
            self.copy(
                args[0], args[1], non_blocking=bool((*args, *kwargs.values())[2:3] == (True,))
            )
            return args[0]
        if kind == "to":
            return self._to(args[0], **kwargs)
        if kind == "composite":
            return func.decompose(*args, **kwargs)
        kwargs = {k: v for k, v in kwargs.items() if k not in ("device", "pin_memory", "layout")}
        if kind == "view":
            memory = args[0].memory
            views = func(*_mapped(args, _values_of), **kwargs)
            # In inference mode too, a view of another tensor is not an inference tensor.
            with torch.inference_mode(args[0].is_inference()):
                return _mapped(views, lambda view: DeviceTensor(self, view, memory))
        has_mask = kind == "index" and any(
            each is not None and each.dtype in (torch.bool, torch.uint8) for each in args[1]
        )
        if kind == "read" or has_mask:
            self.read()
            with torch.inference_mode():
                found = func(*_mapped(args, _values_of), **_mapped(kwargs, _values_of))
            return _mapped(found, self.upload)
        inner = _launched(args, is_index=kind == "index"), _launched(kwargs)
        if func._schema.is_mutable:
            self.launch(lambda: func(*inner[0], **inner[1]))
            return kwargs.get("out", args[0])
        shapes = self._shapes_of(func, args, kwargs)
        results = _mapped(shapes, lambda meta: self.empty(meta.size(), meta.stride(), meta.dtype))
        if kind != "empty":

            def write() -> None:
                found = func(*inner[0], **inner[1])
                both = (
                    ((results, found),)
                    if isinstance(found, Tensor)
                    else zip(results, found, strict=True)
                )
                for result, value in both:
                    result.values.copy_(value)

            self.launch(write)
        return results

    def kernel(self, call: Callable[..., Tensor | None], *args: Any, **kwargs: Any) -> None:
        """Launch a function of tensors of the device, which may write to its arguments."""
        inner = _launched(args), _launched(kwargs)
        self.launch(lambda: call(*inner[0], **inner[1]))

    def _to(
        self,
        x: Tensor,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        non_blocking: bool = False,
        **_: object,
    ) -> Tensor:
        assert isinstance(x, DeviceTensor)
        if device is None or device.type == "meta":
            meta = self._shapes_of(torch.ops.aten._to_copy.default, [x], {"dtype": dtype})
            there = self.empty(meta.size(), meta.stride(), meta.dtype)
            self.copy(there, x, non_blocking=True)
            return there
        here = torch.empty_like(x.values, dtype=dtype)
        # torch pins the result of such a copy.
        self.copy(self.pin(here) if non_blocking else here, x, non_blocking=non_blocking)
        return here

    def _shapes_of(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        key = func, _key(args), _key(kwargs)
        found = self._shapes.get(key)
        if found is None:
            found = self._shapes[key] = func(
                *_mapped(args, _meta_of), **{k: _mapped(v, _meta_of) for k, v in kwargs.items()}
            )
        return found


class DeviceTensor(Tensor):
    """A tensor of a `LateDevice`: the host knows its shape, and queued work writes its values."""

    gpu: LateDevice
    values: Tensor
    memory: _Memory
    device: ClassVar[torch.device] = CUDA  # type: ignore[misc]
    is_meta: ClassVar[bool] = False  # type: ignore[misc]

    @staticmethod
    def __new__(cls, gpu: LateDevice, values: Tensor, memory: _Memory) -> "DeviceTensor":
        # A device of torch's own that needs no GPU; only Python sees CUDA.
        made: DeviceTensor = Tensor._make_wrapper_subclass(
            cls,
            values.size(),
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device="meta",
        )
        made.gpu, made.values, made.memory = gpu, values, memory
        return made

    def __init__(self, *_: object) -> None:
        pass

    def __repr__(self, **_: object) -> str:
        return f"DeviceTensor({tuple(self.values.shape)}, {self.values.dtype})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        gpu = next(_tensors((*args, *kwargs.values()))).gpu
        with torch._C.DisableTorchFunction():
            return gpu.run(func, args, kwargs)


class _Calls(TorchFunctionMode):
    """Calls of torch by the host: the ones that name a GPU, or index its tensors with lists."""

    def __init__(self, gpu: LateDevice) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        gpu = self._gpu
        if getattr(func, "__name__", "") == "__get__":
            return func(*args, **kwargs)
        gpu.pass_time()
        if func is Tensor.tolist and isinstance(args[0], DeviceTensor):
            gpu.read()
            return args[0].values.tolist()
        if func is Tensor.pin_memory:
            return gpu.pin(args[0].clone())
        if func is Tensor.__setitem__ and isinstance(args[0], DeviceTensor):
            x, index, value = (_launched(each, is_index=True) for each in args)
            return gpu.launch(lambda: x.__setitem__(index, value))
        if func is Tensor.__getitem__ and isinstance(args[0], DeviceTensor):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            lists = (torch.tensor(each) if isinstance(each, list) else each for each in index)
            return func(args[0], tuple(lists))
        if func in (torch.where, Tensor.where):
            # torch would make a tensor of the number on its own kind of device.
            args = [torch.tensor(x) if isinstance(x, bool | int | float) else x for x in args]
            return func(*args, **kwargs)
        if func is Tensor.to:
            return self._to(*args, **kwargs)
        if kwargs.pop("pin_memory", False):
            return gpu.pin(func(*args, **kwargs))
        if _is_gpu(kwargs.get("device")):
            kwargs["device"] = "cpu"
            x = func(*args, **kwargs)
            if isinstance(x, DeviceTensor):
                return x
            return (
                gpu.empty(x.size(), x.stride(), x.dtype) if func is torch.empty else gpu.upload(x)
            )
        return func(*args, **kwargs)

    def _to(self, x: Tensor, *args: Any, non_blocking: bool = False, **kwargs: Any) -> Tensor:
        devices = [each for each in (*args, kwargs.pop("device", None)) if _is_gpu(each)]
        rest = tuple(each for each in args if not _is_gpu(each))
        if not devices:
            return x.to(*args, non_blocking=non_blocking, **kwargs)
        if rest or kwargs:
            x = x.to(*rest, **kwargs)
        if isinstance(x, DeviceTensor):
            return x
        there = self._gpu.empty(x.size(), x.contiguous().stride(), x.dtype)
        self._gpu.copy(there, x, non_blocking=non_blocking)
        return there


class LateOps(TorchOps):
    """torch's operators as kernels. Each kernel is launched at once and runs late."""

    is_paged = True

    def __init__(self, gpu: LateDevice, scores: Any) -> None:
        super().__init__(scores)
        self._gpu, self._ops = gpu, TorchOps(scores)

    def lookup(
        self, tokens: Tensor, weight: Tensor, first: int = 0, dtype: torch.dtype | None = None
    ) -> Tensor:
        y = self._gpu.contiguous((len(tokens), weight.shape[1]), dtype or weight.dtype)
        return self._into(y, self._ops.lookup, tokens, weight, first, dtype)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        y = self._gpu.contiguous(x.shape, x.dtype)
        return self._into(y, self._ops.rms_norm, x, weight, eps, offset)

    def silu_and_mul(self, x: Product) -> Tensor:
        x = self.whole(x)
        y = self._gpu.contiguous((len(x), x.shape[1] // 2), x.dtype)
        return self._into(y, self._ops.silu_and_mul, x)

    def _rotate_and_store(
        self, qkv: Tensor, rotations: Tensor | None, slots: Tensor, k: Tensor, v: Tensor
    ) -> None:
        self._gpu.kernel(self._ops.rotate_and_store, qkv, rotations, slots, k, v)

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        plan: Plan,
        heads: HeadMap,
        out: Tensor,
        sinks: Tensor | None = None,
    ) -> None:
        assert isinstance(plan, PagedPlan)
        parts = [
            replace(part, rows=_values_of(part.rows), blocks=_values_of(part.blocks))
            for part in plan.parts
        ]
        own = replace(heads, bounds=_values_of(heads.bounds))
        self._gpu.kernel(self._ops.attention, q, k, v, PagedPlan(tuple(parts)), own, out, sinks)

    def draw(self, x: Tensor, sampling_keys: SamplingKeys, first: int = 0) -> Tensor:
        y = self._gpu.contiguous((len(x), 2), torch.float64)
        return self._into(y, self._ops.draw, x, _keys_of(sampling_keys), first)

    def candidates(self, x: Tensor, temperatures: Tensor, k: int, first: int = 0) -> Tensor:
        y = self._gpu.contiguous((len(x), 1 + 2 * k), torch.float64)
        return self._into(y, self._ops.candidates, x, temperatures, k, first)

    def draw_filtered(self, of_ranks: Tensor, filters: Filters, vocab_size: int) -> Tensor:
        own = Filters(
            _keys_of(filters.sampling_keys),
            *(_values_of(each) for each in (filters.top_k, filters.top_p, filters.min_p)),
        )
        y = self._gpu.contiguous((of_ranks.shape[1],), torch.int64)
        return self._into(y, self._ops.draw_filtered, of_ranks, own, vocab_size)

    def _into(self, y: DeviceTensor, call: Callable[..., Tensor], *args: Any) -> Tensor:
        self._gpu.kernel(lambda y, *inner: y.copy_(call(*inner)), y, *args)
        return y


_aten = torch.ops.aten
_READS = (
    "_local_scalar_dense",
    "item",
    "is_nonzero",
    "equal",
    "nonzero",
    "masked_select",
    "_unique2",
)
_KINDS: dict[Any, str] = {}


def _kind(func: Any) -> str:
    name, schema = func.overloadpacket.__name__, func._schema
    if name == "copy_":
        return "copy"
    if name == "_to_copy":
        return "to"
    if name in _READS:
        return "read"
    is_composite = func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
    if is_composite and any(each.alias_info is not None for each in schema.returns):
        return "composite"
    if name in ("index", "index_put", "index_put_"):
        return "index"
    if schema.is_mutable:
        return "write"
    if any(each.alias_info is not None for each in schema.returns):
        return "view"
    return "empty" if name in ("empty_like", "new_empty", "new_empty_strided") else "new"


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Every tensor in nested lists and tuples, changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        each = [_mapped(item, change) for item in value]
        return each if isinstance(value, list) else tuple(each)
    if isinstance(value, dict):
        return {k: _mapped(item, change) for k, item in value.items()}
    return value


def _tensors(values: Sequence[Any]) -> Iterator[DeviceTensor]:
    for value in values:
        if isinstance(value, DeviceTensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _values_of(x: Tensor) -> Tensor:
    return x.values if isinstance(x, DeviceTensor) else x


def _launched(args: Any, *, is_index: bool = False) -> Any:
    """The arguments of queued work. Of the host's tensors, only numbers and indices are allowed."""

    def change(x: Tensor) -> Tensor:
        if isinstance(x, DeviceTensor):
            return x.values
        assert not x.is_meta
        if x.ndim and not is_index:
            raise RuntimeError("expected all tensors to be on the same device")
        return x.clone()

    return _mapped(args, change)


def _meta_of(x: Tensor) -> Tensor:
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="meta")


def _key(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.size(), value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple(_key(each) for each in value)
    if isinstance(value, dict):
        return tuple((k, _key(each)) for k, each in value.items())
    return type(value), value


def _keys_of(sampling_keys: SamplingKeys) -> SamplingKeys:
    return SamplingKeys(_values_of(sampling_keys.keys), _values_of(sampling_keys.temperatures))


def _is_gpu(device: Any) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, torch.device) and device.type == "cuda"


def _halves(a: Tensor, b: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    if a.shape != b.shape or not a.ndim or len(a) < 2:
        yield a, b
        return
    n = len(a) // 2
    yield a[:n], b[:n]
    yield a[n:], b[n:]
