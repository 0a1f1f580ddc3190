"""Sampling rows and their results: what is drawn, with which random numbers, and what came out."""

import hashlib
import struct
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from parallel_llama.errors import NumericalError
from parallel_llama.ops import Noise
from parallel_llama.ops.filters import Filters
from parallel_llama.request import SamplingParams, TokenLogprob


class History:
    """The distinct tokens of one sequence and how often each was drawn; it grows with the sequence.

    Only a draw with penalties needs one. Appending takes amortised constant time, and reading time
    proportional to the distinct tokens, however long the sequence is.
    """

    def __init__(self, prompt: Iterable[int]) -> None:
        self._place = {token: place for place, token in enumerate(dict.fromkeys(prompt))}
        self._tokens = np.array(list(self._place), dtype=np.int64)
        self._n_drawn = np.zeros(len(self._place))

    def append(self, token: int) -> None:
        """Take note of a token that was drawn and kept."""
        place = self._place.setdefault(token, len(self._place))
        if place == len(self._tokens):
            longer = 2 * place + 16
            self._tokens = np.resize(self._tokens, longer)
            self._n_drawn = np.concatenate([self._n_drawn, np.zeros(longer - place)])
        self._tokens[place] = token
        self._n_drawn[place] += 1

    def counts(self, drafts: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
        """Every distinct token, and how often it was drawn, as if the drafts had been drawn too.

        Returns: [n] int64 and [n] float64, to be read before the next append.
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
class Draw:
    """One token to be drawn: how, what came before it, and the numbers that fix its noise.

    `choice` counts the completions of one request from 0, `position` is the place of the drawn
    token in its sequence, and `request` is named in errors. Penalties need the `history` of the
    sequence, and `drafts`, the guessed tokens between the history and this draw. `banned` holds
    ids that cannot be drawn. `mask` has a bit per token of the whole vocabulary, token t in bit
    t % 8 of byte t // 8: set where the token is allowed; what lies beyond its end is not.
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
        """Whether it is drawn from other logits than the model's own."""
        params = self.params
        changed = params.has_penalties or bool(params.logit_bias)
        return changed or bool(self.banned) or self.mask is not None

    @property
    def takes_best(self) -> bool:
        """Whether it takes the best score of all tokens, made of the model's own logits."""
        return not self.params.is_filtered and not self.is_adjusted

    def __str__(self) -> str:
        owner = "a request" if self.request is None else f"request {self.request}"
        return f"{owner}, token at position {self.position}"


@dataclass(frozen=True)
class Sampled:
    """A drawn token, and what the model made of it where the draw's `logprobs` asks for that.

    Log-probabilities are of the model's own distribution, whatever the token was drawn from.
    """

    token: int
    logprobs: TokenLogprob | None


def noise_key(draw: Draw) -> int:
    """The 64-bit key of a draw's noise, as a signed integer."""
    return _key(draw.seed, draw.choice, draw.position)


def row_noise(params: SamplingParams, seed: int, choice: int, position: int) -> tuple[int, float]:
    """The key and the temperature of a draw from all tokens; temperature 0 for every other.

    The numbers are those of a `Draw`, known before there is one.
    """
    if params.is_greedy or params.is_filtered:
        return 0, 0.0
    return _key(seed, choice, position), params.temperature


def filters_of(draws: Sequence[Draw]) -> Filters:
    """The filters and the noise of some draws that have filters, on the host."""
    keys = torch.tensor([noise_key(draw) for draw in draws], dtype=torch.int64)
    params = [draw.params for draw in draws]
    wide = torch.float64
    return Filters(
        Noise(keys, torch.tensor([each.temperature for each in params], dtype=wide)),
        top_k=torch.tensor([each.top_k for each in params], dtype=torch.int64),
        top_p=torch.tensor([each.top_p for each in params], dtype=wide),
        min_p=torch.tensor([each.min_p for each in params], dtype=wide),
    )


def _key(seed: int, choice: int, position: int) -> int:
    counter = struct.pack("<qqq", seed, choice, position)
    return int.from_bytes(hashlib.blake2b(counter, digest_size=8).digest(), "little", signed=True)


def mask_of(ids: Collection[int]) -> bytes:
    """The mask that allows some tokens, one at least, and no other."""
    bits = bytearray(max(ids) // 8 + 1)
    for token in ids:
        bits[token // 8] |= 1 << token % 8
    return bytes(bits)


def both(mask: bytes | None, other: bytes | None) -> bytes | None:
    """The mask of what two masks allow; None allows everything."""
    if mask is None or other is None:
        return mask or other
    n_bytes = min(len(mask), len(other))
    left, right = (int.from_bytes(each[:n_bytes], "little") for each in (mask, other))
    return (left & right).to_bytes(n_bytes, "little")


class NoTokenLeft(NumericalError):
    """Masks and bans leave some draws no token; `rows` says which, and the others can be drawn."""

    def __init__(self, rows: Sequence[int], draws: Sequence[Draw]) -> None:
        super().__init__(
            f"{draws[rows[0]]}: its grammar, allowed_token_ids, bad_words, min_tokens and "
            "logit_bias allow no token at all, or only such as the model cannot give; loosen them"
        )
        self.rows = tuple(rows)
