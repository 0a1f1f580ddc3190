"""Channels of a chat answer, which gpt-oss writes: its reasoning, calls, and the answer itself.

A message is a header and a text between special tokens:

    <|start|>assistant<|channel|>analysis<|message|>The user greets me.<|end|>
    <|start|>assistant<|channel|>final<|message|>Hello!<|return|>

A header may name a recipient, such as to=functions.get_rain; such a message ends with <|call|>. The
prompt ends within the first header, after <|start|>assistant.

Source: OpenAI's harmony response format, https://cookbook.openai.com/articles/openai-harmony.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

# Tokens that end an answer. <|end|> ends only one of its messages.
ANSWER_ENDS = "<|return|>", "<|call|>"

_MESSAGE_ENDS = "<|end|>", *ANSWER_ENDS
CHANNEL_MARKS = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", *_MESSAGE_ENDS
_MARK = re.compile("|".join(map(re.escape, CHANNEL_MARKS)))
_NEEDED = "<|start|>", "<|channel|>", "<|message|>"
# The channel of a text that lists calls, in answers with sections (see `tokenizer.sections`).
CALLS = "calls"

_CHANNEL, _RECIPIENT = re.compile(r"<\|channel\|>\s*(\w+)"), re.compile(r"\bto=([^\s<]+)")


def has_channels(template: str) -> bool:
    """Whether answers to a chat template have channels."""
    return all(mark in template for mark in _NEEDED)


class ChannelText(NamedTuple):
    """Text of one message.

    Args:
        number: the number of the message in the answer.
        channel: analysis, commentary, final or CALLS.
        recipient: the recipient, such as functions.get_rain; empty for the user.
    """

    number: int
    channel: str
    recipient: str
    text: str

    @property
    def is_reasoning(self) -> bool:
        return self.channel == "analysis" and not self.is_call

    @property
    def is_call(self) -> bool:
        return self.channel == CALLS or self.recipient.startswith("functions.")


class ChannelReader:
    """Splits an answer that arrives in pieces, with its special tokens as text.

    An answer that begins without a header is read as the text of a final message.
    """

    def __init__(self) -> None:
        self._number, self._channel, self._recipient = 0, "final", ""
        self._header: str | None = ""  # None inside a text
        self._is_at_start = True
        self._held = ""  # the end of the text so far, if it may be the start of a mark

    def push(self, piece: str) -> list[ChannelText]:
        """Adds a piece. Returns: the text that no later piece can change."""
        texts: list[ChannelText] = []
        text = self._held + piece
        start = 0
        for match in _MARK.finditer(text):
            self._add(text[start : match.start()], texts)
            self._read_mark(match[0], texts)
            start = match.end()
        text = text[start:]
        self._held = text[len(text) - n_partial_mark(text, CHANNEL_MARKS) :]
        self._add(text[: len(text) - len(self._held)], texts)
        return texts

    def finish(self) -> list[ChannelText]:
        """The text that was held back, at the end of the answer."""
        texts: list[ChannelText] = []
        self._add(self._held, texts)
        self._held = ""
        if self._is_at_start and self._header:
            self._add_text(self._header, texts)
            self._header = ""
        return texts

    def _add(self, text: str, texts: list[ChannelText]) -> None:
        if self._header is None:
            self._add_text(text, texts)
            return
        self._header += text
        begun = self._header.lstrip()
        if self._is_at_start and begun and not begun.startswith("to="[: len(begun)]):
            text, self._header = self._header, None
            self._add_text(text, texts)

    def _add_text(self, text: str, texts: list[ChannelText]) -> None:
        if text:
            texts.append(ChannelText(self._number, self._channel, self._recipient, text))

    def _read_mark(self, mark: str, texts: list[ChannelText]) -> None:
        self._is_at_start = False
        if self._header is None and mark not in _MESSAGE_ENDS:
            self._add_text(mark, texts)  # only the end of a message ends its text
        elif mark == "<|message|>" and self._header is not None:
            channel, recipient = _CHANNEL.search(self._header), _RECIPIENT.search(self._header)
            self._channel = "final" if channel is None else channel[1]
            self._recipient = "" if recipient is None else recipient[1]
            self._number, self._header = self._number + 1, None
        elif self._header is None or mark == "<|start|>":
            self._header = mark  # of the next message
        else:
            self._header += mark


def n_partial_mark(text: str, marks: Sequence[str]) -> int:
    """The length of the longest end of a text that may be the start of a mark."""
    most = max(map(len, marks)) - 1
    lengths = range(min(most, len(text)), 0, -1)
    return next((n for n in lengths if any(mark.startswith(text[-n:]) for mark in marks)), 0)
