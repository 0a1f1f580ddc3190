"""Prompts and grammars with tools, in each syntax of calls."""

import asyncio
import json
from types import SimpleNamespace

import pytest
from llguidance import LLTokenizer

from parallel_llama.errors import UsageError
from parallel_llama.request import Grammar
from parallel_llama.serve import chat as chat_route
from parallel_llama.serve import tool_calls
from parallel_llama.serve.bodies import ChatBody, ChosenFunction, Tool, ToolChoice, ToolFunction
from parallel_llama.serve.tools import conversation, tools_of
from parallel_llama.structured.grammar_check import compile_grammar
from parallel_llama.tokenizer.jinja_chat import JinjaChat

RAIN = ToolFunction(
    name="rain",
    description="How much rain falls",
    parameters={
        "type": "object",
        "properties": {"city": {"$ref": "#/$defs/city"}},
        "required": ["city"],
        "additionalProperties": False,
        "$defs": {"city": {"type": "string", "maxLength": 8}},
    },
)
TIME = ToolFunction(name="time", strict=True)
TOOLS = [Tool(type="function", function=each) for each in (RAIN, TIME)]
MESSAGES = [{"role": "user", "content": "?"}]
BYTES = LLTokenizer("byte")

RAINS = '"name": "rain", "{}": {{"city":"Oslo"}}'
HERMES_RAIN = "<tool_call>\n{" + RAINS.format("arguments") + "}\n</tool_call>"
HERMES_TIME = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
LLAMA_RAIN = "{" + RAINS.format("parameters") + "}"
LLAMA_TIME = '{"name": "time", "parameters": {}}'


def inputs(template_text, special=()):
    """The part of an input processor that tools use."""
    vocabulary = SimpleNamespace(special_ids=dict.fromkeys(special, 1))
    return SimpleNamespace(
        chat_template=SimpleNamespace(
            template_text=template_text, takes_system=True, takes_tools="tools" in template_text
        ),
        tokenizer=SimpleNamespace(vocabulary=vocabulary),
    )


def jinja(template):
    """A chat template that is rendered, for a tokenizer without special tokens."""
    vocabulary = SimpleNamespace(special_ids={}, units=())
    tokenizer = SimpleNamespace(vocabulary=vocabulary, eos_ids=frozenset())
    return JinjaChat(template, tokenizer, {}, "a model")


HERMES = inputs("tools <tool_call>")
SPECIAL = inputs("tools <tool_call>", ["<tool_call>"])
MISTRAL = inputs("tools [TOOL_CALLS]", ["[TOOL_CALLS]"])
LLAMA3 = inputs("tools <|python_tag|>", ["<|python_tag|>"])
LLAMA4 = inputs("tools <|python_start|>", ["<|python_start|>", "<|python_end|>"])
GENERIC = inputs("")


def matches(grammar, text):
    """Whether a grammar accepts a text as a complete answer."""
    matcher = compile_grammar(grammar.kind, grammar.text, BYTES)
    tokens = BYTES.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def body(choice=None, tools=TOOLS, **fields):
    return ChatBody(messages=MESSAGES, tools=tools, tool_choice=choice, **fields)


@pytest.mark.parametrize(
    ("model", "call"),
    [
        (HERMES, HERMES_RAIN),
        (GENERIC, HERMES_RAIN),
        (SPECIAL, "[{" + RAINS.format("arguments") + "}]"),
        (MISTRAL, "[{" + RAINS.format("arguments") + "}]"),
        (LLAMA3, LLAMA_RAIN),
        (LLAMA4, LLAMA_RAIN),
    ],
)
def test_required_call_follows_its_schema_and_is_parsed(model, call):
    tools = tools_of(body("required"), model)
    grammar = tools.grammar(None)
    assert matches(grammar, call)
    loose = call.replace(':"Oslo"', ': "Oslo"')
    for wrong in ("", "It rains.", call.replace("Oslo", "Longyearbyen"), call + "x", loose):
        assert not matches(grammar, wrong)
    reader = tools.reader()
    (found,) = [*reader.push(call), *reader.finish()]
    assert (found.name, json.loads(found.arguments)) == ("rain", {"city": "Oslo"})


def test_named_tool_choice_allows_one_call_of_that_function():
    choice = ToolChoice(type="function", function=ChosenFunction(name="time"))
    grammar = tools_of(body(choice), HERMES).grammar(None)
    assert matches(grammar, HERMES_TIME)
    assert not matches(grammar, HERMES_RAIN)
    assert not matches(grammar, f"{HERMES_TIME}\n{HERMES_TIME}")


def with_type(kind):
    function = ToolFunction(name="rain", parameters={**RAIN.parameters, "type": kind})
    return [Tool(type="function", function=function)]


@pytest.mark.parametrize("kind", ["array", ["string", "null"], None, 5])
def test_parameters_of_another_type_than_object_are_refused(kind):
    """Regression: the required call had a list as arguments, and was returned as text."""
    with pytest.raises(UsageError, match="tools: the parameters of 'rain' have the type"):
        tools_of(body("required", tools=with_type(kind)), HERMES)


