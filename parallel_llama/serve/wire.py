"""The messages between the HTTP frontend and the engine process, sent as frames over a socket.

A frame is its length in 4 bytes, little endian, followed by that many bytes of msgpack. Both ends
validate every type and range, and reject a frame of more than MAX_FRAME_BYTES.
"""

import socket
from collections import deque
from collections.abc import Iterator
from typing import Any

import msgspec

from parallel_llama.engine.statistics import EngineStatistics
from parallel_llama.request import Completion, Request, TokenLogprob

MAX_FRAME_BYTES = 64 << 20
# With more unsent bytes, the frontend counts as stalled.
MAX_UNSENT_BYTES = 256 << 20

_LENGTH_BYTES = 4
_READ_BYTES = 1 << 18


class Submit(msgspec.Struct, frozen=True, array_like=True, tag="submit"):
    """Start a request under a key that the frontend has not used before."""

    key: int
    request: Request


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    """End a request; its last output still arrives."""

    key: int


class ChangeAdapter(msgspec.Struct, frozen=True, array_like=True, tag="adapter"):
    """Load an adapter, or unload it if `folder` is None; `key` as in Submit."""

    key: int
    name: str
    folder: str | None


ToEngine = Submit | Cancel | ChangeAdapter


class RankFacts(msgspec.Struct, frozen=True):
    """One rank of the engine.

    Args:
        pid: None if rank 0 has not started the rank, as under torchrun; never None for rank 0.
        cuda_bytes: peak memory on the rank's GPU until the model was loaded; None on the CPU.
    """

    rank: int
    weight_bytes: int
    pid: int | None = None
    cuda_bytes: int | None = None


class Loaded(msgspec.Struct, frozen=True, array_like=True, tag="loaded"):
    """The engine is ready. Units: tokens, bytes; `kv_bytes` is the largest cache of any rank."""

    dtype: str
    quant: str
    kv_bytes: int
    kv_tokens: int
    block_size: int
    longest: int  # the longest sequence that the cache holds
    ranks: tuple[RankFacts, ...]


class Working(msgspec.Struct, frozen=True, array_like=True, tag="working"):
    """The engine works between two steps: it forms a new group of ranks, or loads an adapter.

    Sent every second until the work is complete, because it may take longer than a step.
    """


class Regrouped(msgspec.Struct, frozen=True, array_like=True, tag="regrouped"):
    """The ranks of the engine have changed; the new group of ranks continues all requests.

    Args:
        loaded: the new state of the engine.
        has_lost: whether ranks were lost.
        n_new: the number of processes that have replaced lost ranks.
    """

    loaded: Loaded
    has_lost: bool
    n_new: int


class Output(msgspec.Struct, frozen=True, array_like=True):
    """The output of a step for one choice: tokens, new text, and at the end the completion.

    The completion has no log-probabilities: those of its tokens are in the outputs, those of its
    prompt in Scored.
    """

    key: int
    choice: int
    tokens: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    completion: Completion | None = None


class Scored(msgspec.Struct, frozen=True, array_like=True, tag="scored"):
    """The log-probabilities of the next few tokens of a request's prompt.

    The first message begins with the second token, because the first one has no log-probability.
    """

    key: int
    logprobs: tuple[TokenLogprob, ...]


class Stepped(msgspec.Struct, frozen=True, array_like=True, tag="stepped"):
    """The outputs of one step, its duration in seconds, and the engine's load after it.

    `begun` has the keys of the requests that ran for the first time, or for the first time since
    the ranks changed.
    """

    outputs: tuple[Output, ...]
    begun: tuple[int, ...]
    step_s: float
    statistics: EngineStatistics


class EngineRefused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """The engine cannot run a request; `reason` says why.

    `exceeds_context` says whether the reason is a ContextExceeded.
    """

    key: int
    reason: str
    exceeds_context: bool = False


class AdapterChanged(msgspec.Struct, frozen=True, array_like=True, tag="adapter"):
    """The reply to ChangeAdapter; `refused` says why nothing has changed."""

    key: int
    refused: str | None


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """A step produced NaN or Inf: all requests of the engine have ended."""

    keys: tuple[int, ...]
    reason: str


FromEngine = (
    Loaded | Working | Regrouped | Scored | Stepped | EngineRefused | AdapterChanged | Failed
)

to_engine = msgspec.msgpack.Decoder(ToEngine)
from_engine = msgspec.msgpack.Decoder(FromEngine)
_ENCODER = msgspec.msgpack.Encoder()


def framed(message: Any) -> bytes:
    body = _ENCODER.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"a message of {len(body)} bytes; the limit is {MAX_FRAME_BYTES}")
    return len(body).to_bytes(_LENGTH_BYTES, "little") + body


class Frames:
    """Splits a stream of bytes into the bodies of its frames."""

    def __init__(self) -> None:
        self._unparsed = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Adds a piece of the stream; yields the frames that it completes.

        Raises: ValueError for a frame that is too long.
        """
        self._unparsed += data
        start = 0
        while len(self._unparsed) - start >= _LENGTH_BYTES:
            body = start + _LENGTH_BYTES
            n_bytes = int.from_bytes(self._unparsed[start:body], "little")
            if n_bytes > MAX_FRAME_BYTES:
                raise ValueError(f"a frame of {n_bytes} bytes; the limit is {MAX_FRAME_BYTES}")
            if len(self._unparsed) < body + n_bytes:
                break
            yield bytes(self._unparsed[body : body + n_bytes])
            start = body + n_bytes
        del self._unparsed[:start]


class FrameSocket:
    """The engine's end of the socket. It never blocks, and buffers messages that are not read.

    Raises: BrokenPipeError once the frontend has closed the socket or stopped reading.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.socket = sock
        self._frames = Frames()
        self._unsent: deque[memoryview] = deque()
        self._n_unsent = 0

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def send(self, message: Any) -> None:
        """Sends a message, now or by a later `flush`."""
        data = memoryview(framed(message))
        self._unsent.append(data)
        self._n_unsent += len(data)
        if self._n_unsent > MAX_UNSENT_BYTES:
            raise BrokenPipeError(f"the frontend has left {self._n_unsent} bytes unread")
        self.flush()

    def flush(self) -> None:
        """Sends as many bytes as the socket accepts."""
        while self._unsent:
            try:
                n_sent = self.socket.send(self._unsent[0])
            except BlockingIOError:
                return
            self._n_unsent -= n_sent
            if n_sent == len(self._unsent[0]):
                self._unsent.popleft()
            else:
                self._unsent[0] = self._unsent[0][n_sent:]

    def receive(self) -> Iterator[bytes]:
        """The frames that have arrived."""
        while True:
            try:
                data = self.socket.recv(_READ_BYTES)
            except BlockingIOError:
                return
            if not data:
                raise BrokenPipeError("the frontend has closed the socket")
            yield from self._frames.feed(data)
