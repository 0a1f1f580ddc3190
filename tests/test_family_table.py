"""The tables of families in the documentation agree with the families' records."""

import re
import runpy
from pathlib import Path

import pytest

from parallel_llama.config.layouts import load_model_args
from parallel_llama.config.meta import args_from_mistral_params, args_from_params
from parallel_llama.families import FAMILIES
from parallel_llama.files.model_files import find_model

ROOT = Path(__file__).parents[1]
WRITER = runpy.run_path(str(ROOT / "docs" / "families.py"))
SIZES = {"dim": 64, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "vocab_size": 64}


def test_family_table_matches_family_records():
    _, table, _ = WRITER["parts"](WRITER["PAGE"].read_text())
    assert table == WRITER["as_markdown"](), "run: python docs/families.py"


def names_in(page: str) -> list[str]:
    """The first column of the table of shapes in configs/models, each family once."""
    table = page.partition("| models | for example |")[2].partition("\n\n")[0]
    names = re.findall(r"^\| ([^|]+?) \|", table, re.M)
    return list(dict.fromkeys(name.removesuffix(", new architecture") for name in names))


def test_the_pages_list_every_family_by_the_name_of_its_record():
    """Regression: README and docs/models.md used different names for a family."""
    expected = [family.models for family in FAMILIES.values()]
    assert names_in((ROOT / "README.md").read_text()) == expected
    assert names_in((ROOT / "docs/models.md").read_text()) == expected


def test_families_read_from_params_json_match_family_records():
    mistral = {**SIZES, "hidden_dim": 64, "norm_eps": 1e-5}
    experts = {"moe": {"num_experts": 4, "num_experts_per_tok": 2}}
    read = {args_from_params(SIZES).family: "meta"} | {
        args_from_mistral_params({**mistral, **more}).family: "mistral" for more in ({}, experts)
    }
    assert read == {name: family.params for name, family in FAMILIES.items() if family.params}


@pytest.mark.parametrize(
    "name", sorted(path.stem for path in (ROOT / "configs" / "models").glob("*.json"))
)
def test_published_shape_decodes_as_family_table_says(name):
    """The table is made from small models with the defaults of config.json."""
    args = load_model_args(find_model(name))
    usual = WRITER["usual_args"](FAMILIES[args.family])
    for device in ("cpu", "cuda"):
        assert WRITER["decoding"](args, device) == WRITER["decoding"](usual, device)
