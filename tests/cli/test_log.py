"""What a server writes to its log."""

import json
import logging
from collections.abc import Callable, Iterator

import pytest

from parallel_llama.serve.log import log_to_stderr

HOSTILE = "a\x1b[31mred\r\n2026 ERROR forged"


@pytest.fixture
def said(capsys, monkeypatch) -> Iterator[Callable[[str], str]]:
    """What a new process writes of two events, one of which is not ours."""
    root, own = logging.getLogger(), logging.getLogger("parallel_llama")
    levels = root.level, own.level

    def say(form: str) -> str:
        monkeypatch.setattr(root, "handlers", [])
        log_to_stderr(form)
        told = {"request_id": "id-1", "total_s": 0.5, "path": HOSTILE}
        logging.getLogger("parallel_llama.serve").info("answered", extra={"fields": told})
        logging.getLogger("elsewhere").info("not of ours")
        return capsys.readouterr().err

    yield say
    root.setLevel(levels[0])
    own.setLevel(levels[1])


def test_a_line_for_people_steers_no_terminal_and_passes_for_no_other(said):
    text = said("text")
    first, *rest = text.splitlines()
    assert "answered request_id=id-1 total_s=0.5" in first and "elsewhere" not in text
    assert "\x1b" not in text and "\r" not in text
    assert all(line.startswith("  ") for line in rest)


def test_a_line_of_json_holds_all_of_an_event(said):
    (line,) = said("json").splitlines()
    event = json.loads(line)
    assert line.isascii() and "\\u001b" in line
    assert event["event"] == "answered" and event["level"] == "info"
    assert (event["request_id"], event["total_s"], event["path"]) == ("id-1", 0.5, HOSTILE)
