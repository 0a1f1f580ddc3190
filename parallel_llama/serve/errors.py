"""Converts exceptions to an HTTP status and an error body in OpenAI's format."""

import logging
import re
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from parallel_llama.errors import CheckpointError, ContextExceeded, NumericalError, UsageError
from parallel_llama.serve.answer import Diverged, Stalled
from parallel_llama.serve.asgi import REASON
from parallel_llama.serve.bodies import FIELDS, NESTED_FIELDS, InvalidBody
from parallel_llama.serve.engine_client import Busy, NotReady, UnknownModel
from parallel_llama.serve.replies import ErrorDetail, ErrorReply

logger = logging.getLogger(__name__)


RETRY_AFTER_S = 1
MAX_MESSAGE_CHARS = 1000


class HTTPError(Exception):
    """The request is refused with this status, before its handler runs."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def error_reply(error: Exception, prompt: str | None = None) -> tuple[int, ErrorReply]:
    """The status and body for an error. Unexpected errors are logged and not shown to the client.

    Args:
        prompt: name of the body's field with the prompt.
    """
    message = str(error)
    match error:
        case HTTPError():
            type, code = _HTTP_ERRORS.get(error.status, ("invalid_request_error", None))
            return error.status, _reply(message, type, code=code)
        case ContextExceeded():
            code = "context_length_exceeded"
            return 400, _reply(message, "invalid_request_error", prompt, code)
        case UsageError():
            return 400, _reply(message, "invalid_request_error", _param(message), "invalid_value")
        case InvalidBody():
            return 400, _reply(message, "invalid_request_error", error.param, error.code)
        case msgspec.DecodeError() | RecursionError():
            message = f"the body is not valid JSON: {message}"
            return 400, _reply(message, "invalid_request_error", code="invalid_json")
        case UnknownModel():
            return 404, _reply(message, "invalid_request_error", "model", "model_not_found")
        case Busy():
            return 429, _reply(message, "rate_limit_error", code="overloaded")
        case NotReady():
            return 503, _reply(message, "service_unavailable_error")
        case CheckpointError():  # a broken chat template, found when it was rendered
            logger.error("%s", message)
            return 500, _reply(message, "server_error")
        case NumericalError():
            return 500, _reply(message, "server_error", code="numerical_error")
        case Stalled() | Diverged():
            return 500, _reply(message, "server_error")
    logger.error("unexpected error", exc_info=error)
    return 500, _reply("internal server error; see the server's log", "server_error")


def json_response(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def error_response(error: Exception, prompt: str | None = None) -> Response:
    """The response for an error, see `error_reply`; 429 and 503 have a Retry-After header."""
    return _ErrorResponse(*error_reply(error, prompt))


class _ErrorResponse(Response):
    """An error as JSON. It stores the error's code and parameter for the log in the scope."""

    media_type = "application/json"

    def __init__(self, status: int, reply: ErrorReply) -> None:
        super().__init__(reply.encode(), status)
        if status in (429, 503):
            self.headers["retry-after"] = str(RETRY_AFTER_S)
        self._error = reply.error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[REASON] = reason_of(self._error)
        await super().__call__(scope, receive, send)


def reason_of(error: ErrorDetail) -> dict[str, str]:
    """Code and parameter of an error for the log; its message may quote the client's data."""
    reason = {"code": error.code or error.type}
    if error.param is not None and _LOGGED_PARAM.fullmatch(error.param):
        reason["param"] = error.param
    return reason


_HTTP_ERRORS = {
    400: ("invalid_request_error", "invalid_request"),
    401: ("authentication_error", "invalid_api_key"),
    403: ("permission_error", "host_not_allowed"),
    404: ("not_found_error", "not_found"),
    405: ("invalid_request_error", "method_not_allowed"),
    408: ("invalid_request_error", "request_timeout"),
    413: ("invalid_request_error", "body_too_large"),
    414: ("invalid_request_error", "url_too_long"),
    415: ("invalid_request_error", "unsupported_media_type"),
    431: ("invalid_request_error", "headers_too_large"),
    503: ("service_unavailable_error", "overloaded"),
}
_ALIASES = {"template_vars": "chat_template_kwargs"}
_FIRST_WORD = re.compile("(?:prompt [0-9]+: )?([a-z_]+)")
_OWN_NAMES = "|".join(FIELDS | NESTED_FIELDS)
_LOGGED_PARAM = re.compile(rf"(?:{_OWN_NAMES})(?:\[[0-9.]*\]|\.(?:{_OWN_NAMES}))*")


def _param(message: str) -> str | None:
    """The field that an error is about: messages about a field begin with its name."""
    match = _FIRST_WORD.match(message)
    name = match and _ALIASES.get(match[1], match[1])
    if name in FIELDS:
        return name
    return "prompt" if message.startswith("prompt ") else None


def _reply(
    message: str, type: str, param: str | None = None, code: str | None = None
) -> ErrorReply:
    # Messages may quote client data of any length.
    if len(message) > MAX_MESSAGE_CHARS:
        message = message[:MAX_MESSAGE_CHARS] + "..."
    return ErrorReply(error=ErrorDetail(message=message, type=type, param=param, code=code))
