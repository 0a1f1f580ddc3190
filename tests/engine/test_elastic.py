"""The loss of ranks: the others go on, and every request continues as if nothing had happened."""

import gc
import os
import random
import shutil
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Timer
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
import torch
from adapters import edit_tensors, write_adapter
from mixes import (
    ARGS,
    HYBRID,
    SMALL,
    Mix,
    Outcome,
    alone,
    differences,
    make_draft_model,
    make_engine,
    make_runner,
    random_mix,
)
from thread_ranks import Meeting, ThreadComm, run_on_threads
from tiny_folder import write_endless_folder
from tiny_models import TinyModel, write_hf
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from parallel_llama import LLM, SamplingParams
from parallel_llama.checkpoint.adapter_tensors import load_pairs
from parallel_llama.checkpoint.checkpoint import Checkpoint
from parallel_llama.checkpoint.reading import open_checkpoint
from parallel_llama.config import load_model_args
from parallel_llama.dtypes import make_precision
from parallel_llama.engine import integrity, rank_rpc, ranks
from parallel_llama.engine.llm_config import LLMConfig, require_spares
from parallel_llama.engine.messages import decode_unfinished, encode_unfinished
from parallel_llama.engine.model_runner import ModelRunner
from parallel_llama.engine.ranks import Ranks
from parallel_llama.engine.setup import ModelSetup
from parallel_llama.errors import UsageError
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.families.weights import Param
from parallel_llama.files.model_files import find_model
from parallel_llama.ops.formats import DenseWeight, QuantWeight
from parallel_llama.parallel import launch
from parallel_llama.parallel.collectives import Solo
from parallel_llama.parallel.failures import IntegrityError, RankError
from parallel_llama.parallel.timeouts import Timeouts
from parallel_llama.plan import make_plan
from parallel_llama.request import Completion, Grammar, Request

WIDE = TinyModel(9, 3, 32, 288, ffn_dim=416, vocab_size=700)
SHARED = TinyModel(
    8, 2, 32, 256, ffn_dim=416, family="qwen2_moe",
    own={
        "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 96,
        "shared_expert_intermediate_size": 288, "mlp_only_layers": [1],
    },
)  # fmt: skip
EXPERTS = TinyModel(
    8, 2, 32, 256, ffn_dim=96, family="mixtral",
    own={"num_local_experts": 5, "num_experts_per_tok": 2},
)  # fmt: skip
BIASED = TinyModel(
    8, 2, 32, 256, ffn_dim=96, family="gpt_oss",
    own={"num_local_experts": 5, "num_experts_per_tok": 2, "pad_token_id": 0},
)  # fmt: skip


# Ranks above 0 that load for 10 s more, except at the start.
SLOW_RANKS = """
import sys
import time
from parallel_llama.engine.model_runner import ModelRunner
from parallel_llama.engine.ranks import main

load = ModelRunner.load

def load_slowly(*args, on_bytes, old_runner=None, **named):
    for _ in range(100 if old_runner is not None or sys.argv[1:] else 0):
        time.sleep(0.1)
        on_bytes(0)
    return load(*args, on_bytes=on_bytes, old_runner=old_runner, **named)

ModelRunner.load = load_slowly
sys.exit(main())
"""


class Failing(ThreadComm):
    """A group whose ranks all fail in the same exchange."""

    n_left = 1 << 30

    def _exchange(self, x: Tensor) -> Tensor:
        self.n_left -= 1
        if not self.n_left:
            raise RankError("a rank has died")
        return super()._exchange(x)


def groups_of(most: int, rng: random.Random) -> list[list[Failing]]:
    """Groups of `most` ranks and fewer; all but the last fail after some exchanges."""
    groups = []
    for size in range(most, 0, -1):
        meeting = Meeting(size)
        group = [Failing(rank, meeting) for rank in range(size)]
        n_left = rng.randint(1, 120) if size > 1 else 1 << 30
        for comm in group:
            comm.n_left = n_left
        groups.append(group)
    return groups


