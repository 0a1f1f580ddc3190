"""Channels of an answer (GPT-OSS), however the text is split."""

import json
import os
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from msgspec import UNSET

from parallel_llama.request import Completion, Request, SamplingParams
from parallel_llama.serve import chat, service
from parallel_llama.serve.bodies import ChatBody
from parallel_llama.serve.channels import ChannelParts, Reasoning
from parallel_llama.serve.replies import CalledFunction
from parallel_llama.serve.tool_calls import CHANNELS, tool_format
from parallel_llama.serve.wire import Output
from parallel_llama.tokenizer.channels import ChannelReader, has_channels

# openai_harmony reads the file o200k_base.tiktoken from this folder, or downloads it.
VOCABULARIES = "TIKTOKEN_ENCODINGS_BASE"

NAMES = frozenset(("rain", "time"))
THOUGHT = "<|channel|>analysis<|message|>They greet. 1 < 2 <|x|>.<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>Hello!"
CALL = (
    "<|start|>assistant<|channel|>commentary to=functions.rain <|constrain|>json<|message|>"
    '{"city": "Oslo"}'
)
# Output of a model, and the expected reasoning, text and calls.
WRITTEN = [
    (THOUGHT + FINAL, "They greet. 1 < 2 <|x|>.", "Hello!", []),
    ("<|channel|>final<|message|>Hello!", "", "Hello!", []),
    (THOUGHT + CALL, "They greet. 1 < 2 <|x|>.", "", [("rain", {"city": "Oslo"})]),
    (
        ' to=functions.time<|channel|>commentary json<|message|>{"at": 1}<|call|>' + FINAL,
        "",
        "Hello!",
        [("time", {"at": 1})],
    ),
    (
        "<|channel|>commentary<|message|>I will look.<|end|>" + CALL,
        "",
        "I will look.",
        [("rain", {"city": "Oslo"})],
    ),
    (FINAL + "<|end|>" + FINAL, "", "Hello!\n\nHello!", []),
    (CALL.replace("rain", "snow"), "", '{"city": "Oslo"}', []),  # no such function
    (CALL.replace("}", "]"), "", '{"city": "Oslo"]', []),
    (
        "<|channel|>final<|message|>Say <|channel|> or <|start|>.<|end|>" + FINAL,
        "",
        "Say <|channel|> or <|start|>.\n\nHello!",
        [],
    ),
    ("<|channel|>analysis<|message|>Cut o", "Cut o", "", []),
    ("<|channel|>analysis<|message|>Cut <|sta", "Cut <|sta", "", []),
    ("<|channel|>final", "", "", []),  # cut inside of a header
    ("Total: 3 <| 4", "", "Total: 3 <| 4", []),  # the prompt ends inside a message
    ("to", "", "to", []),
    ("", "", "", []),
]


@pytest.mark.parametrize(("written", "reasoning", "text", "calls"), WRITTEN)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_an_answer_is_split_into_reasoning_text_and_calls(written, reasoning, text, calls, size):
    reader = ChannelParts(ChannelReader(), NAMES)
    pieces = [written[at : at + size] for at in range(0, len(written), size)]
    parts = [part for piece in pieces for part in reader.push(piece)] + reader.finish()
    assert "".join(part.text for part in parts if isinstance(part, Reasoning)) == reasoning
    assert "".join(part for part in parts if isinstance(part, str)) == text
    told = [part for part in parts if isinstance(part, CalledFunction)]
    assert [(call.name, json.loads(call.arguments)) for call in told] == calls


def test_text_is_emitted_as_soon_as_it_is_certain():
    reader = ChannelReader()
    assert not reader.push("<|channel|>final<|message|>")
    assert [each.text for each in reader.push("Hel")] == ["Hel"]
    assert [each.text for each in reader.push("lo <")] == ["lo "]  # may be the start of a mark
    assert [each.text for each in reader.push("b>")] == ["<b>"]


def test_calls_after_the_last_allowed_one_are_dropped():
    reader = ChannelParts(ChannelReader(), NAMES, max_calls=1)
    parts = reader.push(CALL + "<|call|>" + CALL + "<|call|>") + reader.finish()
    assert len(parts) == 1 and isinstance(parts[0], CalledFunction)


