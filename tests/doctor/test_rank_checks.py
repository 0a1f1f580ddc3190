"""Checks of ranks that run as threads. One rank sends, receives or computes wrong bits."""

import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from model_folders import add_manifest
from ranks import SILENCE_S, call_late_after
from thread_ranks import Meeting, ThreadComm, run_on_threads
from tiny_folder import write_chat_folder
from torch import Tensor

from parallel_llama.checkpoint import file_manifest
from parallel_llama.checkpoint.manifest import hash_file
from parallel_llama.doctor import facts, layers, pace, patterns, rank, tiny_model
from parallel_llama.doctor.check import Check
from parallel_llama.doctor.facts import Facts, versions
from parallel_llama.doctor.rank import _REMEDIES, remedy_for
from parallel_llama.doctor.records import agreed, exchange
from parallel_llama.doctor.tiny_model import ARGS, RECORDED, Result, compute_alone, judged
from parallel_llama.doctor.trace import Difference, TracedSolo
from parallel_llama.dtypes import Precision
from parallel_llama.engine.llm_config import LLMConfig
from parallel_llama.engine.model_runner import ModelRunner
from parallel_llama.engine.setup import ModelSetup
from parallel_llama.model.layers import Backend, RowCut, RowParallelLinear
from parallel_llama.ops import Scores
from parallel_llama.ops.cpu.jit import machine_code, this_machine
from parallel_llama.parallel import failures
from parallel_llama.parallel.collectives import ByDevice, Communicator, Solo
from parallel_llama.parallel.shared_memory import SharedMemory
from parallel_llama.parallel.timeouts import Timeouts

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def alone() -> tiny_model.Alone:
    return compute_alone(CPU)


