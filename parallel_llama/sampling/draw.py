"""`SamplingRow`, a token to sample, and the logits processors that are applied before sampling.

`adjust` applies biases, masks and penalties. Every rank knows the tokens of all sequences, so each
rank adjusts the logits of its own shard of the vocabulary without communication.
"""

import hashlib
import struct
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from parallel_llama.errors import NumericalError
from parallel_llama.ops import SamplingKeys
from parallel_llama.ops.filters import Filters
from parallel_llama.request import SamplingParams, TokenLogprob


class History:
    """The distinct tokens of a sequence and how often each was sampled, for penalties.

    Appending takes amortised constant time, and `counts` linear time in the distinct tokens.
    """

    def __init__(self, prompt: Iterable[int]) -> None:
        self._index = {token: index for index, token in enumerate(dict.fromkeys(prompt))}
        self._tokens = np.array(list(self._index), dtype=np.int64)
        self._n_drawn: npt.NDArray[np.float64] = np.zeros(len(self._index))

    def append(self, token: int) -> None:
        """Count one more sampled token."""
        index = self._index.setdefault(token, len(self._index))
        if index == len(self._tokens):
            capacity = 2 * index + 16
            self._tokens = np.resize(self._tokens, capacity)
            self._n_drawn = np.concatenate([self._n_drawn, np.zeros(capacity - index)])
        self._tokens[index] = token
        self._n_drawn[index] += 1

    def counts(self, drafts: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
        """The distinct tokens and how often each was sampled, with the drafts counted as sampled.

        Returns: [n] int64 and [n] float64, valid until the next append.
        """
        n = len(self._index)
        tokens, n_drawn = self._tokens[:n], self._n_drawn[:n]
        if drafts:
            new = [token for token in dict.fromkeys(drafts) if token not in self._index]
            tokens = np.concatenate([tokens, np.array(new, dtype=np.int64)])
            n_drawn = np.concatenate([n_drawn, np.zeros(len(new))])
            new_index = {token: n + number for number, token in enumerate(new)}
            for token in drafts:
                n_drawn[self._index[token] if token in self._index else new_index[token]] += 1
        return torch.from_numpy(tokens), torch.from_numpy(n_drawn)


@dataclass(frozen=True)
class SamplingRow:
    """One token to sample.

    Args:
        params: The sampling parameters of its request.
        seed: The seed of the request.
        choice: The number of the completion within the request, from 0.
        position: The position of the token in its sequence.
        request: The number of the request, for errors.
        history: The tokens of the sequence; needed for penalties.
        drafts: The draft tokens between the history and this token.
        banned: Ids that cannot be sampled.
        mask: A bit for each token of the whole vocabulary, set if the token is allowed: bit t % 8
            of byte t // 8 for token t. Tokens beyond the end of the mask are not allowed. None
            allows all tokens.
    """

    params: SamplingParams
    seed: int
    choice: int
    position: int
    request: int | None = None
    history: History | None = None
    drafts: tuple[int, ...] = ()
    banned: frozenset[int] = frozenset()
    mask: bytes | None = None

    @property
    def is_adjusted(self) -> bool:
        """Whether the model's logits are changed before the token is sampled."""
        params = self.params
        changed = params.has_penalties or bool(params.logit_bias)
        return changed or bool(self.banned) or self.mask is not None

    @property
    def takes_best(self) -> bool:
        """Whether the token is the argmax of the model's logits, with or without noise."""
        return not self.params.is_filtered and not self.is_adjusted

    def __str__(self) -> str:
        owner = "a request" if self.request is None else f"request {self.request}"
        return f"{owner}, token at position {self.position}"


@dataclass(frozen=True)
class SampledToken:
    """A sampled token, perhaps with its log-probability.

    Args:
        token: Its id.
        logprobs: Its log-probability in the model's own distribution, if the request wants it.
    """

    token: int
    logprobs: TokenLogprob | None


def sampling_key(draw: SamplingRow) -> int:
    """The random key of a token, 64 bits as a signed integer."""
    return _key(draw.seed, draw.choice, draw.position)


def row_sampling_key(
    params: SamplingParams, seed: int, choice: int, position: int
) -> tuple[int, float]:
    """The random key and the temperature of a token; 0 and 0 for greedy and filtered sampling.

    The arguments are fields of a `SamplingRow`, which need not exist yet.
    """
    if params.is_greedy or params.is_filtered:
        return 0, 0.0
    return _key(seed, choice, position), params.temperature


def filters_of(draws: Sequence[SamplingRow]) -> Filters:
    """The filters and sampling keys of some tokens, on the host."""
    keys = torch.tensor([sampling_key(draw) for draw in draws], dtype=torch.int64)
    params = [draw.params for draw in draws]
    wide = torch.float64
    return Filters(
        SamplingKeys(keys, torch.tensor([p.temperature for p in params], dtype=wide)),
        top_k=torch.tensor([p.top_k for p in params], dtype=torch.int64),
        top_p=torch.tensor([p.top_p for p in params], dtype=wide),
        min_p=torch.tensor([p.min_p for p in params], dtype=wide),
    )


def _key(seed: int, choice: int, position: int) -> int:
    counter = struct.pack("<qqq", seed, choice, position)
    return int.from_bytes(hashlib.blake2b(counter, digest_size=8).digest(), "little", signed=True)


def mask_of(ids: Collection[int]) -> bytes:
    """The mask that allows only these tokens; `ids` must not be empty."""
    bits = bytearray(max(ids) // 8 + 1)
    for token in ids:
        bits[token // 8] |= 1 << token % 8
    return bytes(bits)


def intersect_masks(mask: bytes | None, other: bytes | None) -> bytes | None:
    """The intersection of two masks; None allows all tokens."""
    if mask is None or other is None:
        return mask or other
    n_bytes = min(len(mask), len(other))
    left, right = (int.from_bytes(bits[:n_bytes], "little") for bits in (mask, other))
    return (left & right).to_bytes(n_bytes, "little")


class NoTokenLeft(NumericalError):
    """Masks and banned ids leave no token in some rows; the other rows can still be sampled.

    Args:
        rows: The rows without a token.
        draws: The tokens to sample, one per row.
    """

    def __init__(self, rows: Sequence[int], draws: Sequence[SamplingRow]) -> None:
        super().__init__(
            f"{draws[rows[0]]}: its grammar, allowed_token_ids, bad_words, min_tokens and "
            "logit_bias allow no token, or only tokens whose logit is -inf; loosen them"
        )
        self.rows = tuple(rows)


def adjust(logits: Tensor, vocab: range, draws: Sequence[SamplingRow]) -> Tensor:
    """Apply biases, masks and penalties to logits.

    In this order: adds logit_bias; sets banned tokens and tokens outside of the mask to -inf; for
    tokens of prompt and completion, divides positive logits by repetition_penalty and multiplies
    other logits by it; for tokens of the completion, subtracts presence_penalty and
    frequency_penalty. The result is as in vLLM and transformers (which lacks the last two).

    Shapes: logits [n, V_local] local, for the token ids in `vocab`, not changed; n draws; returns
    [n, V_local] local, `logits` itself if nothing changes.
    Source: repetition: Keskar et al., CTRL, arXiv 1909.05858, section 4.1, as transformers applies
    it to negative logits; presence and frequency: OpenAI's API reference.
    """
    rows = [row for row, draw in enumerate(draws) if draw.is_adjusted]
    if not rows or not len(vocab):
        return logits
    # In float32, since 16 bits would round small biases away.
    adjusted = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
    for row in rows:
        row_logits, draw = adjusted[row], draws[row]
        _add_biases(row_logits, vocab, draw)
        _forbid(row_logits, vocab, draw)
        if draw.params.has_penalties:
            _penalize(row_logits, vocab, draw)
    return adjusted


def _add_biases(row: Tensor, vocab: range, draw: SamplingRow) -> None:
    biases = [(token, bias) for token, bias in draw.params.logit_bias if token in vocab]
    if biases:
        columns = torch.tensor([token - vocab.start for token, _ in biases], device=row.device)
        values = torch.tensor([bias for _, bias in biases], dtype=row.dtype, device=row.device)
        row[columns] += values


def _forbid(row: Tensor, vocab: range, draw: SamplingRow) -> None:
    if draw.mask is not None:
        row.masked_fill_(~_allowed(draw.mask, vocab).to(row.device), -torch.inf)
    banned = [token - vocab.start for token in draw.banned if token in vocab]
    if banned:
        row[torch.tensor(banned, device=row.device)] = -torch.inf


def _allowed(mask: bytes, vocab: range) -> Tensor:
    """The bits of this rank's tokens. Shapes: [V_local] bool."""
    first, stop = vocab.start // 8, -(-vocab.stop // 8)
    bytes_ = mask[first:stop].ljust(stop - first, b"\0")
    bits = np.unpackbits(np.frombuffer(bytes_, dtype=np.uint8), bitorder="little")
    return torch.from_numpy(bits[vocab.start - 8 * first : vocab.stop - 8 * first]).bool()


def _penalize(row: Tensor, vocab: range, draw: SamplingRow) -> None:
    assert draw.history is not None
    params = draw.params
    tokens, n_drawn = (counts.to(row.device) for counts in draw.history.counts(draw.drafts))
    is_local = (tokens >= vocab.start) & (tokens < vocab.stop)
    columns, n_drawn = tokens[is_local] - vocab.start, n_drawn[is_local]
    values = row[columns].double()
    factor = params.repetition_penalty
    values = torch.where(values < 0, values * factor, values / factor)
    values -= params.presence_penalty * (n_drawn > 0).double() + params.frequency_penalty * n_drawn
    row[columns] = values.to(row.dtype)
