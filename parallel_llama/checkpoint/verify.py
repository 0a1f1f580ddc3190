"""Is what lies on the disk the model that was written? Its files, structure and tensors.

Whatever is wrong with a file becomes a line of the report, never an exception, unless the system
does not let it be read: then there is no verdict. Nothing is written.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, fields, replace
from pathlib import Path

from parallel_llama.checkpoint.canonical import canonical_entry
from parallel_llama.checkpoint.file_manifest import (
    CHECKLISTS,
    Report,
    check_listed_files,
    damaged_files,
    present_files,
)
from parallel_llama.checkpoint.locate_damage import Damage
from parallel_llama.checkpoint.manifest import MANIFEST, Manifest, TensorEntry, read_manifest
from parallel_llama.checkpoint.meta_folder import meta_vocab_size
from parallel_llama.checkpoint.reading import open_checkpoint
from parallel_llama.config import ModelArgs, load_model_args
from parallel_llama.config.hf import llama3_from_factors
from parallel_llama.errors import UsageError
from parallel_llama.families import parameters
from parallel_llama.files.bounded_files import is_file, is_folder
from parallel_llama.files.json_text import read_json_object
from parallel_llama.files.model_files import MAX_INDEX_BYTES, find_model

METADATA = (
    "config.json",
    "generation_config.json",
    "model.safetensors.index.json",
    "native.json",
    "params.json",
    "pytorch_model.bin.index.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
)

# Given by the layout more than by the model: a tied head is compared as the tensor that it is, and
# every tensor's own dtype counts. A family is its features, and llama.cpp calls a Mistral a Llama.
UNCOMPARED = ("tied_embeddings", "dtype", "family")

OnBytes = Callable[[int], None]


@dataclass(frozen=True)
class Seen:
    """A model whose structure is as it should be, and those of its tensors that can be read."""

    is_meta: bool
    args: ModelArgs
    tensors: dict[str, TensorEntry]

    def unlike(self, manifest: Manifest | None) -> list[str]:
        """The names of a manifest's tensors that are others here, or not here."""
        expected = manifest.tensors if manifest else {}
        return [name for name, entry in expected.items() if self.tensors.get(name) != entry]


def verify(model: str, against: str | None = None, on_bytes: OnBytes = lambda _: None) -> Report:
    """Check the files of a model, and compare its tensors with those of another one.

    `on_bytes` is told of all that is read, files and tensors alike.

    Raises: UsageError if there is no such file or folder; UnreadableFile if one may not be read.
    """
    path, other = _path_of(model), None if against is None else _path_of(against)
    report = Report()
    inner = Report()  # structure and tensors; where a file is damaged, these are consequences
    manifest = _manifest(path, report)
    damaged = _check_files(path, manifest, report, on_bytes)
    is_whole = report.ok and not damaged
    mine = _seen(path, inner, on_bytes, with_tensors=manifest is not None or other is not None)
    wrong = mine.unlike(manifest) if mine else []
    if mine:
        report.tensors = len(list(parameters(mine.args)))
    if manifest is not None:
        report.hashed += len(mine.tensors) if mine else 0
        known = Damage(path, manifest, _args(path), wrong, inner.problems)
        for name in damaged:
            report.problems += known.lines(name, is_only_one=len(damaged) == 1)
        if is_whole:
            report.problems += [f"{name}: is not what {MANIFEST} says" for name in wrong]
    if is_whole or manifest is None:
        report.problems += [line for line in inner.problems if line not in report.problems]
    if other is not None and mine:
        with report.noting(other):
            _compare(mine, other, report, on_bytes)
    return report


def _path_of(model: str) -> Path:
    """The folder or file that is meant: a path, or the name of a model that has weights."""
    path = Path(model)
    if is_folder(path) or (path.suffix.lower() == ".gguf" and is_file(path)):
        return path
    files = find_model(model)
    files.require_weights()
    return files.path


def _manifest(path: Path, report: Report) -> Manifest | None:
    with report.noting(path / MANIFEST):
        return read_manifest(path) if is_folder(path) else None
    return None


