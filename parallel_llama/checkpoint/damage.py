"""Where in a damaged file the damage is: in which tensor, and between which bytes."""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from parallel_llama.checkpoint.manifest import Manifest, TensorEntry, hash_file
from parallel_llama.checkpoint.native_folder import axis_units, unit_spans
from parallel_llama.checkpoint.torch_file import read_torch_header
from parallel_llama.checkpoint.whole_files import WEIGHT_SUFFIXES
from parallel_llama.config import ModelArgs
from parallel_llama.dtypes import ITEM_BYTES
from parallel_llama.errors import CheckpointError
from parallel_llama.families import parameters
from parallel_llama.families.names import Layout, hf_full_name, renamed
from parallel_llama.files.gguf_header import GGUFTensor, read_gguf_header
from parallel_llama.files.safetensors_header import FileTensor, read_safetensors_header

# How to read each kind of file, and whose names it has.
_READERS: dict[str, tuple[Callable[[Path], Mapping[str, FileTensor | GGUFTensor]], Layout]] = {
    ".safetensors": (read_safetensors_header, "hf"),
    ".bin": (read_torch_header, "hf"),
    ".pth": (read_torch_header, "meta"),
    ".gguf": (lambda path: read_gguf_header(path).tensors, "gguf"),
}


def locations(path: Path) -> list[tuple[str, range]]:
    """Every tensor of a .safetensors, .bin, .pth or .gguf file and its bytes there, in their order.

    The names are Meta's where the model has such a tensor, else the file's own.

    Raises: CheckpointError if the file is damaged, or is none of these.
    """
    suffix = path.suffix.lower()
    if suffix not in _READERS:
        raise CheckpointError(f"{path}: not a file of weights")
    read, layout = _READERS[suffix]
    try:
        found = read(path).values()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    ordered = sorted(found, key=lambda tensor: tensor.offset)
    return [(_meta_name(t.name, layout), range(t.offset, t.offset + t.n_bytes)) for t in ordered]


@dataclass(frozen=True)
class Damage:
    """What is known of a folder that has damaged files.

    `args` is None where they could not be read. `wrong` names the tensors that are not the
    manifest's in canonical form; `reasons` say why the folder could not be read as a model, and
    are empty if it could.
    """

    folder: Path
    manifest: Manifest
    args: ModelArgs | None
    wrong: Collection[str]
    reasons: list[str]

    def lines(self, name: str, is_only_one: bool) -> list[str]:
        """What is damaged in one file, a line for each location."""
        because = f": {self.reasons[0]}" if self.reasons else ""
        if Path(name).suffix.lower() not in WEIGHT_SUFFIXES:
            return [f"{name}: damaged, its hash is not the manifest's" + because * is_only_one]
        try:
            spots = self._spots(name)
        except Exception as error:  # no reader can foresee all that damaged bytes can do
            return [f"{name}: damaged in its header: {str(error)[:500]}"]
        if spots:
            return [f"{name}: damaged in {spot}" for spot in spots]
        if not because:
            return [f"{name}: damaged outside the tensors: in its header or between them"]
        if is_only_one:
            return [f"{name}: damaged in its header{because}"]
        return [f"{name}: damaged; where can be said when the other damaged files are mended"]

    def _spots(self, name: str) -> list[str]:
        path = self.folder / name
        params = {param.name: param for param in parameters(self.args)} if self.args else {}
        spots = []
        for tensor, held in locations(path):
            entry, param = self.manifest.tensors.get(tensor), params.get(tensor)
            if entry is None:
                continue  # no model reads it, so nothing says what it should be
            units = self.manifest.units.get(tensor)
            if self.args and param and units:
                spans = unit_spans(held, param, axis_units(self.args))
                spots += [
                    f"{tensor}, bytes {span.start} to {span.stop} (unit {number})"
                    for number, (span, unit) in enumerate(zip(spans, units, strict=False))
                    if hash_file(path, span=span) != unit
                ]
            elif self._is_damaged(path, tensor, held, entry):
                spots.append(f"{tensor}, bytes {held.start} to {held.stop}")
        return spots

    def _is_damaged(self, path: Path, tensor: str, held: range, entry: TensorEntry) -> bool:
        n_bytes = math.prod(entry.shape) * ITEM_BYTES[entry.dtype]
        if _is_canonical(self.manifest.layout, tensor) and len(held) == n_bytes:
            return hash_file(path, span=held) != entry.blake3
        return tensor in self.wrong


def _is_canonical(layout: str, name: str) -> bool:
    """Whether a tensor that is whole in its file lies there as it is hashed."""
    if layout == "meta":
        return ".wq." not in name and ".wk." not in name  # their rows are in another order
    return layout == "hf"


def _meta_name(name: str, layout: Layout) -> str:
    try:
        return renamed(hf_full_name(name) if layout == "hf" else name, layout, "meta")
    except KeyError:
        return name
