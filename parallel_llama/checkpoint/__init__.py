"""Reads checkpoints of any layout, or random weights, as the tensors of one rank.

No other package opens torch's own files.
"""

from parallel_llama.checkpoint.checkpoint import Checkpoint
from parallel_llama.checkpoint.file_manifest import require_whole
from parallel_llama.checkpoint.meta_folder import meta_vocab_size
from parallel_llama.checkpoint.random_weights import random_checkpoint
from parallel_llama.checkpoint.reading import load, open_checkpoint

__all__ = [
    "Checkpoint",
    "load",
    "meta_vocab_size",
    "open_checkpoint",
    "random_checkpoint",
    "require_whole",
]
