"""`python -m parallel_llama.cli.serve_engine FD LOG_FORMAT`: a server's engine.

The server's front starts it. It reads the settings of its LLM from stdin, as one line of JSON,
starts the other ranks, and serves the front through the socket with that number until it goes.
"""

import json
import socket
import sys

from parallel_llama.cli.log import log_to_stderr
from parallel_llama.cli.main import exit_code
from parallel_llama.llm import LLM
from parallel_llama.parallel.place import end_with_parent
from parallel_llama.serve.engine_process import EngineProcess
from parallel_llama.serve.wire import FrameSocket


def main() -> int:
    """Serve the front until it goes; the exit code."""
    end_with_parent()
    log_to_stderr(sys.argv[2])
    settings = json.loads(sys.stdin.buffer.readline())

    def serve() -> int:
        with socket.socket(fileno=int(sys.argv[1])) as own, LLM(**settings) as llm:
            EngineProcess(llm, FrameSocket(own)).run()
        return 0

    return exit_code(serve)


if __name__ == "__main__":
    sys.exit(main())
