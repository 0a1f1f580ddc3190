"""From argv to an exit code: 0 done, 1 failed while running, 2 wrong use, 130 interrupted."""

import json
import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

import fire

from parallel_llama.cli import arguments, bench, chat, generate, plan, reshard, score, verify
from parallel_llama.cli.arguments import HelpRequested, Verb, parse_flags
from parallel_llama.cli.ranks import Job, execute
from parallel_llama.errors import (
    CheckpointError,
    DamagedWeights,
    NumericalError,
    UsageError,
    WriteError,
)
from parallel_llama.fields import did_you_mean
from parallel_llama.parallel.failures import RankError, report_crash, report_error

DONE, FAILED, WRONG_USE, INTERRUPTED = 0, 1, 2, 130

VERBS: dict[str, Verb] = {
    module.VERB.name: module.VERB
    for module in (generate, chat, score, bench, plan, reshard, verify)
}


def main(argv: Sequence[str]) -> int:
    """Run one command line and return its exit code; what is wrong with it is said on stderr."""
    try:
        return _run(list(argv))
    except (DamagedWeights, NumericalError, WriteError, RankError) as error:
        report_error(str(error))
        return FAILED
    except (UsageError, CheckpointError) as error:
        report_error(str(error))
        return WRONG_USE
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader has enough (a pipe into head). Python would complain again as it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except Exception as error:
        report_crash(error)
        return FAILED


def _run(argv: list[str]) -> int:
    if not argv:
        print(overview(), file=sys.stderr)
        return WRONG_USE
    if argv[0] in ("-h", "--help", "help"):
        print(overview())
        return DONE
    if argv[0] == "--version":
        print(f"parallel_llama {_version()}")
        return DONE
    verb = VERBS.get(argv[0])
    if verb is None:
        raise UsageError(
            f"unknown command {arguments.shown(argv[0])}{did_you_mean(argv[0], VERBS)} "
            f"(commands: {', '.join(VERBS)})"
        )
    try:
        job = _prepare(verb, argv[1:])
    except HelpRequested:
        print(arguments.help_text(verb))
        return DONE
    return execute(job, argv)


def _prepare(verb: Verb, argv: Sequence[str]) -> Job:
    """Check the flags, then let fire bind them to the parameters of the verb's function.

    fire alone would read a prompt as Python, keep only the last of a repeated flag, and notice an
    unknown flag after the work. So it gets values that are already checked, one --name=JSON each.
    """
    command = [f"--{key}={json.dumps(value)}" for key, value in parse_flags(verb, argv).items()]
    component = fire.decorators.SetParseFn(json.loads)(verb.prepare)
    job = fire.Fire(component, command, name=verb.name, serialize=lambda _: None)
    assert isinstance(job, Job)
    return job


def overview() -> str:
    """The help of the command as a whole."""
    return "\n".join(
        [
            "usage: parallel-llama COMMAND [flags]",
            "",
            "Runs Llama-family models on any number of ranks.",
            "",
            *arguments.columns([(verb.name, verb.help) for verb in VERBS.values()]),
            "",
            "parallel-llama COMMAND --help lists a command's flags; --version says which this is.",
            "",
            "example:",
            f"  {VERBS['generate'].example}",
        ]
    )


def _version() -> str:
    try:
        return version("parallel_llama")
    except PackageNotFoundError:
        return "of a source tree that is not installed"
