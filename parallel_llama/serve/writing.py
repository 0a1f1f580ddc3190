"""What both kinds of completion write alike: streams, ends and counts."""

from collections.abc import AsyncGenerator, Iterable, Sequence

from parallel_llama.request import Completion, TokenLogprob
from parallel_llama.serve.answer import Answer
from parallel_llama.serve.errors import error_reply
from parallel_llama.serve.events import EventStream, event
from parallel_llama.serve.replies import FinishReason, PromptTokensDetails, Usage
from parallel_llama.serve.wire import Output


async def streamed(chunks: AsyncGenerator[bytes]) -> EventStream:
    """A stream of events that has begun: what goes wrong before the first is no stream's matter.

    What goes wrong later is its last event.
    """
    first = await anext(chunks)
    return EventStream(first, _with_error(chunks))


async def _with_error(chunks: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    try:
        async for chunk in chunks:
            yield chunk
    except Exception as error:
        yield event(error_reply(error)[1].encode())
    finally:
        await chunks.aclose()


def finish_reason(completion: Completion) -> tuple[FinishReason, str | int | None]:
    """Why a completion ended in OpenAI's words, and what ended it where those do not say it.

    That is a stop string or stop token id, as in vLLM, or a reason which OpenAI does not have.
    """
    match completion.finish_reason:
        case "stop":
            return "stop", completion.stop_reason
        case "length":
            return "length", None
        case other:
            return "length", other


def logprobs_of(outputs: Iterable[Output], choice: int) -> list[TokenLogprob]:
    """The log-probabilities of a choice's tokens, from all that came of its request."""
    return [one for output in outputs if output.choice == choice for one in output.logprobs]


def usage_of(answers: Sequence[Answer], ended: Sequence[Completion]) -> Usage:
    """The tokens of some requests, each prompt counted once."""
    n_prompt = sum(len(answer.request.prompt) for answer in answers)
    n_drawn = sum(len(completion.tokens) for completion in ended)
    n_cached = sum(completion.n_cached_tokens for completion in ended if completion.choice == 0)
    return Usage(
        prompt_tokens=n_prompt,
        completion_tokens=n_drawn,
        total_tokens=n_prompt + n_drawn,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=n_cached),
    )
