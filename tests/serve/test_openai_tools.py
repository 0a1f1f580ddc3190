"""Function calls through OpenAI's client, checking every field of every reply."""

import json

import openai
import pytest

QUESTION = [{"role": "user", "content": "How much does it rain in Oslo?"}]
RAIN = {
    "type": "function",
    "function": {
        "name": "get_rain",
        "description": "How much rain falls in a city today",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 20},
                "unit": {"enum": ["mm", "inch"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
TIME = {"type": "function", "function": {"name": "get_time"}}


def ask(client, **fields):
    given = {"messages": QUESTION, "max_tokens": 80, "tools": [RAIN, TIME], "temperature": 0}
    return client.chat.completions.create(model="smollm2", **given | fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "required", "tools": [RAIN], "parallel_tool_calls": False},
        {"tool_choice": {"type": "function", "function": {"name": "get_rain"}}},
    ],
)
def test_required_tool_call_is_made(client, fields):
    (answer,) = ask(client, **fields).choices
    assert answer.finish_reason == "tool_calls" and answer.message.content is None
    (call,) = answer.message.tool_calls
    assert call.type == "function" and call.id.isalnum() and len(call.id) == 9
    assert call.function.name == "get_rain"
    arguments = json.loads(call.function.arguments)
    assert arguments["city"] and arguments["unit"] in ("mm", "inch")


def test_a_stream_has_the_same_calls(client):
    given = {"tool_choice": "required", "parallel_tool_calls": False}
    (whole,) = ask(client, **given).choices
    chunks, told = list(ask(client, **given, stream=True)), {}
    for chunk in chunks:
        for call in chunk.choices[0].delta.tool_calls or ():
            assert call.index not in told and call.id
            told[call.index] = call.function
    assert not any(chunk.choices[0].delta.content for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == whole.finish_reason == "tool_calls"
    assert [(call.function.name, call.function.arguments) for call in whole.message.tool_calls] == [
        (told[index].name, told[index].arguments) for index in range(len(told))
    ]


def test_openai_stream_helper_reads_tool_calls(client):
    with client.chat.completions.stream(
        model="smollm2",
        messages=QUESTION,
        tools=[RAIN],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=80,
    ) as stream:
        names = [event.type for event in stream]
        (choice,) = stream.get_final_completion().choices
    assert "tool_calls.function.arguments.done" in names
    assert choice.message.tool_calls[0].function.parsed_arguments["city"]


def test_tool_result_is_used_in_the_answer(client):
    call = {"id": "a1b2c3d4e", "type": "function"}
    call["function"] = {"name": "get_rain", "arguments": '{"city": "Oslo", "unit": "mm"}'}
    messages = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a1b2c3d4e", "content": "7 mm"},
    ]
    (answer,) = ask(client, messages=messages, tools=openai.omit).choices
    assert answer.finish_reason == "stop" and "7" in answer.message.content


def test_tool_choice_none_answers_as_without_tools(client):
    (answer,) = ask(client, tool_choice="none", max_tokens=8).choices
    (plain,) = ask(client, tools=openai.omit, max_tokens=8).choices
    assert answer.message.tool_calls is None and answer.message.content == plain.message.content


def test_usage_and_tokenize_count_the_tools_alike(client, smollm2):
    given = {"messages": QUESTION, "tools": [RAIN, TIME]}
    count = smollm2.post("/tokenize", **given)["count"]
    assert ask(client, tool_choice="auto", max_tokens=1).usage.prompt_tokens == count
    assert count > 2 * smollm2.post("/tokenize", messages=QUESTION)["count"]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"tool_choice": "required", "tools": openai.omit}, "tools is empty"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "regex"),
        ({"tools": [TIME] * 2}, "the same name"),
    ],
)
def test_invalid_tools_are_refused_with_the_reason(client, fields, says):
    with pytest.raises(openai.BadRequestError, match=says):
        ask(client, **fields)
