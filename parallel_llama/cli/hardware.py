"""The rates and costs of a plan's ranks, for the prediction of its speed. Without torch."""

from collections.abc import Sequence
from dataclasses import dataclass

from parallel_llama.cli.parsers import GPU

# Fractions of the data sheet's rates, measured on one H100 (docs/speed.md), assumed for all GPUs:
# reading weights, decode attention over the KV cache, and the products of a prefill of an
# 8B model.
READ_FRACTION, KV_FRACTION, PRODUCT_FRACTION = 0.94, 0.73, 0.47
# Measured on the same H100: the launches and gaps of a layer's 14 kernels in a CUDA graph, and the
# time between two graphs. Both hold for an 8B model, a 1B model and one rank of eight.
LAYER_S, STEP_S = 31e-6, 50e-6
# An NCCL all-reduce of a few kilobytes: an assumption, not a measurement.
EXCHANGE_S = 20e-6

# The measured read rates of equally fast ranks differ by up to this factor.
_MAX_RATIO = 1.05


def are_alike(rates: Sequence[float]) -> bool:
    """Whether ranks with these read rates count as equally fast."""
    return max(rates) <= _MAX_RATIO * min(rates)


def equal_part(rates: Sequence[float | None], n_ranks: int) -> float | None:
    """The rate of each of `n_ranks` ranks with the sum of these rates; None if one is not known."""
    return sum(filter(None, rates)) / n_ranks if all(rates) else None


@dataclass(frozen=True)
class Rates:
    """The rates that a rank reaches.

    Args:
        weights: bytes of weights per second.
        kv: bytes of KV cache per second.
        products: operations per second in products of as many rows as a prefill step has; None if
            not known.
        piece_products: as `products`, of MIN_PIECE_TOKENS rows; None if equal or not known.
    """

    weights: float
    kv: float
    products: float | None
    piece_products: float | None = None


@dataclass(frozen=True)
class Hardware:
    """The hardware of a plan: the rates of its ranks and of the links between them.

    Args:
        ranks: the rates of each rank, or one for all ranks.
        exchange_s: seconds of an exchange between ranks, without the transfer; None if unknown.
        link: bytes per second that a rank receives from other ranks; None if unknown.
        layer_s: seconds of each layer in each step in addition to reads and exchanges: on GPUs for
            launching kernels, on the CPU as measured by bench --calibrate.
        step_s: seconds between two steps.
        is_shared: whether the ranks are on one machine; if a plan has another number of ranks than
            `ranks`, each rank then gets an equal part of the sum of their rates.
        messages: the most messages that a host receives in a small exchange, for ranks that each
            send one message to every other host; 0 if ranks exchange in another way.
        local_exchange_s: as `exchange_s`, between the ranks of one host.
        local_link: as `link`, between the ranks of one host.
    """

    ranks: Rates | tuple[Rates, ...]
    exchange_s: float | None
    link: float | None
    layer_s: float = 0.0
    step_s: float = 0.0
    is_shared: bool = False
    messages: int = 0
    local_exchange_s: float | None = None
    local_link: float | None = None

    def rates(self, rank: int, n_ranks: int) -> Rates:
        """The rates of one of `n_ranks` ranks."""
        if isinstance(self.ranks, Rates):
            return self.ranks
        if not self.is_shared or len(self.ranks) == n_ranks:
            return self.ranks[rank]
        return Rates(
            sum(rates.weights for rates in self.ranks) / n_ranks,
            sum(rates.kv for rates in self.ranks) / n_ranks,
            equal_part([rates.products for rates in self.ranks], n_ranks),
            equal_part([rates.piece_products for rates in self.ranks], n_ranks),
        )


def gpu_hardware(gpus: GPU | list[GPU] | None) -> Hardware | None:
    """The hardware of named GPUs; None if the data sheet of a GPU is not known."""
    rates, links = [], []
    for gpu in gpus if isinstance(gpus, list) else [gpus]:
        if gpu is None or gpu.bandwidth is None or gpu.flops is None or gpu.link is None:
            return None
        read = READ_FRACTION * gpu.bandwidth, KV_FRACTION * gpu.bandwidth
        rates.append(Rates(*read, PRODUCT_FRACTION * gpu.flops))
        links.append(gpu.link)
    ranks = tuple(rates) if isinstance(gpus, list) else rates[0]
    return Hardware(ranks, EXCHANGE_S, min(links), LAYER_S, STEP_S)
