"""Compares GGUF files that llama.cpp's own converter writes with the folders that it reads.

    python -m launch.soak.conversions LLAMA_CPP [--families NAME...]

LLAMA_CPP is a checkout of llama.cpp, or vendor/llama.cpp of the source package of llama-cpp-python.

A round is a tiny random model. On 1, 2, 3 and 5 ranks, the float64 logits of the converted file
must be those that transformers computes with the folder, and `reshard` to GGUF must write the
tensors that the converter writes. The models are those of `gguf_models`, and those of the tests of
families. A model of the latter is left out, with the reason, if the converter or this package
refuses it, or if the arguments that the file states differ from those of the folder: the converter
drops settings that an architecture has no keys for.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np

from launch.soak.tally import Tally
from parallel_llama.config.layouts import load_model_args
from parallel_llama.errors import CheckpointError, UsageError
from parallel_llama.families import FAMILIES
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.files.model_files import find_model
from parallel_llama.reshard.reshard import reshard

if TYPE_CHECKING:
    from tiny_models import TinyModel

TP_SIZES = (1, 2, 3, 5)
LIMIT = 1e-7  # headers and rotary factors are in float32
# The dtype is that of the tensors, and llama.cpp has one name for several families.
NOT_STATED = "dtype", "family"
# The converter takes the width divided by the number of heads for the size of a head.
HEADS_OF_WIDTH = "glm", "granite", "nemotron", "stablelm"


class LeftOut(Exception):
    """The file does not have the model of the folder."""


def main() -> int:
    """Runs the rounds. Returns: 1 if one failed, otherwise 0."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("llama_cpp", metavar="LLAMA_CPP", type=Path)
    parser.add_argument("--families", nargs="+", metavar="NAME", help="all by default")
    flags = parser.parse_args()

    from family_models import of_families
    from gguf_models import MODELS
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    tally, n_left_out = Tally("conversions"), 0
    with tempfile.TemporaryDirectory() as home:
        named = MODELS | {
            f"{family} {number}": tiny
            for family, models in of_families().items()
            for number, tiny in enumerate(models.values())
        }
        models = {
            Path(home, name): as_published(tiny)
            for name, tiny in named.items()
            if tiny.family in (flags.families or FAMILIES)
        }
        for folder, fault in converted(models, flags.llama_cpp):
            try:
                passed, line = compare(folder, models[folder], fault)
                tally.add(passed, f"{folder.name}: {line}")
            except LeftOut as reason:
                line = f"{folder.name}: {reason!s:.300}"
                if folder.name in MODELS:
                    tally.add(False, line)
                else:
                    n_left_out += 1
                    print(f"left out: {line}", flush=True)
    return tally.close(f"{n_left_out} left out")


def as_published(tiny: "TinyModel") -> "TinyModel":
    """The model with what the converter takes for granted: sizes, and a factor that it computes."""
    if tiny.family in HEADS_OF_WIDTH:
        return replace(tiny, dim=tiny.n_heads * tiny.head_dim)
    if tiny.family == "phi3":
        own = {key: value for key, value in tiny.rope.items() if key != "attention_factor"}
        return replace(tiny, rope=own)
    return replace(tiny, ffn_dim=4 * tiny.dim) if tiny.family == "falcon" else tiny


def converted(models: "dict[Path, TinyModel]", llama_cpp: Path) -> Iterator[tuple[Path, str]]:
    """Writes and converts folders. Yields: each folder, and the converter's error or nothing."""
    from converted_gguf import rounded
    from tiny_folder import write_tokenizer
    from tiny_models import write_hf

    lines = []
    for folder, tiny in models.items():
        config = rounded(write_hf(tiny, folder)) / "config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), **published_keys(tiny)}))
        write_tokenizer(folder)  # Gemma 3's embeddings are cut to the size of the vocabulary
        lines.append(f"{folder}\t{folder}.gguf\n")
    command = [sys.executable, str(Path(__file__).with_name("converter.py")), str(llama_cpp)]
    done = subprocess.run(
        command, input="".join(lines), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        check=True,
    )  # fmt: skip
    for folder, line in zip(models, done.stdout.splitlines(), strict=True):
        file, _, fault = line.partition("\t")
        assert file == f"{folder}.gguf"
        (folder / "tokenizer.json").unlink()
        yield folder, fault


