"""What is to be drawn and what was: the two ends of sampling, as plain data."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from parallel_llama.errors import NumericalError
from parallel_llama.request import SamplingParams, TokenLogprob
from parallel_llama.sampling.history import History


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
        return (
            params.has_penalties
            or bool(params.logit_bias)
            or bool(self.banned)
            or self.mask is not None
        )

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
