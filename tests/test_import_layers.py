"""Rules of the source that no other test checks.

Each rule is a function from a module's syntax tree to its violations, and is tested on a small
source that violates it.
"""

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "parallel_llama"

# A room is a module or a subpackage of the package. It imports only from lower floors; rooms of one
# floor do not import each other, and no modules import each other in a circle.
FLOORS = [
    {"errors"},
    {"dtypes", "files"},
    {"families"},
    {"config", "plan", "request"},
    {"tokenizer", "parallel", "memory"},
    {"ops", "shares"},
    {"structured", "sampling", "checkpoint"},
    {"model", "reshard"},
    {"engine"},
    {"doctor", "llm"},
    {"async_llm", "lm_eval", "serve"},
    {"engine_process"},
    {"cli"},
    {"__main__"},
]
FLOOR = {name: number for number, names in enumerate(FLOORS) for name in names}
# Rooms and modules that load without torch.
TORCH_FREE = {
    "errors", "dtypes", "files", "families", "config", "plan", "memory", "request",
    "shares",
    "tokenizer", "structured", "serve", "parallel.failures", "reshard.gguf_types",
    "reshard.target_folder",
    "doctor.check", "doctor.local_ranks", "doctor.machine", "engine.available_memory",
    "engine.kv_blocks", "engine.block_pool", "engine.detokenizer",
    "engine.drafts", "engine.input_processor", "engine.llm_config", "engine.messages",
    "engine.model_download", "engine.outputs", "engine.prompt_lookup", "engine.scheduler",
    "engine.statistics",
}  # fmt: skip
MATH = {"model", "ops"}

# Imported inside functions: modules that need an optional package, and readers whose packages are
# slow to import and only needed for some files.
OPTIONAL = {"parallel_llama.ops.cuda_ops", "torch.distributed._symmetric_memory"}
LATE = {
    "parallel_llama.checkpoint.gguf_file",
    "parallel_llama.files.hub_download",
    "parallel_llama.reshard.copied_tensors",
    "parallel_llama.reshard.gguf_layout",
}

OBJECT_COLLECTIVES = re.compile(r"(broadcast|all_gather|gather|scatter|send|recv)_object(_list)?$")
ASKS = {"is_file", "is_dir", "exists", "iterdir", "isfile", "isdir"}
WILDCARDS = {"0.0.0.0", "::", "tcp://*"}


def room(module: str) -> str:
    """The room of a dotted module name: 'families' for parallel_llama.families.names."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def is_torch_free(module: str) -> bool:
    return room(module) in TORCH_FREE or module.removeprefix("parallel_llama.") in TORCH_FREE


def imports(tree: ast.AST) -> Iterator[tuple[str, ast.stmt]]:
    """Every import anywhere in a tree; `from a import b` yields a and a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports are not used"
            yield node.module, node
            yield from ((f"{node.module}.{alias.name}", node) for alias in node.names)


def dotted(node: ast.AST) -> str:
    """'torch.load' for the expression torch.load; '' for anything but names and attributes."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    return ((dotted(n.func), n) for n in ast.walk(tree) if isinstance(n, ast.Call))


def starts(tree: ast.AST) -> Iterator[tuple[str, ast.Constant]]:
    """Every string that names a module, because a process may be started with that module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node.value in modules():
            yield str(node.value), node


def imports_only_from_lower_floors(module: str, tree: ast.AST) -> Iterator[str]:
    own = room(module)
    for name, node in (*imports(tree), *starts(tree)):
        if not name.startswith("parallel_llama.") or own == "__init__":
            continue
        other = room(name)
        if other not in FLOOR:
            yield f"line {node.lineno}: {other} is on no floor"
        elif other != own and FLOOR[other] >= FLOOR[own]:
            yield f"line {node.lineno}: {own} imports {other}, which is not below it"


def imports_nothing_inside_functions(module: str, tree: ast.AST) -> Iterator[str]:
    if room(module) in ("cli", "__init__"):
        return
    for outer in ast.walk(tree):
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            for name, node in imports(outer):
                if not {name, name.rpartition(".")[0]} & (OPTIONAL | LATE):
                    yield f"line {node.lineno}: {name} is imported inside a function"


