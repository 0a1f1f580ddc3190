"""One-shot all-reduce of small tensors: each GPU reads the inputs of all GPUs and adds them.

Each layer of a decode step has two all-reduces of a few kilobytes, so their time is mostly latency.
One shot over symmetric memory needs one exchange between GPUs; NCCL's ring needs 2 * (n - 1). One
shot reads the whole input of every rank, so NCCL is faster above some size. That size is measured
when the group is formed, under the conditions of a decode step: in the dtype of the model, and in a
CUDA graph, because calls from Python take longer than the exchanges. GPUs without symmetric memory
use NCCL.

Sums are in float32 and in rank order, so they are bitwise equal on all ranks. In the kernel, a GPU
waits for the others without a time limit; the group's watchdog has one, and ends the rank.

Source: torch.distributed._symmetric_memory, torch.ops.symm_mem.one_shot_all_reduce_copy.
"""

from collections.abc import Callable
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_llama.parallel.collectives import Communicator
from parallel_llama.parallel.cuda_graphs import GraphRecorder
from parallel_llama.parallel.gpu import gpu_id

# Sums of more elements always use NCCL; sums of _TIMED_ELEMENTS are timed.
_MAX_ELEMENTS = 1 << 18
# Sums are in float32, which does not hold every value of other dtypes.
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_TIMED_ELEMENTS = tuple(1 << n for n in range(10, 19, 2))
_ROUNDS, _REPLAYS = 20, 5

# A function that sums a float32 tensor of at most _MAX_ELEMENTS elements over all ranks, and
# returns the sum as a new tensor.
OneShot = Callable[[Tensor], Tensor]


class OneShotSums(Communicator):
    """One-shot all-reduces of up to `max_elements` floats; other collectives go to `gpus`."""

    def __init__(self, gpus: Communicator, one_shot: OneShot, max_elements: int) -> None:
        self.rank, self.size, self.max_elements = gpus.rank, gpus.size, max_elements
        self._gpus, self._one_shot = gpus, one_shot

    def all_reduce(self, x: Tensor) -> Tensor:
        if not 0 < x.numel() <= self.max_elements or x.dtype not in _DTYPES:
            return self._gpus.all_reduce(x)
        return x.copy_(self._one_shot(x.float().contiguous().view(-1)).view(x.shape))

    def all_gather(self, x: Tensor) -> Tensor:
        return self._gpus.all_gather(x)

    def broadcast(self, x: Tensor, src: int = 0, *, no_timeout: bool = False) -> Tensor:
        return self._gpus.broadcast(x, src, no_timeout=no_timeout)

    def barrier(self) -> None:
        self._gpus.barrier()

    def keepalive(self) -> None:
        self._gpus.keepalive()

    def require_alive(self) -> None:
        self._gpus.require_alive()

    def close(self) -> None:
        self._gpus.close()


def with_one_shot_sums(
    gpus: Communicator,
    device: torch.device,
    make: Callable[[], OneShot],
    measure: Callable[[Callable[[], object]], float],
    dtype: torch.dtype = torch.float32,
) -> Communicator:
    """Returns `gpus` with one-shot sums up to the size at which they are faster, or `gpus` itself.

    Args:
        make: returns the one-shot function; raises if the device does not support it.
        measure: returns how many seconds the device takes for a call.
        dtype: the dtype of the model's all-reduces. NCCL adds in this dtype; one shot in float32.

    Collective: every rank calls it.
    """
    try:
        one_shot: OneShot | None = make()
    except (RuntimeError, AttributeError, ImportError):  # this torch or GPU does not support it
        one_shot = None
    if not _all_ranks(gpus, one_shot is not None, device) or one_shot is None:
        return gpus
    one_shot_sums = OneShotSums(gpus, one_shot, _MAX_ELEMENTS)
    if not _all_ranks(gpus, _is_right(one_shot_sums, gpus, device), device):
        return gpus
    max_elements = 0
    for n_elements in _TIMED_ELEMENTS:
        x = torch.zeros(n_elements, dtype=dtype, device=device)
        times_s = [measure(partial(comm.all_reduce, x)) for comm in (one_shot_sums, gpus)]
        # Each rank has its own measurement; the slowest one counts.
        slowest_s = gpus.all_gather(torch.tensor(times_s, device=device)).amax(0).tolist()
        if slowest_s[0] >= slowest_s[1]:
            break
        max_elements = n_elements
    return OneShotSums(gpus, one_shot, max_elements) if max_elements else gpus


