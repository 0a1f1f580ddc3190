"""Replicated norms that differ between the files of a Meta folder.

Meta's 70B files have them, because rounding differed between the ranks of its training. The model
uses the copy of the first file. The other copies are kept in a small file beside the weights, so
that a conversion to as many Meta files restores the copy of each file.
"""

import logging
from collections.abc import Mapping, Sequence

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from parallel_llama.checkpoint.manifest import tensor_bytes
from parallel_llama.checkpoint.torch_file import open_torch_file
from parallel_llama.errors import CheckpointError
from parallel_llama.files.bounded_files import is_file, read_bytes
from parallel_llama.files.model_files import ModelFiles

NORM_VARIANTS = "norm_variants.safetensors"
MAX_BYTES = 1 << 30

logger = logging.getLogger(__name__)


def norm_variants(files: ModelFiles) -> dict[str, list[Tensor]]:
    """The copies of norms that differ, by Meta's names, one for each file of the original folder.

    A converted folder keeps the copies of its source. Logs a warning if there are any.

    Raises: CheckpointError if a file is damaged.
    """
    variants = (differing_norms(files) if files.is_pickled else {}) or _kept(files)
    if variants:
        name, gap = max(((name, _gap(v)) for name, v in variants.items()), key=lambda item: item[1])
        logger.warning(
            "%s: %d replicated norms differ between its %d files, most of all %s, by up to %g; the "
            "first file's copies are used",
            files.path,
            len(variants),
            len(variants[name]),
            name,
            gap,
        )
    return variants


def as_bytes(variants: Mapping[str, Sequence[Tensor]]) -> bytes:
    """The content of the file NORM_VARIANTS: a tensor [n_files, dim] for each norm."""
    data: bytes = save({name: torch.stack(list(copies)) for name, copies in variants.items()})
    return data


def differing_norms(files: ModelFiles) -> dict[str, list[Tensor]]:
    """The norms that differ between the files, byte for byte, with the copy of each file."""
    states = [open_torch_file(path) for path in files.weights]
    held = sorted(set.intersection(*map(set, states)))
    norms = {
        name: [state[name].clone() for state in states]
        for name in held
        if name.endswith("norm.weight")
    }
    return {
        name: copies
        for name, copies in norms.items()
        if len({(copy.shape, copy.dtype, bytes(tensor_bytes(copy))) for copy in copies}) > 1
    }


def _kept(files: ModelFiles) -> dict[str, list[Tensor]]:
    path = files.path / NORM_VARIANTS
    if not is_file(path):
        return {}
    data = read_bytes(path, MAX_BYTES)
    try:
        stacks: dict[str, Tensor] = load(data)
    except (SafetensorError, KeyError) as error:  # KeyError: a dtype unknown to torch
        raise CheckpointError(f"{path}: damaged ({error}); fetch it again") from error
    if any(s.dim() != 2 for s in stacks.values()) or len({len(s) for s in stacks.values()}) != 1:
        raise CheckpointError(f"{path}: damaged; fetch it again")
    return {name: list(stack) for name, stack in stacks.items()}


def _gap(copies: Sequence[Tensor]) -> float:
    """The largest absolute difference from the first copy."""
    first = copies[0].double()
    return max(float((copy.double() - first).abs().max()) for copy in copies)
