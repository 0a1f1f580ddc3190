"""transformers: `generate` on one batch, padded on the left, with its default cache.

On several ranks of torchrun it uses its own tensor parallelism. Rank 0 receives the requests and
broadcasts them.
"""

import atexit
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
)

from launch.bench.engines import Loaded, Measurement, Setup

VERSIONS = {"transformers": transformers.__version__, "torch": torch.__version__}
PAD_ID = 0  # any id: the attention mask hides it


class Clock(LogitsProcessor):
    """Records when the logits of the first step are available."""

    def __init__(self) -> None:
        self.first_s = 0.0

    def __call__(self, _: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.first_s = self.first_s or time.perf_counter()
        return scores


def load(setup: Setup) -> Loaded:
    """Loads the model; ranks above 0 then serve rank 0 and end with it."""
    torch.set_num_threads(setup.n_threads)
    how = {"tp_plan": "auto"} if setup.n_ranks > 1 else {}
    dtype = getattr(torch, setup.form)
    whole = Whole(AutoModelForCausalLM.from_pretrained(setup.model, dtype=dtype, **how))
    return whole if setup.n_ranks == 1 else Ranks(whole)


class Whole:
    def __init__(self, model: Any) -> None:
        self.model = model
        # The default configuration of calls.
        model.generation_config = greedy(1)

    @torch.inference_mode()
    def answer(self, prompts: Sequence[Sequence[int]], n_new: int) -> Measurement:
        longest = max(len(prompt) for prompt in prompts)
        ids = torch.full((len(prompts), longest), PAD_ID)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        clock = Clock()
        started = time.perf_counter()
        output = self.model.generate(
            ids,
            attention_mask=mask,
            generation_config=greedy(n_new),
            logits_processor=LogitsProcessorList([clock]),
        )
        total_s = time.perf_counter() - started
        return Measurement(output[:, longest:].tolist(), clock.first_s - started, total_s)

    @torch.inference_mode()
    def nll(self, tokens: Sequence[int]) -> float:
        ids = torch.tensor(tokens)
        logits = self.model(ids[None, :-1]).logits[0]
        return F.cross_entropy(logits.float(), ids[1:]).item()


class Ranks:
    """Rank 0 of several ranks, which repeats each call on all ranks."""

    def __init__(self, whole: Whole) -> None:
        self.whole = whole
        while dist.get_rank() > 0:
            call: list[Any] = [None]
            dist.broadcast_object_list(call)
            if call[0] is None:
                raise SystemExit(0)
            name, arguments = call[0]
            getattr(whole, name)(*arguments)
        atexit.register(dist.broadcast_object_list, [None])

    def answer(self, prompts: Sequence[Sequence[int]], n_new: int) -> Measurement:
        dist.broadcast_object_list([("answer", (prompts, n_new))])
        return self.whole.answer(prompts, n_new)

    def nll(self, tokens: Sequence[int]) -> float:
        dist.broadcast_object_list([("nll", (tokens,))])
        return self.whole.nll(tokens)


def greedy(n_new: int) -> Any:
    """Replaces the model's own configuration, which may sample and stops at end-of-text."""
    make: Any = GenerationConfig  # untyped in transformers
    return make(max_new_tokens=n_new, do_sample=False, pad_token_id=PAD_ID)
