"""The JSON bodies of requests: every field with its type and bounds.

Unknown fields are refused; the error names a similar known field. Fields below "Ignored" are
accepted because SDKs send them. Fields in WITHOUT_EFFECT may have any value of their type, and are
logged once; so may `lora_int_id`, which is not logged. Other ignored fields must have the value
that changes nothing.

Source: the API reference of OpenAI; vLLM's extra parameters.
"""

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from parallel_llama import request
from parallel_llama.files.fields import did_you_mean
from parallel_llama.tokenizer.chat import MAX_MESSAGES

MAX_BODY_BYTES = 2 << 20
MAX_NESTED = 1 << 15  # lists and objects; each takes about 20 times its bytes in memory
MAX_TEXTS = 1 << 15  # strings, keys included; short ones take about 15 times their bytes in memory
MAX_TEXT_CHARS = 1 << 20
MAX_PROMPTS = 64
MAX_N = 16
MAX_STOPS = 16
MAX_STOP_CHARS = 64
MAX_TOOLS = 128
MAX_NAME_CHARS = 256
MAX_METADATA = 16

Text = Annotated[str, Meta(max_length=MAX_TEXT_CHARS)]
Name = Annotated[str, Meta(max_length=MAX_NAME_CHARS)]
AdapterName = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARS)]
Count = Annotated[int, Meta(ge=0, le=request.MAX_TOKEN_ID)]
PositiveCount = Annotated[int, Meta(ge=1, le=request.MAX_TOKEN_ID)]
TokenId = Annotated[int, Meta(ge=0, le=request.MAX_TOKEN_ID)]
TokenIds = Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_TEXT_CHARS)]
Prompts = Annotated[list[Text | TokenId | TokenIds], Meta(min_length=1, max_length=MAX_TEXT_CHARS)]
Stop = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Object = dict[str, Any]
# OpenAI's limits.
Metadata = dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]]


