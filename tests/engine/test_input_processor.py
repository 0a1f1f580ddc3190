"""The sampling defaults of a model's files apply only where the caller sets no value."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_folder import write_chat_folder
from tiny_models import TINY_MODELS, write_hf
from tokenizer_data import MISTRAL_V1, real_tokenizer
from transformers import AutoModelForCausalLM

from parallel_llama import LLM, Grammar, SamplingParams
from parallel_llama.config.layouts import load_model_args
from parallel_llama.engine.input_processor import InputProcessor
from parallel_llama.errors import UsageError
from parallel_llama.files.model_files import find_model
from parallel_llama.serve import app, chat
from parallel_llama.serve.bodies import ChatBody
from parallel_llama.tokenizer import Chat

TOKENS = [0, 5, 17, 3, 200, 42, 42, 9]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_chat_folder(tmp_path / "chat")


def state(folder: Path, **values: Any) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 1, **values}))


def input_processor(folder: Path) -> InputProcessor:
    files = find_model(str(folder))
    return InputProcessor(files, load_model_args(files))


def test_model_repetition_penalty_gives_tokens_of_transformers(folder):
    state(folder, repetition_penalty=3.0)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    prompt = torch.tensor([TOKENS])
    expected = theirs.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=24, eos_token_id=None
    )
    llm = LLM(str(folder), dtype="float64", kv_cache_bytes=4 << 20)
    shared = {"max_tokens": 24, "ignore_eos": True}
    stated = llm.input_processor.sampling_params(**shared)
    plain = llm.input_processor.sampling_params(**shared, repetition_penalty=1)
    tokens, others = (each.tokens for each in llm.generate([TOKENS] * 2, [stated, plain]))
    llm.close()
    assert [*TOKENS, *tokens] == expected[0].tolist()
    assert tokens != others


def test_given_sampling_params_override_generation_config(folder):
    state(folder, do_sample=True, temperature=0.6, top_k=7, repetition_penalty=1.2)
    params = input_processor(folder).sampling_params(top_k=3, repetition_penalty=1.0)
    assert (params.temperature, params.top_k, params.repetition_penalty) == (0.6, 3, 1.0)


def test_generation_config_out_of_range_is_refused_unless_overridden(folder):
    state(folder, do_sample=True, top_k=-2)
    expected = r"default sampling parameters, in .*chat: top_k=-2.*; correct it there, or set"
    with pytest.raises(UsageError, match=expected):
        input_processor(folder).sampling_params(temperature=1)
    assert input_processor(folder).sampling_params(top_k=0).top_k == 0
    with pytest.raises(UsageError, match=r"^top_p=2"):  # the caller's own mistake
        input_processor(folder).sampling_params(top_k=0, top_p=2)


def test_chat_and_list_of_messages_give_the_same_prompt(folder):
    messages = [{"role": "user", "content": "hi"}]
    listed, chat = input_processor(folder).requests([messages, Chat(messages)])
    assert chat.prompt == listed.prompt
    with pytest.raises(UsageError, match=r"prompt 1: messages\[0\] has content=7"):
        input_processor(folder).requests(["a", [{"role": "user", "content": 7}]])


def test_dynamic_rope_gives_tokens_of_transformers_for_any_max_tokens(tmp_path):
    """Regression: the first tokens changed with max_tokens."""
    folder = write_hf(TINY_MODELS["6/6 dynamic"], tmp_path / "dynamic")  # trained for 12 tokens
    with LLM(str(folder), dtype="float64", kv_cache_bytes=4 << 20, block_size=4) as llm:
        room = llm.input_processor.max_seq_len
        for n_prompt in (5, 12, 13, 20):
            # A new model, since transformers keeps the base of the longest sequence so far.
            theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
            prompt = TOKENS * 3
            ids = torch.tensor([prompt[:n_prompt]])
            expected = theirs.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=room - n_prompt,
                do_sample=False,
                eos_token_id=None,
            )[0, n_prompt:].tolist()
            for n_new in (1, 4, room - n_prompt):
                params = SamplingParams(max_tokens=n_new, ignore_eos=True)
                (completion,) = llm.generate(prompt[:n_prompt], params)
                assert list(completion.tokens) == expected[:n_new]


def test_dynamic_rope_scaling_survives_preemption_and_the_prefix_cache(tmp_path):
    folder = write_hf(TINY_MODELS["6/6 dynamic"], tmp_path / "dynamic")
    prompts = [(TOKENS * 3)[:n] for n in (5, 11, 14, 20, 11, 3)]
    params = SamplingParams(max_tokens=None, ignore_eos=True)
    alone = []
    for prompt in prompts:
        with LLM(str(folder), dtype="float64", kv_cache_bytes=1 << 20) as llm:
            alone += [each.tokens for each in llm.generate(prompt, params)]
    with LLM(str(folder), dtype="float64", kv_cache_bytes=1536 * 45, block_size=1) as small:
        for _ in range(2):
            assert [each.tokens for each in small.generate(prompts, params)] == alone
        assert small.engine.scheduler.n_preempted > 0
        assert small.engine.scheduler.n_prefix_tokens > 0


def test_logit_bias_with_a_grammar_logs_a_warning(folder, caplog):
    """Regression: the grammar's mask overrode the bias without a warning."""
    digits = Grammar("regex", "[0-9]+")
    input_processor(folder).request(3, "Hello", SamplingParams(logit_bias={5: 1.0}))
    input_processor(folder).request(3, "Hello", SamplingParams(grammar=digits))
    assert caplog.text == ""
    input_processor(folder).request(3, "Hello", SamplingParams(grammar=digits, logit_bias={5: 1.0}))
    assert "request 3: its logit_bias cannot bring back a token that its grammar" in caplog.text


