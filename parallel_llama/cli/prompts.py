"""Prompts as a person gives them: --prompt texts or a JSONL file, checked line by line."""

import json
from collections.abc import Sequence
from typing import Any

from parallel_llama.cli.arguments import plain_text, shown
from parallel_llama.cli.model import read_text
from parallel_llama.errors import UsageError
from parallel_llama.fields import did_you_mean
from parallel_llama.request import MAX_TOKEN_ID

Message = dict[str, str]
Prompt = str | list[int] | list[Message]

KINDS = ("prompt", "tokens", "messages")


def gather(texts: Sequence[str], path: str | None, chat: bool, system: str | None) -> list[Prompt]:
    """All prompts in input order; with `chat`, each text is a user's message.

    Raises: UsageError naming the prompt or line that cannot be used.
    """
    if bool(texts) == (path is not None):
        raise UsageError(
            "give the prompt with --prompt TEXT or a file of them with --prompts FILE.jsonl"
            + (", not both" if texts else "")
        )
    if system is not None and not chat:
        raise UsageError("--system is a part of a chat; add --chat")
    prompts: list[Prompt] = list(texts) if path is None else read_lines(path)
    if not chat:
        for index, prompt in enumerate(prompts):
            if prompt == "":
                raise UsageError(f"prompt {index} is empty; give at least one character")
        return prompts
    return [as_chat(prompt, system) if isinstance(prompt, str) else prompt for prompt in prompts]


def as_chat(text: str, system: str | None) -> list[Message]:
    """A conversation that begins with this message."""
    first = [] if system is None else [{"role": "system", "content": system}]
    return [*first, {"role": "user", "content": text}]


def read_lines(path: str) -> list[Prompt]:
    """The prompts of a JSONL file, one object a line; blank lines are skipped.

    Raises: UsageError naming the first line that is not {"prompt"}, {"tokens"} or {"messages"}.
    """
    prompts = []
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            prompts.append(_prompt(parse_json(line)))
        except ValueError as error:
            raise UsageError(f"{path}, line {number}: {error}") from None
    if not prompts:
        raise UsageError(f"{path}: no prompts in it; give one JSON object a line")
    return prompts


def parse_json(text: str) -> Any:
    """A JSON value; ValueError says where it is broken."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at character {error.pos})") from None
    except RecursionError:
        raise ValueError("not usable JSON: it is nested too deeply") from None


def check_tokens(value: Any, what: str = "tokens") -> list[int]:
    """A non-empty list of token ids; ValueError says what else was found."""
    if not isinstance(value, list) or not value:
        raise ValueError(f"{what} must be a list of token ids with at least one of them")
    for position, token in enumerate(value):
        if type(token) is not int or not 0 <= token <= MAX_TOKEN_ID:  # bool is an int to Python
            raise ValueError(
                f"{what}[{position}] is {shown(json.dumps(token))}, not a token id, "
                f"0 to {MAX_TOKEN_ID}"
            )
    return value


def _prompt(value: Any) -> Prompt:
    if not isinstance(value, dict):
        raise ValueError('not an object; write {"prompt": "..."}')
    for key in value:
        if key not in KINDS:
            raise ValueError(f"unknown key {shown(key)}{did_you_mean(key, KINDS)}")
    if len(value) != 1:
        raise ValueError(f"give exactly one of {', '.join(KINDS)}")
    if "tokens" in value:
        return check_tokens(value["tokens"])
    return _messages(value["messages"]) if "messages" in value else _text(value["prompt"], "prompt")


def _messages(value: Any) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise ValueError("messages must be a list with at least one message")
    return [_message(position, message) for position, message in enumerate(value)]


def _message(position: int, value: Any) -> Message:
    if not isinstance(value, dict) or value.keys() != {"role", "content"}:
        raise ValueError(f'messages[{position}] must be {{"role": "...", "content": "..."}}')
    return {key: _text(value[key], f"messages[{position}].{key}") for key in ("role", "content")}


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{what} is {shown(json.dumps(value))}, not a string")
    try:
        return plain_text(value)
    except ValueError:
        raise ValueError(f"{what} holds half of a surrogate pair, which is no character") from None
