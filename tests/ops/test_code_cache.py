"""Machine code from the cache runs in this process, so only what is surely ours is taken."""

import os
import stat

import pytest
import torch

from parallel_llama.ops.cpu.code_cache import machine_code
from parallel_llama.ops.cpu.program import Machine, openmp
from parallel_llama.ops.cpu.silu_and_mul import SiluAndMulKernel


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "parallel_llama" / "kernels"


def made(key="key"):
    """What a key gives, and whether it had to be made."""
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
def test_a_damaged_file_is_made_anew(folder, damage):
    made()
    (path,) = folder.iterdir()
    damage(path)
    assert made() and not made()


def test_code_under_anothers_name_is_not_taken(folder):
    made()
    (first,) = folder.iterdir()
    made("other")
    (second,) = set(folder.iterdir()) - {first}
    second.write_bytes(first.read_bytes())
    assert made("other")


def test_what_others_may_write_is_not_taken(folder):
    made()
    (path,) = folder.iterdir()
    path.chmod(0o622)
    assert made()
    folder.chmod(0o770)
    assert made() and made()
    folder.chmod(0o700)


def test_links_and_pipes_are_not_followed(folder, tmp_path):
    made()
    (path,) = folder.iterdir()
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert made()
    path.unlink()
    os.mkfifo(path, 0o600)
    assert made()


@pytest.mark.parametrize("home", ["/dev/null", "relative"])
def test_without_a_folder_code_is_made_every_time(monkeypatch, tmp_path, home):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", home)
    assert made() and made()
    assert not list(tmp_path.iterdir())


def test_old_code_makes_room_for_new(folder, monkeypatch):
    monkeypatch.setattr("parallel_llama.ops.cpu.code_cache._MAX_FILES", 3)
    for number in range(5):
        assert made(str(number))
        os.utime(max(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns), (number, number))
    assert len(list(folder.iterdir())) == 3
    assert not made("4") and made("0")


@pytest.mark.skipif(openmp() is None, reason="kernels need torch's own GNU OpenMP")
def test_a_kernel_from_the_cache_is_the_kernel(folder, monkeypatch):
    x = torch.randn(3, 20)
    results = [SiluAndMulKernel(torch.float32, Machine(16, 16))(x)]
    assert len(list(folder.iterdir())) == 1
    monkeypatch.setattr("parallel_llama.ops.cpu.program._optimised", None)  # nothing is made
    results.append(SiluAndMulKernel(torch.float32, Machine(16, 16))(x))
    assert torch.equal(*results)
