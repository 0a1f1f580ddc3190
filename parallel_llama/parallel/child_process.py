"""How this package starts its modules as child processes. Does not import torch."""

import os
import site
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from parallel_llama.parallel.failures import RankError

# For Python 3.10, which has no -P: with -c, the first entry of sys.path is the current folder.
_RUN_MODULE = (
    "import sys; del sys.path[0]; import runpy; sys.argv[:2] = []; "
    "runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
)


def module_command(module: str, *arguments: str) -> list[str]:
    """A command that runs `python -m module *arguments` without importing from the current folder.

    The current folder may be a model's folder, and Python files in it must not run.
    """
    if sys.version_info >= (3, 11):
        return [sys.executable, "-P", "-m", module, *arguments]
    return [sys.executable, "-c", _RUN_MODULE, "-m", module, *arguments]


def python_path() -> str:
    """PYTHONPATH for a child process, which imports the package from the folder of this process.

    That folder comes first, unless Python searches it anyway: site-packages before the standard
    library would hide modules of the standard library.
    """
    folder = str(Path(__file__).parents[2])
    is_searched = folder in (*site.getsitepackages(), site.getusersitepackages())
    paths = "" if is_searched else folder, os.environ.get("PYTHONPATH")
    return os.pathsep.join(filter(None, paths))


@contextmanager
def starting(what: str) -> Iterator[None]:
    """Reports a system error as a failure to start child processes.

    Args:
        what: the processes, as the subject of the message.

    Raises: RankError for an OSError, such as a limit of processes that is reached.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror if error.strerror and error.filename is None else error
        raise RankError(
            f"{what} cannot be started: {reason}; parallel-llama doctor shows the limits of "
            "processes and open files, and whether temporary files can be written"
        ) from error
