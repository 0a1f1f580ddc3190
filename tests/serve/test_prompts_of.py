"""The prompts of a completion's body."""

from types import SimpleNamespace

import pytest

from parallel_llama.errors import UsageError
from parallel_llama.serve.bodies import CompletionBody
from parallel_llama.serve.completions import prompts_of


class Tokenizer:
    def encode(self, text, *, bos=True, special=True):
        return [1] * bos + [2] * special + list(text.encode())


INPUTS = SimpleNamespace(tokenizer=Tokenizer())


@pytest.mark.parametrize("prompt", ["a", ["a", "b"], [5, 6], [[5], [6, 7]]])
def test_strings_and_token_ids_are_used_as_prompts_unchanged(prompt):
    expected = prompt if isinstance(prompt, list) and prompt != [5, 6] else [prompt]
    assert prompts_of(CompletionBody(prompt=prompt), INPUTS) == expected


def test_add_special_tokens_false_adds_no_bos():
    body = CompletionBody(prompt=["a", "b"], add_special_tokens=False)
    assert prompts_of(body, INPUTS) == [[2, 97], [2, 98]]
    assert prompts_of(CompletionBody(prompt=[5], add_special_tokens=False), INPUTS) == [[5]]


def test_parse_special_false_still_adds_bos_to_nonempty_text():
    body = CompletionBody(prompt=["a", ""], parse_special=False)
    assert prompts_of(body, INPUTS) == [[1, 97], []]
    body = CompletionBody(prompt="a", parse_special=False, add_special_tokens=False)
    assert prompts_of(body, INPUTS) == [[97]]


@pytest.mark.parametrize("prompt", [["a", 5], ["a"] * 65])
def test_mixed_or_too_long_prompt_list_is_refused(prompt):
    with pytest.raises(UsageError, match="prompt"):
        prompts_of(CompletionBody(prompt=prompt), INPUTS)
