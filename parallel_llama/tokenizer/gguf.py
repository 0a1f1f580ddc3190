"""The tokenizer in a GGUF file: rebuilt for the library of its type, or exported to files.

Source: the keys under tokenizer.ggml in ggml's docs/gguf.md.
"""

import json
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from parallel_llama.config.generation import NO_TOKEN_IDS
from parallel_llama.errors import CheckpointError, UsageError, kind_of
from parallel_llama.files.fields import did_you_mean
from parallel_llama.files.gguf_header import read_gguf_header
from parallel_llama.tokenizer import spm
from parallel_llama.tokenizer.chat import TURN_ENDS
from parallel_llama.tokenizer.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from parallel_llama.tokenizer.spm import AddedToken, SentencePieceTokenizer
from parallel_llama.tokenizer.tokenizer import MAX_PIECES, Tokenizer
from parallel_llama.tokenizer.tokenizer_json import BuiltEncoder, TokenizersTokenizer

MAX_MERGES = 4 * MAX_PIECES
MAX_ADDED = 1 << 18  # speech models have about 30,000; this many take seconds to add

# Some converters type these as ordinary or user-defined tokens, so that chats would not stop. As in
# llama.cpp they are special tokens. </s> is an HTML tag in Gemma's vocabulary.
_ALWAYS_SPECIAL = frozenset(TURN_ENDS) - {"</s>"}

# The keys of chat templates, by the names of the templates in folders.
TEMPLATE_FIELDS = {
    "default": "tokenizer.chat_template",
    "tool_use": "tokenizer.chat_template.tool_use",
}
# Phi-3's tokens after which its tokenizer keeps whitespace, as in llama.cpp's src/llama-vocab.cpp.
_KEEP_WHITESPACE = ("<unk>", "<s>", "<|endoftext|>")
# A token that identifies Phi-4's tokenizer, which drops whitespace on both sides of every special
# token, as its tokenizer.json states.
_PHI4_TOKEN = "<|im_sep|>"
# Names of special tokens in templates, and in the keys of the file.
_NAMES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def build_gguf_tokenizer(fields: dict[str, Any], source: str) -> Tokenizer:
    """The tokenizer described by the fields of a GGUF header.

    Raises: UsageError for an unsupported type, CheckpointError for damaged fields.
    """
    vocabulary = GGUFVocabulary(fields, source)
    kind = vocabulary.value("model", str, None)
    if kind == "gpt2":
        return _byte_level_bpe(vocabulary)
    if kind == "llama":
        return _sentencepiece(vocabulary)
    if kind is None:
        raise UsageError(f"{source}: contains no tokenizer (no field tokenizer.ggml.model)")
    raise UsageError(f"{source}: has a {kind[:80]!r} tokenizer; only gpt2 and llama are supported")


class GGUFVocabulary:
    """The fields under tokenizer.ggml; the type of each is checked when it is read."""

    def __init__(self, fields: dict[str, Any], source: str) -> None:
        self._fields = fields
        self.source = source

    def value(self, name: str, kind: type, default: Any) -> Any:
        value = self._fields.get(f"tokenizer.ggml.{name}", default)
        if value is not default and type(value) is not kind:
            raise self.damaged(f"{name} is {kind_of(value)}, not {kind_of(kind())}")
        return value

    def values(self, name: str, kind: type, length: int | None = None) -> list[Any]:
        """A list with items of one type, and of the given length."""
        values: list[Any] = self.value(name, list, [])
        if any(type(value) is not kind for value in values):
            raise self.damaged(f"{name} has items that are not of type {kind.__name__}")
        if length is not None and len(values) != length:
            raise self.damaged(f"{name} has {len(values)} items for {length} tokens")
        return values

    @cached_property
    def tokens(self) -> list[str]:
        tokens: list[str] = self.values("tokens", str)
        if not 0 < len(tokens) <= MAX_PIECES:
            raise self.damaged(f"there are {len(tokens)} tokens, not 1 to {MAX_PIECES}")
        return tokens

    @cached_property
    def types(self) -> list[int]:
        """The type of each token: CONTROL for the end of a turn, and NORMAL if not stated."""
        types = [spm.NORMAL] * len(self.tokens)
        if "tokenizer.ggml.token_type" in self._fields:
            types = self.values("token_type", int, len(self.tokens))
        for id, kind in enumerate(types):
            if not spm.NORMAL <= kind <= spm.BYTE:
                raise self.damaged(f"token {id} has type {kind}, not 1 to 6")
        types = [
            spm.CONTROL if token in _ALWAYS_SPECIAL else kind
            for token, kind in zip(self.tokens, types, strict=True)
        ]
        n_added = types.count(spm.CONTROL) + types.count(spm.USER_DEFINED)
        if n_added > MAX_ADDED:
            raise self.damaged(f"{n_added} tokens are special or added, more than {MAX_ADDED}")
        return types

    def token_id(self, name: str, default: int | None = None) -> int | None:
        """The id of a special token in the file, else `default` if the vocabulary has that id."""
        n_tokens = len(self.tokens)
        id: int | None = self.value(f"{name}_token_id", int, None)
        if id is None or id in NO_TOKEN_IDS:
            return default if default is not None and default < n_tokens else None
        if not 0 <= id < n_tokens:
            raise self.damaged(f"{name}_token_id is {id}, but there are {n_tokens} tokens")
        return id

    def eos_ids(self, default: int | None = None) -> frozenset[int]:
        ids = [self.token_id("eos", default), self.token_id("eot"), self.token_id("eom")]
        return frozenset(id for id in ids if id is not None)

    def names(self) -> dict[str, str]:
        """The texts of special tokens by their names in templates."""
        ids = {name: self.token_id(key) for name, key in _NAMES.items()}
        return {name: self.tokens[id] for name, id in ids.items() if id is not None}

    @property
    def is_phi3(self) -> bool:
        """Whether the model is a Phi-3 or Phi-4."""
        return bool(self._fields.get("general.architecture") == "phi3")

    def added(self) -> list[AddedToken]:
        """Tokens that SentencePiece does not match as the model's own tokenizer does.

        These are the user-defined tokens. In a Phi-3 file they include the special tokens, because
        a GGUF file cannot state that whitespace after such a token is not encoded.
        """
        strips = self.is_phi3
        kinds = (spm.CONTROL, spm.USER_DEFINED) if strips else (spm.USER_DEFINED,)
        return [
            AddedToken(id, token, kind == spm.CONTROL, strips and token not in _KEEP_WHITESPACE)
            for id, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if kind in kinds and token
        ]

    def damaged(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self.source}: damaged tokenizer: {why}")


