"""How many tokens the KV cache holds, given the free memory that the system reports."""

import mmap
import resource
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from commands import run_python
from mixes import ARGS
from thread_ranks import run_on_threads

from parallel_llama.dtypes import KVFormat
from parallel_llama.engine import kv_capacity
from parallel_llama.engine.available_memory import available_memory
from parallel_llama.engine.kv_blocks import STEP_TOKENS
from parallel_llama.engine.kv_capacity import (
    CacheSize,
    Capacity,
    DeviceMemory,
    MemoryFor,
    MemoryLimit,
    memory_of,
)
from parallel_llama.errors import OutOfMemory, UsageError
from parallel_llama.memory import (
    CPU_FRACTION,
    CUDA_FRACTION,
    MAX_CPU_BYTES,
    blocks_held,
    kv_bytes_per_token,
)
from parallel_llama.parallel.collectives import Communicator, Solo
from parallel_llama.parallel.failures import RankError
from parallel_llama.plan import make_plan

CPU = torch.device("cpu")
GIB = 1 << 30
# Two ranks split 9 query heads and hold 2 of 3 KV heads each; both hold the middle KV head.
BLOCK = 16 * 2 * 2 * 2 * 4 * 8  # tokens, layers, k and v, KV heads, head_dim, bytes


MEMINFO_FILE, V2, V1 = "proc/meminfo", "sys/fs/cgroup/memory", "sys/fs/cgroup/memory/memory"


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


MEMINFO = "MemTotal:       33554432 kB\nMemFree:  1 kB\nMemAvailable:    8388608 kB\n"


def test_available_memory_without_a_container_is_mem_available(tmp_path):
    write(tmp_path, {MEMINFO_FILE: MEMINFO})
    assert available_memory(tmp_path) == 8 * GIB


def test_unknown_available_memory_allows_the_largest_cache(tmp_path):
    assert available_memory(tmp_path) * CPU_FRACTION == MAX_CPU_BYTES


@pytest.mark.parametrize("limit", ["max\n", f"{64 * GIB}\n", "?"])
def test_a_container_without_a_tighter_limit_changes_nothing(tmp_path, limit):
    write(tmp_path, {MEMINFO_FILE: MEMINFO, f"{V2}.max": limit, f"{V2}.current": "0\n"})
    assert available_memory(tmp_path) == 8 * GIB


def test_page_cache_of_a_container_counts_as_available(tmp_path):
    """A checkpoint that was read stays in the page cache until the memory is needed."""
    stat = f"anon {GIB}\nfile {3 * GIB}\ninactive_file {2 * GIB}\nactive_file 500\n"
    limits = {f"{V2}.max": f"{5 * GIB}", f"{V2}.current": f"{4 * GIB}", f"{V2}.stat": stat}
    write(tmp_path, {MEMINFO_FILE: MEMINFO, **limits})
    assert available_memory(tmp_path) == 3 * GIB + 500


def test_cgroup_v1_memory_limit_is_applied(tmp_path):
    stat = f"inactive_file 7\ntotal_inactive_file {GIB}\ntotal_active_file 3\n"
    limits = {
        f"{V1}.limit_in_bytes": f"{5 * GIB}\n",
        f"{V1}.usage_in_bytes": f"{4 * GIB}\n",
        f"{V1}.stat": stat,
    }
    write(tmp_path, {MEMINFO_FILE: MEMINFO, **limits})
    assert available_memory(tmp_path) == 2 * GIB + 3


def test_a_container_beyond_its_limit_has_nothing_left(tmp_path):
    write(tmp_path, {MEMINFO_FILE: MEMINFO, f"{V2}.max": "100", f"{V2}.current": "200"})
    assert available_memory(tmp_path) == 0


def test_address_space_limit_bounds_available_memory():
    """Regression: the cache size ignored `ulimit -v`, and the allocation failed."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * mmap.PAGESIZE + GIB // 4, hard))
    try:
        assert GIB // 8 < available_memory() <= GIB // 4
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.mark.parametrize(
    "take",
    [
        lambda: torch.empty(1 << 50, dtype=torch.uint8),
        lambda: mmap.mmap(-1, 1 << 50),
        lambda: bytearray(1 << 60),
    ],
)
def test_failed_allocation_raises_out_of_memory_with_a_remedy(take):
    told = pytest.raises(OutOfMemory, match=r"no memory for the cache.*; lower it")
    with told, MemoryFor("the cache", "lower it"):
        take()


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("a shape"),
        FileNotFoundError(2, "none", "file"),
        RankError("rank 1 has died: it was out of memory"),
    ],
)
def test_errors_other_than_out_of_memory_pass_unchanged(error):
    with pytest.raises(type(error)) as caught, MemoryFor("the cache", "lower it"):
        raise error
    assert caught.value is error


@pytest.mark.slow
def test_command_without_memory_for_weights_ends_with_exit_code_1():
    """Regression: the command ended with a traceback."""
    program = """
