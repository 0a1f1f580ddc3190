"""Parsing of function calls in generated text, in the syntaxes that models use.

`serve.channels` reads calls of the forms `CHANNELS` and `SECTIONS`, which have their own markers.

Source: the chat templates of Qwen 2.5 and Hermes 2 Pro, of Mistral 7B v0.3 and Ministral 3, of
Llama 3.1 and 4, and of Command R7B; mistral-common 1.12, InstructTokenizerV11 and V13; for calls in
Python's syntax, the prompt formats of Llama 4's model card.
"""

import re
from dataclasses import dataclass
from typing import Any

import msgspec

from parallel_llama.engine.detokenizer import StopChecker
from parallel_llama.serve.python_calls import python_calls
from parallel_llama.serve.replies import CalledFunction
from parallel_llama.tokenizer.channels import has_channels


@dataclass(frozen=True)
class ToolFormat:
    """The syntax of function calls: JSON, or a list of Python's calls, between two markers.

    Args:
        opening, closing: the markers.
        arguments: key of the arguments.
        is_list: whether all calls are one list, rather than one JSON object after another.
        is_bare: whether the markers may be missing at the start of a response.
        is_python: whether calls have Python's syntax, as in [rain(city="Oslo"), time()].
        has_name_first: whether the name comes before the JSON, which has only the arguments, as in
            rain[ARGS]{"city": "Oslo"}.
    """

    opening: str
    closing: str = ""
    arguments: str = "arguments"
    is_list: bool = False
    is_bare: bool = False
    is_python: bool = False
    has_name_first: bool = False

    @property
    def may_enclose_text(self) -> bool:
        """Whether the markers may enclose text instead, before calls without markers.

        Llama 4's template writes <|python_start|>text<|python_end|>{"name": ..}, the text often
        being empty.
        """
        return self.is_bare and self.closing != ""


HERMES = ToolFormat("<tool_call>", "</tool_call>")
MISTRAL = ToolFormat("[TOOL_CALLS]", is_list=True)
MISTRAL_NAMED = ToolFormat("[TOOL_CALLS]", has_name_first=True)
LLAMA3 = ToolFormat("<|python_tag|>", arguments="parameters", is_bare=True)
LLAMA4 = ToolFormat("<|python_start|>", "<|python_end|>", "parameters", is_bare=True)
PYTHONIC = ToolFormat(
    "<|python_start|>", "<|python_end|>", is_list=True, is_bare=True, is_python=True
)
CHANNELS = ToolFormat("<|channel|>", "<|call|>")
SECTIONS = ToolFormat("<|START_ACTION|>", "<|END_ACTION|>", "parameters", is_list=True)

# A template with this text asks for calls in Python's syntax.
_PYTHON_EXAMPLE = "[func_name1("

# The beginning of a list of calls in Python's syntax, up to the first parenthesis. The bounds limit
# its cost, because it is matched again for every character.
_PYTHON_HEAD = re.compile(r"\[\s{0,64}[\w.]{0,256}\s{0,64}")

# Templates with these texts ask for calls in a syntax that is not supported.
_UNSUPPORTED = ("<function=", "<arg_key>", "Action:")

# What precedes the arguments of a call that begins with its name.
_NAME_HEAD = re.compile(
    r"\s{0,8}(?P<name>[\w.-]{1,256})(\[CALL_ID\]\w{0,64})?\[ARGS\]\s{0,8}", re.ASCII
)
_LONGEST_HEAD = 512


def tool_format(template: str) -> ToolFormat | None:
    """The syntax in which a template writes calls; None if it is not supported."""
    if has_channels(template):
        return CHANNELS
    if SECTIONS.opening in template:
        return SECTIONS
    if _PYTHON_EXAMPLE in template:
        return PYTHONIC
    if any(mark in template for mark in _UNSUPPORTED):
        return None
    if "[ARGS]" in template:
        return MISTRAL_NAMED
    for form in (HERMES, MISTRAL, LLAMA3, LLAMA4):
        if form.opening in template:
            return form
    # Llama 3.2, which uses no markers.
    return LLAMA3 if '"parameters": ' in template else None


