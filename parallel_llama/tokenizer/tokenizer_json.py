"""Tokenizers of the `tokenizers` library: HF's tokenizer.json, and BPE rebuilt from GGUF files."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import tokenizers
from tokenizers import processors

from parallel_llama.errors import CheckpointError
from parallel_llama.tokenizer.bounded_files import MAX_PIECES
from parallel_llama.tokenizer.byte_level import spelled_bytes
from parallel_llama.tokenizer.vocabulary import Vocabulary, require_unicode

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_Spelling = Callable[[str], bytes]


def parse_tokenizer_json(data: bytes, source: str) -> tokenizers.Tokenizer:
    """The tokenizer in a tokenizer.json.

    Raises: CheckpointError if `tokenizers` cannot read it.
    """
    return build_guarded(lambda: tokenizers.Tokenizer.from_buffer(data), source)


def build_guarded(build: Callable[[], tokenizers.Tokenizer], source: str) -> tokenizers.Tokenizer:
    try:
        return build()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # damaged files also end in a Rust panic, a BaseException
        reason = str(error)[:300]
        raise CheckpointError(f"{source}: `tokenizers` cannot use it: {reason}") from error


class TokenizersTokenizer:
    """A tokenizer that the `tokenizers` library runs; its decoder is read and done here.

    The prefix (the bos token, mostly) is what the post-processor puts in front, unless `adds_bos`
    says otherwise. Truncation and padding that a file may ask for are turned off.

    Raises: CheckpointError if the decoder is of a kind that is not known.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        source: str,
        *,
        bos_text: str | None,
        adds_bos: bool | None,
        eos_ids: frozenset[int],
    ) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.vocabulary = _vocabulary(tokenizer, source)
        self.eos_ids = eos_ids
        prefix = _prefix_of(tokenizer, source)
        self.bos_id = tokenizer.token_to_id(bos_text) if bos_text else None
        if self.bos_id is None and len(prefix) == 1:
            self.bos_id = prefix[0]
        if adds_bos is not None:
            prefix = [self.bos_id] if adds_bos and self.bos_id is not None else []
        self._prefix = prefix

    @property
    def vocab_size(self) -> int:
        return len(self.vocabulary.pieces)

    @cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        """A copy that reads special tokens as text: a switch of the whole object, so not the same
        object, which other threads may be using."""
        plain = tokenizers.Tokenizer.from_str(self._tokenizer.to_str())
        plain.encode_special_tokens = True
        return plain

    def encode(self, text: str, *, bos: bool = True, special: bool = True) -> list[int]:
        require_unicode(text)
        tokenizer = self._tokenizer if special else self._plain
        prefix = self._prefix if bos else []
        return [*prefix, *tokenizer.encode(text, add_special_tokens=False).ids]

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return self.vocabulary.decode(ids, skip_special=skip_special)

    def to_json(self) -> str:
        """The content of a tokenizer.json, whose post-processor puts the prefix in front."""
        whole = tokenizers.Tokenizer.from_str(self._tokenizer.to_str())
        if self._prefix:
            tokens = [(whole.id_to_token(id), id) for id in self._prefix]
            texts = [text for text, _ in tokens]
            whole.post_processor = processors.TemplateProcessing(
                single=[*texts, "$A"], pair=[*texts, "$A", *texts, "$B"], special_tokens=tokens
            )
        return str(whole.to_str(pretty=True))


def _prefix_of(tokenizer: tokenizers.Tokenizer, source: str) -> list[int]:
    """The ids that the post-processor puts before a text; those behind it are left out."""
    prefix: list[int] = []

    def encode() -> tokenizers.Tokenizer:
        encoding = tokenizer.encode("a")
        first = encoding.sequence_ids.index(0) if 0 in encoding.sequence_ids else 0
        prefix.extend(encoding.ids[:first])
        return tokenizer

    build_guarded(encode, source)
    return prefix


def _vocabulary(tokenizer: tokenizers.Tokenizer, source: str) -> Vocabulary:
    tokens = tokenizer.get_vocab(with_added_tokens=True)
    size = max(tokens.values(), default=-1) + 1
    if not 0 < size <= MAX_PIECES:
        raise CheckpointError(f"{source}: has {size} token ids, allowed 1 to {MAX_PIECES}")
    spell, spell_first = _decoder(tokenizer, source)
    pieces = [b""] * size
    openings: dict[int, bytes] = {}
    for token, id in tokens.items():
        pieces[id] = spell(token)
        if spell_first is not spell and (first := spell_first(token)) != pieces[id]:
            openings[id] = first
    special_ids: dict[str, int] = {}
    for id, added in tokenizer.get_added_tokens_decoder().items():
        if spell is spelled_bytes:  # added tokens are written as text, not as byte-level characters
            pieces[id] = added.content.encode()
        if added.special:
            special_ids[added.content] = id
    return Vocabulary(pieces, special_ids, openings)


def _decoder(tokenizer: tokenizers.Tokenizer, source: str) -> tuple[_Spelling, _Spelling]:
    """How a token spells inside a text, and how it does where it begins one.

    Only decoders that work token by token are known; that covers byte-level BPE and all of the
    SentencePiece kind.
    """
    described = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder else None
    if described and described["type"] == "ByteLevel":
        return spelled_bytes, spelled_bytes
    replaced: list[tuple[str, str]] = []
    replaced_first: list[tuple[str, str]] = []
    has_bytes = strips = False
    for step in _steps(described):
        match step:
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                replaced.append((old, new))
                replaced_first.append((old, new))
            case {"type": "Metaspace", "replacement": str(old), "prepend_scheme": scheme}:
                replaced.append((old, " "))
                replaced_first.append((old, " " if scheme == "never" else ""))
            case {"type": "Strip", "content": " ", "start": 1, "stop": 0}:
                strips = True
            case {"type": "ByteFallback"}:
                has_bytes = True
            case {"type": "Fuse"}:
                pass
            case _:
                raise CheckpointError(
                    f"{source}: unknown decoder {json.dumps(step)[:100]}; known are ByteLevel, and "
                    "sequences of Replace, Metaspace, ByteFallback, Fuse and Strip of one space"
                )

    def spell(token: str) -> bytes:
        return _spelled(token, replaced, has_bytes)

    def spell_first(token: str) -> bytes:
        spelled = _spelled(token, replaced_first, has_bytes)
        return spelled[1:] if strips and spelled[:1] == b" " else spelled

    return spell, spell_first


def _spelled(token: str, replaced: Sequence[tuple[str, str]], has_bytes: bool) -> bytes:
    for old, new in replaced:
        token = token.replace(old, new)
    match = _BYTE_TOKEN.fullmatch(token) if has_bytes else None
    return bytes([int(match.group(1), 16)]) if match else token.encode()


def _steps(decoder: Any) -> Iterator[Any]:
    if isinstance(decoder, dict) and decoder.get("type") == "Sequence":
        for step in decoder["decoders"]:
            yield from _steps(step)
    else:
        yield decoder
