"""Answers with reasoning between two marks, such as <think> and </think> of Qwen 3."""

import json

import pytest

from parallel_llama.serve.channels import ChannelParts, Reasoning
from parallel_llama.serve.replies import CalledFunction
from parallel_llama.serve.tool_calls import HERMES
from parallel_llama.serve.tools import ToolFunction, Tools
from parallel_llama.tokenizer.answers import answer_reader, markers

QWEN3 = "{{ content.split('</think>')[-1] }}"
MINISTRAL = "[THINK]{{ block.thinking }}[/THINK]"
SEED = '{% set think_end_token = "</seed:think>" %}'
CALL = '<tool_call>\n{"name": "rain", "arguments": {"city": "Oslo"}}\n</tool_call>'

WRITTEN = [
    ("<think>\nHm.\n\nSo.\n</think>\n\nHi\n", "Hm.\n\nSo.", "Hi\n"),
    ("\n<think>Hm.</think>Hi", "Hm.", "Hi"),
    ("<think>\n\n</think>\n\nHi", "", "Hi"),
    ("<think></think>", "", ""),
    # Only the beginning of an answer is reasoning.
    (" Hi <think>x</think>", "", " Hi <think>x</think>"),
    ("<think>a</think>b <think>c</think>", "a", "b <think>c</think>"),
    ("</think>Hi", "", "</think>Hi"),
    ("<thin", "", "<thin"),
    ("<thinner> Hi", "", "<thinner> Hi"),
    # Cut off.
    ("<think>\nHm. </thi", "Hm. </thi", ""),
    ("<think>\nHm. \n", "Hm.", ""),
    ("<think>", "", ""),
    (" \n", "", " \n"),
    ("", "", ""),
    ("<think>a </ b </think> <c", "a </ b", "<c"),
]


def read(parts_of, written, size):
    """Reasoning, text and calls of an answer that arrives in pieces of `size` characters."""
    pieces = [written[at : at + size] for at in range(0, len(written), size)]
    parts = [part for piece in pieces for part in parts_of.push(piece)] + parts_of.finish()
    assert all(part.text if isinstance(part, Reasoning) else part for part in parts)
    return (
        "".join(part.text for part in parts if isinstance(part, Reasoning)),
        "".join(part for part in parts if isinstance(part, str)),
        [
            (part.name, json.loads(part.arguments))
            for part in parts
            if isinstance(part, CalledFunction)
        ],
    )


@pytest.mark.parametrize(("written", "reasoning", "text"), WRITTEN)
@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("template", "name"), [(QWEN3, "<think>"), (MINISTRAL, "[THINK]"), (SEED, "<seed:think>")]
)
def test_an_answer_is_split_into_reasoning_and_text(template, name, written, reasoning, text, size):
    def with_marks(value):
        return value.replace("<think>", name).replace("</think>", f"{name[0]}/{name[1:]}")

    reader = ChannelParts(answer_reader(template, ""))
    expected = with_marks(reasoning), with_marks(text), []
    assert read(reader, with_marks(written), size) == expected


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("prompt", "written", "reasoning", "text"),
    [
        ("<|im_start|>assistant\n<think>\n", "\nHm.\n</think>\n\nHi", "Hm.", "Hi"),
        ("<think>", "Hm.", "Hm.", ""),
        ("<think>\n\n</think>\n\n", "Hi", "", "Hi"),
        ("Do you <think> so?<|im_end|>", "Hi", "", "Hi"),
    ],
)
def test_the_prompt_may_begin_the_reasoning(prompt, written, reasoning, text, size):
    reader = ChannelParts(answer_reader(QWEN3, prompt))
    assert read(reader, written, size) == (reasoning, text, [])


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_calls_are_read_after_the_reasoning_only(size):
    tools = Tools(HERMES, [ToolFunction(name="rain")], False, None, has_special_markers=False)
    written = f"<think>\nPerhaps {CALL}?\n</think>\n\nI look.\n{CALL}"
    reasoning, text, calls = read(tools.reader(answer_reader(QWEN3, "")), written, size)
    assert (reasoning, text.strip()) == (f"Perhaps {CALL}?", "I look.")
    assert calls == [("rain", {"city": "Oslo"})]
    cut_off = tools.reader(answer_reader(QWEN3, ""))
    assert read(cut_off, "<think>Hm.</think>Hi <tool_c", size) == ("Hm.", "Hi <tool_c", [])
    assert read(tools.reader(), CALL, size)[2] == calls


def test_templates_with_thoughts_are_recognised():
    assert markers(QWEN3) == ("<think>", "</think>")
    assert markers(MINISTRAL) == ("[THINK]", "[/THINK]")
    assert markers(SEED) == ("<seed:think>", "</seed:think>")
    assert markers("{{ '<think>' }}") == () and answer_reader("{{ '<think>' }}", "") is None
