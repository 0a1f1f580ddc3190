"""Measures how fast the CPU ranks read, multiply and exchange, for the predictions of `plan`.

The read rate comes from products of one row with every matrix of the model, the latency from the
exchanges of a layer. These calls are recorded and replayed like a decode step. Products of many
rows run as in a prefill. All ranks measure at the same time, and the result is the median of the
repetitions. A rank times only its own products, so a slow rank does not make others look slow.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from parallel_llama.engine.engine import Engine
from parallel_llama.model.transformer import Transformer
from parallel_llama.model.weights import stored_weights
from parallel_llama.ops import CPUOps, NotRecorded
from parallel_llama.ops.formats import QuantWeight, Weight
from parallel_llama.parallel.collectives import Communicator
from parallel_llama.plan import MIN_PIECE_TOKENS

_REPEATS = 15
_N_EXCHANGES = 64  # in one measurement
_N_MATRICES = 8  # multiplied by many rows
_LEAST_S = 1e-9


@dataclass(frozen=True)
class RankRates:
    """The rates of one rank while all ranks work.

    Args:
        read_bytes_per_s: bytes of weights per second, in products of one row.
        operations_per_s: operations per second, in products of as many rows as a prefill step has.
        piece_operations_per_s: as `operations_per_s`, of MIN_PIECE_TOKENS rows, as in a pipeline.
        exchange_s: the latency of an exchange of one row, without the transfer of its bytes; None
            for a single rank.
        link_bytes_per_s: bytes per second that a rank receives from all other ranks; None for a
            single rank.
    """

    read_bytes_per_s: float
    operations_per_s: float
    piece_operations_per_s: float
    exchange_s: float | None
    link_bytes_per_s: float | None


@torch.inference_mode()
def measure_rates(engine: Engine) -> list[RankRates]:
    """The rates of every rank, on the CPU.

    Collective: about a hundred all_reduces, three all_gathers, and the measured exchanges.
    """
    comm, model, n_rows = engine.comm, engine.runner.model, engine.step_tokens
    matrices = _matrices(model)
    n_bytes = sum(weight.values.nbytes for weight in matrices.values())
    read_s = _median_s(comm, _replayed(model, lambda: _multiply(model, matrices, 1)))
    rates = [n_bytes / read_s]
    few_matrices = dict(list(matrices.items())[:_N_MATRICES])
    n_values = sum(weight.n_outputs * weight.n_inputs for weight in few_matrices.values())
    for n in (n_rows, MIN_PIECE_TOKENS):
        multiply_s = _median_s(comm, partial(_multiply, model, few_matrices, n))
        rates.append(2 * n * n_values / multiply_s)
    own_rates = torch.tensor(rates, dtype=torch.float64)
    exchange_rates = _exchange(engine, n_rows) if comm.size > 1 else (None, None)
    return [RankRates(*of_rank, *exchange_rates) for of_rank in comm.all_gather(own_rates).tolist()]


def _exchange(engine: Engine, n_rows: int) -> tuple[float, float]:
    """The latency of an exchange in seconds, without the transfer; received bytes per second."""
    comm, model, dim = engine.comm, engine.runner.model, engine.runner.args.dim
    cut = model.layers[0].attention.wo.cut
    n_columns = cut.all_outputs[cut.rank] if cut.all_outputs else dim
    dtype = model.tok_embeddings.weight.computed
    one_row, many_rows = (torch.zeros(n, n_columns, dtype=dtype) for n in (1, n_rows))

    def exchange(x: Tensor, times: int) -> None:
        for _ in range(times):
            cut.complete(x, model.ops, comm)

    one_row_s = _median_of_slowest_s(
        comm, _replayed(model, lambda: exchange(one_row, _N_EXCHANGES))
    )
    one_row_s /= _N_EXCHANGES
    many_rows_s = _median_of_slowest_s(comm, lambda: exchange(many_rows, 1))
    # A gather receives the columns of the other ranks; an all-reduce receives twice the bytes.
    received = dim * one_row.itemsize * (comm.size - 1) / comm.size * (1 if cut.all_outputs else 2)
    bytes_per_s = (n_rows - 1) * received / max(many_rows_s - one_row_s, _LEAST_S)
    return max(one_row_s - received / bytes_per_s, _LEAST_S), bytes_per_s


def _matrices(model: Transformer) -> dict[str, Weight]:
    """The matrices of the products of a decode step, layers first."""
    matrices = {
        name: weight
        for name, weight in stored_weights(model).items()
        if isinstance(weight, QuantWeight) or weight.values.ndim == 2
    }
    if "output.weight" in matrices:  # else the embedding is the head too
        matrices.pop("tok_embeddings.weight", None)
    return dict(sorted(matrices.items(), key=lambda item: not item[0].startswith("layers.")))


def _multiply(model: Transformer, matrices: Mapping[str, Weight], n_rows: int) -> None:
    inputs: dict[int, Tensor] = {}
    for weight in matrices.values():
        n_inputs = weight.n_inputs
        if n_inputs not in inputs:
            inputs[n_inputs] = torch.empty(n_rows, n_inputs, dtype=weight.computed)
        weight.apply(inputs[n_inputs], model.ops)


def _replayed(model: Transformer, calls: Callable[[], None]) -> Callable[[], None]:
    """Replays recorded calls, or makes them one by one if torch computes an operator."""
    ops = model.ops
    if not isinstance(ops, CPUOps):
        return calls
    try:
        with ops.recording() as recording:
            calls()
    except NotRecorded:
        return calls
    return recording.replay


def _median_s(comm: Communicator, work: Callable[[], None]) -> float:
    """The median time of this rank's work while all ranks work."""
    return statistics.median(_times_s(comm, work))


def _median_of_slowest_s(comm: Communicator, work: Callable[[], None]) -> float:
    """The median of the times in which the slowest rank finishes."""

    def work_together() -> None:
        work()
        comm.all_reduce(torch.zeros(1))  # a rank that began late must not look fast

    times_s = torch.tensor(_times_s(comm, work_together), dtype=torch.float64)
    return float(comm.all_gather(times_s).amax(0).median())


def _times_s(comm: Communicator, work: Callable[[], None]) -> list[float]:
    """The times of this rank's work in _REPEATS repetitions, after a warm-up."""
    times_s = []
    for _ in range(1 + _REPEATS):
        comm.all_reduce(torch.zeros(1))  # aligns ranks better than a barrier
        began_s = time.perf_counter()
        work()
        times_s.append(time.perf_counter() - began_s)
    return times_s[1:]
