"""Converts the engine's outputs to the parts of OpenAI's replies."""

import logging
from collections.abc import AsyncGenerator, Iterable, Sequence

from parallel_llama.request import Completion, TokenLogprob
from parallel_llama.serve.answer import Answer
from parallel_llama.serve.asgi import EventStream, current_id, event
from parallel_llama.serve.errors import error_reply, reason_of
from parallel_llama.serve.replies import (
    ChatLogprobs,
    CompletionLogprobs,
    ContentLogprob,
    FinishReason,
    PromptTokensDetails,
    TopLogprob,
    Usage,
)
from parallel_llama.serve.wire import Output
from parallel_llama.tokenizer import Vocabulary

logger = logging.getLogger(__name__)


async def streamed(chunks: AsyncGenerator[bytes]) -> EventStream:
    """A stream with its first event ready; a later error is logged and sent as the last event.

    Raises: what `chunks` raises before its first event, which can still be an HTTP error.
    """
    first = await anext(chunks)
    return EventStream(first, _with_error(chunks))


async def _with_error(chunks: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    try:
        async for chunk in chunks:
            yield chunk
    except Exception as error:
        reply = error_reply(error)[1]
        fields = {"request_id": current_id.get(), **reason_of(reply.error)}
        logger.info("failed", extra={"fields": fields})
        yield event(reply.encode())
    finally:
        await chunks.aclose()


def finish_reason(completion: Completion) -> tuple[FinishReason, str | int | None]:
    """OpenAI's finish_reason, and the stop_reason.

    The latter is the stop string, the stop token id, or a finish reason that OpenAI does not have.
    """
    match completion.finish_reason:
        case "stop":
            return "stop", completion.stop_reason
        case "length":
            return "length", None
        case other:
            return "length", other


def usage_of(answers: Sequence[Answer], ended: Sequence[Completion]) -> Usage:
    """Token counts of some requests; each prompt counts once."""
    n_prompt = sum(len(answer.request.prompt) for answer in answers)
    n_drawn = sum(len(completion.tokens) for completion in ended)
    n_cached = sum(completion.n_cached_tokens for completion in ended if completion.choice == 0)
    return Usage(
        prompt_tokens=n_prompt,
        completion_tokens=n_drawn,
        total_tokens=n_prompt + n_drawn,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=n_cached),
    )


def logprobs_of(outputs: Iterable[Output], choice: int) -> list[TokenLogprob]:
    """The log-probabilities of a choice's tokens, from all outputs of its request."""
    return [logprob for output in outputs if output.choice == choice for logprob in output.logprobs]


def chat_logprobs(
    vocabulary: Vocabulary, scored: Iterable[TokenLogprob], n_top: int
) -> ChatLogprobs:
    content = []
    for position in scored:
        top = [_top_logprob(vocabulary, *pair) for pair in _most_likely(position, n_top)]
        sampled = _top_logprob(vocabulary, position.token, position.logprob)
        content.append(
            ContentLogprob(
                token=sampled.token, logprob=sampled.logprob, bytes=sampled.bytes, top_logprobs=top
            )
        )
    return ChatLogprobs(content=content)


def completion_logprobs(
    vocabulary: Vocabulary,
    scored: Sequence[TokenLogprob | None],
    first_token: int,
    n_top: int,
    offsets: Sequence[int],
) -> CompletionLogprobs:
    """Log-probabilities of a text completion.

    Args:
        scored: one item per token; None for the first token of an echoed prompt.
        first_token: the id of that first token.
        offsets: the text offset of each token.
    """
    logprobs = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
    for position, offset in zip(scored, offsets, strict=True):
        text = _token_text(vocabulary, first_token if position is None else position.token)
        logprobs.tokens.append(text)
        logprobs.token_logprobs.append(None if position is None else position.logprob)
        logprobs.text_offset.append(offset)
        if position is None:
            logprobs.top_logprobs.append(None)
            continue
        top = {
            _token_text(vocabulary, token): value
            for token, value in reversed(_most_likely(position, n_top))
        }
        logprobs.top_logprobs.append({**top, text: position.logprob})
    return logprobs


def _most_likely(scored: TokenLogprob, n: int) -> list[tuple[int, float]]:
    """The `n` most likely tokens at a position; the sampled token may be one."""
    pairs = [(scored.token, scored.logprob), *scored.top]
    return sorted(pairs, key=lambda pair: -pair[1])[:n]


def _token_text(vocabulary: Vocabulary, token: int) -> str:
    """A token's text, or its bytes in OpenAI's form if they are not valid UTF-8."""
    piece = vocabulary.piece(token, skip_special=False)
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def _top_logprob(vocabulary: Vocabulary, token: int, logprob: float) -> TopLogprob:
    piece = vocabulary.piece(token, skip_special=False)
    return TopLogprob(token=piece.decode("utf-8", "replace"), logprob=logprob, bytes=list(piece))
