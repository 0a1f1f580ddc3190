"""Mistral's own tokenizers and chat formats, from mistral-common.

mistral-common imports libraries for images and languages, which text does not need and which are
not installed.
"""

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

_IMAGES, _LANGUAGES = types.ModuleType("PIL"), types.ModuleType("language_code")
_IMAGES.Image = types.SimpleNamespace(Image=object)
_LANGUAGES.LanguageAlpha2 = str
_UNUSED = {
    "PIL": _IMAGES,
    "pydantic_extra_types": types.ModuleType("pydantic_extra_types"),
    "pydantic_extra_types.language_code": _LANGUAGES,
}


@contextmanager
def _without_unused_libraries() -> Iterator[None]:
    """Replaces the missing libraries by stubs during the block."""
    there = {name: sys.modules[name] for name in _UNUSED if name in sys.modules}
    sys.modules.update(_UNUSED)
    try:
        yield
    finally:
        for name in _UNUSED:
            del sys.modules[name]
        sys.modules.update(there)


@cache
def mistral_tokenizer(path: Path) -> Any:
    """Mistral's tokenizer of a file, with its chat format."""
    with _without_unused_libraries():
        from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
    return MistralTokenizer.from_file(str(path))


def taken_of(names: list[str]) -> str:
    """The file of a folder that Mistral's code reads."""
    with _without_unused_libraries():
        from mistral_common.tokens.tokenizers.utils import get_one_valid_tokenizer_file
    name: str = get_one_valid_tokenizer_file(names)
    return name


def encoded(path: Path, text: str) -> list[int]:
    """Mistral's ids of a text, without bos."""
    ids: list[int] = mistral_tokenizer(path).instruct_tokenizer.tokenizer.encode(
        text, bos=False, eos=False
    )
    return ids


def decoded(path: Path, ids: list[int]) -> str:
    text: str = mistral_tokenizer(path).decode(ids)
    return text


def encoded_chat(path: Path, messages: list[dict[str, Any]]) -> list[int]:
    """Mistral's ids of a conversation, in OpenAI's form."""
    tokenizer = mistral_tokenizer(path)
    from mistral_common.protocol.instruct.request import ChatCompletionRequest

    request = ChatCompletionRequest.from_openai(messages)
    ids: list[int] = tokenizer.encode_chat_completion(request).tokens
    return ids


def chat_template(path: Path) -> str:
    """The template that Mistral's own generator writes for a file."""
    mistral_tokenizer(path)
    from mistral_common.integrations.chat_templates.chat_templates import (
        convert_tokenizer_to_chat_template,
    )

    text: str = convert_tokenizer_to_chat_template(path)
    return text
