"""Completes a file of prompts with Ray Data, in a pool of actors with one LLM each.

    pip install "ray[data]"
    python launch/ray_batch.py --model PATH --prompts prompts.jsonl --output answers --actors 2

Each line of the file is {"prompt": ".."}. The folder `answers` gets JSON files with a line per
prompt, in any order. Ray places the actors on the cluster's hosts. An actor starts one rank on its
host for each core that the actor reserves; every host needs the model's files.
"""

import argparse
from typing import Any

import ray

from parallel_llama import LLM, SamplingParams


class Completer:
    """An actor: an LLM that completes batches of rows."""

    def __init__(self, model: str, ranks: int, max_tokens: int) -> None:
        self._llm = LLM(model, tp_size=ranks)
        self._params = SamplingParams(max_tokens=max_tokens, temperature=0)

    def __call__(self, rows: dict[str, Any]) -> dict[str, Any]:
        completions = self._llm.generate(rows["prompt"].tolist(), self._params)
        return {**rows, "text": [completion.text for completion in completions]}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", required=True, help="a model folder or .gguf file")
    parser.add_argument("--prompts", required=True, help="a JSONL file")
    parser.add_argument("--output", required=True, help="a new folder")
    parser.add_argument("--actors", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=1, help="of each actor")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, default=64, help="prompts that an actor gets at once")
    options = parser.parse_args()
    # Actors may reserve all cores, so tasks that read and write must not wait for one.
    without_core = {"num_cpus": 0}
    ray.data.read_json(options.prompts, ray_remote_args=without_core).map_batches(
        Completer,
        fn_constructor_args=(options.model, options.ranks, options.max_tokens),
        compute=ray.data.ActorPoolStrategy(size=options.actors),
        num_cpus=options.ranks,
        batch_size=options.batch,
    ).write_json(options.output, ray_remote_args=without_core)


if __name__ == "__main__":
    main()
