"""Turns a program's exception into an exit code and a message. Imports no torch.

0 is done, 1 failed while running, 2 wrong use, 130 interrupted, and 141 means that the reader of a
pipe has gone, as for any program that SIGPIPE ends.
"""

import errno
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress

from parallel_llama.errors import (
    CheckpointError,
    DamagedWeights,
    NumericalError,
    OutOfMemory,
    UsageError,
    WriteError,
)
from parallel_llama.parallel.failures import RankError, report_crash, report_error
from parallel_llama.parallel.rank_env import is_watched, world

DONE, FAILED, WRONG_USE = 0, 1, 2
INTERRUPTED, UNHEARD = 128 + signal.SIGINT, 128 + signal.SIGPIPE

_NO_MEMORY = "no memory is left for this process; free some, or raise its limit"


def exit_code(run: Callable[[], int], give_up: Callable[[str], None]) -> int:
    """Run a program and return its exit code; errors are reported on stderr.

    Args:
        give_up: tells the ranks of other processes, which would wait for this one, why it fails.
    """

    def tell_ranks(error: Exception) -> None:
        with suppress(UsageError):  # the launcher's variables are invalid
            if world()[1] > 1 and not is_watched():
                give_up(str(error) or type(error).__name__)

    try:
        _require_streams()
        code = run()
        sys.stdout.flush()
        return code
    except (DamagedWeights, NumericalError, OutOfMemory, WriteError, RankError) as error:
        report_error(str(error))
        tell_ranks(error)
        return FAILED
    except (UsageError, CheckpointError) as error:
        report_error(str(error))
        tell_ranks(error)
        return WRONG_USE
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _give_up_stdout()
        return UNHEARD
    except MemoryError:
        report_error(_NO_MEMORY)
        return FAILED
    except OSError as error:
        if error.errno == errno.ENOMEM:
            report_error(_NO_MEMORY)
        elif error.filename is not None:
            report_crash(error)
        else:  # only stdout has no file name
            _give_up_stdout()
            report_error(f"stdout cannot be written: {error.strerror}; answers may be lost")
        return FAILED
    except Exception as error:
        report_crash(error)
        tell_ranks(error)
        return FAILED


def _require_streams() -> None:
    """Raises: WriteError if stdout or stderr is closed: a file could get its descriptor."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            raise WriteError(f"{name} is closed; send it to a file, or to /dev/null")


def _give_up_stdout() -> None:
    """Send the rest to /dev/null: Python would raise again when it closes stdout."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
