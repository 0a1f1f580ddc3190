"""Thoughts at the beginning of a chat answer: reasoning between two marks.

    <think>
    The user greets me.
    </think>

    Hello!

The prompt may end with the first mark. Marks after the thoughts are text.

Source: the chat templates of Qwen 3, DeepSeek R1, GLM-4.5 and SmolLM3 (<think>), of Seed-OSS
(<seed:think>), and of Magistral and Ministral 3 ([THINK]).
"""

from parallel_llama.tokenizer.channels import ChannelText, n_partial_mark

_MARKS = ("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>")
_BEFORE, _THOUGHTS, _ANSWER = range(3)


def thought_marks(template: str) -> tuple[str, ...]:
    """The two marks of thoughts in answers to a chat template; empty without thoughts.

    A template contains the second mark, because it omits or repeats the thoughts of earlier
    answers.
    """
    return next((marks for marks in _MARKS if marks[1] in template), ())


class ThoughtReader:
    """Splits an answer that arrives in pieces into thoughts and the answer itself.

    Spaces and line breaks around the thoughts belong to neither.

    Args:
        marks: the marks before and after the thoughts.
        prompt: the end of the prompt, which may begin the thoughts.
    """

    def __init__(self, marks: tuple[str, ...], prompt: str = "") -> None:
        self._opening, self._closing = marks
        self._part = _THOUGHTS if prompt.rstrip().endswith(self._opening) else _BEFORE
        self._is_begun = False  # whether this part has text
        self._held = ""  # the end of the text so far: spaces, and perhaps the start of a mark

    def push(self, piece: str) -> list[ChannelText]:
        """Adds a piece. Returns: the text that no later piece can change."""
        texts: list[ChannelText] = []
        text, self._held = self._held + piece, ""
        if self._part == _BEFORE:
            begun = text.lstrip()
            if begun.startswith(self._opening):
                self._part, text = _THOUGHTS, begun.removeprefix(self._opening)
            elif self._opening.startswith(begun):
                self._held = text
                return texts
            else:
                self._part, self._is_begun = _ANSWER, True
        if self._part == _THOUGHTS:
            thoughts, mark, rest = text.partition(self._closing)
            end = len(thoughts) - (0 if mark else n_partial_mark(thoughts, (self._closing,)))
            complete = thoughts[:end].rstrip()
            self._add(complete, texts)
            if mark:
                self._part, self._is_begun = _ANSWER, False
            else:
                self._held = thoughts[len(complete) :]
            text = rest
        if self._part == _ANSWER:
            self._add(text, texts)
        return texts

    def finish(self) -> list[ChannelText]:
        """The text that was held back, at the end of the answer."""
        texts: list[ChannelText] = []
        if self._part == _BEFORE:
            self._part, self._is_begun = _ANSWER, True
        self._add(self._held.rstrip() if self._part == _THOUGHTS else self._held, texts)
        self._held = ""
        return texts

    def _add(self, text: str, texts: list[ChannelText]) -> None:
        """Adds text of the current part, which does not begin with spaces after a mark."""
        shown = text if self._is_begun else text.lstrip()
        if shown:
            self._is_begun = True
            channel = "analysis" if self._part == _THOUGHTS else "final"
            texts.append(ChannelText(self._part, channel, "", shown))
