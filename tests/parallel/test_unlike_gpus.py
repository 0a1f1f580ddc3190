"""Ranks compare GPUs, drivers and libraries at the rendezvous."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import HashStore

from parallel_llama.engine import ranks as engine_ranks
from parallel_llama.engine.ranks import gpu_notes, shared_facts
from parallel_llama.parallel import gpu
from parallel_llama.parallel.failures import RankError
from parallel_llama.parallel.handshake import RankInfo, rendezvous

H100 = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=80 << 30, major=9, minor=0)
A100 = SimpleNamespace(name="NVIDIA A100-SXM4-40GB", total_memory=40 << 30, major=8, minor=0)
GPU = torch.device("cuda", 0)


def meet(*infos: RankInfo) -> list[list[str]]:
    """The differences that the rendezvous of all ranks returns on each rank."""
    store = HashStore()
    with ThreadPoolExecutor(len(infos)) as pool:
        found = [
            pool.submit(rendezvous, store, info, {*range(len(infos))}, Event()) for info in infos
        ]
        return [each.result(timeout=20) for each in found]


def info(rank: int, facts: Mapping[str, str], notes: Mapping[str, str], uuid: str) -> RankInfo:
    return RankInfo.of_this_process(rank, 2, facts, notes, uuid)


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug\nGCC",
            "535.104.05",
        ),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Rel\n", "580.65.06"),
        ("something else\n", "unknown"),
        (None, "unknown"),
    ],
)
def test_gpu_description_has_name_memory_architecture_and_driver(
    monkeypatch, tmp_path: Path, text: str | None, version: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: H100)
    if text is not None:
        (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
        (tmp_path / "proc/driver/nvidia/version").write_text(text)
    assert gpu.describe_gpu(GPU, tmp_path) == {
        "GPU": "NVIDIA H100 80GB HBM3, 80 GiB",
        "architecture of the GPU": "sm_90",
        "driver of the GPU": version,
    }
    assert gpu.describe_gpu(torch.device("cpu"), tmp_path) == {} == gpu_notes(on("cpu"))


def on(kind: str, n_experts: int = 0, memory: tuple[float, ...] | None = None) -> SimpleNamespace:
    """The attributes of a ModelSetup that facts and notes are read from."""
    config = SimpleNamespace(random_weights=1, facts=dict, memory=memory, speeds=None)
    device = GPU if kind == "cuda" else torch.device("cpu")
    args = SimpleNamespace(n_experts=n_experts)
    return SimpleNamespace(
        inputs=SimpleNamespace(files=None), config=config, kind=kind, device=device,
        args=args, plan=None, adapters={}, draft=None, exact=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("differs", "says"),
    [
        ({"torch.cuda.nccl.version": (2, 20, 5)}, "version of NCCL: rank 1 of 2 has 2.20.5"),
        ({"parallel.gpu.version": "3.6.0"}, "version of Triton: rank 1 of 2 has 3.6.0"),
        ({"engine.ranks.why_unusable": "no compiler"}, "kernels: rank 1 of 2 has torch's operat"),
    ],
)
def test_ranks_with_different_library_versions_do_not_start(monkeypatch, differs, says) -> None:
    """Regression: Triton and NCCL versions were not compared; ranks with other kernels diverged."""

    def facts(values: Mapping[str, object]) -> Mapping[str, str]:
        usual = {
            "torch.cuda.nccl.version": (2, 27, 3),
            "parallel.gpu.version": "3.5.1",
            "engine.ranks.why_unusable": None,
        }
        for name, value in {**usual, **values}.items():
            at = name if name.startswith("torch") else f"parallel_llama.{name}"
            monkeypatch.setattr(at, lambda *_, value=value: value)
        return shared_facts(on("cuda"))

    assert not {"version of NCCL", "kernels"} & shared_facts(on("cpu")).keys()
    first, other = facts({}), facts(differs)
    with pytest.raises(RankError, match=says):
        meet(info(0, first, {}, "a"), info(1, other, {}, "b"))
    assert meet(info(0, first, {}, "a"), info(1, first, {}, "b")) == [[], []]


def test_different_gpus_are_noted_and_refused_only_for_moe_models(monkeypatch) -> None:
    """GPUs of unequal memory are supported, and each rounds a router's scores in its own way."""
    monkeypatch.setattr(engine_ranks, "why_unusable", lambda: None)
    notes, facts = [], []
    for properties in (H100, A100):
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda _, properties=properties: properties
        )
        notes.append(gpu_notes(on("cuda")))
        facts.append([shared_facts(on("cuda", n)) for n in (0, 8)])
        assert gpu_notes(on("cuda", memory=(80, 40))) == {}
    dense, mixture = zip(*facts, strict=True)
    found, same = meet(*(info(rank, dense[rank], notes[rank], str(rank)) for rank in (0, 1)))
    assert found == same and len(found) == 2
    assert found[1] == "architecture of the GPU: rank 1 of 2 has sm_80 and rank 0 has sm_90"
    with pytest.raises(RankError, match="architecture of the GPU: rank 1 of 2 has sm_80"):
        meet(*(info(rank, mixture[rank], notes[rank], str(rank)) for rank in (0, 1)))
