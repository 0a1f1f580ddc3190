"""One engine in a process of its own: it loads the model, then answers a line with a line.

    python -m launch.bench.worker ENGINE SETUP

The first line it writes says that it is ready; then each line it reads holds prompts, and each it
writes a run. It ends when its input does.
"""

import json
import os
import sys
from collections.abc import Iterable
from dataclasses import asdict
from importlib import import_module
from typing import Any, TextIO

from launch.bench.engines import KINDS, Engine, Setup


def private_stdout() -> TextIO:
    """The pipe to the parent; what libraries print to stdout goes to stderr from here on."""
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return channel


def serve(engine: Engine, asked: Iterable[str], channel: TextIO) -> None:
    def say(message: dict[str, Any]) -> None:
        channel.write(json.dumps(message) + "\n")
        channel.flush()

    say({"versions": engine.versions})
    for line in asked:
        say(asdict(engine.answer(**json.loads(line))))


def main() -> None:
    name, setup = sys.argv[1:]
    channel = private_stdout()
    engine = import_module(KINDS[name].module).start(Setup(**json.loads(setup)))
    if engine is not None:
        serve(engine, sys.stdin, channel)
        engine.close()


if __name__ == "__main__":
    main()
