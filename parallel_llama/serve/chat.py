"""POST /v1/chat/completions."""

import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from secrets import token_hex

from msgspec import UNSET, UnsetType
from starlette.responses import Response

from parallel_llama.errors import UsageError
from parallel_llama.request import Completion, TokenLogprob
from parallel_llama.serve import rendering
from parallel_llama.serve.answer import Answer
from parallel_llama.serve.asgi import DONE, JSONBody, event
from parallel_llama.serve.bodies import ChatBody
from parallel_llama.serve.channels import ChannelParts, Part, Reasoning
from parallel_llama.serve.params import grammar_of, sampling_params
from parallel_llama.serve.replies import (
    CalledFunction,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChatReply,
    FinishReason,
    ToolCall,
    ToolCallDelta,
    Usage,
)
from parallel_llama.serve.service import RequestContext
from parallel_llama.serve.tool_calls import CallReader
from parallel_llama.serve.tools import Tools, conversation, tools_of
from parallel_llama.serve.wire import Output
from parallel_llama.tokenizer.answers import AnswerReader

_TOKEN_BYTES = 64  # estimate of the JSON of a token, and of each of its log-probabilities
_CHUNK = "chat.completion.chunk"


@dataclass(frozen=True)
class _Pending:
    """One chat request in the engine, and how its response is formatted."""

    context: RequestContext
    body: ChatBody
    answer: Answer
    tools: Tools | None
    has_channels: bool
    id: str
    created: int

    def answer_reader(self) -> AnswerReader | None:
        """A reader of the markers in one choice; None if the choice has no markers."""
        return self.context.inputs.answer_reader(self.answer.request)

    def token_ids(self, ids: Sequence[int]) -> Sequence[int] | UnsetType:
        return ids if self.body.return_token_ids else UNSET

    def logprobs(self, scored: Sequence[TokenLogprob]) -> ChatLogprobs | None:
        if not self.body.logprobs:
            return None
        vocabulary = self.context.inputs.tokenizer.vocabulary
        return rendering.chat_logprobs(vocabulary, scored, self.body.top_logprobs or 0)

    def chunk(
        self, choices: list[ChatChunkChoice], usage: Usage | None = None, is_first: bool = False
    ) -> bytes:
        """An event; the first one of a choice contains the prompt's token ids."""
        model, prompt = self.context.model, self.answer.request.prompt
        chunk = ChatChunk(
            id=self.id,
            object=_CHUNK,
            created=self.created,
            model=model,
            choices=choices,
            usage=usage,
            prompt_token_ids=self.token_ids(prompt) if is_first else UNSET,
        )
        return event(chunk.encode())


async def chat(context: RequestContext, body: ChatBody) -> Response:
    """A chat completion, as one reply or as a stream of events."""
    context = context.for_model(body.model)
    pending = await context.until_disconnect(_begin(context, body))
    if body.stream:
        return await context.until_disconnect(rendering.streamed(_chunks(pending)))
    outputs = await context.until_disconnect(pending.answer.whole())
    n_tokens = pending.answer.n_tokens + len(pending.answer.request.prompt)
    n_bytes = _TOKEN_BYTES * n_tokens * (2 + (body.top_logprobs or 0))
    encoded = context.serialize(lambda: _reply(pending, outputs).encode(), n_bytes)
    return JSONBody(await context.until_disconnect(encoded))


