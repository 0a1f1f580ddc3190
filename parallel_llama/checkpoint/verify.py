"""Verifies a model against its manifest or another model, and locates damage in its files.

A fault of a file becomes a line of the report, not an exception, unless the system refuses to read
the file. Nothing is written.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path

from parallel_llama.checkpoint.canonical import canonical_entry
from parallel_llama.checkpoint.checkpoint import is_rotary
from parallel_llama.checkpoint.file_manifest import (
    CHECKLISTS,
    WEIGHT_SUFFIXES,
    Report,
    check_listed_files,
    damaged_files,
    present_files,
)
from parallel_llama.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    TensorEntry,
    hash_file,
    read_manifest,
)
from parallel_llama.checkpoint.meta_folder import meta_vocab_size
from parallel_llama.checkpoint.native_folder import Part, read_storage, weight_of
from parallel_llama.checkpoint.reading import open_checkpoint
from parallel_llama.checkpoint.tensor_files import read_header
from parallel_llama.config.hf import llama3_from_factors
from parallel_llama.config.layouts import load_model_args
from parallel_llama.dtypes import ITEM_BYTES
from parallel_llama.errors import CheckpointError, UsageError
from parallel_llama.families import FAMILIES, family_of, parameters, stored_slices
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.families.names import Layout, hf_full_name, renamed
from parallel_llama.families.stored_slices import StoredSlice
from parallel_llama.files.bounded_files import is_file, is_folder
from parallel_llama.files.fields import read_json_object
from parallel_llama.files.model_files import MAX_INDEX_BYTES, find_model
from parallel_llama.files.safetensors_header import FileTensor

_FIRST = "consolidated.00.pth"


def locations(path: Path, layout: Layout | None, args: ModelArgs | None) -> list[tuple[str, range]]:
    """The weights of a .safetensors, .bin, .pth or .gguf file and their bytes, in order of offset.

    A weight that shares a tensor with other weights gets the range from its first to its last byte.
    Tensors that are not weights of the model keep the name in the file.

    Args:
        layout: the layout of the names; None if they are the model's own.
        args: None if unknown; tensors that families name differently then keep their names.

    Raises: CheckpointError if the file is damaged, or has another suffix.
    """
    try:
        tensors = read_header(path).values()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    ordered = sorted(tensors, key=lambda tensor: tensor.offset)
    if layout is None:
        return [(tensor.name, _bytes_of(tensor)) for tensor in ordered]
    if args is None:
        return [(_agreed_name(tensor.name, layout), _bytes_of(tensor)) for tensor in ordered]
    weights: dict[str, list[tuple[str, StoredSlice]]] = {}
    for weight, stored_slice in stored_slices(args, layout).items():
        weights.setdefault(stored_slice.name, []).append((weight, stored_slice))
    names = family_of(args).names
    located = []
    for tensor in ordered:
        full_name = hf_full_name(tensor.name, names) if layout == "hf" else tensor.name
        slices = [
            (weight, _span(tensor, stored_slice))
            for weight, stored_slice in weights.get(full_name, ())
        ]
        located += slices or [(tensor.name, _bytes_of(tensor))]
    return located


@dataclass(frozen=True)
class Damage:
    """The results of checking a folder with damaged files.

    Args:
        args: the model's arguments; None if the configuration is unreadable.
        parts: the tensors of a native folder by name; empty if native.json is unreadable.
        wrong: the names of tensors that differ from the manifest in canonical form.
        reasons: the errors of reading the folder as a model.
    """

    folder: Path
    manifest: Manifest
    args: ModelArgs | None
    parts: Mapping[str, Part]
    wrong: Collection[str]
    reasons: list[str]

    def lines(self, name: str, is_only_one: bool) -> list[str]:
        """The damage of one file, one line per location."""
        because = f": {self.reasons[0]}" if self.reasons else ""
        if Path(name).suffix.lower() not in WEIGHT_SUFFIXES:
            return [f"{name}: damaged: its hash is not the manifest's" + because * is_only_one]
        try:
            spots = self._spots(name)
        except Exception as error:  # damaged bytes can raise nearly anything
            return [f"{name}: damaged in its header: {str(error)[:500]}"]
        if spots:
            return [f"{name}: damaged in {spot}" for spot in spots]
        if not because and self._has_copy_of_embeddings():
            return [
                f"{name}: damaged in output.weight, its copy of the tied embeddings, or outside "
                "the tensors"
            ]
        if not because:
            return [f"{name}: damaged outside the tensors: in its header or between them"]
        if is_only_one:
            return [f"{name}: damaged in its header{because}"]
        return [f"{name}: damaged; repair the other damaged files to locate the damage"]

    def _spots(self, name: str) -> list[str]:
        path, layout = self.folder / name, self.manifest.layout
        damaged: list[str] = []
        uncertain: list[str] = []
        for tensor, tensor_span in locations(path, "hf" if layout == "hf" else None, self.args):
            weight = weight_of(tensor) if layout == "native" else tensor
            entry, part = self.manifest.tensors.get(weight), self.parts.get(tensor)
            if entry is None:
                continue  # not a weight, so the manifest has no hash of it
            units = self.manifest.units.get(tensor)
            if part and units:
                spans = part.unit_spans(tensor_span)
                damaged += [
                    f"{tensor}, bytes {span.start} to {span.stop} (unit {number})"
                    for number, (span, unit) in enumerate(zip(spans, units, strict=False))
                    if hash_file(path, span=span) != unit
                ]
            elif self._is_damaged(path, weight, tensor_span, entry):
                # The manifest has the norms of Meta's first file; those of other files may differ.
                is_own_norm = layout == "meta" and name != _FIRST and "norm" in tensor
                (uncertain if is_own_norm else damaged).append(
                    f"{tensor}, bytes {tensor_span.start} to {tensor_span.stop}"
                )
        return damaged or uncertain

    def _has_copy_of_embeddings(self) -> bool:
        """Whether the files have tied embeddings twice, but the manifest has only one hash."""
        return self.manifest.layout == "meta" and bool(self.args and self.args.tied_embeddings)

    def _is_damaged(self, path: Path, tensor: str, span: range, entry: TensorEntry) -> bool:
        n_bytes = math.prod(entry.shape) * ITEM_BYTES[entry.dtype]
        if self._is_canonical(tensor) and len(span) == n_bytes:
            return hash_file(path, span=span) != entry.blake3
        return tensor in self.wrong

    def _is_canonical(self, name: str) -> bool:
        """Whether an unsharded tensor is stored in canonical form."""
        layout = self.manifest.layout
        if layout not in ("hf", "meta"):
            return False
        if self.args and layout == "hf" and stored_slices(self.args, "hf")[name].count is not None:
            return False  # its rows alternate with those of another weight, or it is transposed
        orders = family_of(self.args).rotary_order if self.args else FAMILIES["llama"].rotary_order
        return orders[layout] == "half" or not is_rotary(name)


def _span(tensor: FileTensor, stored_slice: StoredSlice) -> range:
    """The bytes from the first to the last byte of a weight in its stored tensor."""
    row_bytes, rows = tensor.n_bytes // stored_slice.n_rows, stored_slice.extent
    if stored_slice.is_transposed:  # the whole matrix that holds the weight
        n_outputs = stored_slice.shape[-1]
        start = rows.start // n_outputs * n_outputs
        rows = range(start, start + n_outputs)
    return range(tensor.offset + rows.start * row_bytes, tensor.offset + rows.stop * row_bytes)


def _bytes_of(tensor: FileTensor) -> range:
    return range(tensor.offset, tensor.offset + tensor.n_bytes)


def _agreed_name(name: str, layout: Layout) -> str:
    """Meta's name of a tensor if all families agree on it, else the name itself."""
    meta_names = set()
    for family in FAMILIES.values():
        full_name = hf_full_name(name, family.names) if layout == "hf" else name
        with suppress(KeyError):
            meta_names.add(renamed(full_name, layout, "meta", family.names))
    return meta_names.pop() if len(meta_names) == 1 else name