class Body(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Base of the bodies of requests."""


class Nested(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Base of the objects inside bodies."""


class StreamOptions(Nested):
    """Options of a streamed response."""

    include_usage: bool | None = None
    continuous_usage_stats: Literal[False] | None = None
    include_obfuscation: Literal[False] | None = None


class JsonSchema(Nested):
    """A JSON schema with a name chosen by the client."""

    name: Annotated[str, Meta(min_length=1, max_length=64)]
    schema: Object = msgspec.field(default_factory=dict)
    strict: bool | None = None
    description: Text | None = None


class ResponseFormat(Nested):
    """The format of the generated text."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Nested):
    """Constraints on the generated text; exactly one of the fields. From vLLM, not OpenAI."""

    json: Object | Text | None = None
    regex: Annotated[str, Meta(min_length=1, max_length=request.MAX_GRAMMAR_BYTES)] | None = None
    choice: Annotated[list[Stop], Meta(min_length=1, max_length=256)] | None = None
    grammar: Annotated[str, Meta(min_length=1, max_length=request.MAX_GRAMMAR_BYTES)] | None = None


class SamplingBody(Body):
    """Fields of chat and text completions. null is the same as omitting a field."""

    model: Name | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=1e6)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=request.MAX_TOKEN_ID)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=request.MAX_STOP_IDS)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    logit_bias: Annotated[dict[str, float], Meta(max_length=request.MAX_BIASES)] | None = None
    skip_special_tokens: bool | None = None
    # Whether special tokens written in prompts or messages are parsed; llama.cpp's name.
    parse_special: bool | None = None
    include_stop_str_in_output: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    cache_salt: Annotated[str, Meta(max_length=request.MAX_SALT_BYTES)] | None = None
    return_token_ids: bool | None = None
    request_id: Name | None = None
    # Ignored.
    user: Name | None = None
    safety_identifier: Name | None = None
    prompt_cache_key: Name | None = None
    prompt_cache_options: Object | None = None
    prompt_cache_retention: Literal["in-memory", "in_memory", "24h"] | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = None
    store: bool | None = None
    metadata: Annotated[Metadata, Meta(max_length=MAX_METADATA)] | None = None
    priority: Literal[0] | None = None


class ToolFunction(Nested):
    """A function that the model may call; its parameters are a JSON schema."""

    name: Annotated[str, Meta(min_length=1, max_length=64, pattern="^[a-zA-Z0-9_.-]+$")]
    description: Text | None = None
    parameters: Object | None = None
    strict: bool | None = None


class Tool(Nested):
    type: Literal["function"]
    function: ToolFunction


class ChosenFunction(Nested):
    name: Annotated[str, Meta(min_length=1, max_length=64)]


class ToolChoice(Nested):
    """The function that the model must call."""

    type: Literal["function"]
    function: ChosenFunction


class ChatBody(SamplingBody, kw_only=True):
    """Body of POST /v1/chat/completions. The chat template checks the messages later."""

    messages: Annotated[list[Object], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: PositiveCount | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=request.MAX_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Annotated[Object, Meta(max_length=16)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    # Passed to the chat template; ignored if the template does not use it.
    reasoning_effort: Effort | None = None
    # Ignored.
    verbosity: Literal["low", "medium", "high"] | None = None
    modalities: Annotated[list[Literal["text"]], Meta(max_length=1)] | None = None
    prediction: Object | None = None
    add_special_tokens: Literal[False] | None = None


class CompletionBody(SamplingBody, kw_only=True):
    """Body of POST /v1/completions."""

    prompt: Text | Prompts
    logprobs: Annotated[int, Meta(ge=0, le=request.MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    # Ignored.
    best_of: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None  # must equal n
    suffix: Literal[""] | None = None


class TokenizeBody(Body):
    """Body of POST /tokenize: a prompt, or messages for the chat template."""

    model: Name | None = None
    prompt: Text | None = None
    messages: Annotated[list[Object], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    chat_template_kwargs: Annotated[Object, Meta(max_length=16)] | None = None
    add_special_tokens: bool = True
    parse_special: bool = True
    return_token_strs: bool = False


class DetokenizeBody(Body):
    """Body of POST /detokenize."""

    tokens: Annotated[list[TokenId], Meta(max_length=MAX_TEXT_CHARS)]
    model: Name | None = None


class LoadAdapterBody(Body):
    """Body of POST /v1/load_lora_adapter; the path is relative to the server's folder."""

    lora_name: AdapterName
    lora_path: Annotated[str, Meta(min_length=1, max_length=4096)]
    load_inplace: Literal[False] | None = None


class UnloadAdapterBody(Body):
    """Body of POST /v1/unload_lora_adapter."""

    lora_name: AdapterName
    lora_int_id: int | None = None  # ignored


# Ignored fields that are logged.
WITHOUT_EFFECT = (
    "user", "safety_identifier", "prompt_cache_key", "prompt_cache_options",
    "prompt_cache_retention", "service_tier", "store", "metadata", "verbosity", "modalities",
    "prediction",
)  # fmt: skip


def _fields_below(base: type[msgspec.Struct]) -> Iterator[str]:
    """Names of the fields of a struct and of all its subclasses."""
    yield from base.__struct_fields__
    for kind in base.__subclasses__():
        yield from _fields_below(kind)


FIELDS = frozenset(_fields_below(Body))  # of bodies
NESTED_FIELDS = frozenset(_fields_below(Nested))  # of the objects in them
_UNKNOWN = re.compile("Object contains unknown field `(.*)`", re.DOTALL)
_MISSING = re.compile("Object missing required field `(.*)`")
_MAX_PARAM_CHARS = 64
B = TypeVar("B", bound=Body)


class InvalidBody(ValueError):
    """The body does not match its route's type; `param` and `code` are those of OpenAI's errors."""

    def __init__(self, message: str, param: str | None, code: str) -> None:
        super().__init__(message)
        self.param, self.code = param, code


def read_body(kind: type[B], data: bytes) -> B:
    """Decodes and checks a body of the type `kind`.

    Raises: InvalidBody; for invalid JSON msgspec.DecodeError, UnicodeDecodeError or RecursionError.
    """
    if _n_brackets(data) > MAX_NESTED and _n_brackets(_without_texts(data)) > MAX_NESTED:
        message = f"the body has more than {MAX_NESTED} lists and objects; use fewer"
        raise InvalidBody(message, None, "invalid_value")
    if data.count(b'"') > 2 * MAX_TEXTS and _without_escapes(data).count(b'"') > 2 * MAX_TEXTS:
        message = f"the body has more than {MAX_TEXTS} strings; use fewer"
        raise InvalidBody(message, None, "invalid_value")
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise _invalid(str(error), kind) from error


def _n_brackets(data: bytes) -> int:
    return data.count(b"[") + data.count(b"{")


def _without_escapes(data: bytes) -> bytes:
    """The JSON without the escaped backslashes and quotes in its strings."""
    return data.replace(rb"\\", b"").replace(rb"\"", b"")


def _without_texts(data: bytes) -> bytes:
    """The JSON without the contents of its strings."""
    return b"".join(_without_escapes(data).split(b'"')[::2])


def _invalid(text: str, kind: type[Body]) -> InvalidBody:
    reason, _, path = text.rpartition(" - at `$")
    if not reason:
        reason, path = text, ""
    path = path.rstrip("`").lstrip(".")[:_MAX_PARAM_CHARS]
    code = "invalid_type" if ", got `" in reason else "invalid_value"
    if match := _UNKNOWN.fullmatch(reason):
        code = "unknown_parameter"
        text += did_you_mean(match[1], NESTED_FIELDS if path else kind.__struct_fields__)
    elif match := _MISSING.fullmatch(reason):
        code = "missing_required_parameter"
    name = match[1][:_MAX_PARAM_CHARS] if match else ""
    return InvalidBody(text, ".".join(filter(None, (path, name))) or None, code)
