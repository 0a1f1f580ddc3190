"""Parsers of flag values.

Each converts a text to a value or raises a ValueError, which is printed after the flag and its
text. No text is parsed as Python.
"""

import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from parallel_llama.dtypes import DTYPES, KV_DTYPES, QUANTS
from parallel_llama.files.bounded_files import has_short_name, is_folder, is_input, is_there
from parallel_llama.files.fields import did_you_mean, parse_json
from parallel_llama.files.partial_output import growing_file
from parallel_llama.memory import GIB
from parallel_llama.parallel.launch import MAX_RANKS

MAX_INT = 2**63 - 1
_ORIGIN = re.compile(
    r"(?!http://.*:80$)(?!https://.*:443$)"
    r"[a-z][a-z0-9+.-]*://([a-z0-9_.-]+|\[[0-9a-f:]+\])(:[0-9]{1,5})?"
)
GB = 10**9

# A number, the prefix of its unit, and the rest of the unit.
_SIZE = re.compile(
    r"((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?) ?(?:([kmgt]?)((?:(?<=[kmgt])i)?b?))?",
    re.ASCII | re.IGNORECASE,
)

_COUNT_AND_GPU = re.compile(r"(?:([0-9]{1,4}) ?[xX] ?)?(.+)")


class GPU(NamedTuple):
    """A GPU: bytes of memory, and its rates, which may not be known.

    Args:
        bandwidth: bytes per second that it reads.
        flops: operations per second of dense bfloat16 products.
        link: bytes per second that it receives from other GPUs of its host.
    """

    memory: int
    bandwidth: int | None = None
    flops: int | None = None
    link: int | None = None


# Memory of NVIDIA GPUs in GiB, as CUDA reports it: less than their nominal memory, because of error
# correction and the driver. The other figures are from NVIDIA's data sheets (H100, H200, A100: SXM)
# and, for RTX cards, from the white papers of the architectures: bandwidth in GB/s; TFLOP/s of
# bfloat16 products with float32 sums, without sparsity (a T4 has no bfloat16); GB/s of NVLink or
# else of PCI Express x16, in one direction.
KNOWN_GPUS: Mapping[str, tuple[float, int, float | None, float]] = {
    "B200": (178.3, 8000, 2250, 900),
    "H200": (139.7, 4800, 989, 450),
    "H100": (79.1, 3350, 989, 450),
    "A100-80": (79.1, 2039, 312, 300),
    "A100-40": (39.3, 1555, 312, 300),
    "L40S": (44.3, 864, 362, 32),
    "A40": (44.3, 696, 149.7, 32),
    "A6000": (47.4, 768, 154.8, 32),
    "RTX5090": (31.3, 1792, 209.5, 64),
    "RTX4090": (23.6, 1008, 165.2, 32),
    "RTX3090": (23.6, 936, 71, 32),
    "L4": (22.0, 300, 121, 32),
    "T4": (14.5, 320, None, 16),
}

# The prompt or file name that means stdin.
STDIN = "-"


def plain_text(text: str) -> str:
    """Any UTF-8 text; it may be empty."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("not UTF-8 text; give it in a file instead") from None
    return text


def filled_text(text: str) -> str:
    """UTF-8 text that is not empty."""
    if not text:
        raise ValueError("empty; give at least one character")
    return plain_text(text)


def origin(text: str) -> str:
    """A web page's origin as browsers send it, or * for any origin."""
    if text != "*" and not _ORIGIN.fullmatch(text):
        raise ValueError(
            "not an origin; give SCHEME://HOST or SCHEME://HOST:PORT in lower case, without a path "
            "or a default port, or * for all"
        )
    return text


def whole(low: int, high: int = MAX_INT) -> Callable[[str], int]:
    """Parser of a decimal integer in [low, high]."""
    allowed = f"a whole number from {low}" + (f" to {high}" if high < MAX_INT else "")

    def parse(text: str) -> int:
        if not re.fullmatch(r"[+-]?[0-9]{1,19}", text) or not low <= int(text) <= high:
            raise ValueError(f"not {allowed}")
        return int(text)

    return parse


