"""SECURITY.md is correct: its limits are the constants, and the tests that it names exist."""

import ast
import re
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "SECURITY.md").read_text().splitlines()
    if line.startswith("| ")
]
LIMITS = [row for row in ROWS if len(row) == 3 and row[2].startswith("`")]
FLAWS = [row for row in ROWS if len(row) == 4 and row[3].startswith("`")]


@pytest.mark.parametrize(("limit", "value", "constant"), LIMITS, ids=[row[0] for row in LIMITS])
def test_documented_limit_equals_constant(limit, value, constant):
    parts = constant.strip("`").split(".")
    n_modules = 2 if parts[0] != "request" else 1
    found = import_module(".".join(("parallel_llama", *parts[:n_modules])))
    for name in parts[n_modules:]:
        found = getattr(found, name)
    said = value.replace(",", "")
    assert str(found) == said or float(str(found)) == float(said), limit


@pytest.mark.parametrize("row", FLAWS, ids=[row[0] for row in FLAWS])
def test_listed_flaw_names_an_existing_test(row):
    path, name = row[3].strip("`").split("::")
    tree = ast.parse((ROOT / path).read_text())
    assert name in {node.name for node in tree.body if hasattr(node, "name")}


def test_at_least_40_flaws_are_listed_once_each():
    names = [row[0].removesuffix("\u2020") for row in FLAWS]
    assert len(set(names)) == len(names) >= 40 and len(LIMITS) >= 40
    assert all(re.fullmatch(r"(CVE|PYSEC)-\d{4}-\d+|vllm#\d+", name) for name in names)
