"""Runners on torch's meta device: the steps of models of any size, without memory or a GPU."""

from dataclasses import replace

import torch

from parallel_llama.engine.model_runner import ModelRunner
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.model.layers import Backend
from parallel_llama.model.moe import MixtureOfExperts
from parallel_llama.model.transformer import Transformer
from parallel_llama.ops import Scores, TorchOps
from parallel_llama.parallel.collectives import Slice, Solo
from parallel_llama.plan import make_plan


def meta_runner(args: ModelArgs, ops: type[TorchOps], tp_size: int = 1) -> ModelRunner:
    """A runner of rank 0, in bfloat16; its collectives do nothing."""
    plan, comm = make_plan(args, tp_size), Solo() if tp_size == 1 else Slice(tp_size)
    scores = Scores(args.attention_scale, args.attention_soft_cap, args.sink_logits)
    model = Transformer(args, plan.shards[0], Backend(comm, ops(scores), torch.bfloat16))
    for block in model.layers.values():
        if isinstance(block.feed_forward, MixtureOfExperts):
            for expert in block.feed_forward.experts.values():
                expert.fuse()
        block.fuse()
    runner = ModelRunner(args, plan, comm, model)
    runner.reserve([64] * len(runner.kv_groups), 16)
    return runner


def with_layers(args: ModelArgs, n_layers: int) -> ModelArgs:
    """The model's first layers."""
    kept = {
        name: tuple(layer for layer in getattr(args, name) if layer < n_layers)
        for name in ("full_layers", "unrotated_layers", "dense_layers")
    }
    return replace(args, n_layers=n_layers, **kept)
