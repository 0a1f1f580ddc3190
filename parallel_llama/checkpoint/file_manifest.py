"""Compares the files of a folder with its manifest, or with the checklists of Meta's downloads."""

import hashlib
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from parallel_llama.checkpoint.manifest import (
    MANIFEST,
    FileEntry,
    Manifest,
    hash_file,
    read_manifest,
)
from parallel_llama.errors import (
    CheckpointError,
    DamagedWeights,
    UnreadableFile,
    UsageError,
    listed,
)
from parallel_llama.files.bounded_files import is_file, is_folder, read_bytes
from parallel_llama.files.gguf_header import gguf_parts
from parallel_llama.files.model_files import TOKENIZER_FILES, find_model, lies_within

WEIGHT_SUFFIXES = (".safetensors", ".pth", ".gguf", ".bin", ".pt")
# Files with these suffixes change the model or its output, so an unlisted one is an error.
OWN_SUFFIXES = (*WEIGHT_SUFFIXES, ".json", ".jinja", ".model")

# The MD5 sums of Meta's downloads.
CHECKLISTS = ("checklist.chk", "tokenizer_checklist.chk")
MAX_CHECKLIST_BYTES = 1 << 20

_LINE = re.compile(r"([0-9a-fA-F]{32}) [ *]([^/\\\0]+)")


@dataclass
class Report:
    """The result of a check.

    Args:
        files: The number of files, without the manifest.
        tensors: The number of tensors.
        hashed: The number of files and tensors that were hashed.
        bytes: The size of all files, without the manifest.
        problems: The faults.
        notes: Remarks that are not faults.
    """

    files: int = 0
    tensors: int = 0
    hashed: int = 0
    bytes: int = 0
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems

    @contextmanager
    def noting(self, where: object) -> Iterator[None]:
        """Records as a problem any exception that a damaged file causes in a reader.

        Raises: UnreadableFile, because an unreadable file may be undamaged.
        """
        try:
            yield
        except UnreadableFile:
            raise
        except (CheckpointError, UsageError) as error:
            self.problems.append(str(error))
        except Exception as error:  # damaged bytes can raise nearly anything
            reason = (str(error).strip().splitlines() or [""])[0][:300]
            self.problems.append(f"{where}: cannot be read: {type(error).__name__} {reason}")


def present_files(path: Path) -> dict[str, int]:
    """Sizes by name: of a folder's files except its manifest, or of a GGUF file's parts."""
    if is_folder(path):
        folder, paths = path, list(path.rglob("*"))
    else:
        folder, paths = path.parent, [path.with_name(name) for name in gguf_parts(path.name)]
    return {
        file.relative_to(folder).as_posix(): file.stat().st_size
        for file in sorted(paths)
        if is_file(file) and file != folder / MANIFEST
    }


def damaged_files(
    folder: Path,
    manifest: Manifest,
    names: Collection[str],
    present: Collection[str],
    report: Report,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> list[str]:
    """Compares files with a manifest. Returns: the names of files that have the right size and
    a different hash; these are not reported.

    Reports files that are missing, outside the folder or of a different size, and files in
    `present` that the manifest does not list. An unlisted file is a problem if it could change the
    model, else a note.
    """
    damaged = []
    for name in names:
        with report.noting(folder / name):
            _require_size(folder, name, manifest.files[name])
            if hash_file(folder / name, on_bytes) != manifest.files[name].blake3:
                damaged.append(name)
            report.hashed += 1
    for name in sorted(set(present) - set(manifest.files)):
        line = f"{name}: not in {MANIFEST}"
        if Path(name).suffix.lower() in OWN_SUFFIXES or Path(name).name in TOKENIZER_FILES:
            report.problems.append(f"{line}; remove it, or write the folder again")
        else:
            report.notes.append(line)
    return damaged


def _require_size(folder: Path, name: str, entry: FileEntry) -> None:
    path = folder / name
    if not lies_within(folder, name):
        raise CheckpointError(
            f"{path}: a link leads outside the folder; replace the link with the file"
        )
    if not is_file(path):
        raise CheckpointError(f"{path}: missing; {MANIFEST} lists it")
    size = path.stat().st_size
    if size != entry.bytes:
        fault = "truncated" if size < entry.bytes else "too long"
        raise CheckpointError(f"{path}: {fault}: has {size} bytes, expected {entry.bytes}")


def require_whole(
    model: str,
    *,
    weights: bool = True,
    part: slice = slice(None),
    on_bytes: Callable[[int], None] = lambda _: None,
) -> None:
    """Check the files of a model against its manifest before the model is used.

    `weights` includes weight files, and `part` selects a slice of the list of files; `on_bytes` is
    called with the size of each piece that is read.

    Raises: UsageError if the folder has no manifest; DamagedWeights naming the damaged and missing
    files.
    """
    folder = Path(model) if is_folder(Path(model)) else find_model(model).path
    try:
        manifest = read_manifest(folder) if is_folder(folder) else None
    except UnreadableFile:
        raise
    except CheckpointError as error:
        raise DamagedWeights(str(error)) from error
    if manifest is None:
        raise UsageError(
            f"{folder}: has no {MANIFEST} to verify against; write the model with reshard first, "
            "or leave verify out"
        )
    report = Report()
    chosen = [
        name
        for name in manifest.files
        if weights or Path(name).suffix.lower() not in WEIGHT_SUFFIXES
    ]
    present = present_files(folder)
    damaged = damaged_files(folder, manifest, chosen[part], present, report, on_bytes)
    faults = report.problems + [f"{folder / name}: damaged" for name in damaged]
    if faults:
        raise DamagedWeights(
            f"{listed(faults)}; fetch or write the model again (verify says where the damage is)"
        )


def read_checklist(path: Path) -> dict[str, str]:
    """The MD5 sum of each file that Meta's checklist.chk lists, one `sum  name` a line.

    Raises: CheckpointError for a line of another form, or a name that is not a plain file name.
    """
    text = read_bytes(path, MAX_CHECKLIST_BYTES).decode("utf-8", "replace")
    sums = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        match = _LINE.fullmatch(line.rstrip())
        if match is None or match[2] in (".", ".."):
            raise CheckpointError(f"{path}, line {number}: not an MD5 sum and a plain file name")
        sums[match[2]] = match[1].lower()
    return sums


def check_listed_files(path: Path, on_bytes: Callable[[int], None], report: Report) -> None:
    """Report every file of a checklist that is missing or damaged.

    MD5 sums detect accidental damage only, because they can be forged.

    Raises: CheckpointError as `read_checklist`.
    """
    folder = path.parent
    for name, expected in read_checklist(path).items():
        file = folder / name
        with report.noting(file):
            if not lies_within(folder, name) or not is_file(file):
                raise CheckpointError(f"{file}: missing; {path.name} lists it")
            if hash_file(file, on_bytes, hasher=hashlib.md5(usedforsecurity=False)) != expected:
                raise CheckpointError(f"{file}: damaged: its MD5 sum is not the one in {path.name}")
            report.hashed += 1
