"""The tokenizer inside a GGUF file as the files that a folder carries."""

import json
from pathlib import Path
from typing import Any

from parallel_llama.gguf_header import read_gguf_header
from parallel_llama.tokenizer import spm
from parallel_llama.tokenizer.gguf_vocabulary import GGUFVocabulary, build_gguf_tokenizer
from parallel_llama.tokenizer.spm import SentencePieceTokenizer
from parallel_llama.tokenizer.tokenizer_json import TokenizersTokenizer

_NAMES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def export_gguf_tokenizer(path: Path) -> dict[str, bytes]:
    """tokenizer.json (tokenizer.model where it is SentencePiece's) and tokenizer_config.json.

    Raises: UsageError for a kind that cannot be run, CheckpointError for damaged fields.
    """
    fields = read_gguf_header(path).fields
    tokenizer = build_gguf_tokenizer(fields, str(path))
    vocabulary = GGUFVocabulary(fields, str(path))
    tokens = vocabulary.tokens()
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": bool(tokenizer.encode("")),
        "clean_up_tokenization_spaces": False,
    }
    for name, key in _NAMES.items():
        id = vocabulary.token_id(key, len(tokens))
        if id is not None:
            config[name] = tokens[id]
    if (template := fields.get("tokenizer.chat_template")) is not None:
        tool_use = fields.get("tokenizer.chat_template.tool_use")
        named = {"default": template, "tool_use": tool_use}
        config["chat_template"] = (
            template
            if tool_use is None
            else [{"name": name, "template": text} for name, text in named.items()]
        )
    if isinstance(tokenizer, SentencePieceTokenizer):
        config |= _sentencepiece_config(vocabulary, tokenizer, tokens)
        files = {"tokenizer.model": tokenizer.to_model()}
    else:
        assert isinstance(tokenizer, TokenizersTokenizer)
        files = {"tokenizer.json": tokenizer.to_json().encode()}
    return {**files, "tokenizer_config.json": json.dumps(config, indent=2).encode() + b"\n"}


def _sentencepiece_config(
    vocabulary: GGUFVocabulary, tokenizer: SentencePieceTokenizer, tokens: list[str]
) -> dict[str, Any]:
    """What tokenizer.model does not say: bos and eos by their texts, and tokens that are added."""
    added = {
        str(id): {"content": token, "special": False}
        for id, (token, kind) in enumerate(zip(tokens, vocabulary.types(len(tokens)), strict=True))
        if kind == spm.USER_DEFINED
    }
    config: dict[str, Any] = {"tokenizer_class": "LlamaTokenizer", "legacy": False}
    if tokenizer.bos_id is not None:
        config["bos_token"] = tokens[tokenizer.bos_id]
    eos_id = vocabulary.token_id("eos", len(tokens), default=2 if len(tokens) > 2 else None)
    if eos_id is not None:
        config["eos_token"] = tokens[eos_id]
    if added:
        config["added_tokens_decoder"] = added
    return config
