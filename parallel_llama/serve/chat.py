"""POST /v1/chat/completions."""

import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from secrets import token_hex

from starlette.requests import Request
from starlette.responses import Response

from parallel_llama.errors import UsageError
from parallel_llama.request import TokenLogprob
from parallel_llama.serve.answer import Answer
from parallel_llama.serve.bodies import ChatBody
from parallel_llama.serve.errors import json_response
from parallel_llama.serve.events import DONE, event, unless_gone
from parallel_llama.serve.params import grammar_of, sampling_params
from parallel_llama.serve.replies import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChatReply,
    Usage,
)
from parallel_llama.serve.service import Service
from parallel_llama.serve.spelling import chat_logprobs
from parallel_llama.serve.wire import Output
from parallel_llama.serve.writing import finish_reason, streamed, usage_of
from parallel_llama.tokenizer import Chat

_CHUNK = "chat.completion.chunk"


@dataclass(frozen=True)
class _Asked:
    """One conversation's answer on its way, and how it is to be shown."""

    service: Service
    body: ChatBody
    answer: Answer
    id: str
    created: int

    def logprobs(self, scored: Sequence[TokenLogprob]) -> ChatLogprobs | None:
        if not self.body.logprobs:
            return None
        vocabulary = self.service.inputs.tokenizer.vocabulary
        return chat_logprobs(vocabulary, scored, self.body.top_logprobs or 0)

    def chunk(self, choices: list[ChatChunkChoice], usage: Usage | None = None) -> bytes:
        model = self.service.names[0]
        chunk = ChatChunk(
            id=self.id,
            object=_CHUNK,
            created=self.created,
            model=model,
            choices=choices,
            usage=usage,
        )
        return event(chunk.encode())


async def chat(service: Service, request: Request, body: ChatBody) -> Response:
    """The model's answer to a conversation, whole or as a stream of events."""
    service.require_model(body.model)
    asked = await unless_gone(request, _begin(service, body))
    if body.stream:
        return await unless_gone(request, streamed(_chunks(asked)))
    outputs = await unless_gone(request, asked.answer.whole())
    return json_response(_reply(asked, outputs))


async def _begin(service: Service, body: ChatBody) -> _Asked:
    if body.tools and body.tool_choice != "none":
        raise UsageError("tools are not taken yet; leave them out")
    if body.top_logprobs is not None and not body.logprobs:
        raise UsageError("top_logprobs without logprobs; set logprobs to true")
    limits = [n for n in (body.max_completion_tokens, body.max_tokens) if n is not None]
    if len(set(limits)) > 1:
        raise UsageError(
            f"max_completion_tokens={limits[0]} and max_tokens={limits[1]}; give one of them"
        )
    params = sampling_params(
        service.inputs,
        body,
        max_tokens=limits[0] if limits else None,
        grammar=grammar_of(body),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    prompt = Chat(body.messages, template_vars=body.chat_template_kwargs or {})
    (answer,) = await service.submit([prompt], params)
    return _Asked(service, body, answer, f"chatcmpl-{token_hex(12)}", int(time.time()))


def _reply(asked: _Asked, outputs: Sequence[Output]) -> ChatReply:
    ended = [output.completion for output in outputs if output.completion is not None]
    choices = []
    for completion in sorted(ended, key=lambda each: each.choice):
        reason, stop_reason = finish_reason(completion)
        choices.append(
            ChatChoice(
                index=completion.choice,
                message=ChatMessage(role="assistant", content=completion.text, refusal=None),
                logprobs=asked.logprobs(completion.logprobs or ()),
                finish_reason=reason,
                stop_reason=stop_reason,
            )
        )
    return ChatReply(
        id=asked.id,
        created=asked.created,
        model=asked.service.names[0],
        choices=choices,
        usage=usage_of([asked.answer], ended),
    )


async def _chunks(asked: _Asked) -> AsyncGenerator[bytes]:
    """The events of an answer: the role of each choice, its text, its end; then the usage."""
    ended = []
    begun: set[int] = set()
    try:
        async for outputs in asked.answer.outputs():
            pieces = []
            for output in outputs:
                if output.choice not in begun:
                    begun.add(output.choice)
                    delta = ChatDelta(role="assistant", content="")
                    pieces.append(asked.chunk([ChatChunkChoice(index=output.choice, delta=delta)]))
                if output.text or output.logprobs:
                    choice = ChatChunkChoice(
                        index=output.choice,
                        delta=ChatDelta(content=output.text),
                        logprobs=asked.logprobs(output.logprobs),
                    )
                    pieces.append(asked.chunk([choice]))
                if output.completion is not None:
                    ended.append(output.completion)
                    choice = ChatChunkChoice(
                        index=output.choice,
                        delta=ChatDelta(),
                        finish_reason=finish_reason(output.completion)[0],
                    )
                    pieces.append(asked.chunk([choice]))
            yield b"".join(pieces)
        options = asked.body.stream_options
        if options is not None and options.include_usage:
            yield asked.chunk([], usage_of([asked.answer], ended))
        yield DONE
    finally:
        asked.answer.abandon()
