"""The device of ranks on a host with no GPU, one or two, under every launcher, and of a thread."""

import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from parallel_llama.errors import UsageError
from parallel_llama.parallel import communicators
from parallel_llama.parallel.communicators import own_device, use_device
from parallel_llama.parallel.device_choice import choose_device, count_gpus, ranks_sharing_gpus
from parallel_llama.parallel.failures import RankError
from parallel_llama.parallel.handshake import RankInfo, require_own_gpus
from parallel_llama.parallel.rank_env import is_one_host, local_world, ranks_here, world


@pytest.mark.parametrize(
    ("n_gpus", "one_rank", "two_ranks"),
    [(0, "cpu", "cpu"), (1, "cuda", "cpu"), (2, "cuda", "cuda"), (8, "cuda", "cuda")],
)
def test_auto_takes_gpus_only_where_every_rank_gets_its_own(n_gpus, one_rank, two_ranks):
    """Regression: two ranks on a host with one GPU, as in the quickstart, died in set_device."""
    assert choose_device("auto", 1, n_gpus) == one_rank
    assert choose_device("auto", 2, n_gpus) == two_ranks
    assert choose_device("cpu", 2, n_gpus) == "cpu"


def test_cuda_with_too_few_gpus_is_refused_with_both_counts():
    with pytest.raises(UsageError, match=r"3 ranks on this host and 2 GPUs.*at most 2 on"):
        choose_device("cuda", 3, 2)
    with pytest.raises(UsageError, match=r"torch sees no CUDA device here; use --device cpu"):
        choose_device("cuda", 1, 0)
    with pytest.raises(UsageError, match=r"device='tpu': use auto, cpu or cuda"):
        choose_device("tpu", 1, 1)
    assert choose_device("cuda", 2, 2) == "cuda"


@pytest.mark.parametrize(
    ("visible", "n_seen"),
    [("0", 1), ("1,0", 2), ("", 0), ("-1", 0), ("0,-1,1", 1), ("0, 2", 1), ("GPU-8a,GPU-07", 2)],
)
def test_gpu_count_without_torch_obeys_cuda_visible_devices(tmp_path, visible, n_seen):
    (tmp_path / "dev").mkdir()
    assert count_gpus(tmp_path, visible) == 0
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    assert count_gpus(tmp_path, visible) == n_seen


