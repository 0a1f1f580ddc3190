"""Flags and commands: definitions, parsing of a command line, and help texts.

Values are never parsed as Python, repeated flags keep their order, and a value may begin with a
dash.
"""

import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from parallel_llama.errors import UsageError, quoted
from parallel_llama.files.fields import did_you_mean

Value = TypeVar("Value", covariant=True)


@dataclass(frozen=True)
class Flag(Generic[Value]):
    """One flag of a command, or a positional argument.

    Args:
        parse: converts the text to a value, or raises a ValueError that says what is allowed. None
            for a switch, given as --name or --no-name. A switch that is not given is False, or
            `default` if it has a `default_text`.
        repeatable: whether the value is the list of all given values.
        aliases: names of the flag in other programs.
        subject: heading of the flag in the help; "" for the command's own heading.
    """

    name: str
    help: str
    parse: Callable[[str], Any] | None = None
    metavar: str = ""
    default: Any = None
    default_text: str = ""
    repeatable: bool = False
    aliases: tuple[str, ...] = ()
    subject: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)

    @property
    def key(self) -> str:
        return self.name.replace("-", "_")

    @property
    def initial(self) -> Any:
        if self.repeatable:
            return []
        return False if self.parse is None and not self.default_text else self.default


JSON: Flag[bool] = Flag("json", "print only JSON to stdout", subject="output")

# Flags of vLLM, llama.cpp and torchrun, and the flags here that serve the same purpose. They are
# not aliases, because their values or defaults differ.
_NAMES_ELSEWHERE = {
    "cache-type-k": "kv-cache-dtype",
    "cache-type-v": "kv-cache-dtype",
    "context": "max-seq-len",
    "ctx-size": "max-seq-len",
    "enable-lora": "adapter",
    "gpu-memory-utilization": "kv-cache-bytes",
    "lora": "adapter",
    "lora-modules": "adapter",
    "max-model-len": "max-seq-len",
    "max-new-tokens": "max-tokens",
    "max-num-seqs": "max-requests",
    "model-draft": "draft-model",
    "n-gpu-layers": "device",
    "n-predict": "max-tokens",
    "nproc-per-node": "nproc",
    "speculative-model": "draft-model",
    "tensor-split": "memory",
}


class Flags:
    """The checked values of one command line, by flag: `flags[MODEL]`."""

    def __init__(self, verb: str, values: Mapping[str, Any]) -> None:
        self.verb, self._values = verb, values

    def __getitem__(self, flag: Flag[Value]) -> Value:
        """The value on the command line, or the command's default, or the default of the flag."""
        value: Value = self._values.get(flag.name, flag.initial)
        return value

    def with_value(self, flag: Flag[Value], value: Any) -> "Flags":
        """A copy with another value of this flag."""
        return Flags(self.verb, {**self._values, flag.name: value})


@dataclass(frozen=True)
class Job:
    """A checked command.

    Args:
        run: called on each of `nproc` ranks; returns the exit code.
        interactive: whether the job handles Ctrl-C itself.
        log_dir: the parent of the folder with the ranks' stacks, made after a failure.
    """

    run: Callable[[], int]
    nproc: int = 1
    interactive: bool = False
    log_dir: str | None = None


@dataclass(frozen=True)
class Verb:
    """A command.

    Args:
        flags: in the order of the help.
        prepare: checks the flags and returns the job.
        positionals: required positional arguments.
        argument: a flag that may also be given without its name, after the positional arguments.
    """

    name: str
    help: str
    usage: str
    flags: tuple[Flag[Any], ...]
    example: str
    prepare: Callable[[Flags], Job]
    positionals: tuple[Flag[Any], ...] = ()
    argument: Flag[Any] | None = None


class HelpRequested(Exception):
    """The command line contains -h or --help."""


