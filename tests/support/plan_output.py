"""Runs `parallel-llama plan` and returns what it prints."""

import json
from typing import Any

import pytest

from parallel_llama.cli import main as command_line

Capture = pytest.CaptureFixture[str]


def plan(capsys: Capture, *argv: str) -> dict[str, Any]:
    command_line.main(["plan", "--json", *argv])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def page(capsys: Capture, *argv: str) -> str:
    command_line.main(["plan", *argv])
    return capsys.readouterr().out
