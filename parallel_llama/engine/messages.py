"""The message that rank 0 broadcasts before each step: which requests begin and end.

Only rank 0 receives, cancels and times out requests. Every rank applies the same message, so the
schedulers of all ranks stay equal.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from parallel_llama.request import FinishReason, Request

Message = TypeVar("Message")

# Approximate limit on the numbers in one message: a large message would delay running requests.
MAX_SIZE = 1 << 18


@dataclass(frozen=True)
class StepMessage:
    """The requests that begin and end, by ticket; or a call of `rank_rpc`.

    A ticket is a number that is never reused. A message with an `rpc` starts no step.
    """

    begin: tuple[tuple[int, Request], ...] = ()
    end: tuple[tuple[int, FinishReason], ...] = ()
    rpc: bytes = b""

    def encode(self) -> bytes:
        """Encode as msgpack; the empty message, which is the most frequent, has no bytes."""
        return b"" if self == _EMPTY else _ENCODER.encode(self)


@dataclass(frozen=True)
class DrawnTokens:
    """The tokens of an unfinished choice.

    Args:
        n_found: as in `Sequence`; None if the choice has not been admitted.
    """

    choice: int
    tokens: tuple[int, ...]
    n_found: int | None


@dataclass(frozen=True)
class Unfinished:
    """An unfinished request, with the tokens of its unfinished choices."""

    ticket: int
    request: Request
    choices: tuple[DrawnTokens, ...]


def encode_unfinished(unfinished: Sequence[Unfinished]) -> bytes:
    """The message with which the remaining ranks continue requests after the loss of a rank."""
    return _ENCODER.encode(unfinished)


def decode_unfinished(message: bytes) -> tuple[Unfinished, ...]:
    """Raises: ValueError for bytes that are not a valid message."""
    return _decode(_UNFINISHED_DECODER, message)


def decode_message(message: bytes) -> StepMessage:
    """Decode a message, with every type and range checked.

    Raises: ValueError for bytes that are not a valid message.
    """
    if not message:
        return _EMPTY
    return _decode(_DECODER, message)


def size_of(request: Request) -> int:
    """Approximately how many numbers a request adds to a message."""
    params = request.params
    n_chars = sum(map(len, params.stop)) + (len(params.grammar.text) if params.grammar else 0)
    n_chars += sum(map(len, params.bad_words))
    n_ids = len(request.stop_ids) + len(params.stop_token_ids) + 2 * len(params.logit_bias)
    n_ids += len(params.allowed_token_ids or ()) + sum(map(len, request.bad_ids))
    return 64 + len(request.prompt) + n_ids + n_chars


def _decode(decoder: msgspec.msgpack.Decoder[Message], message: bytes) -> Message:
    try:
        return decoder.decode(message)
    except msgspec.MsgspecError as error:
        raise ValueError(f"a message between ranks is not valid: {error}") from error


_EMPTY = StepMessage()
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(StepMessage)
_UNFINISHED_DECODER = msgspec.msgpack.Decoder(tuple[Unfinished, ...])
