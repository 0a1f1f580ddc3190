"""The JSON bodies of responses, in OpenAI's format.

Source: the API reference of OpenAI, and the models of its Python client.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

FinishReason = Literal["stop", "length", "tool_calls"]


class Reply(msgspec.Struct, kw_only=True):
    """Base of all replies. UNSET fields, which the client did not request, are not encoded."""

    def encode(self) -> bytes:
        return _ENCODER.encode(self)

    def encode_with(self, choices: Sequence[bytes]) -> bytes:
        """The encoding, with choices that have already been encoded."""
        fields = {
            name: value
            for name, value in msgspec.structs.asdict(self).items()
            if value is not UNSET
        }
        return _ENCODER.encode({**fields, "choices": [msgspec.Raw(choice) for choice in choices]})


class ErrorDetail(Reply):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorReply(Reply):
    error: ErrorDetail


class PromptTokensDetails(Reply):
    cached_tokens: int


class Usage(Reply):
    """Token counts; `prompt_tokens_details` counts those found in the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(Reply):
    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(TopLogprob, kw_only=True):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Reply):
    content: list[ContentLogprob]
    refusal: None = None


class CalledFunction(Reply):
    name: str
    arguments: str


class ToolCall(Reply):
    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class ChatMessage(Reply, omit_defaults=True):
    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(Reply):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    token_ids: Sequence[int] | UnsetType = UNSET


class ChatReply(Reply):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"
    prompt_token_ids: Sequence[int] | UnsetType = UNSET


class ToolCallDelta(Reply):
    index: int
    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class ChatDelta(Reply, omit_defaults=True):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(Reply):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    token_ids: Sequence[int] | UnsetType = UNSET


class ChatChunk(Reply, omit_defaults=True):
    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: Sequence[int] | UnsetType = UNSET


class CompletionLogprobs(Reply):
    """Lists with one item per token; null for the first token of an echoed prompt."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Reply):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    token_ids: Sequence[int] | UnsetType = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET


class CompletionReply(Reply, omit_defaults=True):
    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class Model(Reply):
    """The model or an adapter.

    `max_model_len` is the context. `max_fitting_tokens` is the maximum length of prompt and
    completion together, which is less if the KV cache is smaller than the context.
    """

    id: str
    created: int
    max_model_len: int
    max_fitting_tokens: int
    parent: str | None = None  # of an adapter: its base model
    object: Literal["model"] = "model"
    owned_by: str = "parallel_llama"


class Models(Reply):
    data: list[Model]
    object: Literal["list"] = "list"


class Tokens(Reply):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(Reply):
    prompt: str


class TokenizerInfo(Reply):
    """Tokenizer metadata; `chat_template` is null if the template is built in."""

    bos_token: str | None
    eos_token: str | None
    chat_template: str | None
    max_model_len: int


_ENCODER = msgspec.json.Encoder()
