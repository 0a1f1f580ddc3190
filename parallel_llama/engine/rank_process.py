"""`python -m parallel_llama.engine.rank_process`: a rank above 0, started by an LLM's Ranks.

It reads its LLMConfig from stdin, as one line of JSON, and serves rank 0 until rank 0 closes. It
ends when stdin ends: then the program that started it has ended.
"""

import os
import sys
from threading import Thread

from parallel_llama.engine import rank_rpc
from parallel_llama.engine.llm_config import LLMConfig
from parallel_llama.engine.ranks import Ranks
from parallel_llama.engine.setup import ModelSetup
from parallel_llama.parallel.communicators import give_up
from parallel_llama.parallel.failures import exit_code


def main() -> int:
    """Returns: the exit code."""
    config = LLMConfig.from_json(sys.stdin.buffer.readline())
    Thread(target=_end_with_stdin, daemon=True).start()

    def serve() -> int:
        ranks = Ranks(ModelSetup(config))
        try:
            ranks.start()
            rank_rpc.serve_rank(ranks.engine)
        finally:
            ranks.end()
        return 0

    return exit_code(serve, give_up)


def _end_with_stdin() -> None:
    # From the file itself: a thread that holds Python's buffer would block the exit.
    while os.read(0, 1 << 16):
        pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
