"""`python -m parallel_llama.cli.serve_rank`: a rank that the LLM of a program has started.

`parallel.launch.LocalRanks` starts it and writes the LLM's settings to its stdin, as one line of
JSON. In LLM it serves rank 0 (`engine.rank_calls.serve_rank`) until that closes. Where stdin ends,
the program has ended, and so does this.
"""

import json
import os
import sys
from threading import Thread

from parallel_llama.cli.main import exit_code
from parallel_llama.llm import LLM


def main() -> int:
    """Serve the program until it closes its LLM; the exit code."""
    settings = json.loads(sys.stdin.buffer.readline())
    Thread(target=_end_with_stdin, daemon=True).start()

    def serve() -> int:
        LLM(**settings)
        return 0

    return exit_code(serve)


def _end_with_stdin() -> None:
    # From the file itself: a thread that holds Python's buffer would be in the way of exit.
    while os.read(0, 1 << 16):
        pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
