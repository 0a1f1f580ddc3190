"""Remote calls that all ranks run together between two steps: scoring, measuring, adapters.

Rank 0 calls one of these functions, which sends the call to the other ranks; `serve_rank` runs it
there.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress

import msgspec
import torch

from parallel_llama.config.adapter import adapter_digest, load_served_adapter
from parallel_llama.engine.calibration import RankRates, measure_rates
from parallel_llama.engine.engine import SCORE_ROWS, Engine
from parallel_llama.engine.kv_capacity import MemoryFor
from parallel_llama.engine.machine import Machine, measure
from parallel_llama.engine.step_buffer import Chunk
from parallel_llama.errors import (
    CheckpointError,
    NumericalError,
    OutOfMemory,
    UsageError,
    named_ranks,
)
from parallel_llama.files.bounded_files import expanded
from parallel_llama.parallel.collectives import Slice
from parallel_llama.sampling.scoring import score

_SCORE, _MEASURE, _RATES, _CLOSE, _LOAD, _UNLOAD = b"s", b"m", b"r", b"c", b"l", b"u"
_DIGEST_BYTES = 32  # of `adapter_digest`


def serve_rank(engine: Engine) -> None:
    """Take part in steps and calls until rank 0 closes; for ranks above 0."""
    while True:
        with suppress(NumericalError):  # rank 0 raises it too
            engine.step()
            call, body = engine.rpc[:1], engine.rpc[1:]
            if call == _CLOSE:
                return
            if call == _MEASURE:
                measure(engine.comm, engine.runner.device)
            elif call == _RATES:
                measure_rates(engine)
            elif call == _SCORE:
                _score(engine, *msgspec.msgpack.decode(body, type=tuple[list[int], str | None]))
            elif call == _LOAD:
                _load_adapter(engine, *msgspec.msgpack.decode(body, type=tuple[str, str]))
            elif call == _UNLOAD:
                engine.runner.unload_adapter(body.decode())


def score_sequence(
    engine: Engine, tokens: Sequence[int], adapter: str | None = None
) -> list[float]:
    """Natural-log probabilities of every token after the first, given the tokens before it.

    The adapter must be loaded, and the KV cache must have room for the tokens beside the requests.

    Raises: UsageError if the tokens do not fit into an empty KV cache; after the loss of a rank it
    may be smaller than before.
    """
    engine.scheduler.check_length(len(tokens))
    engine.send_rpc(_SCORE + msgspec.msgpack.encode((tokens, adapter)))
    return _score(engine, tokens, adapter)


def windows(n_tokens: int, max_tokens: int, stride: int) -> Iterator[range]:
    """The windows in which a sequence is scored, of at most `max_tokens` tokens each.

    Every window begins `stride` tokens after the previous one. Except in the first window, the new
    tokens have at least `max_tokens - stride` tokens before them.
    Source: "Perplexity of fixed-length models" in the documentation of transformers.
    """
    start, stop = 0, min(max_tokens, n_tokens)
    yield range(start, stop)
    while stop < n_tokens:
        start, stop = start + stride, min(stop + stride, n_tokens)
        yield range(start, stop)


def measure_machine(engine: Engine) -> Machine:
    """The memory bandwidth of all ranks, and their peak memory."""
    engine.send_rpc(_MEASURE)
    return measure(engine.comm, engine.runner.device)


def calibrate(engine: Engine) -> list[RankRates]:
    """The rates of every rank, on the CPU.

    Raises: UsageError for a slice, several pipeline stages, or GPUs.
    """
    n_stages = len(engine.runner.plan.stages)
    if isinstance(engine.comm, Slice):
        raise UsageError(
            "the rates of a slice cannot be measured: it exchanges nothing; use all ranks"
        )
    if n_stages > 1:
        raise UsageError(
            f"pp={n_stages}: the exchanges between stages cannot be measured; measure with pp=1"
        )
    if engine.runner.device.type != "cpu":
        raise UsageError("only the rates of CPU ranks can be measured; use device='cpu'")
    engine.send_rpc(_RATES)
    return measure_rates(engine)


def load_adapter(engine: Engine, name: str, folder: str) -> None:
    """Load a LoRA adapter on all ranks, or on no rank.

    Raises: UsageError if a rank cannot read the same adapter, or the name is in use.
    """
    if name in engine.runner.adapters:
        raise UsageError(f"the adapter {name!r:.200} is loaded already; unload it first")
    engine.send_rpc(_LOAD + msgspec.msgpack.encode((name, folder)))
    if why_refused := _load_adapter(engine, name, folder):
        raise UsageError(f"adapter {name!r:.200}: {why_refused}")


def unload_adapter(engine: Engine, name: str) -> None:
    """Unload a LoRA adapter on all ranks.

    Raises: UsageError if it is not loaded, or a request uses it.
    """
    if name not in engine.runner.adapters:
        raise UsageError(f"the adapter {name!r:.200} is not loaded")
    if engine.uses_adapter(name):
        raise UsageError(f"requests use the adapter {name!r:.200}; try again when they have ended")
    engine.send_rpc(_UNLOAD + name.encode())
    engine.runner.unload_adapter(name)


def close(engine: Engine) -> None:
    """Make the other ranks return from `serve_rank`."""
    engine.send_rpc(_CLOSE)


def _load_adapter(engine: Engine, name: str, folder: str) -> str:
    """Load an adapter, on every rank. Returns: why no rank has loaded it; empty if all have.

    A rank that reads for longer than a step may take is not late: it sends keepalives, and the
    other ranks wait at a barrier.

    Collective: one barrier and one all_gather.
    """
    runner, why_refused, digest = engine.runner, "", bytes(_DIGEST_BYTES)
    try:
        adapter = load_served_adapter(expanded(folder), runner.args)
        digest = bytes.fromhex(adapter_digest(adapter))
        with MemoryFor("the adapter", "unload another adapter, or use a smaller KV cache"):
            runner.load_adapter(name, adapter, engine.comm.keepalive)
    except (UsageError, CheckpointError, OutOfMemory) as error:
        why_refused, digest = str(error), bytes(_DIGEST_BYTES)
    engine.comm.barrier()
    digest_tensor = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
    digests = [bytes(other.tolist()) for other in engine.comm.all_gather(digest_tensor)]
    if len({*digests}) == 1 and any(digest):
        return ""
    if name in runner.adapters:
        runner.unload_adapter(name)
    differing = [rank for rank, other in enumerate(digests) if other != digests[0]]
    ranks = named_ranks(differing)
    return why_refused or f"{folder} cannot be read on {ranks}, or its files differ there"


def _score(engine: Engine, tokens: Sequence[int], adapter: str | None) -> list[float]:
    """Score a sequence in chunks, on every rank.

    The chunks and the order of their rows are the same as for a single request with
    prompt_logprobs, so the results are bitwise equal.
    """
    runner, kv_groups = engine.runner, engine.scheduler.kv_groups
    tables = [kv_group.prefix([]) for kv_group in kv_groups]
    n_scored = len(tokens) - 1
    logprobs: list[float] = []
    try:
        for start in range(0, n_scored, engine.step_tokens):
            stop = min(start + engine.step_tokens, len(tokens))
            for kv_group, table in zip(kv_groups, tables, strict=True):
                kv_group.extend(table, start, stop, len(tokens))
            chunk = Chunk(tokens[start:stop], start, tables, len(tokens), adapter)
            # A request would also compute the row that it samples from.
            sampled_row = [n_scored - start] if stop == len(tokens) else []
            hidden = runner.forward([chunk], [*sampled_row, *range(min(stop, n_scored) - start)])
            for start_row in range(len(sampled_row), len(hidden), SCORE_ROWS):
                rows, first = (
                    hidden[start_row : start_row + SCORE_ROWS],
                    1 + len(logprobs),
                )
                targets = torch.tensor(tokens[first : first + len(rows)], device=runner.device)
                logits = runner.logits(rows)
                logprobs += score(logits, runner.shard.vocab, targets, engine.comm).tolist()
    except BaseException:  # also Ctrl-C, after which the sums of the blocks may be outdated
        if runner.integrity is not None:
            runner.integrity.forget_blocks()
        raise
    finally:
        for kv_group, table in zip(kv_groups, tables, strict=True):
            kv_group.release(table)
    return logprobs
