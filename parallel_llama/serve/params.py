"""From the fields of a body to how its tokens are drawn."""

import json
import logging
from functools import lru_cache
from typing import Any

from parallel_llama.engine.input_processor import InputProcessor
from parallel_llama.errors import UsageError, shown
from parallel_llama.request import Grammar, SamplingParams
from parallel_llama.serve.bodies import (
    WITHOUT_EFFECT,
    ResponseFormat,
    SamplingBody,
    StructuredOutputs,
)

logger = logging.getLogger(__name__)

# Fields of a body that are settings of the same name.
_SAME = (
    "temperature", "top_p", "top_k", "min_p", "n", "seed", "stop", "stop_token_ids", "ignore_eos",
    "min_tokens", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "skip_special_tokens", "include_stop_str_in_output", "cache_salt",
)  # fmt: skip

_ANY_OBJECT = Grammar("json_schema", '{"type":"object"}')


def sampling_params(
    inputs: InputProcessor,
    body: SamplingBody,
    *,
    max_tokens: int | None,
    grammar: Grammar | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """The model's own settings, with what a body gives in their place.

    Raises: UsageError.
    """
    if body.stream_options is not None and not body.stream:
        raise UsageError("stream_options are for a stream; set stream to true, or leave them out")
    for name in WITHOUT_EFFECT:
        if getattr(body, name, None) is not None:
            log_ignored(name)
    given: dict[str, Any] = {
        name: value for name in _SAME if (value := getattr(body, name)) is not None
    }
    if body.logit_bias:
        given["logit_bias"] = {_token(text): bias for text, bias in body.logit_bias.items()}
    return inputs.sampling_params(
        **given,
        max_tokens=max_tokens,
        grammar=grammar,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


@lru_cache(maxsize=64)
def log_ignored(name: str) -> None:
    """Log that a field has no effect: once for each name, not for each request."""
    logger.info("ignored, as it has no effect here", extra={"told": {"field": name}})


def grammar_of(body: SamplingBody) -> Grammar | None:
    """What a body says of the form of the answer.

    Raises: UsageError for a form that is none, or more than one.
    """
    given = [body.response_format, body.structured_outputs]
    if all(each is not None for each in given):
        raise UsageError("response_format and structured_outputs both say a form; give one")
    if body.structured_outputs is not None:
        return _of_structured_outputs(body.structured_outputs)
    return None if body.response_format is None else _of_response_format(body.response_format)


def _of_response_format(wanted: ResponseFormat) -> Grammar | None:
    if (wanted.type == "json_schema") != (wanted.json_schema is not None):
        raise UsageError(
            f"response_format.type={wanted.type!r}: json_schema goes with the type json_schema"
        )
    if wanted.json_schema is not None:
        return Grammar("json_schema", json.dumps(wanted.json_schema.schema))
    return _ANY_OBJECT if wanted.type == "json_object" else None


def _of_structured_outputs(wanted: StructuredOutputs) -> Grammar:
    given = [name for name in wanted.__struct_fields__ if getattr(wanted, name) not in (None, [])]
    if len(given) != 1:
        raise UsageError(
            f"structured_outputs has {len(given)} forms; give one of json, regex, choice, grammar"
        )
    if wanted.json is not None:
        schema = wanted.json if isinstance(wanted.json, str) else json.dumps(wanted.json)
        return Grammar("json_schema", schema)
    if wanted.regex is not None:
        return Grammar("regex", wanted.regex)
    if wanted.choice is not None:
        return Grammar("lark", "start: " + " | ".join(map(json.dumps, wanted.choice)))
    assert wanted.grammar is not None
    return Grammar("lark", wanted.grammar)


def _token(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 10:
        raise UsageError(f"logit_bias: {shown(text)} is no token id")
    return int(text)
