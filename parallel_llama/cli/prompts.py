"""Prompts from the command line: --prompt texts or a JSONL file, checked line by line."""

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from parallel_llama.cli.arguments import Flag, Flags
from parallel_llama.cli.parsers import STDIN, input_file_or_stdin, plain_text, template_var
from parallel_llama.cli.sampling_flags import SETTINGS, settings_of
from parallel_llama.errors import UsageError, quoted
from parallel_llama.files.bounded_files import open_input
from parallel_llama.files.fields import did_you_mean, parse_json
from parallel_llama.request import MAX_TOKEN_ID
from parallel_llama.tokenizer import Chat

Prompt = str | list[int] | Chat

KINDS = ("prompt", "tokens", "messages")
BESIDE_MESSAGES = ("tools", "documents", "template_vars")
_SYSTEM_ROLES = ("system", "developer")

MAX_PROMPTS = 1_000_000
MAX_LINE_BYTES = 64 << 20

PROMPT: Flag[list[str]] = Flag(
    "prompt", "text to complete; - reads stdin", plain_text, "TEXT", repeatable=True,
    subject="prompts",
)  # fmt: skip
PROMPTS: Flag[str | None] = Flag(
    "prompts",
    'a JSON object per line: {"prompt"}, {"tokens"} or {"messages"}, optionally with sampling '
    'parameters such as "max_tokens"; - reads stdin',
    input_file_or_stdin, "FILE.jsonl", subject="prompts",
)  # fmt: skip
CHAT: Flag[bool] = Flag("chat", "apply the model's chat template to each prompt", subject="prompts")
SYSTEM: Flag[str | None] = Flag(
    "system", "system message of each chat", plain_text, "TEXT", subject="prompts"
)
TEMPLATE_VAR: Flag[list[tuple[str, Any]]] = Flag(
    "template-var", "variable of the chat template, such as enable_thinking=false",
    template_var, "NAME=VALUE", repeatable=True, subject="prompts",
)  # fmt: skip

PROMPT_FLAGS: tuple[Flag[Any], ...] = (PROMPT, PROMPTS, CHAT, SYSTEM, TEMPLATE_VAR)


@dataclass(frozen=True)
class Line:
    """One prompt, where it was given, and its own sampling parameters."""

    where: str
    prompt: Prompt
    settings: Mapping[str, Any] = field(default_factory=dict)


def require_one_source(flags: Flags) -> None:
    """Raises: UsageError for two sources of prompts or none, and for chat flags without --chat."""
    texts, path = flags[PROMPT], flags[PROMPTS]
    if bool(texts) == (path is not None):
        raise UsageError(
            "give the prompt with --prompt TEXT or a file of prompts with --prompts FILE.jsonl"
            + (", not both" if texts else "")
        )
    if texts.count(STDIN) > 1:
        raise UsageError("--prompt - is given twice, but stdin can be read only once")
    if flags[SYSTEM] is not None and not flags[CHAT]:
        raise UsageError("--system needs a chat; add --chat")
    if flags[TEMPLATE_VAR] and not flags[CHAT] and path is None:
        raise UsageError("--template-var needs the chat template; add --chat")


def gather(flags: Flags) -> list[Line]:
    """All prompts in input order; with --chat, each text becomes a user message.

    Raises: UsageError naming the invalid prompt or line, or a flag for chats if no prompt is one.
    """
    path = flags[PROMPTS]
    if path is not None:
        lines = read_lines(path)
    else:
        lines = [
            Line(f"prompt {i}", _read_stdin() if text == STDIN else text)
            for i, text in enumerate(flags[PROMPT])
        ]
    system, template_vars = flags[SYSTEM], dict(flags[TEMPLATE_VAR])
    if flags[CHAT]:
        lines = [_in_chat(line) for line in lines]
    if (system is not None or template_vars) and not any(map(_is_chat, lines)):
        name = TEMPLATE_VAR.name if system is None else SYSTEM.name
        raise UsageError(
            f"--{name} needs a chat, but no line of --prompts is one; give messages, or texts with "
            "--chat"
        )
    if system is not None:
        lines = [_with_system(line, system) for line in lines]
    if template_vars:
        lines = [_with_vars(line, template_vars) for line in lines]
    for line in lines:
        if line.prompt == "":
            raise UsageError(f"{line.where} is empty; give at least one character")
    return lines