def flipped(x: Tensor) -> Tensor:
    """A copy of the tensor with one bit flipped in the middle."""
    bits = x.clone().view(-1).view(torch.uint8)
    bits[len(bits) // 2] ^= 4
    return bits.view(x.dtype).view(x.shape)


def test_healthy_ranks_pass(alone):
    def step(comm: ThreadComm) -> list[Check]:
        check, wrong = tiny_model.arithmetic(comm, alone)
        together = tiny_model.tensor_parallel(comm, CPU, alone, wrong)
        return [patterns.patterns(comm, CPU), check, together]

    for checks in run_on_threads(3, step):
        assert [check.status for check in checks] == ["pass"] * 3, checks
        assert "1 to 3 ranks" in checks[-1].seen


def reduces_in_a_ring(comm: ThreadComm) -> ThreadComm:
    """Rounds the sums of a rank to the dtype after each addition, as NCCL's ring does."""

    def all_reduce(x: Tensor) -> Tensor:
        total, *parts = comm._exchange(x)
        for part in parts:
            total += part
        return x.copy_(total)

    comm.all_reduce = all_reduce
    return comm


def test_collectives_pass_if_sums_are_rounded_after_each_addition():
    """Regression: bfloat16 sums of six or more ranks exceeded 256, and counted as wrong."""
    found = run_on_threads(8, lambda comm: patterns.patterns(reduces_in_a_ring(comm), CPU))
    assert [check.status for check in found] == ["pass"] * 8, found[0]


def test_built_in_model_output_matches_recorded_digest(alone):
    """If a change of the kernels' summation order is intended, update `RECORDED`."""
    width = this_machine().vector_bytes
    if width not in RECORDED:
        pytest.skip(f"no digest for vectors of {width} bytes; this CPU computes {alone.digest}")
    assert alone.digest == RECORDED[width]


def damaging(comm: ThreadComm, rank: int, how: Callable[[ThreadComm], None]) -> ThreadComm:
    if comm.rank == rank:
        how(comm)
    return comm


def sends_wrongly(comm: ThreadComm) -> None:
    gather = comm.all_gather
    comm.all_gather = lambda x: gather(flipped(x))


def receives_wrongly(comm: ThreadComm) -> None:
    reduce = comm.all_reduce
    comm.all_reduce = lambda x: x.copy_(flipped(reduce(x)))


@pytest.mark.parametrize(
    ("how", "size", "expected"),
    [
        (sends_wrongly, 3, "values from rank 1 arrive changed on every rank (all_gather"),
        (sends_wrongly, 2, "the link from rank 1 to rank 0 changes bits (all_gather"),
        (receives_wrongly, 3, "rank 1 receives changed bits from every rank (all_reduce"),
    ],
)
def test_a_changed_bit_in_a_collective_names_the_rank(how, size, expected):
    found = run_on_threads(size, lambda comm: patterns.patterns(damaging(comm, 1, how), CPU))
    assert [check.status for check in found] == ["fail"] * size
    assert expected in found[0].seen and found[0].remedy


@pytest.mark.parametrize(
    ("part", "expected"), [("w13", "feed-forward channels"), ("w2", "output of w2")]
)
def test_a_changed_bit_in_a_weight_names_rank_layer_and_product(monkeypatch, alone, part, expected):
    load = tiny_model._load

    def faulty(comm: Communicator, device: torch.device) -> ModelRunner:
        runner = load(comm, device)
        if comm.size == 3 and comm.rank == 2:
            weight = getattr(runner.model.layers[1].feed_forward, part).weight
            weight.values.view(-1).view(torch.int32)[40] ^= 1 << 12
        return runner

    monkeypatch.setattr(tiny_model, "_load", faulty)
    step = partial(tiny_model.tensor_parallel, device=CPU, alone=alone, wrong=set())
    for check in run_on_threads(3, step):
        assert check.status == "fail"
        assert f"on 3 ranks, rank 2 computed layer 1, {expected}" in check.seen


def test_a_changed_bit_in_the_result_of_a_kernel_names_the_rank(monkeypatch, alone):
    load = tiny_model._load

    def faulty(comm: Communicator, device: torch.device) -> ModelRunner:
        runner = load(comm, device)
        linear = runner.model.ops.linear
        runner.model.ops.linear = lambda *args: flipped(linear(*args))
        return runner

    monkeypatch.setattr(tiny_model, "_load", faulty)
    wrong = compute_alone(CPU)
    step = lambda comm: tiny_model.arithmetic(comm, wrong if comm.rank == 1 else alone)  # noqa: E731
    for check, ranks in run_on_threads(3, step):
        assert (check.status, ranks) == ("fail", {1}) and "rank 1" in check.seen, check


RIGHT, ODD, FAR = Result("a", 1e-7), Result("b", 1e-7), Result("c", 1e-2)


@pytest.mark.parametrize(
    ("results", "recorded", "status", "wrong"),
    [
        ([RIGHT, RIGHT], "a", "pass", set()),
        ([RIGHT], None, "pass", set()),
        ([RIGHT, RIGHT], "z", "warn", set()),
        ([ODD, RIGHT], "a", "fail", {0}),
        ([RIGHT, ODD, RIGHT], None, "fail", {1}),
        ([ODD, RIGHT, ODD], "a", "fail", {0, 2}),
        ([RIGHT, ODD], None, "fail", {0, 1}),
        ([RIGHT, Result("b", 1e-5)], None, "fail", {1}),
        ([FAR], "a", "fail", {0}),
        ([FAR, FAR], None, "fail", {0, 1}),
        ([RIGHT, Result("b", float("nan"))], None, "fail", {1}),
        ([RIGHT, None], "a", "fail", {1}),
    ],
)
def test_ranks_with_deviating_results_are_identified(results, recorded, status, wrong):
    check, found = judged(results, recorded)
    assert (check.status, found) == (status, wrong), check


def test_a_comparison_that_arrives_damaged_fails_unless_its_rank_is_known_to_be_wrong():
    comparisons = [tiny_model._Comparison(None, is_equal=True), None]
    check = tiny_model._failed_check(comparisons, 2, wrong=set())
    assert check is not None and check.status == "fail"
    assert check.seen == "on 2 ranks, the findings of rank 1 arrive damaged"
    assert tiny_model._failed_check(comparisons, 2, wrong={1}) is None
    of_rank_2 = tiny_model._Comparison(Difference(3, (2,)), is_equal=True)
    check = tiny_model._failed_check([of_rank_2] * 3 + [None], 4, wrong=set())
    assert check is not None and check.seen.startswith("on 4 ranks, rank 2 computed layer 0")


def damages_copies(comm: ThreadComm, numbers: range) -> None:
    """Changes the first byte of the body in some copies of a record."""
    gather = comm.all_gather

    def all_gather(x: Tensor) -> Tensor:
        copies = x.clone().view(3, -1)
        copies[numbers.start : numbers.stop, 20] ^= 1
        return gather(copies.view(-1))

    comm.all_gather = all_gather


@pytest.mark.parametrize(("numbers", "expected"), [(range(2), [1]), (range(3), None)])
def test_records_arrive_unless_every_copy_is_damaged(numbers, expected):
    def step(comm: ThreadComm) -> list[object]:
        how = partial(damages_copies, numbers=numbers)
        return exchange(damaging(comm, 1, how), [comm.rank], list[int])

    assert run_on_threads(2, step) == [[[0], expected]] * 2


def test_agreed_check_is_the_worst_and_names_its_rank():
    def step(comm: ThreadComm) -> Check:
        is_bad = comm.rank == 1
        return agreed(comm, Check("cards", "warn" if is_bad else "pass", "x", "y" * is_bad))

    assert run_on_threads(3, step)[0] == Check("cards", "warn", "rank 1: x", "y")


def test_slow_ranks_and_version_mismatches_are_named():
    assert pace.pace([1e-3, 9e-3]).seen.startswith("rank 1 is up to 9.0 times slower")
    assert pace.pace([1e-3, 2e-3]).status == "pass"
    assert pace.bandwidth([9e9, 8e9, 1e9]).seen.startswith("rank 2 is slow")
    assert pace.transport(Solo(), ["a"], True, [1.0]).status == "skip"
    ranks = [Facts("h", "h", 1, {"torch": "2"}, 0.0) for _ in range(3)]
    ranks[1] = Facts("h", "h", 2, {"torch": "3"}, 0.0)
    assert "torch: rank 1 has 3, rank 0 has 2" in versions(ranks).seen


def test_damaged_measurements_skip_the_checks_that_need_them(monkeypatch):
    monkeypatch.setattr(pace, "measure", lambda _: [None])
    skipped = list(rank._paces(Solo(), []))
    assert [check.id for check in skipped] == ["transport", "pace", "bandwidth"]
    assert {check.seen for check in skipped} == {"measurements of some ranks arrived damaged"}


def test_every_remedy_matches_a_rank_failure_message():
    """Regression: rewording the message about a late rank lost the remedy."""
    source = "".join(path.read_text() for path in Path(failures.__file__).parent.glob("*.py"))
    assert [part for part in _REMEDIES if part not in source] == []
    for late in (failures.late([1], 3, 30.0), failures.late([1, 2], 3, 30.0)):
        assert remedy_for(f"{late}; it is alive").startswith("ps ")
    assert remedy_for(f"{late}; it is stopped by a signal or a debugger").startswith("kill -CONT")


def test_layers_are_skipped_on_all_ranks_if_one_rank_lacks_memory(monkeypatch):
    """Regression: the other ranks called a collective that the rank without memory did not."""
    n_free = iter((0, 1 << 40))
    monkeypatch.setattr(layers, "available_memory", lambda: next(n_free))
    setup = SimpleNamespace(args=ARGS, precision=Precision.plain("float32"), exact=True)
    found = run_on_threads(2, lambda comm: layers.layers(comm, setup))
    assert [check.status for check in found] == ["skip"] * 2
    assert found[0].seen.endswith(": a layer takes too much of the free memory")


@pytest.mark.parametrize(
    ("round_trip_s", "status", "expected"),
    [
        (1e-4, "pass", "2 hosts, round trip of at most 0.10 ms"),
        (0.02, "warn", r"rank 0 \(10\.0\.0\.0\) and rank 1 \(10\.0\.0\.1\) are far apart"),
        (-1.0, "fail", r"rank 0 \(h0\) cannot connect to rank 1 \(10\.0\.0\.1\), and 1 more"),
    ],
)
def test_a_slow_or_cut_link_between_hosts_names_its_ranks(
    monkeypatch, round_trip_s, status, expected
):
    monkeypatch.setattr(facts, "_round_trip", lambda *_: round_trip_s)
    there = [Facts(f"h{n}", f"{n}", 1, {}, 0.0, f"10.0.0.{n}", 1) for n in range(2)]
    for check in run_on_threads(2, lambda comm: facts.hosts(comm, there)):
        assert check.status == status and re.match(expected, check.seen), check


def test_slow_exchanges_name_the_slowest_rank_and_its_host():
    comm = ThreadComm(0, Meeting(2))
    found = pace.transport(comm, ["a", "b"], False, [1e-3, 9e-3])
    assert found.status == "warn" and "slowest on rank 1 (b)" in found.seen and found.remedy
    assert pace.transport(comm, ["a", "b"], False, [1e-3, 1e-3]).status == "pass"


def test_transport_of_gpu_ranks_is_that_of_their_host_messages():
    """Regression: ranks on GPUs always got a warning about gloo, which they do not use."""
    host = SharedMemory.__new__(SharedMemory)
    host.rank, host.size = 0, 2
    comm = ByDevice(host, Solo(), lambda: None)
    found = pace.transport(comm, ["a", "a"], True, [3e-5, 3e-5])
    assert found.status == "pass" and found.seen.startswith("shared memory, 0.03 ms")


@pytest.mark.parametrize("n_rows", [1, 16, 17])
def test_one_rank_traces_each_sum_with_gpu_kernels(n_rows):
    """Regression: one rank added partial sums later, and doctor missed its exchange."""
    pytest.importorskip("triton", reason="kernels for CUDA devices need triton")
    from parallel_llama.ops.cuda_ops import CUDAOps

    comm, dim = TracedSolo(), 64
    backend = Backend(comm, CUDAOps(Scores()), torch.float32)
    layer = RowParallelLinear(RowCut(1024), dim, backend, bias=False)
    layer.weight.load(torch.randn(dim, 1024))
    y = layer.product(torch.randn(n_rows, 1024))
    assert isinstance(y, Tensor) and [len(x) for x in comm.trace.results] == [n_rows]


def test_a_damaged_kernel_in_the_cache_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for key in ("a", "b"):
        machine_code(key, lambda: b"code")
    assert facts.kernel_cache().status == "pass"
    path = next((tmp_path / "parallel_llama/kernels").iterdir())
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    found = facts.kernel_cache()
    assert (found.status, found.remedy) == ("warn", f"rm {path}")
    assert found.seen.startswith("1 of 2 files are damaged")


def test_a_rank_with_other_weights_is_named(tmp_path):
    folders = [write_chat_folder(tmp_path / f"{rank}") for rank in range(3)]
    weights = folders[1] / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-9] ^= 1
    weights.write_bytes(data)
    setups = [ModelSetup(LLMConfig(str(folder), tp_size=3)) for folder in folders]
    for check in run_on_threads(3, lambda comm: layers.files(comm, setups[comm.rank])):
        assert check.status == "fail" and "rsync" in check.remedy
        assert check.seen == "rank 1 and rank 0 differ in model.safetensors"


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("ops.cpu.jit", "engine.setup"):
        monkeypatch.setattr(f"parallel_llama.{module}.why_no_kernels", lambda: "a reason; a remedy")


