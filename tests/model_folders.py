"""One tiny model as whole folders of every layout, each with its manifest."""

import json
import shutil
from pathlib import Path

import checkpoint_samples
from safetensors.torch import load_file
from tiny_models import TinyModel, write_hf, write_meta

from parallel_llama.checkpoint.canonical import describe
from parallel_llama.checkpoint.manifest import Manifest, tensor_bytes, write_manifest
from parallel_llama.checkpoint.native_layout import NativeLayout
from parallel_llama.checkpoint.reading import Checkpoint, open_checkpoint
from parallel_llama.config import ModelArgs, load_model_args
from parallel_llama.model_files import ModelFiles, find_model
from parallel_llama.plan import parameters

# Eight files hold each of its four KV heads twice.
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
    checkpoint = open_checkpoint(files, args)
    checkpoint.check(args)
    return files, args, checkpoint


def add_manifest(folder: Path) -> Manifest:
    files, args, checkpoint = opened(folder)
    manifest = describe(files, args, checkpoint)
    checkpoint.close()
    write_manifest(folder, manifest)
    return manifest


def _write_indexed(source: Path, folder: Path) -> None:
    folder.mkdir()
    shutil.copy(source / "config.json", folder)
    checkpoint_samples.write_safetensors(folder, load_file(source / "model.safetensors"), 2)


def _write_copies(source: Path, folder: Path) -> None:
    _, args, checkpoint = opened(source)
    weights = {p.name: checkpoint.read(p, range(p.shape[p.dim])) for p in parameters(args)}
    write_meta(TINY, source, folder, 1)
    shards = checkpoint_samples.meta_shards(args, weights, 8)
    checkpoint_samples.write_meta(folder, shards)


def _write_native(source: Path, folder: Path) -> None:
    _, args, checkpoint = opened(source)
    whole = {p: checkpoint.read(p, range(p.shape[p.dim])) for p in parameters(args)}
    layout = NativeLayout(args, {p.name: value.dtype for p, value in whole.items()}, 2)
    folder.mkdir()
    layout.create(folder)
    for param, value in whole.items():
        for name, offset, part in layout.parts(param, [value]):
            with (folder / name).open("r+b") as file:
                file.seek(offset)
                file.write(tensor_bytes(part))
    layout.finish(folder)
    for name, data in layout.metadata().items():
        (folder / name).write_bytes(data)


def config_of(folder: Path) -> dict[str, object]:
    config: dict[str, object] = json.loads((folder / "config.json").read_text())
    return config