@pytest.fixture
def thinking(folder: Path) -> InputProcessor:
    """A model with a chat template that begins the reasoning of the answer."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (folder / name).read_text()
        (folder / name).write_text(text.replace("<|turn|>", "<|START_THINKING|>"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = "{{ messages[0]['content'] }}<|START_THINKING|>"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return input_processor(folder)


def test_answer_with_a_grammar_is_text_although_the_prompt_begins_the_reasoning(thinking):
    """Regression: JSON of a response format was returned as reasoning, without content."""
    messages = [{"role": "user", "content": "Hi"}]
    grammar = Grammar("json_schema", '{"type":"object"}')
    for params, content, reasoning in (
        (SamplingParams(max_tokens=4), "", '{"a":1}'),
        (SamplingParams(max_tokens=4, grammar=grammar), '{"a":1}', None),
    ):
        request = thinking.request(0, Chat(messages), params)
        pending = chat._Pending(
            SimpleNamespace(inputs=thinking), ChatBody(messages=messages),
            SimpleNamespace(request=request), None, True, "id", 0,
        )  # fmt: skip
        message = chat._Choice(pending, 0).message('{"a":1}')
        assert (message.content, message.reasoning_content) == (content, reasoning)


@pytest.mark.usefixtures("thinking")
def test_chat_with_a_grammar_returns_the_constrained_text(folder):
    params = SamplingParams(max_tokens=8, grammar=Grammar("regex", "[ab]{3}"))
    with LLM(str(folder), kv_cache_bytes=4 << 20) as llm:
        (answer,) = llm.chat([{"role": "user", "content": "Hi"}], params)
    assert len(answer.text) == 3 and not answer.reasoning


def test_bad_words_of_sentencepiece_are_forbidden_with_and_without_a_space(folder):
    """Regression: a word after a line break or a bracket was still generated."""
    inputs, tokenizer = input_processor(folder), real_tokenizer(MISTRAL_V1)
    vars(inputs)["tokenizer"] = tokenizer
    sequences = inputs._token_sequences(["print"])
    pieces = [[tokenizer.vocabulary.pieces[id] for id in ids] for ids in sequences]
    assert {b"print", b" print"} <= {b"".join(each) for each in pieces}
    assert tokenizer.eos_ids.isdisjoint(
        id for ids in inputs._token_sequences(["</s>"]) for id in ids
    )


def test_bad_word_that_spells_a_special_token_forbids_no_special_token(folder):
    sequences = input_processor(folder)._token_sequences(["<|end|>", "a<|end|>"])
    assert sequences and 1 not in {id for ids in sequences for id in ids}


def test_max_fitting_tokens_is_limited_by_context_and_kv_cache(folder):
    inputs = input_processor(folder)
    service = SimpleNamespace(inputs=inputs, names=["m"], adapters=[], created=0)
    for n_cache_tokens, expected in (
        (None, inputs.max_seq_len), (20, 21), (inputs.max_seq_len, inputs.max_seq_len)
    ):  # fmt: skip
        inputs.n_cache_tokens = n_cache_tokens
        card = app._model(service, "m")
        assert card.max_fitting_tokens == inputs.max_fitting_tokens == expected
        assert card.max_model_len == inputs.max_seq_len
        request = inputs.request(0, [1, 2], SamplingParams(max_tokens=None))
        assert request.max_tokens == expected - 2 and request.fills_cache
