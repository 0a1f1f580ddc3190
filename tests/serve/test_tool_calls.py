"""Function calls in generated text: parsed in every syntax, however the text is split."""

import json

import pytest

from parallel_llama.serve.replies import CalledFunction
from parallel_llama.serve.tool_calls import (
    HERMES,
    LLAMA3,
    LLAMA4,
    MISTRAL,
    MISTRAL_NAMED,
    PYTHONIC,
    CallReader,
    tool_format,
)

NAMES = frozenset(("rain", "time"))
OSLO = {"city": "Oslo"}


def read(form, pieces, **settings):
    """The text and the calls that a reader finds in a text given in pieces."""
    reader = CallReader(form, NAMES, **settings)
    told = [part for piece in pieces for part in reader.push(piece)] + reader.finish()
    text = "".join(part for part in told if isinstance(part, str))
    calls = [part for part in told if isinstance(part, CalledFunction)]
    return text, [(call.name, json.loads(call.arguments)) for call in calls]


def hermes(name, arguments):
    body = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{body}\n</tool_call>"


# (form, what the model writes, its text, its calls)
WRITTEN = [
    (HERMES, "It rains.", "It rains.", []),
    (HERMES, "", "", []),
    (HERMES, hermes("rain", OSLO), "", [("rain", OSLO)]),
    (
        HERMES,
        "Let me see.\n" + hermes("rain", OSLO) + "\n" + hermes("time", {}) + "\n",
        "Let me see.\n",
        [("rain", OSLO), ("time", {})],
    ),
    (HERMES, " \n" + hermes("time", {}) + "\nDone.", "\nDone.", [("time", {})]),
    (
        HERMES,
        hermes("rain", {"city": 'a "}" \\ </tool_call> {[', "n": [1, {"x": None}]}),
        "",
        [("rain", {"city": 'a "}" \\ </tool_call> {[', "n": [1, {"x": None}]})],
    ),
    (HERMES, '<tool_call>{"name": "time"}</tool_call>', "", [("time", {})]),
    (HERMES, '<tool_call>{"name": "time", "arguments": {}}', "", [("time", {})]),
    (
        MISTRAL,
        '[TOOL_CALLS] [{"name": "rain", "arguments": {"city": "Oslo"}}]',
        "",
        [("rain", OSLO)],
    ),
    (
        MISTRAL,
        'See: [TOOL_CALLS][{"name": "time", "arguments": {}}, {"name": "rain", "arguments": {}}]',
        "See: ",
        [("time", {}), ("rain", {})],
    ),
    (MISTRAL_NAMED, '[TOOL_CALLS]rain[ARGS]{"city": "Oslo"}', "", [("rain", OSLO)]),
    (
        MISTRAL_NAMED,
        'See: [TOOL_CALLS]time[CALL_ID]a1b2c3d4e[ARGS]{}[TOOL_CALLS]rain[ARGS] {"city": "Oslo"}',
        "See: ",
        [("time", {}), ("rain", OSLO)],
    ),
    (
        MISTRAL_NAMED,
        '[TOOL_CALLS]rain[ARGS]{"city": "}[TOOL_CALLS]"}!',
        "!",
        [("rain", {"city": "}[TOOL_CALLS]"})],
    ),
    (MISTRAL_NAMED, "[TOOL_CALLS]snow[ARGS]{}", "[TOOL_CALLS]snow[ARGS]{}", []),
    (MISTRAL_NAMED, "[TOOL_CALLS]rain {}", "[TOOL_CALLS]rain {}", []),
    (MISTRAL_NAMED, "[TOOL_CALLS]rain[ARGS][1]", "[TOOL_CALLS]rain[ARGS][1]", []),
    (MISTRAL_NAMED, "[TOOL_CALLS]" + "a" * 600, "[TOOL_CALLS]" + "a" * 600, []),
    (LLAMA3, '{"name": "rain", "parameters": {"city": "Oslo"}}', "", [("rain", OSLO)]),
    (
        LLAMA3,
        '<|python_tag|>{"name": "time", "parameters": {}}; {"name": "rain", "parameters": {}}',
        "",
        [("time", {}), ("rain", {})],
    ),
    (
        LLAMA4,
        '<|python_start|>{"name": "rain", "parameters": {"city": "Oslo"}}<|python_end|>',
        "",
        [("rain", OSLO)],
    ),
    (LLAMA4, '{"name": "time", "parameters": {}}', "", [("time", {})]),
    # Llama 4's template writes these: text between the markers, and the calls after it.
    *(
        (LLAMA4, f"<|python_start|>{written}", text, calls)
        for written, text, calls in (
            ('<|python_end|>{"name": "time", "parameters": {}}', "", [("time", {})]),
            (
                '\n<|python_end|>\n{"name": "time"}{"name": "rain", "parameters": {}}',
                "",
                [("time", {}), ("rain", {})],
            ),
            (
                '<|python_end|>{"name": "time"}; <|python_start|> <|python_end|>{"name": "rain"}',
                "",
                [("time", {}), ("rain", {})],
            ),
            ('I look. <|python_end|>{"name": "time"}', "I look. ", [("time", {})]),
            ('<|python_end|>{"answer": 42}', '{"answer": 42}', []),
            ('{"answer": 42}<|python_end|>', '{"answer": 42}', []),
            ("print(1)<|python_end|>", "print(1)", []),
            ('{"name": "time"', '{"name": "time"', []),
            ("", "", []),
        )
    ),
    (LLAMA4, 'See: <|python_start|><|python_end|>{"name": "time"}', "See: ", [("time", {})]),
    (LLAMA4, "a <|python_en", "a <|python_en", []),
    (PYTHONIC, '[rain(city="Oslo"), time()]', "", [("rain", OSLO), ("time", {})]),
    (PYTHONIC, "<|python_start|>[rain(city='Oslo')]<|python_end|>", "", [("rain", OSLO)]),
    (PYTHONIC, "<|python_start|><|python_end|>[time()]", "", [("time", {})]),
    (PYTHONIC, "<|python_start|>[snow()]<|python_end|>", "[snow()]", []),
    (
        PYTHONIC,
        '\n[ rain(city="it\'s ] \\" )", days=[1, -2.5, {\'a\': True, "b": null}]) ]',
        "",
        [("rain", {"city": "it's ] \" )", "days": [1, -2.5, {"a": True, "b": None}]})],
    ),
    # Text that is not a call stays text, to the last character.
    *(
        (form, text, text, [])
        for form, text in (
            (HERMES, "a < b, and <tool"),
            (HERMES, "\n \n"),
            (HERMES, "\n <tool_call> it is"),
            (HERMES, '<tool_call>{"name": "snow", "arguments": {}}</tool_call>'),
            (HERMES, '<tool_call>{"name": ["rain"], "arguments": {}}</tool_call>'),
            (HERMES, '<tool_call>{"name": "rain", "arguments": []}</tool_call>'),
            (HERMES, '<tool_call>{"name": "rain", arguments: {}}</tool_call>'),
            (HERMES, '<tool_call>{"name": "rain", "argum'),
            (HERMES, '<tool_call>{"name": "rain"}</tool_ca.'),
            (HERMES, "<tool_call>" + "[" * 5000 + "]" * 5000),
            (MISTRAL, "[TOOL_CALLS] []"),
            (MISTRAL, '[TOOL_CALLS][{"name": "rain"}, {"name": "snow"}]'),
            (LLAMA3, '{"answer": 42}'),
            (LLAMA3, 'As JSON: {"name": "rain", "parameters": {}}'),
            (LLAMA3, '<|python_tag|>rain.call(city="Oslo")'),
            (PYTHONIC, "[1] It's a source, and (it rains)."),
            (PYTHONIC, "[It's](https://example.org) wet"),
            (PYTHONIC, '[snow(city="Oslo")]'),
            (PYTHONIC, '[rain("Oslo")]'),
            (PYTHONIC, "[rain(city=open('x'))]"),
            (PYTHONIC, "[rain(city=Oslo), time()]"),
            (PYTHONIC, "[rain(**{'city': 1})]"),
            (PYTHONIC, "[rain(city=1e999)]"),
            (PYTHONIC, '[rain(city="Os'),
            (PYTHONIC, "See: [time()]"),
        )
    ),
    (
        HERMES,
        "<tool_call><tool_call>" + hermes("time", {}),
        "<tool_call><tool_call>",
        [("time", {})],
    ),
]


