"""Two hosts on one machine."""

import os
import subprocess
from collections.abc import Iterator

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
