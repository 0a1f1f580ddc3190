"""A completion's text on rank 0: what is shown, what is held back, and where it ends."""

from dataclasses import replace
from pathlib import Path

import pytest
from tiny_folder import write_tokenizer

from parallel_llama.engine.detokenizer import Detokenizer
from parallel_llama.request import Request, SamplingParams
from parallel_llama.tokenizer import Tokenizer, load_tokenizer

PARAMS = SamplingParams(max_tokens=99)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A token for every byte; 1 is the end."""
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    (folder / "config.json").write_text("{}")
    return load_tokenizer(folder)


def detokenizer(tokenizer: Tokenizer | None, params: SamplingParams = PARAMS) -> Detokenizer:
    return Detokenizer(Request(0, (0,), params, 0, frozenset({1})), tokenizer)


def told(
    tokenizer: Tokenizer, text: str, params: SamplingParams = PARAMS, ends: bool = False
) -> tuple[list[str], int | None, str]:
    """Pieces shown, the number of tokens at which it stopped, and all that was shown."""
    own = detokenizer(tokenizer, params)
    ids = tokenizer.encode(text)[1:]  # without the beginning
    pieces = []
    for n, token in enumerate(ids, 1):
        piece, stopped = own.push(token, ends and n == len(ids))
        pieces.append(piece)
        if stopped:
            return pieces, n, own.text
    return pieces, None, own.text


def test_text_is_shown_as_it_comes(tokenizer):
    assert told(tokenizer, "abc") == (["a", "b", "c"], None, "abc")


def test_a_stop_id_ends_it_and_is_no_text(tokenizer):
    own = detokenizer(tokenizer)
    own.push(tokenizer.encode("a")[1], False)
    assert own.push(1, False) == ("", True)
    assert own.text == "a"


def test_a_stop_id_brings_out_what_a_stop_string_held_back(tokenizer):
    own = detokenizer(tokenizer, replace(PARAMS, stop=("abc",)))
    assert [own.push(id, False) for id in tokenizer.encode("ab")[1:]] == [("", False)] * 2
    assert own.push(1, False) == ("ab", True)
    assert own.text == "ab"


def test_text_ends_before_a_stop_string(tokenizer):
    params = replace(PARAMS, stop=("cd",))
    assert told(tokenizer, "abcde", params) == (["a", "b", "", ""], 4, "ab")


def test_the_last_token_holds_nothing_back(tokenizer):
    params = replace(PARAMS, stop=("bcd",))
    assert told(tokenizer, "abc", params, ends=True) == (["a", "", "bc"], None, "abc")


def test_nothing_is_shown_after_a_stop_string(tokenizer):
    own = detokenizer(tokenizer, replace(PARAMS, stop=("ab",)))
    for id in tokenizer.encode("ab")[1:]:
        own.push(id, False)
    assert own.close() == "" and own.text == ""


def test_an_outside_end_brings_out_what_was_held_back(tokenizer):
    own = detokenizer(tokenizer, replace(PARAMS, stop=("abc",)))
    for id in tokenizer.encode("ab")[1:]:
        own.push(id, False)
    assert own.close() == "ab" and own.text == "ab"


def test_stop_strings_do_not_count_before_min_tokens(tokenizer):
    """Not even those that begin there."""
    params = replace(PARAMS, stop=("a",), min_tokens=3)
    assert told(tokenizer, "aaaaa", params) == (["a", "a", "a", ""], 4, "aaa")


def test_without_a_tokenizer_stop_ids_still_end_it():
    own = detokenizer(None)
    assert own.push(5, False) == ("", False)
    assert own.push(1, False) == ("", True)
    assert own.close() == own.text == ""
