"""Scores tokens with a folder of every quantised format, and compares with the dequantised values.

    python -m launch.soak.formats [--layers N] [--ranks 1 2 3 5 7] [--formats NAME...]
                                  [--tools PYTHON]

A round is SmolLM2 in one format. `score --dtype float64 --quant none` must give the same bits on
all numbers of ranks, and differ by at most 1e-10 from transformers, which runs the dequantised
values in float64. The line has the largest difference for each number of ranks, and the perplexity
of the beginning of the README in float32, with the matrices that run as stored. The tests' writers
set some integers to fixed values, and this raises the perplexity.

Symmetric int8 scales for each token map the largest input to 127.5, and its last bit decides
whether it becomes 127 or 128. Where changed last bits have such effects, twice their effect is the
limit of the difference.

With `--tools`, published tools also write folders and dequantise them. PYTHON is the interpreter of
another virtual environment. It needs transformers, accelerate, and any of llmcompressor,
bitsandbytes, gptqmodel and autoawq.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import load_file, save_file

from launch.soak import tool_folders
from launch.soak.tally import Tally
from parallel_llama.config.layouts import input_formats, load_model_args
from parallel_llama.files.model_files import find_model

ROOT = Path(__file__).parents[2]
N_COMPARED, N_PERPLEXITY = 120, 1000  # tokens
LIMIT = 1e-10
LIMIT_S = 1800  # for a process

# Writes a folder. Returns: the expected log-probabilities of a file's tokens; for published tools,
# also those after a change of the last bits of inputs.
Writer = Callable[[Path, Path], list[list[float]]]


def main() -> int:
    """Runs the rounds. Returns: 1 if one failed, otherwise 0."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--layers", type=int, help="of the model; all by default")
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 3, 5, 7], metavar="N")
    parser.add_argument("--formats", nargs="+", metavar="NAME", help="all by default")
    parser.add_argument("--tools", metavar="PYTHON", help="also write folders with published tools")
    flags = parser.parse_args()

    tally = Tally("formats")
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        source = write_source(home, flags.layers)
        tokens, plain = write_tokens(source, home)
        print(f"perplexity without quantisation: {plain:.2f}", flush=True)
        formats = writers(source, flags.tools)
        for kind in flags.formats or formats:
            folder = home / "formats" / "model"
            folder.parent.mkdir()
            try:
                passed, figures = compare(formats[kind], folder, tokens, flags.ranks)
            except subprocess.CalledProcessError as error:
                passed, figures = False, f"exit code {error.returncode}: {error.stderr[-1500:]}"
            tally.add(passed, f"{kind}: {figures}")
            shutil.rmtree(folder.parent)
    return tally.close()


def compare(
    write: Writer, folder: Path, tokens: tuple[Path, Path], ranks: Sequence[int]
) -> tuple[bool, str]:
    """Runs the round of one format. Returns: whether it passed, and its figures."""
    expected, *changed = write(folder, tokens[0])
    found = [
        scored(folder, tokens[0], n_ranks, "--dtype=float64", "--quant=none")["logprobs"][1:]
        for n_ranks in ranks
    ]
    differences = [largest(each, expected) for each in found]
    limit = max([LIMIT, *(2 * largest(each, expected) for each in changed)])
    same = all(each == found[0] for each in found)
    figures = ", ".join(f"{each:.1e} on {n}" for n, each in zip(ranks, differences, strict=True))
    perplexity = scored(folder, tokens[1], 1, "--dtype=float32")["perplexity"]
    bits = "" if same else ", and different bits on these numbers of ranks"
    passed = same and max(differences) <= limit
    return passed, f"{figures}{bits}; perplexity {perplexity:.2f}"


