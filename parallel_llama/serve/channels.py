"""Separates the reasoning, the calls and the text of answers that mark them by special tokens."""

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from parallel_llama.serve.replies import CalledFunction
from parallel_llama.serve.tool_calls import calls_in
from parallel_llama.tokenizer.answers import AnswerReader, MessageJoiner
from parallel_llama.tokenizer.channels import CALLS, ChannelText


@dataclass(frozen=True)
class Reasoning:
    """A part of the reasoning before an answer."""

    text: str


Part = str | Reasoning | CalledFunction


class ChannelParts:
    """Separates the reasoning and the calls of an answer, in pieces, from its text.

    Calls are held back until they are complete. If arguments are not a JSON object or a name is not
    in `names`, they are emitted as text. Two messages of the same kind are separated by an empty
    line.

    Args:
        reader: reads the marks of the answer.
        most: calls after this many are dropped.
    """

    def __init__(
        self,
        reader: AnswerReader,
        names: frozenset[str] = frozenset(),
        most: int | None = None,
    ) -> None:
        self._reader, self._names, self._most = reader, names, most
        self._joiner = MessageJoiner()
        self._call: list[ChannelText] = []
        self._n_calls = 0

    def push(self, piece: str) -> list[Part]:
        """Adds a piece, and returns the parts that are now certain."""
        return self._parts(self._reader.push(piece))

    def finish(self) -> list[Part]:
        """The parts that were held back, at the end of the answer."""
        return [*self._parts(self._reader.finish()), *self._end_calls()]

    def _parts(self, texts: Iterable[ChannelText]) -> list[Part]:
        parts: list[Part] = []
        for each in texts:
            if self._call and self._call[0].number != each.number:
                parts += self._end_calls()
            if each.is_call:
                self._call.append(each)
            else:
                parts.append(self._shown(each))
        return parts

    def _shown(self, text: ChannelText) -> Part:
        shown = self._joiner.shown(text)
        return Reasoning(shown) if text.is_reasoning else shown

    def _end_calls(self) -> list[Part]:
        """The calls of the message that has ended, if there are any."""
        if not self._call:
            return []
        whole = self._call[0]._replace(text="".join(each.text for each in self._call))
        self._call = []
        if not (calls := self._read_calls(whole)):
            return [self._shown(whole)]
        room = len(calls) if self._most is None else max(0, self._most - self._n_calls)
        self._n_calls += len(calls)
        return [*calls[:room]]

    def _read_calls(self, whole: ChannelText) -> list[CalledFunction]:
        if whole.channel == CALLS:
            return calls_in(whole.text, self._names)
        name = whole.recipient.removeprefix("functions.")
        if name not in self._names or not _is_object(whole.text):
            return []
        return [CalledFunction(name=name, arguments=whole.text.strip())]


def _is_object(text: str) -> bool:
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except (msgspec.DecodeError, RecursionError):
        return False
