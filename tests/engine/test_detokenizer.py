"""A completion's text on rank 0: which text is emitted or held back, and where it ends."""

from dataclasses import replace
from pathlib import Path

import pytest
from tiny_folder import write_tokenizer

from parallel_llama.engine.detokenizer import Detokenizer
from parallel_llama.request import Request, SamplingParams, with_special_tokens
from parallel_llama.tokenizer import Tokenizer, load_tokenizer

PARAMS = SamplingParams(max_tokens=99)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer with one token per byte; id 1 ends the text."""
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    (folder / "config.json").write_text("{}")
    return load_tokenizer(folder)


def detokenizer(tokenizer: Tokenizer | None, params: SamplingParams = PARAMS) -> Detokenizer:
    return Detokenizer(Request(0, (0,), params, 0, frozenset({1})), tokenizer)


def told(
    tokenizer: Tokenizer, text: str, params: SamplingParams = PARAMS, ends: bool = False
) -> tuple[list[str], int | None, str]:
    """The emitted pieces, the number of tokens at the stop, and the whole text."""
    own = detokenizer(tokenizer, params)
    ids = tokenizer.encode(text)[1:]  # without the beginning
    pieces = []
    for n, token in enumerate(ids, 1):
        piece, stopped = own.push(token, ends and n == len(ids))
        pieces.append(piece)
        if stopped:
            return pieces, n, own.text
    return pieces, None, own.text


def test_text_is_emitted_token_by_token(tokenizer):
    assert told(tokenizer, "abc") == (["a", "b", "c"], None, "abc")


def test_stop_id_ends_the_completion_and_adds_no_text(tokenizer):
    own = detokenizer(tokenizer)
    own.push(tokenizer.encode("a")[1], False)
    assert own.push(1, False) == ("", True)
    assert own.text == "a"


def test_stop_id_emits_text_held_back_for_a_stop_string(tokenizer):
    own = detokenizer(tokenizer, replace(PARAMS, stop=("abc",)))
    assert [own.push(id, False) for id in tokenizer.encode("ab")[1:]] == [("", False)] * 2
    assert own.push(1, False) == ("ab", True)
    assert own.text == "ab"


def test_text_ends_before_a_stop_string(tokenizer):
    params = replace(PARAMS, stop=("cd",))
    assert told(tokenizer, "abcde", params) == (["a", "b", "", ""], 4, "ab")


def test_last_token_emits_text_held_back_for_a_stop_string(tokenizer):
    params = replace(PARAMS, stop=("bcd",))
    assert told(tokenizer, "abc", params, ends=True) == (["a", "", "bc"], None, "abc")


def test_close_emits_nothing_after_a_stop_string(tokenizer):
    own = detokenizer(tokenizer, replace(PARAMS, stop=("ab",)))
    for id in tokenizer.encode("ab")[1:]:
        own.push(id, False)
    assert own.close() == "" and own.text == ""


def test_close_emits_text_held_back_for_a_stop_string(tokenizer):
    own = detokenizer(tokenizer, replace(PARAMS, stop=("abc",)))
    for id in tokenizer.encode("ab")[1:]:
        own.push(id, False)
    assert own.close() == "ab" and own.text == "ab"


def test_stop_strings_do_not_count_before_min_tokens(tokenizer):
    params = replace(PARAMS, stop=("a",), min_tokens=3)
    assert told(tokenizer, "aaaaa", params) == (["a", "a", "a", ""], 4, "aaa")


@pytest.mark.parametrize(
    ("stop", "min_tokens", "text", "expected"),
    [
        ("ab", 2, "xabcd", (["x", "", ""], 3, "x")),
        ("ab", 3, "xabab", (["x", "", "ab", "", ""], 5, "xab")),
        ("aa", 2, "aaab", (["", "a", ""], 3, "a")),
    ],
)
def test_stop_string_that_ends_after_min_tokens_ends_the_completion(
    tokenizer, stop, min_tokens, text, expected
):
    """Regression: a stop string that began within min_tokens was not found."""
    params = replace(PARAMS, stop=(stop,), min_tokens=min_tokens)
    assert told(tokenizer, text, params) == expected


def test_text_held_back_before_min_tokens_is_emitted_at_the_end(tokenizer):
    params = replace(PARAMS, stop=("ab",), min_tokens=3)
    assert told(tokenizer, "xa", params, ends=True) == (["x", "a"], None, "xa")


def test_stop_strings_do_not_match_hidden_markers(tokenizer):
    """Regression: a stop string in the text of a marker ended the answer before its first word."""
    request = Request(0, (0,), replace(PARAMS, stop=("|", "ab")), 0, frozenset({1}))
    own = Detokenizer(with_special_tokens(request), tokenizer)
    turn = 2
    a, b, bar = tokenizer.encode("ab|", bos=False)
    shown = [own.push(token, False) for token in (turn, a, turn, b, bar)]
    assert [piece for piece, _ in shown] == ["<|turn|>", "", "a<|turn|>", "b", ""]
    assert [stops for _, stops in shown] == [False] * 4 + [True]
    assert (own.text, own.stop_reason) == ("<|turn|>a<|turn|>b", "|")


def test_stop_strings_match_special_tokens_that_the_client_sees(tokenizer):
    params = replace(PARAMS, stop=("|",), skip_special_tokens=False)
    request = Request(0, (0,), params, 0, frozenset({1}))
    own = Detokenizer(with_special_tokens(request), tokenizer)
    assert own.push(2, False) == ("<", True)


def test_hidden_marker_that_ends_the_completion_is_not_shown(tokenizer):
    """Regression: include_stop_str_in_output showed it, though special tokens were to be hidden."""
    params = replace(PARAMS, include_stop_str_in_output=True)
    (a,) = tokenizer.encode("a", bos=False)
    for is_hidden, text in ((True, "a"), (False, "a<|end|>")):
        own_params = replace(params, skip_special_tokens=is_hidden)
        request = Request(0, (0,), own_params, 0, frozenset({1}))
        own = Detokenizer(with_special_tokens(request), tokenizer)
        assert own.push(a, False) == ("a", False)
        assert own.push(1, False) == (text[1:], True)
        assert own.text == text


def test_stop_id_ends_the_completion_without_a_tokenizer():
    own = detokenizer(None)
    assert own.push(5, False) == ("", False)
    assert own.push(1, False) == ("", True)
    assert own.close() == own.text == ""
