"""Tokens and their log-probabilities as OpenAI's interfaces show them."""

from collections.abc import Iterable, Sequence

from parallel_llama.request import TokenLogprob
from parallel_llama.serve.replies import (
    ChatLogprobs,
    CompletionLogprobs,
    ContentLogprob,
    TopLogprob,
)
from parallel_llama.tokenizer import Vocabulary


def top_of(scored: TokenLogprob, n: int) -> list[tuple[int, float]]:
    """The likeliest `n` tokens at a place, the chosen one among them where it is one of them."""
    pairs = [(scored.token, scored.logprob), *scored.top]
    return sorted(pairs, key=lambda pair: -pair[1])[:n]


def chat_logprobs(
    vocabulary: Vocabulary, scored: Iterable[TokenLogprob], n_top: int
) -> ChatLogprobs:
    """What a chat's answer has for each of its tokens."""
    content = []
    for one in scored:
        top = [_spelled(vocabulary, *pair) for pair in top_of(one, n_top)]
        own = _spelled(vocabulary, one.token, one.logprob)
        content.append(
            ContentLogprob(token=own.token, logprob=own.logprob, bytes=own.bytes, top_logprobs=top)
        )
    return ChatLogprobs(content=content)


def completion_logprobs(
    vocabulary: Vocabulary, scored: Sequence[TokenLogprob | None], first: int, n_top: int, at: int
) -> CompletionLogprobs:
    """What a completion has for each of its tokens.

    Where a prompt is shown its first token, `first`, has None for its probability. `at` is where in
    the text the first of these stands. Tokens that are no text of their own are named by their
    bytes.
    """
    found = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
    for one in scored:
        text = name_of(vocabulary, first if one is None else one.token)
        found.tokens.append(text)
        found.token_logprobs.append(None if one is None else one.logprob)
        found.text_offset.append(at)
        at += len(text)
        if one is None:
            found.top_logprobs.append(None)
            continue
        top = {name_of(vocabulary, token): value for token, value in reversed(top_of(one, n_top))}
        found.top_logprobs.append({**top, text: one.logprob})
    return found


def name_of(vocabulary: Vocabulary, token: int) -> str:
    """A token's text, or its bytes where they are no text."""
    piece = vocabulary.piece(token, skip_special=False)
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def _spelled(vocabulary: Vocabulary, token: int, logprob: float) -> TopLogprob:
    piece = vocabulary.piece(token, skip_special=False)
    return TopLogprob(token=piece.decode("utf-8", "replace"), logprob=logprob, bytes=list(piece))
