"""Function calling: lists the functions in the prompt, and constrains and reads the calls."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import msgspec

from parallel_llama.engine.input_processor import InputProcessor
from parallel_llama.errors import UsageError, shown
from parallel_llama.files.fields import nearest
from parallel_llama.request import Grammar
from parallel_llama.serve.bodies import ChatBody, Tool, ToolChoice, ToolFunction
from parallel_llama.serve.channels import ChannelParts
from parallel_llama.serve.params import log_ignored
from parallel_llama.serve.tool_calls import (
    CHANNELS,
    HERMES,
    SECTIONS,
    CallReader,
    ToolFormat,
    tool_format,
)
from parallel_llama.tokenizer import Chat, ChatTemplate
from parallel_llama.tokenizer.answers import AnswerReader
from parallel_llama.tokenizer.chat import Message, text_of

_WORD = re.compile(r"[A-Za-z_]\w+")
_SIMILARITY = 0.85  # minimum similarity of a misspelling to a name that the template reads

# The syntax of HERMES.
_TOOLS_AS_TEXT = """You can call functions. Each line describes one:
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
    """Builds the chat of some messages for this template.

    Variables that the template does not read are dropped and logged.

    Raises: UsageError for invalid messages, and for a variable that looks like a misspelling of one
    that the template reads.
    """
    text = template.template_text if template else ""
    tool_objects = list(map(_tool_object, tools))
    chat = Chat(
        messages,
        tool_objects,
        template_vars=template_vars,
        continues=continues,
        parse_special=parse_special,
    )
    used_vars = {name: value for name, value in template_vars.items() if _reads(text, name)}
    template_words = set(_WORD.findall(text)) if len(used_vars) < len(template_vars) else set()
    for name in template_vars.keys() - used_vars.keys():
        if (similar := nearest(name, template_words, _SIMILARITY)) is not None:
            raise UsageError(
                f"chat_template_kwargs: the model's template does not read {name!r:.80}; did you "
                f"mean {similar!r}?"
            )
        log_ignored(name if name == "reasoning_effort" else "chat_template_kwargs")
    chat = replace(chat, template_vars=used_vars)
    if not _needs_tools(chat) or (template is not None and template.takes_tools):
        return chat
    return _with_tools_as_text(chat, template)


def _needs_tools(chat: Chat) -> bool:
    return bool(chat.tools) or any(
        message["role"] == "tool" or message.get("tool_calls") for message in chat.messages
    )


def _reads(template: str, name: str) -> bool:
    return re.search(rf"\b{re.escape(name)}\b", template) is not None


def _tool_object(tool: Tool) -> dict[str, Any]:
    """A tool as the client gave it, without fields that are null."""
    function = msgspec.to_builtins(tool.function)
    return {
        "type": tool.type,
        "function": {name: value for name, value in function.items() if value is not None},
    }


def _with_tools_as_text(chat: Chat, template: ChatTemplate | None) -> Chat:
    """The chat with functions and calls as text.

    The functions are described in the system message. If the client sends no system message and the
    template does not support them, they are described before the first user message.
    """
    messages: list[Message] = []
    for is_tool, messages_of_kind in groupby(
        chat.messages, lambda message: message["role"] == "tool"
    ):
        if is_tool:
            results = (
                f"<tool_response>\n{text_of(message)}\n</tool_response>"
                for message in messages_of_kind
            )
            messages.append({"role": "user", "content": "\n".join(results)})
        else:
            messages += map(_with_calls_as_text, messages_of_kind)
    if chat.tools:
        functions = "\n".join(
            json.dumps(tool["function"], ensure_ascii=False) for tool in chat.tools
        )
        text = _TOOLS_AS_TEXT.format(functions=functions)
        first = messages[0]
        if first["role"] in ("system", "developer"):
            messages[0] = {**first, "content": f"{text_of(first)}\n\n{text}"}
        elif template is None or template.takes_system:
            messages.insert(0, {"role": "system", "content": text})
        elif first["role"] == "user":
            messages[0] = {**first, "content": f"{text}\n\n{text_of(first)}"}
        else:
            messages.insert(0, {"role": "user", "content": text})
    return replace(chat, messages=messages, tools=())


