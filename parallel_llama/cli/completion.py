"""`completion`: prints a shell completion script for commands, flags and values.

The script is generated from the flags of the commands of this version.
"""

import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from parallel_llama.cli.arguments import Flag, Flags, Job, Verb
from parallel_llama.cli.main import VERBS, load_verb
from parallel_llama.cli.model import MODEL
from parallel_llama.cli.parsers import OneOf, one_of
from parallel_llama.files.model_files import model_names

_FILE = re.compile("FILE|DIR|PATH")  # metavars of flags for files and folders
_HELP = "show the flags and their defaults"

_BASH = """\
# Completion of parallel-llama in bash; for this shell: source <(parallel-llama completion bash)
_parallel_llama() {
    local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} words= files=
    local models="@MODELS@"
    # bash splits --flag=value into three words.
    if [[ $cur == = ]]; then
        cur=
    elif [[ $prev == = ]]; then
        prev=${COMP_WORDS[COMP_CWORD-2]}
    fi
    [[ $prev == --* ]] && prev=${prev//_/-}
    if ((COMP_CWORD == 1)); then
        words="@VERBS@ --help --version"
    else
        case ${COMP_WORDS[1]} in
@CASES@
        esac
    fi
    mapfile -t COMPREPLY < <(
        compgen -W "$words" -- "$cur"
        [[ -z $files ]] || compgen -f -- "$cur"
    )
    [[ -z $files ]] || compopt -o filenames
}
complete -F _parallel_llama parallel-llama
"""

_ZSH = """\
#compdef parallel-llama
# Completion of parallel-llama in zsh; for this shell: source <(parallel-llama completion zsh)
_parallel_llama_models() {
    _alternative 'models:model:(@MODELS@)' 'files:file:_files'
}
_parallel_llama() {
    if ((CURRENT == 2)); then
        local -a commands=(
            @VERBS@
        )
        _describe command commands
        return
    fi
    local command=$words[2]
    shift words
    ((CURRENT--))
    case $command in
@CASES@
    esac
}
if [[ $funcstack[1] == _parallel_llama ]]; then
    _parallel_llama "$@"
else
    compdef _parallel_llama parallel-llama
fi
"""

_FISH = """\
# Completion of parallel-llama in fish; for this shell: parallel-llama completion fish | source
function __parallel_llama_command
    set -l words (commandline -opc)
    test "$words[2]" = "$argv[1]"
end
complete -c parallel-llama -f
complete -c parallel-llama -n '__parallel_llama_command ""' -s h -l help
complete -c parallel-llama -n '__parallel_llama_command ""' -s V -l version
@LINES@
"""


def prepare(flags: Flags) -> Job:
    """Returns the job that prints the script."""
    write = SCRIPTS[flags[SHELL]]

    def run() -> int:
        print(write([load_verb(name) for name in VERBS]), end="")
        return 0

    return Job(run)


def bash_script(verbs: Sequence[Verb]) -> str:
    script = _BASH.replace("@MODELS@", " ".join(model_names()))
    script = script.replace("@VERBS@", " ".join(verb.name for verb in verbs))
    return script.replace("@CASES@", "\n".join(line for verb in verbs for line in _bash_case(verb)))


def _bash_case(verb: Verb) -> Iterator[str]:
    """The completions after the previous word: a flag's value, else a flag or an argument."""
    names: dict[str, list[str]] = {}
    for flag in verb.flags:
        if flag.parse is not None:
            names.setdefault(_bash_value(flag), []).extend(_flag_words(flag))
    yield f"        {verb.name})"
    yield "            case $prev in"
    for value, words in names.items():
        yield f"                {'|'.join(words)}) {value} ;;"
    yield "                *)"
    flags = " ".join(name for flag in verb.flags for name in _flag_words(flag))
    yield f'                    words="{flags} --help"'
    for flag in _positionals(verb)[:1]:
        yield f"                    [[ $cur == -* ]] || {{ words=; {_bash_value(flag)}; }}"
    yield "                    ;;"
    yield "            esac"
    yield "            ;;"