def read_lines(path: str) -> list[Line]:
    """The prompts of a JSONL file, one object per line; blank lines are skipped.

    Raises: UsageError naming the first line that is not a {"prompt"}, {"tokens"} or {"messages"}
    object, optionally with sampling parameters, and with the fields of a chat only for messages.
    """
    lines: list[Line] = []
    name = "stdin" if path == STDIN else path
    for number, data in enumerate(_split(path, name), start=1):
        if not data.strip():
            continue
        where = f"{name}, line {number}"
        if len(lines) == MAX_PROMPTS:
            raise UsageError(f"{where}: more than {MAX_PROMPTS} prompts; split the file")
        try:
            value = parse_json(_decoded(data))
        except ValueError as error:
            raise UsageError(
                f'{where}: {error}; write each line as a JSON object such as {{"prompt": "..."}}'
            ) from None
        try:
            lines.append(_line(where, value))
        except ValueError as error:
            raise UsageError(f"{where}: {error}") from None
    if not lines:
        raise UsageError(f"{name}: contains no prompts; give one JSON object per line")
    return lines


def check_tokens(value: Any, what: str = "tokens") -> list[int]:
    """Returns `value` if it is a non-empty list of token ids, else raises ValueError."""
    if not isinstance(value, list) or not value:
        raise ValueError(f"{what} must be a list of token ids with at least one")
    for position, token in enumerate(value):
        if type(token) is not int or not 0 <= token <= MAX_TOKEN_ID:  # excludes bool
            raise ValueError(
                f"{what}[{position}] is {quoted(json.dumps(token))}, not a token id from 0 to "
                f"{MAX_TOKEN_ID}"
            )
    return value


def _split(path: str, name: str) -> Iterator[bytes]:
    """The lines of a file, read one at a time."""
    try:
        with nullcontext(_stdin()) if path == STDIN else open_input(Path(path)) as file:
            while data := file.readline(MAX_LINE_BYTES + 1):
                if len(data) > MAX_LINE_BYTES:
                    raise UsageError(f"{name}: a line of more than {MAX_LINE_BYTES} bytes")
                yield data
    except OSError as error:
        raise UsageError(f"{name}: {error.strerror or error}") from error


def _read_stdin() -> str:
    """The contents of stdin, without a final line break."""
    data = _stdin().read(MAX_LINE_BYTES + 1)
    if len(data) > MAX_LINE_BYTES:
        raise UsageError(f"--prompt -: stdin holds more than {MAX_LINE_BYTES} bytes")
    try:
        return _decoded(data).removesuffix("\n")
    except ValueError as error:
        raise UsageError(f"--prompt -: {error}") from None


def _stdin() -> BinaryIO:
    if sys.stdin is None:
        raise UsageError("stdin is closed; redirect a file or pipe to it, or omit -")
    return sys.stdin.buffer


def _decoded(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text (at byte {error.start})") from None


def _in_chat(line: Line) -> Line:
    """The line with its text as a user message; unchanged if it is not a text."""
    if not isinstance(line.prompt, str):
        return line
    return replace(line, prompt=Chat([{"role": "user", "content": line.prompt}]))


def _with_system(line: Line, text: str) -> Line:
    """The line with a system message; that of the line itself takes precedence."""
    chat = line.prompt
    if not isinstance(chat, Chat) or any(m["role"] in _SYSTEM_ROLES for m in chat.messages):
        return line
    messages = [{"role": "system", "content": text}, *chat.messages]
    return replace(line, prompt=replace(chat, messages=messages))


def _with_vars(line: Line, template_vars: Mapping[str, Any]) -> Line:
    """The line with template variables; those of the line itself take precedence."""
    if not isinstance(line.prompt, Chat):
        return line
    merged = {**template_vars, **line.prompt.template_vars}
    return replace(line, prompt=replace(line.prompt, template_vars=merged))


def _is_chat(line: Line) -> bool:
    return isinstance(line.prompt, Chat)


def _line(where: str, value: Any) -> Line:
    if not isinstance(value, dict):
        raise ValueError('not an object; write {"prompt": "..."}')
    known = (*KINDS, *BESIDE_MESSAGES, *SETTINGS)
    for key in value:
        if key not in known:
            raise ValueError(f"unknown key {quoted(key)}{did_you_mean(key, known)}")
    if sum(kind in value for kind in KINDS) != 1:
        raise ValueError(f"give exactly one of {', '.join(KINDS)}")
    settings = settings_of({key: value[key] for key in value if key in SETTINGS})
    return Line(where, _prompt(value), settings)


def _prompt(value: dict[str, Any]) -> Prompt:
    chat = {key: value[key] for key in BESIDE_MESSAGES if key in value}
    if "messages" in value:
        return Chat(value["messages"], **chat)
    if chat:
        raise ValueError(f"{', '.join(chat)}: only for a chat; give messages too")
    return check_tokens(value["tokens"]) if "tokens" in value else _text(value["prompt"], "prompt")


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{what} is {quoted(json.dumps(value))}, not a string")
    try:
        return plain_text(value)
    except ValueError:
        raise ValueError(f"{what} contains an unpaired surrogate, which is not text") from None
