"""vLLM on the CPU: `LLM.generate`, eager, without prefix cache."""

import os
import statistics
import time
from collections.abc import Sequence

import torch
import vllm

from launch.bench.engines import Measurement, Setup

VERSIONS = {"vllm": vllm.__version__, "torch": torch.__version__}
KV_CACHE_GIB = "4"


class VLLM:
    def __init__(self, setup: Setup) -> None:
        # vLLM has no arguments for these. Threads are bound to the cores that all engines use.
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, setup.cores))
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = KV_CACHE_GIB
        self.llm = vllm.LLM(
            setup.model,
            dtype=setup.form,
            enforce_eager=True,
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
            generation_config="vllm",
            max_model_len=setup.max_seq_len + 1,  # the likelihood of a text needs one more token
            disable_log_stats=False,  # needed for the time of the first token
        )

    def answer(self, prompts: Sequence[Sequence[int]], n_new: int) -> Measurement:
        params = vllm.SamplingParams(
            temperature=0, max_tokens=n_new, ignore_eos=True, detokenize=False
        )
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        started = time.perf_counter()
        outputs = self.llm.generate(inputs, params, use_tqdm=False)
        total_s = time.perf_counter() - started
        firsts = [output.metrics.first_token_latency for output in outputs]
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        # vLLM does not report `n_early`, which is small: other tokens generated before `prefill_s`.
        return Measurement(tokens, min(firsts), total_s, max(firsts))

    def nll(self, tokens: Sequence[int]) -> float:
        params = vllm.SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        (output,) = self.llm.generate([{"prompt_token_ids": list(tokens)}], params, use_tqdm=False)
        own = zip(output.prompt_logprobs[1:], tokens[1:], strict=True)
        return -statistics.fmean(found[token].logprob for found, token in own)


load = VLLM
