"""The ranks of one LLM: how many there are, their start, what they must agree on, and their end.

Where nobody else has started ranks, the program is rank 0 and starts the others on this host.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

import parallel_llama
from parallel_llama.config import ModelArgs
from parallel_llama.engine import rank_calls
from parallel_llama.engine.engine import Engine
from parallel_llama.engine.outputs import StepOutput
from parallel_llama.errors import UsageError
from parallel_llama.files.fingerprint import fingerprint
from parallel_llama.files.model_files import ModelFiles
from parallel_llama.parallel.collectives import Communicator
from parallel_llama.parallel.current_device import use_device
from parallel_llama.parallel.failures import RankError
from parallel_llama.parallel.groups import join
from parallel_llama.parallel.launch import MAX_RANKS, LocalRanks, threads_per_rank
from parallel_llama.parallel.place import is_started_as_rank, world
from parallel_llama.plan import ShardPlan

_LAST_WORDS_S = 1.0


class RankGroup:
    """The ranks of one LLM from their start to their end.

    Those that nobody else has started are started here, when the group is made.
    """

    def __init__(self, settings: Mapping[str, Any], size: int) -> None:
        self._engine: Engine | None = None
        self._comm: Communicator | None = None
        self._local_ranks: LocalRanks | None = None
        self._n_threads = torch.get_num_threads()
        if is_started_as_rank():
            return
        threads = threads_per_rank(size)
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(min(threads, self._n_threads))
        if size > 1:
            self._local_ranks = LocalRanks("parallel_llama.cli.serve_rank", settings, size, threads)

    def join(
        self,
        device: torch.device,
        facts: Mapping[str, str],
        timeout_s: float | None,
        on_wait: Callable[[Sequence[int]], None],
    ) -> Communicator:
        ranks = self._local_ranks

        def look(missing: Sequence[int]) -> None:
            if ranks is not None:
                ranks.require_alive()
            on_wait(missing)

        place = None if ranks is None else ranks.place
        self._comm = join(device, place=place, facts=facts, timeout_s=timeout_s, look=look)
        return self._comm

    @property
    def engine(self) -> Engine:
        """Raises: UsageError after `end`."""
        if self._engine is None:
            raise UsageError("this LLM is closed; make another one")
        return self._engine

    @engine.setter
    def engine(self, engine: Engine) -> None:
        self._engine = engine

    def step(self) -> list[StepOutput]:
        """Run one step of the engine, in which the other ranks take part.

        Raises: as `Engine.step`; RankError with what a rank reported before it ended.
        """
        use_device(self.engine.runner.device)  # whichever thread this is
        with self.explaining():
            return self.engine.step()

    def pids(self) -> dict[int, int]:
        """The processes of this rank, and of those that were started here, by rank."""
        own = {} if self._comm is None else {self._comm.rank: os.getpid()}
        return own | (self._local_ranks.pids() if self._local_ranks else {})

    def require_alive(self) -> None:
        """Look whether the other ranks are alive, while no step runs.

        Raises: RankError naming a rank that has died, in its own words where it has left any.
        """
        if self._local_ranks is not None:
            self._local_ranks.require_alive()
        if self._comm is not None:
            with self.explaining():
                self._comm.require_alive()

    def end(self) -> None:
        """End the other ranks; quietly, for who ends has no use for their faults."""
        with suppress(RankError):
            if self._engine is not None and self._engine.comm.rank == 0:
                rank_calls.close(self._engine)
        if self._engine is not None:
            self._engine.runner.close()
        self._engine = None
        if self._comm is not None:
            self._comm.close()
        if self._local_ranks is not None:
            self._local_ranks.end()
        torch.set_num_threads(self._n_threads)

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Tells of a rank's end in that rank's own words, where it has left any."""
        try:
            yield
        except RankError:
            if self._local_ranks is not None:
                self._local_ranks.require_alive(_LAST_WORDS_S)
            raise


def resolve_size(wanted: int | None) -> int:
    """The number of ranks: what was asked for, or those that are there.

    Raises: UsageError if the two contradict each other, or nobody could run on so many.
    """
    _, size = world()
    if wanted is None or wanted == size:
        return size
    if type(wanted) is not int or not 1 <= wanted <= MAX_RANKS:
        raise UsageError(f"tp_size={wanted!r}: use a whole number from 1 to {MAX_RANKS}")
    if size > 1 or is_started_as_rank():
        raise UsageError(
            f"tp_size={wanted} and there are {size} ranks, which torchrun or another program has "
            "started; leave tp_size out"
        )
    return wanted


def shared_facts(
    settings: Mapping[str, Any], files: ModelFiles, args: ModelArgs, plan: ShardPlan, device: str
) -> dict[str, str]:
    """What must be the same on all ranks, for their work to be one."""
    contents = {} if settings["random_weights"] is not None else fingerprint(files)
    return {
        "version of parallel_llama": parallel_llama.__version__,
        "version of torch": torch.__version__,
        "device": device,
        # A path may differ between hosts; what lies there may not.
        **{name: str(value) for name, value in settings.items() if name not in ("model", "device")},
        "model's arguments": _digest(args),
        "plan": _digest(plan),
        **{f"file {name}": digest for name, digest in contents.items()},
    }


def _digest(value: object) -> str:
    return hashlib.blake2b(repr(value).encode(), digest_size=32).hexdigest()
