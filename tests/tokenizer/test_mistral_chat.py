"""Mistral's chat formats, compared with mistral-common."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mistral_oracle import chat_template, encoded_chat
from tekken_files import specials, write_tekken
from tokenizer_data import MISTRAL_FILES, MISTRAL_V1, MISTRAL_V3, MISTRAL_V7, TEKKEN, real_tokenizer

from parallel_llama.errors import CheckpointError, UsageError
from parallel_llama.tokenizer import Chat, ChatTemplate, load_chat_template, load_tokenizer
from parallel_llama.tokenizer.jinja_chat import JinjaChat

SAID = (
    "hi", "What is 7 x 6?\n", "  two  spaces ", " [INST]x[/INST]</s>",
    "ünïcödé 🦙\u0301", "\n", "a\n\nb", "x " * 40,
)  # fmt: skip


def chats(seed: int, n_chats: int, said: tuple[str, ...] = SAID) -> Iterator[list[dict[str, Any]]]:
    """Conversations that mistral-common accepts: repeated roles, systems anywhere, text parts."""
    draw = random.Random(seed)
    after = {
        "": ("system", "user", "assistant"),
        "system": ("system", "user", "assistant"),
        "user": ("system", "user", "assistant"),
        "assistant": ("user", "assistant"),
    }

    def content(role: str) -> Any:
        texts = draw.choices(said, k=draw.choice((1, 1, 2, 3)))
        if len(texts) > 1:
            return [{"type": "text", "text": text} for text in [*texts, ""]]
        return "" if role == "user" and draw.random() < 0.1 else texts[0]

    for _ in range(n_chats):
        roles = [""]
        while len(roles) < 9 and (len(roles) == 1 or draw.random() < 0.8):
            roles.append(draw.choice(after[roles[-1]]))
        if roles[-1] == "assistant":
            roles.append("user")
        yield [{"role": role, "content": content(role)} for role in roles[1:]]


def mistral_chat(folder: Path, file: Path) -> ChatTemplate:
    """The chat of a folder in Mistral's layout with this tokenizer."""
    (folder / "params.json").write_text('{"dim": 64, "hidden_dim": 128}')
    return load_chat_template(folder, real_tokenizer(file))


@pytest.mark.parametrize("path", MISTRAL_FILES, ids=lambda path: path.name)
def test_chat_ids_equal_mistral_common(tmp_path, path):
    chat = mistral_chat(tmp_path, path)
    said = tuple(text for text in SAID if "[INST]" not in text) if path == MISTRAL_V1 else SAID
    for messages in chats(0, 200, said):
        assert chat.encode(Chat(messages)) == encoded_chat(path, messages)
    assert chat.stop_ids == real_tokenizer(path).eos_ids == {2}


@pytest.mark.parametrize("version", [3, 7, 11, 13])
def test_chat_ids_of_each_tekken_version_equal_mistral_common(tmp_path, version):
    path = write_tekken(tmp_path, version)
    chat = load_chat_template(tmp_path, load_tokenizer(tmp_path))
    for messages in chats(version, 200):
        assert chat.encode(Chat(messages)) == encoded_chat(path, messages)


def test_each_version_puts_the_system_message_in_its_own_place(tmp_path):
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "A"},
        {"role": "assistant", "content": "B "},
        {"role": "user", "content": "C"},
    ]
    written = {}
    for path in (MISTRAL_V1, MISTRAL_V3, MISTRAL_V7, TEKKEN):
        (folder := tmp_path / path.name).mkdir()
        ids = mistral_chat(folder, path).encode(Chat(messages))
        written[path] = real_tokenizer(path).decode(ids, skip_special=False)
    assert written == {
        MISTRAL_V1: "<s> [INST] S\n\nA [/INST] B </s> [INST] C [/INST]",
        MISTRAL_V3: "<s>[INST] A[/INST] B</s>[INST] S\n\nC[/INST]",
        MISTRAL_V7: "<s>[SYSTEM_PROMPT] S[/SYSTEM_PROMPT][INST] A[/INST] B</s>[INST] C[/INST]",
        TEKKEN: "<s>[INST]A[/INST]B</s>[INST]S\n\nC[/INST]",
    }


def test_roles_out_of_turn_are_refused_as_by_mistral_common(tmp_path):
    from mistral_common.exceptions import MistralCommonException

    chat = mistral_chat(tmp_path, MISTRAL_V3)
    for roles, reason in (
        (["assistant"], "no answer at the end"),
        (["user", "assistant"], "no answer at the end"),
        (["user", "assistant", "system", "user"], "no system message after an answer"),
    ):
        messages = [{"role": role, "content": "x"} for role in roles]
        with pytest.raises((MistralCommonException, ValueError)):
            encoded_chat(MISTRAL_V3, messages)
        with pytest.raises(UsageError, match=reason):
            chat.encode(Chat(messages))
    with pytest.raises(UsageError, match=r"messages\[0\] has role 'tool', which is unknown"):
        chat.encode(Chat([{"role": "tool", "content": "x"}]))
    silent = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "x"},
    ]
    with pytest.raises(MistralCommonException):
        encoded_chat(MISTRAL_V3, silent)
    with pytest.raises(UsageError, match=r"messages\[1\] is an answer without text"):
        chat.encode(Chat(silent))