def run_shrinking(
    comm: ThreadComm,
    mix: Mix,
    args: ModelArgs,
    groups: Sequence[Sequence[Failing]],
    told: list[bytes],
    draft: ModelArgs | None = None,
    integrity_check: bool = False,
) -> dict[tuple[int, int], Outcome]:
    """As `mixes.run_mix`, with one rank fewer after each failure; the last rank is the lost one."""
    rank = comm.rank
    own_groups = [group for group in groups if rank < len(group)]
    runners = [make_runner(group[rank], args) for group in own_groups]
    drafting = [
        draft and make_draft_model(group[rank], draft, args, seed=1) for group in own_groups
    ]
    limits = mix.n_blocks, mix.block_size, mix.step_tokens, mix.max_drafts
    engine = make_engine(
        runners.pop(0), *limits, integrity_check=integrity_check, draft_model=drafting.pop(0)
    )
    outcomes: dict[tuple[int, int], Outcome] = {}
    tickets: dict[int, int] = {}
    step, last = 0, max(guest.comes for guest in mix.guests)
    while not engine.rpc:
        try:
            if rank == 0 and step > last and engine.idle:
                rank_rpc.close(engine)
                return outcomes
            for guest in mix.guests if rank == 0 else ():
                if guest.comes == step and guest.request.index not in tickets:
                    tickets[guest.request.index] = engine.submit(guest.request)
                if guest.cancelled == step and guest.request.index in tickets:
                    engine.cancel(tickets[guest.request.index])
            for output in engine.step():
                if output.completion is not None:
                    key = output.index, output.choice
                    assert key not in outcomes or rank
                    outcomes[key] = Outcome(
                        output.completion.tokens, output.completion.finish_reason
                    )
            step += 1
        except RankError:
            if not runners:
                break
            runner = runners.pop(0)
            if rank == 0:
                told.append(encode_unfinished(engine.unfinished()))
            runner.comm.barrier()
            unfinished = decode_unfinished(told[-1])
            engine.resume(runner, engine.capacity, unfinished, drafting.pop(0))
    return outcomes


@pytest.mark.parametrize(
    ("args", "seed", "draft"),
    [(ARGS, 1, None), (HYBRID, 2, None), (ARGS, 3, ARGS), (ARGS, 4, SMALL), (HYBRID, 5, HYBRID)],
)
def test_requests_continue_wherever_a_step_fails(args, seed, draft):
    rng, failures = random.Random(seed), list[bytes]()
    for number in range(4):
        mix = random_mix(seed * 1000 + number)
        groups = groups_of(3, rng)
        outcomes, *_ = run_on_threads(3, run_shrinking, mix, args, groups, failures, draft)
        assert not differences(mix, outcomes, args), number
    assert len(failures) >= 4  # at most two in each mix


def test_no_output_is_lost_if_the_integrity_check_of_its_step_fails(monkeypatch):
    """The check exchanges sums after the tokens of the step are committed."""
    monkeypatch.setattr(integrity, "_EXCHANGE_STEPS", 1)
    monkeypatch.setattr(integrity, "_MEMORY_STEPS", 1)
    rng, failures = random.Random(6), list[bytes]()
    for number in range(12):
        mix = random_mix(6000 + number)
        groups = groups_of(3, rng)
        outcomes, *_ = run_on_threads(3, run_shrinking, mix, ARGS, groups, failures, None, True)
        assert not differences(mix, outcomes, ARGS), number
    assert len(failures) >= 12


