"""Sections of an answer (Command R7B and A), however the text is split."""

import json

import pytest

from parallel_llama.serve.channels import ChannelParts, Reasoning
from parallel_llama.serve.replies import CalledFunction
from parallel_llama.serve.tool_calls import SECTIONS, tool_format
from parallel_llama.tokenizer.answers import answer_reader, markers, split_answer

TEMPLATE = "{{ tools }}<|START_THINKING|><|END_THINKING|><|START_ACTION|><|START_RESPONSE|>"
NAMES = frozenset(("rain", "time"))
THOUGHT = "<|START_THINKING|>I will\nlook. <|x|><|END_THINKING|>"
RAIN = '{"tool_call_id": "0", "tool_name": "rain", "parameters": {"city": "Oslo"}}'
TIME = '{"tool_call_id": "1", "tool_name": "time", "parameters": {}}'


def action(*calls):
    """Calls as the template of Command R7B writes them."""
    return "<|START_ACTION|>[\n    " + ",\n    ".join(calls) + "\n]<|END_ACTION|>"


# Output of a model, and the expected reasoning, text and calls.
WRITTEN = [
    (
        THOUGHT + "<|START_RESPONSE|>Hello <b> world<|END_RESPONSE|>",
        "I will\nlook. <|x|>",
        "Hello <b> world",
        [],
    ),
    ("<|START_TEXT|>Hello!<|END_TEXT|>", "", "Hello!", []),
    (THOUGHT + action(RAIN), "I will\nlook. <|x|>", "", [("rain", {"city": "Oslo"})]),
    (action(RAIN, TIME), "", "", [("rain", {"city": "Oslo"}), ("time", {})]),
    (f"{THOUGHT}\n{action(TIME)}\n", "I will\nlook. <|x|>", "", [("time", {})]),
    (THOUGHT + "\nHello there, you.", "I will\nlook. <|x|>", "Hello there, you.", []),
    ("Hello, 1 <| 2", "", "Hello, 1 <| 2", []),
    ("  Hello", "", "  Hello", []),
    ("<|START_THINKING|>Cut o", "Cut o", "", []),
    ("<|START_THINKING|>Cut <|END_TH", "Cut <|END_TH", "", []),
    ("<|START_ACTION|>[{}x]", "", "[{}x]", []),
    (action(RAIN.replace("rain", "snow")), "", f"[\n    {RAIN.replace('rain', 'snow')}\n]", []),
    (" \n", "", " \n", []),
    ("", "", "", []),
]


def read(written, size, prompt="", **settings):
    reader = ChannelParts(answer_reader(TEMPLATE, prompt), NAMES, **settings)
    pieces = [written[at : at + size] for at in range(0, len(written), size)]
    parts = [part for piece in pieces for part in reader.push(piece)] + reader.finish()
    calls = [part for part in parts if isinstance(part, CalledFunction)]
    return (
        "".join(part.text for part in parts if isinstance(part, Reasoning)),
        "".join(part for part in parts if isinstance(part, str)),
        [(call.name, json.loads(call.arguments)) for call in calls],
    )


@pytest.mark.parametrize(("written", "reasoning", "text", "calls"), WRITTEN)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_an_answer_is_split_into_reasoning_text_and_calls(written, reasoning, text, calls, size):
    """Regression: calls were read in the format of Llama 3, which also has a key `parameters`."""
    assert read(written, size) == (reasoning, text, calls)


@pytest.mark.parametrize("size", [1, 1000])
def test_the_prompt_may_begin_the_first_section(size):
    begun = THOUGHT.removeprefix("<|START_THINKING|>") + "Hi"
    assert read(begun, size, "<|CHATBOT_TOKEN|><|START_THINKING|>") == (
        "I will\nlook. <|x|>",
        "Hi",
        [],
    )
    assert read("Hi<|END_RESPONSE|>", size, "<|START_RESPONSE|>") == ("", "Hi", [])
    assert read("Hi", size, "<|CHATBOT_TOKEN|>") == ("", "Hi", [])


def test_calls_after_the_last_allowed_one_are_dropped():
    assert read(action(RAIN, TIME), 5, max_calls=1)[2] == [("rain", {"city": "Oslo"})]


def test_an_answer_without_tools_is_reasoning_and_text():
    assert split_answer(answer_reader(TEMPLATE, ""), THOUGHT + "Hi") == (
        "I will\nlook. <|x|>",
        "Hi",
    )


def test_templates_with_sections_are_recognised():
    assert markers(TEMPLATE) and tool_format(TEMPLATE) is SECTIONS
    assert not markers("<|START_OF_TURN_TOKEN|>") and answer_reader("x", "") is None
