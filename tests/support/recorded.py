"""A substitute for CUDA graphs without a GPU: steps that run again."""

from collections.abc import Callable

from parallel_llama.engine.recorded_steps import Logits


class Recorded:
    """The graphs of a runner, replaced by steps that run again."""

    def __init__(self) -> None:
        self.n_replays = 0

    def __call__(self, step: Callable[[], Logits]) -> tuple[Logits, Callable[[], object]]:
        logits = step()

        def replay() -> None:
            self.n_replays += 1
            again = step()
            logits.values.copy_(again.values)
            assert logits.drawn is not None and again.drawn is not None
            logits.drawn.copy_(again.drawn)

        return logits, replay
