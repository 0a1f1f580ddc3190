"""Separates the reasoning of a model's answers from their text.

`tokenizer.channels`, `tokenizer.sections` and `tokenizer.thoughts` read the markers of both.
"""

from typing import Protocol

from parallel_llama.tokenizer.channels import (
    CHANNEL_MARKS,
    ChannelReader,
    ChannelText,
    has_channels,
)
from parallel_llama.tokenizer.sections import SECTION_MARKS, SectionReader, has_sections
from parallel_llama.tokenizer.thoughts import ThoughtReader, thought_marks


class AnswerReader(Protocol):
    """Splits one answer that arrives in pieces, with its special tokens as text."""

    def push(self, piece: str) -> list[ChannelText]:
        """Adds a piece. Returns: the text that no later piece can change."""

    def finish(self) -> list[ChannelText]:
        """The text that was held back, at the end of the answer."""


def markers(template: str) -> tuple[str, ...]:
    """The markers of reasoning and calls in answers to a chat template; empty without markers."""
    if has_channels(template):
        return CHANNEL_MARKS
    return SECTION_MARKS if has_sections(template) else thought_marks(template)


def answer_reader(template: str, prompt: str) -> AnswerReader | None:
    """A reader of one answer; None if answers to the template have no markers.

    Args:
        prompt: the text of the last tokens of the prompt.
    """
    if has_channels(template):
        return ChannelReader()
    if has_sections(template):
        return SectionReader(prompt)
    marks = thought_marks(template)
    return ThoughtReader(marks, prompt) if marks else None


class MessageJoiner:
    """Puts an empty line between two messages of reasoning, and between two of text."""

    def __init__(self) -> None:
        self._last: dict[bool, int] = {}  # the last message of reasoning (True) and of text (False)

    def shown(self, text: ChannelText) -> str:
        """A text of a message, after an empty line if it begins a further message."""
        is_new = self._last.setdefault(text.is_reasoning, text.number) != text.number
        self._last[text.is_reasoning] = text.number
        return f"\n\n{text.text}" if is_new else text.text


class AnswerSplitter:
    """Separates reasoning from text in an answer that arrives in pieces. Calls are text."""

    def __init__(self, reader: AnswerReader) -> None:
        self._reader, self._joiner = reader, MessageJoiner()

    def push(self, piece: str, *, is_last: bool) -> list[tuple[str, bool]]:
        """Adds a piece. Returns: texts that no later piece can change, each with `is_reasoning`."""
        texts = [*self._reader.push(piece), *(self._reader.finish() if is_last else ())]
        return [(self._joiner.shown(text), text.is_reasoning) for text in texts]


def split_answer(reader: AnswerReader, text: str) -> tuple[str, str]:
    """The reasoning of a complete answer, and its text."""
    parts = AnswerSplitter(reader).push(text, is_last=True)
    reasoning, shown = (
        "".join(part for part, is_reasoning in parts if is_reasoning == wanted)
        for wanted in (True, False)
    )
    return reasoning, shown
