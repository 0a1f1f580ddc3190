"""Flags: what may be given, what it means, and how a command line becomes checked values.

A verb's table of `Flag`s is the one home of its names, defaults, limits and help. The text of a
flag is never parsed as Python, repeats stay in order, and a value may begin with a dash. Nothing
here starts work or knows what a verb does.
"""

import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallel_llama.bounded_files import is_folder, is_there
from parallel_llama.cli.json_text import parse_json
from parallel_llama.errors import UsageError
from parallel_llama.fields import did_you_mean
from parallel_llama.parallel.launch import MAX_RANKS

LARGEST = 2**63 - 1
GIB = 1 << 30

# What stands for stdin in the place of a prompt or a file, as in other programs.
STDIN = "-"

Parse = Callable[[str], Any]


@dataclass(frozen=True)
class Flag:
    """One flag of a verb.

    `parse` turns its text into a value that JSON can carry, and raises ValueError saying what is
    allowed; a flag without one is a switch, given as --name or --noname. A repeatable flag's value
    is the list of all that were given.
    """

    name: str
    help: str
    parse: Parse | None = None
    metavar: str = ""
    default: Any = None
    default_text: str = ""
    repeatable: bool = False

    @property
    def key(self) -> str:
        return self.name.replace("-", "_")

    @property
    def initial(self) -> Any:
        if self.repeatable:
            return []
        return False if self.parse is None else self.default


@dataclass(frozen=True)
class Verb:
    """A command: its flags in the order of its help, and the function that prepares its job.

    `positionals` are given by their place and not by name, all of them.
    """

    name: str
    help: str
    usage: str
    flags: tuple[Flag, ...]
    example: str
    prepare: Callable[..., Any]
    positionals: tuple[Flag, ...] = ()


class HelpRequested(Exception):
    """The command line asks for help, not for work."""


def parse_flags(verb: Verb, argv: Sequence[str]) -> dict[str, Any]:
    """The value of every flag of a verb, given or default, by its name with underscores.

    Raises: UsageError for an unknown, repeated or incomplete flag, a value that is not allowed, or
    an argument that is no flag; HelpRequested for -h or --help where a flag may stand.
    """
    values = {flag.key: flag.initial for flag in verb.flags}
    seen: set[str] = set()
    for flag, text in _pairs(verb, argv):
        if flag.key in seen and not flag.repeatable:
            raise UsageError(f"--{flag.name} is given twice; give it once")
        seen.add(flag.key)
        value = _value(verb, flag, text)
        if flag.repeatable:
            values[flag.key].append(value)
        else:
            values[flag.key] = value
    for flag in verb.positionals:
        if flag.key not in seen:
            raise UsageError(f"{verb.name} needs {flag.name.upper()}: {verb.name} {verb.usage}")
    return values


def _pairs(verb: Verb, argv: Sequence[str]) -> Iterator[tuple[Flag, str]]:
    """Each flag of the command line with its text; a switch's text is 'true' or 'false'."""
    words = iter(argv)
    places = iter(verb.positionals)
    for word in words:
        if word in ("-h", "--help"):
            raise HelpRequested(verb.name)
        if not word.startswith("-"):
            if (positional := next(places, None)) is not None:
                yield positional, word
                continue
            raise UsageError(f"{verb.name}: unexpected argument {shown(word)}; {_where(verb)}")
        name, equals, text = word.partition("=")
        flag, negated = _find(verb, name)
        if flag.parse is None:
            if equals:
                raise UsageError(f"--{flag.name} is a switch and takes no value; write {name}")
            yield flag, "false" if negated else "true"
        elif equals:
            yield flag, text
        else:
            following = next(words, None)
            if following is None:
                raise UsageError(f"--{flag.name} needs a value: --{flag.name} {flag.metavar}")
            yield flag, following


def _find(verb: Verb, word: str) -> tuple[Flag, bool]:
    flags = {f"--{flag.name}": flag for flag in verb.flags}
    negations = {
        f"--{prefix}{flag.name}": flag
        for flag in verb.flags
        if flag.parse is None
        for prefix in ("no", "no-")
    }
    name = word.replace("_", "-")
    if name in flags:
        return flags[name], False
    if name in negations:
        return negations[name], True
    raise UsageError(
        f"{verb.name}: unknown flag {shown(word)}{did_you_mean(name, flags)} "
        f"(parallel-llama {verb.name} --help lists all)"
    )