async def _begin(context: RequestContext, body: ChatBody) -> _Pending:
    if body.top_logprobs is not None and not body.logprobs:
        raise UsageError("top_logprobs without logprobs; set logprobs to true")
    limits = [n for n in (body.max_completion_tokens, body.max_tokens) if n is not None]
    if len(set(limits)) > 1:
        raise UsageError(
            f"max_completion_tokens={limits[0]} and max_tokens={limits[1]} differ; give one"
        )
    tools, grammar = await _tools(context, body), grammar_of(body)
    params = sampling_params(
        context.inputs,
        body,
        max_tokens=limits[0] if limits else None,
        grammar=grammar if tools is None else tools.grammar(grammar),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    template, template_vars = context.inputs.chat_template, body.chat_template_kwargs or {}
    # A client that asks for special tokens gets the model's text unchanged.
    has_channels = context.inputs.has_markers and body.skip_special_tokens is not False
    with_markers = (has_channels and context.inputs.has_special_markers) or (
        tools is not None and tools.has_special_markers
    )
    if body.reasoning_effort is not None:
        template_vars = {"reasoning_effort": body.reasoning_effort, **template_vars}
    listed_tools = [] if tools is None else body.tools or []
    continues = bool(body.continue_final_message)
    if (body.add_generation_prompt is False) != continues:
        raise UsageError(
            "continue_final_message=true needs add_generation_prompt=false and vice versa; give "
            "both or neither"
        )
    parse_special = body.parse_special is not False
    prompt = await context.in_thread(
        lambda: conversation(
            template, body.messages, listed_tools, template_vars, continues, parse_special
        )
    )
    (answer,) = await context.submit([prompt], params, with_markers=with_markers)
    id = f"chatcmpl-{body.request_id or token_hex(12)}"
    return _Pending(context, body, answer, tools, has_channels, id, int(time.time()))


async def _tools(context: RequestContext, body: ChatBody) -> Tools | None:
    """`tools_of`, in a thread if it may render the chat template."""
    if not body.tools:
        return tools_of(body, context.inputs)
    return await context.in_thread(lambda: tools_of(body, context.inputs))


def _reply(pending: _Pending, outputs: Sequence[Output]) -> ChatReply:
    ended = [output.completion for output in outputs if output.completion is not None]
    choices = []
    for completion in sorted(ended, key=lambda completion: completion.choice):
        choice_of_reply = _Choice(pending, completion.choice)
        message = choice_of_reply.message(completion.text)
        reason, stop_reason = choice_of_reply.finish_reason(completion)
        choices.append(
            ChatChoice(
                index=completion.choice,
                message=message,
                logprobs=pending.logprobs(rendering.logprobs_of(outputs, completion.choice)),
                finish_reason=reason,
                stop_reason=stop_reason,
                token_ids=pending.token_ids(completion.tokens),
            )
        )
    return ChatReply(
        id=pending.id,
        created=pending.created,
        model=pending.context.model,
        choices=choices,
        usage=rendering.usage_of([pending.answer], ended),
        prompt_token_ids=pending.token_ids(pending.answer.request.prompt),
    )


async def _chunks(pending: _Pending) -> AsyncGenerator[bytes]:
    """The events: each choice's role, text and finish reason; then the usage."""
    ended = []
    by_index: dict[int, _Choice] = {}
    try:
        async for outputs in pending.answer.outputs():
            events = []
            for output in outputs:
                if output.choice not in by_index:
                    by_index[output.choice] = _Choice(pending, output.choice)
                    delta = ChatDelta(role="assistant", content="")
                    choice = ChatChunkChoice(index=output.choice, delta=delta)
                    events.append(pending.chunk([choice], is_first=True))
                events += (
                    pending.chunk([choice]) for choice in by_index[output.choice].take(output)
                )
                if output.completion is not None:
                    ended.append(output.completion)
            yield b"".join(events)
        options = pending.body.stream_options
        if options is not None and options.include_usage:
            yield pending.chunk([], rendering.usage_of([pending.answer], ended))
        yield DONE
    finally:
        pending.answer.abandon()


class _Choice:
    """One choice of a response: separates its text from reasoning and function calls."""

    def __init__(self, pending: _Pending, index: int) -> None:
        self._pending, self._index = pending, index
        answer_reader = pending.answer_reader()
        self._reader: CallReader | ChannelParts | None = None
        if pending.tools is not None:
            self._reader = pending.tools.reader(answer_reader)
        elif pending.has_channels and answer_reader is not None:
            self._reader = ChannelParts(answer_reader)
        self._n_calls = 0

    def message(self, text: str) -> ChatMessage:
        """The message of a choice that has ended."""
        parts = self._parts(text, is_last=True)
        texts = [part for part in parts if isinstance(part, str)]
        reasoning = [part.text for part in parts if isinstance(part, Reasoning)]
        calls = [
            ToolCall(id=_call_id(), function=part)
            for part in parts
            if isinstance(part, CalledFunction)
        ]
        self._n_calls = len(calls)
        return ChatMessage(
            role="assistant",
            content="".join(texts) if texts or not calls else None,
            refusal=None,
            reasoning_content="".join(reasoning) or None,
            tool_calls=calls or None,
        )

    def take(self, output: Output) -> list[ChatChunkChoice]:
        """The deltas of an output, one for each event; the last output adds the finish reason."""
        parts = self._parts(output.text, is_last=output.completion is not None)
        if not parts and (
            output.logprobs or (output.tokens and self._pending.body.return_token_ids)
        ):
            parts = [""]
        chunks = [ChatChunkChoice(index=self._index, delta=self._delta(part)) for part in parts]
        if chunks:
            chunks[0].logprobs = self._pending.logprobs(output.logprobs)
            chunks[0].token_ids = self._pending.token_ids(output.tokens)
        if output.completion is not None:
            reason, stop_reason = self.finish_reason(output.completion)
            chunks.append(
                ChatChunkChoice(
                    index=self._index,
                    delta=ChatDelta(),
                    finish_reason=reason,
                    stop_reason=stop_reason,
                )
            )
        return chunks

    def finish_reason(self, completion: Completion) -> tuple[FinishReason, str | int | None]:
        """The finish reason and stop reason. All of the choice's text must have been read."""
        reason, stop_reason = rendering.finish_reason(completion)
        return ("tool_calls" if self._n_calls and reason == "stop" else reason), stop_reason

    def _parts(self, text: str, is_last: bool) -> Sequence[Part]:
        if self._reader is None:
            return [text] if text else []
        return [*self._reader.push(text), *(self._reader.finish() if is_last else [])]

    def _delta(self, part: Part) -> ChatDelta:
        if isinstance(part, str):
            return ChatDelta(content=part)
        if isinstance(part, Reasoning):
            return ChatDelta(reasoning_content=part.text)
        call = ToolCallDelta(index=self._n_calls, id=_call_id(), function=part)
        self._n_calls += 1
        return ChatDelta(tool_calls=[call])


def _call_id() -> str:
    """Nine letters and digits, as Mistral's templates require."""
    return token_hex(5)[:9]
