"""Separates text, reasoning and function calls in answers that mark their reasoning."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from parallel_llama.serve.replies import CalledFunction
from parallel_llama.serve.tool_calls import CallReader, calls_in
from parallel_llama.tokenizer.answers import AnswerReader, MessageJoiner
from parallel_llama.tokenizer.channels import CALLS, ChannelText


@dataclass(frozen=True)
class Reasoning:
    """A part of the reasoning before an answer."""

    text: str


Part = str | Reasoning | CalledFunction


class ChannelParts:
    """Separates an answer that arrives in pieces into text, reasoning and calls.

    Calls are held back until they are complete. A call whose name is not in `names` or whose
    arguments are not a JSON object is emitted as text. Two messages of the same kind are separated
    by an empty line.

    Args:
        reader: reads the markers of the answer.
        max_calls: the maximum number of calls; further calls are dropped.
        in_text: reads the calls in the text, if the markers are those of reasoning alone.
    """

    def __init__(
        self,
        reader: AnswerReader,
        names: frozenset[str] = frozenset(),
        max_calls: int | None = None,
        in_text: CallReader | None = None,
    ) -> None:
        self._reader, self._names, self._max_calls = reader, names, max_calls
        self._in_text = in_text
        self._joiner = MessageJoiner()
        self._call: list[ChannelText] = []
        self._n_calls = 0

    def push(self, piece: str) -> list[Part]:
        """Adds a piece. Returns: the parts that are now complete."""
        return self._parts(self._reader.push(piece))

    def finish(self) -> list[Part]:
        """The parts that were held back, at the end of the answer."""
        parts = [*self._parts(self._reader.finish()), *self._end_calls()]
        return parts if self._in_text is None else [*parts, *self._in_text.finish()]

    def _parts(self, texts: Iterable[ChannelText]) -> list[Part]:
        parts: list[Part] = []
        for text in texts:
            if self._call and self._call[0].number != text.number:
                parts += self._end_calls()
            if text.is_call:
                self._call.append(text)
            else:
                parts += self._parts_of(text)
        return parts

    def _parts_of(self, text: ChannelText) -> Sequence[Part]:
        """The text of a message as reasoning, or as text, which may contain calls."""
        shown = self._joiner.shown(text)
        if text.is_reasoning:
            return [Reasoning(shown)]
        return [shown] if self._in_text is None else self._in_text.push(shown)

    def _end_calls(self) -> list[Part]:
        """The calls of the message that has ended, if there are any."""
        if not self._call:
            return []
        message = self._call[0]._replace(text="".join(text.text for text in self._call))
        self._call = []
        if not (calls := self._read_calls(message)):
            return [*self._parts_of(message)]
        n_allowed = (
            len(calls) if self._max_calls is None else max(0, self._max_calls - self._n_calls)
        )
        self._n_calls += len(calls)
        return [*calls[:n_allowed]]

    def _read_calls(self, message: ChannelText) -> list[CalledFunction]:
        if message.channel == CALLS:
            return calls_in(message.text, self._names)
        name = message.recipient.removeprefix("functions.")
        if name not in self._names or not _is_object(message.text):
            return []
        return [CalledFunction(name=name, arguments=message.text.strip())]


def _is_object(text: str) -> bool:
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except (msgspec.DecodeError, RecursionError):
        return False
