"""transformers: `generate` on one batch, padded on the left, with its own cache."""

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
)

from launch.bench.engines import Answer, Run, Setup

VERSIONS = {"transformers": transformers.__version__, "torch": torch.__version__}
PAD_ID = 0  # any id: the attention mask hides it


class Clock(LogitsProcessor):
    """Notes when the first step's logits are there."""

    def __init__(self) -> None:
        self.first_s = 0.0

    def __call__(self, _: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.first_s = self.first_s or time.perf_counter()
        return scores


def load(setup: Setup) -> Answer:
    torch.set_num_threads(setup.n_threads)
    model = AutoModelForCausalLM.from_pretrained(setup.model, dtype=torch.float32)
    # What a call leaves unsaid is taken from here.
    model.generation_config = greedy(1)
    return partial(answer, model)


@torch.inference_mode()
def answer(model: Any, prompts: Sequence[Sequence[int]], n_new: int) -> Run:
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.full((len(prompts), longest), PAD_ID)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    clock = Clock()
    started = time.perf_counter()
    output = model.generate(
        ids,
        attention_mask=mask,
        generation_config=greedy(n_new),
        logits_processor=LogitsProcessorList([clock]),
    )
    total_s = time.perf_counter() - started
    return Run(output[:, longest:].tolist(), clock.first_s - started, total_s)


def greedy(n_new: int) -> Any:
    """In place of the model's own, which may sample, and ends at its end-of-text token."""
    make: Any = GenerationConfig  # untyped in transformers
    return make(max_new_tokens=n_new, do_sample=False, pad_token_id=PAD_ID)
