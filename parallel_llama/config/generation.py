"""Reads sampling defaults and special ids from generation_config.json, config.json or GGUF."""

import logging
from dataclasses import dataclass, replace
from typing import Any

from parallel_llama.errors import UsageError
from parallel_llama.files.bounded_files import is_file
from parallel_llama.files.fields import Fields, naming, read_json_object
from parallel_llama.files.gguf_header import read_gguf_header
from parallel_llama.files.model_files import ModelFiles

logger = logging.getLogger(__name__)

MAX_TOKEN_ID = 2**31 - 1
NO_TOKEN_IDS = -1, 2**32 - 1  # -1 means no token; some GGUF files have it as an unsigned integer

# Unsupported settings of generation_config.json that change the sampled tokens, with the values
# that turn the settings off.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "encoder_repetition_penalty": (1, 1.0),
    "no_repeat_ngram_size": (0,),
    "typical_p": (1, 1.0),
    "epsilon_cutoff": (0, 0.0),
    "eta_cutoff": (0, 0.0),
    "num_beams": (1,),
    "bad_words_ids": ([],),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "sequence_bias": ({},),
    "penalty_alpha": (0, 0.0),
}


@dataclass(frozen=True)
class GenerationDefaults:
    """A model's sampling defaults and special ids; None where its files do not state a value."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None

    @property
    def sampling(self) -> dict[str, float]:
        """The stated sampling settings, by name."""
        names = "temperature", "top_p", "top_k", "min_p", "repetition_penalty"
        return {name: value for name in names if (value := getattr(self, name)) is not None}


def gguf_defaults(files: ModelFiles) -> GenerationDefaults:
    """The defaults of a GGUF file, completed by `files.sampling`.

    Raises: UsageError for a value of the wrong type; CheckpointError if the file is damaged.
    """
    fields = Fields(read_gguf_header(files.config).fields)
    with naming(files.config):
        defaults = _from_gguf(fields)
    sampling: dict[str, Any] = {**files.sampling, **defaults.sampling}
    return replace(defaults, **sampling)


def folder_defaults(files: ModelFiles) -> GenerationDefaults:
    """The defaults of generation_config.json, completed by the ids of config.json.

    Raises: as `gguf_defaults`.
    """
    path = files.path / "generation_config.json"
    defaults = GenerationDefaults()
    if is_file(path):
        fields = Fields(read_json_object(path))
        with naming(path):
            defaults = _sampling_from_hf(fields)
    fields = Fields(read_json_object(files.config))
    with naming(files.config):
        from_config = _ids_from_hf(fields)
    return replace(
        defaults,
        eos_ids=defaults.eos_ids or from_config.eos_ids,
        bos_id=from_config.bos_id if defaults.bos_id is None else defaults.bos_id,
    )


def _sampling_from_hf(fields: Fields) -> GenerationDefaults:
    """The settings of generation_config.json; without `do_sample: true`, greedy decoding.

    As in transformers, filters apply only with `do_sample`, and penalties always. Transformers'
    default top_k of 50 is not used, because no file states it.
    """
    ignored = [
        key
        for key, neutral in _UNSUPPORTED.items()
        if fields.has(key) and fields.values[key] not in neutral
    ]
    if ignored:
        logger.warning(
            "generation_config.json has %s, which is not supported and is ignored",
            ", ".join(ignored),
        )
    always = replace(
        _ids_from_hf(fields), repetition_penalty=fields.optional_number("repetition_penalty")
    )
    if not fields.flag("do_sample", False):
        return replace(always, temperature=0.0)
    return replace(
        always,
        temperature=fields.number("temperature", 1.0),
        top_p=fields.optional_number("top_p"),
        top_k=fields.optional_integer("top_k"),
        min_p=fields.optional_number("min_p"),
    )


def _ids_from_hf(fields: Fields) -> GenerationDefaults:
    return GenerationDefaults(
        eos_ids=_token_ids(fields, "eos_token_id"),
        bos_id=next(iter(_token_ids(fields, "bos_token_id")), None),
    )


def _from_gguf(fields: Fields) -> GenerationDefaults:
    """The ids that end a text, a turn or a message, and the sampling settings of newer files."""
    ends = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = [token for key in ends for token in _token_ids(fields, f"tokenizer.ggml.{key}")]
    return GenerationDefaults(
        temperature=fields.optional_number("general.sampling.temp"),
        top_p=fields.optional_number("general.sampling.top_p"),
        top_k=fields.optional_integer("general.sampling.top_k"),
        min_p=fields.optional_number("general.sampling.min_p"),
        repetition_penalty=fields.optional_number("general.sampling.penalty_repeat"),
        eos_ids=tuple(dict.fromkeys(ids)),
        bos_id=next(iter(_token_ids(fields, "tokenizer.ggml.bos_token_id")), None),
    )


def _token_ids(fields: Fields, key: str) -> tuple[int, ...]:
    """The token ids under a key: one id or a list, without NO_TOKEN_IDS."""
    ids = [token for token in fields.integers(key) if token not in NO_TOKEN_IDS]
    for token in ids:
        if not 0 <= token <= MAX_TOKEN_ID:
            raise UsageError(f"{key}={token} is not a token id")
    return tuple(dict.fromkeys(ids))
