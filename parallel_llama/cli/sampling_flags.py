"""The sampling parameters as flags, and as keys of a line of a prompts file.

`request` defines and checks them; this module parses them from text and JSON.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from parallel_llama.cli.arguments import Flag, Flags, warn
from parallel_llama.cli.model import SEED
from parallel_llama.cli.parsers import filled_text, input_file, number, token_count, whole
from parallel_llama.errors import UsageError, quoted
from parallel_llama.files.bounded_files import read_again
from parallel_llama.files.fields import parse_json
from parallel_llama.request import (
    MAX_BIAS,
    MAX_CHOICES,
    MAX_GRAMMAR_BYTES,
    MAX_LOGPROBS,
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    MAX_TOKEN_ID,
    MIN_REPETITION_PENALTY,
    Grammar,
    GrammarKind,
    SamplingParams,
)

SETTINGS = tuple(field.name for field in fields(SamplingParams))

# The flags of structured output, and their kinds of grammar.
GRAMMARS: dict[str, GrammarKind] = {
    "json_schema": "json_schema",
    "regex": "regex",
    "grammar": "lark",
}


def logit_bias(text: str) -> tuple[int, float]:
    """A token id and its logit bias, as ID:BIAS.

    >>> logit_bias("42:-1.5")
    (42, -1.5)
    """
    token, colon, bias = text.partition(":")
    try:
        if colon:
            return whole(0, MAX_TOKEN_ID)(token), number(-MAX_BIAS, MAX_BIAS)(bias)
    except ValueError:
        pass
    raise ValueError(
        f"not ID:BIAS, a token id and a number from {-MAX_BIAS:g} to {MAX_BIAS:g}, such as 42:-5"
    )


def json_schema(text: str) -> str:
    """A JSON Schema, given as JSON or as a file."""
    schema = text if text.lstrip().startswith("{") else grammar_file(text)
    if not isinstance(parse_json(schema), dict):
        raise ValueError("not a JSON schema: it must be a JSON object")
    return schema


def grammar_file(text: str) -> str:
    """The text of a grammar file."""
    try:
        return filled_text(read_again(Path(input_file(text)), MAX_GRAMMAR_BYTES).decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text (byte {error.start})") from None


# The parameters for which a model's generation_config may have defaults.
SAMPLING: tuple[Flag[Any], ...] = (
    Flag(
        "temperature", "0 is greedy", number(0, 100), "T", aliases=("temp",), subject="sampling",
        default_text="the model's generation_config, else 0; smollm2: 0.2, with --top-p 0.9",
    ),
    Flag("top-p", "sample from the most likely tokens with this total probability",
         number(0, 1, True), "P", subject="sampling"),
    Flag("top-k", "sample from the K most likely tokens; 0 means all", whole(0), "K",
         subject="sampling"),
    Flag("min-p", "drop tokens below this fraction of the most likely token's probability",
         number(0, 1), "P", subject="sampling"),
    Flag("repetition-penalty", "above 1: make tokens of the prompt and completion less likely",
         number(MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY), "R", subject="sampling"),
)  # fmt: skip

FLAGS: tuple[Flag[Any], ...] = (
    Flag("max-tokens", "maximum new tokens of a completion, such as 500 or 2k",
         token_count(1, MAX_TOKEN_ID), "N", 128, subject="completions"),
    Flag("min-tokens", "minimum new tokens of a completion", token_count(0, MAX_TOKEN_ID), "N",
         subject="completions"),
    Flag("n", "completions per prompt", whole(1, MAX_CHOICES), "N", subject="completions"),
    Flag("stop", "text that ends a completion", filled_text, "TEXT", repeatable=True,
         subject="completions"),
    *SAMPLING,
    Flag("presence-penalty", "subtracted from the logit of every token in the completion",
         number(-MAX_PENALTY, MAX_PENALTY), "A", subject="sampling"),
    Flag("frequency-penalty", "subtracted from the logit for every occurrence of the token",
         number(-MAX_PENALTY, MAX_PENALTY), "A", subject="sampling"),
    Flag("logit-bias", "added to the logit of a token", logit_bias, "ID:BIAS", repeatable=True,
         subject="sampling"),
    SEED,
    Flag("json-schema", "make the completion match this JSON Schema", json_schema, "FILE_OR_JSON",
         subject="structured output"),
    Flag("regex", "make the completion match this regular expression", filled_text, "TEXT",
         subject="structured output"),
    Flag("grammar", "make the completion match this Lark grammar", grammar_file, "FILE",
         subject="structured output"),
    Flag("logprobs", "log-probability of each new token and N alternatives",
         whole(0, MAX_LOGPROBS), "N", subject="output"),
    Flag("prompt-logprobs", "log-probability of each prompt token and N alternatives",
         whole(0, MAX_LOGPROBS), "N", subject="output"),
)  # fmt: skip


def given_sampling(flags: Flags) -> dict[str, Any]:
    """The sampling parameters given as flags, checked; defaults are filled in later.

    Raises: UsageError for parameters that cannot be combined.
    """
    # --seed is the run's seed; the requests' seeds are derived from it.
    params = {flag.key: flags[flag] for flag in FLAGS if flag is not SEED}
    params = {name: value for name, value in params.items() if value not in (None, [])}
    if "logit_bias" in params:
        params["logit_bias"] = tuple(params["logit_bias"])
    grammar_names = [name for name in GRAMMARS if name in params]
    if len(grammar_names) > 1:
        names = [f"--{name.replace('_', '-')}" for name in grammar_names]
        raise UsageError(f"{' and '.join(names)} cannot be combined; give only one")
    for name in grammar_names:
        params["grammar"] = Grammar(GRAMMARS[name], params.pop(name))
    SamplingParams(**params)
    return params


def settings_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling parameters from JSON values by name; raises ValueError for invalid ones."""
    settings = dict(values)
    if "logit_bias" in settings:
        settings["logit_bias"] = _biases(settings["logit_bias"])
    if settings.get("grammar") is not None:
        settings["grammar"] = _grammar(settings["grammar"])
    return settings


def warn_of_idle_filters(given: Mapping[str, Any], params: Iterable[SamplingParams]) -> None:
    """Warns if --top-p, --top-k or --min-p is given and every completion is greedy."""
    filters = [
        f"--{name.replace('_', '-')}" for name in ("top_p", "top_k", "min_p") if name in given
    ]
    if filters and all(item.is_greedy for item in params):
        have = "has" if len(filters) == 1 else "have"
        warn(f"{' and '.join(filters)} {have} no effect at temperature 0; add --temperature T")


def _biases(value: Any) -> dict[int, Any]:
    if not isinstance(value, dict) or not all(re.fullmatch("[0-9]{1,10}", key) for key in value):
        raise ValueError('logit_bias must map token ids to biases, as in {"42": -5}')
    return {int(key): bias for key, bias in value.items()}


def _grammar(value: Any) -> Grammar:
    if not isinstance(value, dict) or value.keys() != {"kind", "text"}:
        raise ValueError(
            f'grammar is {quoted(repr(value))}; write it as {{"kind": "regex", "text": "..."}}'
        )
    return Grammar(**value)
