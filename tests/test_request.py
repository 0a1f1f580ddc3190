"""Sampling parameters, requests on the wire, the context limit and stop strings."""

import json
import math
import time
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel_llama.engine.detokenizer import StopChecker
from parallel_llama.engine.messages import StepMessage, decode_message
from parallel_llama.errors import ContextExceeded, UsageError
from parallel_llama.request import (
    Completion,
    Grammar,
    Request,
    SamplingParams,
    TokenLogprob,
    resolve_max_tokens,
    resolve_seed,
    resolve_stop_ids,
)

BAD_PARAMS: dict[str, list[Any]] = {
    "max_tokens": [0, 1.5, True, "8", 2**40],
    "temperature": [-0.1, math.nan, 10**400, True, None, np.array([1.0])],
    "top_p": [0, 1.0001, np.float64("nan")],
    "top_k": [-2, False],
    "min_p": [-0.5, 2],
    "seed": [2**63, -(2**63) - 1],
    "stop": ["", [3], ["x"] * 65, ["x" * 5000]],
    "stop_token_ids": [2, [-1], [True], range(5)],
    "ignore_eos": [1],
    "logprobs": [-1, 21],
    "prompt_logprobs": [-1, 21],
    "n": [0, 129, np.int64(0), np.bool_(True), torch.tensor(True)],
    "min_tokens": [-1, 129],  # more than max_tokens
    "repetition_penalty": [0, 1000],
    "presence_penalty": [2.5],
    "frequency_penalty": [-2.01, math.inf],
    "logit_bias": [
        {5: 101},
        {-1: 1.0},
        {"5": 1.0},
        {True: 1.0},
        {2**31: 1.0},
        {5: "1"},
        5,
        ((5,),),
        ((5, 1.0), (5, 2.0)),
        dict.fromkeys(range(5000), 1.0),
    ],
    "cache_salt": [5, "x" * 257, "\ud800"],
    "bad_words": [[""], [5], ["x"] * 1025],
    "allowed_token_ids": [[], [-1], "12"],
    "include_stop_str_in_output": [1],
    "skip_special_tokens": [None],
    "grammar": ["a+", {"kind": "regex", "text": "a+"}],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in BAD_PARAMS.items() for value in values]
)
def test_a_bad_sampling_parameter_is_refused_by_name(name, value):
    with pytest.raises(UsageError, match=rf"\b{name}\b") as caught:
        SamplingParams(**{name: value})
    assert len(str(caught.value)) < 200


def test_good_parameters_are_stored_in_the_declared_types():
    given: dict[str, Any] = {"stop": ["a", "b"], "stop_token_ids": [3, 3, 4]}
    params = SamplingParams(temperature=1, top_p=1, **given)
    assert type(params.temperature) is float
    assert params.stop == ("a", "b")
    assert params.stop_token_ids == frozenset({3, 4})
    hash(params)


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        ({"stop": "###"}, {"stop": ("###",)}),
        ({"bad_words": "mud"}, {"bad_words": ("mud",)}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"seed": -1}, {"seed": None}),
        ({"max_tokens": None}, {"max_tokens": None}),
        ({"max_tokens": np.int32(7), "n": np.uint8(2)}, {"max_tokens": 7, "n": 2}),
        ({"temperature": np.float32(0.5), "seed": np.int64(3)}, {"temperature": 0.5, "seed": 3}),
        ({"stop_token_ids": np.array([3, 4])}, {"stop_token_ids": frozenset({3, 4})}),
        ({"allowed_token_ids": torch.tensor([5])}, {"allowed_token_ids": frozenset({5})}),
        ({"logit_bias": {np.int64(5): np.float32(1)}}, {"logit_bias": ((5, 1.0),)}),
    ],
)
def test_parameters_in_style_of_other_engines_are_accepted(given, stored):
    """Regression: a bare stop string, top_k=-1 and NumPy numbers were refused.

    With seed=-1, which other engines take for a random seed, all calls drew the same tokens.
    """
    params = SamplingParams(**given)
    for name, value in stored.items():
        found = getattr(params, name)
        assert found == value and type(found) is type(value)
    (again,) = msgspec.json.decode(msgspec.json.encode([params]), type=list[SamplingParams])
    assert again == params


