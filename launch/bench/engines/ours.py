"""This runtime: the class that users hold, on one rank or on torchrun's."""

import time
from collections.abc import Sequence

import torch

import parallel_llama
from launch.bench.engines import Run, Setup
from parallel_llama import LLM, SamplingParams


class Ours:
    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.versions = {"parallel_llama": parallel_llama.__version__, "torch": torch.__version__}

    def answer(self, prompts: Sequence[Sequence[int]], n_new: int) -> Run:
        params = SamplingParams(max_tokens=n_new, ignore_eos=True)
        started = time.perf_counter()
        completions = self.llm.generate(prompts, params)
        total_s = time.perf_counter() - started
        tokens = [list(completion.tokens) for completion in completions]
        return Run(tokens, self.llm.statistics.first_token_s, total_s)

    def close(self) -> None:
        self.llm.close()


def start(setup: Setup) -> Ours | None:
    """The model on rank 0; the others follow it until it closes, and give None."""
    torch.set_num_threads(setup.n_threads)
    # Without guesses: random prompts end in loops, and guessing them would flatter us.
    llm = LLM(setup.model, dtype="float32", device="cpu", max_drafts=0)
    if llm.rank == 0:
        return Ours(llm)
    llm.follow()
    llm.close()
    return None
