"""Measures the rates of CPU ranks from which `plan` predicts the speed of models like this one.

The read rate comes from products of one row with every matrix of the model, the latency from the
exchanges of a layer. Both are recorded and replayed like a decode step. Products of many rows run
as in a prefill. All ranks measure at the same time, and the result is the median of the
repetitions. Each rank times only its own work, so a slow rank does not make the others look slow.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel_llama.engine.engine import Engine
from parallel_llama.model.transformer import Transformer
from parallel_llama.model.weights import stored_weights
from parallel_llama.ops import CPUOps, NotRecorded
from parallel_llama.ops.formats import QuantWeight, Weight
from parallel_llama.parallel.collectives import Communicator

_REPEATS = 15
_N_EXCHANGES = 64  # in one measurement
_N_MATRICES = 8  # multiplied by many rows
_LEAST_S = 1e-9


@dataclass(frozen=True)
class RankRates:
    """The rates of one rank while all ranks work.

    Args:
        read_bytes_per_s: bytes of weights per second, in products of one row.
        operations_per_s: operations per second, in products of many rows.
        exchange_s: the latency of an exchange of one row, without the time that its bytes take;
            None for a single rank.
        link_bytes_per_s: bytes per second that a rank receives from the others; None for a single
            rank.
    """

    read_bytes_per_s: float
    operations_per_s: float
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
    read_s = _own_s(comm, _replayed(model, lambda: _multiply(model, matrices, 1)))
    some = dict(list(matrices.items())[:_N_MATRICES])
    operations = 2 * n_rows * sum(each.n_outputs * each.n_inputs for each in some.values())
    multiply_s = _own_s(comm, lambda: _multiply(model, some, n_rows))
    own = torch.tensor([n_bytes / read_s, operations / multiply_s], dtype=torch.float64)
    waits = _exchange(engine, n_rows) if comm.size > 1 else (None, None)
    return [RankRates(*rates, *waits) for rates in comm.all_gather(own).tolist()]


def _exchange(engine: Engine, n_rows: int) -> tuple[float, float]:
    """The latency of an exchange in seconds, without its bytes; and received bytes per second."""
    comm, model, dim = engine.comm, engine.runner.model, engine.runner.args.dim
    cut = model.layers[0].attention.wo.cut
    n_columns = cut.all_outputs[cut.rank] if cut.all_outputs else dim
    dtype = model.tok_embeddings.weight.computed
    few, many = (torch.zeros(n, n_columns, dtype=dtype) for n in (1, n_rows))

    def exchange(x: Tensor, times: int) -> None:
        for _ in range(times):
            cut.complete(x, model.ops, comm)

    few_s = _usual_s(comm, _replayed(model, lambda: exchange(few, _N_EXCHANGES)))
    few_s /= _N_EXCHANGES
    many_s = _usual_s(comm, lambda: exchange(many, 1))
    # A gather receives the rows of the other ranks; an all-reduce twice as much.
    received = dim * few.itemsize * (comm.size - 1) / comm.size * (1 if cut.all_outputs else 2)
    bytes_per_s = (n_rows - 1) * received / max(many_s - few_s, _LEAST_S)
    return max(few_s - received / bytes_per_s, _LEAST_S), bytes_per_s


def _matrices(model: Transformer) -> dict[str, Weight]:
    """The matrices of the products of a decode step, layers first."""
    found = {
        name: weight
        for name, weight in stored_weights(model).items()
        if isinstance(weight, QuantWeight) or weight.values.ndim == 2
    }
    if "output.weight" in found:  # else the embedding is the head too
        found.pop("tok_embeddings.weight", None)
    return dict(sorted(found.items(), key=lambda item: not item[0].startswith("layers.")))


def _multiply(model: Transformer, matrices: Mapping[str, Weight], n_rows: int) -> None:
    inputs: dict[int, Tensor] = {}
    for weight in matrices.values():
        n_inputs = weight.n_inputs
        if n_inputs not in inputs:
            inputs[n_inputs] = torch.empty(n_rows, n_inputs, dtype=weight.computed)
        weight.apply(inputs[n_inputs], model.ops)


def _replayed(model: Transformer, calls: Callable[[], None]) -> Callable[[], None]:
    """Replays recorded calls, or makes them one by one if an operator is not a kernel."""
    ops = model.ops
    if not isinstance(ops, CPUOps):
        return calls
    try:
        with ops.recording() as recording:
            calls()
    except NotRecorded:
        return calls
    return recording.replay


def _own_s(comm: Communicator, work: Callable[[], None]) -> float:
    """The median time of this rank's work while all ranks work, after a warm-up."""
    return statistics.median(_times_s(comm, work))


def _usual_s(comm: Communicator, work: Callable[[], None]) -> float:
    """The median time in which all ranks together finish, after a warm-up."""

    def together() -> None:
        work()
        comm.all_reduce(torch.zeros(1))  # a rank that began late must not look fast

    took_s = torch.tensor(_times_s(comm, together), dtype=torch.float64)
    return float(comm.all_gather(took_s).amax(0).median())


def _times_s(comm: Communicator, work: Callable[[], None]) -> list[float]:
    """The times of this rank's work in _REPEATS repetitions, after a warm-up."""
    took_s = []
    for _ in range(1 + _REPEATS):
        comm.all_reduce(torch.zeros(1))  # aligns ranks better than a barrier
        began_s = time.perf_counter()
        work()
        took_s.append(time.perf_counter() - began_s)
    return took_s[1:]
