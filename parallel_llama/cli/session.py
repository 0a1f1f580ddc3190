"""Loads the model for one command, on every rank of the command."""

import gc
import io
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from parallel_llama.cli.arguments import Flags, warn
from parallel_llama.cli.model import MODEL, llm_config
from parallel_llama.cli.progress import Meter
from parallel_llama.cli.ranks import leads
from parallel_llama.cli.terminal import DIM, Activity, painted, size
from parallel_llama.engine.input_processor import InputProcessor
from parallel_llama.errors import listed_ranks
from parallel_llama.parallel.rank_env import world

if TYPE_CHECKING:
    from parallel_llama.engine.kv_capacity import Capacity
    from parallel_llama.llm import LLM


def lead(
    flags: Flags, inputs: InputProcessor, work: Callable[["LLM"], int], **settings: Any
) -> int:
    """Loads the model, runs `work` on rank 0 with the other ranks, and returns its exit code.

    `settings` are fields of LLMConfig without a flag. Ranks > 0 do not return.

    Collective: every rank of the command calls it.
    """
    model = flags[MODEL]
    n_read = 0

    def show_bytes(n_bytes: int) -> None:
        nonlocal n_read
        n_read += n_bytes
        activity.what = f"loading {model}: {size(n_read)}"

    def show_missing(missing: Sequence[int]) -> None:
        if missing:
            activity.what = f"waiting for rank {listed_ranks(missing)} of {world()[1]}"

    def show_graph(n_rows: int) -> None:
        activity.what = f"recording decode steps of {n_rows} row{'s' * (n_rows > 1)}"

    # Only rank 0 draws status lines: all ranks share a terminal.
    stream = sys.stderr if leads() else io.StringIO()
    with _no_garbage(), Activity("loading torch", stream) as activity:
        # Slow to import: usage errors are reported before.
        import torch

        from parallel_llama.engine.machine import Interruptions
        from parallel_llama.llm import LLM

        activity.what = f"loading {model}"
        llm = LLM(
            llm_config(flags, **settings),
            input_processor=inputs,
            facts={"command": flags.verb},
            on_bytes=show_bytes,
            on_wait=show_missing,
            on_graph=show_graph,
        )
    with llm:
        line = capacity_line(llm.engine.capacity, llm.input_processor.max_seq_len)
        print(painted(line, DIM, sys.stderr), file=sys.stderr, flush=True)
        interruptions = Interruptions()
        code = work(llm)
        if (n_threads := torch.get_num_threads()) > 1 and interruptions.are_crowded():
            _warn_of_busy_cores(n_threads)
        return code


@cache
def _warn_of_busy_cores(n_threads: int) -> None:
    """Warns once per process, even if several commands run in it."""
    warn(
        f"the cores are busy, so the {n_threads} threads of a rank wait for each other; set "
        "OMP_NUM_THREADS=1"
    )


@contextmanager
def _no_garbage() -> Iterator[None]:
    """Permanently exempts objects created inside from garbage collection."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def capacity_line(capacity: "Capacity", max_seq_len: int) -> str:
    """The capacity of the KV cache, in one line."""
    n_full = capacity.n_full_requests(max_seq_len)
    return (
        f"KV cache: {capacity.n_tokens:,} tokens, {size(capacity.n_bytes)} on each rank, room for "
        f"{n_full} request{'s' * (n_full != 1)} of {max_seq_len:,} tokens"
    )


def closing_line(meter: Meter, weight_bytes: Sequence[int], seed: int | None) -> str:
    """The speed, each rank's weights and the seed, in one line."""
    least, most = size(min(weight_bytes)), size(max(weight_bytes))
    pieces = [f"{meter.n_tokens} token{'s' * (meter.n_tokens != 1)}"]
    if meter.n_tokens:
        pieces.append(f"the first after {meter.first_token_s:.2f} s")
    if meter.tokens_per_s:
        pieces.append(f"{meter.tokens_per_s:.1f} tokens/s")
    weights = most if least == most else f"{least} to {most}"
    n_ranks = len(weight_bytes)
    pieces.append(
        f"{n_ranks} ranks, {weights} of weights each"
        if n_ranks > 1
        else f"1 rank, {most} of weights"
    )
    if seed is not None:
        pieces.append(f"seed {seed}")
    return ", ".join(pieces)
