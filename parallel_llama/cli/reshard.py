"""`reshard`: a model's files anew in another layout, for any number of ranks."""

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from parallel_llama.cli.arguments import JSON, Flag, Verb, filled_text, one_of, warn, whole
from parallel_llama.cli.model import find_args
from parallel_llama.cli.ranks import Job
from parallel_llama.cli.terminal import StatusLine, ctrl_c_raises, duration, size
from parallel_llama.errors import UsageError
from parallel_llama.model_files import find_model
from parallel_llama.target_folder import TargetKind, check_parts, check_target

MAX_FILES = 99_999


def prepare(
    src: str,
    dst: str,
    tp: int | None,
    format: TargetKind | None,
    dtype: str | None,
    resume: bool,
    json: bool,
) -> Job:
    """Check source and target, and return the job that writes."""
    if tp is None or format is None:
        missing = "--tp N" if tp is None else "--format meta, hf or native"
        raise UsageError(f"reshard needs {missing}")
    source, target = find_model(src), Path(dst)
    source.require_weights()
    check_target(source, target)
    check_parts(format, find_args(src), tp)
    options = {"layout": format, "n_parts": tp, "dtype": dtype, "resume": resume}
    return Job(lambda: _run(source, target, json, options))


class Progress:
    """How much is written, how fast, and how long it takes yet, on a line of the terminal."""

    def __init__(self, what: str) -> None:
        self.what, self.status = what, StatusLine(sys.stderr)
        self.total = self.before = self.done = 0
        self.began_s = 0.0

    def start(self, total: int, done: int) -> None:
        """`done` of the `total` bytes are there from an earlier run, and count for no speed."""
        self.total, self.before, self.done = total, done, done
        self.began_s = time.monotonic()

    def add(self, n_bytes: int) -> None:
        self.done += n_bytes
        self.status.show(self.line)

    def line(self) -> str:
        rate = (self.done - self.before) / max(time.monotonic() - self.began_s, 1e-3)
        left_s = max(0, self.total - self.done) / max(rate, 1)
        return (
            f"{self.what}: {size(self.done)} of {size(self.total)}, {size(rate)}/s, "
            f"{duration(left_s)} left"
        )

    def end(self) -> None:
        self.status.clear()


def _run(source: Any, target: Path, as_json: bool, options: dict[str, Any]) -> int:
    # torch comes in here: what is wrong with a command line is said without it.
    import torch

    from parallel_llama.resharding import reshard

    # Its threads would only wait beside those that read, hash and write.
    torch.set_num_threads(1)
    progress = Progress(f"writing {target}")
    ctrl_c_raises()
    try:
        result = reshard(source, target, **options, on_start=progress.start, on_bytes=progress.add)
    except KeyboardInterrupt:
        progress.end()
        warn(f"{target} is not written; the same command with --resume goes on")
        raise
    finally:
        progress.end()
    if as_json:
        print(json.dumps(asdict(result)))
    else:
        rate = size(result.bytes / max(result.seconds, 1e-3))
        print(
            f"{target}: {result.files} files, {size(result.bytes)} in {result.seconds:.1f} s "
            f"({rate}/s)"
        )
    return 0


VERB = Verb(
    "reshard",
    "Writes a model's files anew in another layout, for any number of ranks.",
    "SRC DST --tp N --format meta|hf|native [flags]",
    (
        Flag("tp", "files: for meta, of that many ranks", whole(1, MAX_FILES), "N"),
        Flag("format", "meta, hf or native", one_of("meta", "hf", "native"), "FORMAT"),
        Flag(
            "dtype",
            "float32, bfloat16, float16 or float64",
            one_of("float32", "bfloat16", "float16", "float64"),
            "DTYPE",
            default_text="as the source has it",
        ),
        Flag("resume", "go on with a run that was interrupted"),
        JSON,
    ),
    "parallel-llama reshard smollm2 smollm2-native --tp 1 --format native",
    prepare,
    positionals=(
        Flag("src", "a HF folder, a Meta folder, a native folder or a .gguf file", filled_text),
        Flag("dst", "the folder to write, which is not there yet", filled_text),
    ),
)
