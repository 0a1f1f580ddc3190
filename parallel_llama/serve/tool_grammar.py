"""The grammar of an answer that calls functions, in the Lark of llguidance."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from parallel_llama.request import Grammar
from parallel_llama.serve.bodies import ToolFunction
from parallel_llama.serve.tool_calls import ToolFormat

MAX_CALLS = 16

# JSON comes out compact, as from a schema alone.
_COMPACT = {
    "whitespace_flexible": False,
    "item_separator": ",",
    "key_separator": ":",
    "coerce_one_of": False,
    "lenient": False,
}


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
