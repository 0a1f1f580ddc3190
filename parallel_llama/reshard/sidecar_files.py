"""The small files beside a model's weights: tokenizer, templates, special ids."""

import logging
from pathlib import Path
from typing import Any

from parallel_llama.config.generation import GenerationDefaults
from parallel_llama.errors import UsageError
from parallel_llama.files.bounded_files import is_file, is_folder, read_bytes
from parallel_llama.files.fields import read_json_object
from parallel_llama.files.model_files import TOKENIZER_FILES, ModelFiles
from parallel_llama.reshard.layout import json_text
from parallel_llama.reshard.target_folder import TargetKind
from parallel_llama.tokenizer.gguf import export_gguf_tokenizer

# Files that are copied unchanged.
SIDECARS = (
    *TOKENIZER_FILES,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
TEMPLATES = "additional_chat_templates"
MAX_SIDECAR_BYTES = 256 << 20

logger = logging.getLogger(__name__)


def sidecar_files(
    source: ModelFiles, kind: TargetKind, defaults: GenerationDefaults
) -> dict[str, bytes]:
    """The small files of the target, copied or made from the tokenizer of a GGUF file."""
    if source.kind == "gguf":
        files = _gguf_tokenizer(source.path)
    else:
        templates = sorted((source.path / TEMPLATES).glob("*.jinja"))
        names = [*SIDECARS, *(f"{TEMPLATES}/{path.name}" for path in templates)]
        # Built-in chat formats have no template; params.json identifies Meta's or Mistral's format.
        if kind == "native" and source.kind in ("meta", "native"):
            names.append("params.json")
        files = {
            name: read_bytes(source.path / name, MAX_SIDECAR_BYTES)
            for name in names
            if is_file(source.path / name)
        }
    files["generation_config.json"] = _generation_config(source, defaults)
    return files


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
    elif defaults.temperature is not None:
        values["do_sample"] = defaults.temperature > 0
        if defaults.temperature > 0:
            values |= defaults.sampling
    if defaults.bos_id is not None:
        values.setdefault("bos_token_id", defaults.bos_id)
    if defaults.eos_ids:
        eos = list(defaults.eos_ids)
        values.setdefault("eos_token_id", eos[0] if len(eos) == 1 else eos)
    return json_text(values)