def _byte_level_bpe(vocabulary: GGUFVocabulary) -> TokenizersTokenizer:
    tokens, types = vocabulary.tokens, vocabulary.types
    name = vocabulary.value("pre", str, "default")
    pre = PRE_TOKENIZERS.get(name)
    if pre is None:
        raise UsageError(
            f"{vocabulary.source}: tokenizer.ggml.pre={name[:80]!r} is not supported; use the "
            "model's HF folder, whose tokenizer.json defines how text is split"
            + did_you_mean(name, PRE_TOKENIZERS)
        )
    words = [token for token in tokens if token]  # some files have empty tokens
    if n_again := len(words) - len(set(words)):
        raise vocabulary.damaged(f"{n_again} tokens appear more than once")
    merges = _merges(vocabulary)
    strips = vocabulary.is_phi3 and _PHI4_TOKEN in tokens
    encoder = BuiltEncoder(lambda: _bpe(tokens, types, merges, pre, strips), vocabulary.source)
    bos_id = vocabulary.token_id("bos")
    return TokenizersTokenizer(
        encoder,
        vocabulary.source,
        bos_text=None if bos_id is None else tokens[bos_id],
        adds_bos=vocabulary.value("add_bos_token", bool, pre.adds_bos),
        eos_ids=vocabulary.eos_ids(),
    )


def _merges(vocabulary: GGUFVocabulary) -> list[tuple[str, str]]:
    texts = vocabulary.values("merges", str)
    if len(texts) > MAX_MERGES:
        raise vocabulary.damaged(f"there are {len(texts)} merges, more than {MAX_MERGES}")
    merges: list[tuple[str, str]] = []
    for number, merge in enumerate(texts):
        left, space, right = merge.partition(" ")
        if not (left and space and right):
            raise vocabulary.damaged(f"merge {number} is {merge[:40]!r}, not two tokens")
        merges.append((left, right))
    if not merges:
        raise vocabulary.damaged("there are no merges")
    return merges


def _bpe(
    tokens: list[str],
    types: list[int],
    merges: list[tuple[str, str]],
    pre: PreTokenizer,
    strips: bool,
) -> tokenizers.Tokenizer:
    """Builds a byte-level BPE tokenizer; `strips` drops whitespace beside special tokens."""
    ids = {token: id for id, token in enumerate(tokens) if token}
    tokenizer = tokenizers.Tokenizer(models.BPE(ids, merges, ignore_merges=pre.whole_words))
    if pre.composes:
        tokenizer.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(tokenizers.Regex(text), "isolated") for text in pre.patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(
        [
            tokenizers.AddedToken(
                token,
                lstrip=strips and kind == spm.CONTROL,
                rstrip=strips and kind == spm.CONTROL,
                normalized=False,
                special=kind == spm.CONTROL,
            )
            for token, kind in zip(tokens, types, strict=True)
            if kind in (spm.CONTROL, spm.USER_DEFINED) and token
        ]
    )
    return tokenizer