@pytest.mark.parametrize(("form", "written", "text", "calls"), WRITTEN)
def test_text_and_calls_are_parsed_for_any_split_of_the_answer(form, written, text, calls):
    assert read(form, [written]) == (text, calls)
    assert read(form, written) == (text, calls)
    for at in range(len(written) if len(written) < 500 else 0):
        assert read(form, [written[:at], written[at:]]) == (text, calls)


def test_text_is_held_back_only_where_it_may_become_a_call():
    reader = CallReader(HERMES, NAMES)
    told = ["".join(reader.push(char)) for char in "a <b> <tool_x"]
    assert told == ["a", " ", "", "<b", ">", " ", "", "", "", "", "", "", "<tool_x"]


@pytest.mark.parametrize("rest", ["a", " ", "a."])
def test_text_too_long_for_a_function_name_is_not_held_back(rest):
    """Regression: quadratic matching of 40,000 characters took ten seconds of the event loop."""
    text = "[" + rest * 1000
    assert "".join(part for part in CallReader(PYTHONIC, NAMES).push(text)) == text


def test_call_list_without_an_opening_mark_is_parsed():
    written = '[{"name": "rain", "arguments": {"city": "Oslo"}}]'
    assert read(MISTRAL, written, begins_inside=True) == ("", [("rain", OSLO)])
    assert read(MISTRAL, written[:-1], begins_inside=True) == (written[:-1], [])


