"""This runtime: the class `LLM`, which starts its other ranks itself."""

import statistics
import time
from collections.abc import Sequence
from importlib.metadata import version

import parallel_llama
from launch.bench.engines import Measurement, Setup
from parallel_llama import LLM, SamplingParams
from parallel_llama.dtypes import QUANTS

VERSIONS = {"parallel_llama": parallel_llama.__version__, "torch": version("torch")}


class Ours:
    def __init__(self, setup: Setup) -> None:
        # No drafts: random prompts lead to loops, on which drafts would be unfairly fast.
        # A GGUF file stays as llama.cpp quantised it.
        form = "stored" if setup.model.endswith(".gguf") else setup.form
        kept = {"quant": form} if form in QUANTS else {"dtype": form}
        self.llm = LLM(setup.model, tp_size=setup.n_ranks, device="cpu", max_drafts=0, **kept)

    def answer(self, prompts: Sequence[Sequence[int]], n_new: int) -> Measurement:
        params = SamplingParams(max_tokens=n_new, ignore_eos=True)
        tokens: list[list[int]] = [[] for _ in prompts]
        first_token_s = prefill_s = 0.0
        n_early = 0
        started = time.perf_counter()
        for output in self.llm.run(self.llm.input_processor.requests(prompts, params)):
            tokens[output.index] += output.tokens
            if not prefill_s:
                so_far_s = time.perf_counter() - started
                first_token_s = first_token_s or so_far_s
                if all(tokens):
                    prefill_s, n_early = so_far_s, sum(map(len, tokens)) - len(prompts)
        total_s = time.perf_counter() - started
        return Measurement(tokens, first_token_s, total_s, prefill_s, n_early)

    def nll(self, tokens: Sequence[int]) -> float:
        return -statistics.fmean(self.llm.score([tokens])[0])


load = Ours
