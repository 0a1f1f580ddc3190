"""The engines of one comparison: what --engines names, and whether each can run here."""

import subprocess
import sys
from argparse import ArgumentTypeError
from dataclasses import dataclass
from importlib.util import find_spec

from launch.bench.engines import KINDS, EngineKind

_LOOK_LIMIT_S = 60


@dataclass(frozen=True)
class Contender:
    """One engine as --engines names it, and the Python that it runs in, where that is known."""

    name: str
    kind: EngineKind
    n_ranks: int = 1
    python: str | None = sys.executable

    def n_threads(self, n_cores: int) -> int:
        """Threads of each rank, so that all ranks together have one for each core."""
        return max(1, n_cores // self.n_ranks)


def contenders(names: str) -> list[Contender]:
    """What --engines names, in that order.

    Raises: ArgumentTypeError for an unknown engine, a bad number of ranks, or one named twice.
    """
    found = [_contender(name) for name in names.split(",")]
    if len({each.name for each in found}) < len(found):
        raise ArgumentTypeError(f"{names!r} names an engine twice")
    return found


def _contender(name: str) -> Contender:
    base, colon, ranks = name.partition(":")
    if base not in KINDS:
        raise ArgumentTypeError(f"{base!r} is no engine; use {', '.join(KINDS)}, as a,b,c")
    kind = KINDS[base]
    if not colon:
        return Contender(name, kind)
    if not kind.may_have_ranks:
        raise ArgumentTypeError(f"{name!r}: only ours takes a number of ranks, as in ours:2")
    if not (ranks.isascii() and ranks.isdigit() and int(ranks) > 0):
        raise ArgumentTypeError(f"{name!r}: {ranks!r} is no number of ranks; use 1 or more")
    return Contender(name, kind, int(ranks))


def absence(contender: Contender) -> str | None:
    """Why an engine cannot run, and what to install; None where it can."""
    kind, python = contender.kind, contender.python
    if python is None:
        return f"no Python of its own was given; {kind.remedy}"
    missing = [package for package in kind.packages if not _has(python, package)]
    if missing:
        return f"{python} has no {', '.join(missing)}; {kind.remedy}"
    return None


def _has(python: str, package: str) -> bool:
    if python == sys.executable:
        return find_spec(package) is not None
    look = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    try:
        done = subprocess.run([python, "-c", look], check=False, timeout=_LOOK_LIMIT_S)
    except OSError:
        return False
    return done.returncode == 0