class CallReader:
    """Separates calls from text in a response that arrives in pieces.

    Text that may be the start of a call is withheld until the call is complete. It is emitted as
    text if it cannot be parsed, or the name of the function is not in `names`. Markers that may
    enclose text are then removed; other markers remain in the text.

    Args:
        begins_inside: whether the response starts with a call, without an opening marker.
        max_calls: the maximum number of calls; further calls are dropped.
    """

    def __init__(
        self,
        form: ToolFormat,
        names: frozenset[str],
        *,
        begins_inside: bool = False,
        max_calls: int | None = None,
    ) -> None:
        self._form, self._names, self._max_calls = form, names, max_calls
        self.n_calls = 0
        self._parts: list[str | CalledFunction] = []
        self._begin_text()
        if begins_inside:
            self._begin_call("")

    def push(self, piece: str) -> list[str | CalledFunction]:
        """Adds a piece. Returns: the text and the calls that are now complete."""
        for char in piece:
            self._read(char)
        return self._take_parts()

    def finish(self) -> list[str | CalledFunction]:
        """Ends the response. Returns: the text and the calls that were withheld."""
        if self._calls:
            self._end_call()
        elif self._withheld:
            self._give_up()
        tail = self._markers.flush()
        if tail or not self.n_calls:
            self._add_text(tail)
        return self._take_parts()

    def _take_parts(self) -> list[str | CalledFunction]:
        parts, self._parts = self._parts, []
        return parts

    def _read(self, char: str) -> None:
        if self._span is None:
            self._read_text(char)
        elif self._calls:
            self._read_closing(char)
        else:
            self._read_value(char, self._span)

    # Text outside of calls

    def _begin_text(self) -> None:
        """Expects text or a call; withholds white space before it."""
        opening, closing = self._form.opening, self._form.closing
        self._markers = StopChecker(
            (opening, closing) if self._form.may_enclose_text else (opening,)
        )
        self._span: _Span | None = None
        self._withheld: list[str] = []
        self._calls: list[CalledFunction] = []
        self._gap, self._is_gap = "", True

    def _read_text(self, char: str) -> None:
        shown = self._markers.push(char)
        if self._markers.found == self._form.opening:
            self._begin_call(self._form.opening)
        elif self._markers.found:
            self._begin_text()
        elif self._is_gap and self._form.is_bare and shown == "{["[self._form.is_python]:
            self._begin_call("")
            self._read(char)
        elif self._is_gap and self._may_be_gap(shown):
            self._gap += shown
        else:
            self._add_text(shown)

    def _may_be_gap(self, text: str) -> bool:
        """Whether the text may precede a call without being text of the response."""
        return not text.strip("; \r\n\t" if self.n_calls else " \r\n\t")

    def _add_text(self, text: str) -> None:
        text, self._gap, self._is_gap = self._gap + text, "", False
        if text and self._parts and isinstance(self._parts[-1], str):
            self._parts[-1] += text
        elif text:
            self._parts.append(text)

    # Calls: an opening, JSON, and a closing

    def _begin_call(self, opening: str) -> None:
        self._span, self._n_closing = _Span(self._form.is_python), 0
        self._withheld = [opening]
        self._closing = self._form.closing if opening else ""

    def _read_value(self, char: str, span: "_Span") -> None:
        if self._form.has_name_first and not span.depth and char != "{":
            self._withheld.append(char)
            if len(self._withheld) > _LONGEST_HEAD:
                self._give_up()
            return
        if not span.depth and not char.isspace() and char not in "{[":
            self._give_up()
            self._read(char)
            return
        self._withheld.append(char)
        if span.ends_with(char):
            self._calls = self._calls_in("".join(self._withheld[1:]))
            if not self._calls:
                self._give_up()
            elif not self._closing:
                self._end_call()
        elif self._form.is_python and span.depth == 1 and not self._begins_python():
            self._give_up()

    def _calls_in(self, text: str) -> list[CalledFunction]:
        if self._form.is_python:
            return python_calls(text, self._names)
        if self._form.has_name_first:
            return named_call(text, self._names)
        return calls_in(text, self._names)

    def _begins_python(self) -> bool:
        """Whether the withheld text can begin a list of calls in Python's syntax."""
        return (
            "(" in self._withheld
            or _PYTHON_HEAD.fullmatch("".join(self._withheld[1:]).lstrip()) is not None
        )

    def _read_closing(self, char: str) -> None:
        if char == self._closing[self._n_closing]:
            self._withheld.append(char)
            self._n_closing += 1
            if self._n_closing == len(self._closing):
                self._end_call()
        elif char.isspace() and not self._n_closing:
            self._withheld.append(char)
        else:
            self._give_up()
            self._read(char)

    def _give_up(self) -> None:
        """Emits the withheld text, which is not a call, or keeps it as a gap before a call."""
        withheld = self._withheld[1:] if self._form.may_enclose_text else self._withheld
        text = self._gap + "".join(withheld)
        self._begin_text()
        if self._may_be_gap(text):
            self._gap = text
        else:
            self._add_text(text)

    def _end_call(self) -> None:
        n_allowed = len(self._calls) if self._max_calls is None else self._max_calls - self.n_calls
        calls = self._calls[: max(0, n_allowed)]
        self.n_calls += len(calls)
        self._parts += calls
        self._begin_text()


def calls_in(text: str, names: frozenset[str]) -> list[CalledFunction]:
    """The calls in a JSON text; empty if any item is not a call of a function in `names`."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return []
    calls = [_call(item, names) for item in (value if isinstance(value, list) else [value])]
    return [call for call in calls if call is not None] if None not in calls else []


def named_call(text: str, names: frozenset[str]) -> list[CalledFunction]:
    """The call in a text of a name and its arguments; empty if it is not a call of `names`."""
    head = _NAME_HEAD.match(text)
    if head is None:
        return []
    try:
        arguments = msgspec.json.decode(text[head.end() :])
    except (msgspec.DecodeError, RecursionError):
        return []
    call = _call({"name": head["name"], "arguments": arguments}, names)
    return [] if call is None else [call]


def _call(value: Any, names: frozenset[str]) -> CalledFunction | None:
    if not isinstance(value, dict):
        return None
    name = value.get("name", value.get("tool_name"))
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(name, str) or name not in names or not isinstance(arguments, dict):
        return None
    return CalledFunction(name=name, arguments=msgspec.json.encode(arguments).decode())


class _Span:
    """Finds the end of a JSON object or list, or of a list in Python's syntax."""

    def __init__(self, is_python: bool = False) -> None:
        self.depth = 0
        self._quotes = "\"'" if is_python else '"'
        self._quote, self._is_escaped = "", False

    def ends_with(self, char: str) -> bool:
        """Whether this character completes the value."""
        if self._is_escaped:
            self._is_escaped = False
        elif self._quote:
            self._is_escaped = char == "\\"
            self._quote = "" if char == self._quote else self._quote
        elif char in self._quotes:
            self._quote = char
        elif char in "{[":
            self.depth += 1
        elif char in "}]":
            self.depth -= 1
            return self.depth == 0
        return False
