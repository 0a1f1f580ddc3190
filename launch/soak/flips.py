"""Flips bits of a running model, and checks that the integrity check finds and names each fault.

    python -m launch.soak.flips [--runs 200] [--seed 1]

A run is a tiny float64 model on three rank processes with exact sums and the integrity check, which
gets the same fraction of the time as in normal use. At a random step, a random bit of a weight or
of a full block of the KV cache of one rank flips (40 % of the runs each), or one rank begins to
compute one output in eight wrongly, in all products of one input size (20 %). In these last runs,
steps are not recorded, because a replayed step would not have the fault. A block counts as full
when the check has computed its sum. The run ends when a rank raises IntegrityError, which must name
the rank and what has changed.
"""

import argparse
import random
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.soak.tally import Tally
from parallel_llama.engine.engine import Engine
from parallel_llama.errors import NumericalError
from parallel_llama.model.weights import stored_weights
from parallel_llama.parallel.collectives import Communicator, Solo
from parallel_llama.parallel.failures import IntegrityError, RankError
from parallel_llama.request import Request, SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

SIZE = 3
LATEST, LIMIT = 100, 1000  # faults are planted before this step; steps in which to find them
N_PROMPTS = 4
BLOCK_SIZE = 16
KINDS = ("weight", "KV cache", "product", "weight", "KV cache")


@dataclass(frozen=True)
class Fault:
    """One fault of one rank; `seed` chooses what changes.

    Args:
        kind: one of KINDS.
        at: the step before which it begins.
        prompt: the seed of the request.
    """

    kind: str
    rank: int
    at: int
    prompt: int
    seed: int


@dataclass
class Found:
    """What a rank saw of a run.

    Attributes:
        named: the message that the check must give, as a pattern; on the faulty rank.
        began: the step before which the fault began; on the faulty rank.
        step: the step in which this rank raised IntegrityError, or -1.
        message: of that error.
        tokens: of the request.
    """

    named: str = ""
    began: int = -1
    step: int = -1
    message: str = ""
    tokens: tuple[int, ...] = ()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the faults; returns 1 if one was not found or not named, otherwise 0."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    flags = parser.parse_args(argv)
    tally, chance = Tally("faults"), random.Random(flags.seed)
    most, n_found, n_changed = defaultdict[str, int](int), 0, 0

    for number in range(flags.runs):
        fault = Fault(
            KINDS[number % len(KINDS)],
            chance.randrange(SIZE),
            chance.randrange(20, LATEST),
            chance.randrange(N_PROMPTS),
            chance.randrange(1 << 30),
        )
        found = run(fault)
        n_steps = found.step - found.began
        is_named = bool(re.search(found.named, found.message)) and found.step >= 0
        is_changed = found.tokens != undisturbed(fault.prompt)[: len(found.tokens)]
        n_found += found.step >= 0
        n_changed += is_changed
        most[fault.kind] = max(most[fault.kind], n_steps)
        what = f"after {n_steps} steps: {found.message}"
        if found.step < 0:
            what = f"not found {found.message}".rstrip()
        changed = ", a token had changed" if is_changed else ""
        wrong = "" if is_named else f"; expected {found.named!r}"
        tally.add(is_named, f"{fault.kind} of rank {fault.rank}, {what}{changed}{wrong}")
    by_kind = [f"at most {n} steps ({kind})" for kind, n in most.items()]
    found_of = f"found {n_found} of {flags.runs}"
    return tally.close(found_of, *by_kind, f"{n_changed} changed a token")


def run(fault: Fault) -> Found:
    """One run. Returns: what the rank that found the fault saw, and the tokens of rank 0."""
    from ranks import Ranks

    with tempfile.TemporaryDirectory(prefix="flips-") as name, Ranks(SIZE, True) as ranks:
        seen: list[Found] = ranks.run(run_with_fault, fault, str(Path(name, "failed")))
    finder = next((found for found in seen if found.step >= 0), seen[fault.rank])
    faulty = seen[fault.rank]
    return Found(faulty.named, faulty.began, finder.step, finder.message, seen[0].tokens)


