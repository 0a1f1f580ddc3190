"""Checks that results have the same bits in all ways of running a model.

    python -m launch.soak.bits [--models 3] [--staged 1] [--seed 1] [--families NAME...]
    python -m launch.soak.bits --smollm2 [--formats NAME...] [--seed 1]

For every family that transformers implements, random variants of the tests' tiny models are
written. For each model, random requests run alone on one rank with one thread, and then together:
on every number of ranks from 1 to the number of heads (9 at most), and in pipeline stages on random
numbers of ranks. Each run also chooses at random the other settings that must not change results:
even or uneven plans, a KV cache that is split by heads or by tokens, one or two threads per rank,
and the batch, steps, blocks, drafts and prefix cache. Tokens, their log-probabilities and those of
prompt tokens must have the same bits.
The first answer to each request is also scored as a prompt, which must give the log-probabilities
with which its tokens were drawn.

With --smollm2, SmolLM2 runs in each format on 1 to 9 ranks, and the SHA-256 of all results is
printed. With or without --smollm2, --planted turns exact sums off except in the runs of single
requests, so differences must be reported.
"""

import argparse
import hashlib
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from launch.soak.tally import Tally
from parallel_llama.engine.llm_config import LLMConfig, Settings
from parallel_llama.engine.setup import ModelSetup
from parallel_llama.request import SamplingParams

if TYPE_CHECKING:
    from ranks import Pools
    from ways import Completions

    from parallel_llama.families.model_args import ModelArgs

PLAIN: list[Settings] = [
    {"dtype": dtype, "quant": "none"} for dtype in ("float32", "float64", "bfloat16")
]
QUANTISED: list[Settings] = [
    {"dtype": "float32", "quant": quant} for quant in ("int8", "int4", "fp8")
]
KV_FORMATS = ("auto", "bfloat16", "int8", "fp8")
SMOLLM2: dict[str, Settings] = {
    "stored": {"quant": "stored"},
    "float32": {"dtype": "float32", "quant": "none"},
    "bfloat16": {"dtype": "bfloat16", "quant": "none"},
    "int8": {"quant": "int8"},
    "int4": {"quant": "int4"},
    "fp8": {"quant": "fp8"},
    "kv-int8": {"quant": "stored", "kv_cache_dtype": "int8"},
    "kv-fp8": {"quant": "stored", "kv_cache_dtype": "fp8"},
}
TEXTS = ("The capital of France is", "def add(a, b):\n" * 12, "Once upon a time, " * 9)
N_TOKENS = 16  # of each of SmolLM2's answers
MIN_STEP_TOKENS = 64  # of SmolLM2, because a step of nine ranks takes long on few cores
N_REQUESTS = 10  # to each random model
MAX_RANKS = 9  # of a random model, because more ranks take long on few cores


