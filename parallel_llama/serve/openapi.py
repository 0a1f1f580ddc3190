"""Generates the OpenAPI document at /openapi.json.

Source: OpenAPI Specification 3.1.1.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec
from starlette.responses import Response

from parallel_llama.serve.bodies import Body
from parallel_llama.serve.replies import ErrorReply, Reply
from parallel_llama.serve.service import RequestContext

Endpoint = Callable[[RequestContext], Awaitable[Response]]

_REF = "#/components/schemas/{name}"
_JSON, _TEXT, _EVENTS = "application/json", "text/plain", "text/event-stream"

_ERRORS = {
    400: "Invalid request; the message says why",
    401: "No valid API key",
    403: "The Host header does not name this server",
    404: "Model not found",
    408: "The body did not arrive in time",
    413: "The body is too long",
    415: "The content type is not application/json",
    429: "Too many completions are running or waiting; retry later",
    500: "Internal server error",
    503: "The engine is not ready; retry later",
}
_FOR_ALL, _FOR_BODIES, _FOR_COMPLETIONS = (401, 403, 500), (400, 404, 408, 413, 415), (429, 503)


@dataclass(frozen=True)
class Operation:
    """One route: its endpoint, and how the API's description presents it.

    Args:
        name: its operationId.
        path: in starlette's syntax, with at most one parameter, {name:path}.
        reply: the JSON of a 200; None for any object, or for plain text with is_text.
        body: the JSON of a request, which makes the operation a POST.
        chunk: the data of an event, for operations that can stream.
        can_be_unready: whether a 503 has the same content as a 200.
    """

    name: str
    path: str
    summary: str
    endpoint: Endpoint
    reply: type[Reply] | None = None
    body: type[Body] | None = None
    chunk: type[Reply] | None = None
    is_text: bool = False
    can_be_unready: bool = False

    @property
    def method(self) -> str:
        return "GET" if self.body is None else "POST"

    @property
    def has_parameter(self) -> bool:
        return "{" in self.path

    @property
    def errors(self) -> list[int]:
        statuses = {*_FOR_ALL, *(_FOR_BODIES if self.body else ())}
        statuses.update(_FOR_COMPLETIONS if self.chunk else ())
        statuses.update((404,) if self.has_parameter else ())
        return sorted(statuses)


@cache  # takes a few milliseconds
def description(operations: tuple[Operation, ...], version: str) -> dict[str, Any]:
    """The OpenAPI document of these operations, for a server of this version."""
    types = {
        type_: None
        for operation in operations
        for type_ in (operation.body, operation.reply, operation.chunk)
        if type_ is not None
    }
    _, schemas = msgspec.json.schema_components((*types, ErrorReply), ref_template=_REF)
    paths = {
        operation.path.replace(":path}", "}"): {operation.method.lower(): _operation(operation)}
        for operation in operations
    }
    return {
        "openapi": "3.1.1",
        "info": {"title": "parallel_llama", "version": version},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],  # a server without keys requires none
    }


def _operation(route: Operation) -> dict[str, Any]:
    answer = (
        {_TEXT: {"schema": {"type": "string"}}} if route.is_text else {_JSON: _schema(route.reply)}
    )
    if route.chunk is not None:
        answer[_EVENTS] = _schema(route.chunk)
    responses = {"200": {"description": route.summary, "content": answer}}
    if route.can_be_unready:
        responses["503"] = {"description": "Not ready", "content": answer}
    for status in route.errors:
        responses[str(status)] = {
            "description": _ERRORS[status],
            "content": {_JSON: _schema(ErrorReply)},
        }
    operation: dict[str, Any] = {"operationId": route.name, "summary": route.summary}
    if route.has_parameter:
        parameter = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
        operation["parameters"] = [parameter]
    if route.body is not None:
        operation["requestBody"] = {"required": True, "content": {_JSON: _schema(route.body)}}
    return {**operation, "responses": responses}


def _schema(type_: type[msgspec.Struct] | None) -> dict[str, Any]:
    schema = {"type": "object"} if type_ is None else {"$ref": _REF.format(name=type_.__name__)}
    return {"schema": schema}
