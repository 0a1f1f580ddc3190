"""The log of a program that runs for long, on stderr, as lines for people or as JSON."""

import json
import logging
from typing import Any

from parallel_llama.cli.terminal import printable

FORMATS = "text", "json"


class _Lines(logging.Formatter):
    """A record as lines, of which only the first begins at the margin.

    Whatever text of others a record holds, it steers no terminal and passes for no other record.
    """

    def format(self, record: logging.LogRecord) -> str:
        told = "".join(f" {name}={value}" for name, value in _told(record).items())
        return printable(super().format(record) + told).replace("\n", "\n  ")


class _Json(logging.Formatter):
    """A record as one line of JSON, all of it ASCII."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            **_told(record),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


def log_to_stderr(form: str = "text") -> None:
    """Write what all loggers say from warnings on, and what ours say of their work."""
    handler = logging.StreamHandler()
    lines = _Lines("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(_Json() if form == "json" else lines)
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    logging.getLogger("parallel_llama").setLevel(logging.INFO)


def _told(record: logging.LogRecord) -> dict[str, Any]:
    """What a record says beside its message, by name."""
    told: dict[str, Any] = getattr(record, "told", {})
    return told
