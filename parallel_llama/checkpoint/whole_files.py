"""Are the files of a folder those of its manifest: names, sizes, hashes? Nothing is parsed."""

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
from parallel_llama.files.bounded_files import is_file, is_folder
from parallel_llama.files.model_files import TOKENIZER_FILES, find_model, lies_within

WEIGHT_SUFFIXES = (".safetensors", ".pth", ".gguf", ".bin", ".pt")
# A file of one of these kinds changes what the model is or says; one that nobody listed is wrong.
OWN_SUFFIXES = (*WEIGHT_SUFFIXES, ".json", ".jinja", ".model")


@dataclass
class Report:
    """What was looked at and what is wrong with it.

    `files` and `bytes` count the files that are there, but for the manifest; `tensors` those of
    the model; `hashed` the files and tensors whose hash was compared. `notes` are no faults.
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
        """Turn whatever a damaged file makes the readers raise into a problem.

        Raises: UnreadableFile, which says nothing of what the file holds.
        """
        try:
            yield
        except UnreadableFile:
            raise
        except (CheckpointError, UsageError) as error:
            self.problems.append(str(error))
        except Exception as error:  # no reader can foresee all that damaged bytes can do
            reason = (str(error).strip().splitlines() or [""])[0][:300]
            self.problems.append(f"{where}: cannot be read: {type(error).__name__} {reason}")


def present_files(path: Path) -> dict[str, int]:
    """Sizes of all files in a folder, but for its manifest, or of the one file of a model."""
    folder, paths = (path, list(path.rglob("*"))) if is_folder(path) else (path.parent, [path])
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
    """Those of some files whose contents are not the manifest's; none of them is in the report.

    Files that are missing, lead out of the folder or have another size are problems of the report,
    and so are those present that the manifest does not list, if a model could be read from them.
    """
    damaged = []
    for name in names:
        with report.noting(folder / name):
            _require_there(folder, name, manifest.files[name])
            if hash_file(folder / name, on_bytes) != manifest.files[name].blake3:
                damaged.append(name)
            report.hashed += 1
    for name in sorted(set(present) - set(manifest.files)):
        line = f"{name}: not in {MANIFEST}"
        if Path(name).suffix.lower() in OWN_SUFFIXES or Path(name).name in TOKENIZER_FILES:
            report.problems.append(f"{line}; remove it, or write the folder anew")
        else:
            report.notes.append(line)
    return damaged


def _require_there(folder: Path, name: str, entry: FileEntry) -> None:
    path = folder / name
    if not lies_within(folder, name):
        raise CheckpointError(f"{path}: leads out of the folder; put the file itself into it")
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
    """Check the files of a model before it is used: `part` of them, with or without the weights.

    Raises: UsageError if there is no manifest to check against; DamagedWeights that names what is
    damaged or missing.
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
