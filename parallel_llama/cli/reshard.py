"""`reshard`: rewrites a model's files in another layout, for any number of ranks."""

import json
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

from parallel_llama.cli.arguments import JSON, Flag, Flags, Job, Verb, warn
from parallel_llama.cli.model import DOWNLOAD, args_of, found_model
from parallel_llama.cli.parsers import dtype_name, filled_text, one_of, quant_name, whole
from parallel_llama.cli.terminal import StatusLine, ctrl_c_raises, duration, size
from parallel_llama.config.adapter import load_adapter
from parallel_llama.errors import UsageError, counted
from parallel_llama.files.bounded_files import expanded
from parallel_llama.files.model_files import ModelFiles
from parallel_llama.reshard.gguf_types import BLOCK_TYPES
from parallel_llama.reshard.target_folder import (
    TargetKind,
    check_parts,
    check_target,
    target_formats,
)

MAX_FILES = 99_999

# llama.cpp's names are in upper case.
_target_quant = replace(
    quant_name,
    choices=(*quant_name.choices, *BLOCK_TYPES),
    synonyms={**quant_name.synonyms, **{name: name for name in BLOCK_TYPES}},
)


SRC: Flag[str] = Flag(
    "src", "an HF, Meta or native folder, a .gguf file, or the name of a model", filled_text
)
DST: Flag[str] = Flag(
    "dst", "the folder (for gguf, the .gguf file) to write, which must not exist", filled_text
)
TP: Flag[int | None] = Flag(
    "tp",
    "number of files; for meta, of model-parallel ranks; gguf writes one file",
    whole(1, MAX_FILES),
    "N",
)
FORMAT: Flag[TargetKind | None] = Flag(
    "format", "meta, hf, native or gguf", one_of("meta", "hf", "native", "gguf"), "FORMAT"
)
DTYPE: Flag[str | None] = Flag(
    "dtype", "float32, bfloat16, float16 or float64",
    dtype_name, "DTYPE", default_text="that of the source",
)  # fmt: skip
QUANT: Flag[str | None] = Flag(
    "quant", "for native: quantise matrices to int8, int4 or fp8, with a scale per 32 weights; "
    "for gguf: q8_0, q4_0 or q4_1, or int8 or int4; "
    "stored: keep the source's quantisation; none: decode",
    _target_quant, "FORMAT",
    default_text="stored for a quantised folder and from gguf to gguf, else none",
)  # fmt: skip
MERGE_ADAPTER: Flag[str | None] = Flag(
    "merge-adapter",
    "merge a LoRA adapter into the weights: a folder that peft saved, with adapter_config.json and "
    "adapter_model.safetensors",
    filled_text,
    "FOLDER",
)
RESUME: Flag[bool] = Flag("resume", "continue an interrupted run")


def prepare(flags: Flags) -> Job:
    """Checks source and target, and returns the job."""
    layout, n_parts = flags[FORMAT], flags[TP]
    if layout is None:
        raise UsageError("reshard needs --format meta, hf, native or gguf")
    if n_parts is None:
        if layout != "gguf":
            raise UsageError("reshard needs --tp N")
        n_parts = 1
    source, target = found_model(flags, flags[SRC]), Path(flags[DST])
    source.require_weights()
    check_target(source, target, layout)
    args = args_of(source)
    folder = flags[MERGE_ADAPTER]
    adapter = None if folder is None else load_adapter(expanded(folder), args)
    check_parts(layout, args, n_parts)
    target_formats(source, args, layout, flags[QUANT], flags[DTYPE], adapter)
    return Job(lambda: _run(source, target, layout, n_parts, flags))


class Progress:
    """A status line on the terminal: bytes written, speed, and time left."""

    def __init__(self, what: str) -> None:
        self.what, self.status = what, StatusLine(sys.stderr)
        self.n_total = self.n_earlier = self.n_done = 0
        self.start_s = 0.0

    def start(self, n_total: int, n_done: int) -> None:
        """Starts the clock; `n_done` of the `n_total` bytes were written by an earlier run."""
        self.n_total, self.n_earlier, self.n_done = n_total, n_done, n_done
        self.start_s = time.monotonic()

    def add(self, n_bytes: int) -> None:
        self.n_done += n_bytes
        self.status.show(self.line)

    def line(self) -> str:
        rate = (self.n_done - self.n_earlier) / max(time.monotonic() - self.start_s, 1e-3)
        left_s = max(0, self.n_total - self.n_done) / max(rate, 1)
        return (
            f"{self.what}: {size(self.n_done)} of {size(self.n_total)}, {size(rate)}/s, "
            f"{duration(left_s)} left"
        )

    def end(self) -> None:
        self.status.clear()


def _run(source: ModelFiles, target: Path, layout: TargetKind, n_parts: int, flags: Flags) -> int:
    # Slow to import: usage errors are reported first.
    import torch

    from parallel_llama.reshard.reshard import reshard

    # `reshard` reads, hashes and writes in its own threads.
    torch.set_num_threads(1)
    folder, progress = flags[MERGE_ADAPTER], Progress(f"writing {target}")
    ctrl_c_raises()
    try:
        result = reshard(
            source,
            target,
            layout=layout,
            n_parts=n_parts,
            dtype=flags[DTYPE],
            quant=flags[QUANT],
            merge_adapter=None if folder is None else expanded(folder),
            resume=flags[RESUME],
            on_start=progress.start,
            on_bytes=progress.add,
        )
    except KeyboardInterrupt:
        progress.end()
        warn(f"{target} is incomplete; the same command with --resume continues")
        raise
    finally:
        progress.end()
    if flags[JSON]:
        print(json.dumps(asdict(result)))
    else:
        rate = size(result.bytes / max(result.seconds, 1e-3))
        print(
            f"{target}: {counted(result.files, 'file')}, {size(result.bytes)} "
            f"in {result.seconds:.1f} s ({rate}/s)"
        )
    return 0


VERB = Verb(
    "reshard",
    "Rewrites a model's files in another layout, for any number of ranks.",
    "SRC DST --tp N --format meta|hf|native|gguf [flags]",
    (TP, FORMAT, DTYPE, QUANT, MERGE_ADAPTER, RESUME, DOWNLOAD, JSON),
    "parallel-llama reshard smollm2 smollm2-native --tp 1 --format native",
    prepare,
    (SRC, DST),
)
