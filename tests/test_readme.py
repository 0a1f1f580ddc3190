"""README's blocks, run as they are written: commands, Python, and Python under torchrun."""

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from served import Served
from tiny_folder import write_chat_folder

from parallel_llama.config import load_model_args
from parallel_llama.families import FAMILIES
from parallel_llama.files.model_files import find_model
from parallel_llama.plan import make_plan

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, re.S)
PYTHON = [text for language, text in BLOCKS if language == "python"]
COMMANDS = [
    line.split(" #")[0].strip()
    for language, text in BLOCKS
    if not language and not text.startswith("parallel_llama/\n")  # the file tree
    for line in text.splitlines()
    if line.strip()
]
# These install packages, run all tests, or compare speeds for minutes with runtimes of others.
TOO_MUCH = ("bash launch/", "python -m launch.bench.compare", "python -m launch.bench.gpu")
SERVER = "http://127.0.0.1:8000"
RUN = [command for command in COMMANDS if not command.startswith(TOO_MUCH)]


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the blocks name."""
    desk = tmp_path_factory.mktemp("desk")
    (desk / "README.md").write_text(README)
    lines = [
        {"prompt": "Once upon", "max_tokens": 3},
        {"tokens": [1, 2], "max_tokens": 2, "seed": 7},
    ]
    (desk / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    schema = {"type": "object", "properties": {"adult": {"type": "boolean"}}, "required": ["adult"]}
    (desk / "person.schema.json").write_text(json.dumps(schema))
    (desk / "example.py").write_text(next(text for text in PYTHON if "example.py" in text))
    write_chat_folder(desk / "model")
    shutil.copytree(desk / "model", desk / "another")
    return desk


def run(argv: list[str], desk: Path) -> "subprocess.CompletedProcess[str]":
    programs = {
        "parallel-llama": [sys.executable, "-m", "parallel_llama"],
        "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone"],
        "python": [sys.executable],
    }
    clean = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [*programs[argv[0]], *argv[1:]],
        cwd=desk,
        env={**clean, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    return done


def test_every_block_is_known():
    assert len(PYTHON) == 4 and len(RUN) >= 16
    assert sum(command.startswith("torchrun") for command in RUN) == 2
    for script in re.findall(r"bash (launch/\w+\.sh)", "\n".join(COMMANDS)):
        assert (ROOT / script).is_file()


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


@pytest.mark.parametrize("command", [each for each in RUN if not each.endswith("example.py")])
def test_a_command(desk: Path, command: str) -> None:
    if "--output" in command and "--resume" not in command:
        (desk / "answers.jsonl").unlink(missing_ok=True)
    command = command.replace("/path/to/", f"{desk}/")
    argv = shlex.split(command)
    if argv[0] == "curl":
        with Served("--nproc=2") as server:
            asked = [each.replace(SERVER, server.url) for each in argv]
            done = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=250)
        assert json.loads(done.stdout)["choices"]
        return
    if argv[1] == "serve":  # until it is told to end
        with Served(*argv[2:]) as server:
            assert server.send("GET", "/health")[0] == 200 and server.stop() == 0
        return
    done = run(argv, desk)
    assert done.stdout or "--output" in command or " chat " in command


@pytest.mark.parametrize("text", PYTHON)
def test_a_python_block(desk: Path, tmp_path: Path, text: str) -> None:
    with Served("--nproc=2") if SERVER in text else nullcontext() as server:
        if server is not None:
            text = text.replace(SERVER, server.url)
        (tmp_path / "block.py").write_text(text)
        assert run(["python", str(tmp_path / "block.py")], desk).stdout.strip()


def test_the_example_under_torchrun_prints_once(desk: Path) -> None:
    """Its text came once from each rank, and `llm.close()` ended with an error."""
    (command,) = [each for each in RUN if each.endswith("example.py")]
    assert run(shlex.split(command), desk).stdout.count(" seed ") == 1


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