import mmap, pathlib, resource, torch
from parallel_llama.cli.main import main
taken = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
resource.setrlimit(resource.RLIMIT_AS, (taken + (1 << 30), resource.RLIM_INFINITY))
raise SystemExit(main(
    "score --model llama-3.2-1b --random-weights 1 --tokens-file /dev/stdin --device cpu".split()
))
"""
    done = run_python("-c", program, input="[1, 2]")
    said = [line for line in done.stderr.splitlines() if "memory" in line]
    assert (done.returncode, done.stderr.count("Traceback"), len(said)) == (1, 0, 1), done.stderr
    assert said[0].startswith("parallel-llama: there is no memory for the weights")


def size_of_cache(n_ranks: int, block_size: int, n_bytes: int | None) -> CacheSize:
    return CacheSize(ARGS, make_plan(ARGS, n_ranks), KVFormat("float64"), block_size, n_bytes, 2048)


def agree(
    comm: Communicator, n_bytes: int | None, memories: Sequence[DeviceMemory] = ()
) -> Capacity | str:
    own = memories[comm.rank] if memories else memory_of(CPU)
    try:
        return size_of_cache(comm.size, 16, n_bytes).agree(comm, own)
    except UsageError as error:
        return str(error)


@pytest.mark.parametrize("blocks", [(16, 40), (40, 16), (16, 16)])
def test_rank_with_least_memory_sets_the_cache_size_of_all_ranks(blocks):
    """Regression: half of a host's memory was divided among the ranks of all hosts."""
    hosts = [DeviceMemory(n * BLOCK + 3, host=host) for host, n in enumerate(blocks)]
    assert run_on_threads(2, agree, None, hosts) == [Capacity((8,), 16, 8 * BLOCK)] * 2


def test_ranks_of_one_host_divide_half_of_its_memory(monkeypatch):
    monkeypatch.setattr(kv_capacity, "available_memory", lambda: 16 * BLOCK + 3)
    assert run_on_threads(2, agree, None) == [Capacity((4,), 16, 4 * BLOCK)] * 2


@pytest.mark.parametrize(("blocks", "n_blocks"), [((48, 40), 12), ((80, 30), 15)])
def test_each_host_divides_its_own_memory_among_its_ranks(blocks, n_blocks):
    """Two ranks on the first host and one on the second; each of them has one KV head."""
    block = BLOCK // 2
    hosts = [DeviceMemory(blocks[host] * block + 3, host=host) for host in (0, 0, 1)]
    assert run_on_threads(3, agree, None, hosts) == [
        Capacity((n_blocks,), 16, n_blocks * block),
    ] * 3  # fmt: skip


def test_cache_without_a_given_size_is_at_most_the_default_maximum(monkeypatch):
    monkeypatch.setattr(kv_capacity, "available_memory", lambda: 1 << 40)
    found = agree(Solo(), None)
    assert isinstance(found, Capacity)
    assert MAX_CPU_BYTES - 2 * BLOCK < found.n_bytes <= MAX_CPU_BYTES


def test_kv_cache_bytes_apply_to_each_rank(monkeypatch):
    monkeypatch.setattr(kv_capacity, "available_memory", lambda: 100 * BLOCK)
    assert run_on_threads(2, agree, 7 * BLOCK + 1) == [Capacity((7,), 16, 7 * BLOCK)] * 2


def test_rank_with_most_kv_heads_sets_the_cache_size_of_all_ranks(monkeypatch):
    """Of four ranks with 3 KV heads, some hold one KV head and some hold two."""
    monkeypatch.setattr(kv_capacity, "available_memory", lambda: 100 * BLOCK)
    shards = make_plan(ARGS, 4).shards
    assert {shard.n_local_kv_heads for shard in shards} == {1, 2}
    assert set(run_on_threads(4, agree, 7 * BLOCK)) == {Capacity((7,), 16, 7 * BLOCK)}


