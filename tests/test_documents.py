"""Commands and Python blocks of README and docs/, run as they are printed in a clean clone."""

import ast
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from served import Served

from launch.bench import compare
from parallel_llama.config.layouts import load_model_args
from parallel_llama.families import FAMILIES
from parallel_llama.files.model_files import find_model
from parallel_llama.plan import make_plan

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
# In reading order, because a command may need files that an earlier command has written.
NAMES = [
    "start", "plan", "models", "serving", "library", "resharding", "speed", "doctor", "operations",
]  # fmt: skip
PAGES = [ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in NAMES)]
OTHERS = sorted({*(ROOT / "docs").glob("*.md"), *ROOT.glob("*.md")} - {*PAGES})


def blocks(page: Path) -> list[tuple[str, str]]:
    """The language and the text of each code block."""
    return re.findall(r"^```(\S*)\n(.*?)^```$", page.read_text(), re.S | re.M)


def without_comment(line: str) -> str:
    return re.sub(r"\s+# .*", "", line)


BLOCKS = [block for page in PAGES for block in blocks(page)]
PYTHON = list(dict.fromkeys(text for language, text in BLOCKS if language == "python"))
PRINTED = [line for language, text in BLOCKS if language == "sh" for line in text.splitlines()]
# Each command once, even if several pages print it.
COMMANDS = list({without_comment(line): line for line in PRINTED if line.strip()}.values())
SERVE = "parallel-llama serve --nproc 2"
PORT = 8000
# Not run: the test suite, the build of these pages, and comparisons, which take minutes and need
# vLLM and llama.cpp. Only the flags of comparisons are checked.
SCRIPTS, COMPARE = ("bash launch/test.sh", "bash launch/docs.sh"), "python -m launch.bench.compare"
QUICKSTART, GPU = "bash launch/quickstart.sh", "python -m launch.bench.gpu"
APART = (*SCRIPTS, COMPARE, QUICKSTART, GPU, SERVE, "curl ")
RUN = [command for command in COMMANDS if not command.startswith(APART)]


def command(start: str) -> str:
    """The first command that begins with `start`."""
    return next(each for each in COMMANDS if each.startswith(start))


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the files that git does not ignore, and the example.py that a page prints."""
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
    """The environment after `source .venv/bin/activate`, with the package of the clone."""
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
    """The printed server, on another port only if the printed port is taken."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        is_free = probe.connect_ex(("127.0.0.1", PORT)) != 0
    argv = [*shlex.split(SERVE), *([] if is_free else ["--port", "0"])]
    return Served(command=argv, cwd=clone, env=environment(clone))


def test_every_code_block_is_run_or_a_known_exception():
    assert len(PYTHON) == 5 and len(COMMANDS) >= 26
    apart = [each for each in COMMANDS if each.startswith(APART)]
    assert len(apart) <= len(SCRIPTS) + 4 + 1 + 1 + 1 + 1
    assert not any("/path/to/" in each for each in COMMANDS)
    assert {language for language, _ in BLOCKS} <= {"sh", "python", "text"}
    for page in OTHERS:
        assert {language for language, _ in blocks(page)}.isdisjoint({"", "python"}), page


