"""A client that repeats one request while a server answers other requests."""

import threading
from typing import Any

from served import Served

QUESTION = {"prompt": "What is the capital of France?", "max_tokens": 12, "temperature": 0}
PATIENCE_S = 120.0
_PAUSE_S = 0.02


class Canary:
    """Repeats one completion until it is closed; `check` asserts that all answers are equal."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._expected = self._ask()
        self._wrong: list[Any] = []
        self.n_answers = 0
        self._answered = threading.Condition()
        self._is_over = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _ask(self) -> Any:
        """The tokens and their probabilities to 1e-9, because rounding differs between batches."""
        reply = self._served.post("/v1/completions", **QUESTION, logprobs=0)
        (choice,) = reply["choices"]
        logprobs = [round(value, 9) for value in choice["logprobs"]["token_logprobs"]]
        return choice["text"], choice["logprobs"]["tokens"], logprobs

    def _run(self) -> None:
        while not self._is_over:
            try:
                answer = self._ask()
            except Exception as error:
                answer = error
            with self._answered:
                if answer != self._expected:
                    self._wrong.append(answer)
                self.n_answers += 1
                self._answered.notify_all()
                self._answered.wait_for(lambda: self._is_over, _PAUSE_S)

    def check(self) -> None:
        """Waits for two more answers, the last requested after this call; all must be equal."""
        with self._answered:
            wanted = self.n_answers + 2
            assert self._answered.wait_for(lambda: self.n_answers >= wanted, PATIENCE_S)
            wrong, self._wrong = self._wrong, []
        assert not wrong, f"{len(wrong)} differ, the first: {wrong[0]}\nexpected: {self._expected}"

    def __enter__(self) -> "Canary":
        return self

    def __exit__(self, *error: object) -> None:
        with self._answered:
            self._is_over = True
            self._answered.notify_all()
        self._thread.join()
