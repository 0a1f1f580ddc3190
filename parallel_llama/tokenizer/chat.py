"""`Chat`, a conversation that is checked when created, and the interface of chat templates."""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from parallel_llama.errors import UsageError, kind_of, quoted

MAX_MESSAGES = 10_000
MAX_CHARS = 1 << 20  # of all strings, plus one per value; also the limit of a rendered template
MAX_DEPTH = 64
MAX_INT_BITS = 1 << 10

# Roles that are allowed for every chat template.
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
MAX_LABEL_CHARS = 256

# Tokens that end a turn in some models. A token is used if it is a special token of the model and
# occurs in the template; the tokenizer's eos token is often the end of a document instead.
TURN_ENDS = (
    "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|eom|>", "<|im_end|>", "<|end|>", "<|end_of_turn|>",
    "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "</s>", "<|END_OF_TURN_TOKEN|>",
)  # fmt: skip

# Names of special tokens in templates.
TOKEN_NAMES = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip
# Names that template_vars cannot set.
RESERVED_NAMES = frozenset(
    (
        *TOKEN_NAMES, "messages", "tools", "documents", "add_generation_prompt", "range", "dict",
        "lipsum", "cycler", "joiner", "namespace", "raise_exception", "strftime_now",
    )
)  # fmt: skip

Message = Mapping[str, Any]

# Templates write labels next to their markup, so a label that contains markup could forge a turn.
_LABEL = re.compile(rf"[\w.:/@+=~-]{{0,{MAX_LABEL_CHARS}}}")
_LABELS = ("name", "id", "type", "tool_call_id")

_FOR_TEMPLATES = ("tools", "documents", "template_vars")


@dataclass(frozen=True)
class Chat:
    """A conversation, in the format of OpenAI's API and of transformers.

    Args:
        messages: each has a `role` of the model's chat format and a `content`: a string, a list of
            parts {"type": "text", "text": ..}, or None if it has `tool_calls`. The role `developer`
            means `system`, unless the chat template names `developer`. Names and ids consist of
            letters, digits and _.:/@+=~-. Other keys are passed to the template.
        tools, documents, template_vars: passed to the template.
        continues: whether the last message, the assistant's, is the beginning of the next answer.
        parse_special: whether special tokens written in messages become tokens, as in transformers
            and vLLM. If false they remain text, so that no message can forge a turn. Built-in
            formats, for folders without a template, never parse them.

    Raises: UsageError for an invalid conversation, or one that exceeds a limit of this module.
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
                f"the conversation has {size} characters, over the limit of {MAX_CHARS}; shorten it"
            )


class ChatTemplate(Protocol):
    """The chat format of a model.

    `stop_ids` are the tokens that end the assistant's turn according to the model's files.
    `template_text` is the source of the template, "" for a built-in format. `takes_system` is false
    if the format has no system messages. `takes_tools` is false if the format does not list the
    chat's tools. The first use of either may render the template.
    """

    @property
    def stop_ids(self) -> frozenset[int]: ...

    @property
    def template_text(self) -> str: ...

    @property
    def takes_system(self) -> bool: ...

    @property
    def takes_tools(self) -> bool: ...

    def encode(self, chat: Chat) -> list[int]:
        """Token ids of the conversation, up to the beginning of the assistant's next answer.

        Raises: UsageError if the messages do not fit the format.
        """


def text_of(message: Message) -> str:
    """The text of a message, its parts joined by newlines; "" if it has only tool calls."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def developer_as_system(messages: Sequence[Message]) -> list[Message]:
    """The messages with the role `system` in place of `developer`, OpenAI's newer name for it."""
    return [
        {**message, "role": "system"} if message["role"] == "developer" else message
        for message in messages
    ]


def require_roles(messages: Sequence[Message], known: Collection[str]) -> None:
    """Refuses roles that a chat format does not know, because they could forge a turn.

    Raises: UsageError naming the first unknown role.
    """
    for number, message in enumerate(messages):
        if message["role"] not in known:
            raise UsageError(
                f"messages[{number}] has role {quoted(message['role'])}, which is unknown; use "
                + ", ".join(role for role in ROLES if role in known)
            )


def require_plain(chat: Chat) -> None:
    """Refuses fields that only chat templates support.

    Raises: UsageError for tools, documents, template_vars, tool_calls, and a message to continue.
    """
    used = ["a last message to continue"] if chat.continues else []
    used += [name for name in _FOR_TEMPLATES if getattr(chat, name)]
    used += [
        f"tool_calls of messages[{number}]"
        for number, message in enumerate(chat.messages)
        if message.get("tool_calls")
    ]
    if used:
        raise UsageError(
            f"{used[0]}: supported only with a chat template, and the model's folder has none; use "
            "the model's Hugging Face folder"
        )


def _require_objects(value: Any, where: str) -> None:
    if not isinstance(value, list | tuple):
        raise UsageError(f"{where} must be a list of objects, not {_kind(value)}")
    for number, item in enumerate(value):
        if not isinstance(item, dict):
            raise UsageError(f"{where}[{number}] must be an object, not {_kind(item)}")


def _require_message(message: Message, where: str) -> None:
    if not isinstance(message.get("role"), str):
        raise UsageError(f"{where} has role={message.get('role')!r:.80}; role must be a string")
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
    """Checks the labels of a tool or a tool call, and of its function."""
    _require_labels(item, where)
    if isinstance(function := item.get("function"), dict):
        _require_labels(function, f"{where}.function")


def _require_labels(item: Mapping[str, Any], where: str) -> None:
    for key in _LABELS:
        value = item.get(key)
        if value is not None and not (isinstance(value, str) and _LABEL.fullmatch(value)):
            shown = quoted(value) if isinstance(value, str) else _kind(value)
            raise UsageError(
                f"{where}.{key} is {shown}; give at most {MAX_LABEL_CHARS} letters, digits and "
                "_.:/@+=~-"
            )


def _require_answer(message: Message) -> None:
    if message["role"] != "assistant" or not text_of(message).strip():
        raise UsageError(
            f"the last message, of role {message['role']!r:.80}, cannot be continued; it must be "
            "an assistant message with text"
        )


def _require_text(part: Mapping[str, Any], where: str) -> None:
    if part.get("type") != "text":
        raise UsageError(f"{where} has type={part.get('type')!r:.80}; only 'text' is supported")
    if not isinstance(part.get("text"), str):
        raise UsageError(f"{where} has text={part.get('text')!r:.80}; give a string")


def _require_names(names: Any) -> None:
    if not isinstance(names, dict):
        raise UsageError(f"template_vars must be an object, not {_kind(names)}")
    for name in names:
        if not isinstance(name, str) or not name.isidentifier():
            raise UsageError(f"template_vars: {name!r:.80} is not a name; use letters, digits, _")
        if name in RESERVED_NAMES:
            raise UsageError(f"template_vars: {name} is a reserved name; use another name")


def _size(value: Any, where: str, depth: int) -> int:
    """The size of a JSON value: the characters of its strings, plus one per value.

    Raises: UsageError for a value that is not JSON, or is nested too deeply.
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
    raise UsageError(f"{where:.80} is {_kind(value)} that is not valid in JSON")


def _unicode(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{where:.80} contains an unpaired surrogate, which is not text") from None
    return text


def _kind(value: Any) -> str:
    return "null" if value is None else kind_of(value)
