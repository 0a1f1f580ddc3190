"""The routes of the server, as an ASGI application."""

from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

import parallel_llama
from parallel_llama.errors import UsageError
from parallel_llama.serve.bodies import (
    MAX_BODY_BYTES,
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    read_body,
)
from parallel_llama.serve.chat import chat
from parallel_llama.serve.completions import completions
from parallel_llama.serve.errors import Refused, error_response, json_response
from parallel_llama.serve.events import ClientGone, JSONBody, unless_gone
from parallel_llama.serve.exposition import make_registry
from parallel_llama.serve.fair_threads import LARGE_WORK
from parallel_llama.serve.openapi import description
from parallel_llama.serve.page_files import page_routes
from parallel_llama.serve.replies import Detokenized, Model, Models, TokenizerInfo, Tokens
from parallel_llama.serve.request_id import CLIENT_GONE
from parallel_llama.serve.service import Service
from parallel_llama.serve.status import status_of
from parallel_llama.serve.tool_prompt import conversation

B = TypeVar("B", bound=Body)
Endpoint = Callable[[Request], Awaitable[Response]]
Handler = Callable[[Service, Request, B], Awaitable[Response]]


def make_app(service: Service) -> Starlette:
    """The application that serves one model."""

    async def models(_: Request) -> Response:
        return json_response(Models(data=[_model(service, name) for name in service.names]))

    async def model(request: Request) -> Response:
        name = request.path_params["name"]
        service.require_model(name)
        return json_response(_model(service, name))

    async def tokenizer_info(_: Request) -> Response:
        return json_response(_tokenizer_info(service))

    async def live(_: Request) -> Response:
        return _plain({"status": "live"})

    async def ready(_: Request) -> Response:
        is_ready = service.engine.is_ready
        return _plain({"status": service.engine.state}, 200 if is_ready else 503)

    async def status(_: Request) -> Response:
        return _plain(status_of(service))

    registry = make_registry(service.engine.metrics, service.engine)

    async def metrics(_: Request) -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    async def versions(_: Request) -> Response:
        return _plain({"version": parallel_llama.__version__})

    async def openapi(_: Request) -> Response:
        return _plain(description(parallel_llama.__version__))

    routes = [
        Route("/v1/chat/completions", _post(service, ChatBody, chat), methods=["POST"]),
        Route("/v1/completions", _post(service, CompletionBody, completions), methods=["POST"]),
        Route("/tokenize", _post(service, TokenizeBody, tokenize), methods=["POST"]),
        Route("/detokenize", _post(service, DetokenizeBody, detokenize), methods=["POST"]),
        Route("/tokenizer_info", _guarded(tokenizer_info)),
        Route("/v1/models", _guarded(models)),
        Route("/v1/models/{name:path}", _guarded(model)),
        Route("/health/live", live),
        Route("/health/ready", ready),
        Route("/health", ready),
        Route("/status", _guarded(status)),
        Route("/metrics", metrics),
        Route("/version", versions),
        Route("/openapi.json", openapi),
        *page_routes(),
    ]
    app = Starlette(routes=routes, exception_handlers={404: _no_route, 405: _no_method})
    app.router.redirect_slashes = False
    return app


async def tokenize(service: Service, request: Request, body: TokenizeBody) -> Response:
    """The token ids of a text, or of a conversation in the model's template."""
    service.require_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise UsageError("give one of prompt and messages")
    if body.prompt is not None and (body.tools or body.chat_template_kwargs):
        raise UsageError("tools and chat_template_kwargs go with messages, not with a prompt")
    inputs = service.inputs

    def encoded() -> list[int]:
        if body.prompt is not None:
            return inputs.tokenizer.encode(
                body.prompt, bos=body.add_special_tokens, special=body.parse_special
            )
        template, names = inputs.chat_template, body.chat_template_kwargs or {}
        chat = conversation(
            template,
            body.messages or (),
            body.tools or (),
            names,
            parse_special=body.parse_special,
        )
        return list(inputs.encode(chat))

    def reply() -> Response:
        tokens, spelled = encoded(), None
        if body.return_token_strs:
            pieces = [
                inputs.tokenizer.vocabulary.piece(each, skip_special=False) for each in tokens
            ]
            spelled = [piece.decode("utf-8", "replace") for piece in pieces]
        tokenized = Tokens(
            count=len(tokens),
            max_model_len=inputs.max_seq_len,
            tokens=tokens,
            token_strs=spelled,
        )
        return JSONBody(tokenized.encode())

    return await unless_gone(request, service.in_thread(reply, renders=body.messages is not None))


