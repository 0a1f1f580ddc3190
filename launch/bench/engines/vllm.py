"""vLLM on the CPU: `LLM.generate`, eager, without its prefix cache."""

import os
import time
from collections.abc import Sequence
from functools import partial

import torch
import vllm

from launch.bench.engines import Answer, Run, Setup

VERSIONS = {"vllm": vllm.__version__, "torch": torch.__version__}
KV_CACHE_GIB = "4"


def load(setup: Setup) -> Answer:
    # It takes these from nowhere else. The threads go to the cores that all engines have.
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, setup.cores))
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = KV_CACHE_GIB
    llm = vllm.LLM(
        setup.model,
        dtype="float32",
        enforce_eager=True,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        generation_config="vllm",
        max_model_len=setup.max_seq_len,
        disable_log_stats=False,  # else it does not say when the first token came
    )
    return partial(answer, llm)


def answer(llm: vllm.LLM, prompts: Sequence[Sequence[int]], n_new: int) -> Run:
    params = vllm.SamplingParams(temperature=0, max_tokens=n_new, ignore_eos=True, detokenize=False)
    inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    started = time.perf_counter()
    outputs = llm.generate(inputs, params, use_tqdm=False)
    total_s = time.perf_counter() - started
    first_token_s = min(output.metrics.first_token_latency for output in outputs)
    return Run([list(o.outputs[0].token_ids) for o in outputs], first_token_s, total_s)
