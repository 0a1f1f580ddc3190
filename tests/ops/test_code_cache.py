"""Machine code from the cache runs in this process, so only trusted files are accepted."""

import ast
import os
import runpy
import stat
import struct
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic

import pytest
import torch

from parallel_llama.ops.attention import Scores
from parallel_llama.ops.cpu import jit
from parallel_llama.ops.cpu.arguments import Integer, Integers, T
from parallel_llama.ops.cpu.decode_attention import DecodeAttentionKernel
from parallel_llama.ops.cpu.elementwise import ActivationKernel
from parallel_llama.ops.cpu.jit import CompiledKernel, CPUFeatures, machine_code, openmp


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "parallel_llama" / "kernels"


def made(key="key"):
    """Gets the code of a key. Returns: whether it had to be made."""
    calls = []
    code = machine_code(key, lambda: calls.append(1) or b"code of " + key.encode())
    assert code == b"code of " + key.encode()
    return bool(calls)


def test_code_is_made_once_for_each_key(folder):
    assert made() and not made()
    assert made("other") and not made("other") and not made()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()] == [0o600] * 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(path.read_bytes()[:-1] + b"x"),
        lambda path: path.write_bytes(os.urandom(2 << 20)),
    ],
    ids=["empty", "cut short", "changed", "too large"],
)
def test_damaged_file_is_regenerated(folder, damage):
    made()
    (path,) = folder.iterdir()
    damage(path)
    assert made() and not made()


def test_file_copied_to_another_key_is_rejected(folder):
    made()
    (first,) = folder.iterdir()
    made("other")
    (second,) = set(folder.iterdir()) - {first}
    second.write_bytes(first.read_bytes())
    assert made("other")


def test_file_or_folder_writable_by_others_is_not_trusted(folder):
    made()
    (path,) = folder.iterdir()
    path.chmod(0o622)
    assert made()
    folder.chmod(0o770)
    assert made() and made()
    folder.chmod(0o700)


def test_symlinks_and_fifos_are_not_read(folder, tmp_path):
    made()
    (path,) = folder.iterdir()
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert made()
    path.unlink()
    os.mkfifo(path, 0o600)
    assert made()


@pytest.mark.parametrize("home", ["/dev/null", "relative"])
def test_code_is_regenerated_every_time_without_a_usable_folder(monkeypatch, tmp_path, home):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", home)
    assert made() and made()
    assert not list(tmp_path.iterdir())


def test_oldest_files_are_evicted_when_cache_is_full(folder, monkeypatch):
    monkeypatch.setattr("parallel_llama.ops.cpu.jit._MAX_FILES", 3)
    for number in range(5):
        assert made(str(number))
        os.utime(max(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns), (number, number))
    assert len(list(folder.iterdir())) == 3
    assert not made("4") and made("0")


needs_openmp = pytest.mark.skipif(openmp() is None, reason="kernels need torch's own GNU OpenMP")


@needs_openmp
def test_kernel_loaded_from_cache_gives_same_results(folder, monkeypatch):
    x = torch.randn(3, 20)
    results = [ActivationKernel(torch.float32, "silu", CPUFeatures(16, 16), gated=True)(x)]
    assert len(list(folder.iterdir())) == 1
    monkeypatch.setattr(jit, "_module", None)  # nothing is built
    results.append(ActivationKernel(torch.float32, "silu", CPUFeatures(16, 16), gated=True)(x))
    assert torch.equal(*results)


@needs_openmp
def test_kernels_with_different_parameters_are_cached_separately(folder):
    for machine in (CPUFeatures(16, 16), CPUFeatures(32, 16)):
        for dtype in (torch.float32, torch.float64):
            ActivationKernel(dtype, "silu", machine, gated=True)
    soft = Scores(soft_cap=30.0), Scores(soft_cap=50.0), Scores(scale=0.5)
    for scores in soft:
        DecodeAttentionKernel(torch.float32, torch.float32, 16, 1, scores, CPUFeatures(16, 16))
    assert len(list(folder.iterdir())) == 4 + 3


