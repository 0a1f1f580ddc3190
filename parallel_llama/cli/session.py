"""A loaded model for the length of one command, on every rank that the command runs on."""

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from parallel_llama.cli.progress import Meter
from parallel_llama.cli.ranks import leads
from parallel_llama.cli.terminal import DIM, Loading, painted, size
from parallel_llama.parallel.failures import RankError


def lead(work: Callable[[Any], int], model: str, **options: Any) -> int:
    """Load the model, let rank 0 do the work with it and the other ranks follow; the exit code.

    `work` gets the LLM (Any in this package's annotations, since its module loads torch);
    `options` are LLM's own.

    Collective: every rank of the command calls it.
    """
    # torch and the model come in here: what is above this line starts at once.
    from parallel_llama.llm import LLM

    loading = Loading(model, sys.stderr)
    # The other ranks share rank 0's terminal.
    llm = LLM(model, **options, on_bytes=loading.add if leads() else lambda _: None)
    loading.end()
    if leads():
        line = capacity_line(llm.engine.capacity, llm.intake.max_seq_len)
        print(painted(line, DIM, sys.stderr), file=sys.stderr, flush=True)
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


def capacity_line(capacity: Any, max_seq_len: int) -> str:
    """What the KV cache holds, in one line; `capacity` is a Capacity."""
    n_full = capacity.n_full_requests(max_seq_len)
    return (
        f"KV cache: {capacity.n_tokens:,} tokens, {size(capacity.n_bytes)} on each rank, room for "
        f"{n_full} request{'s' * (n_full != 1)} of {max_seq_len:,} tokens"
    )


def closing_line(meter: Meter, weight_bytes: Sequence[int]) -> str:
    """How fast it went and what each rank held, in one line."""
    least, most = size(min(weight_bytes)), size(max(weight_bytes))
    pieces = [f"{meter.n_tokens} token{'s' * (meter.n_tokens != 1)}"]
    if meter.n_tokens:
        pieces.append(f"the first after {meter.first_token_s:.2f} s")
    if meter.n_tokens > 1:
        pieces.append(f"{meter.tokens_per_s:.1f} tokens/s")
    weights = most if least == most else f"{least} to {most}"
    n_ranks = len(weight_bytes)
    ranks = f"{n_ranks} ranks, {weights} of weights each" if n_ranks > 1 else f"1 rank, {most}"
    return ", ".join([*pieces, ranks if n_ranks > 1 else f"{ranks} of weights"])
