"""`python -m parallel_llama.cli.serve_engine FD LOG_FORMAT`: a server's engine.

The server's front starts it. It reads its LLMConfig from stdin, as one line of JSON, starts the
other ranks, and serves the front through the socket of that number until the front closes it.
"""

import socket
import sys

from parallel_llama.cli.log import log_to_stderr
from parallel_llama.engine.llm_config import LLMConfig
from parallel_llama.engine_process import EngineProcess
from parallel_llama.llm import LLM
from parallel_llama.parallel.communicators import give_up
from parallel_llama.parallel.failures import exit_code
from parallel_llama.parallel.rank_env import end_with_parent
from parallel_llama.serve.wire import FrameSocket


def main() -> int:
    """Returns: the exit code."""
    end_with_parent()
    log_to_stderr(sys.argv[2])
    config = LLMConfig.from_json(sys.stdin.buffer.readline())

    def serve() -> int:
        with socket.socket(fileno=int(sys.argv[1])) as own, LLM(config) as llm:
            EngineProcess(llm.ranks, FrameSocket(own)).run()
        return 0

    return exit_code(serve, give_up)


if __name__ == "__main__":
    sys.exit(main())
