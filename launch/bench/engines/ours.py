"""This runtime: the class that users hold, on one rank or on torchrun's."""

import time
from collections.abc import Sequence
from functools import partial

import torch

import parallel_llama
from launch.bench.engines import Answer, Run, Setup
from parallel_llama import LLM, SamplingParams

VERSIONS = {"parallel_llama": parallel_llama.__version__, "torch": torch.__version__}


def load(setup: Setup) -> Answer:
    """The model on rank 0; the other ranks serve it from here on, and end with it."""
    torch.set_num_threads(setup.n_threads)
    # Without guesses: random prompts end in loops, and guessing them would flatter us.
    return partial(answer, LLM(setup.model, dtype="float32", device="cpu", max_drafts=0))


def answer(llm: LLM, prompts: Sequence[Sequence[int]], n_new: int) -> Run:
    params = SamplingParams(max_tokens=n_new, ignore_eos=True)
    started = time.perf_counter()
    completions = llm.generate(prompts, params)
    total_s = time.perf_counter() - started
    tokens = [list(completion.tokens) for completion in completions]
    return Run(tokens, llm.statistics.first_token_s, total_s)