def test_all_gpus_are_counted_without_cuda_visible_devices(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert count_gpus(tmp_path) == 0
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidia3").touch()
    assert count_gpus(tmp_path) == 1


def test_rank_gets_the_gpu_of_its_local_rank(monkeypatch):
    """Regression: rank 5, which is the second rank of its host, took GPU 5."""
    for name, value in {"RANK": "5", "WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)
    assert local_world(8) == (5, 8)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert local_world(8) == (1, 4)
    assert own_device("cuda", 1) == torch.device("cuda", 1)
    assert own_device("cpu", 1) == torch.device("cpu")
    monkeypatch.setenv("LOCAL_RANK", "4")
    with pytest.raises(UsageError, match="LOCAL_RANK='4' and LOCAL_WORLD_SIZE='4'"):
        local_world(8)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name)
    assert local_world(3) == (0, 3)


def test_local_rank_without_local_world_size_is_accepted(monkeypatch):
    """Regression: LOCAL_RANK alone was refused, although it selects the GPU of a rank."""
    for name, value in {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    assert local_world(8) == (1, 8)
    monkeypatch.setenv("LOCAL_RANK", "8")
    with pytest.raises(UsageError, match="LOCAL_RANK='8' and WORLD_SIZE='8'"):
        local_world(8)


# Rank 5 of 8 ranks, 4 on each of 2 hosts.
TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4",
    "TORCHELASTIC_RUN_ID": "1",
}  # fmt: skip
VIRTUAL = {**TORCHRUN, "LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "1"}  # --virtual-local-rank
SRUN = {
    "SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
}  # fmt: skip
PMI2 = {**SRUN, "PMI_RANK": "5", "PMI_SIZE": "8", "PMI_FD": "7", "PMI_JOBID": "9.0"}
ONE_EACH = {**SRUN, "SLURM_GPUS_PER_TASK": "1", "CUDA_VISIBLE_DEVICES": "0"}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}  # fmt: skip
BY_HAND = {"RANK": "5", "WORLD_SIZE": "8"}
POD = {**BY_HAND, "KUBERNETES_SERVICE_HOST": "10.0.0.1"}
HIDDEN = {"CUDA_VISIBLE_DEVICES": "1"}


@pytest.mark.parametrize(
    ("env", "is_one"),
    [
        ({}, True),
        (TORCHRUN, False),
        (TORCHRUN | {"WORLD_SIZE": "4", "RANK": "1"}, True),
        (SRUN, False),
        (SRUN | {"SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "4",
                 "SLURM_PROCID": "1", "SLURM_NODEID": "0"}, True),
        (PMI2, False),
        (PMI2 | {"SLURM_STEP_TASKS_PER_NODE": "8", "SLURM_NODEID": "0"}, True),
        (MPIRUN, False),
        (BY_HAND | {"MASTER_ADDR": "host0"}, False),
        (BY_HAND | {"MASTER_ADDR": "10.0.0.1"}, False),
        (BY_HAND | {"MASTER_ADDR": "127.0.0.1"}, True),
        (BY_HAND | {"MASTER_ADDR": "localhost"}, True),
        (POD | {"MASTER_ADDR": "leader.default"}, False),
    ],
)  # fmt: skip
def test_is_one_host_only_if_the_environment_proves_it(put, env, is_one):
    """Regression: with --exact, ranks started by hand on several hosts exchanged twice as often."""
    put(env)
    assert is_one_host(world()[1]) == is_one


CPU, REFUSED = "cpu", "4 ranks on this host and 1 GPU, but"


@pytest.mark.parametrize(
    ("env", "n_files", "n_gpus", "auto", "cuda"),
    [
        (TORCHRUN, 4, 4, 1, 1),
        (TORCHRUN, 1, 1, CPU, REFUSED),
        (TORCHRUN | HIDDEN, 4, 1, CPU, REFUSED),  # set for torchrun, so for all of its ranks
        (VIRTUAL, 4, 1, CPU, 0),
        (SRUN, 4, 4, 1, 1),
        (SRUN, 1, 1, CPU, 0),
        (SRUN | HIDDEN, 4, 1, 0, 0),
        (PMI2, 4, 4, 1, 1),
        (ONE_EACH, 1, 1, 0, 0),
        (ONE_EACH, 4, 1, 0, 0),
        ({**SRUN, "SLURM_TRES_PER_TASK": "cpu:4,gres/gpu:2"}, 2, 2, 0, 0),
        ({**SRUN, "SLURM_NTASKS_PER_GPU": "1"}, 1, 1, 0, 0),
        ({**SRUN, "SLURM_GPU_BIND": "single:1"}, 1, 1, 0, 0),
        # Each of 4 tasks has 2 of 8 GPUs.
        (SRUN | {"CUDA_VISIBLE_DEVICES": "2,3"}, 8, 2, 0, 0),
        (MPIRUN, 4, 4, 1, 1),
        (MPIRUN, 1, 1, CPU, 0),
        (MPIRUN | HIDDEN, 4, 1, 0, 0),
        (POD, 1, 1, 0, 0),
        ({**POD, **TORCHRUN}, 4, 4, 1, 1),
        (BY_HAND, 1, 1, CPU, 0),
        (BY_HAND, 4, 4, CPU, "8 ranks on this host and 4 GPUs"),
        ({**BY_HAND, "LOCAL_RANK": "1"}, 4, 4, 1, 1),
        # srun and mpirun start a script that sets torchrun's variables.
        ({**SRUN, **BY_HAND, "LOCAL_RANK": "1"}, 4, 4, 1, 1),
        ({**SRUN, **BY_HAND}, 4, 4, 1, 1),
        ({**PMI2, **BY_HAND}, 4, 4, 1, 1),
        ({**ONE_EACH, **BY_HAND, "LOCAL_RANK": "1"}, 1, 1, 0, 0),
        ({**MPIRUN, **BY_HAND}, 4, 4, 1, 1),
        ({}, 2, 2, CPU, "8 ranks on this host and 2 GPUs"),
    ],
)
def test_rank_of_every_launcher_gets_its_gpu(
    put: Callable[[Mapping[str, str]], None],
    tmp_path: Path,
    env: Mapping[str, str],
    n_files: int,
    n_gpus: int,
    auto: int | str,
    cuda: int | str,
) -> None:
    """Regression: with one visible GPU per task, `auto` took the CPU and `cuda` was refused."""
    (tmp_path / "dev").mkdir()
    for number in range(n_files):
        (tmp_path / "dev" / f"nvidia{number}").touch()
    put(env)

    def chosen(asked: str) -> int | str:
        gpu, n_ranks = ranks_sharing_gpus(asked, 8, n_gpus, tmp_path)
        return gpu if choose_device(asked, n_ranks, n_gpus) == "cuda" else CPU

    assert chosen("auto") == auto
    assert chosen("cpu") == CPU
    if isinstance(cuda, int):
        assert chosen("cuda") == cuda
    else:
        with pytest.raises(UsageError, match=cuda):
            chosen("cuda")


def test_two_ranks_with_one_gpu_are_named() -> None:
    """Each rank sees one GPU; only a comparison between ranks shows that it is the same GPU."""
    infos = [RankInfo(n, 3, {}, f"host{n % 2}", n, "", {}, gpu) for n, gpu in enumerate("aba")]
    with pytest.raises(RankError, match="rank 0 and rank 2 of 3, process 0 on host0 and process 2"):
        require_own_gpus(infos)
    require_own_gpus(infos[:2])
    require_own_gpus([RankInfo(n, 3, {}, "", n, "") for n in range(3)])


def test_script_in_srun_uses_slurm_local_world_if_ranks_agree(
    put: Callable[[Mapping[str, str]], None],
) -> None:
    """Regression: all 8 ranks were assumed to be on one host."""
    put({**SRUN, **BY_HAND, "LOCAL_RANK": "1"})
    assert local_world(8) == (1, 4)
    put({"RANK": "4"})  # another launcher's rank
    assert local_world(8) == (1, 8)


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, (0, 8)),
        (TORCHRUN, (1, 4)),
        (VIRTUAL, (1, 4)),
        (SRUN, (1, 4)),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "3,5", "SLURM_LOCALID": "2"}, (2, 5)),
        ({"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1"}, (0, 1)),
        (PMI2, (1, 4)),
        (MPIRUN, (1, 4)),
        ({**SRUN, **BY_HAND}, (1, 4)),
        (BY_HAND | {"MASTER_ADDR": "10.0.0.1"}, (0, 1)),
        (BY_HAND | {"MASTER_ADDR": "10.0.0.1", "LOCAL_RANK": "1"}, (0, 1)),
        (BY_HAND | {"MASTER_ADDR": "127.0.0.1"}, (5, 8)),
    ],
)
def test_ranks_count_as_being_here_only_if_the_environment_proves_it(put, env, expected):
    """Regression: ranks started by hand on several hosts counted as ranks of each host."""
    put(env)
    assert ranks_here(8) == expected


def test_use_device_sets_the_gpu_of_the_calling_thread(monkeypatch):
    taken: list[tuple[str, torch.device]] = []
    monkeypatch.setattr(
        communicators.torch.cuda,
        "set_device",
        lambda device: taken.append((threading.current_thread().name, device)),
    )
    use_device(torch.device("cpu"))
    thread = threading.Thread(target=use_device, args=(torch.device("cuda", 1),), name="other")
    thread.start()
    thread.join()
    assert taken == [("other", torch.device("cuda", 1))]


def test_use_device_without_an_index_keeps_the_current_gpu(monkeypatch):
    """Regression: set_device refuses such a device, which ended the threads that launch work."""

    def set_device(device: torch.device) -> None:
        chosen.append(torch.cuda._utils._get_device_index(device))

    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    use_device(torch.device("cuda"))
    use_device(torch.device("cuda", 1))
    assert chosen == [1]
