"""Measures the load of one rank's shard: bytes read, and memory beyond the shard.

Each rank is measured in a separate process, which runs this file.
"""

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
import torch
from checkpoint_samples import hf_name
from commands import ROOT, run_python
from safetensors.torch import save_file

from parallel_llama.checkpoint import reading
from parallel_llama.checkpoint.reading import load, open_checkpoint
from parallel_llama.dtypes import Precision
from parallel_llama.engine.free_memory import return_freed_memory
from parallel_llama.families import parameters
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.files.model_files import ModelFiles
from parallel_llama.memory import values_by_form, weight_bytes
from parallel_llama.plan import make_plan


@dataclass(frozen=True)
class Cost:
    """Bytes read by system calls, peak memory beyond that at the start, and seconds."""

    shard_bytes: int
    read_bytes: int
    peak_bytes: int
    elapsed_s: float


def write_random_folder(folder: Path, args: ModelArgs, dtype: torch.dtype) -> int:
    """An HF folder of one file with random weights; returns its size."""
    tensors = {
        hf_name(param.name): torch.empty(param.shape, dtype=dtype).uniform_(-1, 1)
        for param in parameters(args)
    }
    save_file(tensors, folder / "model.safetensors")
    return (folder / "model.safetensors").stat().st_size


def cost_of_rank(
    folder: Path, args: ModelArgs, tp_size: int, rank: int, piece_values: int | None = None
) -> Cost:
    """Loads the shard of a rank in bfloat16 in a new process."""
    task = json.dumps([str(folder), asdict(args), tp_size, rank, piece_values])
    done = run_python(__file__, task, env=os.environ | {"PYTHONPATH": str(ROOT)})
    if done.returncode:
        raise RuntimeError(done.stderr)
    return Cost(**json.loads(done.stdout))


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key))


def _read_so_far() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def _measure(folder: str, args: ModelArgs, tp_size: int, rank: int) -> Cost:
    path = Path(folder)
    files = ModelFiles("hf", path, path, (path / "model.safetensors",), None)
    shard = make_plan(args, tp_size).shards[rank]
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    return_freed_memory()
    held, read, start = _status("VmRSS"), _read_so_far(), time.monotonic()
    checkpoint = open_checkpoint(files, args)
    precision = Precision.plain("bfloat16")
    tensors = list(load(checkpoint, args, shard, precision, torch.device("cpu")))
    elapsed_s = time.monotonic() - start
    read, peak = _read_so_far() - read, _status("VmHWM") - held
    assert len(tensors) == len(list(parameters(args)))
    return Cost(weight_bytes(shard, values_by_form(args, precision)), read, peak, elapsed_s)


def main() -> None:
    folder, args, tp_size, rank, piece_values = json.loads(sys.argv[1])
    if piece_values is not None:
        reading.PIECE_VALUES = piece_values
    print(json.dumps(asdict(_measure(folder, msgspec.convert(args, ModelArgs), tp_size, rank))))


if __name__ == "__main__":
    main()
