"""The echoed prompt of a text completion, with tokenizers that begin a text with a bos token."""

import json
from types import SimpleNamespace

import pytest
from tokenizer_data import LLAMA3, MISTRAL_V1, SMOLLM2, real_tokenizer

from parallel_llama.request import Completion, TokenLogprob
from parallel_llama.serve.bodies import CompletionBody
from parallel_llama.serve.completions import _choice, _Pending, _piece
from parallel_llama.serve.wire import Output

TEXT = "The sky is"
FILES = pytest.mark.parametrize("file", [SMOLLM2, LLAMA3, MISTRAL_V1], ids=lambda file: file.name)


def pending(tokenizer, given, **fields):
    """A request with the log-probabilities of its prompt."""
    ids = tokenizer.encode(given) if isinstance(given, str) else given
    answer = SimpleNamespace(
        request=SimpleNamespace(prompt=ids, params=SimpleNamespace(n=1)),
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
