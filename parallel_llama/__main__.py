"""`python -m parallel_llama` and the console script `parallel-llama`."""

import gc
import signal
import sys

# Imported objects are never freed, and scanning them for garbage takes a tenth of the start-up
# time. `cli.main` turns the collector on before the command does its work.
gc.disable()

# Before the first token there is nothing to save, so Ctrl-C gets the system's default action,
# which ends the process even inside torch's C++ code. `generate` and `chat` install handlers.
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from parallel_llama.cli.main import main  # noqa: E402
from parallel_llama.parallel.launch import unblock_ctrl_c  # noqa: E402
from parallel_llama.parallel.rank_env import end_with_parent, is_under_torchrun  # noqa: E402
from parallel_llama.parallel.torch_threads import exit_process  # noqa: E402


def entry() -> None:
    unblock_ctrl_c()
    if is_under_torchrun():
        end_with_parent()
    code = main(sys.argv[1:])
    # The command has ended: Ctrl-C would only print a traceback from Python's shutdown.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    exit_process(code)


if __name__ == "__main__":
    entry()
