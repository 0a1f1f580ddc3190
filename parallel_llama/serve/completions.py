"""POST /v1/completions."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from secrets import token_hex

from msgspec import UNSET, UnsetType
from starlette.responses import Response

from parallel_llama.engine.input_processor import InputProcessor, Prompt
from parallel_llama.errors import UsageError
from parallel_llama.request import Completion, TokenLogprob
from parallel_llama.serve import rendering
from parallel_llama.serve.answer import Answer
from parallel_llama.serve.asgi import DONE, JSONBody, event
from parallel_llama.serve.bodies import MAX_PROMPTS, CompletionBody
from parallel_llama.serve.params import grammar_of, sampling_params
from parallel_llama.serve.replies import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionReply,
    Usage,
)
from parallel_llama.serve.service import RequestContext
from parallel_llama.serve.wire import Output

DEFAULT_MAX_TOKENS = 16  # OpenAI's
_TOKEN_BYTES = 32  # estimate of the JSON of a token, and of each of its log-probabilities


@dataclass(frozen=True)
class _Pending:
    """The prompts of one request in the engine, and how the response is formatted."""

    context: RequestContext
    body: CompletionBody
    answers: list[Answer]
    id: str
    created: int

    def reply(self, choices: list[CompletionChoice], usage: Usage | None = None) -> CompletionReply:
        return CompletionReply(
            id=self.id,
            object="text_completion",
            created=self.created,
            model=self.context.model,
            choices=choices,
            usage=usage,
        )

    def token_ids(self, ids: Sequence[int]) -> Sequence[int] | UnsetType:
        return ids if self.body.return_token_ids else UNSET

    def shown(self, outputs: Sequence[Output]) -> list[Output]:
        """The outputs as the response contains them: without tokens if max_tokens is 0.

        The engine generates a token also for such a request.
        """
        if self.body.max_tokens != 0:
            return list(outputs)
        return [_without_tokens(output) for output in outputs]

    def index(self, number: int, choice: int) -> int:
        """The index of a choice among those of all prompts."""
        return number * self.answers[number].request.params.n + choice

    def prompt_text(self, number: int) -> str:
        """A prompt's text if the request asks for echo, else ""."""
        if not self.body.echo:
            return ""
        prompts = self.body.prompt
        prompt = prompts if isinstance(prompts, str) else prompts[number]
        if isinstance(prompt, str):
            return prompt
        ids = self.answers[number].request.prompt
        return self.context.inputs.tokenizer.decode(ids, skip_special=False)

    def first_offset(self, answer: Answer, prompt: str) -> int:
        """The text offset of the first token of an echoed prompt.

        Negative if the tokens begin with text that the prompt does not have: a bos token, or a
        space.
        """
        piece = self.context.inputs.tokenizer.vocabulary.piece
        text = b"".join(piece(token, skip_special=False) for token in answer.request.prompt)
        return min(0, len(prompt) - len(text.decode("utf-8", "replace")))

    def logprobs(
        self, answer: Answer, scored: Sequence[TokenLogprob | None], offset: int
    ) -> CompletionLogprobs | None:
        if self.body.logprobs is None:
            return None
        vocabulary = self.context.inputs.tokenizer.vocabulary
        first = answer.request.prompt[0]
        return rendering.completion_logprobs(vocabulary, scored, first, self.body.logprobs, offset)


def _without_tokens(output: Output) -> Output:
    completion = output.completion
    if completion is not None:
        completion = replace(
            completion, tokens=(), text="", finish_reason="length", stop_reason=None
        )
    return Output(output.key, output.choice, tokens=(), text="", completion=completion)


async def complete(context: RequestContext, body: CompletionBody) -> Response:
    """Text completions of some prompts, as one reply or as a stream of events."""
    context = context.for_model(body.model)
    pending = await context.until_disconnect(_begin(context, body))
    if body.stream:
        return await context.until_disconnect(rendering.streamed(_chunks(pending)))
    return JSONBody(await context.until_disconnect(_whole(pending)))


async def _begin(context: RequestContext, body: CompletionBody) -> _Pending:
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise UsageError(
            f"best_of={body.best_of} must equal n={body.n or 1}: only n completions are generated; "
            "omit best_of"
        )
    if body.stream and body.echo and body.logprobs is not None:
        raise UsageError("echo with logprobs cannot be streamed; omit echo, logprobs or stream")
    if body.max_tokens == 0 and not body.echo:
        raise UsageError("max_tokens=0 needs echo=true; give max_tokens of at least 1")
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    params = sampling_params(
        context.inputs,
        body,
        max_tokens=max(1, max_tokens),
        grammar=grammar_of(body),
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
    )
    prompts = await context.in_thread(lambda: prompts_of(body, context.inputs))
    answers = await context.submit(prompts, params)
    id = f"cmpl-{body.request_id or token_hex(12)}"
    return _Pending(context, body, answers, id, int(time.time()))


def prompts_of(body: CompletionBody, inputs: InputProcessor) -> list[Prompt]:
    """The prompts of a body: one or several, as texts or token ids.

    Texts are encoded here if the request turns off the bos token or the parsing of special tokens.

    Raises: UsageError for a list that mixes texts and token ids, or is too long.
    """
    prompts = _as_list(body)
    add_bos, parse_special = body.add_special_tokens is not False, body.parse_special is not False
    if add_bos and parse_special:
        return prompts
    return [
        inputs.tokenizer.encode(prompt, bos=add_bos and prompt != "", special=parse_special)
        if isinstance(prompt, str)
        else prompt
        for prompt in prompts
    ]


