"""Compares the memory that `plan` states for each rank with the peak of that rank in a run.

    python -m launch.soak.memory [--families NAME...] [--formats NAME...] [--nproc 1 2 3]
    python -m launch.soak.memory --model PATH [--formats NAME...] [--nproc 1 2 3]

Without --model, one random model of every family that transformers implements is written, with the
tokenizer of SmolLM2. The peak of a rank is its largest resident memory while it reads a prompt of
about 1,000 tokens and draws a few more. A run fails if `plan` and the peak of a rank differ by more
than --limit percent. `plan` counts neither the memory in which quantised weights are packed, so the
peak while the model is loaded is printed separately, nor the memory of the compiler, so each model
runs once before it is measured. Linux only.
"""

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from launch.soak.linked_hosts import run
from launch.soak.tally import Tally

if TYPE_CHECKING:
    from tiny_models import TinyModel

FORMATS = {
    "float32": ("--dtype=float32", "--quant=none"),
    "bfloat16": ("--dtype=bfloat16", "--quant=none"),
    "int8": ("--dtype=float32", "--quant=int8"),
    "int4": ("--dtype=float32", "--quant=int4"),
}
TOKENIZER = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
CONTEXT = "--max-seq-len=1024"
PROMPT = "The sky is blue and the sea is deep. " * 98  # ten tokens of SmolLM2 each
HEAD_DIM, WIDER = 128, 32  # the random models have heads of HEAD_DIM and WIDER x as many channels
LOADED = "KV cache:"  # begins a line of rank 0 after all ranks have loaded the model
RESET_PEAK = "5"  # see proc_pid_clear_refs(5)
_CHANNELS = "_intermediate_size", "intermediate_size_mlp"
_POLL_S = 0.02


def main(argv: Sequence[str] | None = None) -> int:
    """Returns: 1 if a plan was wrong by more than the limit, otherwise 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="instead of random models")
    parser.add_argument("--families", nargs="+", help="transformers' names; all by default")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--nproc", nargs="+", type=int, default=[1], help="numbers of ranks")
    parser.add_argument("--limit", type=float, default=5.0, help="in percent of the peak")
    flags = parser.parse_args(argv)
    tally, ratios = Tally("runs"), []
    with tempfile.TemporaryDirectory() as folder:
        given = iter([(flags.model, flags.model)])
        models = given if flags.model else random_models(Path(folder), flags.families)
        for name, model in models:
            for form, n_ranks in product(flags.formats, flags.nproc):
                own = f"--model={model}", CONTEXT, *FORMATS[form]
                planned = plan(own, n_ranks)
                peaks_of(own, n_ranks)  # compiles kernels
                loading, peaks = peaks_of(own, n_ranks)
                of_ranks = [says / peak for says, peak in zip(planned, peaks, strict=True)]
                ratios += of_ranks
                tally.add(
                    all(abs(ratio - 1) <= flags.limit / 100 for ratio in of_ranks),
                    f"{name}, {form}, tp {n_ranks}: peaks of "
                    f"{', '.join(f'{peak >> 20}' for peak in peaks)} MiB, planned "
                    f"{', '.join(f'{ratio:.3f}' for ratio in of_ranks)} of it; while loading "
                    f"{', '.join(f'{peak >> 20}' for peak in loading)} MiB",
                )
    n_close = sum(abs(ratio - 1) <= 0.03 for ratio in ratios)
    return tally.close(
        f"planned {min(ratios):.3f} to {max(ratios):.3f} of the peak",
        f"{n_close} of {len(ratios)} ranks within 3 %",
    )


def random_models(folder: Path, families: Sequence[str] | None) -> Iterator[tuple[str, Path]]:
    """Name and folder of one model of each family; the folder is deleted with the next model."""
    from family_models import of_families
    from tiny_models import write_hf

    tokenizer = folder / "smollm2"
    parallel_llama("reshard", "smollm2", str(tokenizer), "--format=hf", "--tp=1", "--quant=none")
    by_family = of_families()
    for family in families or by_family:
        name, tiny = next(iter(by_family[family].items()))
        path = write_hf(widened(tiny), folder / "model")
        for file in TOKENIZER:
            if (tokenizer / file).exists():
                shutil.copy(tokenizer / file, path)
        yield f"{family} ({name})", path
        shutil.rmtree(path)


def widened(tiny: "TinyModel") -> "TinyModel":
    """A model of the same family as `tiny` with the vocabulary of SmolLM2 and more channels."""
    from random_models import resized_rope

    channels = {key: n * WIDER for key, n in tiny.own.items() if key.endswith(_CHANNELS)}
    return replace(
        tiny,
        head_dim=HEAD_DIM,
        dim=tiny.n_heads * HEAD_DIM,
        ffn_dim=tiny.ffn_dim * WIDER,
        vocab_size=49152,
        max_seq_len=2048,
        own={**tiny.own, **channels},
        rope=resized_rope(tiny, HEAD_DIM),
    )


def plan(own: Sequence[str], n_ranks: int) -> list[int]:
    """The bytes that each rank needs according to `plan`."""
    said = json.loads(parallel_llama("plan", f"--nproc={n_ranks}", "--json", *own))
    return [rank["needed_bytes"] for rank in said["ranks"]]


def peaks_of(own: Sequence[str], n_ranks: int) -> tuple[list[int], list[int]]:
    """The peak resident memory of each rank of `generate` in bytes.

    Returns: the peaks until the model is loaded, and the peaks afterwards.
    """
    verb = "generate", f"--prompt={PROMPT}", "--max-tokens=16", *own
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    launched = {
        "WORLD_SIZE": str(n_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    loading: list[int] = []
    with ExitStack() as stack, ThreadPoolExecutor(n_ranks) as pool:
        processes = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-m", "parallel_llama", *verb],
                    env={**os.environ, **launched, "RANK": str(rank)},
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL if rank else subprocess.PIPE,
                    text=True,
                )
            )
            for rank in range(n_ranks)
        ]
        peaks = pool.map(peak_of, processes)
        assert processes[0].stderr is not None
        for line in processes[0].stderr:
            if line.startswith(LOADED):
                loading = [resident_peak(process.pid) for process in processes]
                for process in processes:
                    Path(f"/proc/{process.pid}/clear_refs").write_text(RESET_PEAK)
        afterwards = list(peaks)
    if any(process.returncode for process in processes) or not loading:
        raise RuntimeError(f"generate {' '.join(own)} failed on {n_ranks} ranks")
    return loading, afterwards


def peak_of(process: subprocess.Popen[str]) -> int:
    """The peak of a process when it ends; it ends by itself."""
    peak = 0
    while process.poll() is None:
        peak = resident_peak(process.pid) or peak
        time.sleep(_POLL_S)
    return peak


def resident_peak(pid: int) -> int:
    """The peak resident memory of a process in bytes; 0 if it has ended."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:")), 0)


def parallel_llama(*verb: str) -> str:
    """The output of a command."""
    return run(sys.executable, "-m", "parallel_llama", *verb)


if __name__ == "__main__":
    raise SystemExit(main())