def number(low: float, high: float = math.inf, above: bool = False) -> Callable[[str], float]:
    """Parser of a finite number in [low, high], or in (low, high] with `above`."""
    allowed = f"a number above {low:g}" if above else f"a number from {low:g}"
    if high < math.inf:
        allowed += f", at most {high:g}" if above else f" to {high:g}"

    def parse(text: str) -> float:
        if not re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", text):
            raise ValueError(f"not {allowed}")
        value = float(text)
        if not math.isfinite(value) or value < low or value > high or (above and value == low):
            raise ValueError(f"not {allowed}")
        return value

    return parse


def token_count(low: int, high: int = MAX_INT) -> Callable[[str], int]:
    """Parser of a number of tokens in [low, high]; the suffix k means 1,024 and M means 1,048,576.

    >>> token_count(1)("32k"), token_count(1)("1M"), token_count(1)("4096")
    (32768, 1048576, 4096)
    """
    parse_digits = whole(low, high)

    def parse(text: str) -> int:
        match = re.fullmatch(r"([0-9]{1,13})([kKmM])", text)
        if match:
            text = str(int(match[1]) * {"k": 1 << 10, "m": 1 << 20}[match[2].lower()])
        try:
            return parse_digits(text)
        except ValueError as error:
            raise ValueError(f"{error}; k is 1,024 and M is 1,048,576, as in 32k") from None

    return parse


def byte_size(text: str, default_unit: int = 1) -> int:
    """Bytes, given as a number with a unit, or without a unit in multiples of `default_unit` bytes.

    G and GiB are 2**30 bytes; GB is 10**9 bytes.

    >>> byte_size("2GB"), byte_size("0.5 KiB"), byte_size("4k"), byte_size("4096")
    (2000000000, 512, 4096, 4096)
    """
    match = _SIZE.fullmatch(text.strip())
    value, prefix, suffix = match.groups() if match else ("0", "", "")
    if prefix:
        base = 1000 if suffix.lower() == "b" else 1024
        default_unit = base ** (1 + "kmgt".index(prefix.lower()))
    elif suffix:
        default_unit = 1
    n_bytes = float(value) * default_unit
    if not 1 <= n_bytes < MAX_INT:
        unit = "GiB" if default_unit == GIB else "bytes"
        raise ValueError(f"not a size such as 2GB, 512MiB, 24G (24GiB) or a number of {unit}")
    return int(n_bytes)


@dataclass(frozen=True)
class OneOf:
    """Parser of one of a few words.

    Args:
        synonyms: other programs' words for a choice.
        hint: converts an invalid word in lower case to a remedy, or "".
    """

    choices: tuple[str, ...]
    synonyms: Mapping[str, str] = field(default_factory=dict)
    hint: Callable[[str], str] = lambda _: ""

    def __call__(self, text: str) -> str:
        word = text.lower()
        if text in self.choices:
            return text
        if word in self.synonyms:
            return self.synonyms[word]
        hint = self.hint(word)
        end = f"; {hint}" if hint else did_you_mean(text, self.choices)
        raise ValueError(f"not one of {', '.join(self.choices)}{end}")


def one_of(*choices: str) -> OneOf:
    """Parser of one of a few words, without synonyms."""
    return OneOf(choices)


# The names of torch, vLLM and safetensors.
_DTYPE_SYNONYMS = {
    "bf16": "bfloat16", "fp16": "float16", "f16": "float16", "half": "float16", "fp32": "float32",
    "f32": "float32", "float": "float32", "fp64": "float64", "f64": "float64", "double": "float64",
}  # fmt: skip
_GGUF_FORMAT = re.compile(r"i?q[1-8](_[0-9a-z]+)+")
_GGUF_HINT = (
    "that is a format of GGUF files, which run as they are stored; --quant int8 or int4 quantises "
    "any model"
)


def _dtype_hint(word: str) -> str:
    if word == "auto":
        return "omit --dtype for the default"
    if _GGUF_FORMAT.fullmatch(word):
        return _GGUF_HINT
    return f"--quant {word} quantises the weights" if word in ("int8", "int4", "fp8") else ""


