"""`score`: the perplexity of a text."""

import json
import math
import shutil

import pytest
from safetensors.torch import load_file, save_file

from parallel_llama.cli.main import main
from parallel_llama.cli.score import perplexity


def test_perplexity_of_a_uniform_guess_is_the_number_of_choices():
    assert perplexity([math.log(1 / 7)] * 5) == pytest.approx(7)
    assert perplexity([]) is None


@pytest.mark.parametrize(("flags", "shown"), [(["--json"], '"perplexity": null'), ([], " inf\n")])
def test_perplexity_that_no_float_holds_is_infinite(model, tmp_path, capfd, flags, shown):
    folder = shutil.copytree(model, tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] *= 1e6
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (tmp_path / "tokens").write_text(json.dumps([5, 9, 13, 17, 11, 7]))
    tokens = f"--tokens-file={tmp_path / 'tokens'}"
    assert main(["score", f"--model={folder}", tokens, *flags]) == 0
    assert shown in capfd.readouterr().out