def _as_list(body: CompletionBody) -> list[Prompt]:
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    kinds = {type(item) for item in prompt}
    if len(kinds) > 1:
        raise UsageError("prompt mixes strings and token ids; give only one kind")
    if kinds == {int}:
        return [[item for item in prompt if isinstance(item, int)]]
    if len(prompt) > MAX_PROMPTS:
        raise UsageError(f"prompt holds {len(prompt)} prompts; give at most {MAX_PROMPTS}")
    return [item for item in prompt if not isinstance(item, int)]


async def _whole(pending: _Pending) -> bytes:
    outputs: list[list[Output]] = [[] for _ in pending.answers]
    try:
        async for number, new in _merge(pending.answers):
            outputs[number] += pending.shown(new)
    finally:
        _abandon(pending)
    choices, completions_of_all = [], []
    for number, answer_outputs in enumerate(outputs):
        answer = pending.answers[number]
        n_bytes = _TOKEN_BYTES * len(answer.request.prompt) * bool(pending.body.echo)
        prompt = await pending.context.serialize(partial(pending.prompt_text, number), n_bytes)
        completions = [
            output.completion for output in answer_outputs if output.completion is not None
        ]
        completions_of_all += completions
        for completion in sorted(completions, key=lambda completion: completion.choice):
            write = partial(_choice, pending, number, answer_outputs, completion, prompt)
            n_bytes = _n_bytes(pending, answer, completion)
            choices.append(await pending.context.serialize(write, n_bytes))
    return pending.reply([], rendering.usage_of(pending.answers, completions_of_all)).encode_with(
        choices
    )


def _n_bytes(pending: _Pending, answer: Answer, completion: Completion) -> int:
    """Estimates the length of a choice's JSON."""
    n_tokens = len(completion.tokens) + len(answer.request.prompt) * bool(pending.body.echo)
    return _TOKEN_BYTES * n_tokens * (2 + (pending.body.logprobs or 0))


def _choice(
    pending: _Pending, number: int, outputs: Sequence[Output], completion: Completion, prompt: str
) -> bytes:
    """A choice as JSON."""
    answer = pending.answers[number]
    reason, stop_reason = rendering.finish_reason(completion)
    scored = [None, *answer.prompt_logprobs] if pending.body.echo else []
    scored += rendering.logprobs_of(outputs, completion.choice)
    offset = pending.first_offset(answer, prompt) if pending.body.echo else 0
    choice = CompletionChoice(
        index=pending.index(number, completion.choice),
        text=prompt + completion.text,
        logprobs=pending.logprobs(answer, scored, offset),
        finish_reason=reason,
        stop_reason=stop_reason,
        token_ids=pending.token_ids(completion.tokens),
        prompt_token_ids=pending.token_ids(answer.request.prompt),
    )
    return choice.encode()


async def _chunks(pending: _Pending) -> AsyncGenerator[bytes]:
    """The events of all prompts, interleaved; then the usage."""
    ended: list[Completion] = []
    shown: dict[int, int] = {}  # characters sent, by choice
    merged = _merge(pending.answers)
    try:
        async for number, new in merged:
            outputs = pending.shown(new)
            yield b"".join(
                event(pending.reply([_piece(pending, number, output, shown)]).encode())
                for output in outputs
            )
            ended += [output.completion for output in outputs if output.completion is not None]
        options = pending.body.stream_options
        if options is not None and options.include_usage:
            yield event(pending.reply([], rendering.usage_of(pending.answers, ended)).encode())
        yield DONE
    finally:
        await merged.aclose()
        _abandon(pending)


async def _merge(answers: Sequence[Answer]) -> AsyncGenerator[tuple[int, list[Output]]]:
    """Outputs of several answers as they become ready, each with the answer's number."""
    if len(answers) == 1:  # the usual case needs no queue
        async for outputs in answers[0].outputs():
            yield 0, outputs
        return
    inbox: asyncio.Queue[tuple[int, list[Output]] | Exception | None] = asyncio.Queue(1)

    async def read(number: int, answer: Answer) -> None:
        try:
            async for outputs in answer.outputs():
                await inbox.put((number, outputs))
            await inbox.put(None)
        except Exception as error:
            await inbox.put(error)

    readers = [asyncio.create_task(read(n, answer)) for n, answer in enumerate(answers)]
    try:
        n_open = len(readers)
        while n_open:
            item = await inbox.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                n_open -= 1
            else:
                yield item
    finally:
        for reader in readers:
            reader.cancel()


def _piece(
    pending: _Pending, number: int, output: Output, shown: dict[int, int]
) -> CompletionChoice:
    answer, index = pending.answers[number], pending.index(number, output.choice)
    is_first = index not in shown
    text = pending.prompt_text(number) + output.text if is_first else output.text
    offset = shown.get(index, 0)
    shown[index] = offset + len(text)
    reason, stop_reason = (
        (None, None) if output.completion is None else rendering.finish_reason(output.completion)
    )
    return CompletionChoice(
        index=index,
        text=text,
        logprobs=pending.logprobs(answer, output.logprobs, offset) if output.logprobs else None,
        finish_reason=reason,
        stop_reason=stop_reason,
        token_ids=pending.token_ids(output.tokens),
        prompt_token_ids=pending.token_ids(answer.request.prompt) if is_first else UNSET,
    )


def _abandon(pending: _Pending) -> None:
    for answer in pending.answers:
        answer.abandon()