def _quant_hint(word: str) -> str:
    if _GGUF_FORMAT.fullmatch(word):
        return _GGUF_HINT
    if word in ("gptq", "awq", "gptq_marlin", "awq_marlin"):
        return "a folder in that format runs as it is stored; omit --quant"
    dtype = word if word in DTYPES else _DTYPE_SYNONYMS.get(word)
    return f"that is a dtype: --dtype {dtype}" if dtype else ""


def _device_hint(word: str) -> str:
    if re.fullmatch(r"(cuda|gpu):[0-9]+", word):
        return "--device cuda uses the GPUs listed in CUDA_VISIBLE_DEVICES"
    return ""


dtype_name = OneOf(DTYPES, _DTYPE_SYNONYMS, _dtype_hint)
quant_name = OneOf(QUANTS, {"fp8_e4m3": "fp8"}, _quant_hint)
kv_dtype_name = OneOf(KV_DTYPES, {"bf16": "bfloat16", "fp8_e4m3": "fp8"})
device_name = OneOf(("auto", "cpu", "cuda"), {"gpu": "cuda"}, _device_hint)


def memory_sizes(text: str) -> int | list[int]:
    """Bytes of each rank: one number for all ranks, or a list if several sizes or SIZExN are given.

    >>> memory_sizes("80") == 80 * GIB, memory_sizes("1KiB,2kBx2")
    (True, [1024, 2000, 2000])
    """
    pieces = text.lower().split(",")
    sizes: list[int] = []
    try:
        if len(pieces) == 1 and "x" not in pieces[0]:
            return byte_size(pieces[0], GIB)
        for piece in pieces:
            size, times, count = piece.partition("x")
            n_ranks = whole(1, MAX_RANKS)(count.strip()) if times else 1
            sizes += [byte_size(size, GIB)] * n_ranks
            if len(sizes) > MAX_RANKS:
                raise ValueError
    except ValueError:
        raise ValueError(
            f"not sizes such as 80 (GiB), 24GB, 24G, 80,80,40 or 80x8, for at most {MAX_RANKS} "
            "ranks; names of GPUs are only for plan --gpus"
        ) from None
    return sizes


def rank_sizes(text: str) -> list[int]:
    """Bytes of each rank, as in `memory_sizes`; one size is for a single rank."""
    sizes = memory_sizes(text)
    return [sizes] if isinstance(sizes, int) else sizes


def gpu_list(text: str) -> GPU | list[GPU]:
    """One GPU, for any number of ranks, or a list if counts or several GPUs are given.

    A GPU is given by a name of `KNOWN_GPUS`, or by its memory in GiB or another unit.

    >>> [gpu.memory // GIB for gpu in gpu_list("2x80,40")], gpu_list("H200").bandwidth
    ([80, 80, 40], 4800000000000)
    """
    matches = [_COUNT_AND_GPU.fullmatch(piece.strip()) for piece in text.split(",")]
    gpus: list[GPU] = []
    try:
        for match in matches:
            if match is None:
                raise ValueError
            n_gpus, gpu = whole(1, MAX_RANKS)(match[1] or "1"), _gpu(match[2])
            if len(matches) == 1 and not match[1]:
                return gpu
            gpus += [gpu] * n_gpus
            if len(gpus) > MAX_RANKS:
                raise ValueError
    except ValueError:
        raise ValueError(
            f"not GPUs such as 8xH200, 3x24 (GiB) or 2x80,1x40, at most {MAX_RANKS}; the names "
            f"are {', '.join(KNOWN_GPUS)}"
        ) from None
    return gpus


def _gpu(text: str) -> GPU:
    for name, (gib, gb_per_s, tflops, link) in KNOWN_GPUS.items():
        if _plain_name(name) == _plain_name(text):
            flops = None if tflops is None else int(tflops * 10**12)
            return GPU(int(gib * GIB), gb_per_s * GB, flops, int(link * GB))
    return GPU(byte_size(text, GIB))