def _sentencepiece(vocabulary: GGUFVocabulary) -> SentencePieceTokenizer:
    bos_id = vocabulary.token_id("bos", default=1)
    # SentencePiece needs a text for an empty token; this way it still decodes to nothing.
    empty = [AddedToken(id, "", False) for id, text in enumerate(vocabulary.tokens) if not text]
    return SentencePieceTokenizer(
        _proto(vocabulary),
        vocabulary.source,
        bos_id=bos_id,
        adds_bos=vocabulary.value("add_bos_token", bool, True),
        eos_ids=vocabulary.eos_ids(default=2),
        added=vocabulary.added() + empty,
    )


def _proto(vocabulary: GGUFVocabulary) -> Any:
    """A SentencePiece ModelProto with the file's pieces, scores and settings."""
    tokens, types = vocabulary.tokens, vocabulary.types
    scores = vocabulary.values("scores", float, len(tokens))
    unk_id = vocabulary.token_id("unknown", default=0)
    proto = spm.SPM_PROTO.ModelProto()
    for id, (token, score, kind) in enumerate(zip(tokens, scores, types, strict=True)):
        # SentencePiece requires exactly one unknown piece, which some converters do not mark.
        is_unused = kind == spm.UNKNOWN or not token
        piece_type = spm.UNKNOWN if id == unk_id else spm.UNUSED if is_unused else kind
        proto.pieces.add(piece=token or f"[EMPTY_{id}]", score=score, type=piece_type)
    trainer, normalizer = proto.trainer_spec, proto.normalizer_spec
    trainer.model_type = spm.SPM_PROTO.TrainerSpec.BPE
    trainer.byte_fallback = spm.BYTE in types
    trainer.vocab_size = len(tokens)
    trainer.unk_id = unk_id
    normalizer.name = "identity"
    normalizer.add_dummy_prefix = vocabulary.value("add_space_prefix", bool, True)
    normalizer.remove_extra_whitespaces = vocabulary.value("remove_extra_whitespaces", bool, False)
    normalizer.escape_whitespaces = True
    normalizer.precompiled_charsmap = bytes(
        byte & 0xFF for byte in vocabulary.values("precompiled_charsmap", int)
    )
    return proto


def export_gguf_tokenizer(path: Path) -> dict[str, bytes]:
    """Contents of tokenizer.json (SentencePiece: tokenizer.model) and of tokenizer_config.json.

    Raises: UsageError for an unsupported type, CheckpointError for damaged fields.
    """
    fields = read_gguf_header(path).fields
    tokenizer = build_gguf_tokenizer(fields, str(path))
    vocabulary = GGUFVocabulary(fields, str(path))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": bool(tokenizer.encode("")),
        "clean_up_tokenization_spaces": False,
        **vocabulary.names(),
    }
    if isinstance(tokenizer, SentencePieceTokenizer):
        config |= _sentencepiece_config(vocabulary, tokenizer)
        files = {"tokenizer.model": tokenizer.to_model()}
    else:
        assert isinstance(tokenizer, TokenizersTokenizer)
        files = {"tokenizer.json": tokenizer.to_json().encode()}
    bos_text = config.get("bos_token") if config["add_bos_token"] else None
    named = {
        name: _with_bos(fields[key], bos_text)
        for name, key in TEMPLATE_FIELDS.items()
        if key in fields
    }
    if "default" in named:
        templates = [{"name": name, "template": text} for name, text in named.items()]
        config["chat_template"] = named["default"] if len(named) == 1 else templates
    return {**files, "tokenizer_config.json": json.dumps(config, indent=2).encode() + b"\n"}


def _with_bos(template: Any, bos_text: str | None) -> Any:
    """A chat template for a folder. There a chat begins with BOS only if its template writes it."""
    if not isinstance(template, str) or bos_text is None:
        return template
    writes_bos = "bos_token" in template or bos_text in template
    return template if writes_bos else "{{ bos_token }}" + template


def _sentencepiece_config(
    vocabulary: GGUFVocabulary, tokenizer: SentencePieceTokenizer
) -> dict[str, Any]:
    """What tokenizer.model does not contain: the texts of bos and eos, and added tokens."""
    tokens = vocabulary.tokens
    added = {
        str(token.id): {
            "content": token.text,
            "special": token.is_special,
            "rstrip": token.strips_right,
        }
        for token in vocabulary.added()
    }
    config: dict[str, Any] = {"tokenizer_class": "LlamaTokenizer", "legacy": False}
    if tokenizer.bos_id is not None:
        config["bos_token"] = tokens[tokenizer.bos_id]
    if (eos_id := vocabulary.token_id("eos", default=2)) is not None:
        config["eos_token"] = tokens[eos_id]
    if not vocabulary.value("add_space_prefix", bool, True):
        config["add_prefix_space"] = False  # transformers does not read this from tokenizer.model
    if added:
        config["added_tokens_decoder"] = added
    return config
