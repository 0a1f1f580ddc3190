"""Connections whose clients do not read their answers, and what waits for them in memory."""

import logging
from collections.abc import Iterable

from parallel_llama.serve.protocol import BoundedProtocol

READ_LIMIT_S = 60.0
MIN_READ_BYTES = 16 << 10  # in that time, of an answer that waits for its client
MAX_UNSENT_BYTES = 256 << 20  # of all connections together

logger = logging.getLogger(__name__)


def abort_slow_readers(connections: Iterable[BoundedProtocol], now_s: float) -> None:
    """Abort connections that wait too long for their clients to read; call it each second or so.

    Where all connections together have too many unsent bytes, those go that have waited longest.
    """
    waiting = sorted(
        ((each.waits_since(now_s, MIN_READ_BYTES), each) for each in connections),
        key=lambda pair: pair[0],
    )
    n_unsent = sum(each.n_unsent for _, each in waiting)
    for since_s, each in waiting:
        if now_s - since_s < READ_LIMIT_S and n_unsent <= MAX_UNSENT_BYTES:
            break
        n_unsent -= each.n_unsent
        told = {"waited_s": round(now_s - since_s), "unsent_bytes": each.n_unsent}
        logger.info("a client that reads too slowly was cut off", extra={"told": told})
        each.transport.abort()
