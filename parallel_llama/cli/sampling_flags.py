"""How tokens are drawn, as flags and as the keys of a line of a prompts file, to sampling settings.

What the settings mean and their limits is `request`'s; this only turns texts and JSON into them.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from parallel_llama.cli.arguments import (
    SEED,
    Flag,
    filled_text,
    input_file,
    number,
    shown,
    warn,
    whole,
)
from parallel_llama.cli.json_text import parse_json
from parallel_llama.errors import UsageError
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

# The flags that say what a completion must look like, and the kind of grammar that each gives.
GRAMMARS: dict[str, GrammarKind] = {
    "json_schema": "json_schema",
    "regex": "regex",
    "grammar": "lark",
}


def logit_bias(text: str) -> list[float]:
    """A token id and what is added to its logit, as ID:BIAS.

    >>> logit_bias("42:-1.5")
    [42, -1.5]
    """
    token, colon, bias = text.partition(":")
    try:
        if colon:
            return [whole(0, MAX_TOKEN_ID)(token), number(-MAX_BIAS, MAX_BIAS)(bias)]
    except ValueError:
        pass
    raise ValueError(
        f"not ID:BIAS, a token id and a number from {-MAX_BIAS:g} to {MAX_BIAS:g}, such as 42:-5"
    )


def json_schema(text: str) -> str:
    """A JSON schema, given as such or as the name of its file."""
    schema = text if text.lstrip().startswith("{") else grammar_file(text)
    if not isinstance(parse_json(schema), dict):
        raise ValueError("not a JSON schema, which is an object")
    return schema


def grammar_file(text: str) -> str:
    """The text of a grammar's file."""
    path = Path(input_file(text))
    try:
        with path.open("rb") as file:
            data = file.read(MAX_GRAMMAR_BYTES + 1)
        if len(data) > MAX_GRAMMAR_BYTES:
            raise ValueError(f"larger than {MAX_GRAMMAR_BYTES} bytes, the most that is read")
        return filled_text(data.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from None


# What a model's authors may state too; their values stand where nothing is given.
SAMPLING = (
    Flag(
        "temperature", "0 is greedy", number(0, 100), "T",
        default_text="the model's generation_config, else greedy",
    ),
    Flag("top-p", "sample from the smallest set with this probability", number(0, 1, True), "P"),
    Flag("top-k", "sample from the K likeliest tokens; 0 is all", whole(0), "K"),
    Flag("min-p", "drop tokens below this share of the likeliest", number(0, 1), "P"),
    Flag("repetition-penalty", "above 1, tokens of prompt and completion become less likely",
         number(MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY), "R"),
)  # fmt: skip

FLAGS = (
    Flag("max-tokens", "longest completion", whole(1, MAX_TOKEN_ID), "N", 128),
    Flag("min-tokens", "shortest completion", whole(0, MAX_TOKEN_ID), "N"),
    *SAMPLING,
    Flag("presence-penalty", "taken from the logit of a token that the completion has",
         number(-MAX_PENALTY, MAX_PENALTY), "A"),
    Flag("frequency-penalty", "the same, once for each time that the completion has it",
         number(-MAX_PENALTY, MAX_PENALTY), "A"),
    Flag("logit-bias", "added to the logit of a token", logit_bias, "ID:BIAS", repeatable=True),
    SEED,
    Flag("n", "completions of each prompt", whole(1, MAX_CHOICES), "N"),
    Flag("stop", "text that ends a completion", filled_text, "TEXT", repeatable=True),
    Flag("json-schema", "complete with JSON of this schema", json_schema, "FILE_OR_JSON"),
    Flag("regex", "complete with text that this describes", filled_text, "TEXT"),
    Flag("grammar", "complete with text of this Lark grammar", grammar_file, "FILE"),
    Flag("logprobs", "log-probabilities, and N alternatives each", whole(0, MAX_LOGPROBS), "N"),
    Flag("prompt-logprobs", "the same of the prompt's tokens", whole(0, MAX_LOGPROBS), "N"),
)  # fmt: skip


def given_sampling(**flags: Any) -> dict[str, Any]:
    """The sampling settings that were given, checked; the model's own fill the rest later.

    Raises: UsageError for settings that do not go together.
    """
    given = {name: value for name, value in flags.items() if value not in (None, [])}
    if "logit_bias" in given:
        given["logit_bias"] = tuple((token, bias) for token, bias in given["logit_bias"])
    shapes = [name for name in GRAMMARS if name in given]
    if len(shapes) > 1:
        names = [f"--{name.replace('_', '-')}" for name in shapes]
        raise UsageError(f"{' and '.join(names)}: a completion follows one of them; drop the rest")
    for name in shapes:
        given["grammar"] = Grammar(GRAMMARS[name], given.pop(name))
    SamplingParams(**given)
    return given


def settings_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling settings from JSON values under their names; ValueError says what is wrong."""
    settings = dict(values)
    if "logit_bias" in settings:
        settings["logit_bias"] = _biases(settings["logit_bias"])
    if settings.get("grammar") is not None:
        settings["grammar"] = _grammar(settings["grammar"])
    return settings


def warn_of_idle_filters(given: Mapping[str, Any], params: Iterable[SamplingParams]) -> None:
    """Say so where filters were asked for and nothing is drawn that they could change."""
    filters = [
        f"--{name.replace('_', '-')}" for name in ("top_p", "top_k", "min_p") if name in given
    ]
    if filters and all(own.is_greedy for own in params):
        have = "has" if len(filters) == 1 else "have"
        warn(f"{' and '.join(filters)} {have} no effect at temperature 0; add --temperature T")


def _biases(value: Any) -> dict[int, Any]:
    if not isinstance(value, dict) or not all(re.fullmatch("[0-9]{1,10}", key) for key in value):
        raise ValueError('logit_bias must map token ids to biases, as {"42": -5}')
    return {int(key): bias for key, bias in value.items()}


def _grammar(value: Any) -> Grammar:
    if not isinstance(value, dict) or value.keys() != {"kind", "text"}:
        raise ValueError(
            f'grammar is {shown(repr(value))}; write it as {{"kind": "regex", "text": "..."}}'
        )
    return Grammar(**value)