async def detokenize(service: Service, request: Request, body: DetokenizeBody) -> Response:
    """The text of some token ids, special ones among them."""
    service.require_model(body.model)
    inputs = service.inputs

    def reply() -> Response:
        inputs.check_ids("tokens", body.tokens)
        text = inputs.tokenizer.decode(body.tokens, skip_special=False)
        return JSONBody(Detokenized(prompt=text).encode())

    return await unless_gone(request, service.in_thread(reply))


def _tokenizer_info(service: Service) -> TokenizerInfo:
    tokenizer, template = service.inputs.tokenizer, service.inputs.chat_template

    def text_of(ids: Iterable[int]) -> str | None:
        first = min(ids, default=None)
        return None if first is None else tokenizer.decode([first], skip_special=False)

    return TokenizerInfo(
        bos_token=text_of(() if tokenizer.bos_id is None else (tokenizer.bos_id,)),
        eos_token=text_of(tokenizer.eos_ids),
        chat_template=(template.template_text or None) if template else None,
        max_model_len=service.inputs.max_seq_len,
    )


def _post(service: Service, kind: type[B], handler: Handler[B]) -> Endpoint:
    """What reads a body of this kind and hands it to a handler."""
    decoder = msgspec.json.Decoder(kind)

    async def endpoint(request: Request) -> Response:
        data = await _body(request, service)
        own = service.asked_by(_client_of(request), len(data))
        try:
            if len(data) > LARGE_WORK:
                body = await own.in_thread(lambda: read_body(decoder, data))
            else:
                body = read_body(decoder, data)
        except UnicodeDecodeError as error:
            raise Refused(400, f"the body is not valid JSON: {error}") from error
        return await handler(own, request, body)

    return _guarded(endpoint, "messages" if kind is ChatBody else "prompt")


def _client_of(request: Request) -> str:
    """Who shares what a server can do: a key, or a connection where there is none."""
    key = request.headers.get("authorization")
    return str(request.client) if key is None else f"key {hash(key)}"


def _guarded(endpoint: Endpoint, prompt: str | None = None) -> Endpoint:
    """An endpoint whose errors become replies; `prompt` is the field that holds a prompt."""

    async def guarded(request: Request) -> Response:
        try:
            return await endpoint(request)
        except (ClientGone, ClientDisconnect):
            return Response(status_code=CLIENT_GONE)
        except Exception as error:
            return error_response(error, prompt)

    return guarded


async def _body(request: Request, service: Service) -> bytes:
    """The body of a request, which must be JSON and within the limit of size.

    A large body is read no faster than others before it are worked on: what is not read stays with
    its client.

    Raises: Refused; Busy if the work before it takes too long.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # A web page could otherwise send one from a browser without asking first.
        raise Refused(415, f"content-type is {kind!r:.80}; send application/json")
    too_long = Refused(413, f"the body has more than {MAX_BODY_BYTES} bytes; shorten it")
    if int(request.headers.get("content-length", 0)) > MAX_BODY_BYTES:
        raise too_long
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BODY_BYTES:
            raise too_long
        if len(body) > LARGE_WORK:
            await service.room_for_large()
    return bytes(body)


def _model(service: Service, name: str) -> Model:
    return Model(id=name, created=service.created, max_model_len=service.inputs.max_seq_len)


def _plain(value: dict[str, Any], status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


async def _no_route(request: Request, _: Exception) -> Response:
    return error_response(Refused(404, f"there is no {request.url.path!r:.200} here"))


async def _no_method(request: Request, error: Exception) -> Response:
    refused = Refused(405, f"{request.method} is not for {request.url.path!r:.200}")
    response = error_response(refused)
    response.headers.update(getattr(error, "headers", None) or {})  # those that are allowed
    return response
