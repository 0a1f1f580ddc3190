"""What an answer may call, or must: its grammar, and what reads its calls."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from parallel_llama.engine.input_processor import InputProcessor
from parallel_llama.errors import UsageError
from parallel_llama.request import Grammar
from parallel_llama.serve.bodies import ChatBody, ToolChoice, ToolFunction
from parallel_llama.serve.tool_calls import HERMES, CallReader, ToolFormat, format_of
from parallel_llama.serve.tool_prompt import has_place_for_tools
from parallel_llama.tokenizer import ChatTemplate

MAX_CALLS = 16

# JSON comes out compact, as from a schema alone.
_COMPACT = {
    "whitespace_flexible": False,
    "item_separator": ",",
    "key_separator": ":",
    "coerce_one_of": False,
    "lenient": False,
}


@dataclass(frozen=True)
class Tools:
    """The functions that one answer may call, or must, in the form that its model knows.

    `most` bounds the calls. `has_special_marks` says that the form's marks are special tokens.
    """

    form: ToolFormat
    functions: Sequence[ToolFunction]
    must_call: bool
    most: int | None
    has_special_marks: bool

    @property
    def _spelled(self) -> ToolFormat | None:
        """The form as a grammar can spell it."""
        if self.form.is_list or (self.has_special_marks and not self.form.is_bare):
            return None
        return self.form

    def reader(self) -> CallReader:
        """What tells the calls of one choice from its text."""
        names = frozenset(each.name for each in self.functions)
        begins_inside = self.must_call and self._spelled is None
        return CallReader(self.form, names, begins_inside=begins_inside, most=self.most)

    def grammar(self, answer: Grammar | None) -> Grammar | None:
        """What an answer looks like that without functions would look like `answer`.

        Functions are strict where the model's marks can be spelled.

        Raises: UsageError for an `answer` that calls cannot stand beside.
        """
        grammar = ToolGrammar(self._spelled, self.functions, self.most)
        if self.must_call:
            return grammar.calls()
        if answer is None:
            is_strict = self._spelled and any(each.strict for each in self.functions)
            return grammar.text_and_calls() if is_strict else None
        if answer.kind == "json_schema" and self._spelled is not None:
            return grammar.calls_or(answer)
        raise UsageError(
            "this form of an answer leaves no room for calls; leave tools out, or set tool_choice "
            "to none"
        )


def tools_of(body: ChatBody, inputs: InputProcessor) -> Tools | None:
    """What the answer to a body may call; None where it can call nothing.

    Raises: UsageError for a choice that is none, and for a model whose form is not known.
    """
    functions = [tool.function for tool in body.tools or ()]
    names = [function.name for function in functions]
    choice = body.tool_choice or "auto"
    if isinstance(choice, ToolChoice):
        if choice.function.name not in names:
            raise UsageError(f"tool_choice names {choice.function.name!r:.80}, which is no tool")
        functions = [each for each in functions if each.name == choice.function.name]
    elif choice == "required" and not functions:
        raise UsageError("tool_choice is required and there are no tools; give some")
    if len(set(names)) < len(names):
        raise UsageError("tools has a name more than once; give each function its own")
    if not functions or choice == "none":
        return None
    form = _form(inputs.chat_template)
    is_named = isinstance(choice, ToolChoice)
    special = inputs.tokenizer.vocabulary.special_ids
    return Tools(
        form,
        functions,
        must_call=is_named or choice == "required",
        most=1 if is_named or body.parallel_tool_calls is False else None,
        has_special_marks=form.opening in special,
    )


def _form(template: ChatTemplate | None) -> ToolFormat:
    if template is None or not has_place_for_tools(template):
        return HERMES
    form = format_of(template.template_text)
    if form is None:
        raise UsageError(
            "the model's chat template writes calls in a form that is not known here; leave tools "
            "out, or set tool_choice to none"
        )
    return form


class ToolGrammar:
    """Calls of some functions, at most `most` of them, in the form of `form`.

    Where its marks are special tokens, which no grammar spells, `form` is None: the calls are one
    list without marks.
    """

    def __init__(
        self, form: ToolFormat | None, functions: Sequence[ToolFunction], most: int | None
    ) -> None:
        self._form, self._functions = form, functions
        self._n_more = (most or MAX_CALLS) - 1

    def calls(self) -> Grammar:
        """Calls and nothing else."""
        return self._with("start: calls")

    def calls_or(self, answer: Grammar) -> Grammar:
        """Calls, or an answer that fits a JSON schema."""
        return self._with(f"start: calls | answer\nanswer: {_json(json.loads(answer.text))}")

    def text_and_calls(self) -> Grammar:
        """Any text, which calls may follow. Not for a list without marks, which is text as well."""
        assert self._form is not None
        if self._form.is_bare:  # text that begins with a brace would be a call
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
            head = json.dumps(f'{{"name": "{function.name}", "{arguments}": ')
            schema = {"type": "object", **(function.parameters or {"properties": {}})}
            if function.parameters is None:
                schema["additionalProperties"] = False
            lines += [f'f{n}: {head} a{n} "}}"', f"a{n}: {_json(schema)}"]
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
        return f"({json.dumps(joint)} {rule}){{0,{self._n_more}}}" if self._n_more else ""


def _json(schema: Mapping[str, Any]) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": _COMPACT})
