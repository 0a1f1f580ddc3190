"""Whole models on the kernels give the logits that they give on torch's operators."""

from dataclasses import replace

import pytest
import torch
from parity_steps import logits_in_pieces
from tiny_models import TINY_MODELS, TinyModel, write_hf

pytest.importorskip("triton", reason="kernels for CUDA devices need triton")

from parallel_llama.checkpoint.checkpoint import random_checkpoint
from parallel_llama.checkpoint.reading import open_checkpoint
from parallel_llama.config.layouts import load_model_args
from parallel_llama.dtypes import Precision
from parallel_llama.engine.model_runner import ModelRunner
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.files.model_files import find_model
from parallel_llama.ops import Scores, TorchOps
from parallel_llama.ops.cuda_ops import CUDAOps
from parallel_llama.parallel.collectives import Solo
from parallel_llama.plan import make_plan

pytestmark = pytest.mark.slow

N_TOKENS = 19
# One model for every path through the operators.
MODELS = [
    "10/2 all biases, tied",
    "9/3 llama3, wide heads",
    "8/2 qwen3",
    "8/2 glm",
    "8/4 gemma2",
    "8/2 mixtral",
    "8/2 falcon, two norms, biases",
    "7/1 gpt_oss",
]
GPT_OSS = TinyModel(
    7,
    1,
    8,
    44,
    ffn_dim=35,
    family="gpt_oss",
    own={
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "sliding_window": 7,
        "layer_types": ["sliding_attention"],
        "swiglu_limit": 0.5,
        "pad_token_id": 0,
    },
)


QUANTISED = ModelArgs(
    dim=96, n_layers=1, n_heads=3, n_kv_heads=1, head_dim=32, ffn_dim=160, vocab_size=101
)


@pytest.mark.parametrize("name", MODELS)
def test_logits_match_torch_operators(device, tmp_path, name):
    """Models have one layer, because the interpreter takes seconds per layer."""
    tiny = {**TINY_MODELS, "7/1 gpt_oss": GPT_OSS}[name]
    own = dict(tiny.own)
    if len(tiny.own.get("layer_types", ())) > 1:
        own["layer_types"] = ["full_attention"]
    files = find_model(str(write_hf(replace(tiny, n_layers=1, own=own), tmp_path)))
    args = load_model_args(files)
    ours, theirs = both(args, open_checkpoint(files, args), Precision.plain("float32"), device)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("quant", ["int8", "int4", "fp8"])
def test_quantised_logits_match_torch_operators(device, quant):
    precision = Precision.on("cuda", "float32", quant)
    ours, theirs = both(QUANTISED, random_checkpoint(QUANTISED, 1), precision, device)
    # An input halfway between two integers may round to either, as on a CPU.
    assert (ours - theirs).norm() < (1e-5 if quant == "fp8" else 0.02) * theirs.norm()


def both(args, checkpoint, precision, device):
    """A prompt of more rows than kernels multiply, and two steps of one row."""
    tokens = torch.randint(args.vocab_size, (N_TOKENS,)).tolist()
    scores = Scores(args.attention_scale, args.attention_soft_cap, args.sink_logits)
    logits = []
    for ops in (CUDAOps(scores), TorchOps(scores)):
        runner = ModelRunner.load(
            args,
            checkpoint,
            make_plan(args, 1, quant_group_size=precision.quant_group_size),
            Solo(),
            precision=precision,
            device=device,
            ops=ops,
        )
        runner.reserve([1] * len(runner.kv_groups), N_TOKENS)
        logits.append(logits_in_pieces(runner, tokens, [N_TOKENS - 2, N_TOKENS - 1]))
    return logits