def test_too_little_memory_is_the_same_error_on_every_rank():
    hosts = [DeviceMemory(n, host=host) for host, n in enumerate((100 * BLOCK, 1000))]
    first, second = run_on_threads(2, agree, None, hosts)
    assert first == second
    assert "rank 1 has 500 bytes" in first and f"takes {BLOCK}" in first
    first, second = run_on_threads(2, agree, 2 * BLOCK, hosts)
    assert first == second
    assert f"a KV cache of {2 * BLOCK} bytes" in first and "rank 1 has 1000 bytes" in first


def test_requested_caches_of_all_ranks_fit_into_the_memory_of_their_host(monkeypatch):
    """Regression: each rank compared its own cache with the memory of the whole host."""
    monkeypatch.setattr(kv_capacity, "available_memory", lambda: 100 * BLOCK)
    assert run_on_threads(2, agree, 50 * BLOCK) == [Capacity((50,), 16, 50 * BLOCK)] * 2
    said, _ = run_on_threads(2, agree, 51 * BLOCK)
    assert said == (
        f"a KV cache of {51 * BLOCK} bytes is too large: rank 0 has {100 * BLOCK} bytes of free "
        f"memory, but the KV caches in this memory need {102 * BLOCK}; use a smaller KV cache"
    )
    hosts = [DeviceMemory(51 * BLOCK, host=host) for host in range(2)]
    assert run_on_threads(2, agree, 51 * BLOCK, hosts) == [Capacity((51,), 16, 51 * BLOCK)] * 2


@pytest.mark.parametrize("is_gpu", [False, True], ids=["hosts", "gpus"])
def test_rank_with_fewer_kv_heads_needs_fewer_bytes_than_kv_cache_bytes(is_gpu):
    """Regression: every rank needed as many free bytes as the rank with the most KV heads."""
    plan, form = make_plan(ARGS, 2, [3, 1]), KVFormat("float64")
    own = [16 * sum(kv_bytes_per_token(ARGS, shard, form)) for shard in plan.shards]
    assert own[0] > own[1]
    n_bytes = 40 * own[0] + own[0] - 1
    working = (7, 9) if is_gpu else ()
    size = CacheSize(ARGS, plan, form, 16, n_bytes, 2048, working)

    def agree(comm: Communicator, less: int = 0) -> Capacity:
        needed = 40 * own[comm.rank] - (comm.rank and less) + sum(working[comm.rank :][:1])
        device = {"gpu": 1 + comm.rank} if is_gpu else {"host": comm.rank}
        if is_gpu:
            size.require_room(comm, DeviceMemory(needed + 5, **device), (5, 5))
        return size.agree(comm, DeviceMemory(needed, **device))

    assert run_on_threads(2, agree) == [Capacity((40,), 16, 40 * own[0])] * 2
    with pytest.raises(UsageError, match=r"rank 1 (of 2 needs|has)"):
        run_on_threads(2, agree, 1)


def test_cache_smaller_than_one_block_is_refused():
    size_of_cache(2, 16, BLOCK)
    with pytest.raises(
        UsageError, match=rf"a KV cache of {BLOCK - 1} bytes is too small: .* takes {BLOCK} bytes"
    ):
        size_of_cache(2, 16, BLOCK - 1)
    with pytest.raises(UsageError, match="block_size=0"):
        size_of_cache(2, 0, None)


def test_a_ring_of_blocks_is_enough_for_a_sequence_of_any_length():
    ring = blocks_held(1 << 30, 16, 100, STEP_TOKENS["cpu"])
    assert Capacity((2 * ring,), 16, 0, (100,)).n_full_requests(1 << 20) == 2
    assert Capacity((ring,), 16, 0, (100,)).longest(1 << 20) == 1 << 20
    assert Capacity((ring - 1,), 16, 0, (100,)).longest(1 << 20) == (ring - 1) * 16
    assert Capacity((2 * ring, ring), 16, 0, (None, 100)).longest(1 << 20) == 2 * ring * 16
    assert Capacity((2 * ring, 8), 16, 0, (None, 100)).longest(1 << 20) == 8 * 16


