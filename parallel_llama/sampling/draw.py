"""The tokens to sample: their parameters, random keys, filters and masks, and the results.

`adjust` applies biases, masks and penalties before sampling. Every rank knows the tokens of all
sequences, so each rank changes its own shard of the vocabulary without communication.
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
        self._place = {token: place for place, token in enumerate(dict.fromkeys(prompt))}
        self._tokens = np.array(list(self._place), dtype=np.int64)
        self._n_drawn: npt.NDArray[np.float64] = np.zeros(len(self._place))

    def append(self, token: int) -> None:
        """Count one more sampled token."""
        place = self._place.setdefault(token, len(self._place))
        if place == len(self._tokens):
            longer = 2 * place + 16
            self._tokens = np.resize(self._tokens, longer)
            self._n_drawn = np.concatenate([self._n_drawn, np.zeros(longer - place)])
        self._tokens[place] = token
        self._n_drawn[place] += 1

    def counts(self, drafts: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
        """The distinct tokens and how often each was sampled, with the drafts counted as sampled.

        Returns: [n] int64 and [n] float64, valid until the next append.
        """
        n = len(self._place)
        tokens, n_drawn = self._tokens[:n], self._n_drawn[:n]
        if drafts:
            new = [token for token in dict.fromkeys(drafts) if token not in self._place]
            tokens = np.concatenate([tokens, np.array(new, dtype=np.int64)])
            n_drawn = np.concatenate([n_drawn, np.zeros(len(new))])
            new_place = {token: n + number for number, token in enumerate(new)}
            for token in drafts:
                n_drawn[self._place[token] if token in self._place else new_place[token]] += 1
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
        mask: One bit per allowed token of the whole vocabulary, token t in bit t % 8 of byte
            t // 8; tokens beyond its end are not allowed. None allows all tokens.
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
        SamplingKeys(keys, torch.tensor([each.temperature for each in params], dtype=wide)),
        top_k=torch.tensor([each.top_k for each in params], dtype=torch.int64),
        top_p=torch.tensor([each.top_p for each in params], dtype=wide),
        min_p=torch.tensor([each.min_p for each in params], dtype=wide),
    )


def _key(seed: int, choice: int, position: int) -> int:
    counter = struct.pack("<qqq", seed, choice, position)
    return int.from_bytes(hashlib.blake2b(counter, digest_size=8).digest(), "little", signed=True)


def mask_of(ids: Collection[int]) -> bytes:
    """The mask that allows only these tokens, at least one."""
    bits = bytearray(max(ids) // 8 + 1)
    for token in ids:
        bits[token // 8] |= 1 << token % 8
    return bytes(bits)


def both(mask: bytes | None, other: bytes | None) -> bytes | None:
    """The intersection of two masks; None allows all tokens."""
    if mask is None or other is None:
        return mask or other
    n_bytes = min(len(mask), len(other))
    left, right = (int.from_bytes(each[:n_bytes], "little") for each in (mask, other))
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
    frequency_penalty. transformers (which lacks the last two) and vLLM have the same order.

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
        own, draw = adjusted[row], draws[row]
        _add_biases(own, vocab, draw)
        _forbid(own, vocab, draw)
        if draw.params.has_penalties:
            _penalize(own, vocab, draw)
    return adjusted


def _add_biases(own: Tensor, vocab: range, draw: SamplingRow) -> None:
    biases = [(token, bias) for token, bias in draw.params.logit_bias if token in vocab]
    if biases:
        places = torch.tensor([token - vocab.start for token, _ in biases], device=own.device)
        values = torch.tensor([bias for _, bias in biases], dtype=own.dtype, device=own.device)
        own[places] += values


def _forbid(own: Tensor, vocab: range, draw: SamplingRow) -> None:
    if draw.mask is not None:
        own.masked_fill_(~_allowed(draw.mask, vocab).to(own.device), -torch.inf)
    banned = [token - vocab.start for token in draw.banned if token in vocab]
    if banned:
        own[torch.tensor(banned, device=own.device)] = -torch.inf


def _allowed(mask: bytes, vocab: range) -> Tensor:
    """The bits of this rank's tokens. Shapes: [V_local] bool."""
    first, stop = vocab.start // 8, -(-vocab.stop // 8)
    own = mask[first:stop].ljust(stop - first, b"\0")
    bits = np.unpackbits(np.frombuffer(own, dtype=np.uint8), bitorder="little")
    return torch.from_numpy(bits[vocab.start - 8 * first : vocab.stop - 8 * first]).bool()


def _penalize(own: Tensor, vocab: range, draw: SamplingRow) -> None:
    assert draw.history is not None
    params = draw.params
    tokens, n_drawn = (each.to(own.device) for each in draw.history.counts(draw.drafts))
    is_own = (tokens >= vocab.start) & (tokens < vocab.stop)
    places, n_drawn = tokens[is_own] - vocab.start, n_drawn[is_own]
    values = own[places].double()
    factor = params.repetition_penalty
    values = torch.where(values < 0, values * factor, values / factor)
    values -= params.presence_penalty * (n_drawn > 0).double() + params.frequency_penalty * n_drawn
    own[places] = values.to(own.dtype)
