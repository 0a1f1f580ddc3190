"""Damages model folders of every format at random, and scores tokens with them.

    python -m launch.soak.damage [--rounds 200] [--seed 1] [--formats NAME...]

A round damages one copy of a folder: a value of a JSON file, a tensor, or bytes of a file. `score`
must then end with exit code 0, 1 or 2, without a traceback. If it refuses the folder, it prints one
message, which names the folder, the file, the tensor or the setting, or says that the results are
NaN. Truncated weights files must be refused, and so must lost tensors that are neither optional nor
derived from others. Each round is a process of its own, with a limit of two minutes.
"""

import argparse
import importlib
import json
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from launch.soak.tally import Tally

LIMIT_S = 120
SLOW_TO_IMPORT = "parallel_llama.cli.score", "parallel_llama.llm"
# Errors that reading finds call a weight by its name in the model, not by that in the file.
WEIGHTS = "layers.", "norm.", "tok_embeddings.", "output."
# Values that are wrong but finite are noticed only in the results, where no weight can be named.
RESULTS = "verify the checkpoint"
VALUES = (None, True, -1, 0, 1, 3, 7, 2**40, -0.5, 1e30, "", "x", "float32", [], [1, "x"], {})


@dataclass(frozen=True)
class Damage:
    """What was done to a folder.

    Args:
        text: the damage, for the line of the round.
        named: a refusal must contain one of these words.
        must_be_refused: whether the model cannot be complete any more.
    """

    text: str
    named: tuple[str, ...]
    must_be_refused: bool = False


