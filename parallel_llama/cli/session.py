"""A loaded model for the length of one command, on every rank that the command runs on."""

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from parallel_llama.cli.terminal import Loading, size
from parallel_llama.parallel.failures import RankError


def lead(work: Callable[[Any], int], model: str, **options: Any) -> int:
    """Load the model, let rank 0 do the work with it and the other ranks follow; the exit code.

    `work` gets the LLM (Any in this package's annotations, since its module loads torch);
    `options` are LLM's own.

    Collective: every rank of the command calls it.
    """
    # torch and the model come in here: what is above this line starts at once.
    from parallel_llama.llm import LLM

    loading = Loading(model, sys.stderr, shown=True)
    llm = LLM(model, **options, on_bytes=loading.add)
    loading.end()
    if llm.rank:
        llm.follow()
        llm.close()
        return 0
    try:
        return work(llm)
    finally:
        # After a second Ctrl-C in the middle of a collective there is no group left to close.
        with suppress(RankError):
            llm.close()


def closing_line(statistics: Any) -> str:
    """How fast it went and what each rank held, in one line."""
    held = statistics.weight_bytes
    least, most = size(min(held)), size(max(held))
    pieces = [f"{statistics.n_new_tokens} token{'s' * (statistics.n_new_tokens != 1)}"]
    if statistics.n_new_tokens:
        pieces.append(f"the first after {statistics.first_token_s:.2f} s")
    if statistics.n_new_tokens > 1:
        pieces.append(f"{statistics.tokens_per_s:.1f} tokens/s")
    weights = most if least == most else f"{least} to {most}"
    ranks = f"{len(held)} ranks, {weights} of weights each" if len(held) > 1 else f"1 rank, {most}"
    return ", ".join([*pieces, ranks if len(held) > 1 else f"{ranks} of weights"])
