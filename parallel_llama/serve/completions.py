"""POST /v1/completions."""

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
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
from parallel_llama.tokenizer import StreamDecoder

DEFAULT_MAX_TOKENS = 16  # OpenAI's
_TOKEN_BYTES = 32  # estimate of the JSON of a token, and of each of its log-probabilities


class _TextOffsets:
    """Counts the characters of a text before each of its tokens.

    If the bytes of a character are split over several tokens, the last token adds the character.

    Args:
        n_before: the characters before the first token.
    """

    def __init__(self, decoder: StreamDecoder, n_before: int) -> None:
        self._decoder, self._n_chars = decoder, n_before

    def take(self, tokens: Iterable[int]) -> list[int]:
        """The text offsets of the next tokens."""
        lengths = (len(self._decoder.push(token)) for token in tokens)
        *offsets, self._n_chars = accumulate(lengths, initial=self._n_chars)
        return offsets


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

    def prompt_offsets(self, answer: Answer, prompt: str) -> list[int]:
        """The text offsets of the tokens of an echoed prompt; all are within the prompt.

        If the tokens have more characters than the prompt, they begin with text that the prompt
        does not have: a bos token, or a space.
        """
        decoder = StreamDecoder(self.context.inputs.tokenizer, skip_special=False)
        lengths = [len(decoder.push(token)) for token in answer.request.prompt]
        n_extra = max(0, sum(lengths) + len(decoder.flush()) - len(prompt))
        starts = accumulate(lengths[:-1], initial=0)
        return [min(max(0, start - n_extra), len(prompt)) for start in starts]

    def drawn_offsets(self, answer: Answer, n_before: int) -> _TextOffsets:
        """The text offsets of a choice's drawn tokens, after `n_before` characters."""
        request = answer.request
        skips = request.params.skip_special_tokens
        tokenizer = self.context.inputs.tokenizer
        return _TextOffsets(StreamDecoder(tokenizer, request.prompt, skip_special=skips), n_before)

    def logprobs(
        self, answer: Answer, scored: Sequence[TokenLogprob | None], offsets: Sequence[int]
    ) -> CompletionLogprobs:
        vocabulary = self.context.inputs.tokenizer.vocabulary
        first, n_top = answer.request.prompt[0], self.body.logprobs or 0
        return rendering.completion_logprobs(vocabulary, scored, first, n_top, offsets)


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
    choice = CompletionChoice(
        index=pending.index(number, completion.choice),
        text=prompt + completion.text,
        logprobs=_choice_logprobs(pending, answer, outputs, completion.choice, prompt),
        finish_reason=reason,
        stop_reason=stop_reason,
        token_ids=pending.token_ids(completion.tokens),
        prompt_token_ids=pending.token_ids(answer.request.prompt),
    )
    return choice.encode()


def _choice_logprobs(
    pending: _Pending, answer: Answer, outputs: Sequence[Output], choice: int, prompt: str
) -> CompletionLogprobs | None:
    if pending.body.logprobs is None:
        return None
    drawn = rendering.logprobs_of(outputs, choice)
    offsets = pending.drawn_offsets(answer, len(prompt)).take(each.token for each in drawn)
    if not pending.body.echo:
        return pending.logprobs(answer, drawn, offsets)
    echoed = [None, *answer.prompt_logprobs]  # not of all tokens if the request was cancelled
    before = pending.prompt_offsets(answer, prompt)[: len(echoed)]
    return pending.logprobs(answer, [*echoed, *drawn], [*before, *offsets])


async def _chunks(pending: _Pending) -> AsyncGenerator[bytes]:
    """The events of all prompts, interleaved; then the usage."""
    ended: list[Completion] = []
    offsets: dict[int, _TextOffsets | None] = {}  # by choice; None without log-probabilities
    merged = _merge(pending.answers)
    try:
        async for number, new in merged:
            outputs = pending.shown(new)
            yield b"".join(
                event(pending.reply([_piece(pending, number, output, offsets)]).encode())
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
    pending: _Pending, number: int, output: Output, offsets: dict[int, _TextOffsets | None]
) -> CompletionChoice:
    answer, index = pending.answers[number], pending.index(number, output.choice)
    is_first = index not in offsets
    prompt = pending.prompt_text(number) if is_first else ""
    if is_first:
        has_logprobs = pending.body.logprobs is not None
        offsets[index] = pending.drawn_offsets(answer, len(prompt)) if has_logprobs else None
    logprobs: CompletionLogprobs | None = None
    own_offsets = offsets[index]
    if own_offsets is not None and output.logprobs:
        new_offsets = own_offsets.take(each.token for each in output.logprobs)
        logprobs = pending.logprobs(answer, output.logprobs, new_offsets)
    reason, stop_reason = (
        (None, None) if output.completion is None else rendering.finish_reason(output.completion)
    )
    return CompletionChoice(
        index=index,
        text=prompt + output.text,
        logprobs=logprobs,
        finish_reason=reason,
        stop_reason=stop_reason,
        token_ids=pending.token_ids(output.tokens),
        prompt_token_ids=pending.token_ids(answer.request.prompt) if is_first else UNSET,
    )


def _abandon(pending: _Pending) -> None:
    for answer in pending.answers:
        answer.abandon()