def spoken() -> str:
    """The string literals of the source, without docstrings and without values in f-strings."""
    texts = (
        node.value
        for path in (ROOT / "parallel_llama").rglob("*.py")
        for parent in ast.walk(ast.parse(path.read_text()))
        if not isinstance(parent, ast.Expr)
        for node in ast.iter_child_nodes(parent)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    return "\0".join(texts)


def test_messages_in_operations_page_exist_in_source():
    messages = re.findall(r"^### `(.+)`$", (ROOT / "docs/operations.md").read_text(), re.M)
    assert len(messages) > 40 and len(set(messages)) == len(messages)
    said = spoken()
    for message in messages:
        for part in filter(None, message.split("..")):
            assert part.strip("; .") in said, message


def test_environment_variables_are_documented():
    """All variables that the package reads are in the table, except those of other programs."""
    sources = [path.read_text() for path in (ROOT / "parallel_llama").rglob("*.py")]
    reads = re.compile(r'environ(?:\.get\(|\[)"(\w+)"|"([A-Z]\w+)" (?:not )?in os\.environ')
    names = {name for source in sources for pair in reads.findall(source) for name in pair if name}
    assert {"OMP_NUM_THREADS", "CC", "SLURM_NODEID"} <= names
    section = (ROOT / "docs" / "deploy.md").read_text().split("## Environment variables")[1]
    documented = set(re.findall(r"`(\w+)`", section))
    of_other_programs = (
        *re.findall(r"`(\w+_)\*`", section),
        *("ENVIRONMENT", "KUBERNETES_", "TORCHELASTIC_", "PYTHONPATH", "TOKENIZERS_PARALLELISM"),
        "HUGGINGFACE_HUB_CACHE",  # the older name of HF_HUB_CACHE
    )
    assert [n for n in names - documented if not n.startswith(of_other_programs)] == []


def test_readme_is_short():
    assert len((ROOT / "README.md").read_bytes()) <= 10_000


def test_the_quickstart_prints_what_the_pages_show(clone):
    """The script skips the installation, because it finds this environment in `.venv`."""
    (clone / ".venv").mkdir()
    for entry in Path(sys.prefix).iterdir():
        if entry.name != "stamp":
            (clone / ".venv" / entry.name).symlink_to(entry)
    script = (clone / "launch/quickstart.sh").read_text()
    (wanted,) = re.findall(r"^prepare_environment \.venv (.*)$", script, re.M)
    stamp = f'source launch/environment.sh; environment_stamp "$(choose_python)" {wanted}'
    run(f"({stamp}) > .venv/stamp", clone)
    done = run(command(QUICKSTART), clone)
    shown = [text for language, text in BLOCKS if language == "text" and "Paris" in text]
    assert shown
    printed = done.stdout.splitlines()  # the pages leave out lines, and the ends of some
    for line in "".join(shown).splitlines():
        assert any(each.startswith(line) for each in printed), line


@pytest.mark.parametrize(
    ("printed", "first"),
    [
        ("plan --model smollm2", "ranks  balance  cut"),
        ("plan --model llama-3.1-70b --gpus H100", "llama"),
        ("plan --model llama-3.1-70b --gpus H100 --max-seq-len 32k", "  weights   KV cache"),
        ("plan --model llama-3.1-70b --gpus H200", "ranks  balance  tokens/s"),
    ],
)
def test_a_plan_prints_what_the_page_shows(clone, printed, first):
    (shown,) = [text for language, text in BLOCKS if language == "text" and text.startswith(first)]
    lines = run(command(f"parallel-llama {printed}"), clone).stdout.splitlines()
    assert not [line for line in shown.splitlines() if line not in lines]


@pytest.mark.parametrize("printed", RUN)
def test_printed_command_succeeds(clone, printed):
    """Commands run in reading order, because one may need files that an earlier one has written."""
    done = run(printed, clone)
    assert done.stdout or any(each in printed for each in ("--output", " > ", " chat "))
    if printed.endswith("example.py"):  # regression: every rank printed the text
        assert done.stdout.count(" seed ") == 1


def test_server_answers_curl_and_client_and_stops_cleanly(clone):
    with served(clone) as server:
        asked = command("curl ").replace(f"http://127.0.0.1:{PORT}", server.url)
        assert json.loads(run(asked, clone).stdout)["choices"]
        (client,) = [text for text in PYTHON if f":{PORT}" in text]
        assert python(client.replace(f"http://127.0.0.1:{PORT}", server.url), clone).strip()
        assert server.stop() == 0


def python(text: str, clone: Path) -> str:
    """The output of a Python block that runs as a program."""
    (clone / "block.py").write_text(text)
    return run("python block.py", clone).stdout


@pytest.mark.parametrize("text", [text for text in PYTHON if f":{PORT}" not in text])
def test_python_block_prints_output(clone, text):
    assert python(text, clone).strip()


@pytest.mark.parametrize("printed", [each for each in COMMANDS if each.startswith(COMPARE)])
def test_flags_of_compare_command_are_valid(printed):
    compare._parser().parse_args(shlex.split(printed.removeprefix(COMPARE)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would take 8 minutes")
def test_gpu_benchmark_without_gpu_suggests_dry_run(clone):
    """The steps of the benchmark are tested in tests/launch/test_gpu.py."""
    assert "--dry-run for a rehearsal" in run(command(GPU), clone, code=2).stderr


TABLE = re.compile(r"^\| ([^|]+) \| `([^`]+)` \|(?:.*\| ([0-9, -]+) \|)?", re.M)

# The families without a shape in configs/models, for which the table has no numbers of ranks.
WITHOUT_SHAPES = {
    "arcee",
    "chatglm",
    "cohere",
    "exaone4",
    "glm",
    "glm4",
    "glm4_moe",
    "granite",
    "granitemoehybrid",
    "internlm2",
    "ministral3",
    "nemotron",
    "olmo2",
    "olmo3",
    "phi3",
    "seed_oss",
    "smollm3",
    "stablelm",
    "starcoder2",
}


def test_model_table_lists_rank_counts_with_balanced_plans():
    rows = [row for row in TABLE.findall((ROOT / "docs/models.md").read_text()) if row[2]]
    families = set()
    for _, name, numbers_given in rows:
        args = load_model_args(find_model(name))
        families.add(args.family)
        spans = [span.split("-") for span in numbers_given.split(", ")]
        numbers = {n for span in spans for n in range(int(span[0]), int(span[-1]) + 1)}
        sizes = range(1, min(8, args.n_heads) + 1)
        assert numbers == {n for n in sizes if make_plan(args, n).balance <= 1.13}, name
    assert families == FAMILIES.keys() - WITHOUT_SHAPES
    short = [row[:2] for row in TABLE.findall((ROOT / "README.md").read_text())]
    assert short == [row[:2] for row in rows]


@pytest.mark.skipif(not all(map(find_spec, ("sphinx", "furo", "myst_parser"))), reason="no sphinx")
def test_docs_build_without_warnings_and_links_resolve(tmp_path):
    """Builds as launch/docs.sh does, and looks up local links and anchors in the built pages."""
    built = tmp_path / "docs"
    flags = ["--fail-on-warning", "--keep-going", "--quiet"]
    command = [sys.executable, "-m", "sphinx", *flags, str(ROOT / "docs"), str(built)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    pages = {path.name: Page(path.read_text()) for path in built.glob("*.html")}
    assert len(pages) >= 14
    for name, page in pages.items():
        for link in page.links:
            if not re.match(r"[a-z]+:", link):
                path, _, anchor = re.sub(r"\?v=\w+", "", link).partition("#")
                assert not path or (built / path).exists(), f"{name}: {link}"
                if anchor and (target := pages.get(path or name)):
                    assert anchor in target.anchors, f"{name}: {link}"


class Page(HTMLParser):
    """The links and the anchors of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, _: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.anchors.add(value)
            elif name in ("href", "src") and value:
                self.links.add(value)