def run_with_fault(comm: Communicator, fault: Fault, failed: str) -> Found:
    """What this rank sees of a run. `failed` is a file that exists after a rank has failed."""

    def end_with_others() -> None:
        if Path(failed).exists():
            raise RankError("another rank has failed")

    engine = begin(comm, fault.prompt)
    if fault.kind == "product":
        engine.runner._calls._steps[1, False] = None  # steps of one row run operator by operator
    comm.on_wait = end_with_others  # type: ignore[attr-defined]
    found, chance = Found(), random.Random(fault.seed)
    for step in range(LATEST + LIMIT):
        if comm.rank == fault.rank and step >= fault.at and not found.named:
            found.named = plant(fault.kind, engine, chance)
            found.began = step
        try:
            for output in engine.step():
                found.tokens += output.tokens
        except IntegrityError as error:
            found.step, found.message = step, str(error)
        except NumericalError as error:  # on all ranks, and no rank was named
            found.message = str(error)
            break
        except RankError:
            break
        if found.step >= 0:
            Path(failed).touch()
            break
    return found


def begin(comm: Communicator, prompt: int) -> Engine:
    """An engine with one request that is long enough for all steps."""
    from mixes import ARGS, make_engine, make_runner

    n_blocks = 2 + (LATEST + LIMIT) // BLOCK_SIZE + 2
    runner = make_runner(comm, exact=True)
    engine = make_engine(runner, n_blocks, BLOCK_SIZE, integrity_check=True)
    if comm.rank == 0:
        chance = random.Random(prompt)
        tokens = tuple(chance.randrange(ARGS.vocab_size) for _ in range(2 * BLOCK_SIZE))
        params = SamplingParams(max_tokens=LATEST + LIMIT, temperature=1.0)
        engine.submit(Request(0, tokens, params, prompt, frozenset()))
    return engine


@cache
def undisturbed(prompt: int) -> tuple[int, ...]:
    """The tokens without a fault, on one rank; with exact sums three ranks draw the same tokens."""
    engine = begin(Solo(), prompt)
    tokens: tuple[int, ...] = ()
    while not engine.idle:
        for output in engine.step():
            tokens += output.tokens
    return tokens


def plant(kind: str, engine: Engine, chance: random.Random) -> str:
    """Begins a fault. Returns: a pattern of the message that it must cause; "" if it must wait."""
    from bits import flip

    who = f"rank {engine.comm.rank} of {engine.comm.size}"
    if kind == "product":
        multiply_wrongly(engine, chance)
        return f"^{who} differs from the others in products with "
    if kind == "weight":
        name, weight = chance.choice(list(stored_weights(engine.runner.model).items()))
        flip(weight.values, chance.randrange(8 * weight.values.nbytes))
        # Norms are replicated: ranks may differ before the check reaches the changed norm.
        return f"^{who}(: {re.escape(name)} has changed| differs from the others in the residual)"
    blocks = engine._integrity._blocks[0].blocks() if engine._integrity else []
    if not blocks:
        return ""
    block = chance.choice(blocks)
    rows = engine.runner.caches[0].as_bytes()
    head, slot = chance.randrange(len(rows)), block * BLOCK_SIZE + chance.randrange(BLOCK_SIZE)
    flip(rows[head, slot], chance.randrange(8 * rows.shape[2]))
    return f"^{who}: block {block} of its KV cache has changed"


def multiply_wrongly(engine: Engine, chance: random.Random) -> None:
    """From now on a bit of every eighth output of some products is flipped."""
    from bits import flip

    weights = stored_weights(engine.runner.model).values()
    n_inputs = chance.choice(sorted({w.n_inputs for w in weights if w.values.ndim == 2}))
    lane, bit = chance.randrange(8), chance.randrange(64)
    ops = engine.runner.model.ops
    linear = ops.linear

    def wrong(x: "Tensor", *weights: Any) -> "Tensor":
        y = linear(x, *weights)
        if x.shape[-1] == n_inputs:
            for output in range(lane, y.numel(), 8):
                flip(y, 64 * output + bit)
        return y

    ops.linear = wrong  # type: ignore[method-assign]


if __name__ == "__main__":
    sys.exit(main())
