"""What goes wrong, as a status and a body in OpenAI's form."""

import logging

import msgspec
from starlette.responses import Response

from parallel_llama.errors import CheckpointError, ContextExceeded, NumericalError, UsageError
from parallel_llama.serve.answer import Diverged, Stalled
from parallel_llama.serve.engine_client import Busy, NotReady
from parallel_llama.serve.replies import ErrorDetail, ErrorReply, Reply
from parallel_llama.serve.service import UnknownModel

logger = logging.getLogger(__name__)


RETRY_AFTER_S = 1
MAX_MESSAGE_CHARS = 1000


class Refused(Exception):
    """A request that is turned away before its body is looked at."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def error_reply(error: Exception) -> tuple[int, ErrorReply]:
    """The status and the body for an error; one that nobody expected is logged, and not shown."""
    message = str(error)
    match error:
        case Refused():
            return error.status, _reply(message, _TYPES.get(error.status, "invalid_request_error"))
        case ContextExceeded():
            return 400, _reply(message, "invalid_request_error", code="context_length_exceeded")
        case UsageError():
            return 400, _reply(message, "invalid_request_error")
        case msgspec.ValidationError():
            _what, found, where = message.rpartition(" - at `$.")
            param = where.rstrip("`") if found else None
            return 400, _reply(message, "invalid_request_error", param)
        case msgspec.DecodeError() | RecursionError():
            return 400, _reply(f"the body is no JSON: {message}", "invalid_request_error")
        case UnknownModel():
            return 404, _reply(message, "invalid_request_error", "model", "model_not_found")
        case Busy():
            return 429, _reply(message, "rate_limit_error", code="overloaded")
        case NotReady():
            return 503, _reply(message, "service_unavailable_error")
        case CheckpointError():  # its chat template: a conversation showed what it is
            logger.error("%s", message)
            return 500, _reply(message, "server_error")
        case NumericalError():
            return 500, _reply(message, "server_error", code="numerical_error")
        case Stalled() | Diverged():
            return 500, _reply(message, "server_error")
    logger.error("an error that nobody expected", exc_info=error)
    return 500, _reply("the server met an error that is in its log", "server_error")


def json_response(reply: Reply, status: int = 200) -> Response:
    return Response(reply.encode(), status, media_type="application/json")


def error_response(error: Exception) -> Response:
    """The response that tells of an error; with when to come again, where that may help."""
    status, reply = error_reply(error)
    response = json_response(reply, status)
    if status in (429, 503):
        response.headers["retry-after"] = str(RETRY_AFTER_S)
    return response


_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}


def _reply(
    message: str, type: str, param: str | None = None, code: str | None = None
) -> ErrorReply:
    # Some messages hold what the client sent, however long it is.
    if len(message) > MAX_MESSAGE_CHARS:
        message = message[:MAX_MESSAGE_CHARS] + "..."
    return ErrorReply(error=ErrorDetail(message=message, type=type, param=param, code=code))