def _with_calls_as_text(message: Message) -> Message:
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
        arguments_json = arguments if isinstance(arguments, str) else json.dumps(arguments)
        body = f'{{"name": {name}, "arguments": {arguments_json}}}'
        parts.append(f"{HERMES.opening}\n{body}\n{HERMES.closing}")
    other_fields = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**other_fields, "content": "\n".join(parts)}


MAX_CALLS = 16

# A template with this text refuses messages with several calls (Llama 3.1, 3.2 and 3.3).
_ONE_CALL = "only supports single tool-calls"

# Compact JSON, as in structured/grammar_check.
_COMPACT = {
    "whitespace_flexible": False,
    "item_separator": ",",
    "key_separator": ":",
    "coerce_one_of": False,
    "lenient": False,
}


@dataclass(frozen=True)
class Tools:
    """The functions that one response may or must call.

    Args:
        form: the syntax in which the model writes calls.
        max_calls: maximum number of calls; None for no limit.
        has_special_markers: whether the form's markers are special tokens.
    """

    form: ToolFormat
    functions: Sequence[ToolFunction]
    must_call: bool
    max_calls: int | None
    has_special_markers: bool

    @property
    def _grammar_form(self) -> ToolFormat | None:
        """The form if a grammar can express it, else None."""
        if self.form.is_list or self.form.has_name_first:
            return None
        if self.has_special_markers and not self.form.is_bare:
            return None
        return self.form

    def reader(self, answer_reader: AnswerReader | None = None) -> CallReader | ChannelParts:
        """A reader that separates the calls of one choice from its text.

        Args:
            answer_reader: a reader of the markers in the choice; None if it has no markers.
        """
        names = frozenset(function.name for function in self.functions)
        begins_inside = self.must_call and self._grammar_form is None
        if answer_reader is not None and not begins_inside:
            if self.form in (CHANNELS, SECTIONS):
                return ChannelParts(answer_reader, names, self.max_calls)
            calls = CallReader(self.form, names, max_calls=self.max_calls)
            return ChannelParts(answer_reader, in_text=calls)
        form = self.form
        if begins_inside:  # a list in JSON
            form = replace(form, is_python=False, has_name_first=False)
        return CallReader(form, names, begins_inside=begins_inside, max_calls=self.max_calls)

    def grammar(self, answer: Grammar | None) -> Grammar | None:
        """The grammar of the generated text; `answer` is the grammar of a response without calls.

        Strict functions constrain their calls only if a grammar can express the model's markers.

        Raises: UsageError if `answer` cannot be combined with calls.
        """
        grammar = ToolGrammar(self._grammar_form, self.functions, self.max_calls)
        if self.must_call:
            return grammar.calls()
        if answer is None:
            is_strict = self._grammar_form and any(function.strict for function in self.functions)
            return grammar.text_and_calls() if is_strict else None
        if answer.kind == "json_schema" and self._grammar_form is not None:
            return grammar.calls_or(answer)
        raise UsageError(
            "this response format cannot be combined with tools; omit tools, or set tool_choice to "
            "none"
        )


def tools_of(body: ChatBody, inputs: InputProcessor) -> Tools | None:
    """The functions that the response to a body may call; None if it may call no function.

    For a body with tools, the first call renders the model's chat template.

    Raises: UsageError for an invalid tool_choice, for parameters that are not an object, and for a
    chat template with an unknown syntax of calls.
    """
    functions = [tool.function for tool in body.tools or ()]
    names = [function.name for function in functions]
    choice = body.tool_choice or "auto"
    if isinstance(choice, ToolChoice):
        if choice.function.name not in names:
            raise UsageError(
                f"tool_choice names {choice.function.name!r:.80}, which is not one of tools"
            )
        functions = [function for function in functions if function.name == choice.function.name]
    elif choice == "required" and not functions:
        raise UsageError("tool_choice is 'required' but tools is empty; give at least one")
    if len(set(names)) < len(names):
        raise UsageError("tools has two functions of the same name; rename one")
    for function in functions:
        _require_object(function)
    if not functions or choice == "none":
        return None
    form = _form(inputs.chat_template)
    is_named = isinstance(choice, ToolChoice)
    if form is CHANNELS and (is_named or choice == "required"):
        raise UsageError(
            "tool_choice must be 'auto' or 'none' for this model, which writes calls in a channel "
            "after its reasoning: no grammar can express that"
        )
    special_ids = inputs.tokenizer.vocabulary.special_ids
    template_text = inputs.chat_template.template_text if inputs.chat_template else ""
    is_one_call = is_named or body.parallel_tool_calls is False or _ONE_CALL in template_text
    return Tools(
        form,
        functions,
        must_call=is_named or choice == "required",
        max_calls=1 if is_one_call else None,
        has_special_markers=form.opening in special_ids,
    )


