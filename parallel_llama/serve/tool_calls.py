"""Calls of functions in what a model writes: the forms that models know, and what reads them.

Source: the chat templates of Qwen 2.5 and Hermes 2 Pro, of Mistral 7B v0.3, and of Llama 3.1.
"""

from dataclasses import dataclass
from typing import Any

import msgspec

from parallel_llama.serve.replies import CalledFunction
from parallel_llama.stop import StopChecker


@dataclass(frozen=True)
class ToolFormat:
    """How a model writes calls: JSON between two marks, with the arguments under a name.

    With `is_list` all calls are one list; others stand one behind the other. With `is_bare` the
    opening may be missing where an answer begins with a call.
    """

    opening: str
    closing: str = ""
    arguments: str = "arguments"
    is_list: bool = False
    is_bare: bool = False


HERMES = ToolFormat("<tool_call>", "</tool_call>")
MISTRAL = ToolFormat("[TOOL_CALLS]", is_list=True)
LLAMA3 = ToolFormat("<|python_tag|>", arguments="parameters", is_bare=True)

# What templates with these have behind the same openings is not JSON.
_OTHER = ("<function=", "<arg_key>", "[ARGS]")


def format_of(template: str) -> ToolFormat | None:
    """The form in which a template writes calls; None for one that is not known here."""
    if any(mark in template for mark in _OTHER):
        return None
    for known in (HERMES, MISTRAL, LLAMA3):
        if known.opening in template:
            return known
    # Llama 3.2's, which has no mark at all.
    return LLAMA3 if '"parameters": ' in template else None


class CallReader:
    """Tells text from calls in an answer that comes in pieces.

    What may become a call is held back until it is whole. What then is none, because it is no JSON
    or calls nothing of `names`, is text. `begins_inside` says that the opening is not written.
    Calls beyond `most` are left out.
    """

    def __init__(
        self,
        form: ToolFormat,
        names: frozenset[str],
        *,
        begins_inside: bool = False,
        most: int | None = None,
    ) -> None:
        self._form, self._names, self._most = form, names, most
        self.n_calls = 0
        self._told: list[str | CalledFunction] = []
        self._begin_text()
        if begins_inside:
            self._begin_call("")

    def push(self, piece: str) -> list[str | CalledFunction]:
        """Take the next piece; the texts and calls that are certain now."""
        for char in piece:
            self._read(char)
        return self._taken()

    def finish(self) -> list[str | CalledFunction]:
        """What was held back, now that nothing more comes."""
        if self._calls:
            self._end_call()
        elif self._held:
            self._tell("".join(self._held))
        tail = self._opening.flush()
        if tail or not self.n_calls:
            self._tell(tail)
        return self._taken()

    def _taken(self) -> list[str | CalledFunction]:
        told, self._told = self._told, []
        return told

    def _read(self, char: str) -> None:
        if self._span is None:
            self._read_text(char)
        elif self._calls:
            self._read_closing(char)
        else:
            self._read_value(char, self._span)

    # Text: what is not between marks

    def _begin_text(self) -> None:
        """Nothing but space has come since the beginning or since a call."""
        self._opening = StopChecker((self._form.opening,))
        self._span: _Span | None = None
        self._held: list[str] = []
        self._calls: list[CalledFunction] = []
        self._gap, self._is_gap = "", True

    def _read_text(self, char: str) -> None:
        shown = self._opening.push(char)
        if self._opening.found:
            self._begin_call(self._form.opening)
        elif self._is_gap and self._form.is_bare and shown == "{":
            self._begin_call("")
            self._read(char)
        elif self._is_gap and not shown.strip("; \r\n\t" if self.n_calls else " \r\n\t"):
            self._gap += shown
        else:
            self._tell(shown)

    def _tell(self, text: str) -> None:
        text, self._gap, self._is_gap = self._gap + text, "", False
        if text and self._told and isinstance(self._told[-1], str):
            self._told[-1] += text
        elif text:
            self._told.append(text)

    # A call: an opening, JSON, and a closing

    def _begin_call(self, opening: str) -> None:
        self._span, self._value, self._n_closing = _Span(), "", 0
        self._held = [opening]

    def _read_value(self, char: str, span: "_Span") -> None:
        if not span.depth and not char.isspace() and char not in "{[":
            self._give_up()
            self._read(char)
            return
        self._held.append(char)
        if span.ends_with(char):
            self._calls = self._calls_in("".join(self._held[1:]))
            if not self._calls:
                self._give_up()
            elif not self._form.closing:
                self._end_call()

    def _read_closing(self, char: str) -> None:
        if char == self._form.closing[self._n_closing]:
            self._held.append(char)
            self._n_closing += 1
            if self._n_closing == len(self._form.closing):
                self._end_call()
        elif char.isspace() and not self._n_closing:
            self._held.append(char)
        else:
            self._give_up()
            self._read(char)

    def _give_up(self) -> None:
        """What is held is text."""
        held = "".join(self._held)
        gap = self._gap
        self._begin_text()
        self._gap = gap
        self._tell(held)

    def _end_call(self) -> None:
        room = len(self._calls) if self._most is None else self._most - self.n_calls
        kept = self._calls[: max(0, room)]
        self.n_calls += len(kept)
        self._told += kept
        self._begin_text()

    def _calls_in(self, text: str) -> list[CalledFunction]:
        """The calls of a JSON text; none where anything in it is no call."""
        try:
            value = msgspec.json.decode(text)
        except (msgspec.DecodeError, RecursionError):
            return []
        calls = [self._call(each) for each in (value if isinstance(value, list) else [value])]
        return [call for call in calls if call is not None] if None not in calls else []

    def _call(self, value: Any) -> CalledFunction | None:
        if not isinstance(value, dict):
            return None
        name, arguments = value.get("name"), value.get("arguments", value.get("parameters", {}))
        if not isinstance(name, str) or name not in self._names or not isinstance(arguments, dict):
            return None
        return CalledFunction(name=name, arguments=msgspec.json.encode(arguments).decode())


class _Span:
    """Where a JSON object or list ends."""

    def __init__(self) -> None:
        self.depth = 0
        self._in_string = self._is_escaped = False

    def ends_with(self, char: str) -> bool:
        """Whether the value that began is whole with this character."""
        if self._is_escaped:
            self._is_escaped = False
        elif self._in_string:
            self._is_escaped, self._in_string = char == "\\", char != '"'
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self.depth += 1
        elif char in "}]":
            self.depth -= 1
            return self.depth == 0
        return False