@pytest.mark.parametrize("tag", ["[INST]", "[/INST]"])
def test_v1_refuses_messages_with_its_markup(tmp_path, tag):
    chat = mistral_chat(tmp_path, MISTRAL_V1)
    with pytest.raises(
        UsageError, match=r"messages\[0\] contains .*, which is markup of Mistral's"
    ):
        chat.encode(Chat([{"role": "user", "content": f"x {tag} y"}]))


def test_unknown_chat_version_is_refused_only_for_chats(tmp_path):
    """Version 15 writes model settings into the first user message."""
    write_tekken(tmp_path, 15)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"
    chat = load_chat_template(tmp_path, tokenizer)
    with pytest.raises(UsageError, match="version 15 of Mistral's chat format is not supported"):
        chat.encode(Chat([{"role": "user", "content": "x"}]))


def test_a_file_without_the_tokens_of_its_format_is_refused(tmp_path):
    write_tekken(tmp_path, 7, **specials("[INST]"))
    chat = load_chat_template(tmp_path, load_tokenizer(tmp_path))
    with pytest.raises(CheckpointError, match=r"has no token \[/INST\], which version 7"):
        chat.encode(Chat([{"role": "user", "content": "x"}]))


# Templates in HF's folders.


def dialogs(n_dialogs: int) -> Iterator[list[dict[str, Any]]]:
    """Dialogs that every template accepts: an optional system message, then alternating roles."""
    draw = random.Random(0)
    # transformers' conversion of a tokenizer.model merges repeated spaces in another order.
    said = [text.strip() for text in SAID if "  " not in text and "[" not in text and text.strip()]
    for _ in range(n_dialogs):
        n_turns = draw.choice((1, 3, 5))
        messages = [
            {"role": ("user", "assistant")[index % 2], "content": draw.choice(said)}
            for index in range(n_turns)
        ]
        yield [{"role": "system", "content": "Be brief."}, *messages][draw.randrange(2) :]


@pytest.mark.slow
@pytest.mark.parametrize("path", [MISTRAL_V1, MISTRAL_V3, MISTRAL_V7], ids=lambda path: path.name)
def test_hf_template_gives_ids_of_transformers_and_mistral_common(tmp_path, path):
    """The template is the one that mistral-common generates for the file."""
    from transformers import AutoTokenizer, LlamaTokenizer  # takes seconds

    (tmp_path / "tokenizer.model").symlink_to(path)
    LlamaTokenizer.from_pretrained(tmp_path).save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(chat_template(path))
    oracle = AutoTokenizer.from_pretrained(tmp_path)
    chat = load_chat_template(tmp_path, load_tokenizer(tmp_path))
    assert isinstance(chat, JinjaChat)
    for messages in dialogs(20):
        text = oracle.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert chat.render(Chat(messages)) == text
        ids = chat.encode(Chat(messages))
        assert ids == oracle(text, add_special_tokens=False).input_ids
        assert ids == encoded_chat(path, messages)


@pytest.mark.parametrize("path", MISTRAL_FILES[:4], ids=lambda path: path.name)
def test_hf_template_without_tokenizer_json_gives_mistral_common_ids(tmp_path, path):
    """Regression: SentencePiece added a second space after the space that the template writes."""
    (tmp_path / "tokenizer.model").symlink_to(path)
    (tmp_path / "chat_template.jinja").write_text(chat_template(path))
    chat = load_chat_template(tmp_path, load_tokenizer(tmp_path))
    assert isinstance(chat, JinjaChat)
    for messages in dialogs(20):
        assert chat.encode(Chat(messages)) == encoded_chat(path, messages)


def test_template_beside_a_tekken_file_gets_bos_from_that_file(tmp_path):
    """Such folders may lack the tokenizer_config.json that names BOS."""
    (tmp_path / "tekken.json").symlink_to(TEKKEN)
    (tmp_path / "chat_template.jinja").write_text(chat_template(TEKKEN))
    chat = load_chat_template(tmp_path, real_tokenizer(TEKKEN))
    assert isinstance(chat, JinjaChat)
    for messages in dialogs(20):
        assert chat.encode(Chat(messages)) == encoded_chat(TEKKEN, messages)