METADATA = (
    "config.json", "generation_config.json", "model.safetensors.index.json", "native.json",
    "params.json", "pytorch_model.bin.index.json", "special_tokens_map.json", "tokenizer.json",
    "tokenizer_config.json",
)  # fmt: skip

# Arguments that are not compared, because they depend on the layout. A tied head is compared as a
# tensor, the dtype of each tensor is compared, and the family is compared by its features, since
# llama.cpp stores a Mistral as a Llama.
UNCOMPARED = ("tied_embeddings", "dtype", "family")

OnBytes = Callable[[int], None]


@dataclass(frozen=True)
class CheckedModel:
    """A model with a valid structure, and its readable tensors."""

    is_meta: bool
    args: ModelArgs
    tensors: dict[str, TensorEntry]

    def unlike(self, manifest: Manifest | None) -> list[str]:
        """The names of a manifest's tensors that differ or are missing here."""
        expected = manifest.tensors if manifest else {}
        return [name for name, entry in expected.items() if self.tensors.get(name) != entry]


def verify(model: str, against: str | None = None, on_bytes: OnBytes = lambda _: None) -> Report:
    """Check the files of a model, and compare its tensors with those of the model `against`.

    Args:
        on_bytes: called with the size of each piece that is read, of files and of tensors.

    Raises: UsageError if a file or folder does not exist; UnreadableFile if it cannot be read.
    """
    path, other = _path_of(model), None if against is None else _path_of(against)
    report = Report()
    model_report = Report()  # faults of structure and tensors, which may explain a damaged file
    manifest = _manifest(path, report)
    damaged = _check_files(path, manifest, report, on_bytes)
    is_whole = report.ok and not damaged
    checked = _checked_model(
        path, model_report, on_bytes, with_tensors=manifest is not None or other is not None
    )
    wrong = checked.unlike(manifest) if checked else []
    if checked:
        report.tensors = len(list(parameters(checked.args)))
    if manifest is not None:
        report.hashed += len(checked.tensors) if checked else 0
        args = _args(path)
        damage = Damage(
            path, manifest, args, _native_parts(path, args), wrong, model_report.problems
        )
        for name in damaged:
            report.problems += damage.lines(name, is_only_one=len(damaged) == 1)
        if is_whole:
            report.problems += [f"{name}: differs from {MANIFEST}" for name in wrong]
    if is_whole or manifest is None:
        report.problems += [line for line in model_report.problems if line not in report.problems]
    if other is not None and checked:
        with report.noting(other):
            _compare(checked, other, report, on_bytes)
    return report