def published_keys(tiny: "TinyModel") -> dict[str, Any]:
    """Keys of config.json that published models have and the converter reads."""
    if tiny.family == "cohere2":
        return {"rotary_pct": 1.0}
    if tiny.family == "granitemoehybrid":
        sizes = {"mamba_d_conv": 4, "mamba_d_state": 256, "mamba_n_groups": 1, "mamba_expand": 2}
        return {**sizes, "layer_types": ["attention"] * tiny.n_layers}
    return {}


def compare(folder: Path, tiny: "TinyModel", fault: str) -> tuple[bool, str]:
    """Compares a file with its folder. Returns: whether they are equal, and the differences.

    Raises: LeftOut for an error of the converter, a refused file, and a file of another model.
    """
    if fault:
        raise LeftOut(fault)
    file, written = Path(f"{folder}.gguf"), Path(f"{folder} written.gguf")
    try:
        read, stated = (load_model_args(find_model(str(path))) for path in (file, folder))
        difference = largest_difference(file, folder, tiny)
    except (UsageError, CheckpointError) as error:
        raise LeftOut(str(error)) from error
    if not difference <= LIMIT:  # also for NaN
        lost = different_arguments(read, stated)
        if lost:
            raise LeftOut(f"the file states other {', '.join(lost)}")
        return False, f"{difference:.1e}"
    form = FAMILIES[tiny.family].gguf
    if form is None or form.writes is None:
        return True, f"{difference:.1e}"
    reshard(find_model(str(folder)), written, layout="gguf", n_parts=1, dtype="float32")
    different = different_tensors(file, written)
    return not different, ", ".join([f"{difference:.1e}, written", *different])


def different_arguments(read: ModelArgs, stated: ModelArgs) -> list[str]:
    """The names of arguments that differ by more than rounding to float32."""
    pairs = {
        field.name: (getattr(read, field.name), getattr(stated, field.name))
        for field in fields(stated)
        if field.name not in NOT_STATED
    }
    return [
        name
        for name, (one, other) in pairs.items()
        if one != other and not (isinstance(one, float) and math.isclose(one, other, rel_tol=1e-6))
    ]


def largest_difference(file: Path, folder: Path, tiny: "TinyModel") -> float:
    """The largest difference between the logits of the file and of transformers."""
    from parity_steps import logits_of_models
    from thread_ranks import run_on_threads
    from transformers_oracle import reference_logits

    expected = reference_logits(folder, tiny.tokens)
    return max(
        float((logits - expected).abs().max())
        for tp_size in sorted({min(size, tiny.n_heads) for size in TP_SIZES})
        for (logits,) in run_on_threads(tp_size, logits_of_models, [(file, tiny.tokens)])
    )


def different_tensors(one: Path, other: Path) -> list[str]:
    """The names of the tensors that one file lacks, and of those with different values."""
    ours, theirs = (
        {tensor.name: tensor.data.ravel() for tensor in gguf.GGUFReader(path).tensors}
        for path in (one, other)
    )
    common = ours.keys() & theirs.keys()
    # The rotary factors of Llama 3 are computed, with other last bits.
    near = {"rope_freqs.weight": 1e-6}
    unequal = {
        name
        for name in common
        if not np.allclose(ours[name], theirs[name], rtol=near.get(name, 0.0), atol=0)
    }
    return sorted((ours.keys() ^ theirs.keys()) | unequal)


if __name__ == "__main__":
    raise SystemExit(main())
