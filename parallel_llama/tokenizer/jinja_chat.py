"""Encodes chats with a model's jinja template, which is untrusted code."""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

from parallel_llama.errors import CheckpointError, UsageError, quoted
from parallel_llama.tokenizer.bounded_process import BoundedProcess, JobRequest, Stopped
from parallel_llama.tokenizer.channels import ANSWER_ENDS, has_channels
from parallel_llama.tokenizer.chat import (
    MAX_CHARS,
    ROLES,
    TURN_ENDS,
    Chat,
    Message,
    developer_as_system,
    require_roles,
    text_of,
)
from parallel_llama.tokenizer.tokenizer import Tokenizer, longest_of

# Noncharacters, which Unicode reserves for internal use by programs.
_NONCHARACTERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]

_QUOTED_WORD = re.compile(r"""['"]([A-Za-z][A-Za-z0-9_-]{0,31})['"]""")
_REASONING = ("reasoning_content", "thinking", "reasoning")

# The fields of a function that may be missing, with their meaning then. Some templates need them.
_FUNCTION_DEFAULTS = {"description": "", "parameters": {"type": "object", "properties": {}}}

# Real templates take up to 0.1 s to compile, and up to 25 us per character if they iterate over
# all messages for each message.
RENDER_CPU_S = 1.5
RENDER_CPU_S_PER_BYTE = 100e-6
MAX_EXTRA_BYTES = 192 << 20
# If the variables of a template that writes too much are longer, the messages are too long; else
# the template is at fault.
LONG_CHARS = MAX_CHARS // 4


class TemplateRenderer:
    """Renders templates in a separate process, one at a time. Thread-safe."""

    def __init__(self, cpu_s: float = RENDER_CPU_S) -> None:
        self._cpu_s = cpu_s
        self._process = BoundedProcess("sandbox_templates", MAX_EXTRA_BYTES)

    def render(self, template: str, context: Mapping[str, Any], source: str) -> str:
        """The rendered template.

        Args:
            context: the variables of the template.
            source: the template's file, for error messages.

        Raises: UsageError if the template refuses the messages or fails to render them, or if long
        messages make its text too long; CheckpointError if it does not parse or exceeds the limits.
        """
        fields = {"template": template, "context": context}
        try:
            reply = self._process.ask(JobRequest(self._cpu_s, RENDER_CPU_S_PER_BYTE, fields))
        except Stopped as error:
            reply = {"failure": "limit", "message": str(error)}
        failure, message = reply.get("failure"), reply.get("message")
        if failure is None:
            return str(reply["text"])
        if failure == "refused":
            raise UsageError(f"the model's chat template refuses the messages: {message}")
        if failure == "error":
            raise UsageError(f"{source}: the chat template cannot render the messages: {message}")
        if failure == "length" and len(json.dumps(context)) > LONG_CHARS:
            raise UsageError(
                f"the messages are too long for the model's chat template: {message}; shorten them"
            )
        if failure == "syntax":
            raise CheckpointError(f"{source}: the chat template does not parse: {message}")
        raise CheckpointError(f"{source}: the chat template was stopped: {message}")

    def close(self) -> None:
        """Ends the process; the next call starts it again."""
        self._process.close()


