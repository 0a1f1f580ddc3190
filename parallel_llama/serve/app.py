"""The table of routes, the handlers of the simple routes, and the application."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from typing import TypeVar

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

import parallel_llama
from parallel_llama.engine.input_processor import InputProcessor
from parallel_llama.errors import UsageError
from parallel_llama.serve import bodies, replies
from parallel_llama.serve.access import ACCOUNT
from parallel_llama.serve.adapters import load_adapter, unload_adapter
from parallel_llama.serve.asgi import CLIENT_CLOSED_REQUEST, ClientDisconnected, JSONBody
from parallel_llama.serve.chat import chat
from parallel_llama.serve.completions import complete
from parallel_llama.serve.engine_client import shutting_down
from parallel_llama.serve.errors import HTTPError, error_response, json_response
from parallel_llama.serve.fair_threads import LARGE_WORK
from parallel_llama.serve.openapi import Operation, description
from parallel_llama.serve.page_files import page_routes
from parallel_llama.serve.service import RequestContext, Service
from parallel_llama.serve.status import EngineCollector, status_of
from parallel_llama.serve.tools import conversation


async def tokenize(context: RequestContext, body: bodies.TokenizeBody) -> Response:
    """Token ids of a text, or of a conversation rendered with the chat template."""
    context.service.require_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise UsageError("give either prompt or messages")
    if body.prompt is not None and (body.tools or body.chat_template_kwargs):
        raise UsageError("tools and chat_template_kwargs go with messages, not with prompt")
    reply = context.in_thread(
        lambda: _tokens(context.inputs, body).encode(), renders=body.messages is not None
    )
    return JSONBody(await context.until_disconnect(reply))


def _tokens(inputs: InputProcessor, body: bodies.TokenizeBody) -> replies.Tokens:
    if body.prompt is not None:
        tokens = inputs.tokenizer.encode(
            body.prompt, bos=body.add_special_tokens, special=body.parse_special
        )
    else:
        chat = conversation(
            inputs.chat_template,
            body.messages or (),
            body.tools or (),
            body.chat_template_kwargs or {},
            parse_special=body.parse_special,
        )
        tokens = list(inputs.encode(chat))
    texts = None
    if body.return_token_strs:
        pieces = [inputs.tokenizer.vocabulary.piece(token, skip_special=False) for token in tokens]
        texts = [piece.decode("utf-8", "replace") for piece in pieces]
    return replies.Tokens(
        count=len(tokens), max_model_len=inputs.max_seq_len, tokens=tokens, token_strs=texts
    )


async def detokenize(context: RequestContext, body: bodies.DetokenizeBody) -> Response:
    """Text of token ids, special tokens included."""
    context.service.require_model(body.model)
    inputs = context.inputs

    def reply() -> bytes:
        inputs.check_ids("tokens", body.tokens)
        text = inputs.tokenizer.decode(body.tokens, skip_special=False)
        return replies.Detokenized(prompt=text).encode()

    return JSONBody(await context.until_disconnect(context.in_thread(reply)))


async def tokenizer_info(context: RequestContext) -> Response:
    inputs = context.inputs
    tokenizer, template = inputs.tokenizer, inputs.chat_template

    def text_of(ids: Iterable[int]) -> str | None:
        first = min(ids, default=None)
        return None if first is None else tokenizer.decode([first], skip_special=False)

    return json_response(
        replies.TokenizerInfo(
            bos_token=text_of(() if tokenizer.bos_id is None else (tokenizer.bos_id,)),
            eos_token=text_of(tokenizer.eos_ids),
            chat_template=(template.template_text or None) if template else None,
            max_model_len=inputs.max_seq_len,
        )
    )


B = TypeVar("B", bound=bodies.Body)
Handler = Callable[[RequestContext, B], Awaitable[Response]]


def make_app(service: Service) -> Starlette:
    """The application that serves one model."""
    app = Starlette(
        routes=[
            *(_route(service, operation) for operation in _operations(service)),
            *page_routes(),
        ],
        exception_handlers={404: _route_not_found, 405: _method_not_allowed},
    )
    app.router.redirect_slashes = False
    return app


async def models(context: RequestContext) -> Response:
    service = context.service
    names = [*service.names, *service.adapters]
    return json_response(replies.Models(data=[_model(service, name) for name in names]))


async def model(context: RequestContext) -> Response:
    name = context.request.path_params["name"]
    context.service.require_model(name)
    return json_response(_model(context.service, name))


async def status(context: RequestContext) -> Response:
    return json_response(status_of(context.service))


async def metrics(context: RequestContext) -> Response:
    collector = EngineCollector(context.service.engine)
    return Response(generate_latest(collector), media_type=CONTENT_TYPE_LATEST)


async def version(_: RequestContext) -> Response:
    return json_response({"version": parallel_llama.__version__})


async def live(_: RequestContext) -> Response:
    return json_response({"status": "live"})


async def ready(context: RequestContext) -> Response:
    engine = context.service.engine
    loaded = engine.loaded if engine.is_ready else None
    body = {"status": engine.state, "tp_size": loaded and len(loaded.ranks)}
    return json_response(body, 200 if engine.is_ready else 503)


async def openapi(context: RequestContext) -> Response:
    return json_response(description(_operations(context.service), parallel_llama.__version__))


def _post(
    name: str,
    path: str,
    summary: str,
    handler: Handler[B],
    body: type[B],
    reply: type[replies.Reply] | None = None,
    chunk: type[replies.Reply] | None = None,
    *,
    is_text: bool = False,
) -> Operation:
    """A POST operation: its endpoint reads a body of this type and passes it to the handler."""

    async def endpoint(context: RequestContext) -> Response:
        data = await _read_json_body(context)
        sized_context = replace(context, n_bytes=len(data))
        try:
            if len(data) > LARGE_WORK:
                decoded = await sized_context.in_thread(lambda: bodies.read_body(body, data))
            else:
                decoded = bodies.read_body(body, data)
        except UnicodeDecodeError as error:
            raise HTTPError(400, f"the body is not valid JSON: {error}") from error
        return await handler(sized_context, decoded)

    return Operation(name, path, summary, endpoint, reply, body, chunk, is_text)


# All routes except those of the web page and of adapters. /openapi.json describes these routes and,
# if the server has them, the routes of adapters.
OPERATIONS = (
    _post(
        "chat", "/v1/chat/completions", "Chat completion", chat, bodies.ChatBody,
        replies.ChatReply, replies.ChatChunk,
    ),
    _post(
        "complete", "/v1/completions", "Text completions", complete, bodies.CompletionBody,
        replies.CompletionReply, replies.CompletionReply,
    ),
    _post(
        "tokenize", "/tokenize", "Tokenize a text or chat", tokenize, bodies.TokenizeBody,
        replies.Tokens,
    ),
    _post(
        "detokenize", "/detokenize", "Detokenize token ids", detokenize, bodies.DetokenizeBody,
        replies.Detokenized,
    ),
    Operation(
        "tokenizer_info", "/tokenizer_info", "Tokenizer metadata", tokenizer_info,
        replies.TokenizerInfo,
    ),
    Operation("models", "/v1/models", "Models and adapters", models, replies.Models),
    Operation("model", "/v1/models/{name:path}", "One model", model, replies.Model),
    Operation("status", "/status", "Server, engine and KV cache status", status),
    Operation("metrics", "/metrics", "Prometheus metrics", metrics, is_text=True),
    Operation("version", "/version", "Server version", version),
    Operation("live", "/health/live", "Liveness", live),
    Operation("ready", "/health/ready", "Readiness", ready, can_be_unready=True),
    Operation(
        "health", "/health", "Readiness (alias of /health/ready)", ready, can_be_unready=True,
    ),
    Operation("openapi", "/openapi.json", "OpenAPI description of this server", openapi),
)  # fmt: skip


# Only for a server with a folder that clients may load adapters from.
ADAPTER_OPERATIONS = (
    _post(
        "load_adapter", "/v1/load_lora_adapter", "Load a LoRA adapter", load_adapter,
        bodies.LoadAdapterBody, is_text=True,
    ),
    _post(
        "unload_adapter", "/v1/unload_lora_adapter", "Unload a LoRA adapter", unload_adapter,
        bodies.UnloadAdapterBody, is_text=True,
    ),
)  # fmt: skip


def _operations(service: Service) -> tuple[Operation, ...]:
    return OPERATIONS if service.adapter_root is None else (*OPERATIONS, *ADAPTER_OPERATIONS)


def _route(service: Service, operation: Operation) -> Route:
    prompt = "messages" if operation.body is bodies.ChatBody else "prompt"

    async def endpoint(request: Request) -> Response:
        try:
            account = request.scope["state"][ACCOUNT]
            context = RequestContext(service, request, _client_of(request), account)
            return await operation.endpoint(context)
        except (ClientDisconnected, ClientDisconnect):
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        except asyncio.CancelledError:  # by uvicorn, at the end of the shutdown
            return error_response(shutting_down())
        except Exception as error:
            return error_response(error, prompt)

    return Route(operation.path, endpoint, methods=[operation.method])


def _client_of(request: Request) -> str:
    """The client that thread time is charged to: its API key, or else its connection."""
    key = request.headers.get("authorization")
    return str(request.client) if key is None else f"key {hash(key)}"


async def _read_json_body(context: RequestContext) -> bytes:
    """The request's body, checked for its content type and length only.

    A large body is read only as fast as earlier large bodies are processed; the rest stays in the
    client's socket.

    Raises: HTTPError; Busy if earlier large bodies take too long.
    """
    request = context.request
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        # Browsers send other types across origins without a preflight request.
        raise HTTPError(415, f"content-type is {content_type!r:.80}; send application/json")
    too_long = HTTPError(413, f"the body has more than {bodies.MAX_BODY_BYTES} bytes; shorten it")
    if int(request.headers.get("content-length", 0)) > bodies.MAX_BODY_BYTES:
        raise too_long
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > bodies.MAX_BODY_BYTES:
            raise too_long
        if len(body) > LARGE_WORK:
            await context.wait_for_large(len(chunk))
    return bytes(body)


def _model(service: Service, name: str) -> replies.Model:
    return replies.Model(
        id=name,
        created=service.created,
        max_model_len=service.inputs.max_seq_len,
        max_fitting_tokens=service.inputs.max_fitting_tokens,
        parent=service.names[0] if name in service.adapters else None,
    )


async def _route_not_found(request: Request, _: Exception) -> Response:
    return error_response(HTTPError(404, f"no route {request.url.path!r:.200}; see /openapi.json"))


async def _method_not_allowed(request: Request, error: Exception) -> Response:
    not_allowed = HTTPError(405, f"{request.url.path!r:.200} does not support {request.method}")
    response = error_response(not_allowed)
    response.headers.update(getattr(error, "headers", None) or {})  # the Allow header
    return response
