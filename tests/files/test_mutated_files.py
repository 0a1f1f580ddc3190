"""A damaged file of any kind in a model folder ends in an exit code and one line.

The mutants are the same in every run. Most change bytes near the ends of a file, where headers and
directories are.
"""

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checkpoint_samples import write_safetensors
from model_folders import TINY
from safetensors.torch import load_file
from tiny_models import write_hf, write_meta

from parallel_llama.cli.main import main

N_MUTANTS = 40
KINDS = {
    "config.json": "hf",
    "model.safetensors": "hf",
    "model.safetensors.index.json": "indexed",
    "pytorch_model.bin": "bin",
    "pytorch_model.bin.index.json": "bin of 2 files",
    "params.json": "meta",
    "consolidated.01.pth": "meta",
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("folders")
    hf = write_hf(TINY, home / "hf")
    weights = load_file(hf / "model.safetensors")
    for name in ("indexed", "bin", "bin of 2 files"):
        (home / name).mkdir()
        shutil.copy(hf / "config.json", home / name)
    write_safetensors(home / "indexed", weights, 2)
    torch.save(weights, home / "bin" / "pytorch_model.bin")
    halves = {f"part-{n}.bin": list(weights)[n::2] for n in range(2)}
    for file, names in halves.items():
        torch.save({name: weights[name] for name in names}, home / "bin of 2 files" / file)
    index = {"weight_map": {name: file for file, names in halves.items() for name in names}}
    (home / "bin of 2 files" / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    write_meta(TINY, hf, home / "meta", 2)
    (home / "prompts.jsonl").write_text('{"tokens": [2, 3]}')
    return home


def mutants(whole: bytes, seed: str) -> Iterator[bytes]:
    rng = random.Random(seed)
    for _ in range(N_MUTANTS):
        data = bytearray(whole)
        for _ in range(rng.choice((1, 1, 3))):
            depth = min(int(rng.expovariate(1 / 400)), len(data) - 1)
            at = rng.choice((depth, len(data) - 1 - depth, rng.randrange(len(data))))
            change = rng.randrange(4)
            if change == 0:
                data[at] ^= 1 << rng.randrange(8)
            elif change == 1:
                data[at : at + 8] = rng.choice((b"\xff", b"\0", b"9", b"[")) * 8
            elif change == 2:
                del data[at : at + rng.choice((1, 40))]
            else:
                data[at:at] = data[at : at + rng.choice((1, 40))]
        yield bytes(data)


@pytest.mark.parametrize("file", KINDS)
def test_a_mutant_is_read_or_refused_in_one_line(folders, capsys, file):
    folder = folders / KINDS[file]
    whole = (folder / file).read_bytes()
    codes: set[int] = set()
    for data in mutants(whole, file):
        (folder / file).write_bytes(data)
        codes.update(outcomes(folder, capsys))
    assert {0, 1, 2} >= codes >= {1, 2}
    (folder / file).write_bytes(whole)
    assert outcomes(folder, capsys) == [0, 0, 0]


def outcomes(folder: Path, capsys: pytest.CaptureFixture[str]) -> list[int]:
    model, prompts = str(folder), str(folder.parent / "prompts.jsonl")
    generate = ["generate", "--model", model, "--prompts", prompts, "--max-tokens=1", "--json"]
    return [
        held(argv, capsys)
        for argv in (["plan", "--model", model], ["verify", model, "--json"], generate)
    ]


def held(argv: list[str], capsys: pytest.CaptureFixture[str]) -> int:
    """Runs a command, checks its output, and returns its exit code."""
    code = main(argv)
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    said = [line for line in err.splitlines() if line.startswith("parallel-llama:")]
    if argv[0] == "verify":
        assert (code, said) == (1 - json.loads(out)["ok"], [])
    elif code:
        assert len(said) == 1 and len(said[0]) < 4000
    return code
