"""A whole model from one layout to another: weights, configuration, tokenizer, templates."""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch

from parallel_llama.bounded_files import is_file, is_folder, read_bytes
from parallel_llama.checkpoint import meta_vocab_size, open_checkpoint
from parallel_llama.checkpoint.hf_layout import HFLayout
from parallel_llama.checkpoint.layout import Layout
from parallel_llama.checkpoint.meta_folder import MetaFolder
from parallel_llama.checkpoint.meta_layout import MetaLayout
from parallel_llama.checkpoint.native_layout import NativeLayout
from parallel_llama.checkpoint.norm_variants import NORM_VARIANTS, as_bytes, norm_variants
from parallel_llama.checkpoint.reshard import Reshard, Result, stored_dtypes
from parallel_llama.checkpoint.reused_memory import ReusedMemory
from parallel_llama.config import (
    GenerationDefaults,
    ModelArgs,
    load_generation_defaults,
    load_model_args,
)
from parallel_llama.errors import UsageError
from parallel_llama.fields import read_json_object
from parallel_llama.model_files import ModelFiles
from parallel_llama.plan import parameters
from parallel_llama.target_folder import TargetKind, check_parts, check_target
from parallel_llama.tokenizer.export import export_gguf_tokenizer

# Files that belong to a model beside its weights and travel as they are.
COMPANIONS = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
TEMPLATES = "additional_chat_templates"
MAX_COMPANION_BYTES = 256 << 20

logger = logging.getLogger(__name__)


def reshard(
    source: ModelFiles,
    target: Path,
    *,
    layout: TargetKind,
    n_parts: int,
    dtype: str | None = None,
    resume: bool = False,
    on_start: Callable[[int, int], None] = lambda _total, _done: None,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> Result:
    """Write a model's files anew in another layout, as `n_parts` files.

    The values stay what they are unless a `dtype` is asked for. When everything is checked,
    `on_start` is told the bytes of all weights and how many of them an earlier run has written;
    `on_bytes` is told of every piece that this one writes.

    Raises: UsageError for what cannot be done and CheckpointError for a damaged source, both before
    anything is written; DamagedWeights or WriteError if reading or writing fails.
    """
    source.require_weights()
    check_target(source, target)
    args = load_model_args(source, meta_vocab_size)
    check_parts(layout, args, n_parts)
    with closing(open_checkpoint(source, args, ReusedMemory().empty)) as checkpoint:
        checkpoint.check(args)
        dtypes = stored_dtypes(checkpoint, args)
        if dtype is not None:
            dtypes = dict.fromkeys(dtypes, getattr(torch, dtype))
        args = replace(args, dtype=_dtype_of_matrices(args, dtypes))
        defaults = load_generation_defaults(source)
        variants = norm_variants(source)
        beside = companions(source, layout, defaults)
        written: Layout
        if layout == "meta":
            dim = checkpoint.embeddings_dim() if isinstance(checkpoint, MetaFolder) else 0
            written = MetaLayout(args, dtypes, n_parts, dim, variants)
        else:
            if variants:
                beside[NORM_VARIANTS] = as_bytes(variants)
            if layout == "hf":
                written = HFLayout(args, dtypes, n_parts, defaults)
            else:
                written = NativeLayout(args, dtypes, n_parts)
        run = Reshard(
            source, args, checkpoint, written, target,
            dtypes=dtypes, beside=beside, resume=resume,
        )  # fmt: skip
        return run.run(on_start, on_bytes)


def companions(
    source: ModelFiles, kind: TargetKind, defaults: GenerationDefaults
) -> dict[str, bytes]:
    """The small files that go along: the source's own, or a GGUF file's tokenizer as such files."""
    files = _tokenizer(source) if source.kind == "gguf" else _companions_in(source.path)
    # Llama 2's and 3's chat formats go without a template: params.json is what says Meta.
    if kind == "native" and source.kind in ("meta", "native"):
        files |= _read_all(source.path, ["params.json"])
    files["generation_config.json"] = _generation_config(source, defaults)
    return files


def _tokenizer(source: ModelFiles) -> dict[str, bytes]:
    try:
        return export_gguf_tokenizer(source.path)
    except UsageError as error:
        logger.warning("written without a tokenizer: %s", error)
        return {}


def _companions_in(folder: Path) -> dict[str, bytes]:
    templates = sorted((folder / TEMPLATES).glob("*.jinja"))
    names = [*COMPANIONS, *(f"{TEMPLATES}/{path.name}" for path in templates)]
    return _read_all(folder, names)


def _read_all(folder: Path, names: Sequence[str]) -> dict[str, bytes]:
    files = {}
    for name in names:
        if is_file(folder / name):
            files[name] = read_bytes(folder / name, MAX_COMPANION_BYTES)
    return files


def _generation_config(source: ModelFiles, defaults: GenerationDefaults) -> bytes:
    """The source's own file, with the special ids that only its other files state."""
    path = source.path / "generation_config.json"
    values: dict[str, Any] = {}
    if is_folder(source.path) and is_file(path):
        values = read_json_object(path)
    elif defaults.temperature is not None:
        values["do_sample"] = defaults.temperature > 0
        if defaults.temperature > 0:
            values |= defaults.sampling
    if defaults.bos_id is not None:
        values.setdefault("bos_token_id", defaults.bos_id)
    if defaults.eos_ids:
        eos = list(defaults.eos_ids)
        values.setdefault("eos_token_id", eos[0] if len(eos) == 1 else eos)
    return json.dumps(values, indent=2).encode() + b"\n"


def _dtype_of_matrices(args: ModelArgs, dtypes: Mapping[str, torch.dtype]) -> str:
    """The one that all matrices fit into, as config.json states one for the model."""
    matrices = {dtypes[param.name] for param in parameters(args) if len(param.shape) > 1}
    return str(reduce(torch.promote_types, matrices)).removeprefix("torch.")
