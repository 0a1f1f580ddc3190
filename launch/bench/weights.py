"""One model's weights in float32, in the layouts that the engines load."""

from collections.abc import Collection
from pathlib import Path
from typing import Literal

from launch.bench.engines import Layout
from parallel_llama.config import ModelArgs
from parallel_llama.model_files import ModelFiles
from parallel_llama.plan import make_plan, weight_bytes
from parallel_llama.resharding import reshard

_WRITTEN: tuple[Literal["hf", "meta"], ...] = ("hf", "meta")


def write_weights(files: ModelFiles, home: Path, layouts: Collection[Layout]) -> dict[Layout, str]:
    """Where each layout of the model lies; those that are not its own are written below `home`."""
    folders: dict[Layout, str] = {"source": str(files.path)}
    for layout in _WRITTEN:
        if layout in layouts:
            folders[layout] = str(home / layout)
            reshard(files, home / layout, layout=layout, n_parts=1, dtype="float32")
    return folders


def step_bytes(args: ModelArgs) -> int:
    """Bytes of float32 weights that one decode step must read: an embedding is looked up."""
    whole = weight_bytes(args, make_plan(args, 1).shares[0], 4)
    return whole if args.tied_embeddings else whole - args.vocab_size * args.dim * 4
