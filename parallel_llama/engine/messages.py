"""What rank 0 tells the other ranks between two steps, as bytes.

Rank 0 alone hears of new, cancelled and late requests; every rank then does the same in the same
order, so the schedulers stay alike.
"""

from dataclasses import dataclass

import msgspec

from parallel_llama.request import FinishReason, Request

# About how many numbers one message brings, so that nobody waits long for newcomers.
MAX_SIZE = 1 << 18


@dataclass(frozen=True)
class StepMessage:
    """Requests that begin and requests that end, each under its ticket; or something else to do.

    A ticket is a number that no other request of the engine has had. `call` is for whoever runs
    the engine: with one there is no step, and the requests wait.
    """

    begin: tuple[tuple[int, Request], ...] = ()
    end: tuple[tuple[int, FinishReason], ...] = ()
    call: bytes = b""

    def encode(self) -> bytes:
        """An empty message is no bytes: the usual case costs nothing."""
        return b"" if self == _NOTHING else _ENCODER.encode(self)


def decode_message(message: bytes) -> StepMessage:
    """A message from its bytes, with every type and range checked.

    Raises: ValueError for a message that holds anything else.
    """
    if not message:
        return _NOTHING
    try:
        return _DECODER.decode(message)
    except msgspec.MsgspecError as error:
        raise ValueError(f"a message between ranks cannot be read: {error}") from error


def size_of(request: Request) -> int:
    """About how many numbers a message needs for a request."""
    params = request.params
    n_chars = sum(map(len, params.stop)) + (len(params.grammar.text) if params.grammar else 0)
    n_ids = len(request.stop_ids) + len(params.stop_token_ids) + 2 * len(params.logit_bias)
    return 64 + len(request.prompt) + n_ids + n_chars


_NOTHING = StepMessage()
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(StepMessage)
