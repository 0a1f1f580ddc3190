"""Runs random mixes of requests, and compares each request's tokens with those that it gets alone.

    python -m launch.soak.mixes [--mixes 500] [--seed 0] [--families NAME...]

A mix has one to eight requests that arrive at random steps; some are cancelled at random steps. The
KV cache is often too small for all, and block sizes, chunk sizes and drafts are random. Half of the
mixes of a family run on one rank, and the others on 2, 3 and 5. The expected tokens come from an
oracle without the scheduler, which runs the whole sequence for every token.
"""

import argparse

from launch.soak.tally import Tally

TP_SIZES = (1, 2, 1, 3, 1, 5)
N_TOGETHER = 10  # mixes per line of output


def main() -> int:
    """Runs the mixes. Returns: 1 if a request got different tokens, otherwise 0."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--mixes", type=int, default=500, help="for each family")
    parser.add_argument("--seed", type=int, default=0, help="of the first mix")
    parser.add_argument("--families", nargs="+", metavar="NAME", help="all by default")
    flags = parser.parse_args()

    from mixes import OF_FAMILIES, run_mixes
    from thread_ranks import run_on_threads

    tally = Tally("batches of mixes")
    for family in flags.families or OF_FAMILIES:
        for number, first in enumerate(range(0, flags.mixes, N_TOGETHER)):
            tp_size = TP_SIZES[number % len(TP_SIZES)]
            seeds = range(flags.seed + first, flags.seed + min(first + N_TOGETHER, flags.mixes))
            found = run_on_threads(tp_size, run_mixes, seeds, OF_FAMILIES[family])[0]
            line = f"{family}, tp {tp_size}, mixes {seeds.start} to {seeds.stop - 1}"
            tally.add(not found, "; ".join([line, *found]))
    return tally.close()


if __name__ == "__main__":
    raise SystemExit(main())
