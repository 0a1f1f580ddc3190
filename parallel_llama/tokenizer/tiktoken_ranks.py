"""Tokenizers of the tiktoken library: Llama 3's tokenizer.model and Mistral's tekken.json.

Llama 3's file has base64 tokens with their ranks, one per line. A tekken.json has byte-level tokens
by rank, after special tokens with the first ids.

Source: llama3/tokenizer.py in Meta's llama-models; tokens/tokenizers/tekken.py in Mistral's
mistral-common.
"""

import base64
import binascii
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import tiktoken

from parallel_llama.errors import CheckpointError, UsageError, shown
from parallel_llama.files.fields import json_object
from parallel_llama.tokenizer.pre_tokenizers import LLAMA3_PATTERN, PRE_TOKENIZERS
from parallel_llama.tokenizer.tokenizer import MAX_PIECES, SpecialTokens, Tokenizer, Vocabulary

N_RANKS = 128_000
N_SPECIAL = 256
_NAMED = (
    "<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>",
    "<|reserved_special_token_1|>", "<|finetune_right_pad_id|>", "<|step_id|>",
    "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>", "<|python_tag|>",
    "<|image|>",
)  # fmt: skip
# The pattern backtracks in quadratic time over a run of spaces or of other characters, so longer
# runs are split, at the same length as in Meta's tokenizer.
MAX_RUN = 25_000
_RUN = re.compile(rf"\s{{1,{MAX_RUN}}}|\S{{1,{MAX_RUN}}}")
MAX_CHUNK = 400_000  # characters per call of tiktoken, whose pattern fails on very long texts


def parse_ranks(data: bytes, source: str) -> dict[bytes, int]:
    """The tokens of the file with their ranks, which must be 0, 1, 2 and so on.

    Raises: CheckpointError if a line is damaged or the file is not Llama 3's.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise CheckpointError(
                f"{source}: line {number} is not a base64 token and its rank: {line[:40]!r}"
            ) from error
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise CheckpointError(f"{source}: the ranks are not 0 to {len(ranks) - 1}, each once")
    if len(ranks) != N_RANKS:
        raise CheckpointError(
            f"{source}: has {len(ranks)} ranks, not {N_RANKS} as in Llama 3; for another model use "
            "its tokenizer.json, which contains its splitting pattern"
        )
    for byte in range(256):
        if bytes([byte]) not in ranks:  # tiktoken panics at a text with this byte
            raise CheckpointError(f"{source}: no token for the single byte {byte:#04x}")
    return ranks


class TiktokenTokenizer(Tokenizer):
    """Llama 3's tokenizer; the ids of its special tokens follow the ranks."""

    def __init__(self, data: bytes, source: str) -> None:
        ranks = parse_ranks(data, source)
        reserved = (f"<|reserved_special_token_{n}|>" for n in range(2, N_SPECIAL))
        names = (*_NAMED, *reserved)[:N_SPECIAL]
        special_ids = {name: N_RANKS + index for index, name in enumerate(names)}
        try:
            self._encoding = tiktoken.Encoding(
                "llama3", pat_str=LLAMA3_PATTERN, mergeable_ranks=ranks, special_tokens=special_ids
            )
        except ValueError as error:
            raise CheckpointError(f"{source}: tiktoken cannot use the ranks: {error}") from error
        pieces = [*sorted(ranks, key=ranks.__getitem__), *(name.encode() for name in names)]
        bos_id = special_ids["<|begin_of_text|>"]
        ends = ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")
        eos_ids = frozenset(special_ids[name] for name in ends)
        super().__init__(Vocabulary(pieces, special_ids), bos_id, eos_ids, [bos_id])
        self._specials = SpecialTokens(special_ids)

    def _encoded(self, text: str, special: bool) -> list[int]:
        return self._specials.encode(text, self._ordinary) if special else self._ordinary(text)

    def _ordinary(self, text: str) -> list[int]:
        return [id for chunk in chunks(text) for id in self._encoding.encode_ordinary(chunk)]