def has_no_type_checking_imports(module: str, tree: ast.AST) -> Iterator[str]:
    """Except `cli` and the package's `__init__`, which load torch when it is used."""
    if room(module) == "cli" or module == "parallel_llama":
        return
    for name, node in imports(tree):
        if name == "typing.TYPE_CHECKING":
            yield f"line {node.lineno}: imports TYPE_CHECKING"
    for use in ast.walk(tree):
        if isinstance(use, ast.Attribute) and use.attr == "TYPE_CHECKING":
            yield f"line {use.lineno}: TYPE_CHECKING"


def keeps_torch_out_of_low_floors(module: str, tree: ast.AST) -> Iterator[str]:
    if is_torch_free(module):
        for name, node in imports(tree):
            if name.split(".")[0] in ("torch", "fairscale", "transformers"):
                yield f"line {node.lineno}: imports {name}"


def keeps_process_groups_in_parallel(module: str, tree: ast.AST) -> Iterator[str]:
    if room(module) == "parallel":
        return
    for name, node in imports(tree):
        if name.startswith(("torch.distributed", "fairscale")):
            yield f"line {node.lineno}: imports {name}"
    for use in ast.walk(tree):
        if isinstance(use, ast.Attribute) and dotted(use) == "torch.distributed":
            yield f"line {use.lineno}: uses torch.distributed"


def keeps_triton_in_one_folder(module: str, tree: ast.AST) -> Iterator[str]:
    """Triton is not installed on machines without a GPU."""
    kernels = "parallel_llama.ops.cuda"
    for name, node in imports(tree):
        is_kernel = name == kernels or name.startswith(f"{kernels}.")
        if (name.split(".")[0] == "triton" or is_kernel) and not module.startswith(kernels):
            yield f"line {node.lineno}: imports {name}"


def loads_torch_files_safely(module: str, tree: ast.AST) -> Iterator[str]:
    for name, node in calls(tree):
        if name in ("torch.load", "load") and (name == "torch.load" or _from_torch(tree)):
            safe = any(
                keyword.arg == "weights_only"
                and isinstance(keyword.value, ast.Constant)
                and keyword.value.value is True
                for keyword in node.keywords
            )
            if room(module) != "checkpoint" or not safe:
                yield f"line {node.lineno}: torch.load outside checkpoint or not weights_only"


def _from_torch(tree: ast.AST) -> bool:
    return any(name == "torch.load" for name, _ in imports(tree))


def runs_no_foreign_code(_module: str, tree: ast.AST) -> Iterator[str]:
    banned = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve"}
    for name, node in imports(tree):
        if name.split(".")[0] in banned:
            yield f"line {node.lineno}: imports {name}"
    for name, call in calls(tree):
        if name in ("eval", "exec", "compile", "__import__", "builtins.eval", "builtins.exec"):
            yield f"line {call.lineno}: calls {name}"
        if OBJECT_COLLECTIVES.search(name):
            yield f"line {call.lineno}: {name} pickles"


def asks_the_file_system_in_one_place(module: str, tree: ast.AST) -> Iterator[str]:
    """For unreadable paths pathlib returns False or raises, depending on its version."""
    if module.endswith(".bounded_files"):
        return
    for name, call in calls(tree):
        asks = isinstance(call.func, ast.Attribute) and call.func.attr in ASKS
        # A literal path does not come from a user.
        if asks and not re.fullmatch(r"Path\('[^']+'\)\.\w+\(\)", ast.unparse(call)):
            yield f"line {call.lineno}: {name or ast.unparse(call)}"


def keeps_the_dtype_in_the_mathematics(module: str, tree: ast.AST) -> Iterator[str]:
    """A bare .float() would silently reduce a float64 model to float32."""
    if room(module) in MATH:
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr == "float":
                yield f"line {node.lineno}: .float()"