def _check_files(
    path: Path, manifest: Manifest | None, report: Report, on_bytes: OnBytes
) -> list[str]:
    """The names of damaged files; everything else that is wrong with files is reported."""
    present: dict[str, int] = {}
    with report.noting(path):
        present = present_files(path)
    report.files, report.bytes = len(present), sum(present.values())
    damaged: list[str] = []
    if manifest is not None:
        damaged = damaged_files(path, manifest, manifest.files, present, report, on_bytes)
    for name in METADATA:
        if name in present and is_folder(path) and name not in damaged:
            with report.noting(path / name):
                read_json_object(path / name, MAX_INDEX_BYTES)
    for name in CHECKLISTS:
        if name in present:
            with report.noting(path / name):
                check_listed_files(path / name, on_bytes, report)
    return damaged


def _seen(path: Path, report: Report, on_bytes: OnBytes, with_tensors: bool = True) -> Seen | None:
    with report.noting(path):
        files = find_model(str(path))
        args = load_model_args(files, meta_vocab_size)
        tensors = {}
        with closing(open_checkpoint(files, args)) as checkpoint:
            checkpoint.check(args)
            for param in parameters(args) if with_tensors else ():
                with report.noting(f"{path}: {param.name}"):
                    tensors[param.name] = canonical_entry(checkpoint, param, on_bytes)
        return Seen(files.kind == "meta", args, tensors)
    return None


def _args(path: Path) -> ModelArgs | None:
    """The arguments alone, which may be whole where the weights are not; None if they are not."""
    with Report().noting(path):
        return load_model_args(find_model(str(path)), meta_vocab_size)
    return None


def _compare(mine: Seen, other: Path, report: Report, on_bytes: OnBytes) -> None:
    """Report every difference between the arguments and the tensors of two models."""
    found = Report()
    manifest = _manifest(other, found)
    theirs = _seen(other, found, on_bytes)
    if theirs:
        wrong = theirs.unlike(manifest)
        found.problems += [f"{other}: {name} is not what its {MANIFEST} says" for name in wrong]
        # params.json has no word for the context: what it does not say is no difference.
        is_silent = mine.is_meta or theirs.is_meta
        for name, line in _different_args(mine.args, theirs.args):
            is_fault = not (is_silent and name == "max_seq_len")
            (report.problems if is_fault else report.notes).append(line)
        report.problems += _different_tensors(_with_head(mine), _with_head(theirs))
        report.hashed += len(theirs.tensors)
    report.problems += found.problems


def _different_args(mine: ModelArgs, theirs: ModelArgs) -> Iterator[tuple[str, str]]:
    """The name of every argument that differs, and in what."""
    mine, theirs = _with_llama3(mine), _with_llama3(theirs)
    for name in (field.name for field in fields(ModelArgs) if field.name not in UNCOMPARED):
        a, b = getattr(mine, name), getattr(theirs, name)
        # GGUF files keep these numbers in float32.
        close = isinstance(a, float) and isinstance(b, float) and math.isclose(a, b, rel_tol=1e-6)
        if a != b and not close:
            yield name, f"{name} is {a} here and {b} there"


def _with_llama3(args: ModelArgs) -> ModelArgs:
    """The arguments with the llama3 scaling that a GGUF file's rotary factors stand for."""
    scaling = args.rope_scaling
    if scaling is None or scaling.kind != "factors":
        return args
    try:
        return replace(args, rope_scaling=llama3_from_factors(args, scaling.factors))
    except UsageError:  # factors of another origin are compared as they are
        return args


def _different_tensors(
    mine: dict[str, TensorEntry], theirs: dict[str, TensorEntry]
) -> Iterator[str]:
    yield from (f"{name}: only here" for name in mine if name not in theirs)
    yield from (f"{name}: only there" for name in theirs if name not in mine)
    for name, a in mine.items():
        b = theirs.get(name, a)
        if a.shape != b.shape:
            yield f"{name}: its shape is {list(a.shape)} here and {list(b.shape)} there"
        elif a.dtype != b.dtype:
            yield f"{name}: its dtype is {a.dtype} here and {b.dtype} there"
        elif a.blake3 != b.blake3:
            yield f"{name}: its values differ"


def _with_head(model: Seen) -> dict[str, TensorEntry]:
    """The tensors with the head under its own name, also where the embeddings serve as it."""
    embeddings = model.tensors.get("tok_embeddings.weight")
    if model.args.tied_embeddings and embeddings is not None:
        return {**model.tensors, "output.weight": embeddings}
    return model.tensors