ADDS = """
def body(b, thread, args):
    args.x[0] = args.x[0] + args.y + {}
"""


@dataclass(slots=True, kw_only=True)
class _Arguments(Generic[T]):
    x: Integers[T]
    y: Integer[T]


@needs_openmp
def test_changed_kernel_source_recompiles_the_kernel(folder, tmp_path):
    found = []
    for number in (1, 2, 2):
        path = tmp_path / "kernel.py"
        path.write_text(ADDS.format(number))
        body = runpy.run_path(str(path))["body"]
        jit._source_digest.cache_clear()  # a process has one version of each source
        x = torch.zeros(1, dtype=torch.int64)
        CompiledKernel(_Arguments[float], body)(1, _Arguments(x=x.data_ptr(), y=0))
        found.append((x.item(), len(list(folder.iterdir()))))
    assert found == [(1, 1), (2, 2), (2, 2)]


@needs_openmp
def test_kernel_arguments_are_checked_by_name_and_type(folder):
    """Regression: with positional arguments, swapped integers gave a wrong result silently."""
    path = folder / "kernel.py"
    path.parent.mkdir(parents=True)
    path.write_text(ADDS.format(0))
    program = CompiledKernel(_Arguments[float], runpy.run_path(str(path))["body"])
    x = torch.zeros(1, dtype=torch.int64)
    program(1, _Arguments(y=5, x=x.data_ptr()))
    assert x.item() == 5
    for wrong in ({"x": x.data_ptr()}, {"x": x.data_ptr(), "y": 1, "z": 2}):
        with pytest.raises(TypeError, match="argument"):
            _Arguments(**wrong)
    with pytest.raises(TypeError, match="positional"):
        _Arguments(x.data_ptr(), 5)
    with pytest.raises(struct.error):
        program(1, _Arguments(x=x.data_ptr(), y=1.5))


@needs_openmp
def test_kernel_without_source_file_is_not_cached(folder):
    named: dict[str, Any] = {}
    exec(compile(ADDS.format(3), "/nowhere/kernel.py", "exec"), named)
    x = torch.zeros(1, dtype=torch.int64)
    CompiledKernel(_Arguments[float], named["body"])(1, _Arguments(x=x.data_ptr(), y=0))
    assert x.item() == 3 and not folder.exists()


def test_kernel_body_that_cannot_be_keyed_is_rejected():
    """Two kernels whose keys do not contain all their parameters could share a key."""

    own = object()

    def closure(*_):
        assert own

    for body in (closure, partial(_body, object()), partial(_body, lanes=3), partial(_body, [3])):
        with pytest.raises(AssertionError):
            jit._body_key(body)


def _body(*_): ...


@needs_openmp
def test_changed_digest_of_shared_sources_recompiles_the_kernel(folder, monkeypatch):
    for digest in ("now", "then", "now"):
        monkeypatch.setattr(jit, "_SOURCES", digest)
        ActivationKernel(torch.float32, "silu", CPUFeatures(16, 16), gated=True)
    assert len(list(folder.iterdir())) == 2


def modules_of(path, node):
    """The files that `from path import names` reads: the module, or modules of the package."""
    if path.is_dir():
        return [path / f"{name.name}.py" for name in node.names]
    return [path.with_suffix(".py")]


def test_cache_key_covers_every_module_that_kernels_import():
    """Kernels import modules outside `ops`, and constants of these modules are in the code."""
    package = Path(jit.__file__).parents[2]
    kernels = set(Path(jit.__file__).parent.glob("*.py"))
    imported = {
        file
        for kernel in kernels
        for node in ast.walk(ast.parse(kernel.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module.startswith(package.name)
        for file in modules_of(package.parent.joinpath(*node.module.split(".")), node)
    }
    assert package / "dtypes.py" in imported and package / "ops" / "attention.py" in imported
    assert all(path.is_file() for path in imported)
    assert kernels | imported <= set(jit._sources())
    # A change of a GPU kernel must not recompile the kernels of the CPU.
    assert not any("cuda" in path.parts for path in jit._sources())
