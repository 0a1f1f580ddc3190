"""Two hosts on one machine, and the environments of launchers."""

import os
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping

import pytest


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Two connected network namespaces, 10.231.0.1 and 10.231.0.2; needs root."""
    names = [f"{end}{os.getpid()}" for end in "ab"]

    def ip(*command: str) -> None:
        subprocess.run(["ip", *command], check=True, capture_output=True)

    try:
        ip("netns", "add", names[0])
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("network namespaces are not allowed here")
    try:
        ip("netns", "add", names[1])
        for name in names:
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", names[0], "link", "add", "v0", "type", "veth", "peer", "v0", "netns", names[1])
        for number, name in enumerate(names, 1):
            ip("-n", name, "addr", "add", f"10.231.0.{number}/24", "dev", "v0")
            ip("-n", name, "link", "set", "v0", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@pytest.fixture
def put(monkeypatch: pytest.MonkeyPatch) -> Callable[[Mapping[str, str]], None]:
    """Sets variables in an environment without those of any launcher."""
    launchers = "RANK|WORLD_|LOCAL_|MASTER_|SLURM_|OMPI_|PMI|MPI_|ENVIRONMENT|KUBERNETES_|"
    launchers += "TORCHELASTIC_|CUDA_VISIBLE"
    for name in list(os.environ):
        if re.match(launchers, name):
            monkeypatch.delenv(name)

    def put(env: Mapping[str, str]) -> None:
        for name, value in env.items():
            monkeypatch.setenv(name, value)

    return put
