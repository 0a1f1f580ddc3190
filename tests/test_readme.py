"""README's commands and Python blocks, run as they are printed, in order and in a clean clone."""

import ast
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from served import Served

from launch.bench import compare
from parallel_llama.config import load_model_args
from parallel_llama.families import FAMILIES
from parallel_llama.files.model_files import find_model
from parallel_llama.plan import make_plan

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, re.S)
PYTHON = [text for language, text in BLOCKS if language == "python"]
COMMANDS = [
    line
    for language, text in BLOCKS
    if not language and not text.startswith("parallel_llama/\n")  # the file tree
    for line in text.splitlines()
    if line.strip()
]
SERVE = "parallel-llama serve --nproc 2"
PORT = 8000
# Not run: the suite itself, and comparisons that take minutes and want vLLM and llama.cpp, of which
# only the flags are checked.
SUITE, COMPARE = "bash launch/test.sh --fast", "python -m launch.bench.compare"
QUICKSTART, GPU = "bash launch/quickstart.sh", "python -m launch.bench.gpu"
APART = (SUITE, COMPARE, QUICKSTART, GPU, SERVE, "curl ")
RUN = [command for command in COMMANDS if not command.startswith(APART)]


def command(start: str) -> str:
    """The first command that begins so."""
    return next(each for each in COMMANDS if each.startswith(start))


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what git has of the working tree, and the file that README has its reader write."""
    clone = tmp_path_factory.mktemp("clone")
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, check=True).stdout.decode()
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, clone / name)
    (clone / "example.py").write_text(next(text for text in PYTHON if "example.py" in text))
    return clone


def environment(clone: Path) -> dict[str, str]:
    """As after `source .venv/bin/activate`, with the package that is in the clone."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    ours = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    return ours | {"PATH": path, "PYTHONPATH": str(clone)}


def run(command: str, clone: Path, code: int = 0) -> "subprocess.CompletedProcess[str]":
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=clone,
        env=environment(clone),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == code, done.stderr
    return done


def served(clone: Path) -> Served:
    """The printed server; its port is another one only where another program has that one."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        is_free = probe.connect_ex(("127.0.0.1", PORT)) != 0
    argv = [*shlex.split(SERVE), *([] if is_free else ["--port", "0"])]
    return Served(command=argv, cwd=clone, env=environment(clone))


def test_every_command_is_run_or_known() -> None:
    assert len(PYTHON) == 4 and len(COMMANDS) >= 26
    assert sum(each.startswith(SERVE) for each in COMMANDS) == 2
    apart = [each for each in COMMANDS if each.startswith(APART)]
    assert len(apart) == 1 + 4 + 1 + 1 + 2 + 1
    assert not any("/path/to/" in each for each in COMMANDS)


def spoken() -> str:
    """Every text of the source, what f-strings put in being left out."""
    texts = (
        node.value
        for path in (ROOT / "parallel_llama").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    return "\0".join(texts)


def test_every_message_of_the_troubleshooting_table_is_one_that_is_given() -> None:
    table = (ROOT / "README.md").read_text().split("## Troubleshooting")[1].split("## ")[0]
    messages = re.findall(r"^\| `([^`]+)` \|", table, re.M)
    assert len(messages) > 10
    said = spoken()
    for message in messages:
        for part in filter(None, message.split("..")):
            assert part.strip("; .") in said, message


def test_the_quickstart_prints_what_readme_shows(clone: Path) -> None:
    """All but the installation, whose environment is this one."""
    (clone / ".venv").mkdir()
    for entry in Path(sys.prefix).iterdir():
        if entry.name != "stamp":
            (clone / ".venv" / entry.name).symlink_to(entry)
    script = (clone / "launch/quickstart.sh").read_text()
    (wanted,) = re.findall(r"^prepare_environment \.venv (.*)$", script, re.M)
    stamp = f'source launch/environment.sh; environment_stamp "$(choose_python)" {wanted}'
    run(f"({stamp}) > .venv/stamp", clone)
    done = run(command(QUICKSTART), clone)
    (shown,) = [text for language, text in BLOCKS if language == "text" and "smollm2" in text]
    printed = done.stdout.splitlines()  # README leaves out lines, and the ends of some
    for line in shown.splitlines():
        assert any(each.startswith(line) for each in printed), line


@pytest.mark.parametrize("printed", RUN)
def test_a_command(clone: Path, printed: str) -> None:
    """A later one may need the files of an earlier one, as for README's reader."""
    done = run(printed, clone)
    assert done.stdout or any(each in printed for each in ("--output", " > ", " chat "))
    if printed.endswith("example.py"):  # its text came once from each rank
        assert done.stdout.count(" seed ") == 1


def test_the_server_answers_until_it_is_told_to_end(clone: Path) -> None:
    with served(clone) as server:
        asked = command("curl ").replace(f"http://127.0.0.1:{PORT}", server.url)
        assert json.loads(run(asked, clone).stdout)["choices"]
        (client,) = [text for text in PYTHON if f":{PORT}" in text]
        assert python(client.replace(f"http://127.0.0.1:{PORT}", server.url), clone).strip()
        assert server.stop() == 0


def python(text: str, clone: Path) -> str:
    """What a block prints as a program."""
    (clone / "block.py").write_text(text)
    return run("python block.py", clone).stdout


@pytest.mark.parametrize("text", [text for text in PYTHON if f":{PORT}" not in text])
def test_a_python_block(clone: Path, text: str) -> None:
    assert python(text, clone).strip()


@pytest.mark.parametrize("printed", [each for each in COMMANDS if each.startswith(COMPARE)])
def test_the_flags_of_a_comparison_are_known(printed: str) -> None:
    compare._parser().parse_args(shlex.split(printed.removeprefix(COMPARE)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would take 8 minutes")
def test_the_benchmark_of_a_gpu_says_what_to_do_without_one(clone: Path) -> None:
    """That its steps run is in tests/launch/test_gpu.py."""
    assert "--dry-run for a rehearsal" in run(command(GPU), clone, code=2).stderr


def test_the_families_balance_on_the_numbers_of_ranks_that_the_table_has() -> None:
    rows = re.findall(r"^\| [^|]+ \| `([^`]+)` \|.*\| ([0-9, -]+) \|$", README, re.M)
    families = set()
    for name, told in rows:
        args = load_model_args(find_model(name))
        families.add(args.family)
        spans = [span.split("-") for span in told.split(", ")]
        numbers = {n for span in spans for n in range(int(span[0]), int(span[-1]) + 1)}
        sizes = range(1, min(8, args.n_heads) + 1)
        assert numbers == {n for n in sizes if make_plan(args, n).balance <= 1.13}, name
    assert families == FAMILIES.keys() - {"glm", "glm4", "chatglm"}
