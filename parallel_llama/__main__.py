"""`python -m parallel_llama` and the console script `parallel-llama`."""

import gc
import signal
import sys

# What is imported lives on; to look through it for garbage, again and again, takes a tenth of the
# time of the start. `cli.main` turns the collector on for the work.
gc.disable()

# Until tokens flow a Ctrl-C has nothing to save, and it must be heard inside torch's C++ too: the
# process just ends, as the system has it. `generate` and `chat` put their own handlers in place.
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from parallel_llama.cli.main import main  # noqa: E402
from parallel_llama.parallel.launch import hear_ctrl_c  # noqa: E402
from parallel_llama.parallel.rank_env import end_with_parent, is_under_torchrun  # noqa: E402


def entry() -> None:
    hear_ctrl_c()
    if is_under_torchrun():
        end_with_parent()
    code = main(sys.argv[1:])
    # All is said: a Ctrl-C from here on would only end Python's own cleaning up with a traceback.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(code)


if __name__ == "__main__":
    entry()
