"""How far a run over many prompts is: counts, speed and the time that is left."""

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from parallel_llama.cli.terminal import duration
from parallel_llama.request import Request

if TYPE_CHECKING:
    from parallel_llama.engine.outputs import StepOutput


class Meter:
    """Counts the tokens and completions of some requests as they come.

    `clock` tells the time in seconds.
    """

    def __init__(
        self, requests: Sequence[Request], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.clock, self.began_s = clock, clock()
        self.first_token_s = self.last_token_s = 0.0
        self.n_total = sum(request.params.n for request in requests)
        self.n_done = self.n_tokens = 0
        self._begun: set[tuple[int, int]] = set()
        self._max_tokens = {request.index: request.max_tokens for request in requests}
        self._most_left = sum(request.params.n * request.max_tokens for request in requests)

    def take(self, output: "StepOutput") -> None:
        """What one step gave to one choice."""
        if output.tokens:
            self.last_token_s = self.clock() - self.began_s
            self.first_token_s = self.first_token_s or self.last_token_s
            self.n_tokens += len(output.tokens)
            self._begun.add((output.index, output.choice))
            self._most_left -= len(output.tokens)
        if output.completion is not None:
            self.n_done += 1
            self._most_left -= self._max_tokens[output.index] - len(output.completion.tokens)

    @property
    def tokens_per_s(self) -> float:
        """New tokens per second after the first, over all requests; 0 where nothing can be told.

        Answers of one token each come out of one reading of their prompts, at no speed of theirs.
        """
        after_first_s = self.last_token_s - self.first_token_s
        if self.n_tokens == len(self._begun) or after_first_s <= 0:
            return 0.0
        return (self.n_tokens - 1) / after_first_s

    @property
    def n_tokens_left(self) -> float:
        """Tokens that are still to come, as far as can be told.

        The mean length of what is finished would be too little: the shortest finish first. All
        tokens for each end is the likeliest length where some have not ended, if their ends come at
        any time alike; and no completion has more than its max_tokens.
        """
        if not self.n_done:
            return self._most_left
        return min(self._most_left, self.n_tokens / self.n_done * (self.n_total - self.n_done))

    def line(self) -> str:
        """All of it in one line."""
        line = f"generating: {self.n_done} of {self.n_total} done"
        if self.tokens_per_s:
            left = duration(self.n_tokens_left / self.tokens_per_s)
            most = "" if self.n_done else "at most "
            line += f", {self.tokens_per_s:.1f} tokens/s, {most}{left} left"
        return line
