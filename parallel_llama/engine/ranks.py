"""The ranks of one LLM: starts them, loads the model, runs steps, replaces lost ranks, ends them.

If no launcher has started this process as a rank, it is rank 0 and starts the other ranks on this
host, as `python -m parallel_llama.engine.ranks`.
"""

import hashlib
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import TypeVar

import torch

import parallel_llama
from parallel_llama.checkpoint.prefetch import started_thread
from parallel_llama.config.adapter import adapter_digest
from parallel_llama.engine import rank_rpc
from parallel_llama.engine.draft_model import DraftModel
from parallel_llama.engine.engine import Engine
from parallel_llama.engine.free_memory import (
    give_back_memory,
    keep_freed_memory,
    return_freed_memory,
)
from parallel_llama.engine.kv_capacity import Capacity, MemoryFor, memory_of
from parallel_llama.engine.llm_config import LLMConfig
from parallel_llama.engine.machine import peak_cuda_bytes
from parallel_llama.engine.messages import Unfinished, decode_unfinished, encode_unfinished
from parallel_llama.engine.model_runner import ModelRunner
from parallel_llama.engine.outputs import StepOutput
from parallel_llama.engine.setup import ModelSetup
from parallel_llama.engine.warm_up import warm_up
from parallel_llama.errors import DISAGREE, TEST_MEMORY, UsageError, counted
from parallel_llama.files.model_files import fingerprint
from parallel_llama.ops.cpu.jit import has_kernels, this_machine
from parallel_llama.ops.formats import torch_dtype
from parallel_llama.ops.triton_toolchain import why_unusable
from parallel_llama.parallel.cgroups import cpu_quota
from parallel_llama.parallel.child_process import starting
from parallel_llama.parallel.collectives import (
    Communicator,
    Slice,
    Solo,
    broadcast_bytes,
)
from parallel_llama.parallel.communicators import give_up, join, require_no_group, use_device
from parallel_llama.parallel.failures import IntegrityError, RankError, exit_code
from parallel_llama.parallel.gpu import describe_gpu, library_versions
from parallel_llama.parallel.launch import LocalRanks, threads_per_rank
from parallel_llama.parallel.linked_ranks import Link, Links, link_ranks
from parallel_llama.parallel.rank_env import (
    RankEnv,
    is_started_as_rank,
    is_watched,
    launcher_name,
    ranks_here,
    write_in_background,
)
from parallel_llama.parallel.rank_stacks import record_stacks
from parallel_llama.parallel.regroup import Orders, RegroupOrder, join_group, lead_group
from parallel_llama.parallel.sealed_store import SealedStore
from parallel_llama.parallel.shared_memory import SharedMemory
from parallel_llama.parallel.sockets import Endpoint
from parallel_llama.parallel.stage_group import stage_group
from parallel_llama.parallel.timeouts import Timeouts

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_LAST_REPORT_S = 1.0  # how long to wait for the message of a rank that has failed
_MEMORY_FOR_GRAPHS = MemoryFor("recorded decode steps", "use a smaller KV cache, or more ranks")
_SPARE_CHECK_S = 0.2  # between checks of the spares
# The delay after a loss before new spares are started: starting Python takes seconds of a core,
# which the remaining ranks need to compute keys and values again.
_RECOMPUTE_S = 2.0


@dataclass(frozen=True)
class Regroup:
    """A new group of ranks, which continues the requests of the previous group.

    Args:
        lost: why ranks were lost; empty if only spares joined.
        n_new: the number of ranks that were spares before.
        tp_size: the number of ranks.
        seconds: from the detection of the cause by rank 0 until the next step can run.
    """

    lost: str
    n_new: int
    tp_size: int
    seconds: float

    def __str__(self) -> str:
        seconds = f"{self.seconds:.2f} s"
        if not self.lost:
            size = f"{self.tp_size} ranks after {seconds}"
            return f"a new process has replaced a lost rank: {size}"
        spares = f"; former spares among the ranks: {self.n_new}" if self.n_new else ""
        return f"continuing with {counted(self.tp_size, 'rank')} after {seconds}{spares}"


