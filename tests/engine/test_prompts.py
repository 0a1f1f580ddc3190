"""Prompts in all accepted forms, also those of vLLM; a single prompt needs no list."""

import numpy as np
import pytest
import torch

from parallel_llama import Chat, SamplingParams, UsageError
from parallel_llama.engine.input_processor import as_prompts, per_prompt

TALK = [{"role": "user", "content": "Hi!"}]


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("Hi!", ["Hi!"]),
        (["Hi!"], ["Hi!"]),
        (("a", "b"), ["a", "b"]),
        ([1, 2, 3], [[1, 2, 3]]),
        ((1, 2), [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        ([(1, 2), "a"], [[1, 2], "a"]),
        (["a", [1, 2], TALK], ["a", [1, 2], Chat(TALK)]),
        (TALK, [Chat(TALK)]),
        ([TALK, TALK], [Chat(TALK)] * 2),
        (Chat(TALK), [Chat(TALK)]),
        ([Chat(TALK), "a"], [Chat(TALK), "a"]),
        ({"prompt": "Hi!"}, ["Hi!"]),
        ({"prompt_token_ids": [1, 2]}, [[1, 2]]),
        ([{"prompt": "Hi!"}, {"prompt_token_ids": (1, 2)}], ["Hi!", [1, 2]]),
        (np.array([1, 2]), [[1, 2]]),
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        (torch.tensor([1, 2]), [[1, 2]]),
        ([np.int64(1), np.int32(2)], [[1, 2]]),
        ([np.array([1]), torch.tensor([2])], [[1], [2]]),
        ((text for text in ("a", "b")), ["a", "b"]),
        ([], []),
        ([[]], [[]]),
        ("", [""]),
    ],
)
def test_accepted_forms_are_converted_to_a_list_of_prompts(given, prompts):
    """Regression: a string became a prompt per character, and a dict a prompt per key."""
    assert as_prompts(given) == prompts


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (5, "prompts cannot be int 5; give a string, a list of token ids, a conversation"),
        (None, "prompts cannot be NoneType None"),
        (np.array(5), r"prompts cannot be ndarray array\(5\)"),
        (torch.tensor(5), r"prompts cannot be Tensor tensor\(5\)"),
        (b"Hi!", "cannot be bytes b'Hi!'"),
        ({"a", "b"}, "cannot be set"),
        ([None], "prompt 0: a prompt cannot be NoneType None"),
        (["a", 5], "prompt 1: a prompt cannot be int 5"),
        (["a", b"b"], "prompt 1: a prompt cannot be bytes"),
        ([1, "a"], "token str 'a' is not a whole number"),
        ([1.5, 2], "prompt 0: a prompt cannot be float 1.5"),
        ([True, False], "prompt 0: a prompt cannot be bool True"),
        (np.array([1.5]), "prompt 0: a prompt cannot be float"),
        ({}, r"keys \(none\); give"),
        ({"text": "Hi!"}, "keys text; give"),
        ({"prompt": "Hi!", "multi_modal_data": {}}, "keys prompt, multi_modal_data; give"),
        ({"prompt": ["Hi!"]}, "must be a string"),
        ({"prompt_token_ids": "12"}, "must be a list of token ids"),
        ({"prompt_token_ids": ["1"]}, "token str '1' is not a whole number"),
        ([{"prompt": 5}], "prompt 0: .* must be a string"),
    ],
)
def test_invalid_prompts_are_refused_with_a_reason(given, says):
    with pytest.raises(UsageError, match=says):
        as_prompts(given)


ONE, OTHER = SamplingParams(max_tokens=1), SamplingParams(max_tokens=2)


@pytest.mark.parametrize(
    ("params", "adapter", "settings"),
    [
        (None, None, [(None, None)] * 2),
        (ONE, "sql", [(ONE, "sql")] * 2),
        ((ONE, OTHER), [None, "sql"], [(ONE, None), (OTHER, "sql")]),
        ([None, ONE], iter(["sql", None]), [(None, "sql"), (ONE, None)]),
    ],
)
def test_settings_are_one_for_all_prompts_or_one_for_each(params, adapter, settings):
    assert per_prompt(2, params, adapter) == settings


@pytest.mark.parametrize(
    ("params", "adapter", "says"),
    [
        (
            {"max_tokens": 3},
            None,
            "must be SamplingParams, or one for each prompt in a list, not d",
        ),
        ("greedy", None, "sampling params must be SamplingParams.* not str 'greedy'"),
        (7, None, "sampling params must be SamplingParams.* not int 7"),
        ([ONE, {"max_tokens": 3}], None, "sampling params must be SamplingParams.* not dict"),
        (None, 3, "an adapter must be a name.* not int 3"),
        (None, ["sql", 3], "an adapter must be a name.* not int 3"),
        ([ONE], None, "2 prompts and 1 sampling params"),
        (None, ["sql"], "2 prompts and 1 adapters"),
    ],
)
def test_settings_of_other_types_are_refused(params, adapter, says):
    """Regression: a dict was taken for a list of its keys, and the call raised AttributeError."""
    with pytest.raises(UsageError, match=says):
        per_prompt(2, params, adapter)