def test_kv_cache_bytes_cover_the_caches_of_all_kv_groups(monkeypatch):
    monkeypatch.setattr(kv_capacity, "available_memory", lambda: 1 << 40)
    args = replace(ARGS, sliding_window=20, full_layers=(0,))
    size = CacheSize(args, make_plan(args, 1), KVFormat("float64"), 16, 1 << 20, 1 << 16)
    found = size.agree(Solo(), memory_of(CPU))
    full, windowed = found.n_blocks
    block = 16 * 2 * 3 * 4 * 8
    assert found.n_bytes == (full + windowed) * block
    assert (1 << 20) - 2 * block < found.n_bytes <= 1 << 20
    assert windowed == -(-full // 4) and found.windows == (None, 20)


def test_full_requests_are_counted_in_whole_blocks():
    assert Capacity((10,), 16, 0).n_tokens == 160
    assert Capacity((10,), 16, 0).n_full_requests(33) == 3


# With --memory.


@pytest.mark.parametrize(
    ("limits", "n_blocks"),
    [
        ([3 * GIB, GIB], 40),
        ([GIB, 3 * GIB], 40),
        ([5 * GIB, GIB, 2 * GIB, 2 * GIB, 3 * GIB], 7),
        ([GIB, 2 * GIB, 2 * GIB, 2 * GIB, 2 * GIB], 1),
    ],
)
def test_rank_with_least_room_under_its_limit_sets_the_cache_size(monkeypatch, limits, n_blocks):
    """Regression: --memory only set proportions, and every rank took as much as was free."""
    monkeypatch.setattr(kv_capacity, "available_memory", lambda: 1 << 40)
    plan, form = make_plan(ARGS, len(limits), limits), KVFormat("float64")
    block = [16 * sum(kv_bytes_per_token(ARGS, shard, form)) for shard in plan.shards]
    tightest = limits.index(GIB)  # has room for n_blocks, the others for twice as many
    rooms = [(1 + (rank != tightest)) * n_blocks * each for rank, each in enumerate(block)]
    own = [
        MemoryLimit(total, total - 1000 - room, 1000)
        for total, room in zip(limits, rooms, strict=True)
    ]
    for more, expected in ((0, n_blocks), (1, n_blocks - 1)):
        tight = replace(own[tightest], weights=own[tightest].weights + more)
        given = [tight if rank == tightest else each for rank, each in enumerate(own)]
        if not expected:
            with pytest.raises(UsageError, match=rf"rank {tightest} of .* needs 1\.001 GiB"):
                CacheSize(ARGS, plan, form, 16, None, 2048, limits=given)
            continue
        size = CacheSize(ARGS, plan, form, 16, None, 2048, limits=given)
        found = run_on_threads(
            len(limits), lambda comm, size=size: size.agree(comm, memory_of(CPU))
        )
        assert {each.n_blocks for each in found} == {(expected,)}
        for limit, each in zip(given, block, strict=True):
            assert limit.weights + limit.working + expected * each <= limit.total


def test_cache_beyond_the_memory_limit_of_a_rank_is_refused():
    plan, form, n_bytes = make_plan(ARGS, 2, [3, 1]), KVFormat("float64"), 40 * BLOCK
    own = [16 * sum(kv_bytes_per_token(ARGS, shard, form)) for shard in plan.shards]
    assert own[0] > own[1]  # so the cache of rank 1 takes fewer bytes than asked for
    n_needed = n_bytes // own[0] * own[1]
    limits = [MemoryLimit(GIB, 5, 6), MemoryLimit(n_needed + 11, 5, 6)]
    CacheSize(ARGS, plan, form, 16, n_bytes, 2048, limits=limits)
    limits[1] = replace(limits[1], total=n_needed + 10)
    with pytest.raises(UsageError, match=r"rank 1 of 2 needs .* use a smaller KV cache"):
        CacheSize(ARGS, plan, form, 16, n_bytes, 2048, limits=limits)


# On GPUs.

WEIGHTS, WORKING = (7 * GIB, 6 * GIB), (GIB, GIB + 5)


def on_gpus(
    comm: Communicator, memories: Sequence[DeviceMemory], n_bytes: int | None = None
) -> Capacity | str:
    """The capacity, or the error before or after the weights are read, with these GPUs."""
    plan = make_plan(ARGS, comm.size)
    form = KVFormat("float64")
    size = CacheSize(ARGS, plan, form, 16, n_bytes, 2048, WORKING[: comm.size])
    own = memories[comm.rank]
    try:
        size.require_room(comm, own, WEIGHTS[: comm.size])
        loaded = DeviceMemory(own.n_free - WEIGHTS[comm.rank], own.gpu)
        return size.agree(comm, loaded)
    except UsageError as error:
        return str(error)


def test_all_ranks_refuse_a_gpu_too_small_before_weights_are_read():
    needed = 6 * GIB + GIB + 5 + BLOCK
    gpus = [DeviceMemory(10 * GIB, 1), DeviceMemory(needed - 1, 2)]
    first, second = run_on_threads(2, on_gpus, gpus)
    assert first == second
    assert first.startswith(
        f"rank 1 of 2 needs {needed} bytes of its GPU, which has {needed - 1} free: {6 * GIB} for "
        f"weights, {BLOCK} for the KV cache, {GIB + 5} as workspace; use more ranks, --quant int8"
    )
    assert "kv_cache_bytes" not in first
    asked = run_on_threads(2, on_gpus, gpus, 2 * GIB)
    assert "rank 0 of 2 needs" not in asked[0]
    assert f"{2 * GIB} for the KV cache" in asked[0] and ", a smaller KV cache or a" in asked[0]


def test_cache_leaves_room_for_the_workspace_on_its_gpu():
    """Regression: the cache took nine tenths of free memory, and the first step had none left."""
    n_blocks = 1000
    free = int((n_blocks * BLOCK + WORKING[1] + 3) / CUDA_FRACTION)
    gpus = [DeviceMemory(20 * GIB, 1), DeviceMemory(free + WEIGHTS[1], 2)]
    assert run_on_threads(2, on_gpus, gpus) == [
        Capacity((n_blocks,), 16, n_blocks * BLOCK),
    ] * 2  # fmt: skip


def test_cache_of_given_size_must_leave_room_for_the_workspace():
    gpus = [DeviceMemory(20 * GIB, 1), DeviceMemory(8 * GIB + BLOCK - 1 + WORKING[1], 2)]
    (said, _) = run_on_threads(2, on_gpus, gpus, 2 * GIB + BLOCK)
    assert f"rank 1 of 2 needs {8 * GIB + BLOCK + WORKING[1]} bytes" in said
    (found, _) = run_on_threads(2, on_gpus, gpus, 2 * GIB)
    assert isinstance(found, Capacity) and found.n_bytes == 2 * GIB // BLOCK * BLOCK


def test_free_gpu_memory_is_checked_again_after_weights_are_read():
    """Another program may have taken GPU memory meanwhile."""
    n_bytes = 1000 * BLOCK * 3 // 2  # one rank has 3 KV heads
    size = CacheSize(ARGS, make_plan(ARGS, 1), KVFormat("float64"), 16, n_bytes, 2048, [GIB])
    assert size.agree(Solo(), DeviceMemory(n_bytes + GIB, 1)).n_bytes == n_bytes
    with pytest.raises(UsageError, match=f"rank 0 has {n_bytes - 1} bytes of free memory"):
        size.agree(Solo(), DeviceMemory(n_bytes + GIB - 1, 1))


def test_ranks_on_one_gpu_each_get_a_part_of_its_memory():
    """Regression: each rank took nine tenths of the whole memory."""
    free = 16 * GIB  # as both ranks see it
    shared = CacheSize(ARGS, make_plan(ARGS, 2), KVFormat("float64"), 16, None, 2048, WORKING)

    def agree(comm: Communicator, gpus: Sequence[int]) -> int:
        return shared.agree(comm, DeviceMemory(free, gpus[comm.rank])).n_bytes

    whole, half = (run_on_threads(2, agree, gpus)[0] for gpus in ((7, 8), (7, 7)))
    assert whole == (int(free * CUDA_FRACTION) - WORKING[1]) // BLOCK * BLOCK
    assert half == (int(free // 2 * CUDA_FRACTION) - WORKING[1]) // BLOCK * BLOCK


def test_memory_cached_by_torch_counts_as_free(monkeypatch):
    """Regression: blocks that torch caches after packing counted as used GPU memory."""
    kept = [3 * GIB]
    cuda = kv_capacity.torch.cuda
    monkeypatch.setattr(cuda, "empty_cache", kept.clear)
    monkeypatch.setattr(cuda, "mem_get_info", lambda _: (10 * GIB - sum(kept), 16 * GIB))
    uuids = {0: "GPU-a", 1: "GPU-b", 2: "GPU-a"}
    monkeypatch.setattr(
        cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=uuids[device.index])
    )
    first, second, again = (memory_of(torch.device("cuda", index)) for index in range(3))
    assert first.n_free == 10 * GIB
    assert first == again and 0 < first.gpu != second.gpu < 1 << 63
    assert memory_of(CPU).gpu == 0 and memory_of(CPU).host == memory_of(CPU).host > 0