def test_logit_bias_is_stored_as_pairs_sorted_by_token_id():
    as_mapping: Any = {9: 1, 2: -0.5}
    params = SamplingParams(logit_bias=as_mapping)
    assert params.logit_bias == ((2, -0.5), (9, 1.0))
    assert type(params.logit_bias[1][1]) is float
    assert SamplingParams(logit_bias=((9, 1.0), (2, -0.5))) == params
    hash(params)


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("ebnf", "x", "lark"),
        ("regex", "", "empty"),
        ("regex", 5, "must be a string"),
        ("lark", "x" * 65537, "65536"),
        ("json_schema", "\ud800", "surrogate"),
    ],
)
def test_grammar_with_invalid_kind_or_text_is_refused(kind, text, words):
    with pytest.raises(UsageError, match=words):
        Grammar(kind, text)


@pytest.mark.parametrize(
    ("penalty", "penalized"),
    [
        ({}, False),
        ({"repetition_penalty": 1.1}, True),
        ({"presence_penalty": -0.5}, True),
        ({"frequency_penalty": 0.5}, True),
    ],
)
def test_has_penalties_is_true_only_with_a_penalty(penalty, penalized):
    assert SamplingParams(**penalty).has_penalties is penalized


@pytest.mark.parametrize("temperature", [0, 0.0, -0.0, 1e-9])
def test_temperature_near_zero_is_greedy_despite_filters(temperature):
    params = SamplingParams(temperature=temperature, top_k=5, top_p=0.5)
    assert params.is_greedy
    assert not params.is_filtered


@pytest.mark.parametrize(
    ("filters", "filtered"),
    [({}, False), ({"top_k": 1}, True), ({"top_p": 0.99}, True), ({"min_p": 0.01}, True)],
)
def test_is_filtered_is_true_only_with_a_filter(filters, filtered):
    assert SamplingParams(temperature=0.7, **filters).is_filtered is filtered


def test_a_request_that_fills_the_context_exactly_fits():
    assert resolve_max_tokens(100, SamplingParams(max_tokens=28), 128) == 28


def test_max_tokens_none_extends_to_end_of_context():
    assert resolve_max_tokens(100, SamplingParams(max_tokens=None), 128) == 28
    with pytest.raises(ContextExceeded, match="shorten the prompt to at most 98 tokens"):
        resolve_max_tokens(100, SamplingParams(max_tokens=None, min_tokens=30), 128)
    with pytest.raises(ContextExceeded, match=r"has 128; lower min_tokens=200, or enlarge"):
        resolve_max_tokens(100, SamplingParams(max_tokens=None, min_tokens=200), 128)


@pytest.mark.parametrize(
    ("n_prompt", "max_tokens", "words"),
    [
        (100, 29, ["100", "29", "128", "ask for at most 28 new tokens, or enlarge"]),
        (128, 1, ["128 prompt tokens and 1 new token need", "shorten the prompt to at most 127"]),
        (5000, 128, ["5000", "shorten the prompt to at most 127"]),
        (0, 1, ["empty"]),
    ],
)
def test_a_request_that_does_not_fit_is_refused_with_the_numbers(n_prompt, max_tokens, words):
    with pytest.raises(UsageError) as caught:
        resolve_max_tokens(n_prompt, SamplingParams(max_tokens=max_tokens), 128)
    for word in words:
        assert word in str(caught.value)


def test_none_is_an_empty_list_as_in_vllm():
    names = "stop", "stop_token_ids", "logit_bias", "bad_words"
    assert SamplingParams(**dict.fromkeys(names)) == SamplingParams()


def test_seed_is_given_or_derived_from_run_and_line():
    own = SamplingParams(seed=7)
    free = SamplingParams()
    assert resolve_seed(own, 1, 0) == resolve_seed(own, 2, 9) == 7
    seeds = [resolve_seed(free, run, line) for run in range(30) for line in range(30)]
    assert len(set(seeds)) == 900
    assert all(0 <= seed < 2**63 for seed in seeds)
    # Pinned: a saved run must give the same draws after an upgrade.
    assert resolve_seed(free, 0, 0) == 6930534593788656518