def test_requests_that_fill_the_kv_cache_are_shortened_if_it_becomes_smaller():
    """Regression: they were refused, although their clients had not set max_tokens."""
    engine = make_engine(make_runner(Solo()), n_blocks=32, block_size=4)

    def submit(index: int, n_prompt: int, *, fills_cache: bool = True) -> int:
        params = SamplingParams(max_tokens=129 - n_prompt)
        prompt = tuple(range(n_prompt))
        request = Request(index, prompt, params, 0, frozenset(), fills_cache=fills_cache)
        return engine.submit(request)

    submit(0, 5)
    refused = [submit(1, 25), submit(2, 5, fills_cache=False)]
    for _ in range(10):
        engine.step()
    submit(3, 5)  # not yet sent to the other ranks
    message = encode_unfinished(engine.unfinished())
    capacity = replace(engine.capacity, n_blocks=(8,))
    engine.resume(make_runner(Solo()), capacity, decode_unfinished(message))
    assert [ticket for ticket, _ in engine.refused] == refused
    assert "25 prompt tokens and 11 new tokens need 9 blocks of 4" in str(engine.refused[0][1])
    submit(4, 5)
    found = {}
    while not engine.idle:
        found |= {each.index: each.completion for each in engine.step() if each.completion}
    expected = alone(tuple(range(5)), SamplingParams(max_tokens=28), 0, frozenset(), 0)
    assert found.keys() == {0, 3, 4}
    for completion in found.values():
        assert Outcome(completion.tokens, completion.finish_reason) == expected


def test_free_cache_frees_the_memory_that_the_integrity_check_refers_to():
    engine = make_engine(make_runner(Solo(), ARGS), integrity_check=True)
    keys = StorageWeakRef(engine.runner.caches[0].k.untyped_storage())
    engine.free_cache()
    gc.collect()
    assert keys.expired()


def test_sequence_that_no_longer_fits_after_a_loss_is_not_scored(folder, monkeypatch):
    """The KV cache of two ranks holds fewer tokens than that of three."""
    monkeypatch.setattr(ranks, "_RECOMPUTE_S", 1000.0)
    with LLM(str(folder), tp_size=3, elastic=True, kv_cache_bytes=40_000) as llm:
        n_tokens = llm.engine.capacity.n_tokens
        for rank in (1, 2):
            os.kill(llm.ranks.pids()[rank], signal.SIGKILL)
        with pytest.raises(UsageError, match=f"{n_tokens} tokens, but the KV cache has room for"):
            llm.score([[3] * n_tokens])
        assert len(llm.score([[3] * 20])[0]) == 19


def test_closed_llm_closes_the_files_of_model_and_draft_model(folder, tmp_path):
    """Regression: those of the draft model stayed open."""
    draft = Path(shutil.copytree(folder, tmp_path / "draft"))

    def n_open(files: Path) -> int:
        links = [fd.readlink() for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()]
        return sum(link.is_relative_to(files) for link in links)

    llm = LLM(str(folder), elastic=True, draft_model=str(draft))
    assert n_open(draft) > 0
    llm.close()
    assert n_open(folder) == n_open(draft) == 0


class Counting(Checkpoint):
    """A checkpoint that counts the rows that are read."""

    def __init__(self, inner: Checkpoint) -> None:
        super().__init__(inner.args, "interleaved")
        self.inner, self.n_rows = inner, 0

    def check(self, args: ModelArgs) -> None:
        self.inner.check(args)

    def _stored(self, param: Param, rows: range) -> Tensor:
        self.n_rows += len(rows)
        return self.inner.read(param, rows, "interleaved")


def bytes_of(runner: ModelRunner) -> dict[str, Tensor]:
    """The memory of every weight, fused ones included."""
    found: dict[str, Tensor] = {}

    def walk(path: str, part: object) -> None:
        if isinstance(part, Tensor):
            found[path] = part
        elif isinstance(part, DenseWeight | QuantWeight):
            found[path] = part.values
        elif isinstance(part, list | tuple | dict):
            items = part.items() if isinstance(part, dict) else enumerate(part)
            for name, each in items:
                walk(f"{path}.{name}", each)
        elif type(part).__module__.startswith("parallel_llama.model"):
            for name, each in vars(part).items():
                walk(f"{path}.{name}", each)

    walk("", runner.model)
    return found


