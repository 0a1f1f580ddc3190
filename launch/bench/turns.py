"""The engines take turns, so that a machine that grows slower does so for all."""

import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

from launch.bench.contenders import Contender, absence
from launch.bench.engines import Run, Setup
from launch.bench.player import EngineError, Player
from launch.bench.tasks import Task
from launch.bench.weights import write_weights
from parallel_llama.model_files import ModelFiles

Prompts = list[list[int]]
PromptsOfTurn = Callable[[int], Prompts]


@dataclass
class Turns:
    """The runs of the engines that got through, and why the others are not among them.

    `read_rates` is how fast memory could be read at the beginning of each turn.
    """

    read_rates: list[float] = field(default_factory=list)
    runs: dict[str, list[Run]] = field(default_factory=dict)
    versions: dict[str, dict[str, str]] = field(default_factory=dict)
    start_s: dict[str, float] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


def play(
    files: ModelFiles,
    task: Task,
    chosen: Sequence[Contender],
    prompts_of_turn: PromptsOfTurn,
    *,
    n_turns: int,
    cores: tuple[int, ...],
    read_rate: Callable[[], float],
) -> Turns:
    """Start every engine that is there, one after the other, and let them take their turns."""
    turns = Turns()
    for each in chosen:
        if why := absence(each):
            turns.absent[each.name] = why
    present = [each for each in chosen if each.name not in turns.absent]
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folders = write_weights(files, home, {each.kind.layout for each in present})
        players = {}
        for each in present:
            n_threads = each.n_threads(len(cores))
            model = folders[each.kind.layout]
            setup = Setup(model, n_threads, cores, len(task.lengths), task.max_seq_len)
            _note(f"{each.name}: starting")
            try:
                player = Player(_command(each, setup), n_threads)
            except EngineError as error:
                _leave(turns, each.name, error)
                continue
            stack.callback(player.close)
            players[each.name] = player
            turns.versions[each.name] = player.versions
            turns.start_s[each.name] = player.start_s
        rest_s = max((each.kind.restless_s for each in present), default=0.0)
        take_turns(turns, players, prompts_of_turn, task.n_new, n_turns, read_rate, rest_s)
    return turns


def take_turns(
    turns: Turns,
    players: dict[str, Player],
    prompts_of_turn: PromptsOfTurn,
    n_new: int,
    n_turns: int,
    read_rate: Callable[[], float],
    rest_s: float,
) -> None:
    """Add every engine's runs after one turn, the 0th, to warm up.

    All get the same prompts in a turn, and each begins `rest_s` after the one before. An engine
    that fails is out, with all its runs.
    """
    turns.runs |= {name: [] for name in players}
    for turn in range(n_turns + 1):
        time.sleep(rest_s)
        turns.read_rates.append(read_rate())
        for name in list(turns.runs):
            _note(f"{name}: turn {turn} of {n_turns}" if turn else f"{name}: warming up")
            time.sleep(rest_s)
            try:
                run = players[name].answer(prompts_of_turn(turn), n_new)
            except EngineError as error:
                _leave(turns, name, error)
                continue
            if turn > 0:
                turns.runs[name].append(run)


def _leave(turns: Turns, name: str, error: EngineError) -> None:
    _note(f"{name} is out: {error}")
    turns.failed[name] = str(error)
    turns.runs.pop(name, None)


def _command(contender: Contender, setup: Setup) -> list[str]:
    assert contender.python is not None
    worker = ["-m", "launch.bench.worker", contender.kind.name, json.dumps(asdict(setup))]
    if contender.n_ranks == 1:
        return [contender.python, *worker]
    ranks = ["--standalone", f"--nproc-per-node={contender.n_ranks}"]
    return [contender.python, "-m", "torch.distributed.run", *ranks, *worker]


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
