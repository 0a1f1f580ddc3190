"""Runs a command line; exit codes are those of `parallel.failures.exit_code`."""

import gc
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from io import TextIOWrapper

import fire

from parallel_llama.cli import arguments
from parallel_llama.cli.arguments import HelpRequested, Job, Verb, in_flags, parse_flags
from parallel_llama.cli.model import LOG_DIR, SECRET_FILE
from parallel_llama.errors import UsageError, quoted
from parallel_llama.files.fields import did_you_mean
from parallel_llama.parallel.failures import DONE, WRONG_USE, exit_code
from parallel_llama.parallel.launch import run_ranks, threads_per_rank
from parallel_llama.parallel.rank_env import is_started_as_rank, use_secret_file

# Each command is a module of this package, imported only when it is needed.
VERBS = (
    "generate", "chat", "serve", "score", "bench", "plan", "reshard", "verify", "doctor",
    "completion",
)  # fmt: skip


def load_verb(name: str) -> Verb:
    verb: Verb = import_module(f"parallel_llama.cli.{name}").VERB
    return verb


def main(argv: Sequence[str]) -> int:
    """Runs a command line and returns its exit code; errors are printed to stderr."""
    # torch's store logs a warning per connection if an address has no host name.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # As on stderr, characters that the locale's encoding lacks are escaped.
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")
    return exit_code(lambda: _run(list(argv)), _give_up)


def _give_up(reason: str) -> None:
    from parallel_llama.parallel.communicators import give_up  # imports torch

    give_up(reason)


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
        gc.enable()
        return execute(job, argv)
    except HelpRequested:
        print(arguments.help_text(verb))
        return DONE
    except UsageError as error:
        raise UsageError(in_flags(str(error), verb)) from error


def _prepare(verb: Verb, argv: Sequence[str]) -> Job:
    """Checks the flags; the package `fire` then dispatches to the command's function.

    fire does not see the flags: it would parse prompts as Python, keep only the last of repeated
    flags, and report unknown flags only after the command has run.
    """
    flags = parse_flags(verb, argv)
    secret_file = flags[SECRET_FILE]
    if secret_file is not None:
        use_secret_file(secret_file)
    commands = {verb.name: lambda: verb.prepare(flags)}
    job = fire.Fire(commands, [verb.name], name="parallel-llama", serialize=lambda _: None)
    assert isinstance(job, Job)
    return replace(job, log_dir=flags[LOG_DIR])


def execute(job: Job, argv: list[str]) -> int:
    """Runs a job and returns its exit code; `argv` is the command line of every rank."""
    if job.nproc == 1 or is_started_as_rank():
        return job.run()
    threads = threads_per_rank(job.nproc)
    return run_ranks(argv, job.nproc, threads, interactive=job.interactive, log_dir=job.log_dir)


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
