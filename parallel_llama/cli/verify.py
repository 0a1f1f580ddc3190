"""`verify`: checks a model's files for damage, and compares two models."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from parallel_llama.cli.arguments import JSON, Flag, Flags, Job, Verb
from parallel_llama.cli.model import DOWNLOAD, found_model
from parallel_llama.cli.parsers import filled_text
from parallel_llama.cli.terminal import BOLD, GREEN, RED, Activity, painted, size
from parallel_llama.errors import counted, escaped, quoted
from parallel_llama.files.bounded_files import is_folder

if TYPE_CHECKING:
    from parallel_llama.checkpoint.file_manifest import Report

MAX_LINES = 100

DIR: Flag[str] = Flag("dir", "the folder, .gguf file or name of the model to check", filled_text)
AGAINST: Flag[str | None] = Flag(
    "against", "a model in any layout that must have the same weights", filled_text, "DIR2"
)


def prepare(flags: Flags) -> Job:
    """Checks that the models exist, and returns the job."""
    for model in (flags[DIR], flags[AGAINST]):
        if model is not None and not is_folder(Path(model)):
            found_model(flags, model).require_weights()
    return Job(lambda: _verify(flags[DIR], flags[AGAINST], flags[JSON]))


def _verify(model: str, against: str | None, as_json: bool) -> int:
    # Imports torch, which is slow: usage errors are reported first.
    from parallel_llama.checkpoint.verify import verify

    n_read = 0

    def show_progress(n_bytes: int) -> None:
        nonlocal n_read
        n_read += n_bytes
        progress.what = f"verifying {model}: {size(n_read)}"

    with Activity(f"verifying {model}", sys.stderr) as progress:
        report = verify(model, against, show_progress)
    if as_json:
        keys = ("ok", "files", "tensors", "hashed", "bytes", "problems", "notes")
        print(json.dumps({key: getattr(report, key) for key in keys}), flush=True)
    else:
        print("\n".join(_lines(model, report, against)), flush=True)
    return 0 if report.ok else 1


def _lines(model: str, report: "Report", against: str | None) -> list[str]:
    lines = [f"note: {escaped(note)}" for note in report.notes[:MAX_LINES]]
    bad = painted("bad", RED, sys.stdout)
    lines += [f"{bad}: {escaped(problem)}" for problem in report.problems[:MAX_LINES]]
    if len(report.problems) > MAX_LINES:
        lines.append(f"... and {len(report.problems) - MAX_LINES} more; --json lists all")
    count = len(report.problems)
    verdict = (
        painted("whole", GREEN, sys.stdout)
        if report.ok
        else painted(counted(count, "problem"), BOLD, sys.stdout)
    )
    if report.ok and against is not None:
        verdict += f", the same as {quoted(against)}"
    hashed = f"{report.hashed} hashes compared" if report.hashed else "no manifest: structure only"
    contents = f"{counted(report.files, 'file')}, {counted(report.tensors, 'tensor')}"
    return [
        *lines,
        f"{quoted(model)}: {verdict} ({contents}, {size(report.bytes)}, {hashed})",
    ]


VERB = Verb(
    "verify",
    "Checks a model's files against its manifest, and lists what is damaged.",
    "DIR [--against DIR2] [--json]",
    (AGAINST, DOWNLOAD, JSON),
    "parallel-llama verify /path/to/model",
    prepare,
    (DIR,),
)
