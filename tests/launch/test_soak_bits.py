"""The soak test of bits, with its smallest number of models, and with a planted fault."""

import pytest

from launch.soak import bits

pytestmark = pytest.mark.slow

ONE_MODEL = ("--models=1", "--families", "llama")


@pytest.fixture(autouse=True)
def few_ranks(monkeypatch):
    monkeypatch.setattr(bits, "MAX_RANKS", 3)


def test_random_model_gives_equal_bits_in_a_random_setup(capsys):
    assert bits.main(ONE_MODEL) == 0
    assert "1 models passed, 0 failed, " in capsys.readouterr().out.splitlines()[-1]


def test_differences_without_exact_sums_are_reported(capsys):
    assert bits.main([*ONE_MODEL, "--planted"]) == 1
    out = capsys.readouterr().out
    assert "logprobs from position" in out and "0 models passed, 1 failed, " in out
