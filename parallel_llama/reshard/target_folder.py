"""Checks the target of a conversion, and manages its temporary folder. No torch.

The temporary folder `.NAME.partial` has the folder `files`, which is renamed to the target at the
end; a journal of the tensors that are on the disk; and the lock of the writing process. For a GGUF
target, the only file in `files` is renamed. However the process ends, the target is missing or
complete, and another run can continue from the journal.
"""

import json
import logging
import os
import shutil
import socket
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from parallel_llama.config.adapter import Adapter
from parallel_llama.config.gguf_fields import written_form
from parallel_llama.config.layouts import scaled_formats, stored_formats
from parallel_llama.dtypes import QUANT_FORMATS, QuantFormat, StoredFormat, make_precision
from parallel_llama.errors import CheckpointError, UsageError, WriteError
from parallel_llama.families import parameters
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.files.bounded_files import (
    has_short_name,
    is_file,
    is_folder,
    is_there,
    resolved,
)
from parallel_llama.files.fields import json_object
from parallel_llama.files.model_files import ModelFiles
from parallel_llama.files.partial_output import changed, sync, take_lock, whole_lines
from parallel_llama.reshard.gguf_types import (
    BLOCK_TYPES,
    TYPES_OF_FORMATS,
    copies_tensors,
    require_blocks,
)

TargetKind = Literal["meta", "hf", "native", "gguf"]

logger = logging.getLogger(__name__)


def check_target(source: ModelFiles, target: Path, kind: TargetKind) -> None:
    """Refuse a target that exists, is not writable, or is inside the source.

    Raises: UsageError; UnreadableFile if the parent folder cannot be read.
    """
    parent = target.parent
    if kind == "gguf" and target.suffix != ".gguf":
        raise UsageError(f"{target}: --format gguf writes one file; use a name that ends in .gguf")
    if target.name in ("", ".."):
        raise UsageError(f"{target}: not the name of a new folder; use another path")
    if is_there(target) and target.samefile(source.path):
        raise UsageError(f"{target}: is the source itself; give the name of a new folder")
    if os.path.lexists(target):
        raise UsageError(f"{target}: already exists; give another name, or remove it first")
    if not is_folder(parent):
        raise UsageError(f"{target}: the folder {parent} does not exist; create it first")
    if is_folder(source.path) and resolved(parent).is_relative_to(resolved(source.path)):
        raise UsageError(f"{target}: is inside the source {source.path}; use a path outside it")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise UsageError(f"{target}: the folder {parent} is not writable")
    if not has_short_name(partial_path(target)):
        raise UsageError(f"{target.name[:80]}...: the name is too long; give a shorter one")


def partial_path(target: Path) -> Path:
    """The temporary folder beside a target, in which its files are written."""
    return target.parent / f".{target.name}.partial"


def check_parts(kind: TargetKind, args: ModelArgs, n_parts: int) -> None:
    """Refuse a number of files that a layout does not support.

    Raises: UsageError.
    """
    if n_parts < 1:
        raise UsageError(f"{n_parts} files: at least 1 is needed; use --tp 1 or more")
    if kind == "gguf" and n_parts > 1:
        raise UsageError(f"{n_parts} files: --format gguf writes one file; leave out --tp")
    if kind == "meta" and n_parts > args.n_heads:
        raise UsageError(
            f"{args.n_heads} query heads cannot be split over {n_parts} files; use --tp 1 to "
            f"{args.n_heads}"
        )


def default_target_quant(source: ModelFiles, args: ModelArgs) -> str:
    """The default quantisation of a native folder or a GGUF file that is written.

    'stored' for a quantised folder, else 'none'. The matrices of a GGUF file are decoded by
    default.
    """
    return "stored" if source.kind != "gguf" and stored_formats(source, args) else "none"


def merged_quant(quant: str | None) -> str:
    """The quantisation of a target with a merged adapter: by default none, because weights change.

    Raises: UsageError for --quant stored.
    """
    if quant == "stored":
        raise UsageError(
            "--quant stored and --merge-adapter: merged weights differ from the stored ones; use "
            "--quant none, or another format"
        )
    return quant or "none"