def listens_on_no_wildcard(_module: str, tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node.value in WILDCARDS:
            yield f"line {node.lineno}: the address {node.value!r}"
        if isinstance(node, ast.Call) and dotted(node.func).endswith(".bind"):
            address = node.args[0] if node.args else None
            host = address.elts[0] if isinstance(address, ast.Tuple) else None
            if isinstance(host, ast.Constant) and host.value in ("", "*"):
                yield f"line {node.lineno}: binds every interface"


Rule = Callable[[str, ast.AST], Iterator[str]]

# Each rule with sources that break it: (rule, module that contains the source, source).
BROKEN: list[tuple[Rule, str, str]] = [
    (imports_only_from_lower_floors, "plan", "import parallel_llama.request"),
    (imports_only_from_lower_floors, "config", "from parallel_llama import plan"),
    (imports_only_from_lower_floors, "checkpoint.names", "from parallel_llama.sampling import x"),
    (imports_only_from_lower_floors, "model", "def f():\n    from parallel_llama.llm import LLM"),
    (imports_only_from_lower_floors, "model", "import parallel_llama.helpers"),
    (imports_only_from_lower_floors, "serve.x", "start('parallel_llama.engine_process')"),
    (imports_nothing_inside_functions, "model", "def f():\n    import json"),
    (imports_nothing_inside_functions, "parallel.x", "class A:\n  def f(self):\n    import torch"),
    (has_no_type_checking_imports, "model", "from typing import TYPE_CHECKING as T\nif T: pass"),
    (has_no_type_checking_imports, "model", "import typing\nif typing.TYPE_CHECKING: pass"),
    (keeps_torch_out_of_low_floors, "plan", "import torch"),
    (keeps_torch_out_of_low_floors, "tokenizer.spm", "from torch import Tensor"),
    (keeps_torch_out_of_low_floors, "serve.app", "import torch"),
    (keeps_process_groups_in_parallel, "layers", "import torch.distributed as dist"),
    (keeps_process_groups_in_parallel, "layers", "from torch import distributed"),
    (keeps_process_groups_in_parallel, "layers", "import torch\ntorch.distributed.barrier()"),
    (keeps_process_groups_in_parallel, "layers", "from fairscale.nn import model_parallel"),
    (keeps_triton_in_one_folder, "ops.cpu.elementwise", "import triton.language as tl"),
    (keeps_triton_in_one_folder, "ops.gumbel", "from parallel_llama.ops.cuda.linear import x"),
    (keeps_triton_in_one_folder, "ops.gumbel", "from parallel_llama.ops import cuda"),
    (loads_torch_files_safely, "checkpoint.meta", "import torch\ntorch.load('x')"),
    (loads_torch_files_safely, "checkpoint.meta", "torch.load('x', weights_only=False)"),
    (loads_torch_files_safely, "checkpoint.meta", "from torch import load\nload('x')"),
    (loads_torch_files_safely, "llm", "torch.load('x', weights_only=True)"),
    (runs_no_foreign_code, "llm", "import pickle"),
    (runs_no_foreign_code, "llm", "from pickle import loads"),
    (runs_no_foreign_code, "llm", "eval('1')"),
    (runs_no_foreign_code, "llm", "exec('1')"),
    (runs_no_foreign_code, "llm", "import marshal"),
    (runs_no_foreign_code, "parallel.x", "dist.broadcast_object_list([1])"),
    (runs_no_foreign_code, "parallel.x", "dist.all_gather_object([], 1)"),
    (asks_the_file_system_in_one_place, "config.x", "def f(path):\n    return path.is_file()"),
    (asks_the_file_system_in_one_place, "cli.x", "(folder / name).exists()"),
    (keeps_the_dtype_in_the_mathematics, "model.layers", "def f(x):\n    return x.float()"),
    (keeps_the_dtype_in_the_mathematics, "model.rope", "def f(x):\n    return (x + x).float()"),
    (listens_on_no_wildcard, "parallel.x", "sock.bind(('0.0.0.0', 0))"),
    (listens_on_no_wildcard, "parallel.x", "sock.bind(('', 0))"),
    (listens_on_no_wildcard, "parallel.x", "HOST = '::'"),
]
RULES = sorted({rule for rule, _, _ in BROKEN}, key=lambda rule: rule.__name__)


@cache
def modules() -> dict[str, tuple[Path, ast.Module]]:
    """Every module of the package by its name: its file, and its syntax tree."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(["parallel_llama", *(p for p in parts if p != "__init__")])
        found[name] = path, ast.parse(path.read_text())
    return found


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_module_keeps_the_rule(rule: Rule) -> None:
    problems = [
        f"{path.relative_to(ROOT)}, {problem}"
        for module, (path, tree) in modules().items()
        for problem in rule(module, tree)
    ]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(("rule", "module", "source"), BROKEN)
def test_rule_reports_violation(rule: Rule, module: str, source: str) -> None:
    assert list(rule(f"parallel_llama.{module}", ast.parse(source)))


def test_every_module_has_a_floor():
    rooms = {room(module) for module in modules()} - {"__init__"}
    assert rooms <= FLOOR.keys(), f"without a floor: {rooms - FLOOR.keys()}"


def circles(trees: Mapping[str, ast.AST]) -> list[str]:
    """A circle of imports between modules, if there is one."""
    needs: dict[str, set[str]] = {}
    for module, tree in trees.items():
        names = {name for name, _ in imports(tree)} & trees.keys()
        # `from package import module` depends on the module, not on the package's `__init__`.
        packages = {name.rpartition(".")[0] for name in names if "." in name}
        needs[module] = names - packages
    try:
        list(TopologicalSorter(needs).static_order())
    except CycleError as error:
        return [" -> ".join(error.args[1])]
    return []


def test_no_modules_import_each_other_in_a_circle():
    """The package's `__init__` is left out, because it imports on demand."""
    trees = {name: tree for name, (_, tree) in modules().items() if name != "parallel_llama"}
    assert not circles(trees)


def test_import_circle_is_found():
    sources = {"a": "import b", "b": "from c import x", "c": "def f():\n    from a import y"}
    assert circles({name: ast.parse(source) for name, source in sources.items()})


def test_tests_support_does_not_import_launch():
    """`launch` imports tests/support for its rehearsals, so the reverse would be a circle."""
    sources = (ROOT / "tests/support").glob("*.py")
    names = {name for path in sources for name, _ in imports(ast.parse(path.read_text()))}
    assert not [name for name in names if name.split(".")[0] == "launch"]


def test_no_two_test_files_have_the_same_name():
    """Test folders are not packages, so pytest imports one of two files with equal names."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("*.py"))
    assert [name for name, n in names.items() if n > 1 and name != "conftest.py"] == []


def tracked_but_ignored(checkout: Path) -> list[str]:
    """The tracked files that .gitignore ignores."""
    command = ["git", "ls-files", "-z", "-c", "-i", "--exclude-per-directory=.gitignore"]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=True)
    return done.stdout.split("\0")[:-1]


def test_no_ignored_file_is_tracked():
    if not (ROOT / ".git").exists():
        pytest.skip("the source is not a git checkout")
    assert tracked_but_ignored(ROOT) == []


def test_a_tracked_file_that_is_ignored_is_found(tmp_path):
    (tmp_path / ".gitignore").write_text("__pycache__/\n*.whl\n")
    (tmp_path / "kept.py").touch()
    (tmp_path / "a wheel.whl").touch()
    for command in ("init -q", "add -f ."):
        subprocess.run(["git", *command.split()], cwd=tmp_path, check=True)
    assert tracked_but_ignored(tmp_path) == ["a wheel.whl"]


def test_the_low_floors_load_without_torch():
    """Neither directly nor through a library, because importing torch delays every command."""
    names = [name for name in modules() if is_torch_free(name)]
    code = f"import sys, {', '.join(names)}; sys.exit('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr or "torch was loaded"


def design_tree() -> list[str]:
    """The paths of docs/design.md's file tree."""
    text = (ROOT / "docs/design.md").read_text()
    block = re.search(r"```text\n(parallel_llama/\n.*?)```", text, re.S)
    assert block is not None, "docs/design.md has no file tree"
    folders: list[str] = []
    paths = []
    for line in block[1].splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        if not line.strip() or depth > len(folders):
            continue  # a continued description
        name = line.split()[0]
        paths.append("/".join([*(folder.rstrip("/") for folder in folders[:depth]), name]))
        folders = [*folders[:depth], name] if name.endswith("/") else folders[:depth]
    return paths


def test_every_path_in_the_design_tree_exists():
    paths = design_tree()
    assert len(paths) > 20
    missing = [path for path in paths if not (ROOT / path).exists()]
    assert not missing, f"docs/design.md names {missing}"


def test_design_tree_lists_floors_bottom_up():
    """Regression: docs/design.md listed `input_processor` before the modules that it imports."""
    paths = [path.removeprefix("parallel_llama/") for path in design_tree()]
    floors = [
        FLOOR[name] for path in paths if (name := path.strip("/").removesuffix(".py")) in FLOOR
    ]
    assert len(floors) == len(FLOOR) and floors == sorted(floors)


def test_every_module_is_in_the_design_tree():
    """A folder that is listed without its files stands for all files of the folder."""
    listed = set(design_tree())
    rooms = {path.relative_to(ROOT).parts[:2] for path, _ in modules().values()} - {
        ("parallel_llama", "__init__.py")
    }
    absent = {
        "/".join(parts) for parts in rooms if not {"/".join(parts), "/".join(parts) + "/"} & listed
    }
    assert not absent


DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_in_the_documents_leads_somewhere(document):
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", document.read_text())
    local = [target for target in targets if "://" not in target]
    assert not [target for target in local if not (document.parent / target).exists()]
