"""The bodies that clients send, every field with its type and bound.

A field that is not listed is refused, with the name that it is nearest to: nothing is accepted and
ignored, but for those under "taken without effect", which ask for what is so anyhow.

Source: the API reference of OpenAI; vLLM's extra parameters.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from parallel_llama.request import (
    MAX_BIASES,
    MAX_GRAMMAR_BYTES,
    MAX_LOGPROBS,
    MAX_SALT_BYTES,
    MAX_STOP_IDS,
    MAX_TOKEN_ID,
)
from parallel_llama.tokenizer.chat import MAX_MESSAGES

MAX_BODY_BYTES = 2 << 20
MAX_TEXT_CHARS = 1 << 20
MAX_PROMPTS = 64
MAX_N = 16
MAX_STOPS = 16
MAX_STOP_CHARS = 64
MAX_TOOLS = 128
MAX_NAME_CHARS = 256

Text = Annotated[str, Meta(max_length=MAX_TEXT_CHARS)]
Name = Annotated[str, Meta(max_length=MAX_NAME_CHARS)]
Count = Annotated[int, Meta(ge=0, le=MAX_TOKEN_ID)]
TokenId = Annotated[int, Meta(ge=0, le=MAX_TOKEN_ID)]
TokenIds = Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_TEXT_CHARS)]
Stop = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
Object = dict[str, Any]


class Body(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What all bodies have in common: what they are checked against."""


class StreamOptions(Body):
    """What a stream brings beside text."""

    include_usage: bool | None = None
    continuous_usage_stats: Literal[False] | None = None
    include_obfuscation: Literal[False] | None = None


class JsonSchema(Body):
    """A schema under a name, which clients choose for themselves."""

    name: Annotated[str, Meta(min_length=1, max_length=64)]
    schema: Object = msgspec.field(default_factory=dict)
    strict: bool | None = None
    description: Text | None = None


class ResponseFormat(Body):
    """What an answer has to look like."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Body):
    """The same, with what else a grammar can say; vLLM's."""

    json: Object | Text | None = None
    regex: Annotated[str, Meta(min_length=1, max_length=MAX_GRAMMAR_BYTES)] | None = None
    choice: Annotated[list[Stop], Meta(min_length=1, max_length=256)] | None = None
    grammar: Annotated[str, Meta(min_length=1, max_length=MAX_GRAMMAR_BYTES)] | None = None


class SamplingBody(Body):
    """What both kinds of completion can ask for; null is the same as leaving a field out."""

    model: Name | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=1e6)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MAX_TOKEN_ID)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_IDS)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    logit_bias: Annotated[dict[str, float], Meta(max_length=MAX_BIASES)] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    cache_salt: Annotated[str, Meta(max_length=MAX_SALT_BYTES)] | None = None
    return_token_ids: bool | None = None
    request_id: Name | None = None
    # Taken without effect.
    user: Name | None = None
    service_tier: Literal["auto", "default"] | None = None
    priority: Literal[0] | None = None


class ToolFunction(Body):
    """A function that an answer can call; its parameters are a JSON schema."""

    name: Annotated[str, Meta(min_length=1, max_length=64, pattern="^[a-zA-Z0-9_.-]+$")]
    description: Text | None = None
    parameters: Object | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: ToolFunction


class ChosenFunction(Body):
    name: Annotated[str, Meta(min_length=1, max_length=64)]


class ToolChoice(Body):
    """The one function that the answer has to call."""

    type: Literal["function"]
    function: ChosenFunction


class ChatBody(SamplingBody, kw_only=True):
    """POST /v1/chat/completions. The template's own checks of messages come later."""

    messages: Annotated[list[Object], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Annotated[Object, Meta(max_length=16)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    # Taken without effect.
    store: Literal[False] | None = None
    metadata: Annotated[dict[str, str], Meta(max_length=16)] | None = None
    add_special_tokens: Literal[False] | None = None


class CompletionBody(SamplingBody, kw_only=True):
    """POST /v1/completions."""

    prompt: (
        Text
        | Annotated[
            list[Text | Annotated[int, Meta(ge=0, le=MAX_TOKEN_ID)] | TokenIds],
            Meta(min_length=1, max_length=MAX_TEXT_CHARS),
        ]
    )
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    # Taken without effect.
    best_of: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    suffix: Literal[""] | None = None


class TokenizeBody(Body):
    """POST /tokenize: of a text, or of a conversation with its template."""

    model: Name | None = None
    prompt: Text | None = None
    messages: Annotated[list[Object], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    chat_template_kwargs: Annotated[Object, Meta(max_length=16)] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False


class DetokenizeBody(Body):
    """POST /detokenize."""

    tokens: Annotated[list[TokenId], Meta(max_length=MAX_TEXT_CHARS)]
    model: Name | None = None


BODIES: tuple[type[Body], ...] = (ChatBody, CompletionBody, TokenizeBody, DetokenizeBody)
