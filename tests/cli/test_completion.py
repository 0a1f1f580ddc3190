"""The scripts of `completion`, run in the real shells."""

import os
import pty
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from parallel_llama.cli import main as command_line
from parallel_llama.cli.main import VERBS, load_verb
from parallel_llama.cli.parsers import OneOf

LIMIT_S = 60
SHELLS = {
    "bash": ["bash", "--norc", "--noprofile", "-i"],
    "zsh": ["zsh", "-f", "-i"],
    "fish": ["fish", "--no-config"],
}
SETUP = {"bash": "", "zsh": "bindkey -e; autoload -U compinit; compinit -u -D; "}


@pytest.fixture
def script(
    request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Path:
    """The script of a shell, in a folder with a file and a folder to complete."""
    shell = request.param
    if shutil.which(shell) is None:
        assert not os.environ.get("CI"), f"{shell} is not installed"
        pytest.skip(f"{shell} is not installed")
    assert command_line.main(["completion", shell]) == 0
    path = tmp_path / f"completion.{shell}"
    path.write_text(capsys.readouterr().out)
    (tmp_path / "my prompts.jsonl").write_text("")
    (tmp_path / "tiny-model").mkdir()
    return path


def typed(script: Path, keys: str) -> list[str]:
    """The words of a command line after keys, including Tab, were typed at a terminal."""
    shell = script.suffix[1:]
    folder = script.parent
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        SHELLS[shell],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=folder,
        env={**os.environ, "TERM": "dumb", "PS1": "$ "},
        start_new_session=True,
        preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)),
    )
    os.close(theirs)
    words, shown = folder / "words", ""
    try:
        os.write(ours, f"{SETUP[shell]}source {script.name}; echo rea''dy\n".encode())
        deadline = time.monotonic() + LIMIT_S
        sent = False
        while not words.is_file() or not words.read_text().endswith("end\n"):
            assert time.monotonic() < deadline, shown
            if select.select([ours], [], [], 0.05)[0]:
                shown += os.read(ours, 4096).decode("utf-8", "replace")
            if "ready" in shown and not sent:
                # Ctrl-A and Ctrl-E wrap the completed line in a printf that writes its words.
                os.write(ours, f"{keys}\x01printf '%s\\n' \x05 end > words\n".encode())
                sent = True
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    return words.read_text().splitlines()[:-1]


LINES = [
    ("gen\t", ["generate"]),
    ("generate --kv-cache-d\t", ["generate", "--kv-cache-dtype"]),
    ("generate --tensor\t", ["generate", "--tensor-parallel-size"]),
    ("plan --dtype bf\t", ["plan", "--dtype", "bfloat16"]),
    ("plan --dtype=float1\t", ["plan", "--dtype=float16"]),
    ("generate --prompts my\t", ["generate", "--prompts", "my prompts.jsonl"]),
    ("generate --prompt my\t", ["generate", "--prompt", "my"]),  # any text
    ("plan --model smo\t", ["plan", "--model", "smollm2"]),
    ("serve llama-3.1-4\t", ["serve", "llama-3.1-405b"]),
    ("serve tiny\t", ["serve", "tiny-model"]),
    ("reshard smollm2 tiny\t", ["reshard", "smollm2", "tiny-model"]),
    ("completion z\t", ["completion", "zsh"]),
]


@pytest.mark.parametrize("script", ["bash", "zsh"], indirect=True)
@pytest.mark.parametrize(("keys", "words"), LINES, ids=[keys.strip() for keys, _ in LINES])
def test_tab_completes_a_partial_word(script, keys, words):
    # Some shells add the / of a folder and the = of a flag only until the next key.
    found = [word.rstrip("/=") for word in typed(script, f"parallel-llama {keys}")]
    assert found == ["parallel-llama", *words]


def offered_by_bash(script: Path, words: list[str]) -> set[str]:
    line = " ".join(f"'{word}'" for word in words)
    call = f"source {script}; COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; "
    call += "compopt() { :; }; _parallel_llama; printf '%s\\n' \"${COMPREPLY[@]}\""
    done = subprocess.run(
        ["bash", "-c", call], capture_output=True, text=True, check=True, cwd=script.parent
    )
    assert done.stderr == ""
    return set(done.stdout.split("\n")) - {""}


def offered_by_fish(script: Path, words: list[str]) -> set[str]:
    line = " ".join(words)
    done = subprocess.run(
        [*SHELLS["fish"], "-c", f"source {script}; complete -C '{line}'"],
        capture_output=True,
        text=True,
        check=True,
        cwd=script.parent,
    )
    assert done.stderr == ""
    return {each.split("\t")[0] for each in done.stdout.splitlines()}


def cases() -> Iterator[tuple[list[str], set[str]]]:
    """Words up to the cursor, and all completions of the last word."""
    yield ["v"], {"verify"}
    for name in VERBS:
        verb = load_verb(name)
        flags = {f"--{each}" for flag in verb.flags for each in flag.names}
        yield [name, "--"], {*flags, "--help"}
        for flag in verb.flags:
            if isinstance(flag.parse, OneOf):
                yield [name, f"--{flag.name}", ""], set(flag.parse.choices)


@pytest.mark.parametrize("script", ["bash", "fish"], indirect=True)
def test_every_flag_and_choice_is_offered(script):
    offered = offered_by_bash if script.suffix == ".bash" else offered_by_fish
    for words, expected in cases():
        assert offered(script, ["parallel-llama", *words]) == expected, words


@pytest.mark.parametrize("script", ["bash", "fish"], indirect=True)
def test_files_are_offered_where_a_file_is_wanted(script):
    offered = offered_by_bash if script.suffix == ".bash" else offered_by_fish
    for words in (["generate", "--output", "my"], ["verify", "my"], ["chat", "--model", "my"]):
        found = offered(script, ["parallel-llama", *words])
        assert {each.replace("\\", "") for each in found} == {"my prompts.jsonl"}, words
    assert offered(script, ["parallel-llama", "generate", "--seed", "my"]) == set()