@pytest.mark.usefixtures("no_kernels")
def test_healthy_ranks_without_kernels_pass_within_a_tolerance():
    alone = compute_alone(CPU)

    def step(comm: ThreadComm) -> list[Check]:
        check, wrong = tiny_model.arithmetic(comm, alone)
        return [check, tiny_model.tensor_parallel(comm, CPU, alone, wrong)]

    for checks in run_on_threads(3, step):
        assert [check.status for check in checks] == ["pass"] * 2, checks
        assert all(check.seen.endswith("within the tolerance") for check in checks)


@pytest.mark.usefixtures("no_kernels")
def test_files_and_layers_are_checked_on_a_cpu_without_kernels(tmp_path, monkeypatch):
    """Regression: exact sums were requested, and their refusal was reported for the files."""
    folder = str(write_chat_folder(tmp_path / "model"))
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    examination = rank.Examination(folder, Timeouts(60, 60), lambda _: None, lambda _: None)
    setups = [examination._setup()[0] for _ in range(2)]

    def step(comm: ThreadComm) -> list[Check]:
        setup = setups[comm.rank]
        return [layers.files(comm, setup), layers.layers(comm, setup)]

    for checks in run_on_threads(2, step):
        assert [check.status for check in checks] == ["pass"] * 2, checks
        assert checks[1].seen.endswith("within the tolerance")