@dataclass
class Pending:
    """The fields of a request that one choice reads."""

    body: ChatBody
    tools: None = None
    has_channels: bool = True
    answer_reader: object = ChannelReader
    logprobs: object = field(default=lambda _: None)
    token_ids: object = field(default=lambda _: UNSET)


def test_a_reply_and_a_stream_have_reasoning_content_and_content():
    pending = Pending(ChatBody(messages=[{"role": "user", "content": "Hi"}]))
    message = chat._Choice(pending, 0).message(THOUGHT + FINAL)
    assert message.reasoning_content == "They greet. 1 < 2 <|x|>." and message.content == "Hello!"
    choice, deltas = chat._Choice(pending, 0), []
    text = THOUGHT + FINAL
    for at in range(0, len(text), 4):
        deltas += choice.take(Output(0, 0, (1,), text[at : at + 4], (), None))
    end = Completion(0, "", (), "stop", 5)
    deltas += choice.take(Output(0, 0, (), "", (), end))
    told = [each.delta for each in deltas]
    assert "".join(each.reasoning_content or "" for each in told) == message.reasoning_content
    assert "".join(each.content or "" for each in told) == message.content
    assert deltas[-1].finish_reason == "stop"


def test_requests_for_a_reader_of_markers_hide_the_markers():
    def request(index: int, _: str, params: SamplingParams, **_others: object) -> Request:
        return Request(index, (1,), params, 0, frozenset())

    inputs = SimpleNamespace(request=request)
    for is_hidden in (True, False):
        params = SamplingParams(skip_special_tokens=is_hidden)
        (asked,) = service._requests(inputs, ["Hi"], params, None, with_markers=True)
        assert not asked.params.skip_special_tokens and asked.hides_markers == is_hidden


MESSAGES = [
    # Channel, recipient, content type, text.
    [("analysis", None, None, "They greet."), ("final", None, None, "Hello!\n")],
    [
        ("analysis", None, None, "I look <|it|> up.\n"),
        ("commentary", "functions.rain", "<|constrain|>json", '{"city": "Oslo"}'),
    ],
    [("commentary", None, None, "I will look."), ("commentary", "functions.time", "json", "{}")],
    [("analysis", "browser.search", "code", "{}"), ("analysis", "python", "code", "print(1)")],
]


@pytest.mark.skipif(VOCABULARIES not in os.environ, reason=f"{VOCABULARIES} needs o200k_base")
@pytest.mark.parametrize("messages", MESSAGES)
def test_channels_equal_those_parsed_by_openai_harmony(messages):
    """The text is the one that openai_harmony renders for these messages."""
    harmony = pytest.importorskip("openai_harmony")
    encoding = harmony.load_harmony_encoding(harmony.HarmonyEncodingName.HARMONY_GPT_OSS)
    tokens: list[int] = []
    for channel, recipient, kind, text in messages:
        message = harmony.Message.from_role_and_content(harmony.Role.ASSISTANT, text)
        message = message.with_channel(channel)
        message = message if recipient is None else message.with_recipient(recipient)
        message = message if kind is None else message.with_content_type(kind)
        tokens += encoding.render(message)
    text = encoding.decode(tokens).removeprefix("<|start|>assistant")
    answer = encoding.encode(text, allowed_special="all")
    parsed = encoding.parse_messages_from_completion_tokens(answer, harmony.Role.ASSISTANT)
    theirs = [(each.channel, each.recipient or "", each.content[0].text) for each in parsed]
    assert theirs == [(channel, to or "", text) for channel, to, _, text in messages]
    reader = ChannelReader()
    ours: dict[int, tuple[str, str, str]] = {}
    for each in [*reader.push(text), *reader.finish()]:
        before = ours.get(each.number, ("", "", ""))[2]
        ours[each.number] = each.channel, each.recipient, before + each.text
    assert [*ours.values()] == theirs


def test_templates_with_channels_are_recognised():
    template = "<|start|>{{ role }}<|channel|>final<|message|>{{ text }}<|end|>"
    assert has_channels(template) and tool_format(template) is CHANNELS
    assert not has_channels("<|im_start|>assistant") and not has_channels("<|start|>x<|message|>")
