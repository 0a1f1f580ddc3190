"""What a server writes to its log."""

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from served import ONLY_RANK, Served

from parallel_llama.serve.log import log_to_stderr

HOSTILE = "a\x1b[31mred\r\n2026 ERROR forged"


@pytest.fixture
def said(capsys, monkeypatch) -> Iterator[Callable[[str], str]]:
    """What a new process logs of an event of the server and an event of another package."""
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


def test_text_log_has_no_escape_codes_and_no_forged_line(said):
    text = said("text")
    first, *rest = text.splitlines()
    assert "answered request_id=id-1 total_s=0.5" in first and "elsewhere" not in text
    assert "\x1b" not in text and "\r" not in text
    assert all(line.startswith("  ") for line in rest)


def test_json_log_line_contains_all_fields_of_an_event(said):
    (line,) = said("json").splitlines()
    event = json.loads(line)
    assert line.isascii() and "\\u001b" in line
    assert event["event"] == "answered" and event["level"] == "info"
    assert (event["request_id"], event["total_s"], event["path"]) == ("id-1", 0.5, HOSTILE)


@pytest.mark.parametrize(("env", "first"), [(None, "loading "), (ONLY_RANK, "KV cache: ")])
def test_lines_of_the_start_are_json_too(model: Path, env: Mapping[str, str] | None, first: str):
    """Regression: the model, the capacity and the address were plain text between JSON lines."""
    flags = f"--model={model}", "--served-model-name=m", "--log-format=json"
    with Served(*flags, env=env) as served:
        served.post("/v1/completions", prompt="a", max_tokens=1)
    # Warnings about a busy machine are plain lines.
    events = [json.loads(line) for line in served.lines if line.startswith("{")]
    assert all(event.keys() >= {"time", "level", "logger", "event"} for event in events)
    starting, serving, answered = (event["event"] for event in events)
    assert starting.startswith(first) and serving.startswith("serving m at http://")
    assert answered == "answered"
