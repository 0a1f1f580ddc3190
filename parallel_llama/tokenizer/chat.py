"""A conversation, and what turns one into the tokens that ask for its next answer."""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from parallel_llama.errors import UsageError, quoted

MAX_MESSAGES = 10_000
MAX_CHARS = 1 << 20  # of all texts, with one for each value; a template writes as many at most
MAX_DEPTH = 64
MAX_INT_BITS = 1 << 10

# Roles that every chat template may be asked to write.
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
MAX_LABEL_CHARS = 256

# Special tokens, by the names under which templates know them.
TOKEN_NAMES = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip
# What a template finds under these names is not a person's to say.
RESERVED_NAMES = frozenset(
    (
        *TOKEN_NAMES, "messages", "tools", "documents", "add_generation_prompt", "range", "dict",
        "lipsum", "cycler", "joiner", "namespace", "raise_exception", "strftime_now",
    )
)  # fmt: skip

Message = Mapping[str, Any]

# Templates write labels beside their markup: a label that spells markup could forge a turn.
_LABEL = re.compile(rf"[\w.:/@+=~-]{{0,{MAX_LABEL_CHARS}}}")
_LABELS = ("name", "id", "type", "tool_call_id")

_FOR_TEMPLATES = ("tools", "documents", "template_vars", "continues")


@dataclass(frozen=True)
class Chat:
    """A conversation, in the form of OpenAI's interface and of transformers.

    A message has a `role`, which must be one that the model's chat format knows, and a `content`:
    text, a list of parts {"type": "text", "text": ..}, or nothing beside `tool_calls`. Names and
    ids, of functions too, are letters, digits and _.:/@+=~-. The message's other keys, `tools`,
    `documents` and `template_vars`, which are names for the template, mean what the model's
    template makes of them. With `continues` the last message, which is the assistant's, is the
    beginning of the next answer.

    A special token that is spelled in a message becomes that token, as in transformers and vLLM.
    Without `parse_special` it stays text, and no message can forge a turn. Formats that are built
    in, for folders without a template, always read messages so.

    Raises: UsageError for what is no conversation, or one beyond the limits above.
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    documents: Sequence[Mapping[str, Any]] = ()
    template_vars: Mapping[str, Any] = field(default_factory=dict)
    continues: bool = False
    parse_special: bool = True

    def __post_init__(self) -> None:
        for name in ("messages", "tools", "documents"):
            _require_objects(getattr(self, name), name)
        if not 0 < len(self.messages) <= MAX_MESSAGES:
            raise UsageError(
                f"messages must be a list with at least one message and at most {MAX_MESSAGES}; "
                f"it has {len(self.messages)}"
            )
        for number, message in enumerate(self.messages):
            _require_message(message, f"messages[{number}]")
        for number, tool in enumerate(self.tools):
            _require_function(tool, f"tools[{number}]")
        _require_names(self.template_vars)
        if self.continues:
            _require_answer(self.messages[-1])
        size = sum(_size(value, name, MAX_DEPTH) for name, value in vars(self).items())
        if size > MAX_CHARS:
            raise UsageError(
                f"the conversation has {size} characters, and at most {MAX_CHARS} are taken; "
                "shorten it"
            )


class ChatTemplate(Protocol):
    """How one model wants a conversation written.

    `stop_ids` end the assistant's turn, as far as the model's files tell. `template_text` is its
    template as the files have it, "" for a format that is built in.
    """

    @property
    def stop_ids(self) -> frozenset[int]: ...

    @property
    def template_text(self) -> str: ...

    def encode(self, chat: Chat) -> list[int]:
        """Tokens of the conversation up to where the assistant's next answer begins.

        Raises: UsageError if the messages do not fit the format.
        """
        ...


def text_of(message: Message) -> str:
    """The text of a message, its parts joined by newlines; none where it has only tool calls."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def require_roles(messages: Sequence[Message], known: Collection[str]) -> None:
    """Refuse roles that a chat format does not know: as free text they could forge a turn.

    Raises: UsageError naming the first unknown role.
    """
    for number, message in enumerate(messages):
        if message["role"] not in known:
            raise UsageError(
                f"messages[{number}] has role {quoted(message['role'])}, which is not known; give "
                + ", ".join(role for role in ROLES if role in known)
            )