def parse_flags(verb: Verb, argv: Sequence[str]) -> Flags:
    """Parses a command line. Returns: the value of every flag, with defaults.

    Raises: UsageError for an unknown, repeated or incomplete flag, an invalid value, or an
    unexpected argument; HelpRequested for -h or --help where a flag is expected.
    """
    values: dict[str, Any] = {}
    for flag, name, text in _iterate_words(verb, argv):
        if flag.repeatable:
            values.setdefault(flag.name, []).append(_value(flag, name, text))
        elif flag.name in values:
            hint = f", as an argument or as --{flag.name}" if flag is verb.argument else ""
            aliases = f" (also {_with_dashes(flag.aliases)})" if flag.aliases else ""
            raise UsageError(f"--{flag.name}{aliases} is given twice; give it once{hint}")
        else:
            values[flag.name] = _value(flag, name, text)
    for flag in verb.positionals:
        if flag.name not in values:
            raise UsageError(f"{verb.name} needs {flag.name.upper()}: {verb.name} {verb.usage}")
    # Commands may give one flag different defaults: use this command's default.
    defaults = {flag.name: flag.initial for flag in verb.flags}
    return Flags(verb.name, defaults | values)


def _iterate_words(verb: Verb, argv: Sequence[str]) -> Iterator[tuple[Flag[Any], str, str]]:
    """Each flag of the command line, its name there, and its text: true or false for a switch."""
    words = iter(argv)
    positionals = iter((*verb.positionals, *([verb.argument] if verb.argument else ())))
    for word in words:
        if word in ("-h", "--help"):
            raise HelpRequested(verb.name)
        if not word.startswith("-"):
            if (positional := next(positionals, None)) is not None:
                name = positional.name
                yield positional, f"--{name}" if positional is verb.argument else name.upper(), word
                continue
            raise UsageError(f"{verb.name}: unexpected argument {quoted(word)}; {_hint(verb)}")
        name, equals, text = word.partition("=")
        flag, negated = _find(verb, name)
        name = name.replace("_", "-")
        if flag.parse is None:
            if equals:
                raise UsageError(f"--{flag.name} is a switch and takes no value; write {name}")
            yield flag, name, "false" if negated else "true"
        elif equals:
            yield flag, name, text
        else:
            following = next(words, None)
            if following is None:
                raise UsageError(f"{name} needs a value: {name} {flag.metavar}")
            yield flag, name, following


def _find(verb: Verb, word: str) -> tuple[Flag[Any], bool]:
    flags = {f"--{name}": flag for flag in verb.flags for name in flag.names}
    switches = [flag for flag in verb.flags if flag.parse is None]
    negations = {f"--{no}{flag.name}": flag for flag in switches for no in ("no", "no-")}
    name = word.replace("_", "-")
    if name in flags:
        return flags[name], False
    if name in negations:
        return negations[name], True
    elsewhere = _NAMES_ELSEWHERE.get(name.removeprefix("--"))
    if elsewhere is None:
        hint = did_you_mean(name, flags)
    else:
        hint = did_you_mean(f"--{elsewhere}", flags.keys() & {f"--{elsewhere}"})
    raise UsageError(
        f"{verb.name}: unknown flag {quoted(word)}{hint} "
        f"(parallel-llama {verb.name} --help lists all)"
    )


def _hint(verb: Verb) -> str:
    if any(flag.name == "prompt" for flag in verb.flags):
        return "a prompt goes after --prompt, in quotes"
    return f"parallel-llama {verb.name} --help lists the flags"


def _value(flag: Flag[Any], name: str, text: str) -> Any:
    if flag.parse is None:
        return text == "true"
    try:
        return flag.parse(text)
    except ValueError as error:
        raise UsageError(f"{name} {quoted(text)}: {error}") from None


def help_text(verb: Verb) -> str:
    """A command's help at the terminal's width: usage, flags by subject, and one example."""
    width = terminal_width()
    arguments = [(flag.name.upper(), flag.help) for flag in verb.positionals]
    if verb.argument:
        arguments.append((verb.argument.name.upper(), f"the same as --{verb.argument.name}"))
    own_heading = f"flags of {verb.name}"
    subjects: dict[str, list[tuple[str, str]]] = {"arguments": arguments, own_heading: []}
    for flag in verb.flags:
        subjects.setdefault(flag.subject or own_heading, []).append(
            (_left_column(flag), _right_column(flag))
        )
    subjects["help"] = [("-h, --help", "show this help")]
    left = max(len(name) for rows in subjects.values() for name, _ in rows)
    lines = [*_wrapped_usage(verb, width), "", *textwrap.wrap(verb.help, width), ""]
    for heading, rows in subjects.items():
        if rows:
            lines += [f"{heading}:", *columns(rows, width, left), ""]
    return "\n".join([*lines, "example:", *wrapped_command(verb.example, width)])


