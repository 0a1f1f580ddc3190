"""The supported model families, each a `Family` record, and the weights of a model."""

from collections.abc import Iterator, Mapping
from functools import lru_cache

from parallel_llama.families.falcon import FALCON, PALM
from parallel_llama.families.family import Family
from parallel_llama.families.gemma import GEMMA, GEMMA2, GEMMA3
from parallel_llama.families.glm import CHATGLM, GLM, GLM4
from parallel_llama.families.llama import LLAMA, MISTRAL, MIXTRAL
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.families.names import Layout
from parallel_llama.families.places import Place, shared
from parallel_llama.families.qwen import QWEN2, QWEN3, QWEN3_MOE
from parallel_llama.families.weights import Param, layer_parameters, outer_parameters

FAMILIES = {
    family.name: family
    for family in (
        LLAMA,
        MISTRAL,
        MIXTRAL,
        QWEN2,
        QWEN3,
        QWEN3_MOE,
        GEMMA,
        GEMMA2,
        GEMMA3,
        FALCON,
        PALM,
        GLM,
        GLM4,
        CHATGLM,
    )
}

__all__ = ["FAMILIES", "Family", "family_of", "parameters", "stored_places"]


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
def stored_places(args: ModelArgs, layout: Layout) -> Mapping[str, Place]:
    """Where a layout stores each weight of the model, by the weight's name. Do not change it."""
    family = family_of(args)
    stored: dict[str, list[Param]] = {}
    for param in parameters(args):
        stored.setdefault(family.name_in(layout, param.name, args), []).append(param)
    found: dict[str, Place] = {}
    for name, weights in stored.items():
        first, is_shared = weights[0].name, len(weights) > 1
        is_qkv = is_shared and ".attention." in first
        n_groups = args.n_kv_heads if is_qkv and layout in family.qkv_by_kv_head else 1
        n_slices = args.n_experts if is_shared and ".experts." in first else 1
        found.update(shared(name, weights, n_groups, n_slices))
    return found