def test_calls_beyond_max_calls_are_dropped():
    written = hermes("rain", OSLO) + hermes("time", {})
    assert read(HERMES, written, max_calls=1) == ("", [("rain", OSLO)])
    both = '[TOOL_CALLS][{"name": "time"}, {"name": "rain"}]'
    assert read(MISTRAL, both, max_calls=1) == ("", [("time", {})])


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{{ tools }} <tool_call>\\n{{ call | tojson }}</tool_call>", HERMES),
        ("[AVAILABLE_TOOLS]{{ tools }} [TOOL_CALLS] [{{ call }}]", MISTRAL),
        ("<|python_tag|>{{ tools }}", LLAMA3),
        ("{{ '\"parameters\": ' }}{{ tools }}", LLAMA3),
        ("<|header_start|>{{ '\"parameters\": ' }}{{ tools }}<|python_start|>", LLAMA4),
        ("{{ tools }} use [func_name1(a=1, b=2), func_name2(...)]", PYTHONIC),
        ("Write 'Action:' {{ tools }} {{ '\"parameters\": ' }}", None),
        ("<tool_call><function={{ tools }}>", None),
        ("[TOOL_CALLS]{{ tools }}[ARGS]", MISTRAL_NAMED),
        ("{{ tools }}", None),
    ],
)
def test_tool_format_is_detected_from_the_template(template, form):
    assert tool_format(template) == form


WRITTEN_BY_META = [
    {"city": "Oslo", "days": 3, "exact": True, "at": None, "near": 1.5},
    {"city": "it's [wet], (very)", "days": [1, "two", False]},
    {},
]


@pytest.mark.parametrize("arguments", WRITTEN_BY_META)
def test_pythonic_calls_are_parsed_as_by_metas_package(arguments):
    tool_utils = pytest.importorskip("llama_models.llama3.tool_utils")
    from llama_models.datatypes import ToolCall, ToolPromptFormat

    call = ToolCall(call_id="1", tool_name="rain", arguments=arguments)
    written = tool_utils.ToolUtils.encode_tool_call(call, ToolPromptFormat.python_list)
    assert tool_utils.parse_python_list_for_function_calls(written) == [("rain", arguments)]
    assert read(PYTHONIC, written) == ("", [("rain", arguments)])