def main() -> int:
    """Runs the rounds of every format. Returns: 1 if one failed, otherwise 0."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=200, help="for each format")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--formats", nargs="+", metavar="NAME", help="all by default")
    flags = parser.parse_args()

    torch.set_num_threads(1)  # threads of OpenMP would not survive a fork
    for module in SLOW_TO_IMPORT:  # once, and not in each process
        importlib.import_module(module)
    tally = Tally("rounds")
    n_refused = 0
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        formats = writers(home)
        for kind in flags.formats or formats:
            good = home / "formats" / "good"
            good.parent.mkdir()
            formats[kind](good)
            require_good(good, home)
            for number in range(flags.rounds):
                seed = f"{flags.seed}/{kind}/{number}"
                folder = Path(shutil.copytree(good, home / "copy-of-the-model"))
                damage = damaged(folder, random.Random(seed))
                code, said = scored(folder, home)
                wrong = fault(code, said, damage)
                n_refused += code != 0
                tally.add(not wrong, f"{seed}: {damage.text}: exit code {code} {wrong}".strip())
                shutil.rmtree(folder)
            shutil.rmtree(good.parent)
    return tally.close(f"{n_refused} folders refused")


def writers(home: Path) -> dict[str, Callable[[Path], object]]:
    """A function for each format, which writes a folder."""
    import mxfp4_folders
    from converted_gguf import convert, rounded
    from quantised_writers import quantised_writers
    from reshard_samples import moved
    from tiny_models import TinyModel, write_hf

    source = write_hf(TinyModel(4, 2, 64, 256, ffn_dim=384, vocab_size=128), home / "hf")
    experts = TinyModel(
        4, 2, 32, 128, ffn_dim=96, family="gpt_oss",
        own={"num_local_experts": 4, "num_experts_per_tok": 2, "pad_token_id": 0},
    )  # fmt: skip

    def write_gguf(folder: Path, **options: Any) -> None:
        folder.mkdir()
        convert(rounded(source), folder / "model.gguf", **options)

    def write_mxfp4(folder: Path) -> None:
        mxfp4_folders.write_mxfp4(home, experts)[0].rename(folder)

    return {
        "hf": partial(shutil.copytree, source),
        "native": lambda folder: moved(source, folder, "native", 3),
        "meta": lambda folder: moved(source, folder, "meta", 2, dtype="float32"),
        "gguf": write_gguf,
        "gguf, Q8_0": partial(write_gguf, quantised="ffn"),
        "gguf, split": partial(write_gguf, part_tensors=6),
        "gpt-oss, MXFP4": write_mxfp4,
        **quantised_writers(source),
    }


def require_good(folder: Path, home: Path) -> None:
    """Checks that `score` accepts the folder before anything is damaged."""
    code, said = scored(folder, home)
    assert code == 0, said


def damaged(folder: Path, rng: random.Random) -> Damage:
    """Damages a file of a folder."""
    path = rng.choice(sorted(path for path in folder.iterdir() if path.is_file()))
    if path.suffix == ".json" and rng.random() < 0.8:
        return damaged_setting(path, rng)
    if path.suffix == ".safetensors" and rng.random() < 0.7:
        return damaged_tensor(path, rng)
    return damaged_bytes(path, rng)


def damaged_setting(path: Path, rng: random.Random) -> Damage:
    """Replaces or removes a random value of a JSON file, at any depth."""
    content = json.loads(path.read_text())
    parent, key = rng.choice(list(places(content)))
    if rng.random() < 0.3:
        del parent[key]
        text = f"{path.name}: no {key}"
    else:
        parent[key] = rng.choice(VALUES)
        text = f"{path.name}: {key} = {parent[key]!r}"
    path.write_text(json.dumps(content))
    named = (key,) if isinstance(key, str) else ()
    return Damage(text, (*named, path.name, path.parent.name, "vocabulary", *WEIGHTS))


def places(content: Any) -> list[tuple[Any, Any]]:
    """Each container of a JSON document with each of its keys."""
    keys = content if isinstance(content, dict) else range(len(content))
    found = [(content, key) for key in keys]
    for key in keys:
        if isinstance(content[key], dict | list):
            found += places(content[key])
    return found


def damaged_tensor(path: Path, rng: random.Random) -> Damage:
    """Removes, renames, reshapes, casts or poisons a random tensor of a safetensors file."""
    from safetensors import safe_open

    tensors = load_file(path)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    name = rng.choice(sorted(tensors))
    action = rng.choice(list(TENSOR_DAMAGES))
    lost = TENSOR_DAMAGES[action](tensors, name)
    save_file(tensors, path, metadata)
    named = name.rsplit(".", 1)[0], *WEIGHTS
    return Damage(f"{path.name}: {name} {action}", named, must_be_refused=lost)


def _remove(tensors: dict[str, Tensor], name: str) -> bool:
    del tensors[name]
    # The first two can be derived from other tensors, and the last one is optional.
    return not name.endswith(("_shape", "g_idx", "weight_format"))


def _rename(tensors: dict[str, Tensor], name: str) -> bool:
    tensors[f"{name}x"] = tensors.pop(name)
    return True


def _cut(tensors: dict[str, Tensor], name: str) -> bool:
    flat = tensors[name].reshape(-1)
    tensors[name] = flat[: max(1, len(flat) - 1)].clone()
    return tensors[name].numel() < len(flat) or tensors[name].ndim == 0


def _cast(tensors: dict[str, Tensor], name: str) -> bool:
    old = tensors[name]
    tensors[name] = old.view(torch.uint8) if old.ndim else old.to(torch.float64)
    return False


def _poison(tensors: dict[str, Tensor], name: str) -> bool:
    tensors[name].view(-1).view(torch.uint8).fill_(0xFF)
    return False


TENSOR_DAMAGES: Mapping[str, Callable[[dict[str, Tensor], str], bool]] = {
    "removed": _remove,
    "renamed": _rename,
    "cut": _cut,
    "cast": _cast,
    "filled with ones": _poison,
}


def damaged_bytes(path: Path, rng: random.Random) -> Damage:
    """Truncates a file, or changes bytes near its beginning or anywhere."""
    content = bytearray(path.read_bytes())
    if rng.random() < 0.3:
        n_bytes = rng.randrange(len(content))
        path.write_bytes(content[:n_bytes])
        return Damage(f"{path.name}: {n_bytes} bytes left", (path.name,), path.suffix != ".json")
    end = rng.choice([8, min(2000, len(content)), len(content)])
    at = [rng.randrange(end) for _ in range(rng.choice([1, 2, 8]))]
    for place in at:
        content[place] = rng.choice([0, 0x7F, 0xFF, content[place] ^ 1 << rng.randrange(8)])
    path.write_bytes(content)
    named = path.name, path.parent.name, *WEIGHTS, RESULTS
    return Damage(f"{path.name}: bytes {at} changed", named)


def scored(folder: Path, home: Path) -> tuple[int | None, str]:
    """Scores tokens in a new process. Returns: its exit code, None if it hangs, and its output."""
    tokens, log = home / "tokens.json", home / "log"
    tokens.write_text(json.dumps([1, 2, 3, 4, 5] * 4))
    process = multiprocessing.get_context("fork").Process(target=_score, args=(folder, tokens, log))
    process.start()
    process.join(LIMIT_S)
    code = process.exitcode
    process.kill()
    process.join()
    return code, log.read_text()


def _score(folder: Path, tokens: Path, log: Path) -> None:
    from parallel_llama.cli.main import main

    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    model = next(folder.glob("*.gguf"), folder)
    code = main(["score", "--model", str(model), "--tokens-file", str(tokens), "--nproc", "1"])
    sys.stdout.flush()
    os._exit(code)


def fault(code: int | None, said: str, damage: Damage) -> str:
    """Why a round failed; empty if it passed."""
    messages = [line for line in said.splitlines() if line.startswith("parallel-llama:")]
    if code not in (0, 1, 2) or "Traceback" in said:
        return f"with a traceback or a signal: {said[-1500:]}"
    if code == 0:
        return "although the folder is incomplete" if damage.must_be_refused else ""
    if len(messages) != 1:
        return f"with {len(messages)} messages: {said[-1500:]}"
    if not any(word in messages[0] for word in damage.named):
        return f"without a name: {messages[0]}"
    return ""


if __name__ == "__main__":
    raise SystemExit(main())