def _where(verb: Verb) -> str:
    if any(flag.name == "prompt" for flag in verb.flags):
        return "a prompt goes after --prompt, in quotes"
    return f"parallel-llama {verb.name} --help lists the flags"


def _value(verb: Verb, flag: Flag, text: str) -> Any:
    if flag.parse is None:
        return text == "true"
    try:
        return flag.parse(text)
    except ValueError as error:
        name = f"--{flag.name}" if flag in verb.flags else flag.name.upper()
        raise UsageError(f"{name} {shown(text)}: {error}") from None


def shown(text: str, limit: int = 60) -> str:
    """A person's text in a message: quoted, without control characters, cut where it is long."""
    return ascii(text) if len(text) <= limit else ascii(text[:limit]) + "..."


def plain_text(text: str) -> str:
    """Any text that is UTF-8, the empty one included."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("not UTF-8 text; give it in a file instead") from None
    return text


def filled_text(text: str) -> str:
    """Text that is not empty."""
    if not text:
        raise ValueError("empty; give at least one character")
    return plain_text(text)


def whole(low: int, high: int = LARGEST) -> Parse:
    """Parser of a decimal integer in [low, high]."""
    allowed = f"a whole number from {low}" + (f" to {high}" if high < LARGEST else "")

    def parse(text: str) -> int:
        if not re.fullmatch(r"[+-]?[0-9]{1,19}", text) or not low <= int(text) <= high:
            raise ValueError(f"not {allowed}")
        return int(text)

    return parse


def number(low: float, high: float = math.inf, above: bool = False) -> Parse:
    """Parser of a finite number in [low, high], or (low, high] where it must lie above."""
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


def byte_size(text: str) -> int:
    """Bytes, given as a number of them or in a unit: 2GB, 512MiB.

    >>> byte_size("2GB"), byte_size("0.5 KiB"), byte_size("4096")
    (2000000000, 512, 4096)
    """
    match = re.fullmatch(r"([0-9]{1,19}(?:\.[0-9]{1,9})?) ?(?:([KMGT]?)(I?)B)?", text.upper())
    n_bytes = 0
    if match and (match[2] or not match[3]):
        power = " KMGT".index(match[2] or " ")
        n_bytes = int(float(match[1]) * (1024 if match[3] else 1000) ** power)
    if not 1 <= n_bytes <= LARGEST:
        raise ValueError("not a size such as 2GB, 512MiB or a number of bytes")
    return n_bytes


def one_of(*choices: str) -> Parse:
    """Parser of one of a few words."""

    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"not one of {', '.join(choices)}{did_you_mean(text, choices)}")
        return text

    return parse


def memory_sizes(text: str) -> int | list[int]:
    """Bytes that every rank has, or what each has where several sizes or SIZExN are given.

    >>> memory_sizes("80") == 80 * GIB, memory_sizes("1KiB,2kBx2")
    (True, [1024, 2000, 2000])
    """
    pieces = text.lower().split(",")
    sizes: list[int] = []
    try:
        if len(pieces) == 1 and "x" not in pieces[0]:
            return _memory_size(pieces[0])
        for piece in pieces:
            size, times, count = piece.partition("x")
            sizes += [_memory_size(size)] * (whole(1, MAX_RANKS)(count.strip()) if times else 1)
            if len(sizes) > MAX_RANKS:
                raise ValueError
    except ValueError:
        raise ValueError(
            f"not sizes such as 80 (GiB), 24GB, 80,80,40 or 80x8, for at most {MAX_RANKS} ranks"
        ) from None
    return sizes


def _memory_size(text: str) -> int:
    """Bytes, given in GiB or in a unit."""
    text = text.strip()
    if text.endswith("b"):
        return byte_size(text)
    return int(number(1 / GIB, LARGEST / GIB)(text) * GIB)


def count_or_range(text: str) -> list[int]:
    """One count N as [N], or A-B as [A, B]."""
    match = re.fullmatch(r"([0-9]{1,6})(?:-([0-9]{1,6}))?", text)
    bounds = [int(group) for group in match.groups() if group] if match else []
    if not bounds or not 1 <= bounds[0] <= bounds[-1] <= MAX_RANKS:
        raise ValueError(f"not a number of ranks from 1 to {MAX_RANKS}, or a range such as 1-16")
    return bounds


def input_file(text: str) -> str:
    """The path of something that is there to be read, a file or a pipe."""
    path = Path(filled_text(text))
    if not is_there(path):
        raise ValueError("no such file")
    if is_folder(path):
        raise ValueError("a folder; give a file in it")
    return text


def input_file_or_stdin(text: str) -> str:
    """The same, or - for stdin."""
    return text if text == STDIN else input_file(text)


def template_var(text: str) -> list[Any]:
    """A variable of a chat template as NAME=VALUE: JSON where it is any, else text.

    >>> template_var("enable_thinking=false"), template_var("date=1 May")
    (['enable_thinking', False], ['date', '1 May'])
    """
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise ValueError("not NAME=VALUE, such as enable_thinking=false")
    try:
        return [name, parse_json(value)]
    except ValueError:
        return [name, plain_text(value)]


MODEL = Flag(
    "model",
    "a HF folder, a Meta folder, a .gguf file, or the name of a model",
    filled_text,
    "PATH_OR_NAME",
    "smollm2",
)
NPROC = Flag(
    "nproc",
    "ranks to start on this machine; under torchrun, their number is torchrun's",
    whole(1, MAX_RANKS),
    "N",
    default_text="1",
)
DTYPE = Flag(
    "dtype",
    "float32, bfloat16, float16 or float64",
    one_of("float32", "bfloat16", "float16", "float64"),
    "DTYPE",
    default_text="bfloat16 on CUDA, float32 on the CPU",
)
DEVICE = Flag(
    "device", "auto, cpu or cuda", one_of("auto", "cpu", "cuda"), "DEVICE", default="auto"
)
MAX_SEQ_LEN = Flag(
    "max-seq-len",
    "tokens that a sequence may have, prompt and answer together",
    whole(1),
    "N",
    default_text="the model's context",
)
KV_CACHE_BYTES = Flag(
    "kv-cache-bytes",
    "memory for keys and values on each rank, such as 2GB or 512MiB",
    byte_size,
    "SIZE",
    default_text="what is free, at most 2 GiB on the CPU",
)
BLOCK_SIZE = Flag(
    "block-size", "tokens in a block of the KV cache", whole(1, 4096), "N", default_text="16"
)
RANDOM_WEIGHTS = Flag(
    "random-weights",
    "random weights instead of a checkpoint, for a model that is only a configuration",
    whole(0),
    "SEED",
)
SEED = Flag(
    "seed",
    "of all random draws; the same seed gives the same text",
    whole(0),
    "N",
    default_text="a new one, which is shown",
)
TIMEOUT = Flag(
    "timeout",
    "how long a rank waits for another before it is called late",
    number(0, 1e6, above=True),
    "SECONDS",
    default_text="30 in a step, 60 at the start",
)
TEMPLATE_VAR = Flag(
    "template-var",
    "a variable for the chat template, such as enable_thinking=false",
    template_var,
    "NAME=VALUE",
    repeatable=True,
)
VERIFY = Flag("verify", "check every file of the model against its manifest before it is read")
JSON = Flag("json", "JSON on stdout and nothing else there")


def help_text(verb: Verb) -> str:
    """A verb's help: its usage, flags with their defaults, and one example."""
    rows = [(flag.name.upper(), flag.help) for flag in verb.positionals]
    rows += [(_left(flag), _right(flag)) for flag in verb.flags]
    rows.append(("-h, --help", "this text"))
    return "\n".join(
        [
            f"usage: parallel-llama {verb.name} {verb.usage}",
            "",
            verb.help,
            "",
            *columns(rows),
            "",
            "example:",
            f"  {verb.example}",
        ]
    )


def columns(rows: Sequence[tuple[str, str]]) -> list[str]:
    """Lines with an indented left column, as wide as its widest entry, and a right one."""
    width = max(len(left) for left, _ in rows)
    return [f"  {left.ljust(width)}  {right}" for left, right in rows]


def _left(flag: Flag) -> str:
    return f"--{flag.name} {flag.metavar}".rstrip()


def _right(flag: Flag) -> str:
    notes = []
    if flag.repeatable:
        notes.append("repeatable")
    default = flag.default_text or ("" if flag.default is None else str(flag.default))
    if default:
        notes.append(f"default: {default}")
    return flag.help + (f" ({'; '.join(notes)})" if notes else "")


def warn(message: str) -> None:
    """One line to the person at the terminal, beside whatever stdout carries."""
    print(f"parallel-llama: {message}", file=sys.stderr, flush=True)
