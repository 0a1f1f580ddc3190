"""One group for ranks on cards: their tensors go from card to card, all others the host's way."""

from collections.abc import Callable

from torch import Tensor

from parallel_llama.parallel.collectives import Communicator


def is_on_card(x: Tensor) -> bool:
    return x.is_cuda


class ByDevice(Communicator):
    """The same ranks seen twice: `host` for what is small and on the CPU, `cards` for the model's.

    Messages of a step, ids and facts take tens of microseconds through shared memory, and gloo's
    0.4 to 0.9 ms else. `host` is closed last, and with it whatever both have in common.

    `require_whole` raises a RankError once the cards have given up a lost rank: what they made then
    is worth nothing, and no message about it leaves this rank.
    """

    def __init__(
        self,
        host: Communicator,
        cards: Communicator,
        require_whole: Callable[[], None],
        is_on_card: Callable[[Tensor], bool] = is_on_card,
    ) -> None:
        self.rank, self.size = host.rank, host.size
        self._host, self._cards = host, cards
        self._require_whole, self._is_on_card = require_whole, is_on_card

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._way_of(x).all_reduce(x)

    def all_gather(self, x: Tensor) -> Tensor:
        return self._way_of(x).all_gather(x)

    def broadcast(self, x: Tensor, src: int = 0, *, no_timeout: bool = False) -> Tensor:
        return self._way_of(x).broadcast(x, src, no_timeout=no_timeout)

    def barrier(self) -> None:
        self._require_whole()
        self._host.barrier()

    def keepalive(self) -> None:
        self._host.keepalive()

    def require_alive(self) -> None:
        self._host.require_alive()

    def close(self) -> None:
        self._cards.close()
        self._host.close()

    def _way_of(self, x: Tensor) -> Communicator:
        self._require_whole()
        return self._cards if self._is_on_card(x) else self._host
