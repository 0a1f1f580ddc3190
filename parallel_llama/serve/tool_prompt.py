"""Prompts of conversations with functions, for templates with and without support for tools."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import msgspec

from parallel_llama.errors import UsageError
from parallel_llama.files.fields import nearest
from parallel_llama.serve.bodies import Tool
from parallel_llama.serve.params import log_ignored
from parallel_llama.serve.tool_calls import HERMES
from parallel_llama.tokenizer import Chat, ChatTemplate
from parallel_llama.tokenizer.chat import Message, text_of

_WORD = re.compile(r"[A-Za-z_]\w+")
_SIMILARITY = 0.85  # from here a name is considered a misspelling of one that the template reads

# The syntax of HERMES.
_IN_WORDS = """You can call functions. Each line describes one:
{functions}

To call one, write this, with its name and its arguments in their places:
<tool_call>
{{"name": "name", "arguments": {{"parameter": "value"}}}}
</tool_call>
What it returns comes back between <tool_response> and </tool_response>."""


def conversation(
    template: ChatTemplate | None,
    messages: Sequence[Message],
    tools: Sequence[Tool],
    template_vars: Mapping[str, Any],
    continues: bool = False,
    parse_special: bool = True,
) -> Chat:
    """The chat of some messages for this template.

    Variables that the template does not read are dropped and logged.

    Raises: UsageError for invalid messages, and for a variable that looks like a misspelling of one
    that the template reads.
    """
    text = template.template_text if template else ""
    described = list(map(_described, tools))
    chat = Chat(
        messages,
        described,
        template_vars=template_vars,
        continues=continues,
        parse_special=parse_special,
    )
    known = {name: value for name, value in template_vars.items() if _reads(text, name)}
    words = set(_WORD.findall(text)) if len(known) < len(template_vars) else set()
    for name in template_vars.keys() - known.keys():
        if (near := nearest(name, words, _SIMILARITY)) is not None:
            raise UsageError(
                f"chat_template_kwargs: the model's template does not read {name!r:.80}; did you "
                f"mean {near!r}?"
            )
        log_ignored(name if name == "reasoning_effort" else "chat_template_kwargs")
    chat = replace(chat, template_vars=known)
    return chat if supports_tools(template) else _in_words(chat)


def supports_tools(template: ChatTemplate | None) -> bool:
    """Whether a template has support for tools."""
    return template is not None and _reads(template.template_text, "tools")


def _reads(template: str, name: str) -> bool:
    return re.search(rf"\b{re.escape(name)}\b", template) is not None


def _described(tool: Tool) -> dict[str, Any]:
    """A tool as the client gave it, without fields that are null."""
    function = msgspec.to_builtins(tool.function)
    return {
        "type": tool.type,
        "function": {name: value for name, value in function.items() if value is not None},
    }


def _in_words(chat: Chat) -> Chat:
    """The chat with functions and calls as text."""
    messages: list[Message] = []
    for is_tool, some in groupby(chat.messages, lambda each: each["role"] == "tool"):
        if is_tool:
            returned = (f"<tool_response>\n{text_of(each)}\n</tool_response>" for each in some)
            messages.append({"role": "user", "content": "\n".join(returned)})
        else:
            messages += map(_with_calls, some)
    if chat.tools:
        functions = "\n".join(
            json.dumps(tool["function"], ensure_ascii=False) for tool in chat.tools
        )
        text = _IN_WORDS.format(functions=functions)
        if messages[0]["role"] == "system":
            text = f"{text_of(messages.pop(0))}\n\n{text}"
        messages.insert(0, {"role": "system", "content": text})
    return replace(chat, messages=messages, tools=())


def _with_calls(message: Message) -> Message:
    """A message with its calls as part of its text."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    parts = [text_of(message)] if message.get("content") else []
    for call in calls:
        function = call.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise UsageError(f"tool_calls has {call!r:.80}; give a function with a name")
        name, arguments = json.dumps(function["name"]), function.get("arguments") or "{}"
        written = arguments if isinstance(arguments, str) else json.dumps(arguments)
        body = f'{{"name": {name}, "arguments": {written}}}'
        parts.append(f"{HERMES.opening}\n{body}\n{HERMES.closing}")
    others = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**others, "content": "\n".join(parts)}