def target_formats(
    source: ModelFiles,
    args: ModelArgs,
    kind: TargetKind,
    quant: str | None,
    dtype: str | None,
    adapter: Adapter | None = None,
) -> dict[str, StoredFormat]:
    """The formats of the weights that are written quantised, by Meta's names.

    Without `quant`, a quantised folder stays quantised in a native folder or a GGUF file, unless an
    adapter is merged into it. A native folder can also keep formats that are decoded while loading.

    Raises: UsageError for formats that this model or layout does not support, or if quantised
    weights would be decoded without a requested `dtype`.
    """
    written = args
    if adapter is not None:
        written, quant = adapter.args, merged_quant(quant)
    if kind == "gguf":
        written_form(written)
        if copies_tensors(source, quant, dtype):
            return {}
    default_quant, stored = default_target_quant(source, args), stored_formats(source, args)
    scaled = scaled_formats(source, args) if kind == "native" else {}
    if quant is None:
        quant = default_quant if kind in ("native", "gguf") else "none"
        if scaled:
            quant = "stored"
    if quant == "none":
        if default_quant != "none" and dtype is None:
            keep = ", or keep the weights quantised with --format native --quant stored"
            raise UsageError(
                f"{source.path}: its weights are quantised; choose the dtype of the decoded values "
                "with --dtype" + (keep if adapter is None else "")
            )
        return {}
    if kind not in ("native", "gguf"):
        raise UsageError(
            f"--quant {quant} and --format {kind}: only native folders and GGUF files support "
            "quantised weights; use --format native or gguf"
        )
    if quant in BLOCK_TYPES:
        if kind != "gguf":
            raise UsageError(
                f"--quant {quant} and --format {kind}: only GGUF files have this type; use "
                "--format gguf, or --quant int8 or int4"
            )
        require_blocks(written, quant)
        return {}
    formats: dict[str, StoredFormat] = {}
    if quant == "stored" and scaled:
        formats |= scaled
        if not stored:
            return formats
    precision = make_precision(written, "float32", "cpu", quant, stored)
    for param in parameters(written):
        form = precision.form_of(param.kind, param.name)
        if isinstance(form, QuantFormat):
            if kind == "gguf" and form not in TYPES_OF_FORMATS:
                names = ", ".join(known.name for known in TYPES_OF_FORMATS)
                quants = [
                    name for name, known in QUANT_FORMATS.items() if known in TYPES_OF_FORMATS
                ]
                raise UsageError(
                    f"{param.name}: is in {form.name}, and written GGUF files support {names}; "
                    f"use --quant {' or '.join(quants)}, or --quant none with a --dtype"
                )
            formats[param.name] = form
    return formats


_LOCK, _JOURNAL, _FILES = "lock", "journal.jsonl", "files"
_MAX_LOCK_BYTES = 1000


def partial_bytes(target: Path) -> int:
    """Disk space that an unfinished run has already allocated."""
    statuses = (path.stat() for path in (partial_path(target) / _FILES).rglob("*") if is_file(path))
    return sum(stat.st_blocks * 512 for stat in statuses)


