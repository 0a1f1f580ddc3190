"""The tokenizer inside a GGUF file, rebuilt for the library that runs its kind.

Source: the keys under tokenizer.ggml in ggml's docs/gguf.md.
"""

from collections.abc import Sequence
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from parallel_llama.errors import CheckpointError, UsageError
from parallel_llama.fields import did_you_mean
from parallel_llama.tokenizer import spm
from parallel_llama.tokenizer.bounded_files import MAX_PIECES
from parallel_llama.tokenizer.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from parallel_llama.tokenizer.spm import AddedToken, SentencePieceTokenizer
from parallel_llama.tokenizer.tokenizer_json import TokenizersTokenizer, build_guarded
from parallel_llama.tokenizer.vocabulary import Tokenizer

MAX_MERGES = 4 * MAX_PIECES
MAX_ADDED = 1 << 18  # speech models have some 30,000; a library takes seconds for this many


def build_gguf_tokenizer(fields: dict[str, Any], source: str) -> Tokenizer:
    """The tokenizer that a GGUF header's fields describe.

    Raises: UsageError for a kind that cannot be run, CheckpointError for damaged fields.
    """
    vocabulary = GGUFVocabulary(fields, source)
    kind = vocabulary.value("model", str, None)
    if kind == "gpt2":
        return _byte_level_bpe(vocabulary)
    if kind == "llama":
        return _sentencepiece(vocabulary)
    if kind is None:
        raise UsageError(f"{source}: holds no tokenizer (no field tokenizer.ggml.model)")
    raise UsageError(f"{source}: has a {kind[:80]!r} tokenizer; those that can be run: gpt2, llama")


class GGUFVocabulary:
    """The fields under tokenizer.ggml, each checked for its type where it is read."""

    def __init__(self, fields: dict[str, Any], source: str) -> None:
        self._fields = fields
        self.source = source

    def value(self, name: str, kind: type, default: Any) -> Any:
        value = self._fields.get(f"tokenizer.ggml.{name}", default)
        if value is not default and type(value) is not kind:
            raise self.damaged(f"{name} is a {type(value).__name__}, not a {kind.__name__}")
        return value

    def values(self, name: str, kind: type, length: int | None = None) -> list[Any]:
        """A list whose items are all of one type, and of this length if one is given."""
        values: list[Any] = self.value(name, list, [])
        if any(type(value) is not kind for value in values):
            raise self.damaged(f"{name} is not a list of {kind.__name__} alone")
        if length is not None and len(values) != length:
            raise self.damaged(f"{name} has {len(values)} items and there are {length} tokens")
        return values

    def tokens(self) -> list[str]:
        tokens: list[str] = self.values("tokens", str)
        if not 0 < len(tokens) <= MAX_PIECES:
            raise self.damaged(f"there are {len(tokens)} tokens, allowed 1 to {MAX_PIECES}")
        return tokens

    def types(self, n_tokens: int) -> list[int]:
        """The type of each token; all are normal where the file does not say."""
        if "tokenizer.ggml.token_type" not in self._fields:
            return [spm.NORMAL] * n_tokens
        types: list[int] = self.values("token_type", int, n_tokens)
        for id, kind in enumerate(types):
            if not spm.NORMAL <= kind <= spm.BYTE:
                raise self.damaged(f"token {id} has type {kind}, allowed 1 to 6")
        n_added = types.count(spm.CONTROL) + types.count(spm.USER_DEFINED)
        if n_added > MAX_ADDED:
            raise self.damaged(f"{n_added} tokens are special or added, at most {MAX_ADDED}")
        return types

    def token_id(self, name: str, n_tokens: int, default: int | None = None) -> int | None:
        id: int | None = self.value(f"{name}_token_id", int, default)
        if id is not None and not 0 <= id < n_tokens:
            raise self.damaged(f"{name}_token_id is {id} and there are {n_tokens} tokens")
        return id

    def eos_ids(self, n_tokens: int, default: int | None = None) -> frozenset[int]:
        ids = [self.token_id("eos", n_tokens, default)]
        ids += [self.token_id(name, n_tokens) for name in ("eot", "eom")]
        return frozenset(id for id in ids if id is not None)

    def damaged(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self.source}: damaged tokenizer: {why}")


