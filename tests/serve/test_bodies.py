"""Every field of every body: at its bound, beyond it, with other types, and in malformed JSON."""

import json
import random
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from canary import Canary
from msgspec import inspect
from served import Served

from parallel_llama.request import SamplingParams
from parallel_llama.serve import params
from parallel_llama.serve.app import OPERATIONS
from parallel_llama.serve.bodies import (
    MAX_NESTED,
    MAX_TEXTS,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    InvalidBody,
    TokenizeBody,
    read_body,
)

PATHS = {each.body: each.path for each in OPERATIONS if each.body is not None}
BODIES = [*PATHS]

HI = [{"role": "user", "content": "hi"}]
EXAMPLES: dict[type, dict[str, Any]] = {
    ChatBody: {"messages": HI, "max_tokens": 1},
    CompletionBody: {"prompt": "hi", "max_tokens": 1},
    TokenizeBody: {"prompt": "hi"},
    DetokenizeBody: {"tokens": [5, 6]},
}
TOO_LONG = "context_length_exceeded"
VALUE = "the value goes here"  # a placeholder that hostile text replaces
Place = tuple[str | int, ...]


def fields(of: inspect.Type, at: Place = ()) -> Iterator[tuple[Place, inspect.Type]]:
    """Every field of a struct and of the structs in it, with its type."""
    match of:
        case inspect.StructType():
            for field in of.fields:
                yield (*at, field.name), field.type
                yield from fields(field.type, (*at, field.name))
        case inspect.UnionType():
            for member in of.types:
                yield from fields(member, at)
        case inspect.ListType():
            yield from fields(of.item_type, (*at, 0))


FIELDS = [
    (body, place, kind)
    for body in BODIES
    for place, kind in fields(inspect.type_info(body))
]  # fmt: skip
NAMES = [f"{body.__name__}.{'.'.join(map(str, place))}" for body, place, _ in FIELDS]
# Fields that chats and completions have in common are tried with completions only.
COMMON = {place[0] for body, place, _ in FIELDS if body is CompletionBody}
PLACES = [
    pytest.param(body, place, id=name)
    for (body, place, _), name in zip(FIELDS, NAMES, strict=True)
    if body is not ChatBody or place[0] not in COMMON
]


def members(of: inspect.Type) -> tuple[inspect.Type, ...]:
    return of.types if isinstance(of, inspect.UnionType) else (of,)


def example(of: inspect.Type) -> Any:
    """The simplest valid value of a type."""
    match of:
        case inspect.StructType():
            return {field.name: example(field.type) for field in of.fields if field.required}
        case inspect.UnionType():
            return example(of.types[0])
        case inspect.LiteralType():
            return of.values[0]
        case inspect.ListType():
            return [example(of.item_type)] * (of.min_length or 0)
        case inspect.StrType():
            return "a" * (of.min_length or 0)
        case inspect.IntType():
            return of.ge or 0
        case inspect.DictType():
            return {}
    raise AssertionError(of)


def placed(of: inspect.Type, given: Any, place: Place, value: Any) -> Any:
    """A body with a value at a place, and example values for the fields around it."""
    if not place:
        return value
    name, *rest = place
    match of:
        case inspect.UnionType():
            types = [t for t in of.types if any(at[0] == name for at, _ in fields(t) if at)]
            lists = [t for t in of.types if isinstance(t, inspect.ListType)]
            return placed((types if name != 0 else lists)[0], given, place, value)
        case inspect.ListType():
            return [placed(of.item_type, None, tuple(rest), value)]
        case inspect.StructType():
            (own,) = (field for field in of.fields if field.name == name)
            whole = {**example(of), **(given or {})}
            return {**whole, str(name): placed(own.type, whole.get(str(name)), tuple(rest), value)}
    raise AssertionError(of)