def terminal_width() -> int:
    """The variable COLUMNS, else the columns of the terminal, else 80; at least _MIN_WIDTH."""
    return max(shutil.get_terminal_size().columns, _MIN_WIDTH)


def columns(rows: Sequence[tuple[str, str]], width: int, left: int = 0) -> list[str]:
    """Lines of an indented left column and a right column.

    The right column is wrapped between words at `width` characters. The left column is as wide as
    its widest entry and at least `left`, but at most a third of the width; a wider entry is on its
    own line.
    """
    left = max(left, *(len(name) for name, _ in rows))
    left = min(left, width // 3)
    indent = " " * (left + 4)
    lines = []
    for name, text in rows:
        first = f"  {name.ljust(left)}  "
        if len(name) > left:
            lines.append(first.rstrip())
            first = indent
        lines += _wrap(text, width, first, indent)
    return lines


def wrapped_command(command: str, width: int) -> list[str]:
    """A command to copy; a command that is wider than `width` is split before flags."""
    lines = [""]
    for part in re.split(r"(?<= )(?=--)", command):
        if lines[-1] and len(lines[-1]) + len(part) + 3 > width:
            lines.append("  ")
        lines[-1] += part
    return [f"  {line}\\" for line in lines[:-1]] + [f"  {lines[-1]}"]


_MIN_WIDTH = 40


def _wrap(text: str, width: int, first: str, indent: str) -> list[str]:
    """A wrapped paragraph; flags and paths are not split."""
    return textwrap.wrap(
        text,
        width,
        initial_indent=first,
        subsequent_indent=indent,
        break_on_hyphens=False,
        break_long_words=False,
    )


def _wrapped_usage(verb: Verb, width: int) -> list[str]:
    """The usage line, wrapped, but not inside brackets."""
    first = f"usage: parallel-llama {verb.name} "
    unbroken = re.sub(r"\[[^]]*\]", lambda part: part[0].replace(" ", "\0"), verb.usage)
    return [line.replace("\0", " ") for line in _wrap(unbroken, width, first, " " * 8)]


def _left_column(flag: Flag[Any]) -> str:
    return f"--{flag.name} {flag.metavar}".rstrip()


def _with_dashes(names: Sequence[str]) -> str:
    return ", ".join(f"--{name}" for name in names)


def _right_column(flag: Flag[Any]) -> str:
    notes = []
    if flag.aliases:
        notes.append(f"also {_with_dashes(flag.aliases)}")
    if flag.repeatable:
        notes.append("repeatable")
    default = flag.default_text or ("" if flag.default is None else str(flag.default))
    if default:
        notes.append(f"default: {default}")
    return flag.help + (f" ({'; '.join(notes)})" if notes else "")


def in_flags(message: str, verb: Verb) -> str:
    """A message of the library about a setting, with flags instead of the names of settings.

    "max_seq_len=9: drop attention_sinks" becomes "--max-seq-len 9: drop --attention-sinks". A
    message that does not begin with a setting is unchanged, because it may quote the keys of a JSON
    file. Names without an underscore are also words, so they need a value: "device='cuda'".
    """
    flags = {flag.name.replace("-", "_"): flag.name for flag in verb.flags}
    if message.partition("=")[0] not in flags:
        return message

    def translate(match: re.Match[str]) -> str:
        name, has_value, value = flags.get(match[1]), match[2] is not None, match[4]
        if name is None or not (has_value or "_" in match[1]):
            return match[0]
        return f"--{name} {value}" if has_value else f"--{name}"

    return re.sub(r"\b([a-z_]+)(=('?)([^'\s:;,]*)\3)?", translate, message)


def warn(message: str) -> None:
    """Prints a line to stderr."""
    print(f"parallel-llama: {message}", file=sys.stderr, flush=True)
