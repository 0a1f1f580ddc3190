"""Lists every message of the source that a user can see, as a page of the documentation."""

import ast
import builtins
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "parallel_llama"
AREAS = {
    "The command line": ("cli",),
    "Models and their files": ("checkpoint", "config", "families", "files"),
    "Tokenizers, chat templates and grammars": ("structured", "tokenizer"),
    "Ranks and memory": ("dtypes", "memory", "parallel", "plan"),
    "Requests": (),  # all other modules
    "The server": ("serve",),
    "Resharding": ("reshard",),
}
WARNINGS = {"error", "refuse", "warn", "warning"}
CLI_ERRORS = {"ValueError"}  # about a flag's value: the command adds the flag's name
MIN_WORDS = 3  # a message with fewer words of its own only passes another one on


def called(node: ast.AST) -> str:
    """The name of the called function, without its module or object; '' if `node` is not a call."""
    if not isinstance(node, ast.Call):
        return ""
    return getattr(node.func, "id", "") or getattr(node.func, "attr", "")


def text_of(node: ast.expr) -> str:
    """The text of an expression, with `..` in place of each value that is put into it."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ".."
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) for part in node.values)
    if isinstance(node, ast.BinOp):
        return text_of(node.left) + text_of(node.right)
    return ".."


def message_of(call: ast.Call) -> str:
    """The first argument of a call that reads like a message; '' without one."""
    for argument in call.args:
        message = " ".join(re.sub(r"%[.\d]*[a-z]|\.{3,}", "..", text_of(argument)).split())
        if len(re.findall(r"[A-Za-z]{2,}", message)) >= MIN_WORDS:
            return message
    return ""


def by_area() -> dict[str, list[str]]:
    """The messages of each area, each once and in alphabetical order."""
    trees = {path: ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
    calls = [
        (path.relative_to(PACKAGE).parts[0].removesuffix(".py"), node)
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
    ]
    errors = {
        called(node.exc)
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise) and node.exc is not None
    } - vars(builtins).keys()
    area_of = {room: area for area, rooms in AREAS.items() for room in rooms}
    found: dict[str, set[str]] = {area: set() for area in AREAS}
    for room, call in calls:
        if called(call) in errors | WARNINGS | (CLI_ERRORS if room == "cli" else set()):
            found[area_of.get(room, "Requests")].add(message_of(call))
    return {area: sorted(each - {""}, key=anchor) for area, each in found.items()}


def anchor(message: str) -> str:
    """The words of a message as an anchor: `it is damaged; ..` has it-is-damaged."""
    return "-".join(re.findall(r"[a-z0-9]+", message.lower()))


def lines_of(areas: dict[str, list[str]]) -> Iterator[str]:
    """Markdown with a heading for each area and an item for each message."""
    seen: set[str] = set()
    for area, messages in areas.items():
        yield f"\n## {area}\n"
        for message in messages:
            ticks, name = "``" if "`" in message else "`", anchor(message)
            attributes = "" if name in seen else f"{{#{name}}}"
            seen.add(name)
            yield f"- {ticks}{message}{ticks}{attributes}"


def as_markdown() -> str:
    return "\n".join(lines_of(by_area())) + "\n"