def chunks(text: str) -> Iterator[str]:
    """Splits a text where a run of spaces, or of other characters, is too long."""
    for first in range(0, len(text), MAX_CHUNK):
        chunk = text[first : first + MAX_CHUNK]
        cut = 0
        for run in _RUN.finditer(chunk):
            start = run.start()
            # If the characters on both sides are of one kind, the previous run was cut at MAX_RUN.
            if start > cut and chunk[start - 1].isspace() == chunk[start].isspace():
                yield chunk[cut:start]
                cut = start
        yield chunk[cut:]


# Each JSON item follows one of these characters, and takes up to 250 bytes of memory. Files in use
# have 600,000 values.
_VALUE_STARTS = (b"{", b"[", b",")
MAX_VALUES = 1 << 20
MAX_SPECIAL = 1 << 12  # files in use have 1,000
MAX_TOKEN_BYTES = 1024  # files in use have up to 128
# The pattern backtracks over every space of a run, and tiktoken panics at a million spaces.
MAX_SPACES = 100_000

# The special tokens of files that omit them, as files up to version 7 may do.
_UNLISTED = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]",
    "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]",
    "[TOOL_CONTENT]",
)  # fmt: skip
_LAST_UNLISTED_VERSION = 7

_TOKEN_BYTES = re.compile(rb'"token_bytes"\s*:\s*"')  # a tokenizer.json has a number here
_SPACES = re.compile(r"\s{32,}")  # shorter runs need no check
_T = TypeVar("_T")


class Tekken(NamedTuple):
    """The contents of a tekken.json; `version` is the version of Mistral's chat format."""

    tokens: list[bytes]
    specials: list[str]
    version: int


def is_tekken(data: bytes) -> bool:
    """Whether a JSON text is a tekken.json, rather than a tokenizer.json of `tokenizers`."""
    return _TOKEN_BYTES.search(data) is not None


def parse_tekken(data: bytes, source: str) -> Tekken:
    """The contents of a tekken.json, with the vocabulary truncated to the size in its config.

    Raises: CheckpointError if the file is damaged; UsageError if its pattern is not Mistral's.
    """
    n_values = sum(map(data.count, _VALUE_STARTS))
    if n_values > MAX_VALUES:
        raise CheckpointError(
            f"{source}: has about {n_values} values, over the limit of {MAX_VALUES}"
        )
    file = json_object(Path(source), data)
    config = _field(file, "config", dict, source)
    if (pattern := _field(config, "pattern", str, source)) != PRE_TOKENIZERS["tekken"].patterns[0]:
        raise UsageError(
            f"{source}: its pattern is {shown(pattern)}, not Mistral's; other patterns are "
            "supported only in a tokenizer.json"
        )
    version = re.fullmatch("v([0-9]{1,4})", _field(config, "version", str, source))
    if version is None:
        raise _damaged(source, f"version is {shown(config['version'])}, not of the form v1")
    n_special = _field(config, "default_num_special_tokens", int, source)
    vocab_size = _field(config, "default_vocab_size", int, source)
    if not 0 < n_special <= MAX_SPECIAL or not n_special + 256 <= vocab_size <= MAX_PIECES:
        raise _damaged(
            source,
            f"{n_special} of {vocab_size} tokens are special; there must be 1 to {MAX_SPECIAL}, at "
            f"least 256 others, and at most {MAX_PIECES} in total",
        )
    specials = _specials(file, int(version[1]), n_special, source)
    return Tekken(_tokens(file, vocab_size - n_special, source), specials, int(version[1]))