@pytest.mark.parametrize(
    ("quant", "model", "exact"),
    [
        ("none", WIDE, True),
        ("none", EXPERTS, False),
        ("int8", EXPERTS, True),
        ("int4", WIDE, False),
        ("int4", EXPERTS, True),
        ("int4", SHARED, True),
        ("fp8", WIDE, True),
        ("none", BIASED, True),
        ("int8", BIASED, False),
    ],
)
def test_reload_copies_weights_a_rank_holds_and_reads_the_others(tmp_path, model, quant, exact):
    files = find_model(str(write_hf(model, tmp_path)))
    args = load_model_args(files)
    precision = make_precision(args, "float32", "cpu", quant, None)

    def loaded(rank: int, size: int, before: ModelRunner | None = None) -> tuple[ModelRunner, int]:
        group = precision.quant_group_size
        plan = make_plan(args, size, quant_group_size=group, exact=exact)
        comm = ThreadComm(rank, Meeting(size))
        checkpoint = Counting(open_checkpoint(files, args))
        device = torch.device("cpu")
        how = {"precision": precision, "device": device, "old_runner": before}
        return ModelRunner.load(args, checkpoint, plan, comm, **how), checkpoint.n_rows

    for rank, new in ((0, 0), (2, 1), (4, 3), (1, 1)):
        before, _ = loaded(rank, 5)
        runner, n_read = loaded(new, 4, before)
        expected, n_all = loaded(new, 4)
        assert bytes_of(runner).keys() == bytes_of(expected).keys()
        for name, values in bytes_of(expected).items():
            assert torch.equal(bytes_of(runner)[name], values), name
        assert n_read < n_all * 0.6 or not exact, (rank, n_read, n_all)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"elastic": True, "device": "cuda"}, "elastic and GPUs cannot be combined"),
        (
            {"elastic": True, "kv_split": "sequence"},
            "elastic and a KV cache sharded by sequence cannot",
        ),
        ({"elastic": True, "memory": (1, 2)}, "elastic and memory cannot be combined"),
        ({"spares": 1}, "spares \\(1\\) without elastic"),
        ({"elastic": True, "spares": -1}, "spares=-1: use a whole number"),
    ],
)
def test_invalid_elastic_settings_are_refused(settings, message):
    with pytest.raises(UsageError, match=message):
        LLMConfig(**settings)


@pytest.mark.parametrize(
    ("size", "spares", "message"), [(1, 1, "with one rank"), (2, 1023, "more than 1024 processes")]
)
def test_spares_with_one_rank_or_too_many_processes_are_refused(size, spares, message):
    with pytest.raises(UsageError, match=message):
        require_spares(spares, size)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_endless_folder(tmp_path_factory.mktemp("models") / "tiny")


def requests_of(llm: LLM) -> list[Request]:
    """Greedy and sampled requests, with a grammar, log-probabilities, stop strings and choices.

    The requests are few, because a large batch is decoded without drafts.
    """
    params = (
        SamplingParams(max_tokens=300, prompt_logprobs=1, logprobs=0, ignore_eos=True),
        SamplingParams(max_tokens=300, temperature=1.0, seed=1, n=3, logprobs=2),
        SamplingParams(
            max_tokens=250, temperature=1.5, top_p=0.9, repetition_penalty=1.2, stop=("zz",),
            min_tokens=40,
        ),
        SamplingParams(max_tokens=300, grammar=Grammar("regex", "([a-z]{1,5} ){40,60}")),
    )  # fmt: skip
    prompts = "Once", "a b a b a b a b", "x" * 300
    return [
        llm.input_processor.request(index, prompts[index % 3], each, 5)
        for index, each in enumerate(params)
    ]


def outputs_of(llm: LLM, at_token: Callable[[int], None] = lambda _: None) -> list[Completion]:
    """Completions without cache hits, which depend on time; streamed outputs must add up."""
    tokens: dict[tuple[int, int], list[int]] = defaultdict(list)
    texts: dict[tuple[int, int], str] = defaultdict(str)
    done = {}
    for output in llm.run(requests_of(llm)):
        key = output.index, output.choice
        tokens[key] += output.tokens
        texts[key] += output.text
        at_token(sum(map(len, tokens.values())))
        if output.completion is not None:
            assert key not in done
            done[key] = replace(output.completion, n_cached_tokens=0)
            assert (list(done[key].tokens), done[key].text) == (tokens[key], texts[key])
    return [done[key] for key in sorted(done)]


