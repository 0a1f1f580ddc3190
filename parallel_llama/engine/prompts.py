"""The accepted forms of prompts, converted to strings, token ids and chats."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from parallel_llama.errors import UsageError, shown
from parallel_llama.request import items_of, whole_number
from parallel_llama.tokenizer import Chat, Message

Prompt = str | Sequence[int] | Sequence[Message] | Chat | Mapping[str, Any]
Prompts = Prompt | Iterable[Prompt]

_TAKEN = (
    "a string, a list of token ids, a conversation (a list of messages), "
    '{"prompt": ..}, {"prompt_token_ids": ..}, or a list of these'
)


def as_prompts(given: Prompts) -> list[str | list[int] | Chat]:
    """Convert a prompt or several prompts to a list of strings, token ids or chats.

    Raises: UsageError, which lists the accepted forms, for anything else.
    """
    if isinstance(given, _SINGLE):
        return [as_prompt(given)]
    items = items_of(given)
    if items is None and isinstance(given, Iterable):
        items = list(given)
    if items is None:
        raise UsageError(f"prompts cannot be {_shown(given)}; give {_TAKEN}")
    if _is_single(items):
        return [as_prompt(items)]
    prompts = []
    for number, item in enumerate(items):
        try:
            prompts.append(as_prompt(item))
        except UsageError as error:
            raise UsageError(f"prompt {number}: {error}") from error
    return prompts


def as_prompt(given: object) -> str | list[int] | Chat:
    """Convert one prompt to a string, token ids or a chat.

    Raises: UsageError, which lists the accepted forms, for anything else.
    """
    if isinstance(given, str | Chat):
        return given
    if isinstance(given, Mapping):
        return _from_mapping(given)
    items = None if isinstance(given, bytes | set | frozenset) else items_of(given)
    if items is None:
        raise UsageError(f"a prompt cannot be {_shown(given)}; give {_TAKEN}")
    if items and isinstance(items[0], Mapping):
        return Chat(items)
    return [_token(item) for item in items]


_SINGLE = (str, bytes, Mapping, set, frozenset, Chat)


def _is_single(items: list[Any]) -> bool:
    """Whether a list is a single prompt: token ids, or messages."""
    if not items:
        return False
    if isinstance(items[0], Mapping):
        return "role" in items[0]
    return whole_number(items[0]) is not None


def _from_mapping(given: Mapping[str, Any]) -> str | list[int] | Chat:
    keys = [key for key in ("prompt", "prompt_token_ids") if key in given]
    if len(keys) != 1 or len(given) != 1:
        raise UsageError(
            f"a prompt with the keys {', '.join(map(str, given))[:200] or '(none)'}: give "
            '{"prompt": "..."} or {"prompt_token_ids": [..]}, and settings as SamplingParams'
        )
    value = given[keys[0]]
    if keys == ["prompt"] and not isinstance(value, str):
        raise UsageError(f'{{"prompt": {_shown(value)}}} must be a string')
    if keys == ["prompt_token_ids"] and items_of(value) is None:
        raise UsageError(f'{{"prompt_token_ids": {_shown(value)}}} must be a list of token ids')
    return as_prompt(value)


def _token(value: object) -> int:
    token = whole_number(value)
    if token is None:
        raise UsageError(f"token {_shown(value)} is not a whole number; give {_TAKEN}")
    return token


def _shown(value: object) -> str:
    return f"{type(value).__name__} {shown(value)}"
