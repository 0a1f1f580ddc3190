"""Llama 3's tokenizer file: base64 tokens with their ranks, one per line."""

import base64
import binascii
import re
from collections.abc import Iterator

import tiktoken

from parallel_llama.errors import CheckpointError
from parallel_llama.tokenizer.tokenizer import SpecialTokens, Tokenizer, Vocabulary

N_RANKS = 128_000
N_SPECIAL = 256
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
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
            f"{source}: has {len(ranks)} ranks, not {N_RANKS} as Llama 3; for another model use "
            "its tokenizer.json, which contains its splitting pattern"
        )
    for byte in range(256):
        if bytes([byte]) not in ranks:  # tiktoken panics at a text with this byte
            raise CheckpointError(f"{source}: no token for the single byte {byte:#04x}")
    return ranks


class TiktokenTokenizer(Tokenizer):
    """Llama 3's tokenizer; the ids of its special tokens follow the ranks.

    Source: llama3/tokenizer.py in Meta's llama-models.
    """

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
            # The same kind of character on both sides: the previous run reached MAX_RUN.
            if start > cut and chunk[start - 1].isspace() == chunk[start].isspace():
                yield chunk[cut:start]
                cut = start
        yield chunk[cut:]