def largest(one: Sequence[float], other: Sequence[float]) -> float:
    """The largest difference."""
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def write_source(home: Path, n_layers: int | None) -> Path:
    """Writes SmolLM2 as a Hugging Face folder in float32, with the first layers only."""
    folder = home / "source"
    run("reshard", "smollm2", str(folder), "--format=hf", "--tp=1", "--dtype=float32")
    config = json.loads((folder / "config.json").read_text())
    n_layers = n_layers or config["num_hidden_layers"]
    weights = {
        name: weight
        for name, weight in load_file(folder / "model.safetensors").items()
        if ".layers." not in name or int(name.split(".")[2]) < n_layers
    }
    del config["torch_dtype"]  # the folders with dequantised values are in float64
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": n_layers}))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "manifest.json").unlink()
    return folder


def write_tokens(source: Path, home: Path) -> tuple[tuple[Path, Path], float]:
    """Writes the tokens to compare, and those of the perplexity, which is returned as well."""
    text = home / "text"
    text.write_text((ROOT / "README.md").read_text()[: 4 * N_PERPLEXITY])
    tokens = json.loads(run("score", "--json", f"--model={source}", f"--text-file={text}"))[
        "tokens"
    ]
    files = home / "compared.json", home / "perplexity.json"
    for file, n_tokens in zip(files, (N_COMPARED, N_PERPLEXITY), strict=True):
        file.write_text(json.dumps(tokens[:n_tokens]))
    return files, scored(source, files[1], 1, "--dtype=float32")["perplexity"]


def writers(source: Path, tools: str | None) -> dict[str, Writer]:
    """The writer of each format: those of the tests, and those of the tools that are installed."""
    from quantised_writers import quantised_writers

    found: dict[str, Writer] = {
        kind: partial(by_tests, each) for kind, each in quantised_writers(source).items()
    }
    for tool, (_, kinds) in tool_folders.TOOLS.items():
        has_tool = [tools or "", "-c", f"import importlib.metadata as m; m.version('{tool}')"]
        if tools is None or subprocess.run(has_tool, capture_output=True).returncode:
            print(f"left out: {tool} is not installed, or --tools is missing", flush=True)
            continue
        found |= {
            f"{tool} {kind}": partial(by_tool, tools, f"{tool} {kind}", source) for kind in kinds
        }
    return found


def by_tests(write: Callable[[Path], object], folder: Path, tokens: Path) -> list[list[float]]:
    """Writes a folder with a writer of the tests, which also writes the dequantised values."""
    from packed_folders import is_projection, meant_by
    from rounded_inputs import logits_with_rounded_inputs

    write(folder)
    meant = meant_by(folder)
    files = find_model(str(folder))
    forms = {*input_formats(files, load_model_args(files)).values()}
    with safe_open(meant / "model.safetensors", "pt") as file:
        names = [key.removesuffix(".weight") for key in file.keys() if is_projection(key)]  # noqa: SIM118
    ids = json.loads(tokens.read_text())
    of_each = {name: form for form in forms for name in names}
    logits = logits_with_rounded_inputs(meant, ids, of_each)
    return [tool_folders.logprobs(logits, ids)]


def by_tool(python: str, kind: str, source: Path, folder: Path, tokens: Path) -> list[list[float]]:
    """Writes a folder with a published tool."""
    command = [python, tool_folders.__file__, kind, *map(str, (source, folder, tokens))]
    expected: list[list[float]] = json.loads(checked(command, folder.parent).splitlines()[-1])
    return expected


def scored(model: Path, tokens: Path, n_ranks: int, *flags: str) -> Mapping[str, object]:
    """What `score --json` prints."""
    files = f"--model={model}", f"--tokens-file={tokens}"
    return json.loads(run("score", "--json", f"--nproc={n_ranks}", *files, *flags))


def run(*arguments: str) -> str:
    """Runs `parallel-llama`. Returns: what it prints."""
    return checked([sys.executable, "-m", "parallel_llama", *arguments])


def checked(command: Sequence[str], cwd: Path = ROOT) -> str:
    """Runs a command in `cwd`; GPTQModel writes logs there. Raises: CalledProcessError."""
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=cwd, timeout=LIMIT_S, check=True
    )
    return done.stdout


if __name__ == "__main__":
    raise SystemExit(main())
