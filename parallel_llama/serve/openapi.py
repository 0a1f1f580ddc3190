"""What /openapi.json says: every operation, its body and its replies, as OpenAPI 3.1 writes them.

Source: OpenAPI Specification 3.1.1.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec

from parallel_llama.serve.bodies import (
    BODIES,
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)
from parallel_llama.serve.replies import (
    REPLIES,
    ChatChunk,
    ChatReply,
    CompletionReply,
    Detokenized,
    ErrorReply,
    Model,
    Models,
    Reply,
    TokenizerInfo,
    Tokens,
)

_REF = "#/components/schemas/{name}"
_JSON, _TEXT, _EVENTS = "application/json", "text/plain", "text/event-stream"

_ERRORS = {
    400: "the request cannot be carried out; the message says why",
    401: "no valid API key",
    403: "a host's name that is not this server's",
    404: "no such model",
    408: "the body did not come in time",
    413: "the body is too long",
    415: "the body is not sent as application/json",
    429: "too many completions are waiting or running; come again",
    500: "the server met an error",
    503: "the engine is not there now; come again",
}
_FOR_ALL, _FOR_BODIES, _FOR_COMPLETIONS = (401, 403, 500), (400, 404, 408, 413, 415), (429, 503)


@dataclass(frozen=True)
class _Operation:
    """One method of one path; a reply that is no struct of ours is any object, or plain text."""

    name: str
    path: str
    summary: str
    body: type[Body] | None = None
    reply: type[Reply] | None = None
    chunk: type[Reply] | None = None  # an event's data, where the body asks for a stream
    is_text: bool = False
    can_be_unready: bool = False  # its 503 is a reply like its 200

    @property
    def errors(self) -> list[int]:
        found = {*_FOR_ALL, *(_FOR_BODIES if self.body else ())}
        found.update(_FOR_COMPLETIONS if self.chunk else ())
        found.update((404,) if "{name}" in self.path else ())
        return sorted(found)


_CHAT = _Operation(
    "chat",
    "/v1/chat/completions",
    "The model's answer to a conversation",
    ChatBody,
    ChatReply,
    ChatChunk,
)
_COMPLETE = _Operation(
    "complete",
    "/v1/completions",
    "How some prompts go on",
    CompletionBody,
    CompletionReply,
    CompletionReply,
)
OPERATIONS = (
    _CHAT,
    _COMPLETE,
    _Operation("tokenize", "/tokenize", "The token ids of a text or a chat", TokenizeBody, Tokens),
    _Operation("detokenize", "/detokenize", "The text of token ids", DetokenizeBody, Detokenized),
    _Operation(
        "tokenizer_info", "/tokenizer_info", "What clients that count know", reply=TokenizerInfo
    ),
    _Operation("models", "/v1/models", "The names of the model", reply=Models),
    _Operation("model", "/v1/models/{name}", "One of them", reply=Model),
    _Operation("status", "/status", "What runs here and how busy it is"),
    _Operation("metrics", "/metrics", "Counts and times for Prometheus", is_text=True),
    _Operation("version", "/version", "The server's version"),
    _Operation("live", "/health/live", "Whether the server runs"),
    _Operation("ready", "/health/ready", "Whether requests are taken", can_be_unready=True),
    _Operation("health", "/health", "The same", can_be_unready=True),
    _Operation("openapi", "/openapi.json", "This description"),
)


@cache
def description(version: str) -> dict[str, Any]:
    """The document, for a server of this version; made once, as that takes milliseconds."""
    _, schemas = msgspec.json.schema_components((*BODIES, *REPLIES), ref_template=_REF)
    paths = {
        each.path: {"get" if each.body is None else "post": _operation(each)} for each in OPERATIONS
    }
    return {
        "openapi": "3.1.1",
        "info": {"title": "parallel_llama", "version": version},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],  # a server without keys asks for none
    }


def _operation(own: _Operation) -> dict[str, Any]:
    answer = {_TEXT: {"schema": {"type": "string"}}} if own.is_text else {_JSON: _schema(own.reply)}
    if own.chunk is not None:
        answer[_EVENTS] = _schema(own.chunk)
    responses = {"200": {"description": own.summary, "content": answer}}
    if own.can_be_unready:
        responses["503"] = {"description": "They are not", "content": answer}
    for status in own.errors:
        responses[str(status)] = {
            "description": _ERRORS[status],
            "content": {_JSON: _schema(ErrorReply)},
        }
    operation: dict[str, Any] = {"operationId": own.name, "summary": own.summary}
    if "{name}" in own.path:
        parameter = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
        operation["parameters"] = [parameter]
    if own.body is not None:
        operation["requestBody"] = {"required": True, "content": {_JSON: _schema(own.body)}}
    return {**operation, "responses": responses}


def _schema(kind: type[msgspec.Struct] | None) -> dict[str, Any]:
    own = {"type": "object"} if kind is None else {"$ref": _REF.format(name=kind.__name__)}
    return {"schema": own}