class JinjaChat:
    """Renders the model's template and encodes the text, including special tokens.

    A special token written in a message becomes that token, as in transformers, because a template
    outputs only text. For a chat without `parse_special`, the text of a special token is split
    after its first character before rendering. Texts of the vocabulary's `units` that occur in the
    template are split too, because some models use them as markup.

    The template's input is that of transformers: keys without a value are omitted, and reasoning is
    given as `thinking` and `reasoning_content`. In addition, as in vLLM, a message that has only
    calls has the text "", an empty list of calls is omitted, and arguments of tool calls given as
    JSON text of an object are decoded; empty or missing arguments become {}. If a template does not
    support messages of a role that consist of text parts, the parts are joined by newlines. If it
    does not support functions without a description or parameters, empty ones are added. For a
    template with channels, the text and the reasoning of a message with calls are joined by an
    empty line.

    A role must be one of ROLES, or a quoted word in the template, as in `role == 'critic'`. If
    `developer` is not a quoted word in the template, messages of this role become system messages.

    Args:
        names: special tokens by their names in templates, such as `bos_token`.
        tool_use: template for chats with tools.
        adds_bos: whether to add a bos token to a text that does not begin with one, as llama.cpp
            does for GGUF files. If false, the template writes bos, as in transformers and vLLM.
    """

    def __init__(
        self,
        template: str,
        tokenizer: Tokenizer,
        names: Mapping[str, str],
        source: str,
        renderer: TemplateRenderer | None = None,
        tool_use: str | None = None,
        adds_bos: bool = False,
    ) -> None:
        self._template, self._names, self._source = template, dict(names), source
        self._tool_use = tool_use or template
        self._tokenizer, self._adds_bos = tokenizer, adds_bos
        self._renderer = renderer or TemplateRenderer()
        self._takes_parts: dict[tuple[str, str], bool] = {}
        special_ids = tokenizer.vocabulary.special_ids
        self.template_text = written = template if tool_use is None else template + tool_use
        self._markup = [
            *special_ids,
            *(text for text in tokenizer.vocabulary.units if text.strip() and text in written),
        ]
        self._longest = max(map(len, self._markup), default=0)
        self._roles = tuple(dict.fromkeys((*ROLES, *_QUOTED_WORD.findall(written))))
        ends = ANSWER_ENDS if has_channels(written) else TURN_ENDS
        self.stop_ids = tokenizer.eos_ids | {
            special_ids[text] for text in ends if text in special_ids and text in written
        }

    def close(self) -> None:
        """Ends the renderer's process; the next call starts it again."""
        self._renderer.close()

    def encode(self, chat: Chat) -> list[int]:
        cut = "" if chat.parse_special else self._unused_in(chat)
        text = self.render(chat, cut)
        pieces = text.split(cut) if cut else [text]
        return self._tokenizer.encode_pieces(
            pieces, bos=self._adds_bos and not self._tokenizer.begins_with_prefix(text)
        )

    def render(self, chat: Chat, cut: str = "") -> str:
        """The text of the conversation, up to the beginning of the assistant's next answer.

        `cut` is a character to insert into texts of the chat that contain markup, or "".
        """
        require_roles(chat.messages, self._roles)
        template = self._tool_use if chat.tools else self._template
        messages = chat.messages
        if "developer" not in _QUOTED_WORD.findall(template):
            messages = developer_as_system(messages)
        chat = replace(chat, messages=[self._message(message, template) for message in messages])
        if any(map(_lacks_fields, chat.tools)) and not self._takes_bare_functions:
            chat = replace(chat, tools=[*map(_with_fields, chat.tools)])
        if cut:
            chat = replace(
                chat,
                messages=[
                    {**self._plain(message, cut), "role": message["role"]}
                    for message in chat.messages
                ],
                tools=self._plain(chat.tools, cut),
                documents=self._plain(chat.documents, cut),
                template_vars=self._plain(chat.template_vars, cut),
            )
        return self._begun(template, chat, cut) if chat.continues else self._render(template, chat)

    def _unused_in(self, chat: Chat, cut: str = "") -> str:
        """A character that occurs neither in the chat nor in the template, and is not `cut`."""
        fields = (chat.messages, chat.tools, chat.documents, chat.template_vars)
        taken = {*json.dumps(fields, ensure_ascii=False), *self.template_text, cut}
        taken.update(*self._markup)
        # A noncharacter that is escaped in the JSON text of a call's arguments is not found. If
        # `encode` cuts with this noncharacter, the arguments lose it.
        unused = next((char for char in _NONCHARACTERS if char not in taken), None)
        if unused is None:
            raise UsageError(
                "the messages contain every noncharacter of Unicode; remove at least one"
            )
        return unused

    def _plain(self, value: Any, cut: str) -> Any:
        """A JSON value with `cut` inserted into strings and keys that contain markup.

        Raises: UsageError for a special token of one character, which cannot be split.
        """
        match value:
            case str():
                return self._plain_text(value, cut)
            case dict():
                return {
                    self._plain_text(key, cut): self._plain(item, cut)
                    for key, item in value.items()
                }
            case list() | tuple():
                return [self._plain(item, cut) for item in value]
        return value

    def _plain_text(self, text: str, cut: str) -> str:
        while mark := self._marks.search(text):
            if len(mark[0]) == 1:
                raise UsageError(
                    f"parse_special=false: {quoted(mark[0])} is a special token of one character, "
                    "which cannot be text; remove it"
                )
            text = self._marks.sub(lambda match: f"{match[0][0]}{cut}{match[0][1:]}", text)
        # The beginning of markup at the end of a text could be completed by the template.
        if (end := self._end_of_beginning(text)) is not None:
            text = f"{text[:end]}{cut}{text[end:]}"
        return text

    def _end_of_beginning(self, text: str) -> int | None:
        """The end of a partial mark that only whitespace follows; None if there is no such mark.

        The partial mark that starts first counts; if several start there, the longest.
        """
        n_chars, n_stripped = len(text), len(text.rstrip())
        for start in range(max(0, n_stripped - self._longest), n_chars):
            if text[start] not in self._beginnings:
                continue
            last_end = min(start + self._longest, n_chars)
            for end in range(last_end, max(start, n_stripped - 1), -1):
                if text[start:end] in self._beginnings:
                    return end
        return None

    def _begun(self, template: str, chat: Chat, cut: str) -> str:
        """The text of a conversation up to the end of its last message, without trailing spaces.

        As in transformers, the last message gets a mark appended: a search for its text alone
        could match the markup that follows.
        """
        mark = self._unused_in(chat, cut)
        *earlier, last = chat.messages
        content = last["content"]
        if isinstance(content, str):
            answer: str = content
            marked: str | list[Any] = content + mark
        else:
            *parts, last_part = content
            answer = last_part["text"]
            marked = [*parts, {**last_part, "text": answer + mark}]
        chat = replace(chat, messages=[*earlier, {**last, "content": marked}])
        before, found, _ = self._render(template, chat).rpartition(mark)
        text = before.replace(mark, "").rstrip()
        if not found or not text.endswith(answer.strip()):
            raise UsageError(
                f"{self._source}: the chat template changes the text of the last message, so that "
                "message cannot be continued"
            )
        return text

    def _render(self, template: str, chat: Chat) -> str:
        context = {
            **self._names,
            **chat.template_vars,
            "messages": chat.messages,
            "add_generation_prompt": not chat.continues,
            "tools": chat.tools or None,
            "documents": chat.documents or None,
        }
        return self._renderer.render(template, context, self._source)

    def _message(self, message: Message, template: str) -> Message:
        fields = {key: value for key, value in message.items() if value is not None}
        fields.setdefault("content", "")
        if "tool_calls" in fields and not fields["tool_calls"]:
            del fields["tool_calls"]  # templates test whether the key exists
        reasoning = next((fields[key] for key in _REASONING if key in fields), None)
        if reasoning is not None:
            fields = {"thinking": reasoning, **fields, "reasoning_content": reasoning}
            if "tool_calls" in fields and fields["content"] and has_channels(template):
                # gpt-oss's template writes one message before a call, and refuses two texts.
                fields |= {"thinking": f"{reasoning}\n\n{text_of(fields)}", "content": ""}
        if "tool_calls" in fields:
            fields["tool_calls"] = [_with_object(call) for call in fields["tool_calls"]]
        if not isinstance(fields["content"], str):
            key = (template, fields["role"])
            if key not in self._takes_parts:
                self._takes_parts[key] = self._try_parts(*key)
            if not self._takes_parts[key]:
                fields["content"] = text_of(fields)
        return fields

    def _try_parts(self, template: str, role: str) -> bool:
        """Whether the template writes the text of all parts of a message, and only their text."""
        text = self._try_render(template, _probe(role))
        return "part-one" in text and "part-two" in text and "part-mark" not in text

    @cached_property
    def takes_system(self) -> bool:
        """Whether the template writes the text of a system message."""
        system = {"role": "system", "content": "system-mark"}
        chat = Chat([system, {"role": "user", "content": "text"}])
        return "system-mark" in self._try_render(self._template, chat)

    @cached_property
    def takes_tools(self) -> bool:
        """Whether the template writes the names of functions."""
        return self._writes_function(
            {
                "description": "text",
                "parameters": {
                    "type": "object",
                    "properties": {"key": {"type": "string", "description": "text"}},
                    "required": ["key"],
                },
            }
        )

    @cached_property
    def _takes_bare_functions(self) -> bool:
        """Whether the template writes a function that has no description and no parameters."""
        return self._writes_function({})

    def _writes_function(self, fields: Mapping[str, Any]) -> bool:
        tool = {"type": "function", "function": {"name": "tool_mark", **fields}}
        chat = Chat([{"role": "user", "content": "text"}], tools=[tool])
        return "tool_mark" in self._try_render(self._tool_use, chat)

    def _try_render(self, template: str, chat: Chat) -> str:
        """The text of a conversation; "" if the template refuses it or fails."""
        try:
            return self._render(template, chat)
        except (UsageError, CheckpointError):
            return ""

    @cached_property
    def _marks(self) -> re.Pattern[str]:
        return re.compile(longest_of(self._markup))

    @cached_property
    def _beginnings(self) -> frozenset[str]:
        return frozenset(text[:n] for text in self._markup for n in range(1, len(text)))


