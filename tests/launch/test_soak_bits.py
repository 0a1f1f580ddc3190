"""The soak test of bits, with its smallest number of models, and with a planted fault."""

import pytest

from launch.soak import bits

pytestmark = pytest.mark.slow

ONE_MODEL = ("--models=1", "--runs=1", "--families", "9/3 tied")


def test_a_random_model_has_the_same_bits_in_a_random_way(capsys):
    assert bits.main(ONE_MODEL) == 0
    assert "1 models passed, 0 failed, " in capsys.readouterr().out.splitlines()[-1]


def test_sums_that_are_cut_are_reported(capsys):
    assert bits.main([*ONE_MODEL, "--planted"]) == 1
    out = capsys.readouterr().out
    assert "logprobs from position" in out and "0 models passed, 1 failed, " in out
