"""One tiny model as complete folders of every layout, each with its manifest."""

import json
import shutil
from pathlib import Path

import checkpoint_samples
import reshard_samples
from reshard_samples import read, write
from safetensors.torch import load_file
from tiny_models import TinyModel, write_hf, write_meta

from parallel_llama.checkpoint.canonical import canonical_entry
from parallel_llama.checkpoint.checkpoint import Checkpoint
from parallel_llama.checkpoint.manifest import (
    MANIFEST,
    FileEntry,
    Manifest,
    hash_file,
    write_manifest,
)
from parallel_llama.checkpoint.native_folder import NativeStorage, axis_units
from parallel_llama.checkpoint.verify import locations
from parallel_llama.config.layouts import load_model_args
from parallel_llama.families import parameters
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.files.model_files import ModelFiles, find_model
from parallel_llama.reshard.safetensors_layout import NativeLayout

# Eight files hold each of the four KV heads twice.
TINY = TinyModel(8, 4, 8, 64, ffn_dim=104, vocab_size=128)
NAMES = ("hf", "hf of 2 files", "meta of 1", "meta of 2", "meta of 8", "native of 2")


def write_folders(home: Path) -> dict[str, Path]:
    """A folder of each of NAMES below `home`, with the same weights."""
    folders = {name: home / name for name in NAMES}
    write_hf(TINY, folders["hf"])
    _write_indexed(folders["hf"], folders["hf of 2 files"])
    write_meta(TINY, folders["hf"], folders["meta of 1"], 1)
    write_meta(TINY, folders["hf"], folders["meta of 2"], 2)
    _write_copies(folders["hf"], folders["meta of 8"])
    _write_native(folders["hf"], folders["native of 2"])
    for folder in folders.values():
        add_manifest(folder)
    return folders


def opened(folder: Path) -> tuple[ModelFiles, ModelArgs, Checkpoint]:
    files = find_model(str(folder))
    args = load_model_args(files)
    return files, args, reshard_samples.opened(files, args)


def add_manifest(folder: Path) -> Manifest:
    """Hashes every file and tensor of a folder."""
    files, args, checkpoint = opened(folder)
    entries = {
        path.name: FileEntry(path.stat().st_size, hash_file(path))
        for path in sorted(folder.iterdir())
        if path.name != MANIFEST
    }
    tensors = {param.name: canonical_entry(checkpoint, param) for param in parameters(args)}
    units = {}
    if files.kind == "native":
        held = {
            name: (path, span)
            for path in files.weights
            for name, span in locations(path, None, args)
        }
        for param in parameters(args):
            path, location = held[param.name]
            (part,) = NativeStorage(axis_units(args), {}).parts_of(param)
            spans = part.unit_spans(location)
            units[param.name] = [hash_file(path, span=span) for span in spans]
    manifest = Manifest(files.kind, tensors, entries, units)
    checkpoint.close()
    write_manifest(folder, manifest)
    return manifest


def _write_indexed(source: Path, folder: Path) -> None:
    folder.mkdir()
    shutil.copy(source / "config.json", folder)
    checkpoint_samples.write_safetensors(folder, load_file(source / "model.safetensors"), 2)


def _write_copies(source: Path, folder: Path) -> None:
    write_meta(TINY, source, folder, 1)
    args = load_model_args(find_model(str(source)))
    checkpoint_samples.write_meta(folder, checkpoint_samples.meta_shards(args, read(source), 8))


def _write_native(source: Path, folder: Path) -> None:
    args, tensors = load_model_args(find_model(str(source))), read(source)
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    write(NativeLayout(args, dtypes, 2), args, tensors, folder)


def config_of(folder: Path) -> dict[str, object]:
    config: dict[str, object] = json.loads((folder / "config.json").read_text())
    return config
