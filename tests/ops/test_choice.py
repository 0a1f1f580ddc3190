"""Which operators `choose_ops` gives a model."""

import re
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from parallel_llama.ops import CPUOps, TorchOps, choose_ops, triton_toolchain

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
HALVES = (torch.bfloat16, torch.float16)


def chosen(dtype: torch.dtype, device: torch.device) -> type[TorchOps]:
    return type(choose_ops(dtype, device, 16, {3}))


def test_kernels_are_chosen_for_supported_dtypes():
    assert {chosen(dtype, CPU) for dtype in (torch.float32, torch.float64)} == {CPUOps}
    assert {chosen(dtype, CPU) for dtype in HALVES} == {TorchOps}
    assert chosen(torch.float64, CUDA) is TorchOps


def test_cuda_uses_kernels_only_if_triton_can_launch_them(monkeypatch):
    """Regression: without a C compiler or Python.h, the first launch failed with a traceback."""
    if find_spec("triton"):
        monkeypatch.setattr("parallel_llama.ops.why_unusable", lambda: None)
        names = {chosen(dtype, CUDA).__name__ for dtype in (torch.float32, *HALVES)}
        assert names == {"CUDAOps"}
    monkeypatch.setattr("parallel_llama.ops.why_unusable", lambda: "no C compiler")
    assert {chosen(dtype, CUDA) for dtype in (torch.float32, *HALVES)} == {TorchOps}


@pytest.mark.parametrize(
    ("lacks", "says"),
    [
        ((), None),
        (("triton",), "the package triton to launch kernels; use: pip install triton$"),
        (("gcc",), None),
        (("gcc", "clang"), "a C compiler to launch kernels; use: apt install gcc$"),
        (("gcc", "clang", "Python.h"), "C compiler and .*Python.h to .*gcc; apt install python3-d"),
        (("CC",), "CC=/opt/none to launch kernels; use: unset CC$"),
    ],
)
def test_missing_triton_requirement_is_named_with_its_fix(monkeypatch, tmp_path, lacks, says):
    (tmp_path / "Python.h").touch()
    include = tmp_path / "none" if "Python.h" in lacks else tmp_path
    monkeypatch.delenv("CC", raising=False)
    if "CC" in lacks:
        monkeypatch.setenv("CC", "/opt/none")
    programs = {"gcc", "clang"} - {*lacks}
    for name, stand_in in (
        ("find_spec", lambda name: None if name in lacks else object()),
        ("shutil.which", lambda name: name if name in programs else None),
        ("sysconfig.get_path", lambda *_: str(include)),
    ):
        monkeypatch.setattr(f"parallel_llama.ops.triton_toolchain.{name}", stand_in)
    found = triton_toolchain.why_unusable()
    assert found is None if says is None else re.search(says, found)


@pytest.mark.skipif(find_spec("triton") is None, reason="compares with Triton's own search")
@pytest.mark.parametrize("programs", [(), ("gcc",), ("clang",), ("gcc", "clang")])
def test_compiler_search_agrees_with_triton(monkeypatch, tmp_path, programs):
    from triton.runtime import build

    for name in programs:
        (tmp_path / name).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    if search := getattr(build, "_find_compiler", None):  # a part of _build in Triton 3.9
        monkeypatch.setattr(build, "_find_compiler", getattr(search, "__wrapped__", search))
    monkeypatch.setattr(build.subprocess, "check_call", lambda *_args, **_kwargs: 0)
    try:
        build._build("module", "module.c", str(tmp_path), [], [], [], [])
        is_found = True
    except RuntimeError:
        is_found = False
    assert ("a C compiler" not in (triton_toolchain.why_unusable() or "")) == is_found


@pytest.mark.slow
def test_triton_is_not_imported_on_cpu():
    code = (
        "import sys, torch; from parallel_llama.ops import choose_ops;"
        "choose_ops(torch.bfloat16, torch.device('cpu'), 16, {3});"
        "sys.exit(any(name.split('.')[0] == 'triton' for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