def require_plain(chat: Chat) -> None:
    """Refuse what a chat format without a template has no place for.

    Raises: UsageError for tools, documents, template_vars and tool_calls.
    """
    given = [name for name in _FOR_TEMPLATES if getattr(chat, name)]
    given += [
        f"messages[{number}] has tool_calls, which"
        for number, message in enumerate(chat.messages)
        if message.get("tool_calls")
    ]
    if given:
        raise UsageError(
            f"{given[0]} are for a chat template, and the model's folder has none; use its "
            "Hugging Face folder"
        )


def _require_objects(value: Any, where: str) -> None:
    if not isinstance(value, list | tuple):
        raise UsageError(f"{where} must be a list of objects, and is {_kind(value)}")
    for number, item in enumerate(value):
        if not isinstance(item, dict):
            raise UsageError(f"{where}[{number}] must be an object, and is {_kind(item)}")


def _require_message(message: Message, where: str) -> None:
    if not isinstance(message.get("role"), str):
        raise UsageError(f"{where} has role={message.get('role')!r:.80}; give text as its role")
    _require_labels(message, where)
    if (calls := message.get("tool_calls")) is not None:
        _require_objects(calls, f"{where}.tool_calls")
        for number, call in enumerate(calls):
            _require_function(call, f"{where}.tool_calls[{number}]")
    content = message.get("content")
    if isinstance(content, list | tuple):
        _require_objects(content, f"{where}.content")
        for number, part in enumerate(content):
            _require_text(part, f"{where}.content[{number}]")
    elif not isinstance(content, str) and (content is not None or not calls):
        raise UsageError(f"{where} has content={content!r:.80}; give text or a list of text parts")


def _require_function(item: Mapping[str, Any], where: str) -> None:
    """Check the labels of a tool or a tool call, and of the function in it."""
    _require_labels(item, where)
    if isinstance(function := item.get("function"), dict):
        _require_labels(function, f"{where}.function")


def _require_labels(item: Mapping[str, Any], where: str) -> None:
    for key in _LABELS:
        value = item.get(key)
        if value is not None and not (isinstance(value, str) and _LABEL.fullmatch(value)):
            found = quoted(value) if isinstance(value, str) else _kind(value)
            raise UsageError(
                f"{where}.{key} is {found}; give at most {MAX_LABEL_CHARS} letters, digits and "
                "_.:/@+=~-"
            )


def _require_answer(message: Message) -> None:
    if message["role"] != "assistant" or not text_of(message).strip():
        raise UsageError(
            f"the last message, of role {message['role']!r:.80}, is no answer that could be "
            "continued; give one of the assistant, with text"
        )


def _require_text(part: Mapping[str, Any], where: str) -> None:
    if part.get("type") != "text":
        raise UsageError(f"{where} is of type {part.get('type')!r:.80}; only text is taken")
    if not isinstance(part.get("text"), str):
        raise UsageError(f"{where} has text={part.get('text')!r:.80}; give a string")


def _require_names(names: Any) -> None:
    if not isinstance(names, dict):
        raise UsageError(f"template_vars must be an object, and is {_kind(names)}")
    for name in names:
        if not isinstance(name, str) or not name.isidentifier():
            raise UsageError(f"template_vars: {name!r:.80} is no name; use letters, digits and _")
        if name in RESERVED_NAMES:
            raise UsageError(f"template_vars: {name} is a name that is set already; use another")


def _size(value: Any, where: str, depth: int) -> int:
    """How much a value of JSON's kinds holds: the characters of its texts, and one for each value.

    Raises: UsageError for a value of another kind, or one that is nested too deeply.
    """
    if depth == 0:
        raise UsageError(f"{where:.80} is nested more than {MAX_DEPTH} deep")
    match value:
        case str():
            return 1 + len(_unicode(value, where))
        case None | bool():
            return 1
        case int() if value.bit_length() <= MAX_INT_BITS:
            return 1
        case float() if math.isfinite(value):
            return 1
        case list() | tuple():
            items = ((f"{where}[{number}]", item) for number, item in enumerate(value))
            return 1 + sum(_size(item, name, depth - 1) for name, item in items)
        case dict() if all(isinstance(key, str) for key in value):
            return 1 + sum(
                len(_unicode(key, where)) + _size(item, f"{where}.{key}", depth - 1)
                for key, item in value.items()
            )
    raise UsageError(f"{where:.80} is {_kind(value)} that JSON does not know")


def _unicode(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError(
            f"{where:.80} holds half of a surrogate pair, which is no character"
        ) from None
    return text


def _kind(value: Any) -> str:
    return "null" if value is None else f"a {type(value).__name__}"
