"""Reading checkpoints: Meta, HF and GGUF files, or random weights, as one rank's tensors.

The only place with HF and GGUF names and the only one that opens torch's own files.
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
