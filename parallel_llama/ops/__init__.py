"""The operators of the model: torch's, and faster ones where a device has them.

A model is given one set of operators when it is loaded, calls them as `ops.rms_norm(..)`, and
never asks which device it is on. torch's are always there, and what all others are compared with.
"""

from parallel_llama.ops.choice import choose_ops
from parallel_llama.ops.cpu.replay import NotRecorded, Recording
from parallel_llama.ops.cpu_ops import CPUOps
from parallel_llama.ops.decode_batch import DecodeBatch, DecodeRoom, DecodeRows
from parallel_llama.ops.noise import Noise
from parallel_llama.ops.paged_queries import HeadMap, PagedQueries
from parallel_llama.ops.query_chunk import QueryChunk
from parallel_llama.ops.routes import Routes
from parallel_llama.ops.scores import Scores
from parallel_llama.ops.torch_ops import TorchOps

__all__ = [
    "CPUOps",
    "DecodeBatch",
    "DecodeRoom",
    "DecodeRows",
    "HeadMap",
    "Noise",
    "NotRecorded",
    "PagedQueries",
    "QueryChunk",
    "Recording",
    "Routes",
    "Scores",
    "TorchOps",
    "choose_ops",
]