def bandwidths(text: str) -> int | list[int]:
    """Bytes per second that ranks read, in GB/s or another unit: one for all, or one per rank.

    >>> bandwidths("3350") == 3350 * GB, bandwidths("25GiB,12.5G")[1] == 12.5 * GIB
    (True, True)
    """
    pieces = text.split(",")
    try:
        if len(pieces) > MAX_RANKS:
            raise ValueError
        rates = [byte_size(piece, GB) for piece in pieces]
    except ValueError:
        raise ValueError(
            f"not bandwidths such as 3350 (GB/s), 25GiB or 25,25,12, for at most {MAX_RANKS} ranks"
        ) from None
    return rates[0] if len(rates) == 1 else rates


def _plain_name(name: str) -> str:
    """A GPU's name in lower case, without spaces, hyphens and the brand."""
    joined = re.sub(r"[ _-]", "", name.lower())
    return re.sub(r"^(nvidia)?(geforce)?(rtx)?|gb$", "", joined)


def count_or_range(text: str) -> list[int]:
    """A count N as [N], or a range A-B as [A, B]."""
    match = re.fullmatch(r"([0-9]{1,6})(?:-([0-9]{1,6}))?", text)
    bounds = [int(group) for group in match.groups() if group] if match else []
    if not bounds or not 1 <= bounds[0] <= bounds[-1] <= MAX_RANKS:
        raise ValueError(f"not a number of ranks from 1 to {MAX_RANKS}, or a range such as 1-16")
    return bounds


def one_of_many(what: str, letter: str, max_count: int) -> Callable[[str], tuple[int, int]]:
    """A parser of a number and a count, such as a rank and the number of ranks.

    >>> one_of_many("rank", "R", MAX_RANKS)("0/8")
    (0, 8)
    """

    def parse(text: str) -> tuple[int, int]:
        match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text)
        number, count = (int(group) for group in match.groups()) if match else (0, 0)
        if not number < count <= max_count:
            raise ValueError(
                f"not {letter}/N, {what} {letter} of N such as 0/8; {letter} is 0 to N-1, N at "
                f"most {max_count}"
            )
        return number, count

    return parse


def input_file(text: str) -> str:
    """The path of a regular file, or of a pipe of the shell (/dev/fd/N)."""
    path = Path(filled_text(text))
    if not is_there(path):
        raise ValueError("no such file")
    if is_folder(path):
        raise ValueError("a folder; give a file in it")
    if not is_input(path):
        raise ValueError("not a regular file; give one, or a pipe such as <(command)")
    return text


def input_files(text: str) -> list[str]:
    """The paths of regular files, separated by commas."""
    return [input_file(path) for path in text.split(",")]


def path_in_folder(text: str) -> Path:
    """The path of a file in a folder that exists, whether or not the file does."""
    path = Path(text)
    if is_folder(path):
        raise ValueError("a folder; give the name of a file in it")
    if not is_folder(path.parent):
        raise ValueError(f"there is no folder {path.parent}; create it first")
    return path


def output_file(text: str) -> Path:
    """The path of a file that is replaced atomically, by renaming a file beside it."""
    path = path_in_folder(filled_text(text))
    if not has_short_name(growing_file(path)):
        raise ValueError("the name is too long; give a shorter one")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise ValueError(f"the folder {path.parent} is not writable; give another one")
    return path


def input_file_or_stdin(text: str) -> str:
    """The path of an input file, or - for stdin."""
    return text if text == STDIN else input_file(text)


def adapter_folder(text: str) -> tuple[str, str]:
    """The name and the folder of an adapter, as NAME=FOLDER.

    >>> adapter_folder("sql=adapters/sql")
    ('sql', 'adapters/sql')
    """
    name, _, folder = text.partition("=")
    if not name or not folder:
        raise ValueError("not NAME=FOLDER, such as sql=adapters/sql")
    return plain_text(name), plain_text(folder)


def template_var(text: str) -> tuple[str, Any]:
    """A chat template variable as NAME=VALUE; the value is JSON, or text if it is not valid JSON.

    >>> template_var("enable_thinking=false"), template_var("date=1 May")
    (('enable_thinking', False), ('date', '1 May'))
    """
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise ValueError("not NAME=VALUE, such as enable_thinking=false")
    try:
        return name, parse_json(value)
    except ValueError:
        return name, plain_text(value)
