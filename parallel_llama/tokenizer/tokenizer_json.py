"""Tokenizers of the `tokenizers` library: HF's tokenizer.json, and BPE rebuilt from GGUF files.

A tokenizer.json is untrusted: a file of 5 kB can take gigabytes or hours, or make the library
panic. So the library runs in a separate process, which returns only plain data.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from typing import Any, TypeVar

import tokenizers
from tokenizers import processors

from parallel_llama.errors import CheckpointError
from parallel_llama.tokenizer.bounded_process import BoundedProcess, JobRequest, Stopped
from parallel_llama.tokenizer.sandbox_tokenizers import Library
from parallel_llama.tokenizer.tokenizer import MAX_PIECES, Tokenizer, Vocabulary

# Loading a file in use takes 0.05 us of CPU time and 17 bytes of memory per byte of the file.
# Encoding a text takes 2 us and 450 bytes per character.
LOAD_CPU_S_PER_BYTE = 0.25e-6
ENCODE_CPU_S_PER_BYTE = 20e-6
CPU_S = 1.5
MAX_EXTRA_BYTES = 512 << 20
MAX_EXTRA_PER_BYTE = 20

MAX_DECODER_STEPS = 16
_N_TRIED = 8  # special tokens to try as the `_anchor`

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_Spelling = Callable[[str], bytes]
_T = TypeVar("_T")

# GPT-2's characters for bytes: printable bytes stand for themselves, the others are U+0100 and up.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_BYTES = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(256 + index): byte for index, byte in enumerate(_OTHERS)
}


@dataclass(frozen=True)
class Contents:
    """The contents of a tokenizer.

    Args:
        ids: of all tokens.
        added: ids and texts of added tokens, and whether they are special.
        prefix: ids that the post-processor puts before a text.
    """

    ids: dict[str, int]
    added: Sequence[tuple[int, str, bool]]
    decoder: Any
    prefix: list[int]


LARGE_TEXT_BYTES = 64 << 10  # a text of this size takes tens of milliseconds to encode


class BuiltEncoder:
    """Runs a tokenizer that was built in this process, with our own patterns. Thread-safe.

    Raises: CheckpointError, from all methods, if `tokenizers` fails.
    """

    def __init__(self, build: Callable[[], tokenizers.Tokenizer], source: str) -> None:
        self._build, self._source = build, source
        self._library = _guarded(lambda: Library(build()), source)
        self.contents = Contents(**_guarded(self._library.contents, source))

    def encode(self, text: str, special: bool) -> list[int]:
        return _guarded(lambda: self._of(special).encode(text, special), self._source)

    def _of(self, special: bool) -> Library:
        """The tokenizer for this value of `special`, a setting that all threads share."""
        return self._library if special else self._literal

    @cached_property
    def _literal(self) -> Library:
        return Library(self._build())

    def to_json(self, prefix: Sequence[int]) -> str:
        """The contents of a tokenizer.json with a post-processor that adds this prefix."""
        return _guarded(lambda: _to_json(self._library.tokenizer, prefix), self._source)


class FileEncoder:
    """Runs the tokenizer of a tokenizer.json in a separate process.

    Large texts are encoded in a second process, one at a time, so that short texts do not wait.

    Raises: CheckpointError like `BuiltEncoder`, or if the process exceeds its limits.
    """

    def __init__(self, data: bytes, source: str) -> None:
        self._source = source
        self._limit_bytes = MAX_EXTRA_BYTES + MAX_EXTRA_PER_BYTE * len(data)
        self._load = JobRequest(CPU_S, LOAD_CPU_S_PER_BYTE, data=data)
        self._small = BoundedProcess("sandbox_tokenizers", self._limit_bytes)
        self.contents = Contents(**self._answer(self._small.open, self._load))

    def encode(self, text: str, special: bool) -> list[int]:
        data = text.encode()
        process = self._large if len(data) > LARGE_TEXT_BYTES else self._small
        request = JobRequest(CPU_S, ENCODE_CPU_S_PER_BYTE, {"special": special}, data)
        ids: list[int] = self._answer(process.ask, request)["ids"]
        return ids

    def close(self) -> None:
        """Ends the processes; the next call starts them again."""
        self._small.close()
        if "_large" in vars(self):
            self._large.close()

    @cached_property
    def _large(self) -> BoundedProcess:
        process = BoundedProcess("sandbox_tokenizers", self._limit_bytes)
        self._answer(process.open, self._load)
        return process

    def _answer(
        self, ask: Callable[[JobRequest], dict[str, Any]], request: JobRequest
    ) -> dict[str, Any]:
        try:
            answer = ask(request)
        except Stopped as error:
            raise CheckpointError(f"{self._source}: the tokenizer was stopped: {error}") from error
        if "failure" in answer:
            raise _unusable(self._source, answer["failure"])
        return answer


def _guarded(work: Callable[[], _T], source: str) -> _T:
    try:
        return work()
    except (KeyboardInterrupt, SystemExit, TimeoutError):  # of a signal handler
        raise
    except BaseException as error:  # a damaged tokenizer may raise a Rust panic, a BaseException
        raise _unusable(source, str(error)[:300]) from error


def _unusable(source: str, reason: str) -> CheckpointError:
    return CheckpointError(f"{source}: the library `tokenizers` cannot use it: {reason}")


def _to_json(tokenizer: tokenizers.Tokenizer, prefix: Sequence[int]) -> str:
    copy = tokenizers.Tokenizer.from_str(tokenizer.to_str())
    if prefix:
        tokens = [(copy.id_to_token(id), id) for id in prefix]
        texts = [text for text, _ in tokens]
        copy.post_processor = processors.TemplateProcessing(
            single=[*texts, "$A"], pair=[*texts, "$A", *texts, "$B"], special_tokens=tokens
        )
    return str(copy.to_str(pretty=True))


class TokenizersTokenizer(Tokenizer):
    """A tokenizer of the `tokenizers` library; decoding is implemented here.

    Args:
        adds_bos: whether the prefix is the bos token; None for the post-processor's prefix.

    Raises: CheckpointError if the decoder is not supported.
    """

    def __init__(
        self,
        encoder: BuiltEncoder | FileEncoder,
        source: str,
        *,
        bos_text: str | None,
        adds_bos: bool | None,
        eos_ids: frozenset[int],
    ) -> None:
        self._encoder = encoder
        contents = encoder.contents
        prefix = contents.prefix
        bos_id = contents.ids.get(bos_text) if bos_text else None
        if bos_id is None and len(prefix) == 1:
            bos_id = prefix[0]
        if adds_bos is not None:
            prefix = [bos_id] if adds_bos and bos_id is not None else []
        super().__init__(_vocabulary(contents, source), bos_id, eos_ids, prefix)

    def close(self) -> None:
        if isinstance(self._encoder, FileEncoder):
            self._encoder.close()

    def _encoded(self, text: str, special: bool) -> list[int]:
        return self._encoder.encode(text, special)

    def _continued(self, text: str, special: bool) -> list[int]:
        if not special and any(each in text for each in self.vocabulary.special_ids):
            # With the anchor, these would be parsed too, so the text follows ordinary text.
            before, ids = (self._encoded("\n" + each, special) for each in ("", text))
            n_before = len(before)
            return ids[n_before:] if ids[:n_before] == before else self._encoded(text, special)
        ids = self._encoded(self._anchor + text, special=True)
        return ids[1:] if self._anchor else ids

    @cached_property
    def _anchor(self) -> str:
        """A special token after which text gets no leading space; "" if no such token is found."""
        vocabulary = self.vocabulary
        for text, id in sorted(vocabulary.special_ids.items(), key=lambda pair: pair[1])[:_N_TRIED]:
            first, *others = self._encoded(f"{text} a", special=True)
            if first == id and b"".join(map(vocabulary.piece, others)) == b" a":
                return text
        return ""

    def to_json(self) -> str:
        """The contents of a tokenizer.json, for a tokenizer that was built in this process."""
        assert isinstance(self._encoder, BuiltEncoder)
        return self._encoder.to_json(self._prefix)


def _vocabulary(contents: Contents, source: str) -> Vocabulary:
    size = max(contents.ids.values(), default=-1) + 1
    if not 0 < size <= MAX_PIECES:
        raise CheckpointError(f"{source}: has {size} token ids, not 1 to {MAX_PIECES}")
    spell, spell_first = _decoder(contents.decoder, source)
    pieces = [b""] * size
    openings: dict[int, bytes] = {}
    for token, id in contents.ids.items():
        pieces[id] = spell(token)
        if spell_first is not spell and (first := spell_first(token)) != pieces[id]:
            openings[id] = first
    special_ids: dict[str, int] = {}
    for id, text, is_special in contents.added:
        if spell is spelled_bytes:  # added tokens are written as text, not as byte-level characters
            pieces[id] = text.encode()
        if is_special:
            special_ids[text] = id
    units = frozenset(text for _, text, is_special in contents.added if not is_special)
    return Vocabulary(pieces, special_ids, openings, units)


def _decoder(description: Any, source: str) -> tuple[_Spelling, _Spelling]:
    """Functions for the bytes of a token inside a text, and of a token at its start.

    Supports decoders of a few steps that work token by token and make no token longer: those of
    byte-level BPE and of SentencePiece.
    """
    if description and description["type"] == "ByteLevel":
        return spelled_bytes, spelled_bytes
    replaced: list[tuple[str, str, str]] = []  # old, new inside a text, new at its start
    has_bytes = strips = False
    steps = list(islice(_steps(description), MAX_DECODER_STEPS + 1))
    if len(steps) > MAX_DECODER_STEPS:
        raise CheckpointError(f"{source}: the decoder has more than {MAX_DECODER_STEPS} steps")
    for step in steps:
        match step:
            case {
                "type": "Replace",
                "pattern": {"String": str(old)},
                "content": str(new),
            } if len(new) <= len(old):
                replaced.append((old, new, new))
            case {"type": "Metaspace", "replacement": str(old), "prepend_scheme": scheme}:
                replaced.append((old, " ", " " if scheme == "never" else ""))
            case {"type": "Strip", "content": " ", "start": 1, "stop": 0}:
                strips = True
            case {"type": "ByteFallback"}:
                has_bytes = True
            case {"type": "Fuse"}:
                pass
            case _:
                raise CheckpointError(
                    f"{source}: unsupported decoder {json.dumps(step)[:100]}; supported are "
                    "ByteLevel, and sequences of Replace by an equal or shorter text, Metaspace, "
                    "ByteFallback, Fuse and Strip of one space"
                )

    def spell(token: str, begins: bool = False) -> bytes:
        for old, inside, first in replaced:
            token = token.replace(old, first if begins else inside)
        match = _BYTE_TOKEN.fullmatch(token) if has_bytes else None
        spelled = bytes([int(match[1], 16)]) if match else token.encode()
        return spelled[1:] if begins and strips and spelled[:1] == b" " else spelled

    return spell, partial(spell, begins=True)


def spelled_bytes(token: str) -> bytes:
    """The bytes of a token of byte-level BPE, which is written with a character per byte.

    A token with any other character is ordinary text, as in `tokenizers`.

    >>> spelled_bytes("\\u0120hi"), spelled_bytes("a b")
    (b' hi', b'a b')
    """
    try:
        return bytes([_BYTES[character] for character in token])
    except KeyError:
        return token.encode()


def _steps(decoder: Any) -> Iterator[Any]:
    if isinstance(decoder, dict) and decoder.get("type") == "Sequence":
        for step in decoder["decoders"]:
            yield from _steps(step)
    else:
        yield decoder