def _specials(file: dict[str, Any], version: int, n_special: int, source: str) -> list[str]:
    texts: list[str] = []
    if file.get("special_tokens") is None and version <= _LAST_UNLISTED_VERSION:
        texts += _UNLISTED
    else:
        for id, token in enumerate(_field(file, "special_tokens", list, source)):
            text = _field(token, "token_str", str, source)
            if token.get("rank") != id or not 0 < len(text) <= MAX_TOKEN_BYTES or _is_broken(text):
                raise _damaged(source, f"special token {id} is {shown(token)}")
            texts.append(text)
    texts += [f"<SPECIAL_{id}>" for id in range(len(texts), n_special)]
    if len(texts) > n_special or len(set(texts)) < n_special or not {"<s>", "</s>"} <= {*texts}:
        needed = f"{n_special} distinct special tokens with <s> and </s>"
        raise _damaged(source, f"there must be {needed}")
    return texts


def _tokens(file: dict[str, Any], n_tokens: int, source: str) -> list[bytes]:
    vocab = _field(file, "vocab", list, source)
    if len(vocab) < n_tokens:
        raise _damaged(source, f"there are {len(vocab)} tokens, fewer than {n_tokens}")
    tokens: list[bytes] = []
    for rank, token in enumerate(vocab[:n_tokens]):
        text = _field(token, "token_bytes", str, source)
        try:
            tokens.append(base64.b64decode(text, validate=True))
        except (ValueError, binascii.Error) as error:
            raise _damaged(source, f"token {rank} is {shown(token)}, not base64") from error
        if token.get("rank") != rank or not 0 < len(tokens[rank]) <= MAX_TOKEN_BYTES:
            raise _damaged(source, f"token {rank} is {shown(token)}")
    # tiktoken panics at a text with a byte that has no token.
    if tokens[:256] != [bytes([byte]) for byte in range(256)] or len(set(tokens)) < n_tokens:
        raise _damaged(
            source, "the tokens must begin with the 256 bytes, and contain no token twice"
        )
    return tokens


def _is_broken(text: str) -> bool:
    """Whether a text contains an unpaired surrogate."""
    return any("\ud800" <= character <= "\udfff" for character in text)


def _field(value: Any, name: str, kind: type[_T], source: str) -> _T:
    field = value.get(name) if isinstance(value, dict) else None
    if type(field) is not kind:
        raise _damaged(source, f"{name} is {shown(field)}, not of type {kind.__name__}")
    return field


def _damaged(source: str, why: str) -> CheckpointError:
    return CheckpointError(f"{source}: damaged tokenizer: {why}")


class TekkenTokenizer(Tokenizer):
    """The tokenizer of a tekken.json; `version` is the version of Mistral's chat format.

    Runs of more than MAX_SPACES spaces are split.

    Raises: like `parse_tekken`.
    """

    def __init__(self, data: bytes, source: str) -> None:
        tokens, specials, self.version = parse_tekken(data, source)
        special_ids = {text: id for id, text in enumerate(specials)}
        self._n_special = len(specials)
        self._encoding = tiktoken.Encoding(
            "tekken",
            pat_str=PRE_TOKENIZERS["tekken"].patterns[0],
            mergeable_ranks={token: rank for rank, token in enumerate(tokens)},
            special_tokens={},
        )
        pieces = [*(text.encode() for text in specials), *tokens]
        bos_id, eos_id = special_ids["<s>"], special_ids["</s>"]
        super().__init__(Vocabulary(pieces, special_ids), bos_id, frozenset([eos_id]), [bos_id])
        self._specials = SpecialTokens(special_ids)

    def _encoded(self, text: str, special: bool) -> list[int]:
        return self._specials.encode(text, self._ordinary) if special else self._ordinary(text)

    def _ordinary(self, text: str) -> list[int]:
        ranks = (rank for part in _parts(text) for rank in self._encoding.encode_ordinary(part))
        return [self._n_special + rank for rank in ranks]


def _parts(text: str) -> Iterator[str]:
    """Splits a text after every MAX_SPACES spaces of a run."""
    start = 0
    for run in _SPACES.finditer(text):
        for end in range(run.start() + MAX_SPACES, run.end(), MAX_SPACES):
            yield text[start:end]
            start = end
    yield text[start:]