def values(of: inspect.Type) -> Iterator[tuple[Any, bool]]:
    """Values and whether they are valid: at the bounds of a type, and just beyond them."""
    match of:
        case inspect.StrType():
            if of.max_length is not None:
                yield "a" * of.max_length, True
                yield "a" * (of.max_length + 1), False
            if of.min_length:
                yield "a" * of.min_length, True
                yield "a" * (of.min_length - 1), False
        case inspect.IntType() | inspect.FloatType():
            step = 1 if isinstance(of, inspect.IntType) else 1e-9
            if of.ge is not None:
                yield of.ge, True
                yield of.ge - step, False
            if of.le is not None:
                yield of.le, True
                yield of.le + (step if abs(of.le) < 1000 else 1), False
        case inspect.ListType():
            item = example(of.item_type)
            if of.max_length is not None and len(json.dumps(item)) * of.max_length < 1 << 20:
                yield [item] * of.max_length, True
                yield [item] * (of.max_length + 1), False
            if of.min_length:
                yield [item] * (of.min_length - 1), False
            for value, is_fit in values(of.item_type):
                yield [value], is_fit
        case inspect.DictType():
            if of.max_length is not None:
                value = {"a": "a"} if isinstance(of.value_type, inspect.StrType) else {"a": 0}
                (item,) = value.values()
                yield {str(n): item for n in range(of.max_length)}, True
                yield {str(n): item for n in range(of.max_length + 1)}, False
        case inspect.LiteralType():
            for value in of.values:
                yield value, True
            yield "something else", False


def beyond(of: inspect.Type) -> Iterator[Any]:
    """Values just beyond a bound, and of types that a field does not have."""
    own = members(of)
    texts = any(isinstance(member, inspect.StrType) for member in own)
    for member in own:
        for value, is_fit in values(member):
            if not is_fit and not (texts and isinstance(value, str) and value == "something else"):
                yield value
    literals = [v for m in own if isinstance(m, inspect.LiteralType) for v in m.values]
    wrong = [
        (inspect.StrType, "\x00"),
        (inspect.IntType, 7),
        (inspect.FloatType, 0.5),
        (inspect.BoolType, True),
        (inspect.ListType, [[[]]]),
        (inspect.DictType, {"a": {}}),
    ]
    for kind, value in wrong:
        if any(isinstance(member, inspect.AnyType | kind) for member in own):
            continue
        is_number = kind is inspect.IntType
        if is_number and any(isinstance(member, inspect.FloatType) for member in own):
            continue
        if value not in literals:
            yield value


def send(served: Served, body: type, data: bytes) -> tuple[int, bytes]:
    path = PATHS[body]
    status, _, reply = served.send("POST", path, data, {"content-type": "application/json"})
    return status, reply


def of_body(body: type, place: Place, value: Any) -> bytes:
    given = EXAMPLES[body]
    return json.dumps(placed(inspect.type_info(body), given, place, value)).encode()


