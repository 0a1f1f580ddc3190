"""Where in a damaged file the damage is: in which tensor, and between which bytes."""

import math
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch

from parallel_llama.checkpoint.manifest import Manifest, TensorEntry, hash_file
from parallel_llama.checkpoint.places import Place, places, unit_spans
from parallel_llama.checkpoint.whole_files import WEIGHT_SUFFIXES
from parallel_llama.config import ModelArgs
from parallel_llama.plan import parameters

# Meta's files keep these in another order of rows.
ROTARY = ("wq.weight", "wk.weight", "wq.bias", "wk.bias")


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
        """What is damaged in one file, a line for each place."""
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
        for place in places(path):
            entry, param = self.manifest.tensors.get(place.name), params.get(place.name)
            if entry is None:
                continue  # no model reads it, so nothing says what it should be
            units = self.manifest.units.get(place.name)
            if self.args and param and units:
                spans = unit_spans(place, param, self.args)
                spots += [
                    f"{place.name}, bytes {span.start} to {span.stop} (unit {number})"
                    for number, (span, unit) in enumerate(zip(spans, units, strict=False))
                    if hash_file(path, span=span) != unit
                ]
            elif self._is_damaged(path, place, entry):
                spots.append(f"{place.name}, bytes {place.bytes.start} to {place.bytes.stop}")
        return spots

    def _is_damaged(self, path: Path, place: Place, entry: TensorEntry) -> bool:
        if _is_canonical(self.manifest.layout, place.name) and len(place.bytes) == _size(entry):
            return hash_file(path, span=place.bytes) != entry.blake3
        return place.name in self.wrong


def _is_canonical(layout: str, name: str) -> bool:
    """Whether a tensor that is whole in its file lies there as it is hashed."""
    if layout == "meta":
        return not name.endswith(ROTARY)
    return layout == "hf"


def _size(entry: TensorEntry) -> int:
    dtype: torch.dtype = getattr(torch, entry.dtype)
    return math.prod(entry.shape) * dtype.itemsize