def _bash_value(flag: Flag[Any]) -> str:
    if flag.name == MODEL.name:
        return "words=$models; files=yes"
    if choices := _choices(flag):
        return f'words="{" ".join(choices)}"'
    return "files=yes" if _is_file(flag) else "return"


def zsh_script(verbs: Sequence[Verb]) -> str:
    descriptions = [shlex.quote(f"{verb.name}:{verb.help}") for verb in verbs]
    script = _ZSH.replace("@MODELS@", " ".join(model_names()))
    script = script.replace("@VERBS@", f"\n{' ' * 12}".join(descriptions))
    return script.replace("@CASES@", "\n".join(map(_zsh_case, verbs)))


def _zsh_case(verb: Verb) -> str:
    specs = ["'(- *)'{-h,--help}" + shlex.quote(f"[{_HELP}]")]
    for flag in verb.flags:
        excluded = f"({' '.join(_flag_words(flag))})" if flag.aliases else ""
        text = re.sub(r"([][\\])", r"\\\1", flag.help)
        for name in _flag_words(flag):
            spec = f"{excluded}{'*' * flag.repeatable}{name}"
            spec += f"[{text}]" if flag.parse is None else f"=[{text}]{_zsh_value(flag)}"
            specs.append(shlex.quote(spec))
    specs += [shlex.quote(_zsh_value(flag)) for flag in _positionals(verb)]
    arguments = f" \\\n{' ' * 16}".join(["_arguments", *specs])
    return f"        {verb.name})\n            {arguments}\n            ;;"


def _zsh_value(flag: Flag[Any]) -> str:
    name = (flag.metavar or flag.name.upper()).replace(":", r"\:")
    if flag.name == MODEL.name:
        return f":{name}:_parallel_llama_models"
    if choices := _choices(flag):
        return f":{name}:({' '.join(choices)})"
    return f":{name}:{'_files' if _is_file(flag) else ' '}"


def fish_script(verbs: Sequence[Verb]) -> str:
    lines = []
    for verb in verbs:
        start = "complete -c parallel-llama -n '__parallel_llama_command \"\"'"
        lines.append(f"{start} -a {verb.name} -d {shlex.quote(verb.help)}")
        start = f"complete -c parallel-llama -n '__parallel_llama_command {verb.name}'"
        lines.append(f"{start} -s h -l help -d {shlex.quote(_HELP)}")
        for flag in verb.flags:
            value = "" if flag.parse is None else f" -r{_fish_value(flag)}"
            text = shlex.quote(flag.help)
            lines += [f"{start} -l {name}{value} -d {text}" for name in flag.names]
        lines += [f"{start}{_fish_value(flag)}" for flag in _positionals(verb)[:1]]
    return _FISH.replace("@LINES@", "\n".join(lines))


def _fish_value(flag: Flag[Any]) -> str:
    choices = model_names() if flag.name == MODEL.name else _choices(flag)
    words = f" -a '{' '.join(choices)}'" if choices else ""
    return (" -F" if _is_file(flag) else " -f") + words


def _flag_words(flag: Flag[Any]) -> list[str]:
    return [f"--{name}" for name in flag.names]


def _positionals(verb: Verb) -> list[Flag[Any]]:
    return [*verb.positionals, *([verb.argument] if verb.argument else [])]


def _choices(flag: Flag[Any]) -> tuple[str, ...]:
    return flag.parse.choices if isinstance(flag.parse, OneOf) else ()


def _is_file(flag: Flag[Any]) -> bool:
    """Whether the value is a path: its metavar says so, or it is a positional without choices."""
    return bool(_FILE.search(flag.metavar)) or not (flag.metavar or _choices(flag))


SCRIPTS: dict[str, Callable[[Sequence[Verb]], str]] = {
    "bash": bash_script,
    "zsh": zsh_script,
    "fish": fish_script,
}
SHELL: Flag[str] = Flag(
    "shell", "bash, zsh or fish; the script's first lines say how to load it", one_of(*SCRIPTS)
)

VERB = Verb(
    "completion",
    "Prints a shell completion script.",
    "bash|zsh|fish",
    (),
    "parallel-llama completion bash",
    prepare,
    (SHELL,),
)
