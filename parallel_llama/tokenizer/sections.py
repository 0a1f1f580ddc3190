"""Sections of a chat answer, which Command R7B and A write: reasoning, calls, and the answer.

A section is a text between two marks:

    <|START_THINKING|>I will look it up.<|END_THINKING|><|START_ACTION|>[
        {"tool_call_id": "0", "tool_name": "rain", "parameters": {"city": "Oslo"}}
    ]<|END_ACTION|>

The prompt may end with the first mark. Text outside the marks belongs to the answer.

Source: the chat templates of c4ai-command-r7b-12-2024 and c4ai-command-a-03-2025.
"""

import re

from parallel_llama.tokenizer.channels import CALLS, ChannelText, n_partial_mark

# The channel of each section, by the word in its marks.
_CHANNELS = {"THINKING": "analysis", "ACTION": CALLS, "RESPONSE": "final", "TEXT": "final"}
SECTION_MARKS = tuple(f"<|{side}_{word}|>" for side in ("START", "END") for word in _CHANNELS)
_MARK = re.compile("|".join(map(re.escape, SECTION_MARKS)))
_MARK_AT_END = re.compile(rf"(?:{_MARK.pattern})\Z")


def has_sections(template: str) -> bool:
    """Whether answers to a chat template have sections."""
    return _MARK.search(template) is not None


class SectionReader:
    """Splits an answer that arrives in pieces, with its special tokens as text.

    Args:
        prompt: the end of the prompt, which may begin the first section.
    """

    def __init__(self, prompt: str = "") -> None:
        self._number, self._channel = 0, ""  # "" outside sections
        self._is_text = False  # whether text outside sections has begun
        self._gap = ""  # spaces outside sections, which may precede a mark
        self._held = ""  # the end of the text so far, if it may be the start of a mark
        if begun := _MARK_AT_END.search(prompt):
            self._read_mark(begun[0])

    def push(self, piece: str) -> list[ChannelText]:
        """Adds a piece. Returns: the text that no later piece can change."""
        texts: list[ChannelText] = []
        text, start = self._held + piece, 0
        for match in _MARK.finditer(text):
            self._add(text[start : match.start()], texts)
            self._read_mark(match[0])
            start = match.end()
        self._held = text[len(text) - n_partial_mark(text[start:], SECTION_MARKS) :]
        self._add(text[start : len(text) - len(self._held)], texts)
        return texts

    def finish(self) -> list[ChannelText]:
        """The text that was held back, at the end of the answer."""
        texts: list[ChannelText] = []
        self._add(self._held, texts)
        self._held = ""
        if self._gap and not self._number:  # an answer of spaces
            texts.append(ChannelText(0, "final", "", self._gap))
        return texts

    def _add(self, text: str, texts: list[ChannelText]) -> None:
        if not self._channel and not self._is_text:
            self._gap += text
            self._is_text = bool(self._gap.strip())
            text = ""
            if self._is_text:
                text, self._gap = self._gap.lstrip() if self._number else self._gap, ""
        if text:
            texts.append(ChannelText(self._number, self._channel or "final", "", text))

    def _read_mark(self, mark: str) -> None:
        side, word = mark.strip("<|>").split("_")
        self._channel = _CHANNELS[word] if side == "START" else ""
        self._number, self._gap, self._is_text = self._number + 1, "", False