def test_spare_with_another_model_digest_is_refused(folder, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    config = LLMConfig(str(folder), tp_size=2, elastic=True)
    with pytest.raises(UsageError, match="files or the installed software have changed"):
        Ranks(ModelSetup(config), Mock()).wait_as_spare("another digest")


def negate(adapter: Path) -> None:
    edit_tensors(adapter, lambda tensors: [b.neg_() for name, b in tensors.items() if "_B" in name])


@pytest.mark.parametrize("change", [negate, shutil.rmtree])
def test_adapter_is_read_again_after_its_folder_is_changed_or_deleted(folder, tmp_path, change):
    adapter = write_adapter(tmp_path / "a", folder, r".*\.q_proj", target_modules=["q_proj"])
    config = LLMConfig(str(folder), tp_size=2, elastic=True, adapters={"a": str(adapter)})
    setup = ModelSetup(config)

    def read() -> list[Tensor]:
        shard, device = setup.plan.shards[1], torch.device("cpu")
        pairs = load_pairs(setup.adapters["a"], shard, torch.float32, device)
        return [matrix for pair in pairs for matrix in (pair.a, pair.b)]

    before = read()
    change(adapter)
    assert before and all(map(torch.equal, before, read()))
    copy = setup.adapters["a"].weights
    assert copy.exists()
    setup.adapters.clear()
    assert not copy.exists()


def test_rank_with_flipped_bits_ends_without_waiting_for_an_order(folder, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    orders, finding = Mock(), IntegrityError("rank 1 of 2: the KV cache has changed")
    rank_1 = Ranks(ModelSetup(LLMConfig(str(folder), tp_size=2, elastic=True)), orders)
    rank_1._engine = rank_1._comm = Mock()
    monkeypatch.setattr(rank_rpc, "serve_rank", Mock(side_effect=finding))
    with pytest.raises(IntegrityError):
        rank_1.follow()
    orders.latest.assert_not_called()


@pytest.mark.slow
def test_lost_and_replaced_ranks_change_no_bit(folder, monkeypatch):
    """Ranks are lost while decoding, while the others recover, and idle, down to one rank.

    tests/launch/test_soak_kills.py has many requests, without drafts.
    """
    monkeypatch.setattr(launch, "_SETTLED_S", 0.0)  # so early kills do not stop new spares
    with LLM(str(folder)) as alone:
        expected = outputs_of(alone)
        lines = [request.prompt for request in requests_of(alone)[:3]]
        scores = alone.score(lines)
    with LLM(str(folder), tp_size=3, elastic=True, spares=1, draft_model=str(folder)) as llm:
        seen = {*map(psutil.Process, [*llm.ranks.pids().values(), *llm.ranks.spare_pids()])}

        def kill(*pids: int) -> None:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
                time.sleep(0.1)  # the others have begun to recover

        at = [900]

        def kill_at(n_tokens: int) -> None:
            if at and n_tokens >= at[0]:
                del at[0]
                kill(llm.ranks.pids()[1], llm.ranks.pids()[2])

        def wait_until_all_are_back(meanwhile: Callable[[], None]) -> None:
            stop_s = time.monotonic() + 120
            while llm.tp_size < 3 or len(llm.ranks.spare_pids()) < 1:
                assert time.monotonic() < stop_s
                meanwhile()
            seen.update(map(psutil.Process, [*llm.ranks.pids().values(), *llm.ranks.spare_pids()]))

        def run() -> None:
            assert outputs_of(llm) == expected

        def idle() -> None:
            llm.ranks.require_alive()
            time.sleep(0.1)

        assert outputs_of(llm, kill_at) == expected
        first = llm.ranks.regroups[0]
        assert "was killed by SIGKILL" in first.lost and first.n_new == 1
        wait_until_all_are_back(run)
        kill(*llm.ranks.spare_pids(), *list(llm.ranks.pids().values())[1:])
        assert llm.score(lines) == scores and llm.tp_size == 1
        wait_until_all_are_back(idle)
        run()
        assert not llm.ranks.regroups[-1].lost and llm.ranks.regroups[-1].tp_size == 3
        assert llm.ranks.engine.statistics().n_accepted_tokens > 0
    assert not any(each.is_running() for each in seen - {psutil.Process()})


@pytest.mark.slow
def test_rank_lost_while_a_spare_loads_does_not_end_the_run(folder, tmp_path, monkeypatch):
    """Regression: rank 0 gave up on the spare, which loads for longer than the time limit."""

    def slow_ranks(_: str, *args: Any, **named: Any) -> launch.LocalRanks:
        return launch.LocalRanks("slow_ranks", *args, **named)

    (tmp_path / "slow_ranks.py").write_text(SLOW_RANKS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(ranks, "LocalRanks", slow_ranks)
    monkeypatch.setattr(ranks, "_RECOMPUTE_S", 1000.0)
    with LLM(str(folder)) as alone:
        expected = outputs_of(alone)
    with LLM(str(folder), tp_size=3, elastic=True, spares=1, start_timeout_s=200) as llm:
        llm.ranks._timeouts = Timeouts(200, 6)
        pids = llm.ranks.pids()
        later = Timer(2, os.kill, (pids[1], signal.SIGKILL))

        def kill_at(n_tokens: int) -> None:
            if n_tokens >= 100 and not later.ident:
                os.kill(pids[2], signal.SIGKILL)
                later.start()

        assert outputs_of(llm, kill_at) == expected
        (regroup,) = llm.ranks.regroups
        assert (regroup.n_new, regroup.tp_size) == (1, 2) and regroup.seconds > 10


@pytest.mark.slow
def test_losses_change_no_bit_of_request_with_changed_or_deleted_adapter(
    folder, tmp_path, monkeypatch
):
    """Regression: the remaining ranks read the changed adapter, and failed without its folder."""
    monkeypatch.setattr(ranks, "_RECOMPUTE_S", 1000.0)
    adapter = write_adapter(tmp_path / "a", folder, r".*\.\w+_proj", target_modules="all-linear")
    params = SamplingParams(max_tokens=60, logprobs=0, ignore_eos=True)
    with LLM(str(folder), tp_size=3, elastic=True, adapters={"a": str(adapter)}) as llm:
        (expected,) = llm.generate([[3, 4, 5]], params, adapter="a")
        steps = llm.run(llm.input_processor.requests([[3, 4, 5]], params, "a"))
        for rank, change in ((2, negate), (1, shutil.rmtree)):
            next(steps)
            change(adapter)
            os.kill(llm.ranks.pids()[rank], signal.SIGKILL)
        *_, last = steps
        assert last.completion == expected
        assert [each.tp_size for each in llm.ranks.regroups] == [2, 1]


@pytest.mark.slow
def test_request_that_no_longer_fits_after_rank_loss_is_refused(folder, monkeypatch):
    """Each of three ranks holds one KV head; the last rank then holds all three in as many bytes.

    The other requests of the call finish first; a request without max_tokens is shortened. No spare
    is started meanwhile, because a start slows the first steps after a loss.
    """
    monkeypatch.setattr(ranks, "_RECOMPUTE_S", 1000.0)
    with LLM(str(folder), tp_size=3, elastic=True, kv_cache_bytes=40_000) as llm:
        n_tokens = llm.engine.capacity.n_tokens
        long, short, filling = (
            llm.input_processor.request(
                index, [3] * 8, SamplingParams(max_tokens=each, ignore_eos=True)
            )
            for index, each in enumerate((n_tokens - 8, 20, None))
        )
        steps, n_new = llm.run([long, short, filling]), {}
        next(steps)
        for rank in (1, 2):
            os.kill(llm.ranks.pids()[rank], signal.SIGKILL)
        with pytest.raises(UsageError, match="the KV cache has"):
            for output in steps:
                if output.completion is not None:
                    n_new[output.index] = len(output.completion.tokens)
        assert llm.engine.capacity.n_tokens < n_tokens
        assert n_new == {1: 20, 2: llm.engine.capacity.n_tokens + 1 - 8}
        assert sum(len(output.tokens) for output in llm.run([short])) == 20
        assert not llm.ranks.spare_pids()
