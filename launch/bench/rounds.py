"""Runs the engines alternately, so that a change of the machine's speed affects all engines."""

import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from functools import partial

from launch.bench.engines import Measurement, Runtime, Setup
from launch.bench.machine import Rates, meter
from launch.bench.task import Task
from launch.bench.weights import Weights
from launch.bench.worker import RuntimeFailed, Worker


@dataclass
class Rounds:
    """The state and the results of the rounds, by engine.

    Args:
        rates: the mean rates of the machine before and after each run.
        step_bytes: bytes of weights that a decode step reads.
        first_token_s: time from the start of each fresh process to its first token.
        nll: mean negative log-likelihood of a token of the texts.
        absent: why an engine cannot run.
        failed: why an engine failed.
    """

    workers: dict[str, Worker] = field(default_factory=dict)
    runs: dict[str, list[Measurement]] = field(default_factory=dict)
    rates: dict[str, list[Rates]] = field(default_factory=dict)
    step_bytes: dict[str, int] = field(default_factory=dict)
    first_token_s: dict[str, list[float]] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    nll: dict[str, float] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def leave_out(self, name: str, error: RuntimeFailed) -> None:
        _note(f"{name} failed: {error}")
        self.failed[name] = str(error)
        self.runs.pop(name, None)
        self.rates.pop(name, None)


def measure(
    weights: Weights,
    task: Task,
    chosen: Sequence[Runtime],
    n_rounds: int,
    n_starts: int,
    texts: Sequence[list[int]],
    cores: tuple[int, ...],
) -> Rounds:
    """Starts every installed engine, runs the rounds, and measures memory and perplexity."""
    rounds = Rounds(absent={each.name: why for each in chosen if (why := each.absence())})
    present = [each for each in chosen if each.name not in rounds.absent]
    rest_s = max((each.cooldown_s for each in present), default=0.0)
    starts: dict[str, Callable[[], Worker]] = {}
    for each in present:
        try:
            starts[each.name] = _start(each, str(weights.path(each)), task, cores)
            rounds.step_bytes[each.name] = weights.step_bytes(each, len(task.lengths))
        except RuntimeFailed as error:
            rounds.leave_out(each.name, error)
    with ExitStack() as stack:
        for _ in range(n_starts - 1):
            with ExitStack() as these:
                start_all(rounds, starts, task.prompts(0), 1, rest_s, these)
        start_all(rounds, starts, task.prompts(0), task.n_new, rest_s, stack)
        run_rounds(rounds, task, n_rounds, meter(len(cores)), rest_s)
        weigh(rounds, texts)
    return rounds


def start_all(
    rounds: Rounds,
    starts: dict[str, Callable[[], Worker]],
    prompts: list[list[int]],
    n_new: int,
    rest_s: float,
    stack: ExitStack,
) -> None:
    """Starts every engine and sends it one request as a warm-up; `stack` ends the engines.

    An engine that fails is not started again.
    """
    for name, start in list(starts.items()):
        _note(f"{name}: starting")
        time.sleep(rest_s)
        try:
            worker = rounds.workers[name] = stack.enter_context(closing(start()))
            run = worker.answer(prompts, n_new)
            rounds.first_token_s.setdefault(name, []).append(worker.start_s + run.first_token_s)
        except RuntimeFailed as error:
            rounds.leave_out(name, error)
            del starts[name]


def run_rounds(
    rounds: Rounds, task: Task, n_rounds: int, look: Callable[[], Rates], rest_s: float
) -> None:
    """Runs the rounds from 1 to `n_rounds` and adds every engine's measurements.

    In a round all engines get the same prompts, one engine after another. Before and after each run
    of an engine, the machine rests for `rest_s` and its rates are measured. The measurements of an
    engine that fails are dropped.
    """
    present = [name for name in rounds.workers if name not in rounds.failed]
    rounds.runs |= {name: [] for name in present}
    rounds.rates |= {name: [] for name in present}
    time.sleep(rest_s)
    before = look()
    for number in range(1, n_rounds + 1):
        for name in list(rounds.runs):
            _note(f"{name}: round {number} of {n_rounds}")
            try:
                rounds.runs[name].append(
                    rounds.workers[name].answer(task.prompts(number), task.n_new)
                )
            except RuntimeFailed as error:
                rounds.leave_out(name, error)
            time.sleep(rest_s)
            after = look()
            if name in rounds.rates:
                rounds.rates[name].append(before.mean(after))
            before = after


def weigh(rounds: Rounds, texts: Sequence[list[int]]) -> None:
    """Measures every engine's peak memory, and after that its likelihood of the texts."""
    n_weighed = sum(len(text) - 1 for text in texts)
    for name in list(rounds.runs):
        worker = rounds.workers[name]
        rounds.peak_bytes[name] = worker.peak_bytes()
        try:
            if n_weighed:
                nll = sum(worker.nll(text) * (len(text) - 1) for text in texts)
                rounds.nll[name] = nll / n_weighed
        except RuntimeFailed as error:
            rounds.leave_out(name, error)


def _start(engine: Runtime, model: str, task: Task, cores: tuple[int, ...]) -> Callable[[], Worker]:
    """Returns a function that starts an engine with its ranks and threads on these cores."""
    n_threads = engine.n_threads(len(cores))
    sizes = len(task.lengths), task.max_seq_len
    setup = Setup(model, engine.form, engine.n_ranks, n_threads, cores, *sizes)
    return partial(Worker, _command(engine, setup), n_threads)


def _command(engine: Runtime, setup: Setup) -> list[str]:
    assert engine.python is not None
    worker = ["-m", "launch.bench.worker", engine.module, json.dumps(asdict(setup))]
    if engine.n_ranks == 1 or not engine.under_torchrun:
        return [engine.python, *worker]
    ranks = ["--standalone", f"--nproc-per-node={engine.n_ranks}"]
    return [engine.python, "-m", "torch.distributed.run", *ranks, *worker]


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