def test_a_folder_of_thousands_of_files_is_compared(tmp_path, monkeypatch):
    """Regression: the digests of more than 300 files did not fit into a record."""
    setup = ModelSetup(LLMConfig(str(write_chat_folder(tmp_path / "model")), tp_size=2))
    digests = {f"model-{number:05}-of-02000.safetensors": "0" * 64 for number in range(2000)}
    monkeypatch.setattr(layers, "fingerprint", lambda _: digests)
    checks = run_on_threads(2, lambda comm: layers.files(comm, setup))
    assert {check.status for check in checks} == {"pass"} and "2000 files" in checks[0].seen


def test_files_above_the_limit_are_not_hashed(tmp_path, monkeypatch):
    """Regression: each rank hashed its first file, whatever the size of the file."""
    folder = write_chat_folder(tmp_path / "model")
    add_manifest(folder)
    weights = folder / "model.safetensors"
    monkeypatch.setattr(layers, "_MAX_HASHED_BYTES", weights.stat().st_size - 1)
    n_files = len(add_manifest(folder).files)
    weights = folder / "model.safetensors"
    monkeypatch.setattr(layers, "_MAX_HASHED_BYTES", weights.stat().st_size - 1)
    hashed: list[str] = []

    def record(path: Path, *_: object) -> str:
        hashed.append(path.name)
        return hash_file(path)

    monkeypatch.setattr(file_manifest, "hash_file", record)
    setup = ModelSetup(LLMConfig(str(folder)))
    checks = []
    for local_rank in range(n_files):
        monkeypatch.setattr(layers, "ranks_here", lambda _, rank=local_rank: (rank, n_files))
        checks.append(layers.files(Solo(), setup))
    assert {check.status for check in checks} == {"pass"}
    assert checks[-1].seen.startswith("0 files equal to manifest.json; 1 not hashed")
    assert len(hashed) == n_files - 1 and weights.name not in hashed


