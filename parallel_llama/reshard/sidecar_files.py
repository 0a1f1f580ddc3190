"""The small files beside a model's weights: tokenizer, templates, special ids."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parallel_llama.config.generation import GenerationDefaults
from parallel_llama.config.gguf_fields import gguf_fields
from parallel_llama.config.layouts import load_generation_defaults
from parallel_llama.dtypes import STORED
from parallel_llama.errors import UsageError, listed
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.files.bounded_files import is_file, is_folder, read_bytes
from parallel_llama.files.fields import read_json_object
from parallel_llama.files.gguf_header import read_gguf_header
from parallel_llama.files.model_files import PARAMS, TOKENIZER_FILES, ModelFiles
from parallel_llama.reshard.gguf_types import file_type
from parallel_llama.reshard.layout import json_text
from parallel_llama.tokenizer.gguf import export_gguf_tokenizer
from parallel_llama.tokenizer.gguf_fields import tokenizer_fields

# Files that are copied unchanged. Built-in chat formats have no template; params.json identifies
# Meta's or Mistral's format. A Meta folder has its own params.json instead.
SIDECARS = (
    *TOKENIZER_FILES,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    PARAMS,
)
TEMPLATES = "additional_chat_templates"
MAX_SIDECAR_BYTES = 256 << 20

# Fields of a GGUF file that describe its tensors, and are not copied to another file.
_TENSOR_FIELDS = (
    "general.architecture",
    "general.alignment",
    "general.file_type",
    "general.quantization_version",
)
_QUANTIZATION_VERSION = 2  # of ggml's blocks

logger = logging.getLogger(__name__)


def sidecar_files(source: ModelFiles, defaults: GenerationDefaults) -> dict[str, bytes]:
    """The small files of the target, copied or made from the tokenizer of a GGUF file."""
    if source.kind == "gguf":
        files = _gguf_tokenizer(source.path)
    else:
        templates = sorted((source.path / TEMPLATES).glob("*.jinja"))
        names = [*SIDECARS, *(f"{TEMPLATES}/{path.name}" for path in templates)]
        files = {
            name: read_bytes(source.path / name, MAX_SIDECAR_BYTES)
            for name in names
            if is_file(source.path / name)
        }
    files["generation_config.json"] = _generation_config(source, defaults)
    return files


def gguf_file_fields(
    source: ModelFiles, args: ModelArgs, types: Mapping[str, str]
) -> dict[str, Any]:
    """All fields of the header of a GGUF file with tensors of these types.

    Raises: UsageError for a family or a tokenizer that cannot be written; CheckpointError if the
    tokenizer is damaged.
    """
    copied: dict[str, Any] = {}
    if source.kind == "gguf":
        fields = read_gguf_header(source.config).fields
        sampling: dict[str, Any] = {**source.sampling}
        copied = _sampling_fields(GenerationDefaults(**sampling)) | {
            key: value
            for key, value in fields.items()
            if key.startswith(("general.", "tokenizer."))
            and key not in _TENSOR_FIELDS
            and value != []
        }
        source_type = fields.get("general.file_type")
    else:
        defaults, source_type = load_generation_defaults(source), None
        copied = _sampling_fields(defaults)
        if any(is_file(source.path / name) for name in TOKENIZER_FILES):
            copied |= tokenizer_fields(source.path, args.vocab_size, defaults)
        else:
            logger.warning("written without a tokenizer: %s has none", source.path)
    written_type = file_type(types.values())
    description = {"general.file_type": source_type if written_type is None else written_type}
    if not {*types.values()} <= {*STORED}:
        description["general.quantization_version"] = _QUANTIZATION_VERSION
    file_fields = {key: value for key, value in description.items() if value is not None}
    return gguf_fields(args) | {"general.type": "model"} | file_fields | copied


def _sampling_fields(defaults: GenerationDefaults) -> dict[str, Any]:
    """The header fields of the sampling settings; for greedy decoding, only the penalty."""
    keys = {"repetition_penalty": "penalty_repeat"}
    if defaults.temperature:
        keys |= {"temperature": "temp", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p"}
    fields: dict[str, Any] = {
        f"general.sampling.{key}": defaults.sampling[name]
        for name, key in keys.items()
        if name in defaults.sampling
    }
    if defaults.repetition_penalty is not None:
        fields["general.sampling.penalty_last_n"] = -1  # of all tokens, as in transformers
    return fields


def _gguf_tokenizer(path: Path) -> dict[str, bytes]:
    try:
        return export_gguf_tokenizer(path)
    except UsageError as error:
        logger.warning("written without a tokenizer: %s", error)
        return {}


def _generation_config(source: ModelFiles, defaults: GenerationDefaults) -> bytes:
    """generation_config.json of the source, with the special ids that other files state."""
    path = source.path / "generation_config.json"
    values: dict[str, Any] = {}
    if is_folder(source.path) and is_file(path):
        values = read_json_object(path)
    elif defaults.temperature:
        values = {"do_sample": True, **defaults.sampling}
    elif defaults.sampling:
        values = {"do_sample": False}
        if defaults.repetition_penalty is not None:
            values["repetition_penalty"] = defaults.repetition_penalty
        left_out = [name for name in ("top_p", "top_k", "min_p") if name in defaults.sampling]
        if left_out:
            logger.warning(
                "written without %s of %s: generation_config.json has no filters for greedy "
                "decoding",
                listed(left_out),
                source.path,
            )
    if defaults.bos_id is not None:
        values.setdefault("bos_token_id", defaults.bos_id)
    if defaults.eos_ids:
        eos = list(defaults.eos_ids)
        values.setdefault("eos_token_id", eos[0] if len(eos) == 1 else eos)
    return json_text(values)
