"""From argv to an exit code.

0 is done, 1 failed while running, 2 wrong use, 130 interrupted, and 141 says that the reader of a
pipe has gone, as of any program that the system ends for it.
"""

import errno
import gc
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module

import fire

from parallel_llama.cli import arguments
from parallel_llama.cli.arguments import HelpRequested, Verb, parse_flags
from parallel_llama.cli.ranks import Job, execute
from parallel_llama.errors import (
    CheckpointError,
    DamagedWeights,
    NumericalError,
    OutOfMemory,
    UsageError,
    WriteError,
    quoted,
)
from parallel_llama.files.fields import did_you_mean
from parallel_llama.parallel.failures import RankError, report_crash, report_error
from parallel_llama.parallel.place import is_watched, world

DONE, FAILED, WRONG_USE = 0, 1, 2
INTERRUPTED, UNHEARD = 128 + signal.SIGINT, 128 + signal.SIGPIPE

_NO_MEMORY = "no memory is left for this process; free some, or raise its limit"

# Each is a module of this package, and imported only when it is called.
VERBS = ("generate", "chat", "serve", "score", "bench", "plan", "reshard", "verify", "completion")


def load_verb(name: str) -> Verb:
    """One of VERBS."""
    verb: Verb = import_module(f"parallel_llama.cli.{name}").VERB
    return verb


def main(argv: Sequence[str]) -> int:
    """Runs a command line and returns its exit code; errors are printed to stderr."""
    # torch's store logs a warning per connection if an address has no host name.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    return exit_code(lambda: _run(list(argv)))


def exit_code(run: Callable[[], int]) -> int:
    """Run something and return its exit code; what goes wrong is said on stderr."""
    try:
        _require_streams()
        code = run()
        sys.stdout.flush()
        return code
    except (DamagedWeights, NumericalError, OutOfMemory, WriteError, RankError) as error:
        report_error(str(error))
        _tell_ranks(error)
        return FAILED
    except (UsageError, CheckpointError) as error:
        report_error(str(error))
        _tell_ranks(error)
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
        else:  # every file has a name but this one
            _give_up_stdout()
            report_error(f"stdout cannot be written: {error.strerror}; answers may be lost")
        return FAILED
    except Exception as error:
        report_crash(error)
        _tell_ranks(error)
        return FAILED


def _tell_ranks(error: Exception) -> None:
    """Tell the ranks of other processes that this one fails, where they would wait for it."""
    with suppress(UsageError):  # about the very variables that say which rank this is
        if world()[1] > 1 and not is_watched():
            from parallel_llama.parallel.groups import give_up  # torch, for this alone

            give_up(str(error) or type(error).__name__)


def _require_streams() -> None:
    """Raises: WriteError if there is nowhere to say anything, before a file can take that place."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            raise WriteError(f"{name} is closed; send it to a file, or to /dev/null")


def _give_up_stdout() -> None:
    """Send the rest to /dev/null: Python would complain again as it closes stdout."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _run(argv: list[str]) -> int:
    if not argv:
        print(overview(), file=sys.stderr)
        return WRONG_USE
    if argv[0] in ("-h", "--help", "help"):
        print(overview())
        return DONE
    if argv[0] in ("-V", "--version"):
        print(f"parallel_llama {_version()}")
        return DONE
    if argv[0] not in VERBS:
        raise UsageError(
            f"unknown command {quoted(argv[0])}{did_you_mean(argv[0], VERBS)} "
            f"(commands: {', '.join(VERBS)})"
        )
    verb = load_verb(argv[0])
    try:
        job = _prepare(verb, argv[1:])
    except HelpRequested:
        print(arguments.help_text(verb))
        return DONE
    gc.enable()
    return execute(job, argv)


def _prepare(verb: Verb, argv: Sequence[str]) -> Job:
    """Checks the flags, and lets fire dispatch to the verb's function.

    fire does not see the flags: it would parse prompts as Python, keep only the last of repeated
    flags, and report unknown flags only after the work.
    """
    flags = parse_flags(verb, argv)
    commands = {verb.name: lambda: verb.prepare(flags)}
    job = fire.Fire(commands, [verb.name], name="parallel-llama", serialize=lambda _: None)
    assert isinstance(job, Job)
    return job


def overview() -> str:
    """The help of the program."""
    verbs, width = [load_verb(name) for name in VERBS], arguments.terminal_width()
    return "\n".join(
        [
            "usage: parallel-llama COMMAND [flags]",
            "",
            "Runs Llama-family models on any number of ranks.",
            "",
            *arguments.columns([(verb.name, verb.help) for verb in verbs], width),
            "",
            *arguments.columns(
                [
                    ("-V, --version", "show the version"),
                    ("-h, --help", "show this help; parallel-llama COMMAND --help lists its flags"),
                ],
                width,
            ),
            "",
            "example:",
            *arguments.wrapped_command(verbs[0].example, width),
        ]
    )


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version  # slow, and rarely needed

    try:
        return version("parallel_llama")
    except PackageNotFoundError:
        return "(source tree, not installed)"