def test_arguments_are_an_object_if_the_type_of_the_parameters_allows_null():
    grammar = tools_of(body("required", tools=with_type(["object", "null"])), HERMES).grammar(None)
    assert matches(grammar, HERMES_RAIN)
    assert not matches(grammar, HERMES_RAIN.replace('{"city":"Oslo"}', "null"))


def test_parallel_calls_are_allowed_unless_disabled():
    both = f"{HERMES_TIME}\n{HERMES_RAIN}"
    assert matches(tools_of(body("required"), HERMES).grammar(None), both)
    alone = tools_of(body("required", parallel_tool_calls=False), HERMES)
    assert not matches(alone.grammar(None), both)
    lists = tools_of(body("required"), MISTRAL).grammar(None)
    assert matches(lists, '[{"name": "time", "arguments": {}}, {"name": "time", "arguments": {}}]')


def test_only_one_call_is_returned_if_the_template_refuses_several():
    """Regression: a client could not send two calls back, because the template refused them."""
    refusal = "{{ raise_exception('This model only supports single tool-calls at once!') }}"
    tools = tools_of(body("required"), inputs(LLAMA3.chat_template.template_text + refusal))
    both = f"{LLAMA_TIME}; {LLAMA_RAIN}"
    assert matches(tools.grammar(None), LLAMA_TIME) and not matches(tools.grammar(None), both)
    reader = tools.reader()
    assert [call.name for call in (*reader.push(both), *reader.finish())] == ["time"]
    for model in (LLAMA3, LLAMA4):
        assert matches(tools_of(body("required"), model).grammar(None), both)


def test_strict_function_schema_is_enforced_after_any_text():
    grammar = tools_of(body(), HERMES).grammar(None)
    for text in ("", "It rains.", f"See: {HERMES_RAIN}\n{HERMES_TIME}", "a <tool_c", HERMES_TIME):
        assert matches(grammar, text), text
    for text in ("<tool_call>", HERMES_TIME.replace("{}", '{"a":1}'), f"{HERMES_TIME} and"):
        assert not matches(grammar, text), text
    for model in (LLAMA3, LLAMA4):
        bare = tools_of(body(), model).grammar(None)
        assert matches(bare, "It {rains}.") and matches(bare, "") and matches(bare, LLAMA_RAIN)
        assert not matches(bare, '{"name": "snow", "parameters": {}}')


def test_grammar_is_none_without_strict_functions_or_a_text_mark():
    assert tools_of(body(tools=TOOLS[:1]), HERMES).grammar(None) is None
    assert tools_of(body(), MISTRAL).grammar(None) is None  # its mark is a special token


N_OR_MORE = '{"type":"object","properties":{"n":{"type":"integer"}}}'


@pytest.mark.parametrize("schema", [N_OR_MORE, '{"type":"object"}'])
@pytest.mark.parametrize(
    ("model", "call", "calls"),
    [
        (HERMES, HERMES_TIME, f"{HERMES_RAIN}\n{HERMES_TIME}"),
        (LLAMA3, LLAMA_TIME, f"{LLAMA_RAIN}; {LLAMA_TIME}"),
        (LLAMA4, LLAMA_TIME, f"{LLAMA_RAIN}; {LLAMA_TIME}"),
    ],
    ids=["hermes", "llama3", "llama4"],
)
def test_an_answer_with_a_schema_may_be_calls_instead(model, call, calls, schema):
    """Regression: after `{"`, the grammar of Llama 3 and 4 allowed only a call."""
    grammar = tools_of(body(), model).grammar(Grammar("json_schema", schema))
    answers = ('{"n":1}', "{}", '{"name":"time"}', '{"names":["a"]}', '{"name":"a","parameters":3}')
    for text in (*answers, call, calls):
        assert matches(grammar, text), text
    for text in ("one", '{"n":1', f"{call}x", call.replace("time", "snow")):
        assert not matches(grammar, text), text


@pytest.mark.parametrize(
    ("model", "answer"),
    [(HERMES, Grammar("regex", "a+")), (MISTRAL, Grammar("json_schema", N_OR_MORE))],
)
def test_answer_that_cannot_be_combined_with_calls_is_refused(model, answer):
    with pytest.raises(UsageError, match="omit tools"):
        tools_of(body(), model).grammar(answer)


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ("{bad", "not valid JSON"),
        ("[" * 60_000, "not valid JSON"),
        ("true", "not an object"),
        ("[]", "not an object"),
    ],
)
def test_schema_that_is_not_an_object_is_refused_with_tools(schema, says):
    """Regression: the request got status 500 and a traceback in the log."""
    with pytest.raises(UsageError, match=says):
        tools_of(body(), HERMES).grammar(Grammar("json_schema", schema))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (body("required", tools=None), "tools is empty"),
        (body(ToolChoice(type="function", function=ChosenFunction(name="snow"))), "'snow'"),
        (body(tools=TOOLS * 2), "the same name"),
    ],
)
def test_invalid_tool_choice_or_tools_are_refused(given, says):
    with pytest.raises(UsageError, match=says):
        tools_of(given, HERMES)