def require_error(reply: tuple[int, bytes], data: bytes) -> dict[str, Any]:
    """The request is refused with an error in OpenAI's form that does not quote long values."""
    status, text = reply
    error = json.loads(text)["error"]
    assert status == (404 if error["code"] == "model_not_found" else 400), (data[:200], text[:500])
    assert error["type"] == "invalid_request_error" and error["message"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert len(text) < 4096
    return error


@pytest.fixture(scope="module")
def canary(tiny: Served) -> Iterator[Canary]:
    with Canary(tiny) as canary:
        yield canary
        canary.check()


@pytest.mark.usefixtures("canary")
@pytest.mark.parametrize(("body", "place", "kind"), FIELDS, ids=NAMES)
def test_field_bounds_and_types_are_enforced(tiny, body, place, kind):
    for member in members(kind):
        for value, is_fit in values(member):
            if is_fit:
                data = of_body(body, place, value)
                reply = send(tiny, body, data)
                if reply[0] != 200:  # another rule, such as the length of the context
                    code = require_error(reply, data)["code"]
                    assert code in ("invalid_value", "model_not_found", TOO_LONG), data[:200]
                    message = json.loads(reply[1])["error"]["message"]
                    assert not message.startswith(("Expected", "Invalid", "Object")), message
    for value in beyond(kind):
        data = of_body(body, place, value)
        require_error(send(tiny, body, data), data)


DEEP = 100_000
HOSTILE = [
    b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-1e999", b"1e-999", b"-0.0",
    b"9" * 5000, b"-" + b"9" * 5000, b"9223372036854775808", b"18446744073709551616",
    b"0." + b"9" * 5000, b"0x10", b"01", b"+1", b".5", b"'a'", b'"a', b'"\xff\xfe"',
    b'"\xed\xa0\x80"', b'"\\ud800"', b'"\\udc00\\ud800"', b'"\\u0000"', b'"\x00"', b'"\\x41"',
    b'"\x1b[2J"', b'"\\u001b[2J\\u202e"', b'""', b'"' + b"a" * (1 << 20) + b'"',
    b'"' + "\U0001f999".encode() * (1 << 18) + b'"', b"[" * DEEP, b"[" * DEEP + b"]" * DEEP,
    b'{"a":' * DEEP + b"1" + b"}" * DEEP, b"[" * 500 + b"]" * 500,
    b'{"a":' * 500 + b"1" + b"}" * 500, b"[" + b'"a",' * 10_000 + b'"b"]',
    b"[" + b"1," * 10_000 + b"1]", b"[[1," + b"1," * 10_000 + b"1]]",
    b"{" + b",".join(b'"%d":1' % n for n in range(10_000)) + b"}",
    b"{" + b",".join(b'"%d":1' % 7 for _ in range(10_000)) + b"}", b"{}", b"[]", b"[null]",
    b"[{}]", b"null", b"true", b'{"__class__":"x","$ref":"#"}', b'{"$ref":"file:///etc/passwd"}',
    b'{"type":"text","text":"a"},"max_tokens":1', b"1,2", b"1}", b"/**/1", b"1//", b"",
]  # fmt: skip


@pytest.mark.parametrize("body", BODIES)
def test_hostile_field_values_never_cause_a_server_error(tiny, canary, body):
    """Regression: a body that is not UTF-8 caused a 500, and errors quoted long values in full."""
    places = (param.values[1] for param in PLACES if param.values[0] is body)
    for number, place in enumerate(places):
        around = of_body(body, place, VALUE)
        assert around.count(json.dumps(VALUE).encode()) == 1
        for text in HOSTILE[number % 3 :: 3]:
            data = around.replace(json.dumps(VALUE).encode(), text)
            reply = send(tiny, body, data)
            if reply[0] != 200:
                require_error(reply, data)
    canary.check()


@pytest.mark.parametrize("body", BODIES)
def test_body_that_is_not_one_json_object_is_refused(tiny, canary, body):
    given = EXAMPLES[body]
    good = json.dumps(given).encode()
    for data in (*HOSTILE, b"\xef\xbb\xbf" + good, good + good, good.decode().encode("utf-16")):
        require_error(send(tiny, body, data), data)
    canary.check()


@pytest.mark.parametrize(("body", "place"), PLACES)
def test_unknown_field_is_refused_by_name(tiny, body, place):
    """A misspelt field is refused at every depth, with the right name."""
    data = of_body(body, place, VALUE)
    wrong = data.replace(f'"{place[-1]}": "{VALUE}"'.encode(), b'"tempreture": 0')
    assert wrong != data
    message = require_error(send(tiny, body, wrong), wrong)["message"]
    assert "tempreture" in message or f"missing required field `{place[-1]}`" in message


@pytest.mark.parametrize(
    ("body", "given", "param", "code", "says"),
    [
        (ChatBody, {"tempreture": 1}, "tempreture", "unknown_parameter", "'temperature'"),
        (ChatBody, {"reasoning_efort": "low"}, "reasoning_efort", "unknown_parameter", "_effort'"),
        (
            ChatBody, {"stream_options": {"include_usge": True}},
            "stream_options.include_usge", "unknown_parameter", "'include_usage'",
        ),
        (ChatBody, {"messages": None}, "messages", "invalid_type", "array"),
        (ChatBody, {"top_p": 2}, "top_p", "invalid_value", "1.0"),
        (ChatBody, {"stop": ["a", 1]}, "stop[1]", "invalid_type", "str"),
        (
            ChatBody, {"max_completion_tokens": 0},
            "max_completion_tokens", "invalid_value", ">= 1",
        ),
        (ChatBody, {"modalities": ["audio"]}, "modalities[0]", "invalid_value", "audio"),
        (ChatBody, {"top_logprobs": 2}, "top_logprobs", "invalid_value", "set logprobs"),
        (ChatBody, {"logit_bias": {"a": 1}}, "logit_bias", "invalid_value", "token id"),
        (ChatBody, {"messages": [{"role": "a", "content": "a"}]}, "messages", "invalid_value", ""),
        (ChatBody, {"max_tokens": 99_999}, "messages", TOO_LONG, "512"),
        (CompletionBody, {"max_tokens": 99_999}, "prompt", TOO_LONG, "512"),
        (CompletionBody, {"prompt": "word " * 600}, "prompt", TOO_LONG, "512"),
        (
            CompletionBody, {"prompt": ["a", "word " * 600]},
            "prompt", TOO_LONG, "prompt 1: ",
        ),
        (CompletionBody, {"prompt": [["a"]]}, "prompt[0][0]", "invalid_type", ""),
        (CompletionBody, {"prompt": [[5], []]}, "prompt[1]", "invalid_value", "length"),
        (CompletionBody, {"n": 2, "best_of": 3}, "best_of", "invalid_value", "only n"),
        (
            ChatBody, {"chat_template_kwargs": {"messages": []}},
            "chat_template_kwargs", "invalid_value", "reserved name",
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_error_names_its_field_and_code(tiny, body, given, param, code, says, stream):
    """Regression: some errors named no field. Clients that shorten long prompts need the code."""
    fields = EXAMPLES[body]
    data = json.dumps({**fields, **given, "stream": stream}).encode()
    error = require_error(send(tiny, body, data), data)
    assert (error["param"], error["code"]) == (param, code)
    assert says in error["message"]


def test_filter_without_effect_on_a_greedy_default_is_logged_once(caplog):
    """Regression: without temperature, the field was ignored, and nothing said so."""
    params._warn_of_idle_filter.cache_clear()

    def take(default: float, **fields: object) -> None:
        inputs = SimpleNamespace(
            sampling_params=lambda **given: SamplingParams(**{"temperature": default, **given})
        )
        body = CompletionBody(prompt="hi", **fields)
        params.sampling_params(inputs, body, max_tokens=1, grammar=None, logprobs=None)

    take(0.0, temperature=1.0, top_p=0.5)
    take(0.0, temperature=0.0, top_p=0.5)
    take(0.5, top_p=0.5)
    take(0.0, top_p=1, top_k=-1, min_p=0)
    assert not caplog.records
    for _ in range(2):
        take(0.0, top_p=0.5, min_p=0.1)
    assert sorted(record.fields["field"] for record in caplog.records) == ["min_p", "top_p"]
    assert all("without temperature" in record.message for record in caplog.records)


def test_request_that_exceeds_the_kv_cache_gets_context_length_exceeded_code(model):
    """Regression: the code was invalid_value, because only the engine knows the cache's size."""
    with Served(f"--model={model}", "--kv-cache-bytes=100K") as served:
        n_tokens = served.get("/status")["kv"]["tokens_total"]
        assert n_tokens < 500
        for body, param in ((ChatBody, "messages"), (CompletionBody, "prompt")):
            for stream in (False, True):
                fields = {**EXAMPLES[body], "max_tokens": n_tokens, "stream": stream}
                data = json.dumps(fields).encode()
                error = require_error(send(served, body, data), data)
                assert (error["param"], error["code"]) == (param, TOO_LONG)
                assert "enlarge the KV cache" in error["message"]


def test_number_of_lists_and_objects_in_a_body_is_bounded(tiny):
    """Regression: 300 bodies of 680,000 lists took 2.5 GB, and blocked /health for a minute."""
    for inner in ("[],", "{},", '{"[":[]},', r'"\\",[],'):
        content = f'{inner * MAX_NESTED}"a"'.encode()
        data = b'{"max_tokens":1,"messages":[{"role":"user","content":[' + content + b"]}]}"
        error = require_error(send(tiny, ChatBody, data), data)
        assert f"more than {MAX_NESTED} lists and objects" in error["message"]
    text = r"[{\\" * (MAX_NESTED // 8) + r"\"[{" * MAX_NESTED  # not counted inside a string
    for prompt in (text, json.loads(f'"{text}"') + "[" * MAX_NESTED):
        data = json.dumps({"prompt": prompt}).encode()
        assert send(tiny, TokenizeBody, data)[0] == 200


def test_number_of_strings_in_a_body_is_bounded(tiny):
    """Regression: 100 bodies of 400,000 strings each took 3.1 GB."""
    data = json.dumps({"prompt": ["a"] * (MAX_TEXTS + 1), "max_tokens": 1}).encode()
    error = require_error(send(tiny, CompletionBody, data), data)
    assert f"more than {MAX_TEXTS} strings" in error["message"]
    data = json.dumps({"prompt": '"' * 4 * MAX_TEXTS}).encode()  # not counted inside a string
    assert send(tiny, TokenizeBody, data)[0] == 200


def test_strings_that_end_in_a_backslash_are_counted():
    """Regression: their closing quotes counted as escaped, so a body could have twice as many."""
    for n, is_refused in ((MAX_TEXTS // 2, False), (MAX_TEXTS, True)):
        data = json.dumps({"prompt": ["\\"] * n}).encode()
        with pytest.raises(InvalidBody, match="strings") if is_refused else nullcontext():
            read_body(CompletionBody, data)


N_RANDOM = 200  # per type of body; `python -m launch.fuzz` tries more


@pytest.mark.parametrize("body", BODIES)
def test_random_bodies_are_answered_or_refused(tiny, canary, body):
    """Bodies with several fields at their bounds; in every second body one is out of bounds."""
    rng = random.Random(5)
    given = EXAMPLES[body]
    kinds = {place[0]: kind for of, place, kind in FIELDS if of is body and len(place) == 1}
    good: dict[str, list[Any]] = {name: [] for name in kinds}
    for name, kind in kinds.items():
        for value, is_fit in (each for member in members(kind) for each in values(member)):
            if is_fit and len(json.dumps(value)) < 5000:
                good[name].append(value)
    bad = {
        name: [value for value in beyond(kind) if len(json.dumps(value)) < 5000]
        for name, kind in kinds.items()
    }
    n_answered = 0
    for number in range(N_RANDOM):
        chosen = [name for name in rng.sample(sorted(good), min(3, len(good))) if good[name]]
        fields = {**given, **{name: rng.choice(good[name]) for name in chosen}}
        wrong = rng.choice([name for name in bad if bad[name]])
        if number % 2:
            fields[wrong] = rng.choice(bad[wrong])
        data = json.dumps(fields).encode()
        reply = send(tiny, body, data)
        if reply[0] != 200 or number % 2:
            require_error(reply, data)
        n_answered += reply[0] == 200
    assert n_answered > N_RANDOM // 20 or body is DetokenizeBody  # most bounds are unknown ids
    canary.check()


def test_last_value_of_a_repeated_field_is_checked(tiny):
    data = b'{"prompt":"a","max_tokens":1,"max_tokens":-1}'
    require_error(send(tiny, CompletionBody, data), data)


def test_every_string_list_number_and_object_has_a_bound():
    """Free-form JSON is exempt, because the limit of the whole body bounds it."""

    def unbounded(of: inspect.Type, at: str) -> Iterator[str]:
        match of:
            case inspect.StructType():
                for field in of.fields:
                    yield from unbounded(field.type, f"{at}.{field.name}")
            case inspect.UnionType():
                for member in of.types:
                    yield from unbounded(member, at)
            case inspect.ListType():
                if of.max_length is None:
                    yield at
                yield from unbounded(of.item_type, f"{at}[]")
            case inspect.StrType():
                if of.max_length is None:
                    yield at
            case inspect.IntType() | inspect.FloatType():
                if of.ge is None or of.le is None:
                    yield at
            case inspect.DictType():
                if of.max_length is None and not isinstance(of.value_type, inspect.AnyType):
                    yield at

    found = [
        name
        for body in BODIES
        for name in unbounded(inspect.type_info(body), body.__name__)
        if not name.endswith(".logit_bias")  # its values are checked with the other settings
    ]
    assert found == []
