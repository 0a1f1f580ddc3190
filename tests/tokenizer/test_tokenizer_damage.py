"""Hundreds of damaged tokenizer files: each works or is refused with an error.

The damage respects the structure of the file, because randomly damaged files are mostly not JSON.
"""

import copy
import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tekken_files import write_tekken
from tokenizer_data import (
    LLAMA3,
    MISTRAL_V1,
    SMOLLM2,
    real_tokenizer,
    real_tokenizer_files,
    sentencepiece_model,
)

from parallel_llama.errors import CheckpointError, UsageError
from parallel_llama.tokenizer import Chat, Tokenizer, load_chat_template, load_tokenizer
from parallel_llama.tokenizer.jinja_chat import JinjaChat, TemplateRenderer

pytestmark = pytest.mark.slow

TEXTS = ("Hello, w\u00f6rld 42", " <s>[INST] \U0001f999</s>", "a" * 60 + "!", "")
CHATS = (
    Chat([{"role": "user", "content": [{"type": "text", "text": "hi"}]}]),
    Chat([{"role": "system", "content": ""}, {"role": "user", "content": "hi"}], tools=[{}]),
)
EXTREMES = (
    None, True, 0, -1, 2**31, 2**32 - 1, 2**63, -(2**63), 1.5, -1e308, "", " ", "a", "\u2581",
    "x" * 3000, "<0x41>", [], {}, [[]], {"String": ""}, {"Regex": "(a|aa)+$"}, {"Regex": "("},
)  # fmt: skip
SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}
STEPS: dict[str, list[dict[str, Any]]] = {
    "normalizer": [
        {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1000},
        {"type": "Replace", "pattern": {"Regex": "(a|aa)+$"}, "content": ""},
        {"type": "Precompiled", "precompiled_charsmap": "BAAAAGFiY2R4eA=="},
        {"type": "Prepend", "prepend": ""},
        {"type": "NFKC"},
    ],
    "pre_tokenizer": [
        {**SPLIT, "pattern": {"Regex": "(a+)+$"}},
        {**SPLIT, "pattern": {"Regex": "(?=a)"}},
        {"type": "FixedLength", "length": 0},
        {"type": "Metaspace", "replacement": "a", "prepend_scheme": "always", "split": True},
    ],
    "decoder": [
        {"type": "Replace", "pattern": {"String": ""}, "content": "x"},
        {"type": "Strip", "content": " ", "start": 2**40, "stop": 0},
        {"type": "ByteFallback"},
        {"type": "CTC", "pad_token": "p", "word_delimiter_token": "|", "cleanup": True},
    ],
    "post_processor": [
        {"type": "TemplateProcessing", "single": [], "pair": [], "special_tokens": {}},
        {"type": "BertProcessing", "sep": ["a", 2**32 - 1], "cls": ["b", 0]},
        {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "x", "type_id": 0}}],
         "pair": [], "special_tokens": {}},
    ],
}  # fmt: skip
NESTED = {
    "normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "decoder": "decoders",
    "post_processor": "processors",
}  # fmt: skip


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container in a JSON value with each of its keys, or with the first 20 keys."""
    keys = list(value if isinstance(value, dict) else range(len(value)))
    for key in keys[:20]:
        yield value, key
        if isinstance(value[key], dict | list):
            yield from places(value[key])


def damage(value: Any, draw: random.Random) -> None:
    """Deletes, repeats or replaces a part of a JSON value."""
    container, key = draw.choice(list(places(value)))
    match draw.randrange(4):
        case 0:
            del container[key]
        case 1 if isinstance(container[key], list | str):
            container[key] = container[key] * 20
        case 2:
            other, place = draw.choice(list(places(value)))
            container[key] = copy.deepcopy(other[place])
        case _:
            container[key] = copy.deepcopy(draw.choice(EXTREMES))


def damaged_json(whole: Any, n_files: int, change: Callable[[Any, random.Random], None]) -> Any:
    """Damaged JSON files; one in ten also has a changed byte, and may not be valid JSON."""
    draw = random.Random(0)
    for _ in range(n_files):
        value = copy.deepcopy(whole)
        for _ in range(draw.choice((1, 1, 2))):
            change(value, draw)
        data = bytearray(json.dumps(value).encode())
        if draw.random() < 0.1:
            data[draw.randrange(len(data))] = draw.randrange(256)
        yield bytes(data)


def damage_tokenizer(value: dict[str, Any], draw: random.Random) -> None:
    part = draw.choice(list(STEPS))
    if draw.random() < 0.5:
        damage(value, draw)
    elif draw.random() < 0.7:
        value[part] = draw.choice(STEPS[part])
    else:
        steps = draw.choices(STEPS[part], k=draw.choice((0, 2, 40)))
        value[part] = {"type": "Sequence", NESTED[part]: steps}


def run(tokenizer: Tokenizer) -> None:
    for text in TEXTS:
        for special in (True, False):
            try:
                ids = tokenizer.encode(text, special=special)
            except CheckpointError:
                continue
            tokenizer.decode(ids)


def count_refused(files: Iterator[bytes], path: Path, chats: Sequence[Chat] = CHATS) -> int:
    n_refused = 0
    for data in files:
        path.write_bytes(data)
        try:
            tokenizer = load_tokenizer(path.parent)
            run(tokenizer)
            chat = load_chat_template(path.parent, tokenizer)
            for each in chats if chat is not None else ():
                chat.encode(each)
        except (CheckpointError, UsageError):
            n_refused += 1
    return n_refused


def cut(file: bytes) -> dict[str, Any]:
    """A tokenizer.json with its first 400 tokens, and the merges among them."""
    value: dict[str, Any] = json.loads(file)
    model = value["model"]
    model["vocab"] = {token: id for token, id in model["vocab"].items() if id < 400}
    model["merges"] = [
        pair for pair in model["merges"] if {*pair, "".join(pair)} <= model["vocab"].keys()
    ]
    value["added_tokens"] = [token for token in value["added_tokens"] if token["id"] < 400]
    return value


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
def test_a_damaged_tokenizer_json_works_or_is_refused(tmp_path, kind):
    whole = cut(real_tokenizer_files()[kind])
    n_refused = count_refused(
        damaged_json(whole, 40, damage_tokenizer), tmp_path / "tokenizer.json"
    )
    assert 5 < n_refused < 38


def test_a_damaged_tekken_file_works_or_is_refused(tmp_path):
    path = write_tekken(tmp_path, 7)
    whole = json.loads(path.read_text())
    n_refused = count_refused(damaged_json(whole, 60, damage), path, CHATS[:1])
    assert 5 < n_refused < 58


CONFIG = {
    "add_bos_token": True,
    "added_tokens_decoder": {"400": {"content": "<|im_end|>", "special": True}, "1": "<s>"},
    "bos_token": "<s>",
    "eos_token": {"content": "</s>", "lstrip": False},
    "chat_template": [
        {"name": "default", "template": "{{ bos_token }}{{ messages[0].content }}<|im_end|>"},
        {"name": "tool_use", "template": "{{ tools | tojson }}"},
    ],
}


@pytest.mark.parametrize(
    ("name", "whole", "n_files"),
    [
        ("tokenizer_config.json", CONFIG, 60),
        ("special_tokens_map.json", {"bos_token": {"content": "<s>"}, "eos_token": "</s>"}, 200),
        ("added_tokens.json", {"<a>": 400, "<b>": 401}, 200),
    ],
)
def test_a_damaged_configuration_works_or_is_refused(tmp_path, name, whole, n_files):
    model = sentencepiece_model(MISTRAL_V1).SerializeToString()
    (tmp_path / "tokenizer.model").write_bytes(model)
    n_refused = count_refused(damaged_json(whole, n_files, damage), tmp_path / name)
    assert n_refused < n_files


def test_a_damaged_chat_template_works_or_is_refused():
    whole = real_template()
    draw = random.Random(0)
    renderer = TemplateRenderer()
    n_rendered = 0
    for _ in range(200):
        at, to = draw.randrange(len(whole)), draw.randrange(len(whole))
        template = whole[:at] + whole[to : to + draw.choice((0, 1, 8))] + whole[at + 1 :]
        chat = JinjaChat(template, real_tokenizer(SMOLLM2), {}, "a model", renderer)
        for each in CHATS:
            try:
                chat.encode(each)
            except (CheckpointError, UsageError):
                continue
            n_rendered += 1
    renderer.close()
    assert 20 < n_rendered < 380


def real_template() -> str:
    chat = load_chat_template(SMOLLM2, real_tokenizer(SMOLLM2))
    assert isinstance(chat, JinjaChat)
    return chat._template


def test_damaged_tiktoken_file_is_refused(tmp_path):
    draw = random.Random(0)
    lines = LLAMA3.read_bytes().splitlines()
    path = tmp_path / "tokenizer.model"
    for _ in range(8):
        at, to = draw.randrange(256), draw.randrange(len(lines))
        token, rank = lines[at].split()
        other = lines[to].split()[draw.randrange(2)]
        changed = draw.choice((token + b" " + other, other + b" " + rank, b"", token[1:] + b" 1"))
        path.write_bytes(b"\n".join([*lines[:at], changed, *lines[at + 1 :]]))
        with pytest.raises(CheckpointError, match=r"tokenizer\.model"):
            load_tokenizer(path)
