"""The families of models that run here; a new one is a record in a file of its own, named below."""

from collections.abc import Iterator

from parallel_llama.families.family import Family
from parallel_llama.families.gemma import GEMMA, GEMMA2, GEMMA3
from parallel_llama.families.llama import LLAMA
from parallel_llama.families.mistral import MISTRAL
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.families.palm import PALM
from parallel_llama.families.qwen2 import QWEN2
from parallel_llama.families.qwen3 import QWEN3
from parallel_llama.families.weights import Param, layer_parameters, outer_parameters

FAMILIES = {
    family.name: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA, GEMMA2, GEMMA3, PALM)
}

__all__ = ["FAMILIES", "Family", "family_of", "parameters"]


def family_of(args: ModelArgs) -> Family:
    """The record of a model's family."""
    return FAMILIES[args.family]


def parameters(args: ModelArgs) -> Iterator[Param]:
    """Every weight of the model in the order of the forward pass, with the axis that cuts it."""
    first, *last = outer_parameters(args)
    yield first
    for layer in range(args.n_layers):
        yield from layer_parameters(args, layer)
    yield from last
