"""Runs random mixes of requests, and compares each request's tokens with those that it gets alone.

    python -m launch.soak.mixes [--mixes 500] [--seed 0] [--families NAME...]

A mix has one to eight requests that arrive at random steps; some are cancelled at random steps. The
KV cache is often too small for all, and block sizes, chunk sizes and drafts are random. Half of the
mixes of a family run on one rank, and the others on 2, 3 and 5. The expected tokens come from an
oracle without the scheduler, which runs the whole sequence for every token.

The families are those of the engine's tests, and all families that transformers implements. If a
family has several models, they take turns.
"""

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from launch.soak.tally import Tally
from parallel_llama.engine.llm_config import LLMConfig
from parallel_llama.engine.setup import ModelSetup

if TYPE_CHECKING:
    from tiny_models import TinyModel

    from parallel_llama.families.model_args import ModelArgs

TP_SIZES = (1, 2, 1, 3, 1, 5)
N_TOGETHER = 10  # mixes per line of output


def main() -> int:
    """Runs the mixes. Returns: 1 if a request got different tokens, otherwise 0."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--mixes", type=int, default=500, help="for each family")
    parser.add_argument("--seed", type=int, default=0, help="of the first mix")
    parser.add_argument("--families", nargs="+", metavar="NAME", help="all by default")
    flags = parser.parse_args()

    from ways import no_warnings

    with no_warnings():
        return soak_families(flags)


def soak_families(flags: argparse.Namespace) -> int:
    """Runs the mixes of every family. Returns: the exit code."""
    from family_models import of_families
    from mixes import OF_FAMILIES, run_mixes
    from thread_ranks import run_on_threads
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    tally = Tally("batches of mixes")
    tiny_models = of_families()
    for family in flags.families or dict.fromkeys([*OF_FAMILIES, *tiny_models]):
        models = [OF_FAMILIES[family]] if family in OF_FAMILIES else []
        models += [args_of(tiny) for tiny in tiny_models.get(family, {}).values()]
        for number, first in enumerate(range(0, flags.mixes, N_TOGETHER)):
            turn, at = divmod(number, len(TP_SIZES))
            model = models[turn % len(models)]
            tp_size = min(TP_SIZES[at], model.n_heads)
            seeds = range(flags.seed + first, flags.seed + min(first + N_TOGETHER, flags.mixes))
            found = run_on_threads(tp_size, run_mixes, seeds, model)[0]
            line = f"{family} {turn % len(models)}, tp {tp_size}, mixes {seeds[0]} to {seeds[-1]}"
            tally.add(not found, "; ".join([line, *found]))
    return tally.close()


def args_of(tiny: "TinyModel") -> "ModelArgs":
    """The arguments that are read from the folder of a tiny model, with room for all tokens."""
    from mixes import ARGS
    from tiny_models import write_hf

    vocab_size = max(tiny.vocab_size, ARGS.vocab_size)
    with tempfile.TemporaryDirectory() as folder:
        write_hf(replace(tiny, vocab_size=vocab_size), Path(folder))
        args = ModelSetup(LLMConfig(folder, tp_size=1)).inputs.args
    return replace(args, dtype="float64")


if __name__ == "__main__":
    raise SystemExit(main())
