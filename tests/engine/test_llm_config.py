import json
from dataclasses import fields, replace
from pathlib import Path
from typing import get_type_hints

import numpy as np
import pytest

from parallel_llama.cli.model import _SETTINGS
from parallel_llama.engine.llm_config import LLMConfig, Settings
from parallel_llama.errors import UsageError


def test_settings_reach_other_processes_unchanged():
    config = LLMConfig("model", dtype="float64", seed=2**70, slice_of=(1, 3), timeout_s=200)
    config = replace(config, memory=(2, 1, 1))
    line = json.dumps(config.to_json()).encode()
    assert LLMConfig.from_json(line) == config
    assert LLMConfig.from_json(line).facts() == config.facts()


def test_paths_are_stored_as_strings(tmp_path):
    """Regression: a Path could not be sent to the other ranks."""
    config = LLMConfig(Path("model"), draft_model=Path("draft"), log_dir=tmp_path)
    assert config == LLMConfig("model", draft_model="draft", log_dir=str(tmp_path))
    assert LLMConfig.from_json(json.dumps(config.to_json()).encode()) == config


def test_switches_of_other_libraries_and_numbers_are_stored_as_bools():
    """Regression: the other ranks could not read exact=1, and np.True_ could not be sent."""
    switches = {"exact": 1, "integrity_check": np.False_, "verify": 0, "elastic": np.True_}
    config = LLMConfig(**switches, download=0)
    assert config == LLMConfig(exact=True, integrity_check=False, elastic=True)
    line = json.dumps(config.to_json()).encode()
    assert LLMConfig.from_json(line) == config
    assert LLMConfig.from_json(line).facts() == config.facts()


@pytest.mark.parametrize("line", [b"[]", b'{"block_size": "16"}', b'{"slice_of": [1]}'])
def test_json_with_wrong_types_is_refused(line):
    with pytest.raises(ValueError, match="Expected"):
        LLMConfig.from_json(line)


@pytest.mark.parametrize("slice_of", [(-1, 2), (2, 2), (0, 0)])
def test_slice_of_a_rank_out_of_range_is_refused(slice_of):
    with pytest.raises(UsageError, match="slice_of="):
        LLMConfig(slice_of=slice_of)


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        ({"kv_split": "tokens"}, "kv_split='tokens': use heads or sequence"),
        ({"exact": "yes"}, "exact='yes': use True, False or None"),
        ({"exact": [True]}, r"exact=\[True\]: use True, False or None"),
        ({"integrity_check": 2}, "integrity_check=2: use True, False or None"),
        ({"verify": "no"}, "verify='no': use True or False"),
        ({"elastic": None}, "elastic=None: use True or False"),
        ({"download": np.array([1])}, r"download=array\(\[1\]\): use True or False"),
        ({"memory": "large"}, "memory='large': use one number per rank"),
        ({"speeds": 2}, "speeds=2: use one number per rank"),
        ({"speeds": (2, 1), "elastic": True}, "elastic and speeds cannot be combined"),
        ({"max_drafts": -1}, "max_drafts=-1: use a whole number of at least 0"),
        ({"max_drafts": 9}, "max_drafts=9: use at most 8"),
        ({"seed": "one"}, "seed='one': use a whole number of at least 0"),
        ({"random_weights": 0.5}, r"random_weights=0\.5: use a whole number"),
        ({"kv_cache_bytes": 1e9}, r"kv_cache_bytes=1000000000\.0: use a whole number"),
        ({"max_seq_len": "4096"}, "max_seq_len='4096': use a whole number"),
        ({"block_size": 16.0}, r"block_size=16\.0: use a whole number"),
        ({"attention_sinks": 1.5}, r"attention_sinks=1\.5: use a whole number"),
        ({"timeout_s": 0}, "timeout_s=0: use a number of seconds above 0"),
        ({"model": b"m"}, "model=b'm': use a string or a path"),
        ({"draft_model": 7}, "draft_model=7: use a string or a path"),
        ({"log_dir": "/no/such"}, "log_dir=/no/such: use a folder that exists and can be written"),
        ({"start_timeout_s": float("nan")}, "start_timeout_s=nan: use a number of seconds"),
    ],
)
def test_invalid_setting_is_refused_with_a_remedy(settings, remedy):
    """Regression: these values were accepted; kv_split='tokens' ran as heads."""
    with pytest.raises(UsageError, match=remedy):
        LLMConfig(**settings)


def test_keyword_arguments_of_llm_are_the_fields_of_llm_config():
    own = get_type_hints(LLMConfig)
    del own["model"]
    assert get_type_hints(Settings) == own


def test_every_flag_of_a_setting_has_the_name_of_the_setting():
    """A flag with another name would not reach the LLM."""
    without = {"tp_size", "slice_of", "max_drafts", "timeout_s", "start_timeout_s", "adapters"}
    without |= {"speeds"}  # set by --calibration
    named = {flag.name.replace("-", "_") for flag in _SETTINGS}
    assert named == {field.name for field in fields(LLMConfig)} - without