def _byte_level_bpe(vocabulary: GGUFVocabulary) -> TokenizersTokenizer:
    tokens = vocabulary.tokens()
    types = vocabulary.types(len(tokens))
    name = vocabulary.value("pre", str, "default")
    pre = PRE_TOKENIZERS.get(name)
    if pre is None:
        raise UsageError(
            f"{vocabulary.source}: tokenizer.ggml.pre={name[:80]!r} is not known, and the file "
            "does not say how it cuts text; give the model's HF folder, whose tokenizer.json does"
            + did_you_mean(name, PRE_TOKENIZERS)
        )
    ids = {token: id for id, token in enumerate(tokens) if token}  # some files have empty rows
    if n_again := len(tokens) - tokens.count("") - len(ids):
        raise vocabulary.damaged(f"{n_again} tokens appear more than once")
    merges = _merges(vocabulary)
    tokenizer = build_guarded(
        lambda: _bpe(ids, merges, pre, _added_tokens(tokens, types)), vocabulary.source
    )
    bos_id = vocabulary.token_id("bos", len(tokens))
    return TokenizersTokenizer(
        tokenizer,
        vocabulary.source,
        bos_text=None if bos_id is None else tokens[bos_id],
        adds_bos=vocabulary.value("add_bos_token", bool, pre.adds_bos),
        eos_ids=vocabulary.eos_ids(len(tokens)),
    )


def _merges(vocabulary: GGUFVocabulary) -> list[tuple[str, str]]:
    texts = vocabulary.values("merges", str)
    if len(texts) > MAX_MERGES:
        raise vocabulary.damaged(f"there are {len(texts)} merges, at most {MAX_MERGES} are read")
    merges: list[tuple[str, str]] = []
    for number, merge in enumerate(texts):
        left, space, right = merge.partition(" ")
        if not (left and space and right):
            raise vocabulary.damaged(f"merge {number} is {merge[:40]!r}, not two tokens")
        merges.append((left, right))
    if not merges:
        raise vocabulary.damaged("there are no merges")
    return merges


def _added_tokens(tokens: Sequence[str], types: Sequence[int]) -> list[tokenizers.AddedToken]:
    return [
        tokenizers.AddedToken(token, special=kind == spm.CONTROL, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (spm.CONTROL, spm.USER_DEFINED) and token
    ]


def _bpe(
    ids: dict[str, int],
    merges: list[tuple[str, str]],
    pre: PreTokenizer,
    added: list[tokenizers.AddedToken],
) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE(ids, merges, ignore_merges=pre.whole_words))
    cuts = [pre_tokenizers.Split(tokenizers.Regex(text), "isolated") for text in pre.patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(added)
    return tokenizer


def _sentencepiece(vocabulary: GGUFVocabulary) -> SentencePieceTokenizer:
    tokens = vocabulary.tokens()
    types = vocabulary.types(len(tokens))
    bos_id = vocabulary.token_id("bos", len(tokens), default=1 if len(tokens) > 1 else None)
    added = [
        AddedToken(id, token, is_special=False)
        for id, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind == spm.USER_DEFINED
    ]
    return SentencePieceTokenizer(
        _proto(vocabulary, tokens, types),
        vocabulary.source,
        bos_id=bos_id,
        adds_bos=vocabulary.value("add_bos_token", bool, True),
        eos_ids=vocabulary.eos_ids(len(tokens), default=2 if len(tokens) > 2 else None),
        added=added,
    )


def _proto(vocabulary: GGUFVocabulary, tokens: list[str], types: list[int]) -> Any:
    """A SentencePiece model with the file's pieces, scores and settings."""
    scores = vocabulary.values("scores", float, len(tokens))
    unk_id = vocabulary.token_id("unknown", len(tokens), default=0)
    proto = spm.SPM_PROTO.ModelProto()
    for id, (token, score, kind) in enumerate(zip(tokens, scores, types, strict=True)):
        # SentencePiece wants exactly one unknown piece, which not every converter has marked.
        marked = spm.UNKNOWN if id == unk_id else spm.UNUSED if kind == spm.UNKNOWN else kind
        proto.pieces.add(piece=token, score=score, type=marked)
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