def hash_for_long(comm: Communicator, folder: str) -> Check:
    """Rank 1 hashes its files for longer than the other rank waits in a collective."""
    setup = ModelSetup(LLMConfig(folder, tp_size=2))

    def hash_slowly(*arguments: Any) -> list[str]:
        on_bytes = arguments[-1]
        for _ in range(50 if comm.rank == 1 else 0):
            time.sleep(0.1)
            on_bytes(1)
        return []

    comm.barrier()
    call_late_after(comm, 2.0)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(layers, "damaged_files", hash_slowly)
        check = layers.files(comm, setup)
    call_late_after(comm, SILENCE_S)
    return check


def test_a_rank_that_still_hashes_its_files_is_not_late(tmp_path, ranks):
    folder = write_chat_folder(tmp_path / "model")
    add_manifest(folder)
    checks = ranks(2).run(hash_for_long, str(folder))
    assert [check.status for check in checks] == ["pass"] * 2


def test_the_loss_of_a_rank_in_any_exchange_fails_a_check(monkeypatch):
    """The loss must fail a check that has not been reported yet: a second line would be dropped."""
    n_left = 0

    def lose_a_rank(comm: Communicator, check: Check) -> Check:
        nonlocal n_left
        n_left -= 1
        if n_left == 0:
            raise failures.RankError("rank 1 of 2 has died")
        return agreed(comm, check)

    monkeypatch.setattr(rank, "agreed", lose_a_rank)
    monkeypatch.setattr(rank, "join", lambda *_, **__: Solo())
    host_checks = [Check("memory", "pass", "enough"), Check("cores", "pass", "enough")]
    for n_exchanges in range(1, 6):
        n_left, checks = n_exchanges, []
        examination = rank.Examination(
            None, Timeouts(60, 60), checks.append, lambda _: None, host_checks
        )
        examination.run()
        ids = [check.id for check in checks]
        assert len(ids) == len(set(ids)), "a check is passed on once"
        assert [check.seen for check in checks if check.status == "fail"] == [
            "rank 1 of 2 has died"
        ]