class Ranks:
    """The ranks of one LLM.

    The constructor starts the processes of the other ranks, unless another program has started
    them; `start` joins them and loads the model.

    With `elastic`, the remaining ranks form a new group after the loss of a rank and continue. A
    spare replaces the lost rank: immediately if it is ready, otherwise later, between two steps.
    Ranks that another program has started one by one also continue, but have no spares.

    Args:
        orders: reads the orders of rank 0; only for a rank that another `Ranks` has started.

    Raises: UsageError for `elastic` under torchrun, for `spares` of ranks that another program has
    started, and for several ranks in a process that is a rank of another group; RankError if the
    system cannot start ranks.
    """

    def __init__(self, setup: ModelSetup, orders: Orders | None = None) -> None:
        self.setup, self._facts = setup, shared_facts(setup)
        self.cuda_bytes: tuple[int, ...] = ()  # peak on each rank's GPU until the model is ready
        self._engine: Engine | None = None
        self._runner: ModelRunner | None = None
        self._draft_model: DraftModel | None = None
        self._comm: Communicator | None = None
        self._stage_comm: Communicator | None = None  # None without a pipeline
        self._local_ranks: LocalRanks | None = None
        self._links: Links | Link | None = None  # to ranks that another program has started
        self._n_threads = torch.get_num_threads()
        self._pid = os.getpid()
        self._timeouts = Timeouts(setup.config.timeout_s, setup.config.start_timeout_s)
        self.regroups: list[Regroup] = []
        # Entered while rank 0 forms a new group, which may take minutes: it reads weights.
        self.regrouping: Callable[[], AbstractContextManager[object]] = nullcontext
        self._next_check_s = 0.0  # monotonic
        self._orders = orders
        if setup.size > 1:
            require_no_group()
        if is_started_as_rank():
            if setup.config.elastic and orders is None:
                _require_single_starts(setup.config.spares)
            if setup.kind == "cpu" and "OMP_NUM_THREADS" not in os.environ:
                _keep_within_quota(setup.size)
            return
        threads = threads_per_rank(setup.size)
        torch.set_num_threads(self._threads_of(setup.size))
        if setup.size > 1:
            module, settings = "parallel_llama.engine.ranks", setup.config.to_json()
            with starting("ranks"):
                self._local_ranks = LocalRanks(
                    module,
                    settings,
                    setup.size,
                    threads,
                    n_spares=setup.config.spares,
                    spare_arguments=[_digest(self._facts)],
                )

    def start(
        self,
        facts: Mapping[str, str] | None = None,
        on_bytes: Callable[[int], None] = lambda _: None,
        on_wait: Callable[[Sequence[int]], None] = lambda _: None,
        on_graph: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Join the other ranks, load the model, and create the engine. Arguments are as in LLM.

        Raises: RankError for a rank that does not join, fails, or differs in a value that must be
        equal on all ranks; UsageError for too little memory; DamagedWeights for weights that cannot
        be read.
        Collective: all ranks call it.
        """
        setup = self.setup
        if facts is None or self._local_ranks is not None:  # ranks started here have no facts
            facts = {}
        with self.with_reports():
            self._join({**facts, **self._facts}, on_wait)
            if setup.config.pp > 1:
                stages = [stage.ranks for stage in setup.plan.stages]
                self._stage_comm = stage_group(self.comm, stages, self._timeouts)
            if setup.kind == "cuda":
                memory = memory_of(setup.device)
                setup.cache_size.require_room(self.comm, memory, setup.weight_bytes)
            runner = self._load(on_bytes)
            if self._local_ranks is not None:  # the KV cache must leave memory for spares
                self._local_ranks.await_spares(self._timeouts.step_s / 2)
            self._engine = self._make_engine(runner, self._capacity(runner))
            runner.comm.barrier()
            if setup.device.type == "cuda":
                with _MEMORY_FOR_GRAPHS:
                    warm_up(runner, runner.comm.keepalive)
                _record(runner, on_graph)
            peak_bytes = peak_cuda_bytes(setup.device)
            if peak_bytes is not None:
                self.cuda_bytes = tuple(self.comm.all_gather(torch.tensor(peak_bytes)).tolist())
        capacity, inputs = self._engine.capacity, setup.inputs
        inputs.n_cache_tokens = capacity.longest(inputs.longest)

    @property
    def is_forked(self) -> bool:
        """Whether this is another process than the one that created the ranks."""
        return os.getpid() != self._pid

    def require_not_forked(self) -> None:
        """Raises: UsageError in a process made by `os.fork`, which has no threads to compute."""
        if self.is_forked:
            raise UsageError(
                f"this LLM belongs to process {self._pid}, which made this one by fork; create an "
                "LLM here, or use multiprocessing's start method 'spawn'"
            )

    @property
    def engine(self) -> Engine:
        """Raises: UsageError after `end`."""
        if self._engine is None:
            raise UsageError("this LLM is closed; create a new one")
        return self._engine

    @property
    def comm(self) -> Communicator:
        """The communicator of all ranks; with `slice_of`, the engine uses a `Slice` instead."""
        assert self._comm is not None
        return self._comm

    def step(self) -> list[StepOutput]:
        """Run one step of the engine.

        Raises: as `Engine.step`; RankError with the message of a rank that has ended.
        Collective: all ranks take part.
        """
        use_device(self.setup.device)  # any thread may call this
        self._use_spares()
        return self.retry_after_loss(self._step)

    def _step(self) -> list[StepOutput]:
        # Without `computing`, the other ranks would wait forever if this step hangs.
        with self.engine.comm.computing():
            return self.engine.step()

    def retry_after_loss(self, work: Callable[[], Result]) -> Result:
        """Run `work`, and run it again after each loss of a rank that `elastic` allows.

        Returns: the result of `work`.

        Raises: as `work`; RankError with the message of a rank that has ended.
        """
        if not self.setup.config.elastic:
            with self.with_reports():
                return work()
        while True:
            try:
                return work()
            except RankError as error:
                failure = error
            self._regroup(failure)

    def wait_as_spare(self, facts: str) -> RegroupOrder:
        """On a spare, wait until rank 0 orders it to replace a lost rank.

        Args:
            facts: the digest of the facts of the ranks.

        Raises: UsageError if the facts of the spare differ.
        """
        if facts != _digest(self._facts):
            raise UsageError(
                "the model's files or the installed software have changed since the ranks started; "
                "restart the command"
            )
        record_stacks(self.setup.config.log_dir)  # shows rank 0 that this process is ready
        assert self._orders is not None
        return self._orders.latest()

    def follow(self, order: RegroupOrder | None = None) -> None:
        """Serve rank 0 until it closes, on a rank above 0.

        Args:
            order: on a spare, the result of `wait_as_spare`.
        """
        orders = self._orders
        if orders is None:
            self._follow_links()
            return
        if order is None and isinstance(self.comm, SharedMemory):
            self.comm.on_wait = orders.require_no_order
        while True:
            try:
                if order is not None:
                    comm = join_group(order, orders, self._timeouts)
                    self._rebuild(comm, order.n_threads)
                rank_rpc.serve_rank(self.engine)
                return
            except RankError as error:
                if not self.setup.config.elastic or _are_tokens_wrong(error):
                    raise
                order = orders.latest()  # rank 0 may still load, and sends orders later

    def _follow_links(self) -> None:
        """Serve rank 0, on a rank that another program has started."""
        link, order = self._links, None
        with self.with_reports():
            while True:
                try:
                    if isinstance(link, Link) and order is not None:
                        self._rebuild(link.group(order), torch.get_num_threads())
                    rank_rpc.serve_rank(self.engine)
                    return
                except RankError as error:
                    if not isinstance(link, Link) or _are_tokens_wrong(error):
                        raise
                    order = link.latest()

    def pids(self) -> dict[int, int]:
        """Process ids, by rank, of this rank and of the ranks that it has started."""
        own_pid = {} if self._comm is None else {self._comm.rank: os.getpid()}
        return own_pid | (self._local_ranks.pids() if self._local_ranks else {})

    def spare_pids(self) -> list[int]:
        """Process ids of the spares."""
        return self._local_ranks.spare_pids() if self._local_ranks else []

    def require_alive(self) -> None:
        """Check that the other ranks are alive, while no step runs.

        Raises: RankError naming a rank that has died, with its own message if it left one.
        """
        self._use_spares()
        self.retry_after_loss(self._require_alive_now)

    def change_adapter(self, name: str, folder: str | None) -> None:
        """Load a LoRA adapter on all ranks between two steps, or unload it if `folder` is None.

        Raises: UsageError as `rank_rpc.load_adapter` and `unload_adapter`, and with `elastic`;
        RankError with the message of a rank that has ended.
        """
        if self.setup.config.elastic:
            raise UsageError(
                "adapters cannot be changed with elastic: a new process would not have them; name "
                "them at the start"
            )
        with self.with_reports():
            if folder is None:
                rank_rpc.unload_adapter(self.engine, name)
            else:
                rank_rpc.load_adapter(self.engine, name, folder)

    def end(self) -> None:
        """End the other ranks. Errors of ranks are suppressed, because the LLM is closed."""
        if self.is_forked:  # the ranks belong to the parent
            return
        with suppress(RankError):
            if self._engine is not None and self._engine.comm.rank == 0:
                rank_rpc.close(self._engine)
        if self._engine is not None:
            self._engine.runner.close()
        self._engine = self._runner = self._draft_model = None
        if self._stage_comm is not None:
            self._stage_comm.close()
        if self._comm is not None:
            self._comm.close()
        if self._local_ranks is not None:
            self._local_ranks.end()
        if self._links is not None:
            self._links.close()
        if self.setup.config.elastic:
            self.setup.checkpoint.close()
            if self.setup.draft is not None:
                self.setup.draft.checkpoint.close()
            self.setup.adapters.clear()  # frees the copies of their weights
        torch.set_num_threads(self._n_threads)
        give_back_memory()

    @contextmanager
    def with_reports(self) -> Iterator[None]:
        """Replaces a RankError by the message of the rank that has ended, if it left one.

        On a rank with a link to rank 0, any error is sent to rank 0.
        """
        try:
            yield
        except Exception as error:
            if isinstance(self._links, Link):
                self._links.send_reason(str(error) or type(error).__name__)
            elif (processes := self._rank_processes()) is not None and isinstance(error, RankError):
                processes.require_alive(_LAST_REPORT_S)
            raise

    def _rank_processes(self) -> LocalRanks | Links | None:
        """On rank 0, the other ranks, if this process has started or linked them; else None."""
        return self._links if isinstance(self._links, Links) else self._local_ranks

    def _require_alive_now(self) -> None:
        if self._local_ranks is not None and not self.setup.config.elastic:
            self._local_ranks.require_alive()
        if isinstance(self._links, Links):
            self._links.require_alive()
        if self._comm is not None:
            self._comm.require_alive()

    def _use_spares(self) -> None:
        """Replace lost ranks by spares that are ready, and start new spares."""
        ranks, now = self._local_ranks, time.monotonic()
        if ranks is None or not self.setup.config.elastic or now < self._next_check_s:
            return
        self._next_check_s = now + _SPARE_CHECK_S
        if why := ranks.keep_spares():
            logger.warning("no more spares are started: %s", why.partition("\n")[0])
        if ranks.can_grow():
            self._regroup()

    def _regroup(self, error: RankError | None = None) -> None:
        """Form a new group and continue all requests, on rank 0.

        Args:
            error: the error of a step during which a rank was lost; None if no rank was lost and
                only spares join the group.

        Raises: `error` if no rank has ended, or tokens may be wrong.
        """
        start_s, lost, n_new = time.monotonic(), list[str](), 0
        ranks = self._rank_processes()
        if ranks is None or _are_tokens_wrong(error):
            assert error is not None
            raise error
        unfinished = self.engine.unfinished()
        _clear_frames(error)
        with self.regrouping():
            while True:
                if error is not None:
                    lost.append(self._drop_lost(ranks, error))
                try:
                    if isinstance(ranks, Links):
                        self._rebuild(ranks.group(), torch.get_num_threads(), unfinished)
                        break
                    n_new += ranks.take_spares()
                    n_threads = self._threads_of(ranks.env.size)
                    comm = lead_group(ranks, n_threads, self._timeouts)
                    self._rebuild(comm, n_threads, unfinished)
                    break
                except RankError as second_error:
                    error = second_error  # a second rank was lost meanwhile
        seconds = time.monotonic() - start_s
        self.regroups.append(Regroup("; ".join(lost), n_new, self.comm.size, seconds))
        logger.warning("%s", self.regroups[-1])
        self._next_check_s = time.monotonic() + (_RECOMPUTE_S if lost else 0.0)

    def _drop_lost(self, ranks: LocalRanks | Links, error: RankError) -> str:
        """Remove the ranks that have ended from the group. Returns: why they ended, for logs.

        Raises: as `_regroup`.
        """
        why = ranks.drop_ended(_LAST_REPORT_S)
        if why is None:
            with self.with_reports():
                raise error
        if DISAGREE in why or TEST_MEMORY in why:
            raise RankError(why) from error
        summary = why.partition("\n")[0]
        logger.warning("%s; the other ranks continue", summary)
        return summary

    def _threads_of(self, size: int) -> int:
        """The number of threads per rank for `size` ranks; OMP_NUM_THREADS takes precedence."""
        if "OMP_NUM_THREADS" in os.environ:
            return torch.get_num_threads()
        return min(threads_per_rank(size), self._n_threads)

    def _rebuild(
        self, comm: Communicator, n_threads: int, unfinished: Sequence[Unfinished] = ()
    ) -> None:
        """Load this rank's shard in a new group, and continue the requests there.

        Args:
            unfinished: the requests; only for rank 0, which sends them to the other ranks.

        Collective: all ranks of `comm` call it.
        """
        old_comm, self._comm = self._comm, comm
        if old_comm is not None:
            old_comm.close()
        setup, engine = self.setup, self._engine
        setup.shard_over(comm.size)
        # More threads only after loading: each thread that loads weights has its own OpenMP
        # threads, and more threads would wait for cores.
        torch.set_num_threads(min(n_threads, torch.get_num_threads()))
        if engine is not None:
            engine.free_cache()
        runner = self._load(lambda _: None)
        torch.set_num_threads(n_threads)
        capacity = self._capacity(runner)
        encoded = encode_unfinished(unfinished) if comm.rank == 0 else None
        message = broadcast_bytes(comm, encoded)
        with MemoryFor("the KV cache", "use a smaller KV cache"):
            if engine is None:  # this process was a spare
                self._engine = engine = self._make_engine(runner, capacity)
            engine.resume(runner, capacity, decode_unfinished(message), self._draft_model)
        setup.inputs.n_cache_tokens = capacity.longest(setup.inputs.longest)

    def _join(self, facts: Mapping[str, str], on_wait: Callable[[Sequence[int]], None]) -> None:
        ranks = self._local_ranks

        def check_and_wait(missing: Sequence[int]) -> None:
            if ranks is not None:
                ranks.require_alive()
            on_wait(missing)

        setup, env = self.setup, None if ranks is None else ranks.env
        is_linked = setup.config.elastic and ranks is None and self._orders is None
        self._comm = join(
            setup.device,
            dtype=torch_dtype(setup.precision.computed),
            env=env,
            facts=facts,
            notes=gpu_notes(setup),
            timeouts=self._timeouts,
            log_dir=setup.config.log_dir,
            on_wait=check_and_wait,
            form=self._form_linked_group if is_linked else None,
        )
        is_shared = isinstance(self._comm, SharedMemory | Solo)
        if setup.config.elastic and not (is_shared or is_linked):
            raise UsageError(
                "elastic needs ranks that share memory, on x86-64, with an anonymous file (memfd); "
                "drop elastic"
            )

    def _form_linked_group(
        self, env: RankEnv, store: SealedStore, endpoint: Endpoint | None
    ) -> Communicator:
        """Form the first group of ranks that another program has started, with their links."""
        self._links, comm = link_ranks(env.rank, env.size, store, endpoint, self._timeouts)
        return comm

    def _load(self, on_bytes: Callable[[int], None]) -> ModelRunner:
        """Read this rank's weights without a time limit, then wait for all ranks."""
        setup, inputs = self.setup, self.setup.inputs
        slice_of = setup.config.slice_of
        comm = self.comm if slice_of is None else Slice(slice_of[1])

        def keepalive() -> None:
            comm.keepalive()
            if self._orders is not None:  # another rank may be lost meanwhile
                self._orders.keepalive()
            if isinstance(self._links, Link):
                self._links.keepalive()

        def report_progress(n_bytes: int) -> None:
            keepalive()
            on_bytes(n_bytes)

        return_freed_memory()
        with _loading(setup), started_thread() as thread:
            # The tokenizer is parsed mostly in another process, while this one reads weights.
            tokenizer = thread.submit(lambda: comm.rank == 0 and inputs.has_tokenizer)
            with MemoryFor("the weights", "use more ranks, or a smaller dtype"):
                self._runner = runner = self._load_model(setup, comm, report_progress, self._runner)
                for name, adapter in setup.adapters.items():
                    runner.load_adapter(name, adapter, keepalive)
                if setup.draft is not None:
                    self._draft_model = self._load_draft_model(setup.draft, comm, report_progress)
            tokenizer.result()
        give_back_memory()
        keep_freed_memory()
        comm.barrier()
        return runner

    def _load_model(
        self,
        setup: ModelSetup,
        comm: Communicator,
        on_bytes: Callable[[int], None],
        old_runner: ModelRunner | None = None,
    ) -> ModelRunner:
        """Read this rank's weights of the model or of the draft model."""
        return ModelRunner.load(
            setup.args,
            setup.checkpoint,
            setup.plan,
            comm,
            stage_comm=self._stage_comm,
            precision=setup.precision,
            device=setup.device,
            kv_format=setup.kv_format,
            on_bytes=on_bytes,
            old_runner=old_runner,
        )

    def _load_draft_model(
        self, draft: ModelSetup, comm: Communicator, on_bytes: Callable[[int], None]
    ) -> DraftModel:
        old_runner = None if self._draft_model is None else self._draft_model.runner
        with _loading(draft):
            runner = self._load_model(draft, comm, on_bytes, old_runner)
        setup, n_bytes = self.setup, sum(draft.weight_bytes)
        relative_cost = n_bytes / (sum(setup.weight_bytes) - n_bytes)
        return DraftModel(runner, setup.draft_tables, setup.args.vocab_size, relative_cost)

    def _capacity(self, runner: ModelRunner) -> Capacity:
        """The size of the KV cache, which all ranks agree on."""
        return self.setup.cache_size.agree(self.comm, memory_of(runner.device))

    def _make_engine(self, runner: ModelRunner, capacity: Capacity) -> Engine:
        """Create the engine, which allocates the KV cache."""
        inputs, config = self.setup.inputs, self.setup.config
        has_text = runner.comm.rank == 0 and inputs.has_tokenizer
        with MemoryFor("the KV cache", "use a smaller KV cache"):
            return Engine(
                runner,
                capacity,
                inputs.tokenizer if has_text else None,
                inputs.grammars if has_text else None,
                max_drafts=config.max_drafts,
                integrity_check=self.setup.integrity_check,
                draft_model=self._draft_model,
            )


def _require_single_starts(n_spares: int) -> None:
    """Raises: UsageError if ranks that another program has started cannot continue after a loss."""
    if is_watched():
        raise UsageError(
            f"elastic cannot work inside {launcher_name()}, which ends all ranks when one is lost; "
            "drop elastic, start the ranks with tp_size, or start each rank with RANK, WORLD_SIZE, "
            "MASTER_ADDR and MASTER_PORT"
        )
    if n_spares:
        raise UsageError(
            f"{counted(n_spares, 'spare')} with ranks that another program has started: only a "
            "program that starts its ranks itself can replace them; drop the spares"
        )


def _keep_within_quota(size: int) -> None:
    """Limits the threads of this rank, one of `size`, to its part of the CPU quota.

    The ranks of a host share its quota. They may not share its cores: many launchers give each rank
    cores of its own, and torch starts at most one thread for each core of a process.
    """
    _, n_local = ranks_here(size)
    quota = cpu_quota() / n_local
    if quota < torch.get_num_threads():
        torch.set_num_threads(max(1, int(quota)))


def _are_tokens_wrong(error: RankError | None) -> bool:
    """Whether tokens that were returned may be wrong, so that ranks must not continue."""
    return isinstance(error, IntegrityError) or DISAGREE in str(error)


@contextmanager
def _loading(setup: ModelSetup) -> Iterator[None]:
    """Closes the checkpoint of a model afterwards, unless the next group reads it again."""
    if setup.config.elastic:
        yield
        return
    with closing(setup.checkpoint):
        yield
    del setup.checkpoint  # its headers may be large


def _clear_frames(error: BaseException | None) -> None:
    """Frees the objects that the frames of an error and its causes hold, such as the KV cache."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


def _record(runner: ModelRunner, on_graph: Callable[[int], None]) -> None:
    """Record the decode steps as CUDA graphs."""

    def report_progress(n_rows: int) -> None:
        runner.comm.keepalive()
        on_graph(n_rows)

    with _MEMORY_FOR_GRAPHS:
        runner.record(on_graph=report_progress)
    runner.comm.barrier()


def shared_facts(setup: ModelSetup) -> dict[str, str]:
    """The values that must be equal on all ranks, by name."""
    drafts = {} if setup.draft is None else _model_facts(setup.draft)
    return {
        "version of parallel_llama": parallel_llama.__version__,
        "version of torch": torch.__version__,
        "device": setup.kind,
        **(_cpu_facts(setup) if setup.kind == "cpu" else _gpu_facts(setup)),
        **setup.config.facts(),
        **_model_facts(setup),
        **{f"draft model's {name}": value for name, value in drafts.items()},
        **{f"adapter {name}": adapter_digest(adapter) for name, adapter in setup.adapters.items()},
    }


def _model_facts(setup: ModelSetup) -> Mapping[str, str]:
    """The values of a model that must be equal on all ranks, by name."""
    has_files = setup.config.random_weights is None
    contents = fingerprint(setup.inputs.files) if has_files else {}
    return {
        "model's arguments": _digest(setup.args),
        "plan": _digest(setup.plan),
        **{f"file {name}": digest for name, digest in contents.items()},
    }


def _cpu_facts(setup: ModelSetup) -> Mapping[str, str]:
    """The values that must be equal on all ranks with CPUs, by name.

    The kernels add in an order that depends on the width of the CPU's vectors. In a mixture of
    experts every rank routes all tokens, so ranks that round the router's scores differently could
    choose different experts for a token. With exact sums the ranks compare products.
    """
    if not (setup.args.n_experts or setup.exact):
        return {}
    vectors = f"vectors of {this_machine().vector_bytes} bytes"
    kind = vectors if has_kernels() else "torch's operators"
    return {"kernels of the CPU (without experts, --no-exact allows different ones)": kind}


def _gpu_facts(setup: ModelSetup) -> Mapping[str, str]:
    """The values that must be equal on all ranks with GPUs, by name.

    In a mixture of experts every rank routes all tokens. GPUs of different architectures round the
    router's scores differently, so ranks could choose different experts for a token.
    """
    kernels = {"kernels": "torch's operators" if why_unusable() else "Triton"}
    name = "architecture of the GPU"
    router_facts = {name: describe_gpu(setup.device).get(name, "")} if setup.args.n_experts else {}
    return library_versions() | kernels | router_facts


def gpu_notes(setup: ModelSetup) -> Mapping[str, str]:
    """The values of this rank's GPU that should be equal on all ranks, by name.

    Empty if the user has set the ranks' memory or speeds, because GPUs may then differ.
    """
    config = setup.config
    may_differ = config.memory is not None or config.speeds is not None
    return {} if may_differ else describe_gpu(setup.device)


def _digest(value: object) -> str:
    return hashlib.blake2b(repr(value).encode(), digest_size=32).hexdigest()


def main() -> int:
    """Runs a rank above 0 that `Ranks` of rank 0 has started; returns the exit code.

    It reads its LLMConfig from stdin, as one line of JSON, and serves rank 0 until rank 0 closes.
    Further lines are orders. It ends when stdin ends, because its parent has then ended. A spare
    has one argument: the digest of the facts of the ranks.
    """
    write_in_background()
    config = LLMConfig.from_json(sys.stdin.buffer.readline())
    orders, facts_of_ranks = Orders(), sys.argv[1:]

    def serve() -> int:
        ranks = Ranks(ModelSetup(config), orders)
        try:
            if facts_of_ranks:
                ranks.follow(ranks.wait_as_spare(*facts_of_ranks))
            else:
                ranks.start()
                ranks.follow()
        finally:
            ranks.end()
        return 0

    return exit_code(serve, give_up)


if __name__ == "__main__":
    sys.exit(main())
