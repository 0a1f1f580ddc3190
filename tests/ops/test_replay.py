"""A replay of recorded kernel calls gives the same bits as the calls one by one."""

from dataclasses import dataclass
from typing import Generic

import pytest
import torch
from llvmlite import ir
from torch import Tensor

from parallel_llama.ops import CPUOps, NotRecorded
from parallel_llama.ops.cpu import jit
from parallel_llama.ops.cpu.arguments import Integer, Integers, T
from parallel_llama.ops.cpu.elementwise import make_activation
from parallel_llama.ops.cpu.ir import Thread, Value, loop
from parallel_llama.ops.cpu.jit import CompiledKernel, openmp
from parallel_llama.ops.cpu.replay import Arena, Recording

pytestmark = pytest.mark.skipif(openmp() is None, reason="kernels need torch's own GNU OpenMP")


@dataclass(slots=True, kw_only=True)
class _Arguments(Generic[T]):
    x: Integers[T]
    y: Integers[T]
    n: Integer[T]


def _next(_b: ir.IRBuilder, thread: Thread, args: _Arguments[Value]) -> None:
    """y[i] = x[i - 1] + 1 in this thread's part, whose first number reads another thread's part."""
    n = args.n
    with loop(thread.number.b, *thread.part_of(n)) as i:
        args.y[i] = args.x[(i + n - 1) % n] + 1


def next_of() -> CompiledKernel[_Arguments[float]]:
    return CompiledKernel(_Arguments[float], _next)


def arguments(x: Tensor, y: Tensor) -> _Arguments[int]:
    return _Arguments(x=x.data_ptr(), y=y.data_ptr(), n=len(x))


@pytest.mark.parametrize("n_threads", [1, 2, 3, 8])
@pytest.mark.parametrize("alone", [0, 1, 2, 3])
def test_each_call_sees_writes_of_all_threads_in_previous_call(n_threads, alone):
    """Every `alone`-th call uses one thread; more threads than cores must not hang."""
    program, recording, n = next_of(), Recording(Arena()), 24
    x, y = torch.zeros(2, n, dtype=torch.int64)
    n_calls = 200
    for number in range(n_calls):
        is_alone = alone and number % alone == 0
        run_on = 1 if is_alone else n_threads
        recording.run(program, run_on, arguments(x, y))
        x, y = y, x
    recording.complete()
    for turn in range(3):
        recording.replay()
        assert x.tolist() == [(turn + 1) * n_calls] * n


def test_host_calls_run_between_recorded_kernel_calls(n_threads=3):
    """Host calls are also possible at the start and at the end."""
    program, recording, n = next_of(), Recording(Arena()), 24
    x, y = torch.zeros(2, n, dtype=torch.int64)
    seen = []
    for number in range(9):
        if number % 2 == 0:
            recording.host_call(lambda x=x: seen.append(x.clone()))
        if number < 8:
            recording.run(program, 1 if number in (3, 4) else n_threads, arguments(x, y))
            x, y = y, x
    recording.complete()
    for turn in range(2):
        recording.replay()
        assert [each.tolist() for each in seen] == [[8 * turn + 2 * i] * n for i in range(5)]
        seen.clear()


def test_recording_can_be_replayed_after_host_call_raises():
    program, recording, n = next_of(), Recording(Arena()), 6
    x, y = torch.zeros(2, n, dtype=torch.int64)
    errors = [KeyboardInterrupt()]

    def fail_once() -> None:
        if errors:
            raise errors.pop()

    recording.run(program, 2, arguments(x, y))
    recording.host_call(fail_once)
    recording.run(program, 2, arguments(y, x))
    recording.complete()
    with pytest.raises(KeyboardInterrupt):
        recording.replay()
    assert y.tolist() == [1] * n and x.tolist() == [0] * n
    recording.replay()
    assert x.tolist() == [2] * n


def test_arena_reuses_memory_once_its_last_view_is_freed():
    arena = Arena()
    like = torch.empty(3, 40)
    first = arena.tensor(like)
    place, view = first.data_ptr(), first[1:].flatten()
    assert first.shape == like.shape and first.dtype == like.dtype and place % 64 == 0
    del first
    assert arena.tensor(like).data_ptr() != place
    del view
    assert arena.tensor(torch.empty(2, 50)).data_ptr() == place
    assert arena.tensor(torch.empty(0, 5)).shape == (0, 5)


@pytest.fixture
def ops():
    return CPUOps(torch.float64, 4, {1})


def test_torch_operators_raise_not_recorded(ops):
    x = torch.ones(2, 6, dtype=torch.float64)
    for compute in (
        lambda: x + 1,
        lambda: x.add_(1),
        lambda: x[torch.tensor([1])],
        lambda: x.T.contiguous(),
        lambda: x.__setitem__(0, 5.0),
        lambda: torch.zeros(3),
        lambda: ops.layer_norm(x, x[0], None, 1e-5),
        lambda: ops.linear(x.expand(80, 2, 6)[:, 0], x),
    ):
        with pytest.raises(NotRecorded), ops.recording():
            compute()
    assert torch.equal(x, torch.ones(2, 6, dtype=torch.float64))
    assert torch.equal(ops.add_(x, x), torch.full((2, 6), 2.0, dtype=torch.float64))


def test_recording_computes_nothing_until_replay(ops):
    x, y = torch.ones(2, 3, 6, dtype=torch.float64)
    with ops.recording() as recording:
        ops.add_(x, y)
    assert torch.equal(x, y)
    for n in (2, 3):
        recording.replay()
        assert torch.equal(x, n * y)


@pytest.mark.parametrize("kind", ["silu", "gelu"])
def test_kernel_can_be_built_during_recording(kind, monkeypatch):
    """Regression: building silu called torch, so without a code cache no first step was recorded.

    Steps with that number of rows then ran operator by operator until the program ended.
    """
    monkeypatch.setattr(jit, "_usable_folder", lambda: None)
    x = torch.randn(2, 12)
    with CPUOps(torch.float32, 16, {3}).recording():
        kernel = make_activation.__wrapped__(torch.float32, kind)
    expected = torch.nn.functional.silu if kind == "silu" else torch.nn.functional.gelu
    torch.testing.assert_close(kernel(x), expected(x[:, :6]) * x[:, 6:], rtol=1e-5, atol=1e-5)
