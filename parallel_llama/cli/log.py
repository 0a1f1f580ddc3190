"""The log of a program that runs for long, on stderr."""

import logging

from parallel_llama.cli.terminal import printable


class _Lines(logging.Formatter):
    """A record as lines, of which only the first begins at the margin.

    Whatever text of others a record holds, it steers no terminal and passes for no other record.
    """

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record)).replace("\n", "\n  ")


def log_to_stderr() -> None:
    """Write what all loggers say from warnings on."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Lines("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
