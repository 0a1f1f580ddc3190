"""The engines take turns, so that a machine that grows slower does so for all."""

import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import torch

from launch.bench.engines import Engine, Layout, Run, Setup
from launch.bench.player import EngineError, Player
from launch.bench.task import Task
from parallel_llama.engine.machine import measure
from parallel_llama.files.model_files import ModelFiles
from parallel_llama.parallel.collectives import Solo
from parallel_llama.reshard.reshard import reshard


@dataclass
class Turns:
    """The engines that were started, the runs of those that got through, and why others did not.

    `read_rates` is how many bytes of memory could be read in a second as each turn began.
    """

    players: dict[str, Player] = field(default_factory=dict)
    runs: dict[str, list[Run]] = field(default_factory=dict)
    read_rates: list[float] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def leave_out(self, name: str, error: EngineError) -> None:
        _note(f"{name} is out: {error}")
        self.failed[name] = str(error)
        self.runs.pop(name, None)


def play(
    files: ModelFiles, task: Task, chosen: Sequence[Engine], n_turns: int, cores: tuple[int, ...]
) -> Turns:
    """Start every engine that is there, one after the other, and let them take their turns."""
    turns = Turns(absent={each.name: why for each in chosen if (why := each.absence())})
    present = [each for each in chosen if each.name not in turns.absent]
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folders: dict[Layout, Path] = {"source": files.path}
        for layout in {each.layout for each in present} - {"source"}:
            folders[layout] = home / layout
            reshard(files, folders[layout], layout=layout, n_parts=1, dtype="float32")
        for each in present:
            n_threads, model = each.n_threads(len(cores)), str(folders[each.layout])
            setup = Setup(model, n_threads, cores, len(task.lengths), task.max_seq_len)
            _note(f"{each.name}: starting")
            try:
                player = turns.players[each.name] = Player(_command(each, setup), n_threads)
                stack.callback(player.close)
            except EngineError as error:
                turns.leave_out(each.name, error)
        rest_s = max((each.restless_s for each in present), default=0.0)
        take_turns(turns, task, n_turns, partial(read_bytes_per_s, len(cores)), rest_s)
    return turns


def take_turns(
    turns: Turns, task: Task, n_turns: int, read_rate: Callable[[], float], rest_s: float
) -> None:
    """Add every engine's runs after one turn, the 0th, to warm up.

    All get the same prompts in a turn, and each begins `rest_s` after the one before. An engine
    that fails is out, with all its runs.
    """
    turns.runs |= {name: [] for name in turns.players}
    for turn in range(n_turns + 1):
        time.sleep(rest_s)
        turns.read_rates.append(read_rate())
        for name in list(turns.runs):
            _note(f"{name}: turn {turn} of {n_turns}" if turn else f"{name}: warming up")
            time.sleep(rest_s)
            try:
                run = turns.players[name].answer(task.prompts(turn), task.n_new)
                if turn > 0:
                    turns.runs[name].append(run)
            except EngineError as error:
                turns.leave_out(name, error)


def read_bytes_per_s(n_threads: int) -> float:
    """How fast that many threads together read memory."""
    torch.set_num_threads(n_threads)
    return measure(Solo(), torch.device("cpu")).read_bytes_per_s


def _command(engine: Engine, setup: Setup) -> list[str]:
    assert engine.python is not None
    player = ["-m", "launch.bench.player", engine.module, json.dumps(asdict(setup))]
    if engine.n_ranks == 1:
        return [engine.python, *player]
    ranks = ["--standalone", f"--nproc-per-node={engine.n_ranks}"]
    return [engine.python, "-m", "torch.distributed.run", *ranks, *player]


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
