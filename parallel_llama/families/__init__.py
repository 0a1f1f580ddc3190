"""The supported model families, each a `Family` record, and the weights of a model."""

from collections.abc import Iterator, Mapping
from functools import lru_cache

from parallel_llama.families.arcee import ARCEE, NEMOTRON
from parallel_llama.families.cohere import COHERE, COHERE2
from parallel_llama.families.exaone4 import EXAONE4
from parallel_llama.families.falcon import FALCON, PALM
from parallel_llama.families.family import Family
from parallel_llama.families.gemma import GEMMA, GEMMA2, GEMMA3
from parallel_llama.families.glm import CHATGLM, GLM, GLM4
from parallel_llama.families.glm_moe import GLM4_MOE
from parallel_llama.families.gpt_oss import GPT_OSS
from parallel_llama.families.granite import GRANITE, GRANITE4
from parallel_llama.families.internlm2 import INTERNLM2
from parallel_llama.families.llama import LLAMA, MINISTRAL3, MISTRAL, MIXTRAL
from parallel_llama.families.llama4 import LLAMA4
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.families.names import Layout
from parallel_llama.families.olmo import OLMO2, OLMO3
from parallel_llama.families.phi import PHI3
from parallel_llama.families.qwen import QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE
from parallel_llama.families.seed_oss import SEED_OSS
from parallel_llama.families.smollm3 import SMOLLM3
from parallel_llama.families.stablelm import STABLELM
from parallel_llama.families.starcoder2 import STARCODER2
from parallel_llama.families.stored_slices import (
    StoredSlice,
    by_head,
    interleaved,
    shared,
    transposed,
)
from parallel_llama.families.weights import (
    HEAD_NORMS,
    Param,
    layer_parameters,
    outer_parameters,
)

FAMILIES = {
    family.name: family
    for family in (
        LLAMA,
        LLAMA4,
        MISTRAL,
        MINISTRAL3,
        MIXTRAL,
        QWEN2,
        QWEN2_MOE,
        QWEN3,
        QWEN3_MOE,
        GPT_OSS,
        GEMMA,
        GEMMA2,
        GEMMA3,
        FALCON,
        PALM,
        CHATGLM,
        GLM,
        GLM4,
        GLM4_MOE,
        SMOLLM3,
        GRANITE,
        GRANITE4,
        SEED_OSS,
        ARCEE,
        NEMOTRON,
        STABLELM,
        STARCODER2,
        EXAONE4,
        OLMO2,
        OLMO3,
        COHERE,
        COHERE2,
        INTERNLM2,
        PHI3,
    )
}

# Well-known families that are not supported, by HF's model_type, and why.
_ALIBI = "its position biases (ALiBi) are not implemented"
_LEARNED = "its learned position embeddings are not implemented"
_LATENT = "its latent attention (MLA) is not implemented"
_EXPERTS = "this variant of a mixture of experts is not implemented"
_STATE = "its state-space layers (SSM) are not implemented"
_OLD_FALCON = "use the newer config.json of Falcon, which has model_type 'falcon'"
_IMAGES = "it is a model of text and images, and only text models are supported"
MISSING = {
    **dict.fromkeys(("bloom", "mpt", "baichuan"), _ALIBI),
    **dict.fromkeys(("gpt2", "gpt_bigcode", "opt"), _LEARNED),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "deepseek_v32", "minicpm3"), _LATENT),
    **dict.fromkeys(("ernie4_5_moe", "granitemoeshared"), _EXPERTS),
    **dict.fromkeys(("mamba", "mamba2", "jamba", "falcon_h1", "falcon_mamba", "zamba2"), _STATE),
    "nemotron_h": _STATE,
    **dict.fromkeys(("llava", "mllama", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"), _IMAGES),
    **dict.fromkeys(("RefinedWeb", "RefinedWebModel"), _OLD_FALCON),
    "t5": "it has an encoder, and only decoders are supported",
}

__all__ = ["FAMILIES", "MISSING", "Family", "family_of", "parameters", "stored_slices"]


def family_of(args: ModelArgs) -> Family:
    """The record of a model's family."""
    return FAMILIES[args.family]


def parameters(args: ModelArgs) -> Iterator[Param]:
    """Every weight of the model in the order of the forward pass, with the axis that is sharded."""
    first, *last = outer_parameters(args)
    yield first
    for layer in range(args.n_layers):
        yield from layer_parameters(args, layer)
    yield from last


@lru_cache(maxsize=4)
def stored_slices(args: ModelArgs, layout: Layout) -> Mapping[str, StoredSlice]:
    """Where a layout stores each weight of the model, by name. Cached: do not modify the result."""
    family = family_of(args)
    by_stored_name: dict[str, list[Param]] = {}
    for param in parameters(args):
        by_stored_name.setdefault(family.name_in(layout, param.name, args), []).append(param)
    slices: dict[str, StoredSlice] = {}
    for name, weights in by_stored_name.items():
        first, is_shared = weights[0].name, len(weights) > 1
        if ".experts." in first and layout in family.interleaved_experts:
            slices.update(interleaved(name, weights, args.n_experts))
            continue
        if ".experts." in first and layout in family.transposed_experts:
            slices.update(transposed(name, weights, args.n_experts))
            continue
        if args.qk_layer_norm and layout != "meta" and first.endswith(HEAD_NORMS):
            slices[first] = by_head(name, weights[0], args.head_dim)
            continue
        is_qkv = is_shared and ".attention." in first
        n_groups = args.n_kv_heads if is_qkv and layout in family.qkv_by_kv_head else 1
        n_slices = args.n_experts if is_shared and ".experts." in first else 1
        slices.update(shared(name, weights, n_groups, n_slices))
    return slices
