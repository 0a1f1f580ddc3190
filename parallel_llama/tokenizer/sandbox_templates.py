"""Renders chat templates, as a job of `sandbox_main`, which adds its own limits."""

import json
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes, runtime
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_OUTPUT_CHARS = 1 << 20
MAX_INT_BITS = 1 << 16
MAX_FORMAT_WIDTH = 1 << 12


class RefusedByTemplate(Exception):
    """The template called raise_exception."""


class BeyondLimit(Exception):
    """The template exceeded a limit."""


class TooLong(BeyondLimit):
    """The template wrote too many characters."""


class GenerationTag(Extension):
    """Ignores {% generation %} tags, which mark a template's answers for training."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with bounds on operators that make large values from small ones.

    The limits of the process would stop these too, but later and with a less clear message.
    """

    intercepted_binops = frozenset(("*", "**", "%"))

    def call_binop(self, context: runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            _require(_bits(left) * abs(right) <= MAX_INT_BITS if _ints(left, right) else True)
        elif operator == "*" and _ints(left, right):
            _require(_bits(left) + _bits(right) <= MAX_INT_BITS)
        elif operator == "*":
            for sequence, count in ((left, right), (right, left)):
                if hasattr(sequence, "__len__") and isinstance(count, int):
                    _require(len(sequence) * count <= MAX_OUTPUT_CHARS)
        elif isinstance(left, str):
            _require("*" not in left and _widest(left) <= MAX_FORMAT_WIDTH)
        return super().call_binop(context, operator, left, right)


def _ints(left: Any, right: Any) -> bool:
    return isinstance(left, int) and isinstance(right, int)


def _bits(value: int) -> int:
    return int(value).bit_length()


def _widest(text: str) -> int:
    """The largest number in a format string."""
    digits = "".join(character if character in "0123456789" else " " for character in text)
    return max((int(number[:9]) for number in digits.split()), default=0)


def _require(is_within: bool) -> None:
    if not is_within:
        raise BeyondLimit("an operator would create a value that is too large")


def _raise_exception(message: object) -> NoReturn:
    raise RefusedByTemplate(str(message))


def _strftime_now(form: str) -> str:
    _require(len(form) <= MAX_FORMAT_WIDTH and _widest(form) <= MAX_FORMAT_WIDTH)
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """transformers' filter: plain JSON, without the HTML escapes of jinja's own filter."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def environment() -> Sandbox:
    environment = Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


@lru_cache(maxsize=4)  # compiling takes longer than rendering; a model has one or two templates
def _compiled(template: str) -> jinja2.Template:
    return environment().from_string(template)


def _render(template: jinja2.Template, context: Mapping[str, Any]) -> str:
    pieces: list[str] = []
    n_left = MAX_OUTPUT_CHARS
    for piece in template.generate(context):
        n_left -= len(piece)
        if n_left < 0:
            raise TooLong(f"it writes more than {MAX_OUTPUT_CHARS} characters")
        pieces.append(piece)
    return "".join(pieces)


class Job:
    """Renders the template of each request with its context."""

    def answer(self, request: Mapping[str, Any], _: bytes) -> dict[str, str]:
        """`text`, the rendered text; or `failure`, the kind of failure, with `message`."""
        try:
            return {"text": _render(_compiled(request["template"]), request["context"])}
        except RefusedByTemplate as error:
            return {"failure": "refused", "message": str(error)[:1000]}
        except jinja2.TemplateSyntaxError as error:
            return {"failure": "syntax", "message": f"line {error.lineno}: {error}"[:1000]}
        except TooLong as error:
            return {"failure": "length", "message": str(error)}
        except (BeyondLimit, SecurityError, OverflowError, RecursionError) as error:
            return {"failure": "limit", "message": str(error)[:1000]}
        except MemoryError:
            return {"failure": "limit", "message": "it exceeds the memory limit"}
        except Exception as error:
            return {"failure": "error", "message": f"{type(error).__name__}: {error}"[:1000]}
