"""Reads the files in launch/ and parses the command lines in them."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from commands import ROOT
from torch.distributed.run import get_args_parser

from parallel_llama.cli.arguments import Flags, parse_flags
from parallel_llama.cli.main import load_verb
from parallel_llama.serve.access import OPEN
from parallel_llama.serve.app import OPERATIONS

LAUNCH = ROOT / "launch"
# Paths that a probe can request: without a key, with the method GET.
PROBES = {each.path for each in OPERATIONS if each.method == "GET"} & OPEN


def documents(path: str) -> list[Any]:
    """The YAML documents of a file below launch/."""
    return list(yaml.safe_load_all((LAUNCH / path).read_text()))


def parsed(argv: Sequence[str]) -> Flags:
    """The flags of a command line of parallel-llama, without its first word.

    Raises: UsageError as the command itself.
    """
    return parse_flags(load_verb(argv[0]), argv[1:])


def under_torchrun(argv: Sequence[str]) -> tuple[Any, list[str]]:
    """What torchrun makes of its arguments, and the command line of each rank."""
    torchrun = get_args_parser().parse_args(list(argv))
    assert torchrun.module and torchrun.training_script == "parallel_llama"
    return torchrun, torchrun.training_script_args


def instructions(path: Path) -> Iterator[tuple[str, str]]:
    """The name and the text of each instruction of a Dockerfile."""
    text = re.sub(r"^#.*\n", "", path.read_text(), flags=re.M)
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        if line.strip():
            name, _, rest = line.partition(" ")
            yield name, rest.strip()
