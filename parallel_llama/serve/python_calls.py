"""Reads function calls in Python's syntax, which Llama 4 writes: [rain(city="Oslo"), time()].

The text is parsed and never run.
"""

import ast
import math
import warnings
from typing import Any

import msgspec

from parallel_llama.serve.replies import CalledFunction

MAX_CHARS = 1 << 16
_WORDS = {"true": True, "false": False, "null": None}  # JSON's words, which models write too


def python_calls(text: str, names: frozenset[str]) -> list[CalledFunction]:
    """The calls of a list; empty if any item is not a call of a function in `names`.

    Arguments must have keywords, and be strings, numbers, True, False, None, lists or dictionaries.
    """
    if len(text) > MAX_CHARS:
        return []
    try:
        with warnings.catch_warnings():  # of escapes in strings
            warnings.simplefilter("ignore")
            tree = ast.parse(text.strip(), mode="eval")
        items = tree.body.elts if isinstance(tree.body, ast.List) else []
        return [_call(item, names) for item in items]
    except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError):
        return []


def _call(item: ast.expr, names: frozenset[str]) -> CalledFunction:
    """Raises: ValueError if the item is not a call of a function in `names`."""
    if not isinstance(item, ast.Call) or item.args:
        raise ValueError("not a call with keywords")
    if (name := ast.unparse(item.func)) not in names:
        raise ValueError("not a function that may be called")
    arguments = {
        keyword.arg: _value(keyword.value) for keyword in item.keywords if keyword.arg is not None
    }
    if len(arguments) < len(item.keywords):
        raise ValueError("an argument without a name of its own")
    return CalledFunction(name=name, arguments=msgspec.json.encode(arguments).decode())


def _value(node: ast.expr) -> Any:
    """Raises: ValueError for anything but a value of JSON."""
    match node:
        case ast.Constant(value=str() | bool() | int() | None as value):
            return value
        case ast.Constant(value=float() as value) if math.isfinite(value):
            return value
        case ast.Name(id=word) if word in _WORDS:
            return _WORDS[word]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float())):
            return -_value(node.operand)
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _value(item) for key, item in zip(keys, values, strict=True)}
    raise ValueError("not a value of JSON")


def _key(node: ast.expr | None) -> str:
    """Raises: ValueError for anything but a string."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError("not a string")