def main(argv: Sequence[str] | None = None) -> int:
    """Returns: 1 if any bit differed, otherwise 0."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--models", type=int, default=3, help="for each family")
    parser.add_argument("--staged", type=int, default=1, help="runs of each model in stages")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--families", nargs="+", help="transformers' names; all by default")
    parser.add_argument("--smollm2", action="store_true")
    parser.add_argument("--formats", nargs="+", choices=SMOLLM2, default=list(SMOLLM2))
    parser.add_argument("--planted", action="store_true")
    flags = parser.parse_args(argv)

    from ranks import Pools
    from ways import no_warnings

    pools, soak = Pools(), soak_smollm2 if flags.smollm2 else soak_models
    try:
        with no_warnings():
            return soak(pools, flags)
    finally:
        pools.end()


def soak_models(pools: "Pools", flags: argparse.Namespace) -> int:
    """Compare the results of random models run in different ways. Returns: the exit code."""
    from comparison import Comparison
    from family_models import of_families
    from random_models import is_narrow, random_model
    from tiny_models import write_hf
    from transformers.utils.logging import disable_progress_bar
    from ways import random_requests

    disable_progress_bar()
    tally, n_tokens, n_logprobs = Tally("models"), 0, 0
    by_family = of_families()
    for family in flags.families or by_family:
        names = list(by_family[family])
        random.Random(f"{flags.seed} {family}").shuffle(names)
        for number in range(flags.models):
            name = names[number % len(names)]
            base = by_family[family][name]
            rng = random.Random(f"{flags.seed} {name} {number}")
            formats = _random_formats(rng, plain=is_narrow(base))
            wide = formats["quant"] != "none" or formats["kv_cache_dtype"] in ("int8", "fp8")
            model = random_model(rng, base, wide)
            with tempfile.TemporaryDirectory() as folder:
                write_hf(model, Path(folder), rng.randrange(1 << 32))
                config = LLMConfig(folder, tp_size=1, exact=True, **formats)
                inputs = ModelSetup(config).inputs
                comparison = Comparison(pools, config, flags.planted)
                comparison.run_alone(
                    random_requests(rng, N_REQUESTS, model.vocab_size, inputs.max_seq_len)
                )
                sizes = _random_sizes(rng, inputs.args, flags.staged)
                for n_ranks, pp in sizes:
                    comparison.compare_some(rng, n_ranks, pp)
            line = f"{family} {number} ({name}): {model.shape}, {', '.join(formats.values())}, "
            line += f"{len(sizes)} runs, {comparison.n_tokens} tokens{comparison.shown()}"
            tally.add(not comparison.differences, line)
            n_tokens += comparison.n_tokens
            n_logprobs += comparison.n_logprobs
    return tally.close(f"{n_tokens} tokens and {n_logprobs} log-probabilities compared")


def _random_sizes(rng: random.Random, args: "ModelArgs", n_staged: int) -> list[tuple[int, int]]:
    """Ranks and pipeline stages: every number of ranks in one stage, and random ones in more."""
    most = min(args.n_heads, MAX_RANKS)
    sizes = [(n_ranks, 1) for n_ranks in range(1, most + 1)]
    for _ in range(n_staged):
        pp = rng.randint(2, min(3, args.n_layers))
        sizes.append((rng.randint(pp, min(MAX_RANKS, args.n_heads * pp)), pp))
    return sizes


def _random_formats(rng: random.Random, *, plain: bool) -> Settings:
    """Formats of weights and KV cache; with `plain`, no quantised ones."""
    weights = rng.choice(PLAIN if plain else PLAIN + QUANTISED)
    return {**weights, "kv_cache_dtype": rng.choice(KV_FORMATS[:2] if plain else KV_FORMATS)}


def soak_smollm2(pools: "Pools", flags: argparse.Namespace) -> int:
    """Compare the results of SmolLM2 on every number of ranks. Returns: the exit code."""
    from comparison import Comparison
    from ways import random_way

    tally = Tally("formats")
    for name in flags.formats:
        rng = random.Random(f"{flags.seed} {name}")
        config = LLMConfig("smollm2", tp_size=1, exact=True, **SMOLLM2[name])
        inputs = ModelSetup(config).inputs
        comparison = Comparison(pools, config, flags.planted)
        greedy = SamplingParams(
            max_tokens=N_TOKENS, ignore_eos=True, logprobs=1, prompt_logprobs=1, seed=flags.seed
        )
        asked = [(text, greedy) for text in TEXTS]
        asked += [(text, replace(greedy, temperature=0.9, top_p=0.95)) for text in TEXTS]
        comparison.run_alone([inputs.request(at, *each) for at, each in enumerate(asked)])
        digests = {digest(comparison.expected)}
        for n_ranks in range(1, inputs.args.n_heads + 1):
            way = random_way(rng, config, comparison.requests, n_ranks)
            step_tokens = max(MIN_STEP_TOKENS, way.mix.step_tokens)
            way = replace(way, n_threads=1, mix=replace(way.mix, step_tokens=step_tokens))
            digests.add(digest(comparison.compare(way)))
        line = f"{name}: {' '.join(sorted(digests))}{comparison.shown()}"
        tally.add(len(digests) == 1 and not comparison.differences, line)
    return tally.close()


def digest(completions: "Completions") -> str:
    """The SHA-256 of all tokens and log-probabilities."""
    lines = [json.dumps(completions[key].to_json()) for key in sorted(completions)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