def test_unknown_tool_call_format_is_refused():
    with pytest.raises(UsageError, match="not supported"):
        tools_of(body(), inputs("tools <function="))
    assert tools_of(body("none"), inputs("tools <function=")) is None


def test_tools_are_read_in_a_thread_because_the_template_may_be_rendered():
    ran = []

    async def in_thread(work):
        ran.append(work)
        return work()

    context = SimpleNamespace(inputs=HERMES, in_thread=in_thread)
    assert asyncio.run(chat_route._tools(context, body())).form is tool_calls.HERMES
    assert len(ran) == 1
    assert asyncio.run(chat_route._tools(context, body(tools=None))) is None
    assert len(ran) == 1


@pytest.mark.parametrize("role", ["system", "developer"])
def test_template_without_tools_gets_them_in_the_system_message(role):
    call = {"id": "1", "type": "function", "function": {"name": "time", "arguments": "{}"}}
    messages = [
        {"role": role, "content": "Be brief."},
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "noon"},
        {"role": "tool", "tool_call_id": "2", "content": "wet"},
    ]
    chat = conversation(GENERIC.chat_template, messages, TOOLS, {})
    first, question, called, returned = chat.messages
    assert first["content"].startswith("Be brief.\n\n") and not chat.tools
    assert '{"name": "time", "strict": true}' in first["content"]
    assert question == messages[1]
    assert called == {"role": "assistant", "content": HERMES_TIME}
    assert returned["role"] == "user"
    assert returned["content"].count("<tool_response>") == 2 and "noon" in returned["content"]


REFUSAL = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
WRITES = "{% for m in messages %}{{ m['role'] ~ ': ' ~ m['content'] ~ ';' }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "role"),
    [
        (REFUSAL + WRITES, "user"),
        (WRITES.replace(" %}", " if m['role'] != 'system' %}", 1), "user"),
        (WRITES, "system"),
    ],
    ids=["refuses a system message", "leaves it out", "writes it"],
)
def test_tools_are_in_the_first_question_if_the_template_has_no_system_messages(template, role):
    """Regression: the template of Gemma 2 refused every request with tools."""
    model = jinja(template)
    chat = conversation(model, MESSAGES, TOOLS, {})
    text = model.render(chat)
    assert text.startswith(f"{role}: You can call functions.")
    assert '{"name": "time", "strict": true}' in text and text.endswith("?;")
    assert text.count("user: ") == 1
    begun = [{"role": "assistant", "content": "Hello!"}, *MESSAGES]
    assert [each["role"] for each in conversation(model, begun, TOOLS, {}).messages] == [
        role, "assistant", "user",
    ]  # fmt: skip
    assert conversation(model, MESSAGES, (), {}).messages == MESSAGES


@pytest.mark.parametrize(
    "template",
    [
        "{% for tool in xml_tools or [] %}<tools>{{ tool }}</tools>{% endfor %}" + WRITES,
        WRITES.replace("m['content']", "m['content'] ~ (m['tools'] or '')"),
        "{# No tools. #}" + WRITES,
    ],
    ids=["another variable", "a key of messages", "a comment"],
)
def test_tools_are_text_if_the_template_has_the_word_but_does_not_list_them(template):
    """Regression: SmolLM3's first template left tools out; Phi-4-mini's requests were refused."""
    model = jinja(template)
    text = model.render(conversation(model, MESSAGES, TOOLS, {}))
    assert text.startswith("system: You can call functions.") and '"name": "time"' in text
    read = SimpleNamespace(chat_template=model, tokenizer=GENERIC.tokenizer)
    assert tools_of(body(), read).form is tool_calls.HERMES


def test_template_that_lists_tools_gets_them():
    model = jinja("{% for tool in tools %}{{ tool.function.name }} {% endfor %}")
    assert model.render(conversation(model, MESSAGES, TOOLS, {})) == "rain time "


def test_template_is_not_rendered_for_a_chat_without_tools():
    template = SimpleNamespace(template_text="")  # an AttributeError for takes_tools
    assert conversation(template, MESSAGES, (), {}).messages == MESSAGES


def test_template_with_tools_gets_them_unchanged():
    chat = conversation(HERMES.chat_template, MESSAGES, TOOLS, {})
    assert chat.messages == MESSAGES
    assert chat.tools[1] == {"type": "function", "function": {"name": "time", "strict": True}}


def test_unread_template_kwarg_is_dropped_unless_misspelt():
    model = inputs("{{ enable_thinking }}").chat_template
    assert conversation(model, MESSAGES, (), {"enable_thinking": False}).template_vars
    assert not conversation(model, MESSAGES, (), {"seed": 1}).template_vars
    with pytest.raises(UsageError, match="did you mean 'enable_thinking'"):
        conversation(model, MESSAGES, (), {"enable_thinkng": False})
    with pytest.raises(UsageError, match="bos_token"):
        conversation(inputs("bos_token").chat_template, MESSAGES, (), {"bos_token": "x"})