def symmetric_memory(gpus: Communicator, group: dist.ProcessGroup, device: torch.device) -> OneShot:
    """The one-shot function over symmetric memory of the GPUs of a group.

    Raises: RuntimeError on all ranks if a GPU cannot access the memory of another; RuntimeError,
    AttributeError or ImportError if torch or the GPUs do not support symmetric memory.
    Collective: every rank calls it.
    """
    # Without peer access, the rendezvous of torch may end the process with SIGFPE. All ranks agree
    # before the rendezvous, in which a rank waits for the others.
    if not _all_ranks(gpus, _has_peer_access(gpus, device), device):
        raise RuntimeError("a GPU cannot access the memory of another GPU")
    import torch.distributed._symmetric_memory as memory  # not in every torch

    buffer = memory.empty(_MAX_ELEMENTS, dtype=torch.float32, device=device)
    memory.rendezvous(buffer, group)
    one_shot = torch.ops.symm_mem.one_shot_all_reduce_copy.default
    return lambda x: one_shot(buffer[: len(x)], x, "sum", group.group_name)


def seconds_on_gpu(call: Callable[[], object]) -> float:
    """The median time of a call on the current GPU, in seconds, in the replay of a CUDA graph.

    If the calls cannot be captured, launches from Python are timed. The number of calls is the same
    in both cases, so collectives match even if only some ranks can capture them.
    """

    def rounds() -> None:
        for _ in range(_ROUNDS):
            call()

    try:
        _, run = GraphRecorder()(rounds)
    except RuntimeError:
        run = rounds
    stream, times_s = torch.cuda.current_stream(), list[float]()
    for _ in range(_REPLAYS):
        start = stream.record_event(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
        run()
        stop = stream.record_event(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
        stop.synchronize()
        times_s.append(start.elapsed_time(stop) / 1e3 / _ROUNDS)
    return median(times_s)


def _has_peer_access(gpus: Communicator, device: torch.device) -> bool:
    """Whether this rank's GPU can access the memory of the GPU of every other rank.

    False for a GPU that this process does not see.

    Collective: one all_gather.
    """
    own_id = torch.tensor(list(gpu_id(device).encode()), dtype=torch.uint8, device=device)
    ids = [bytes(row).decode() for row in gpus.all_gather(own_id).tolist()]
    visible = (torch.device("cuda", index) for index in range(torch.cuda.device_count()))
    by_id = {gpu_id(each): each for each in visible}
    return all(
        other in by_id and torch.cuda.can_device_access_peer(device, by_id[other])
        for rank, other in enumerate(ids)
        if rank != gpus.rank
    )


def _is_right(one_shot_sums: Communicator, gpus: Communicator, device: torch.device) -> bool:
    """Whether one-shot sums of integers, which need no rounding, equal those of `gpus`."""
    is_right = True
    for n in (1, 1000, _MAX_ELEMENTS):  # no early exit: the other ranks take part
        x = torch.arange(n, device=device, dtype=torch.float32) % 97 * (gpus.rank + 1)
        is_right &= torch.equal(one_shot_sums.all_reduce(x.clone()), gpus.all_reduce(x))
    return is_right


def _all_ranks(gpus: Communicator, value: bool, device: torch.device) -> bool:
    return bool(gpus.all_gather(torch.tensor(value, device=device)).all())
