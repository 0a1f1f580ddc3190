"""The echoed prompt of a text completion, with tokenizers that begin a text with a bos token."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from tokenizer_data import LLAMA3, MISTRAL_V1, SMOLLM2, real_tokenizer

from parallel_llama.request import Completion, SamplingParams, TokenLogprob
from parallel_llama.serve.bodies import CompletionBody
from parallel_llama.serve.completions import _choice, _Pending, _piece
from parallel_llama.serve.wire import Output

TEXT = "The sky is"
RARE = "\U0001f701"  # several tokens, none of them valid UTF-8
FILES = pytest.mark.parametrize("file", [SMOLLM2, LLAMA3, MISTRAL_V1], ids=lambda file: file.name)


def pending(tokenizer, given, **fields):
    """A request with the log-probabilities of its prompt."""
    ids = tokenizer.encode(given) if isinstance(given, str) else given
    answer = SimpleNamespace(
        request=SimpleNamespace(prompt=ids, params=SamplingParams()),
        prompt_logprobs=[TokenLogprob(id, -1.0, ()) for id in ids[1:]],
    )
    inputs = SimpleNamespace(tokenizer=tokenizer)
    body = CompletionBody(prompt=given, echo=True, **fields)
    return _Pending(SimpleNamespace(inputs=inputs, model="m"), body, [answer], "id", 0)


def outputs_of(tokenizer):
    """The output of the engine for the completion " blue"."""
    end = tokenizer.encode(f"{TEXT} blue")[len(tokenizer.encode(TEXT)) :]
    completion = Completion(0, " blue", tuple(end), "length", 3)
    scored = tuple(TokenLogprob(id, -2.0, ()) for id in end)
    return [Output(0, 0, tuple(end), " blue", scored, completion)]


def reply(pending, tokenizer):
    outputs = outputs_of(tokenizer)
    text = pending.prompt_text(0)
    return json.loads(_choice(pending, 0, outputs, outputs[0].completion, text))


@FILES
def test_echo_returns_the_text_of_the_prompt_unchanged(file):
    """Regression: the text began with the bos token, and with the space of SentencePiece."""
    tokenizer = real_tokenizer(file)
    asked = pending(tokenizer, TEXT)
    assert reply(asked, tokenizer)["text"] == f"{TEXT} blue"
    assert _piece(asked, 0, outputs_of(tokenizer)[0], {}).text == f"{TEXT} blue"


@FILES
@pytest.mark.parametrize("as_ids", [False, True])
def test_text_offsets_of_echoed_tokens_are_positions_in_the_text(file, as_ids):
    tokenizer = real_tokenizer(file)
    given = tokenizer.encode(TEXT)
    choice = reply(pending(tokenizer, given if as_ids else TEXT, logprobs=0), tokenizer)
    text, found = choice["text"], choice["logprobs"]
    assert text.endswith("The sky is blue") and len(found["tokens"]) > len(given)
    assert found["text_offset"][0] == 0
    ends = [*found["text_offset"][1:], len(text)]
    is_bos = not as_ids and tokenizer.bos_id == given[0]
    for token, start, end in list(zip(found["tokens"], found["text_offset"], ends, strict=True)):
        if is_bos and start == end == 0:
            continue
        assert text[start:end] in (token, token.removeprefix(" ")), (token, start, end)


@FILES
def test_text_offsets_count_a_character_of_several_tokens_once(file):
    """Regression: the length of the label, such as bytes:\\xf0, was added for each token."""
    tokenizer = real_tokenizer(file)
    prompt = f"{RARE} The sky is"
    asked = pending(tokenizer, prompt, logprobs=0)
    choice = reply(asked, tokenizer)
    text, found = choice["text"], choice["logprobs"]
    ids = asked.answers[0].request.prompt
    pairs = list(zip(found["tokens"], found["text_offset"], strict=True))
    assert sum(token.startswith("bytes:") for token, _ in pairs) > 1
    for token, start in pairs[tokenizer.bos_id == ids[0] :]:
        if token.startswith("bytes:"):
            assert start == 0
        else:
            assert text.startswith((token, token.removeprefix(" ")), start), (token, start)
    assert found["text_offset"][len(ids)] == len(prompt)


def test_text_offsets_do_not_count_special_tokens_that_are_left_out():
    tokenizer = real_tokenizer(SMOLLM2)
    end = tokenizer.vocabulary.special_ids["<|im_end|>"]
    (blue,) = tokenizer.encode(" blue", bos=False)
    ids = (blue, end, blue)
    scored = tuple(TokenLogprob(id, -2.0, ()) for id in ids)
    completion = Completion(0, " blue blue", ids, "length", 3)
    output = Output(0, 0, ids, " blue blue", scored, completion)
    asked = pending(tokenizer, TEXT, logprobs=0)
    found = json.loads(_choice(asked, 0, [output], completion, TEXT))["logprobs"]
    assert found["text_offset"][-3:] == [10, 15, 15]


def test_text_offsets_after_a_normalised_prompt_begin_at_its_length():
    """Qwen composes characters, so the tokens have fewer characters than the prompt."""
    tokenizer = real_tokenizer(SMOLLM2)
    asked = pending(tokenizer, tokenizer.encode("caf\u00e9"), logprobs=0)
    outputs = outputs_of(tokenizer)
    written = "cafe\u0301"
    choice = json.loads(_choice(asked, 0, outputs, outputs[0].completion, written))
    n_prompt = len(asked.answers[0].request.prompt)
    assert choice["logprobs"]["text_offset"][n_prompt] == len(written)


def test_streamed_text_offsets_count_text_that_is_held_back():
    """Regression: a token after text that was held back for a stop string began before it."""
    tokenizer = real_tokenizer(SMOLLM2)
    ids = tokenizer.encode("\nX", bos=False)
    assert len(ids) == 2
    asked = replace(pending(tokenizer, TEXT), body=CompletionBody(prompt=TEXT, logprobs=0))
    offsets, found = {}, []
    for id, shown in zip(ids, ("", "\nX"), strict=True):
        output = Output(0, 0, (id,), shown, (TokenLogprob(id, -2.0, ()),))
        found += _piece(asked, 0, output, offsets).logprobs.text_offset
    assert found == [0, 1]