def _lacks_fields(tool: Mapping[str, Any]) -> bool:
    """Whether a tool is a function without a description or without parameters."""
    function = tool.get("function")
    return isinstance(function, Mapping) and any(
        function.get(name) is None for name in _FUNCTION_DEFAULTS
    )


def _with_fields(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """A tool with the fields that its function lacks."""
    if not _lacks_fields(tool):
        return tool
    function = {name: value for name, value in tool["function"].items() if value is not None}
    return {**tool, "function": {**_FUNCTION_DEFAULTS, **function}}


def _with_object(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """A tool call with its arguments decoded, if they are the JSON text of an object, or empty."""
    function = call.get("function")
    if not isinstance(function, Mapping):
        return call
    text = function.get("arguments")
    if text is None or text == "":
        text = "{}"  # a call without arguments, as some servers and clients write it
    if not isinstance(text, str):
        return call
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):
        return call
    if isinstance(arguments, dict):
        return {**call, "function": {**function, "arguments": arguments}}
    return call


def _probe(role: str) -> Chat:
    """A conversation with a message of this role that has two parts, each with an unknown key."""
    parts = [
        {"type": "text", "text": text, "mark": "part-mark"} for text in ("part-one", "part-two")
    ]
    message = {"role": role, "content": parts, "tool_call_id": "call00000", "name": "f"}
    user = {"role": "user", "content": "text"}
    function = {"name": "f", "arguments": {}}
    call = {"id": "call00000", "type": "function", "function": function}
    match role:
        case "system" | "developer":
            return Chat([message, user])
        case "assistant":
            return Chat([user, message, user])
        case "tool":
            caller = {"role": "assistant", "content": "", "tool_calls": [call]}
            return Chat([user, caller, message])
        case _:
            return Chat([message])
