"""Locates damage in a file: the tensor and the range of bytes."""

import math
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from parallel_llama.checkpoint.checkpoint import is_rotary
from parallel_llama.checkpoint.file_manifest import WEIGHT_SUFFIXES
from parallel_llama.checkpoint.manifest import Manifest, TensorEntry, hash_file
from parallel_llama.checkpoint.native_folder import axis_units, unit_spans, weight_of
from parallel_llama.checkpoint.tensor_files import read_header
from parallel_llama.config import ModelArgs
from parallel_llama.dtypes import ITEM_BYTES, QUANT_GROUP_SIZE
from parallel_llama.errors import CheckpointError
from parallel_llama.families import FAMILIES, family_of, parameters, stored_slices
from parallel_llama.families.names import Layout, hf_full_name, renamed
from parallel_llama.families.stored_slices import StoredSlice
from parallel_llama.files.safetensors_header import FileTensor


def locations(path: Path, layout: Layout | None, args: ModelArgs | None) -> list[tuple[str, range]]:
    """The weights of a .safetensors, .bin, .pth or .gguf file and their bytes, in order of offset.

    A weight that shares a tensor with others gets the range from its first to its last byte.
    Tensors that are not weights of the model keep the name in the file.

    Args:
        layout: the layout of the names; None if they are the model's own.
        args: None if unknown; tensors that families name differently then keep their names.

    Raises: CheckpointError if the file is damaged, or has another suffix.
    """
    try:
        found = read_header(path).values()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    ordered = sorted(found, key=lambda tensor: tensor.offset)
    if layout is None:
        return [(tensor.name, _bytes_of(tensor)) for tensor in ordered]
    if args is None:
        return [(_agreed_name(tensor.name, layout), _bytes_of(tensor)) for tensor in ordered]
    weights: dict[str, list[tuple[str, StoredSlice]]] = {}
    for weight, stored_slice in stored_slices(args, layout).items():
        weights.setdefault(stored_slice.name, []).append((weight, stored_slice))
    names = family_of(args).names
    spots = []
    for tensor in ordered:
        full_name = hf_full_name(tensor.name, names) if layout == "hf" else tensor.name
        held = [
            (weight, _span(tensor, stored_slice))
            for weight, stored_slice in weights.get(full_name, ())
        ]
        spots += held or [(tensor.name, _bytes_of(tensor))]
    return spots


@dataclass(frozen=True)
class Damage:
    """The results of checking a folder with damaged files.

    `args` is None if it is unreadable. `wrong` names the tensors whose canonical form differs from
    the manifest; `reasons` are the errors of reading the folder as a model.
    """

    folder: Path
    manifest: Manifest
    args: ModelArgs | None
    wrong: Collection[str]
    reasons: list[str]

    def lines(self, name: str, is_only_one: bool) -> list[str]:
        """The damage of one file, one line per location."""
        because = f": {self.reasons[0]}" if self.reasons else ""
        if Path(name).suffix.lower() not in WEIGHT_SUFFIXES:
            return [f"{name}: damaged, its hash is not the manifest's" + because * is_only_one]
        try:
            spots = self._spots(name)
        except Exception as error:  # damaged bytes can raise nearly anything
            return [f"{name}: damaged in its header: {str(error)[:500]}"]
        if spots:
            return [f"{name}: damaged in {spot}" for spot in spots]
        if not because:
            return [f"{name}: damaged outside the tensors: in its header or between them"]
        if is_only_one:
            return [f"{name}: damaged in its header{because}"]
        return [f"{name}: damaged; it can be located once the other damaged files are repaired"]

    def _spots(self, name: str) -> list[str]:
        path, layout = self.folder / name, self.manifest.layout
        params = {param.name: param for param in parameters(self.args)} if self.args else {}
        spots = []
        for tensor, held in locations(path, "hf" if layout == "hf" else None, self.args):
            weight = weight_of(tensor) if layout == "native" else tensor
            entry, param = self.manifest.tensors.get(weight), params.get(weight)
            if entry is None:
                continue  # not a weight, so the manifest has no hash of it
            units = self.manifest.units.get(tensor)
            if self.args and param and units:
                spans = unit_spans(held, param, axis_units(self.args, self._quant_group_size))
                spots += [
                    f"{tensor}, bytes {span.start} to {span.stop} (unit {number})"
                    for number, (span, unit) in enumerate(zip(spans, units, strict=False))
                    if hash_file(path, span=span) != unit
                ]
            elif self._is_damaged(path, weight, held, entry):
                spots.append(f"{tensor}, bytes {held.start} to {held.stop}")
        return spots

    @property
    def _quant_group_size(self) -> int:
        is_quantised = any(weight_of(tensor) != tensor for tensor in self.manifest.units)
        return QUANT_GROUP_SIZE if is_quantised else 1

    def _is_damaged(self, path: Path, tensor: str, held: range, entry: TensorEntry) -> bool:
        n_bytes = math.prod(entry.shape) * ITEM_BYTES[entry.dtype]
        if self._is_canonical(tensor) and len(held) == n_bytes:
            return hash_file(path, span=held) != entry.blake3
        return tensor in self.wrong

    def _is_canonical(self, name: str) -> bool:
        """Whether an unsharded tensor is stored in canonical form."""
        layout = self.manifest.layout
        if layout not in ("hf", "meta"):
            return False
        orders = family_of(self.args).rotary_order if self.args else FAMILIES["llama"].rotary_order
        return orders[layout] == "half" or not is_rotary(name)


def _span(tensor: FileTensor, stored_slice: StoredSlice) -> range:
    """The bytes from the first to the last byte of a weight in its stored tensor."""
    row_bytes, rows = tensor.n_bytes // stored_slice.n_rows, stored_slice.extent
    return range(tensor.offset + rows.start * row_bytes, tensor.offset + rows.stop * row_bytes)


def _bytes_of(tensor: FileTensor) -> range:
    return range(tensor.offset, tensor.offset + tensor.n_bytes)


def _agreed_name(name: str, layout: Layout) -> str:
    """Meta's name of a tensor if all families agree on it, else the name itself."""
    found = set()
    for family in FAMILIES.values():
        full_name = hf_full_name(name, family.names) if layout == "hf" else name
        with suppress(KeyError):
            found.add(renamed(full_name, layout, "meta", family.names))
    return found.pop() if len(found) == 1 else name
