"""llama-models: Meta's reference Transformer, batched like its `generate`.

All prompts begin at position 0 and are prefilled up to the length of the shortest prompt. Then
every step adds one token to each row, the next token of the prompt or a new token, until the
longest row is complete. The answer of a row is its first `n_new` new tokens. Meta's own loop cannot
be used, because it imports image libraries and needs a tokenizer of Llama 3's size.
"""

import json
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import torch
import torch.nn.functional as F
from fairscale.nn.model_parallel.initialize import initialize_model_parallel
from llama_models.llama3.args import ModelArgs
from llama_models.llama3.model import Transformer
from torch._C._distributed_c10d import HashStore

from launch.bench.engines import Measurement, Setup

VERSIONS = {package: version(package) for package in ("llama-models", "fairscale", "torch")}


class LlamaModels:
    def __init__(self, setup: Setup) -> None:
        torch.set_num_threads(setup.n_threads)
        # fairscale's layers need a group, even of one rank; this store opens no port.
        torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        initialize_model_parallel(1)
        folder = Path(setup.model)
        args = ModelArgs(
            **json.loads((folder / "params.json").read_text()),
            max_batch_size=setup.n_prompts,
            max_seq_len=setup.max_seq_len,
        )
        self.model = Transformer(args)
        weights = torch.load(folder / "consolidated.00.pth", weights_only=True, mmap=True)
        self.model.load_state_dict(weights)

    @torch.inference_mode()
    def answer(self, prompts: Sequence[Sequence[int]], n_new: int) -> Measurement:
        shortest, longest = min(map(len, prompts)), max(map(len, prompts))
        tokens = torch.zeros(len(prompts), longest + n_new, dtype=torch.int64)
        is_given = torch.zeros_like(tokens, dtype=torch.bool)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = torch.tensor(prompt)
            is_given[row, : len(prompt)] = True
        done, first_token_s = 0, 0.0
        started = time.perf_counter()
        for position in range(shortest, longest + n_new):
            logits = self.model(tokens[:, done:position], done)
            drawn = logits[:, -1].argmax(-1)
            tokens[:, position] = drawn.where(~is_given[:, position], tokens[:, position])
            done = position
            first_token_s = first_token_s or time.perf_counter() - started
        total_s = time.perf_counter() - started
        new = [tokens[row, len(p) : len(p) + n_new].tolist() for row, p in enumerate(prompts)]
        return Measurement(new, first_token_s, total_s)

    @torch.inference_mode()
    def nll(self, tokens: Sequence[int]) -> float:
        ids = torch.tensor(tokens)
        logits = self.model(ids[None, :-1], 0)[0]
        return F.cross_entropy(logits.float(), ids[1:]).item()


load = LlamaModels
