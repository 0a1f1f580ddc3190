"""Random weights for the shape of a model, with the same values for every number of ranks.

Values are drawn in fixed chunks of rows (or columns, for weights cut by columns), each with a key
of its own, so a rank draws little more than its own shard and never a whole tensor. Values differ
between kinds of devices.
"""

import hashlib

import torch
from torch import Tensor

from parallel_llama.checkpoint.byte_ranges import sliced_shape
from parallel_llama.checkpoint.checkpoint import Checkpoint
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.families.weights import Param
from parallel_llama.ops.formats import torch_dtype

CHUNK = 64  # rows or columns per key; changing it changes the weights of every seed

STD = 0.02  # of matrices and biases; activations keep their scale over many layers
NORM_STD = 0.1  # of norms, around 1

_CPU = torch.device("cpu")


class RandomCheckpoint(Checkpoint):
    """Weights drawn from a seed on a device."""

    def __init__(self, args: ModelArgs, seed: int, device: torch.device) -> None:
        super().__init__(args, "half")
        self.seed, self._device = seed, device
        self._dtype = torch_dtype(args.dtype)

    def check(self, args: ModelArgs) -> None:
        """Nothing to compare: random weights fit every model."""

    def _stored(self, param: Param, rows: range) -> Tensor:
        out = torch.empty(sliced_shape(param, rows), dtype=self._dtype, device=self._device)
        for number in range(rows.start // CHUNK, -(-rows.stop // CHUNK)):
            start = number * CHUNK
            chunk = range(start, min(start + CHUNK, param.shape[param.dim]))
            wanted = range(max(rows.start, chunk.start), min(rows.stop, chunk.stop))
            if wanted:
                drawn = self._drawn(param, number, chunk)
                target = out.narrow(param.dim, wanted.start - rows.start, len(wanted))
                target.copy_(drawn.narrow(param.dim, wanted.start - chunk.start, len(wanted)))
        return out

    def _drawn(self, param: Param, number: int, chunk: range) -> Tensor:
        key = hashlib.blake2b(f"{self.seed} {param.name} {number}".encode(), digest_size=8)
        generator = torch.Generator(self._device)
        generator.manual_seed(int.from_bytes(key.digest(), "little") >> 1)
        values = torch.empty(sliced_shape(param, chunk), dtype=torch.float32, device=self._device)
        values.normal_(generator=generator)
        if param.name.endswith("norm.weight"):
            return values.mul_(NORM_STD).add_(1 - self.args.norm_offset)
        return values.mul_(STD)


def random_checkpoint(args: ModelArgs, seed: int, device: torch.device = _CPU) -> RandomCheckpoint:
    """Random weights for the shape of a model, in `args.dtype`, drawn on a device."""
    return RandomCheckpoint(args, seed, device)
