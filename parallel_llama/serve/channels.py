"""The reasoning, the calls and the text of answers with channels."""

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from parallel_llama.serve.replies import CalledFunction
from parallel_llama.tokenizer.channels import ChannelReader, ChannelText


@dataclass(frozen=True)
class Reasoning:
    """A part of what a model writes before its answer."""

    text: str


Part = str | Reasoning | CalledFunction


class ChannelParts:
    """Separates the reasoning and the calls of an answer, in pieces, from its text.

    A call is held back until it is complete. If its arguments are not a JSON object or its name is
    not in `names`, it is emitted as text. Two messages of the same kind are separated by an empty
    line.

    Args:
        most: calls after this many are dropped.
    """

    def __init__(self, names: frozenset[str] = frozenset(), most: int | None = None) -> None:
        self._reader, self._names, self._most = ChannelReader(), names, most
        self._last: dict[bool, int] = {}  # the last message with reasoning, and with text
        self._call: list[ChannelText] = []
        self._n_calls = 0

    def push(self, piece: str) -> list[Part]:
        """Adds a piece, and returns the parts that are now certain."""
        return self._parts(self._reader.push(piece))

    def finish(self) -> list[Part]:
        """The parts that were held back, at the end of the answer."""
        return [*self._parts(self._reader.finish()), *self._end_call()]

    def _parts(self, texts: Iterable[ChannelText]) -> list[Part]:
        parts: list[Part] = []
        for each in texts:
            if self._call and self._call[0].number != each.number:
                parts += self._end_call()
            if each.is_call:
                self._call.append(each)
            else:
                parts.append(self._shown(each))
        return parts

    def _shown(self, text: ChannelText) -> Part:
        is_new = self._last.setdefault(text.is_reasoning, text.number) != text.number
        self._last[text.is_reasoning] = text.number
        shown = f"\n\n{text.text}" if is_new else text.text
        return Reasoning(shown) if text.is_reasoning else shown

    def _end_call(self) -> list[Part]:
        """The call that has ended, if there is one."""
        if not self._call:
            return []
        whole = self._call[0]._replace(text="".join(each.text for each in self._call))
        self._call = []
        name = whole.recipient.removeprefix("functions.")
        if name not in self._names or not _is_object(whole.text):
            return [self._shown(whole)]
        self._n_calls += 1
        if self._most is not None and self._n_calls > self._most:
            return []
        return [CalledFunction(name=name, arguments=whole.text.strip())]


def _is_object(text: str) -> bool:
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except (msgspec.DecodeError, RecursionError):
        return False