class PartialFolder:
    """The partial folder of one target, locked by this process until `close`.

    `plan` describes source and target; `resume` continues an unfinished run with an equal plan.

    Raises: UsageError if another process holds the lock, or there is an unfinished run and it
    cannot be continued or `resume` is False.
    """

    def __init__(self, target: Path, plan: Mapping[str, Any], resume: bool) -> None:
        self.target, self.path = target, partial_path(target)
        self.files, self._journal = self.path / _FILES, self.path / _JOURNAL
        self._lock = _lock_folder(self.path, target)
        try:
            _write_holder(self._lock)
            self.done = self._begin(json.loads(json.dumps(plan)), resume)
        except BaseException:
            self.close()
            raise

    def record(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Add tensors that are durable on the disk to the journal, for a later run to skip."""
        text = "".join(json.dumps(line) + "\n" for line in lines)
        with self._journal.open("ab") as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())

    def commit(self, file: str | None = None) -> None:
        """Rename the folder of files, or the one `file` in it, to the target.

        The rename is atomic and durable.
        """
        for path in sorted(self.files.rglob("*")):
            sync(path)
        sync(self.files)
        if os.path.lexists(self.target):
            raise WriteError(
                f"{self.target}: was created meanwhile; move it away and run again with --resume"
            )
        if file is None:
            self.files.rename(self.target)
        else:
            # The journal describes a file that is about to leave the folder.
            self._journal.unlink()
            sync(self.path)
            (self.files / file).rename(self.target)
        sync(self.target.parent)
        shutil.rmtree(self.path, ignore_errors=True)

    def close(self) -> None:
        """Release the lock; the files stay for --resume."""
        os.close(self._lock)

    def _begin(self, plan: Mapping[str, Any], resume: bool) -> list[dict[str, Any]]:
        """The journal of the run that is continued; empty for a new run."""
        if not is_there(self.files):
            self._journal.unlink(missing_ok=True)  # left by a run that has renamed its files
        if is_there(self._journal):
            if not resume:
                raise UsageError(
                    f"{self.path}: has an unfinished run; continue it with --resume, or remove the "
                    "folder"
                )
            lines = _read_lines(self._journal)
            if lines:
                _require_same(lines[0], plan, self.path)
                return lines[1:]
        self.files.mkdir(exist_ok=True)
        self._journal.unlink(missing_ok=True)
        self.record([plan])
        sync(self.path)
        return []


def _lock_folder(folder: Path, target: Path) -> int:
    """A descriptor with the lock of the folder; the system releases it when the process ends.

    On a file system without locks, the descriptor has none.
    """
    while True:
        try:
            folder.mkdir(exist_ok=True)
        except FileExistsError:
            raise UsageError(
                f"{folder}: is not a folder; move it away, because the files of {target.name} are "
                "first written to a folder of this name"
            ) from None
        try:
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except FileNotFoundError:  # the previous holder has just removed the folder
            continue
        if not _take_or_warn(lock, target):
            holder = os.pread(lock, _MAX_LOCK_BYTES, 0).decode(errors="replace").strip()
            os.close(lock)
            raise UsageError(
                f"{target}: is being written by {holder or 'another process'}; wait for it, or "
                "stop it and run again with --resume"
            )
        if _is_at(lock, folder / _LOCK):
            return lock
        os.close(lock)  # the folder of this lock was removed


def _take_or_warn(lock: int, target: Path) -> bool:
    """Whether the lock was taken, or the file system has no locks."""
    try:
        return take_lock(lock)
    except OSError as error:
        logger.warning(
            "%s: written without a lock (%s); do not start a second reshard to this target",
            target, error.strerror,
        )  # fmt: skip
        return True


def _write_holder(lock: int) -> None:
    """Write the holder's name into the lock file, for the error of a second writer."""
    since = time.strftime("%Y-%m-%d %H:%M:%S %z")
    text = f"process {os.getpid()} on {socket.gethostname()} since {since}\n"
    os.truncate(lock, 0)
    os.pwrite(lock, text.encode(), 0)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _read_lines(journal: Path) -> list[dict[str, Any]]:
    """The complete lines of a journal; truncates an incomplete last line that a kill left."""
    lines = list(whole_lines(journal))
    os.truncate(journal, sum(map(len, lines)))
    try:
        return [json_object(journal, line) for line in lines]
    except CheckpointError as error:
        raise UsageError(f"{error}; remove {journal.parent}") from error


def _require_same(before: Mapping[str, Any], now: Mapping[str, Any], where: Path) -> None:
    key = changed(before, now)
    if key is None:
        return
    was, is_now = before.get(key), now.get(key)
    if isinstance(was, dict) and isinstance(is_now, dict) and (part := changed(was, is_now)):
        key, was, is_now = f"{key} {part}", was.get(part), is_now.get(part)
    raise UsageError(
        f"{where}: the unfinished run had {key} {_shown(was)}, and this one has "
        f"{_shown(is_now)}; use the same source and options, or remove the folder to start again"
    )


def _shown(value: object) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
