"""The server's log on stderr, as text or JSON."""

import json
import logging
from typing import Any

from parallel_llama.errors import escaped

FORMATS = "text", "json"


class _TextFormatter(logging.Formatter):
    """A record as text: control characters are escaped, and lines after the first are indented.

    So client text in a record can neither control the terminal nor imitate another record.
    """

    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {name}={value}" for name, value in _fields(record).items())
        return escaped(super().format(record) + fields).replace("\n", "\n  ")


class _JSONFormatter(logging.Formatter):
    """A record as one line of ASCII JSON."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


def log_to_stderr(form: str = "text") -> None:
    """Logs to stderr: warnings of all loggers, and messages of the package from level INFO on."""
    handler = logging.StreamHandler()
    lines = _TextFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(_JSONFormatter() if form == "json" else lines)
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    logging.getLogger("parallel_llama").setLevel(logging.INFO)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    """The fields of a record in addition to its message."""
    fields: dict[str, Any] = getattr(record, "fields", {})
    return fields
