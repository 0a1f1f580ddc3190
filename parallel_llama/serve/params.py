"""Converts the fields of a body to sampling parameters and a grammar."""

import json
import logging
from functools import lru_cache
from typing import Any

from parallel_llama.engine.input_processor import InputProcessor
from parallel_llama.errors import UsageError, shown
from parallel_llama.request import Grammar, SamplingParams
from parallel_llama.serve import bodies

logger = logging.getLogger(__name__)

# Fields that are sampling parameters of the same name.
_SAME_NAME = (
    "temperature", "top_p", "top_k", "min_p", "n", "seed", "stop", "stop_token_ids", "ignore_eos",
    "min_tokens", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "skip_special_tokens", "include_stop_str_in_output", "cache_salt",
)  # fmt: skip

# Fields that have no effect on greedy requests, and their values that exclude no token.
_NEUTRAL = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}

_ANY_OBJECT = Grammar("json_schema", '{"type":"object"}')


def sampling_params(
    inputs: InputProcessor,
    body: bodies.SamplingBody,
    *,
    max_tokens: int | None,
    grammar: Grammar | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """The model's default sampling parameters, updated from a body.

    Raises: UsageError.
    """
    if body.stream_options is not None and not body.stream:
        raise UsageError("stream_options needs stream; set stream to true, or omit stream_options")
    for name in bodies.WITHOUT_EFFECT:
        if getattr(body, name, None) is not None:
            log_ignored(name)
    overrides: dict[str, Any] = {
        name: value for name in _SAME_NAME if (value := getattr(body, name)) is not None
    }
    if body.logit_bias:
        overrides["logit_bias"] = {_token(text): bias for text, bias in body.logit_bias.items()}
    params = inputs.sampling_params(
        **overrides,
        max_tokens=max_tokens,
        grammar=grammar,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )
    if params.is_greedy and body.temperature is None:
        for name in overrides.keys() & _NEUTRAL.keys():
            if getattr(params, name) != _NEUTRAL[name]:
                _warn_of_idle_filter(name)
    return params


@lru_cache(maxsize=64)
def log_ignored(name: str) -> None:
    """Logs that a field is ignored, once per name."""
    logger.info("ignored a field that has no effect", extra={"fields": {"field": name}})


@lru_cache
def _warn_of_idle_filter(name: str) -> None:
    """Warns that a filter has no effect, once per filter."""
    logger.warning(
        "the model's default temperature is 0, so this field has no effect in requests without "
        "temperature",
        extra={"fields": {"field": name}},
    )


def grammar_of(body: bodies.SamplingBody) -> Grammar | None:
    """The grammar that a body requires for the generated text; None if it requires none.

    Raises: UsageError for an inconsistent format, or for two formats.
    """
    formats = [body.response_format, body.structured_outputs]
    if all(format_ is not None for format_ in formats):
        raise UsageError("response_format and structured_outputs cannot be combined; give one")
    if body.structured_outputs is not None:
        return _grammar_of_structured_outputs(body.structured_outputs)
    return (
        None if body.response_format is None else _grammar_of_response_format(body.response_format)
    )


def _grammar_of_response_format(response_format: bodies.ResponseFormat) -> Grammar | None:
    if (response_format.type == "json_schema") != (response_format.json_schema is not None):
        raise UsageError(
            f"response_format.type={response_format.type!r}: give json_schema if and only if type "
            "is json_schema"
        )
    if response_format.json_schema is not None:
        return Grammar("json_schema", json.dumps(response_format.json_schema.schema))
    return _ANY_OBJECT if response_format.type == "json_object" else None


def _grammar_of_structured_outputs(outputs: bodies.StructuredOutputs) -> Grammar:
    constraints = [
        name for name in outputs.__struct_fields__ if getattr(outputs, name) not in (None, [])
    ]
    if len(constraints) != 1:
        raise UsageError(
            f"structured_outputs has {len(constraints)} constraints; give one of json, regex, "
            "choice, grammar"
        )
    if outputs.json is not None:
        schema = outputs.json if isinstance(outputs.json, str) else json.dumps(outputs.json)
        return Grammar("json_schema", schema)
    if outputs.regex is not None:
        return Grammar("regex", outputs.regex)
    if outputs.choice is not None:
        return Grammar("lark", "start: " + " | ".join(map(json.dumps, outputs.choice)))
    assert outputs.grammar is not None
    return Grammar("lark", outputs.grammar)


def _token(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 10:
        raise UsageError(f"logit_bias: {shown(text)} is not a token id")
    return int(text)
