"""Sphinx builds the documentation with this file: `bash launch/docs.sh`."""

import re
import sys
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

import messages  # noqa: E402, beside this file

import parallel_llama  # noqa: E402

project = "parallel_llama"
author = "The parallel_llama developers"
project_copyright = author
version = release = parallel_llama.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["attrs_inline"]
myst_heading_anchors = 3
suppress_warnings = ["myst.strikethrough"]
default_role = "code"  # docstrings write names as `name`
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints = "none"  # the signature has them
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80
napoleon_custom_sections = ["Collective", "Shapes", "Source", "Units"]

html_theme = "furo"
html_title = "parallel_llama"
html_show_sphinx = False
html_copy_source = False
pygments_style = "friendly"
pygments_dark_style = "github-dark"


def add_messages(_: Sphinx, page: str, source: list[str]) -> None:
    """Ends the page of messages with the list that is generated from the source."""
    if page == "messages":
        source[0] += messages.as_markdown()


# A section with text in the line of its name, as in `Raises: UsageError if ..`.
SECTION = re.compile(r"((?:Returns|Raises|Collective|Shapes|Units|Source|, )+): (?=\S)")
SPECIAL_TOKEN = re.compile(r"(?<!`)<\|\w+\|>(?!`)")  # reStructuredText has another meaning of |


def separate_sections(*event: object) -> None:
    """Makes each section of a docstring a paragraph of its own, and special tokens literal."""
    lines = event[-1]
    assert isinstance(lines, list)
    found: list[str] = []
    in_section = False
    for line in (SPECIAL_TOKEN.sub(r"``\g<0>``", line) for line in lines):
        match = SECTION.match(line)
        in_section = bool(match) or (in_section and bool(line.strip()))
        found += ["", f"**{match[1]}:** {line[match.end() :]}"] if match else [line]
        if in_section and not match:
            found[-1] = line.strip()
    lines[:] = found


def setup(app: Sphinx) -> None:
    app.connect("source-read", add_messages)
    app.connect("autodoc-process-docstring", separate_sections, priority=400)  # before napoleon