def _path_of(model: str) -> Path:
    """The folder or file of a model, given as a path or a name."""
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
    """The names of damaged files; reports all other faults of files."""
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


def _checked_model(
    path: Path, report: Report, on_bytes: OnBytes, with_tensors: bool = True
) -> CheckedModel | None:
    with report.noting(path):
        files = find_model(str(path))
        args = load_model_args(files, meta_vocab_size)
        tensors = {}
        with closing(open_checkpoint(files, args)) as checkpoint:
            checkpoint.check(args)
            for param in parameters(args) if with_tensors else ():
                with report.noting(f"{path}: {param.name}"):
                    tensors[param.name] = canonical_entry(checkpoint, param, on_bytes)
        return CheckedModel(files.kind == "meta", args, tensors)
    return None


def _args(path: Path) -> ModelArgs | None:
    """The model's arguments, which may be valid even if the weights are damaged; else None."""
    with Report().noting(path):
        return load_model_args(find_model(str(path)), meta_vocab_size)
    return None


def _native_parts(path: Path, args: ModelArgs | None) -> dict[str, Part]:
    """The tensors of a native folder by name; empty for other folders and a damaged native.json."""
    with Report().noting(path):
        files = find_model(str(path))
        if args is not None and files.kind == "native":
            storage = read_storage(files, args)
            parts = (part for param in parameters(args) for part in storage.parts_of(param))
            return {part.param.name: part for part in parts}
    return {}


def _compare(mine: CheckedModel, other: Path, report: Report, on_bytes: OnBytes) -> None:
    """Report every difference between the arguments and the tensors of two models."""
    found = Report()
    manifest = _manifest(other, found)
    theirs = _checked_model(other, found, on_bytes)
    if theirs:
        wrong = theirs.unlike(manifest)
        found.problems += [f"{other}: {name} differs from its {MANIFEST}" for name in wrong]
        # Meta's own params.json does not state the context, so the context is inferred, and a
        # different one is not a fault.
        lacks_context = mine.is_meta or theirs.is_meta
        for name, line in _different_args(mine.args, theirs.args):
            is_fault = not (lacks_context and name == "max_seq_len")
            (report.problems if is_fault else report.notes).append(line)
        report.problems += _different_tensors(_with_head(mine), _with_head(theirs))
        report.hashed += len(theirs.tensors)
    report.problems += found.problems


def _different_args(mine: ModelArgs, theirs: ModelArgs) -> Iterator[tuple[str, str]]:
    """The name of every argument that differs, and a line about it."""
    mine, theirs = _with_llama3(mine), _with_llama3(theirs)
    for name in (field.name for field in fields(ModelArgs) if field.name not in UNCOMPARED):
        a, b = getattr(mine, name), getattr(theirs, name)
        # GGUF files store these numbers in float32.
        close = isinstance(a, float) and isinstance(b, float) and math.isclose(a, b, rel_tol=1e-6)
        if a != b and not close:
            yield name, f"{name} is {a} here and {b} there"


def _with_llama3(args: ModelArgs) -> ModelArgs:
    """The arguments with llama3 scaling in place of the equal rotary factors of a GGUF file."""
    scaling = args.rope_scaling
    if scaling is None or scaling.kind != "factors":
        return args
    try:
        return replace(args, rope_scaling=llama3_from_factors(args, scaling.factors))
    except UsageError:  # other factors are compared directly
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


def _with_head(model: CheckedModel) -> dict[str, TensorEntry]:
    """The tensors with the head under its own name, also if it is tied to the embeddings."""
    embeddings = model.tensors.get("tok_embeddings.weight")
    if model.args.tied_embeddings and embeddings is not None:
        return {**model.tensors, "output.weight": embeddings}
    return model.tensors