def _require_object(function: ToolFunction) -> None:
    """Raises: UsageError if the arguments of a function cannot be a JSON object."""
    kinds = (function.parameters or {}).get("type", "object")
    if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
        raise UsageError(
            f"tools: the parameters of {function.name!r} have the type {shown(kinds)}; use 'object'"
        )


def _form(template: ChatTemplate | None) -> ToolFormat:
    if template is None or not template.takes_tools:
        return HERMES
    form = tool_format(template.template_text)
    if form is None:
        raise UsageError(
            "the model's chat template writes calls in a syntax that is not supported; omit tools, "
            "or set tool_choice to none"
        )
    return form


class ToolGrammar:
    """Builds grammars of calls of some functions, in llguidance's Lark syntax.

    Args:
        form: None if a grammar cannot express the form, because calls are one list or the markers
            are special tokens that cannot be omitted; then the calls are a JSON list without
            markers.
        max_calls: maximum number of calls; None for MAX_CALLS.
    """

    def __init__(
        self, form: ToolFormat | None, functions: Sequence[ToolFunction], max_calls: int | None
    ) -> None:
        self._form, self._functions = form, functions
        self._n_more_calls = (max_calls or MAX_CALLS) - 1

    def calls(self) -> Grammar:
        """Calls only."""
        return self._with("start: calls")

    def calls_or(self, answer: Grammar) -> Grammar:
        """Calls, or JSON that matches a schema.

        Raises: UsageError for a schema that is not valid JSON, or not a JSON object.
        """
        return self._with(f"start: calls | answer\nanswer: {_json(_schema(answer.text))}")

    def text_and_calls(self) -> Grammar:
        """Text, perhaps followed by calls; in a form without markers, either text or calls."""
        assert self._form is not None
        if self._form.is_bare:  # text must not begin with a brace: that starts a call
            return self._with("start: text | calls\n" r"text: /(\s*[^\s{](?s:.*))?/")
        opening = json.dumps(self._form.opening)
        return self._with(
            f"start: text | before marked {self._more('opened')}\n"
            f"text: /(?s:.*)/\nbefore[suffix={opening}]: /(?s:.*)/"
        )

    def _with(self, start: str) -> Grammar:
        lines = [start, self._calls()]
        lines.append("call: " + " | ".join(f"f{n}" for n in range(len(self._functions))))
        arguments = "arguments" if self._form is None else self._form.arguments
        for n, function in enumerate(self._functions):
            # Split into the lexemes of %json, because llguidance's lexer does not backtrack: with
            # one string for the whole head, only a call could begin with `{"`, not an answer.
            head = ("{", '"name"', ": ", f'"{function.name}"', ", ", f'"{arguments}"', ": ")
            schema = {**(function.parameters or {"properties": {}}), "type": "object"}
            if function.parameters is None:
                schema["additionalProperties"] = False
            lines += [
                f'f{n}: {" ".join(map(json.dumps, head))} a{n} "}}"',
                f"a{n}: {_json(schema)}",
            ]
        return Grammar("lark", "\n".join(lines))

    def _calls(self) -> str:
        if self._form is None:
            return f'calls: "[" call {self._more("call", ", ")} "]"'
        if self._form.is_bare:
            return f"calls: call {self._more('call', '; ')}"
        opening, closing = json.dumps(self._form.opening), json.dumps(f"\n{self._form.closing}")
        return (
            f"calls: opened {self._more('opened')}\n"
            f'opened: {opening} marked\nmarked: "\\n" call {closing}'
        )

    def _more(self, rule: str, joint: str = "\n") -> str:
        return (
            f"({json.dumps(joint)} {rule}){{0,{self._n_more_calls}}}" if self._n_more_calls else ""
        )


def _schema(text: str) -> dict[str, Any]:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"the JSON schema {shown(text)} is not valid JSON: {error}") from error
    if not isinstance(schema, dict):
        raise UsageError(
            f"the JSON schema {shown(text)} is not an object; give an object, such as {{}} for any "
            "JSON"
        )
    return schema


def _json(schema: Mapping[str, Any]) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": _COMPACT})