def test_eos_ends_a_request_unless_it_is_ignored():
    assert resolve_stop_ids(SamplingParams(stop_token_ids=frozenset({9})), [1, 2]) == {1, 2, 9}
    assert resolve_stop_ids(
        SamplingParams(stop_token_ids=frozenset({9}), ignore_eos=True), [1, 2]
    ) == {9}


def test_json_line_has_fixed_keys_and_logprobs_only_if_present():
    plain = Completion(3, "hi", (5, 2), "stop", 4)
    assert plain.to_json() == {
        "index": 3,
        "text": "hi",
        "tokens": [5, 2],
        "finish_reason": "stop",
        "n_prompt_tokens": 4,
    }
    logprobs = (TokenLogprob(5, -0.5, ((6, -1.5),)), TokenLogprob(2, -0.25, ()))
    line = Completion(3, "hi", (5, 2), "stop", 4, logprobs).to_json()
    assert json.loads(json.dumps(line))["logprobs"] == [
        {"token": 5, "logprob": -0.5, "top": [[6, -1.5]]},
        {"token": 2, "logprob": -0.25, "top": []},
    ]


def test_json_line_has_choice_only_with_several_choices():
    assert "choice" not in Completion(3, "hi", (5,), "stop", 4).to_json()
    both = [
        Completion(3, "", (5,), "timeout", 4, choice=choice, n_choices=2).to_json()
        for choice in (0, 1)
    ]
    assert [line["choice"] for line in both] == [0, 1]


def test_json_line_has_prompt_logprobs_if_present():
    scored = (None, TokenLogprob(5, -0.5, ((6, -1.5),)))
    line = Completion(0, "", (1,), "cancelled", 2, prompt_logprobs=scored).to_json()
    assert json.loads(json.dumps(line))["prompt_logprobs"] == [
        None,
        {"token": 5, "logprob": -0.5, "top": [[6, -1.5]]},
    ]


TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.integers(1000, 10**6),
    min_tokens=st.integers(0, 1000),
    n=st.integers(1, 128),
    repetition_penalty=st.floats(0.01, 100),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    logit_bias=st.dictionaries(st.integers(0, 2**31 - 1), st.floats(-100, 100), max_size=4),
    prompt_logprobs=st.none() | st.integers(0, 20),
    cache_salt=st.none() | TEXT,
    grammar=st.none() | st.builds(Grammar, st.sampled_from(["json_schema", "regex", "lark"]), TEXT),
    temperature=st.floats(0, 100),
    top_p=st.floats(1e-6, 1),
    top_k=st.integers(0, 1000),
    min_p=st.floats(0, 1),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    stop=st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), max_size=4),
    stop_token_ids=st.frozensets(st.integers(0, 2**31 - 1), max_size=4),
    ignore_eos=st.booleans(),
    logprobs=st.none() | st.integers(0, 20),
)
REQUESTS = st.builds(
    Request,
    index=st.integers(0, 2**40),
    prompt=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=20).map(tuple),
    params=PARAMS,
    seed=st.integers(-(2**63), 2**63 - 1),
    stop_ids=st.frozensets(st.integers(0, 2**31 - 1), max_size=4),
)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(st.lists(REQUESTS, max_size=4))
def test_requests_survive_the_wire_with_values_and_types(requests):
    orders = StepMessage(tuple(enumerate(requests)))
    again = [request for _, request in decode_message(orders.encode()).begin]
    assert again == requests
    assert all(type(r.params.stop) is tuple and type(r.prompt) is tuple for r in again)


def _tampered(**changes: object) -> bytes:
    request = Request(0, (1, 2), SamplingParams(), 0, frozenset())
    fields = msgspec.to_builtins(request)
    for path, value in changes.items():
        target = fields["params"] if path in fields["params"] else fields
        target[path] = value
    return msgspec.msgpack.encode({"begin": [[0, fields]], "end": [], "rpc": b""})


def _whole_message() -> bytes:
    return StepMessage(((0, Request(0, (1,), SamplingParams(), 0, frozenset())),)).encode()


@pytest.mark.parametrize(
    "message",
    [
        b"\xc1",
        b"\x91",
        msgspec.msgpack.encode({"begin": 0}),
        _tampered(temperature=math.nan),
        _tampered(top_k=-2),
        _tampered(max_tokens=True),
        _tampered(max_tokens=None),
        _tampered(bad_ids=[["x"]]),
        _tampered(prompt=[]),
        _tampered(prompt=[-1]),
        _tampered(prompt=[2**31]),
        _tampered(prompt=[1.5]),
        _tampered(index=-1),
        _tampered(stop=[""]),
        _tampered(logit_bias=[[1, 2, 3]]),
        _tampered(logit_bias=[[1, 1000.0]]),
        _tampered(min_tokens=10**6),
        _tampered(grammar={"kind": "ebnf", "text": "x"}),
        _tampered(grammar={"kind": "regex", "text": ""}),
        _whole_message()[:-1],
        _whole_message() + b"\x00",
    ],
)
def test_a_damaged_message_is_refused_on_arrival(message):
    with pytest.raises(ValueError, match="not valid"):
        decode_message(message)


def test_tampered_message_with_valid_value_decodes():
    """Guards the test above: without a bad value its messages decode."""
    (_, request), *_ = decode_message(_tampered(temperature=0.5)).begin
    assert request.params.temperature == 0.5


def _whole(text: str, stops: list[str], n_free: int = 0) -> tuple[str, str]:
    """The definition: the occurrence that ends first, and the longest one that ends there.

    Occurrences that end within the first `n_free` characters do not count.
    """
    ends = [
        (start + len(stop), start)
        for stop in stops
        for start in range(len(text))
        if text.startswith(stop, start) and start + len(stop) > n_free
    ]
    if not ends:
        return text, ""
    end, start = min(ends)
    return text[:start], text[start:end]


def _streamed(pieces: list[str], stops: list[str]) -> tuple[str, str]:
    stream = StopChecker(stops)
    shown = [stream.push(piece) for piece in pieces]
    shown.append(stream.flush())
    assert stream.flush() == ""
    return "".join(shown), stream.found


SHORT_STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)


@settings(max_examples=200, derandomize=True, deadline=None)
@given(SHORT_STOPS, st.lists(st.text("abc", max_size=6), max_size=8))
def test_streamed_stop_search_matches_search_of_whole_text(stops, pieces):
    """Stop strings of two letters often overlap, and often contain or end each other."""
    assert _streamed(pieces, stops) == _whole("".join(pieces), stops)


@settings(max_examples=200, derandomize=True, deadline=None)
@given(SHORT_STOPS, st.text("abc", max_size=20), st.integers(0, 9))
def test_stop_strings_that_end_while_no_end_is_allowed_do_not_count(stops, text, n_free):
    stream = StopChecker(stops)
    shown = "".join(stream.push(char, may_end=n >= n_free) for n, char in enumerate(text))
    assert (shown + stream.flush(), stream.found) == _whole(text, stops, n_free)


@settings(max_examples=150, derandomize=True, deadline=None)
@given(SHORT_STOPS, st.text("abc", max_size=20))
def test_exactly_the_longest_stop_string_prefix_is_held_back(stops, text):
    """Less would show part of a stop string; more would delay text without need."""
    stream = StopChecker(stops)
    shown = ""
    for n_read, char in enumerate(text, 1):
        shown += stream.push(char)
        if stream.found:
            return
        read = text[:n_read]
        longest = max(
            (n for stop in stops for n in range(len(stop)) if read.endswith(stop[:n])), default=0
        )
        assert shown == read[: n_read - longest]


def test_many_long_stop_strings_do_not_slow_a_long_stream():
    """Regression: searching the held text again for each piece took minutes here."""
    stops = ["a" * n + "b" for n in range(40, 103)]
    stream = StopChecker(stops)
    start = time.process_time()
    shown = "".join(stream.push("a") for _ in range(200_000))
    assert time.process_time() - start < 20
    assert len(shown) == 200_000 - 102
    assert stream.push("b") == ""
    assert stream.found


def test_only_tokens_that_complete_a_bad_word_are_banned():
    params = SamplingParams(max_tokens=9)
    request = Request(0, (1,), params, 0, frozenset(), bad_ids=((5,), (6, 7), (8, 9, 4)))
    assert request.ends_of_bad_words([]) == {5}
    assert request.ends_of_bad_words([6]) == {5, 7}
    assert request.ends_of_bad_words([6, 1]) == {5}
    assert request.ends_of_bad_words([2, 8, 9]) == {5, 4}
    assert request.ends_of_bad_words([9]) == {5}
