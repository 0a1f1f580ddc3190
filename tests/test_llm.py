"""The class LLM: in one process, and in a user's script under torchrun."""

import gc
import inspect
import os
import pydoc
import re
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise, product, zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
import torch
from commands import ROOT, run_python
from llm_program import PARAMS, fail_once
from parity_steps import full_logits

import parallel_llama
from parallel_llama import LLM, Grammar, RankError, SamplingParams, UsageError
from parallel_llama.engine import ranks, setup
from parallel_llama.engine.kv_capacity import DeviceMemory
from parallel_llama.engine.llm_config import LLMConfig
from parallel_llama.engine.model_runner import ModelRunner
from parallel_llama.engine.outputs import StepOutput
from parallel_llama.engine.ranks import shared_facts
from parallel_llama.engine.setup import ModelSetup
from parallel_llama.engine.step_buffer import Chunk
from parallel_llama.engine_process import EngineProcess
from parallel_llama.memory import GIB, PROCESS_BYTES, kv_bytes_per_token
from parallel_llama.ops.cpu.jit import CPUFeatures
from parallel_llama.parallel.collectives import Solo
from parallel_llama.parallel.handshake import RankInfo, require_same
from parallel_llama.plan import make_plan
from parallel_llama.request import Completion, Request
from parallel_llama.serve.wire import FrameSocket, RankFacts
from parallel_llama.tokenizer import Tokenizer, load_tokenizer

pytestmark = pytest.mark.slow

SUPPORT = str(ROOT / "tests" / "support")
TOKENS = [5, 17, 3, 200, 42, 42, 9]
CACHE_BYTES = 4 << 20
LIMIT_S = 120


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    # Tests change weights, which an integrity check would report.
    settings = {"dtype": "float64", "kv_cache_bytes": CACHE_BYTES, "integrity_check": False}
    llm = LLM(str(model), **settings)
    yield llm
    llm.close()


@pytest.fixture(autouse=True)
def nothing_is_left(llm: LLM) -> Iterator[None]:
    yield
    assert llm.engine.idle
    assert llm.engine.pools[0].n_used == 0 and not len(llm._loop)


def test_script_under_torchrun_continues_on_rank_0_only(model, llm):
    """The script causes errors, closes a stream early and suspends another; no rank hangs."""
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node=3")
    program = str(Path(SUPPORT) / "llm_program.py")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = run_python("-m", *torchrun, program, "script", str(model), env=env)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    completions = msgspec.json.decode(line.removeprefix("0 "), type=list[Completion])
    alone = llm.generate(["Hello", [5, 6, 7]], PARAMS)
    assert [(c.text, c.tokens) for c in completions] == [(c.text, c.tokens) for c in alone]


# Imports and memory of a start.

# Each takes longer to import than a small model takes to load, or imports packages that do.
UNWANTED = {
    *("gguf", "mistral_common", "pydantic", "requests", "huggingface_hub", "transformers"),
    *("torch._dynamo", "torch._inductor", "sympy", "scipy", "onnx", "triton"),
    *("fastapi", "uvicorn", "jinja2"),
}


def test_start_imports_no_slow_packages_and_uses_planned_memory(model):
    program = """if True:
        import gc, sys
        import parallel_llama
        assert "torch" not in sys.modules
        from parallel_llama import LLM, SamplingParams
        assert gc.isenabled()
        with LLM(sys.argv[1], kv_cache_bytes=1 << 20) as llm:
            llm.generate("Hello", SamplingParams(max_tokens=2))
            status = open("/proc/self/status").read() if sys.platform == "linux" else ""
        print(*sys.modules)
        print(status)
    """
    done = run_python("-c", program, str(model))
    assert done.returncode == 0, done.stderr
    modules, _, status = done.stdout.partition("\n")
    assert UNWANTED.isdisjoint(modules.split())
    # A tiny model adds almost nothing to the memory that `plan` assumes for every process.
    if "+cpu" in torch.__version__ and (held := re.search(r"VmRSS:\s+(\d+) kB", status)):
        assert 0.6 < int(held[1]) * 1024 / PROCESS_BYTES < 1.1


def test_tokenizer_is_loaded_without_waiting_for_weights(model, monkeypatch):
    """Regression: the tokenizer was loaded after the weights, although another core was idle."""
    loaded, load = threading.Event(), ModelRunner.load

    def load_tokenizer_here(path: Path) -> Tokenizer:
        tokenizer = load_tokenizer(path)
        loaded.set()
        return tokenizer

    def load_after_tokenizer(*args: Any, **settings: Any) -> ModelRunner:
        assert loaded.wait(60)
        return load(*args, **settings)

    processor = "parallel_llama.engine.input_processor.load_tokenizer"
    monkeypatch.setattr(processor, load_tokenizer_here)
    monkeypatch.setattr(ModelRunner, "load", load_after_tokenizer)
    LLM(str(model), kv_cache_bytes=CACHE_BYTES).close()


# Ranks that an LLM starts.


def local_ranks() -> list[psutil.Process]:
    """The rank processes that this process has started, without its tokenizer processes."""
    children = psutil.Process().children()
    return [each for each in children if "parallel_llama.engine.ranks" in each.cmdline()]


@pytest.mark.parametrize(("name", "tp_size"), [("tensor_parallel_size", 2), ("tp_size", 5)])
def test_an_llm_starts_its_other_ranks_and_ends_them(model, llm, name, tp_size):
    """Also with vLLM's name for the number of ranks."""
    alone = llm.generate(["Hello", [5, 6, 7]], PARAMS)
    n_threads, environment = torch.get_num_threads(), dict(os.environ)
    with LLM(str(model), dtype="float64", **{name: tp_size}) as many:
        assert many.tp_size == tp_size
        ranks = local_ranks()
        assert len(ranks) == tp_size - 1
        # Linux compares the priorities of threads only inside a session.
        has_groups = sys.version_info >= (3, 11)
        assert all((os.getsid(rank.pid) == os.getsid(0)) == has_groups for rank in ranks)
        assert os.getpgid(0) not in {os.getpgid(rank.pid) for rank in ranks}  # for Ctrl-C
        found = many.generate(["Hello", [5, 6, 7]], PARAMS)
        assert [(c.text, c.tokens) for c in found] == [(c.text, c.tokens) for c in alone]
        sockets = [each for rank in (psutil.Process(), *ranks) for each in rank.net_connections()]
        addresses = {each.laddr.ip for each in sockets if each.status == psutil.CONN_LISTEN}
        assert addresses and addresses <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    assert psutil.wait_procs(ranks, timeout=60)[1] == []
    assert (torch.get_num_threads(), dict(os.environ)) == (n_threads, environment)


def test_ranks_get_shares_in_proportion_to_their_memory(model, llm):
    expected = llm.generate(["Hello", [5, 6, 7]], PARAMS)
    memory = (0.4, 1.2, 0.8)
    with LLM(str(model), dtype="float64", memory=memory) as uneven:
        assert uneven.tp_size == 3
        plan = uneven.ranks.setup.plan
        assert plan == make_plan(uneven.args, 3, memory, exact=True)
        small, large, middle = weights = uneven.statistics.weight_bytes
        assert small < middle < large
        n_tokens = uneven.engine.capacity.n_tokens
        for shard, own, gib in zip(plan.shards, weights, memory, strict=True):
            kv_bytes = sum(kv_bytes_per_token(uneven.args, shard, uneven.kv_format))
            assert own + n_tokens * kv_bytes <= gib * GIB - PROCESS_BYTES
        found = uneven.generate(["Hello", [5, 6, 7]], PARAMS)
    assert [c.tokens for c in found] == [c.tokens for c in expected]
    with pytest.raises(UsageError, match="memory has 3 sizes for 2 ranks"):
        LLM(str(model), tp_size=2, memory=(1, 3, 2))
    with pytest.raises(UsageError, match=r"rank 1 of 2 needs 0\.3\d\d GiB, but its limit"):
        LLM(str(model), memory=(1, 0.3))


def test_ranks_get_shares_in_proportion_to_their_speed(model, llm):
    expected = llm.generate(["Hello", [5, 6, 7]], PARAMS)
    with LLM(str(model), dtype="float64", speeds=(2, 1), memory=(1, 1)) as uneven:
        assert uneven.ranks.setup.plan == make_plan(uneven.args, 2, (2, 1), exact=True)
        found = uneven.generate(["Hello", [5, 6, 7]], PARAMS)
    assert [c.tokens for c in found] == [c.tokens for c in expected]


@pytest.mark.parametrize(
    ("tp_size", "says"),
    [
        (0, "tp_size=0.*from 1 to 1024"),
        (-1, "tp_size=-1.*from 1 to 1024"),
        ("2", "tp_size='2'.*from 1 to 1024"),
        (10, "9 query heads cannot be split over 10 ranks; use 1 to 9"),
    ],
)
def test_an_impossible_number_of_ranks_is_refused(model, tp_size, says):
    with pytest.raises(UsageError, match=says):
        LLM(str(model), tp_size=tp_size)
    assert local_ranks() == []


def test_tp_size_and_another_tensor_parallel_size_are_refused(model):
    """Regression: tensor_parallel_size was ignored."""
    with pytest.raises(UsageError, match="tp_size=1 and tensor_parallel_size=2 are two names"):
        LLM(str(model), tp_size=1, tensor_parallel_size=2)


def test_tp_size_that_differs_from_torchrun_is_refused(model, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(UsageError, match="tp_size=2 and there are 1 ranks"):
        LLM(str(model), tp_size=2)


def test_two_ranks_on_one_gpu_are_refused_or_run_on_cpu(model, llm, monkeypatch, caplog):
    """Regression: ranks died in set_device on a host with one GPU, as in the quickstart."""
    monkeypatch.setattr("parallel_llama.engine.setup.visible_gpus", lambda: 1)
    with pytest.raises(UsageError, match=r"2 ranks on this host and 1 GPU, .* at most 1 on"):
        LLM(str(model), tp_size=2, device="cuda")
    assert local_ranks() == []
    with LLM(str(model), dtype="float64", tp_size=2) as two:
        assert two.device == torch.device("cpu")
        (found,) = two.generate("Hello", PARAMS)
    (alone,) = llm.generate("Hello", PARAMS)
    assert found.tokens == alone.tokens
    says = "running on the CPU: 2 ranks on this host and 1 GPU, but each rank needs its own GPU"
    assert [says in record.getMessage() for record in caplog.records] == [True]


def test_integrity_check_on_gpu_is_refused(model, monkeypatch):
    monkeypatch.setattr("parallel_llama.engine.setup.visible_gpus", lambda: 1)
    with pytest.raises(UsageError, match="the integrity check is only for memory of the CPU"):
        LLM(str(model), device="cuda", integrity_check=True)


@pytest.mark.parametrize(
    ("settings", "is_checked"),
    [
        ({}, True),
        ({"exact": False}, False),
        ({"exact": False, "integrity_check": True}, True),
        ({"integrity_check": False}, False),
        ({"slice_of": (0, 2)}, False),
    ],
)
def test_integrity_check_is_on_by_default_with_exact_sums(model, settings, is_checked):
    assert ModelSetup(LLMConfig(str(model), **settings)).integrity_check == is_checked


def test_model_too_large_for_gpu_is_refused_before_reading(model, monkeypatch):
    """Regression: weights were read until the GPU was full."""
    n_read: list[int] = []
    for name, gives in (
        ("setup.visible_gpus", 1),
        ("setup.own_device", torch.device("cpu")),  # stands in for the GPU
        ("ranks.memory_of", DeviceMemory(1 << 29, gpu=1)),
    ):
        monkeypatch.setattr(f"parallel_llama.engine.{name}", lambda *_, gives=gives: gives)
    with pytest.raises(UsageError, match=f"rank 0 of 1 needs .* which has {1 << 29} free"):
        LLM(str(model), device="cuda", on_bytes=n_read.append)
    assert n_read == []


def test_statistics_and_rank_facts_report_gpu_memory(model, monkeypatch):
    with LLM(str(model), dtype="float64") as on_cpu:
        assert on_cpu.statistics.cuda_bytes == ()
    monkeypatch.setattr("parallel_llama.engine.ranks.peak_cuda_bytes", lambda _: 9 << 30)
    with LLM(str(model), dtype="float64") as on_gpu:
        assert on_gpu.statistics.cuda_bytes == (9 << 30,)
        assert EngineProcess(on_gpu.ranks, FrameSocket(socket.socket()))._loaded().ranks == (
            RankFacts(0, on_gpu.statistics.weight_bytes[0], os.getpid(), 9 << 30),
        )


def test_first_request_of_a_server_leaves_the_prefix_cache_empty(model):
    with LLM(str(model), dtype="float64") as own, socket.socket() as unconnected:
        EngineProcess(own.ranks, FrameSocket(unconnected))._warm_up()
        assert own.engine.times.n_steps == 3 and [pool.n_cached for pool in own.engine.pools] == [0]


def test_step_times_are_counted_by_phase(model):
    with LLM(str(model), dtype="float64") as own:
        began = time.perf_counter()
        own.generate("Hello", PARAMS)
        elapsed_s = time.perf_counter() - began
        times = own.engine.times
        phases = [getattr(times, f"{name}_s") for name in ("forward", "sample", "decide")]
        assert times.n_steps > 0 and all(each > 0 for each in phases)
        assert sum(phases) + times.messages_s + times.schedule_s <= elapsed_s


def test_nan_after_losing_a_rank_is_reported_as_lost_rank(model, monkeypatch):
    """Regression: NaN on a GPU after an aborted collective was reported as a broken model."""

    def tell(_: Solo) -> None:
        raise RankError("rank 1 is lost")

    with LLM(str(model), dtype="float64", integrity_check=False) as own:
        monkeypatch.setattr(Solo, "barrier", tell)
        with pytest.raises(RankError, match="rank 1 is lost"):
            fail_once(own)


def test_cuda_graphs_are_dropped_before_process_group_is_closed(model, monkeypatch):
    """NCCL waits for graphs that use a communicator, so closing the group first would hang."""
    dropped: list[str] = []
    with LLM(str(model), dtype="float64"):
        monkeypatch.setattr(ModelRunner, "close", lambda _: dropped.append("graphs"))
        monkeypatch.setattr(Solo, "close", lambda _: dropped.append("group"))
    assert dropped == ["graphs", "group"]


def test_ranks_on_different_devices_are_refused(model):
    """With device auto each rank chooses a device for itself, and one rank may see no GPU."""
    infos = []
    for rank, kind in enumerate(("cuda", "cpu")):
        setup = ModelSetup(LLMConfig(str(model)))
        setup.kind = kind
        infos.append(RankInfo.of_this_process(rank, 2, shared_facts(setup)))
    with pytest.raises(RankError, match="device: rank 1 of 2 has cpu and rank 0 has cuda"):
        require_same(infos)


def test_ranks_with_vectors_of_two_widths_are_refused_only_with_exact_sums(model, monkeypatch):
    """Kernels add in an order that depends on the width."""
    for exact in (True, False):
        infos = []
        for rank, width in enumerate((64, 32)):
            monkeypatch.setattr(ranks, "this_machine", lambda width=width: CPUFeatures(width, 16))
            facts = shared_facts(ModelSetup(LLMConfig(str(model), exact=exact)))
            infos.append(RankInfo.of_this_process(rank, 2, facts))
        if exact:
            with pytest.raises(RankError, match=r"kernels of the CPU.*: rank 1 of 2 has"):
                require_same(infos)
        else:
            require_same(infos)


def test_sums_are_not_exact_on_a_cpu_without_kernels(model, monkeypatch, caplog):
    monkeypatch.setattr(setup, "why_no_kernels", lambda: "a reason; a remedy")
    assert not ModelSetup(LLMConfig(str(model))).exact
    assert "many times slower and without exact sums, because a reason; a remedy" in caplog.text
    with pytest.raises(UsageError, match="exact sums need kernels"):
        ModelSetup(LLMConfig(str(model), exact=True))


def test_sequence_beyond_the_window_is_scored_with_attention_sinks(model):
    """Regression: score dropped the blocks of the sinks when it reused blocks."""
    with LLM(str(model), dtype="float64", max_seq_len=128, attention_sinks=4) as llm:
        tokens = [5 + i % 90 for i in range(600)]
        (scores,) = llm.score([tokens])
        params = SamplingParams(max_tokens=1, prompt_logprobs=0)
        (completion,) = llm.generate([tokens], params)
        assert [each.logprob for each in completion.prompt_logprobs[1:]] == scores


def test_sums_are_exact_by_default_only_on_a_single_host(model, monkeypatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    for address, is_exact in {"127.0.0.1": True, "host0": False}.items():
        monkeypatch.setenv("MASTER_ADDR", address)
        assert ModelSetup(LLMConfig(str(model))).exact == is_exact
        assert ModelSetup(LLMConfig(str(model), exact=True)).exact
        assert not ModelSetup(LLMConfig(str(model), exact=False)).exact


def test_every_thread_that_touches_the_model_uses_its_device(model, monkeypatch):
    """A new thread uses GPU 0, whichever GPU the rank has."""
    users, readers = set(), set()
    for name in ("llm", "engine.ranks", "engine.model_runner", "parallel.communicators"):
        monkeypatch.setattr(
            f"parallel_llama.{name}.use_device", lambda _: users.add(threading.get_ident())
        )
    with LLM(
        str(model), dtype="float64", on_bytes=lambda _: readers.add(threading.get_ident())
    ) as own:
        assert readers and threading.get_ident() not in readers
        assert users > readers | {threading.get_ident()}  # and the threads that compile
        for work in (own.machine, lambda: own.score([TOKENS]), lambda: own.generate("Hi", PARAMS)):
            users.clear()
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
            assert users == {thread.ident}


def test_error_of_started_rank_is_raised_on_rank_0(model, monkeypatch):
    """Regression: only the failed rank reported why; rank 0 reported that the rank had exited."""
    monkeypatch.setattr("parallel_llama.engine.ranks.fingerprint", lambda _: {"weights": "other"})
    began = time.monotonic()
    with pytest.raises(RankError, match="the ranks differ"):
        LLM(str(model), tp_size=2, timeout_s=200, start_timeout_s=200)
    assert time.monotonic() - began < 100
    assert local_ranks() == []


def test_killed_rank_is_named_and_close_does_not_raise(model):
    """Regression: `close` raised, and the remaining ranks kept running."""
    llm = LLM(str(model), tp_size=3, timeout_s=200, start_timeout_s=200)
    ranks = local_ranks()
    ranks[0].kill()
    with pytest.raises(RankError, match=r"rank 1 of 3 was killed by SIGKILL"):
        llm.generate("Hello", PARAMS)
    llm.close()
    llm.close()
    assert psutil.wait_procs(ranks, timeout=60)[1] == []


def test_ranks_end_if_program_exits_without_close_or_is_killed(model):
    program = """if True:
        import os, sys
        from parallel_llama import LLM
        from test_llm import local_ranks
        llm = LLM(sys.argv[1], tp_size=2)
        print(*(child.pid for child in local_ranks()), flush=True)
        if sys.argv[2] == "killed":
            os.kill(os.getpid(), 9)
    """
    for way, code in (("forgets", 0), ("killed", -9)):
        paths = os.pathsep.join([str(ROOT), str(ROOT / "tests"), SUPPORT])
        env = {**os.environ, "PYTHONPATH": paths}
        done = run_python("-c", program, str(model), way, env=env)
        assert done.returncode == code, done.stderr
        (pid,) = map(int, done.stdout.split())
        deadline = time.monotonic() + 60
        while psutil.pid_exists(pid) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie"


def test_ctrl_c_in_the_middle_of_a_step_leaves_many_ranks_usable(model):
    """Regression: an interrupted collective broke the group, and the model had to be reloaded."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with LLM(str(model), dtype="float64", tp_size=2) as llm:
            before = llm.generate("Hello", PARAMS)
            runner = llm.engine.runner
            step = runner.step

            # Not in an all-reduce, because a recorded step runs all-reduces without Python.
            def interrupted(*arguments: Any, **options: Any) -> Any:
                runner.step = step
                signal.raise_signal(signal.SIGINT)
                return step(*arguments, **options)

            runner.step = interrupted
            with pytest.raises(KeyboardInterrupt):
                llm.generate("Hello", PARAMS)
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
            assert llm.engine.idle
            assert llm.generate("Hello", PARAMS) == before
    finally:
        signal.signal(signal.SIGINT, handler)


def test_a_second_llm_of_several_ranks_is_refused_before_ranks_start(model):
    with LLM(str(model), tp_size=2):
        before = local_ranks()
        with pytest.raises(UsageError, match="close the other LLM"):
            LLM(str(model), tp_size=2)
        assert local_ranks() == before


def test_closed_llm_raises_usage_error(model):
    with LLM(str(model)) as llm:
        stream = llm.stream("Hello", PARAMS)
        next(stream)
    for call in (
        lambda: llm.generate("Hello"),
        lambda: next(llm.stream("Hello")),
        lambda: next(stream),
        lambda: llm.score([[1, 2]]),
        llm.machine,
        llm.ranks.step,
    ):
        with pytest.raises(UsageError, match="this LLM is closed"):
            call()
    with pytest.raises(UsageError, match="this LLM is closed"):
        llm.engine.cancel(0)
    assert llm.tp_size == 1


# Prompts and sampling parameters.


def test_one_prompt_alone_gets_one_completion(llm):
    """Regression: a string was taken for a list of one-letter prompts."""
    for prompt in ("Hi!", [5, 6, 7], {"prompt": "Hi!"}, {"prompt_token_ids": [5, 6, 7]}):
        (completion,) = llm.generate(prompt, PARAMS)
        again = prompt if not isinstance(prompt, dict) else next(iter(prompt.values()))
        assert [completion] == llm.generate([again], PARAMS)


def test_a_conversation_goes_through_the_chat_template(llm):
    messages = [{"role": "user", "content": "Hi!"}]
    text = "<|begin|><|turn|>user: Hi!\n<|turn|>assistant: "
    (expected,) = llm.generate([llm.get_tokenizer().encode(text, bos=False)], PARAMS)
    for (answer,) in (llm.chat(messages, PARAMS), llm.generate(messages, PARAMS)):
        assert (answer.n_prompt_tokens, answer.tokens) == (24, expected.tokens)
    assert len(llm.chat([messages, messages], PARAMS)) == 2
    # Regression: tools=None, the default of vLLM and transformers, was refused.
    for none in ({"tools": None}, {"documents": None}, {"template_vars": None}):
        assert llm.chat(messages, PARAMS, **none)[0].tokens == expected.tokens
    for wrong in ([], "Hi!", 5, None):
        with pytest.raises(UsageError, match="conversation"):
            llm.chat(wrong, PARAMS)


HARMONY = "<|start|><|channel|><|message|>"
CHANNELS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi"
SECTIONS = "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Hi<|END_RESPONSE|>"
THOUGHTS = "<think>Hm.</think>Hi"


@pytest.mark.parametrize(
    ("template", "special", "written", "reasoning", "text"),
    [
        (HARMONY, "<|channel|>", CHANNELS, "Hm.", "Hi"),
        (HARMONY, "<|channel|>", "<|channel|>final<|message|>Hi", None, "Hi"),
        ("<|START_THINKING|>", "<|END_THINKING|>", SECTIONS, "Hm.", "Hi"),
        ("</think>", "", THOUGHTS, "Hm.", "Hi"),
        ("</think>", "<think>", THOUGHTS, "Hm.", "Hi"),
        ("", "<think>", THOUGHTS, None, THOUGHTS),
    ],
)
def test_chat_separates_reasoning_from_answer(
    template, special, written, reasoning, text, llm, monkeypatch
):
    """Regression: the text contained reasoning and channel names, without their markers."""
    asked: list[Request] = []

    def run(requests: list[Request], *_: Any, **__: Any) -> Iterator[StepOutput]:
        asked.extend(requests)
        for request, choice in product(requests, range(2)):
            done = Completion(request.index, written, (1,), "stop", 3, choice=choice, n_choices=2)
            yield StepOutput(0, request.index, choice, (1,), written, done, True)

    inputs = llm.input_processor
    changed = SimpleNamespace(encode=inputs.chat_template.encode, template_text=template)
    monkeypatch.setattr(llm, "_run", run)
    monkeypatch.setitem(vars(inputs), "chat_template", changed)
    monkeypatch.setitem(inputs.tokenizer.vocabulary.special_ids, special, 0)
    for name in ("has_markers", "has_special_markers"):
        monkeypatch.delitem(vars(inputs), name, raising=False)
    messages = [{"role": "user", "content": "Hi!"}]
    params = SamplingParams(max_tokens=2, n=2)
    for answer in llm.chat([messages, messages], params):
        assert (answer.reasoning, answer.text) == (reasoning, text)
        assert [(each.reasoning, each.text) for each in answer.outputs] == [(reasoning, text)] * 2
    is_marked = bool(template and special)
    assert {request.params.skip_special_tokens for request in asked} == {not is_marked}
    assert {request.hides_markers for request in asked} == {is_marked}
    for answer in llm.chat(messages, replace(params, skip_special_tokens=False)):
        assert (answer.reasoning, answer.text) == (None, written)
    for answer in llm.generate("Hi!", params):
        assert (answer.reasoning, answer.text) == (None, written)


def test_requests_without_a_seed_are_drawn_anew_in_every_call(model, llm):
    """Regression: two calls gave the same text, and so did two programs."""
    params = SamplingParams(max_tokens=12, temperature=1.5, ignore_eos=True)
    first, second = llm.generate(["Hello"] * 2, params), llm.generate(["Hello"] * 2, params)
    assert len({completion.tokens for completion in first + second}) == 4
    for completion in first:
        again = replace(params, seed=completion.seed)
        assert llm.generate("Hello", again)[0].tokens == completion.tokens
    assert llm.generate("Hello", replace(params, temperature=0.0))[0].seed is None
    for _ in range(2):
        with LLM(str(model), dtype="float64", seed=7, kv_cache_bytes=CACHE_BYTES) as seeded:
            calls = [seeded.generate(["Hello"], params) for _ in range(2)]
        assert calls[0] == calls[1]


def test_max_tokens_none_ends_at_context_or_cache_size(model, llm):
    params = SamplingParams(max_tokens=None, ignore_eos=True)
    (completion,) = llm.generate([[5] * 500], params)
    assert len(completion.tokens) == llm.input_processor.max_seq_len - 500
    with LLM(str(model), dtype="float64", kv_cache_bytes=50_000) as small:
        room = small.engine.capacity.n_tokens
        assert len(small.generate([[5] * 10], params)[0].tokens) == room - 9
        assert len(small.generate([[5] * room], params)[0].tokens) == 1
        with pytest.raises(UsageError, match=f"the KV cache has {room + 1}; .* KV cache"):
            small.generate([[5] * (room + 1)], params)


def test_bad_words_are_never_completed(llm):
    """Bad words of one and of several tokens; a bad word that does not occur changes nothing."""
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=1, ignore_eos=True)
    tokens = llm.generate("Hello", params)[0].tokens
    decode = llm.get_tokenizer().decode
    pairs = [(a, b) for a, b in pairwise(tokens) if 33 <= a < 120 and 33 <= b < 120]
    word = decode(pairs[0])
    kept = llm.generate("Hello", replace(params, bad_words=("\u00fe\u00fe",)))[0].tokens
    assert kept == tokens
    for words in ((word,), (word[0],), word):
        banned = llm.generate("Hello", replace(params, bad_words=words))[0]
        assert banned.tokens != tokens
        assert all(word not in banned.text for word in ([words] if words is word else words))


def test_only_allowed_token_ids_are_sampled(llm):
    params = SamplingParams(
        max_tokens=30, temperature=2.0, seed=1, ignore_eos=True, allowed_token_ids=[40, 41, 200]
    )
    (completion,) = llm.generate("Hello", params)
    assert set(completion.tokens) == {40, 41, 200}
    (biased,) = llm.generate("Hello", replace(params, logit_bias={7: 100.0}))
    assert {*biased.tokens} <= {40, 41, 200} and len(biased.tokens) == 30
    digits = Grammar("regex", "[0-9]{5}")
    one, two = llm.get_tokenizer().encode("12", bos=False)
    params = replace(params, allowed_token_ids=[one, two, 200], grammar=digits)
    assert re.fullmatch("[12]{5}", llm.generate("Hello", params)[0].text)
    with pytest.raises(UsageError, match="allowed_token_ids: token id 211 is outside"):
        llm.generate("Hello", SamplingParams(allowed_token_ids=[211]))


def test_stop_string_and_special_tokens_are_shown_on_request(llm):
    bias = dict.fromkeys(llm.get_tokenizer().encode("a", bos=False), 100.0)
    params = SamplingParams(max_tokens=5, logit_bias=bias, stop="aaa")
    assert llm.generate("Hello", params)[0].text == ""
    shown = replace(params, include_stop_str_in_output=True)
    assert llm.generate("Hello", shown)[0].text == "aaa"
    special = SamplingParams(max_tokens=2, logit_bias={2: 100.0})
    assert llm.generate("Hello", special)[0].text == ""
    assert llm.generate("Hello", replace(special, skip_special_tokens=False))[0].text == (
        "<|turn|><|turn|>"
    )
    end = SamplingParams(logit_bias={1: 100.0}, skip_special_tokens=False)
    assert llm.generate("Hello", end)[0].text == ""
    assert llm.generate("Hello", replace(end, include_stop_str_in_output=True))[0].text == "<|end|>"


def test_grammar_end_before_min_tokens_is_logged(llm, caplog):
    params = SamplingParams(grammar=Grammar("regex", "[0-9]{3}"), min_tokens=10)
    (completion,) = llm.generate("Hello", params)
    assert len(completion.tokens) < 10
    assert "its grammar ends the completion after 3 tokens, before min_tokens=10" in caplog.text


def test_deleted_llm_is_freed_without_garbage_collection(model):
    """Regression: each LLM kept a KV cache of 2 GiB until the next garbage collection."""
    gc.collect()
    gc.disable()
    try:
        with LLM(str(model)) as llm:
            llm.generate("Hello", SamplingParams(max_tokens=2, n=2))
            held = weakref.ref(llm.engine), weakref.ref(llm.engine.runner.model)
        del llm
        assert [each() for each in held] == [None, None]
    finally:
        gc.enable()


def test_closed_llm_frees_its_memory_while_it_is_referenced(model):
    """Regression: weights and KV cache were kept, and a second LLM did not fit on the GPU."""
    with LLM(str(model), tp_size=2, draft_model=str(model)) as llm:
        llm.generate("Hello", SamplingParams(max_tokens=2, n=2))
        runner = llm.engine.runner
        held = [weakref.ref(each) for each in (llm.engine, runner.model, runner.caches[0].k)]
        del runner
    assert [each() for each in held] == [None] * 3
    assert llm.tp_size == 2 and "closed" in repr(llm)


# Threads, signals and forks.

LONGER = SamplingParams(max_tokens=40, temperature=0.8, seed=3, ignore_eos=True)


@pytest.mark.parametrize("tp_size", [1, 2])
def test_threads_share_an_llm(model, tp_size):
    """Regression: steps of two threads overlapped, and both calls failed."""
    prompts = ["Hello", "The sky", "A", "Once upon a time"]
    with LLM(str(model), tp_size=tp_size) as own, ThreadPoolExecutor(8) as pool:
        alone = [own.generate(prompt, LONGER) for prompt in prompts]
        scores = own.score([TOKENS])
        for _ in range(3):
            streams = [pool.submit(lambda p: "".join(own.stream(p, LONGER)), p) for p in prompts]
            scored = pool.submit(own.score, [TOKENS])
            assert list(pool.map(lambda prompt: own.generate(prompt, LONGER), prompts)) == alone
            assert [each.result() for each in streams] == [each.text for (each,) in alone]
            assert scored.result() == scores
        assert own.engine.idle


def test_thread_gets_its_turn_while_another_thread_steps(llm, monkeypatch):
    """A short request is answered before the stream of the other thread has ended."""
    begun, n_steps, step = threading.Event(), [], llm.engine.runner.step

    def slow_step(*args: Any) -> Any:
        time.sleep(0.01)  # on a busy machine, a thread may wait for a core as long as many steps
        return step(*args)

    monkeypatch.setattr(llm.engine.runner, "step", slow_step)

    def read() -> None:
        for _ in llm.stream("Hello", SamplingParams(max_tokens=200, ignore_eos=True)):
            n_steps.append(1)
            begun.set()

    thread = threading.Thread(target=read)
    thread.start()
    begun.wait(LIMIT_S)
    llm.generate("The sky", SamplingParams(max_tokens=2, ignore_eos=True))
    n_before = len(n_steps)
    thread.join()
    assert n_before < len(n_steps)


def test_stream_freed_by_the_garbage_collector_during_a_step_ends_later(llm, monkeypatch):
    """Regression: its cancellation ran a step within the step of another call."""
    alone = llm.generate("Hello", LONGER)
    pieces = llm.stream("The sky", SamplingParams(max_tokens=300, ignore_eos=True))
    next(pieces)
    cycle: list[object] = [pieces]
    cycle.append(cycle)
    del pieces, cycle
    step = llm.engine.runner.step

    def collect_and_step(*args: Any) -> Any:
        gc.collect()
        return step(*args)

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner, "step", collect_and_step)
        assert llm.generate("Hello", LONGER) == alone
    assert llm.engine.idle  # the cancelled request ended with a step of the other call


def test_ranks_survive_a_time_limit_by_sigalrm(model):
    """Regression: an exception from the handler broke the collectives of several ranks."""

    def expire(*_: object) -> None:
        raise TimeoutError

    old_handler = signal.signal(signal.SIGALRM, expire)
    try:
        with LLM(str(model), tp_size=2) as own:
            alone = own.generate("Hello", PARAMS)
            for delay_s in (0.05, 0.011, 0.023):
                signal.setitimer(signal.ITIMER_REAL, delay_s)
                with pytest.raises(TimeoutError):
                    while True:
                        own.generate("Hello", LONGER)
                assert own.generate("Hello", PARAMS) == alone
    finally:
        signal.signal(signal.SIGALRM, old_handler)


def test_only_an_unattended_program_has_a_time_limit_between_steps(model):
    """Regression: `generate --output` that hung between two steps was not ended.

    After two contexts that overlapped, as in two threads, an idle program was ended.
    """

    def pause(own: LLM) -> str:
        pieces = own.stream("Hello", LONGER)
        text = next(pieces)
        time.sleep(5)
        return text + "".join(pieces)

    with LLM(str(model), tp_size=2, timeout_s=1) as own:
        with ExitStack() as second, own.unattended():
            second.enter_context(own.unattended())
        text = pause(own)
        assert text == own.generate("Hello", LONGER)[0].text
        with own.unattended(), pytest.raises(RankError, match="rank 0 of 2 is late"):
            pause(own)


def test_slice_is_usable_after_an_error_in_a_step(model, monkeypatch):
    """Regression: only a group of one rank discarded the unfinished step."""
    with LLM(str(model), slice_of=(0, 2)) as own:
        with monkeypatch.context() as patch:
            patch.setattr(own.engine.runner, "step", interrupt)
            with pytest.raises(KeyboardInterrupt):
                own.generate(["Hello"], PARAMS)
        assert len(own.generate(["Hello"], PARAMS)[0].tokens) > 0


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("settings", "device", "said"),
    [
        ({"slice_of": (1, 2)}, "cpu", "the rates of a slice .*; use all ranks"),
        ({"tp_size": 2, "pp": 2}, "cpu", "pp=2: .*; measure with pp=1"),
        ({}, "cuda", "only the rates of CPU ranks can be measured; use device='cpu'"),
    ],
)
def test_rates_that_cannot_be_measured_are_refused(model, monkeypatch, settings, device, said):
    """Regression: a KeyError ended the ranks, or the rates were meaningless."""
    with LLM(str(model), **settings) as own:
        monkeypatch.setattr(own.engine.runner, "device", torch.device(device))
        with pytest.raises(UsageError, match=said):
            own.rank_rates()
        monkeypatch.undo()
        assert own.machine().read_bytes_per_s > 0


def test_forked_process_neither_uses_nor_ends_the_llm(model):
    """Regression: it hung in OpenMP, and its exit ended the ranks of its parent."""
    program = """if True:
        import os, sys
        from parallel_llama import LLM, SamplingParams, UsageError
        with LLM(sys.argv[1], tp_size=2) as llm:
            before = llm.generate("Hello", SamplingParams(max_tokens=4))
            if (pid := os.fork()) == 0:
                try:
                    llm.generate("Hello")
                except UsageError as error:
                    print("child:", error, flush=True)
                llm.close()
                sys.exit(7)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            assert llm.generate("Hello", SamplingParams(max_tokens=4)) == before
        print("parent:", code)
    """
    done = run_python("-c", program, str(model))
    assert done.returncode == 0, done.stderr
    child, parent = done.stdout.splitlines()
    assert "made this one by fork; create an LLM here" in child and parent == "parent: 7"


# Attributes as in vLLM; repr, dir and help.


def test_scored_sequences_may_be_arrays(llm):
    """Regression: an array raised ValueError."""
    expected = llm.score([TOKENS])
    for sequence in (np.array(TOKENS), torch.tensor(TOKENS), list(np.array(TOKENS))):
        assert llm.score([sequence]) == expected
    for sequences in (["Hello"], TOKENS, [[{"role": "user", "content": "Hello"}]]):
        with pytest.raises(UsageError, match="sequence 0"):
            llm.score(sequences)


def test_tensors_of_one_token_are_prompts(llm):
    """Regression: torch takes them for integers, so they became one prompt."""
    assert len(llm.generate([torch.tensor([5]), torch.tensor([6])], PARAMS)) == 2


def test_a_program_for_vllm_reads_prompts_and_outputs(llm):
    prompts, params = ["Hello", "The sky"], SamplingParams(max_tokens=4)
    results = llm.generate(prompts, sampling_params=params)
    assert [each.prompt for each in results] == prompts
    assert [each.outputs[0].text for each in results] == [each.text for each in results]
    assert [each.outputs[0].token_ids for each in results] == [each.tokens for each in results]
    assert results == llm.generate(prompts, params)
    assert [list(each.prompt_token_ids) for each in results] == [
        llm.get_tokenizer().encode(prompt) for prompt in prompts
    ]


def test_outputs_are_all_choices_of_a_request(llm):
    drawn = SamplingParams(max_tokens=4, n=3, temperature=1.0, seed=3)
    first, *others = llm.generate([TOKENS], sampling_params=drawn)
    assert [each.text for each in first.outputs] == [first.text, *(each.text for each in others)]
    assert [each.index for each in first.outputs] == [0, 1, 2]
    assert first.prompt is None and first.prompt_token_ids == tuple(TOKENS)


def test_prompt_of_chat_result_encodes_to_its_token_ids(llm):
    message = {"role": "user", "content": "Hello"}
    (answer,) = llm.chat([message], sampling_params=SamplingParams(max_tokens=2))
    encoded = llm.get_tokenizer().encode(answer.prompt, bos=False)
    assert tuple(encoded) == answer.prompt_token_ids and "Hello" in answer.prompt


def test_params_and_sampling_params_together_are_refused(llm):
    params = SamplingParams(max_tokens=2)
    with pytest.raises(UsageError, match="params and sampling_params"):
        llm.generate("Hello", params, sampling_params=params)


def test_reprs_show_settings_and_omit_unset_fields(model, llm):
    assert repr(SamplingParams(max_tokens=3, n=2)) == "SamplingParams(max_tokens=3, n=2)"
    assert repr(SamplingParams()) == "SamplingParams()"
    start = f"LLM({str(model)!r}, tp_size=1, dtype='float64', quant='none', device='cpu')"
    assert repr(llm) == start
    assert repr(llm.get_tokenizer()).endswith(f"Tokenizer(vocab_size={llm.args.vocab_size})")
    (completion,) = llm.generate([TOKENS], SamplingParams(max_tokens=1))
    assert repr(completion).startswith("Completion(index=0, text=")
    assert "None" not in repr(completion) and "outputs" not in repr(completion)


def test_dir_of_package_lists_only_public_names():
    names = [name for name in dir(parallel_llama) if not name.startswith("__")]
    assert sorted(names) == sorted(parallel_llama.__all__)


def test_help_lists_every_parameter_and_no_private_method():
    for public in (parallel_llama.LLM, SamplingParams):
        shown = pydoc.plain(pydoc.render_doc(public))
        parameters = list(inspect.signature(public).parameters)
        assert [name for name in parameters if f" {name}: " not in shown] == []
        methods = re.findall(r"^ \|  (\w+)\(", shown, re.MULTILINE)
        assert [name for name in methods if name.startswith("_") and name[:2] != "__"] == []


# Scores.


def test_a_score_is_the_log_softmax_of_the_full_logits(llm):
    (ours,) = llm.score([TOKENS])
    runner = ModelRunner(llm.args, make_plan(llm.args, 1), llm.engine.comm, llm.engine.runner.model)
    runner.reserve([1], len(TOKENS))
    hidden = runner.forward([Chunk(TOKENS, 0, [[0]], len(TOKENS))])
    logprobs = full_logits(runner, hidden).double().log_softmax(-1)
    expected = logprobs[:-1].gather(1, torch.tensor(TOKENS[1:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(ours, dtype=torch.float64), expected)


def test_a_single_token_has_nothing_to_score(llm):
    assert llm.score([[5], [5, 6]])[0] == []


@pytest.mark.parametrize("stride", [None, 100, 511])
def test_a_text_beyond_the_context_is_scored_in_windows(llm, stride):
    """A token's score is bit-identical to its score in the first window that contains the token."""
    context, tokens = llm.input_processor.max_seq_len, [5 + at * at % 97 for at in range(1200)]
    seen: list[int] = []
    (ours,) = llm.score([tokens], stride, seen.append)
    (expected,) = llm.score([tokens[:context]])
    start = 0
    while len(expected) < len(tokens) - 1:
        start += stride or context // 2
        (window,) = llm.score([tokens[start : start + context]])
        expected += window[len(expected) - start :]
    assert context == 512 and ours == expected
    assert seen[0] == context and sum(seen) == len(tokens)


@pytest.mark.parametrize("stride", [0, -1, 512, 2.5, True, "9"])
def test_a_stride_out_of_range_is_refused(llm, stride):
    """Regression: a float raised TypeError, and only for a text beyond the context."""
    with pytest.raises(UsageError, match=f"a stride of {stride!r} in a context of 512 .* 1 to 511"):
        llm.score([[5, 6]], stride)


def test_score_and_suspended_stream_do_not_affect_each_other(llm):
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    whole, scores = "".join(llm.stream("Hello", params)), llm.score([TOKENS * 8])
    pieces = llm.stream("Hello", params)
    begun = next(pieces)
    assert llm.score([TOKENS * 8]) == scores
    assert begun + "".join(pieces) == whole


def test_score_steps_the_stream_that_holds_the_kv_cache(model):
    """Regression: it was refused, and asked for a larger KV cache."""
    small = LLM(str(model), dtype="float64", kv_cache_bytes=50_000)
    room = small.engine.capacity.n_tokens
    assert room < small.input_processor.max_seq_len
    (whole,) = small.score([[5] * room])
    request = [5] * (room - 40), SamplingParams(max_tokens=40, ignore_eos=True)
    text = "".join(small.stream(*request))
    pieces = small.stream(*request)
    begun = next(pieces)
    assert small.score([[5] * room]) == [whole]
    assert begun + "".join(pieces) == text
    with pytest.raises(UsageError, match=rf"sequence 0: {room + 1} tokens,.* enlarge the KV cache"):
        small.score([[5] * (room + 1)])
    small.close()


# Streams.


def test_a_stream_that_is_left_early_leaves_the_model_usable(llm):
    params = SamplingParams(max_tokens=20)
    whole = "".join(llm.stream("Hello", params))
    pieces = llm.stream("Hello", params)
    next(pieces)
    pieces.close()
    assert "".join(llm.stream("Hello", params)) == whole


def test_interleaved_streams_match_single_streams(llm):
    prompts = ["Hello", "Good day to you", "A", "of the"]
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (9, 30, 1, 17)]
    asked = list(zip(prompts, params, strict=True))
    alone = ["".join(llm.stream(*each)) for each in asked]
    streams = [llm.stream(*each) for each in asked]
    together = [""] * len(asked)
    for pieces in zip_longest(*streams, fillvalue=""):
        together = [text + piece for text, piece in zip(together, pieces, strict=True)]
    assert together == alone


def shrink_kv_cache(llm: LLM) -> None:
    """Continues all requests with half the KV cache, as after the loss of a rank."""
    engine = llm.engine
    engine.capacity = replace(engine.capacity, n_blocks=(engine.capacity.n_blocks[0] // 2,))
    engine.resume(engine.runner, engine.capacity, engine.unfinished())


@pytest.fixture
def small(model: Path) -> Iterator[LLM]:
    with LLM(str(model), dtype="float64", kv_cache_bytes=200_000) as llm:
        yield llm


def long_and_short(llm: LLM) -> list[Request]:
    """A request that does not fit into half the KV cache, and one that fits."""
    n_tokens = llm.engine.capacity.n_tokens
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (n_tokens - 10, 20)]
    return llm.input_processor.requests([[5, 6]] * 2, params)


def test_call_raises_error_of_request_that_was_refused_in_another_calls_step(small):
    """Regression: the call ended as if the request were complete."""
    first, second = (small.run([request]) for request in long_and_short(small))
    next(first), next(second)
    shrink_kv_cache(small)
    assert len(list(second)[-1].completion.tokens) == 20
    with pytest.raises(UsageError, match="blocks of 16, but the KV cache has"):
        list(first)


def test_call_with_refused_request_finishes_its_other_requests_before_it_raises(small):
    """Regression: the other requests were cancelled, and their outputs were lost."""
    steps, found = small.run(long_and_short(small)), []
    next(steps)
    shrink_kv_cache(small)
    with pytest.raises(UsageError, match="blocks of 16, but the KV cache has"):
        for output in steps:
            found.append(output.completion)
    assert [(each.index, len(each.tokens)) for each in found if each] == [(1, 20)]


def test_generate_raises_as_soon_as_one_of_its_prompts_is_refused(small, monkeypatch):
    """Regression: it completed all other prompts first, and then returned none of them."""
    params = [request.params for request in long_and_short(small)]
    step, n_steps = small._step_for_all, []

    def shrink_after_one_step() -> None:
        step()
        n_steps.append(1)
        if len(n_steps) == 1:
            shrink_kv_cache(small)

    monkeypatch.setattr(small, "_step_for_all", shrink_after_one_step)
    with pytest.raises(UsageError, match="blocks of 16, but the KV cache has"):
        small.generate([[5, 6]] * 2, params)
    assert len(n_steps) < 20  # as many as the other prompt takes
    assert small.engine.idle


def test_closing_one_stream_does_not_affect_another(llm):
    params = SamplingParams(max_tokens=25, ignore_eos=True)
    whole = "".join(llm.stream("Hello", params))
    left, read = llm.stream("Good day", params), llm.stream("Hello", params)
    next(left)
    begun = next(read)
    left.close()
    assert begun + "".join(read) == whole


def test_generate_and_suspended_stream_do_not_affect_each_other(llm):
    params = SamplingParams(max_tokens=25, ignore_eos=True)
    whole, alone = "".join(llm.stream("Hello", params)), llm.generate(["A", [5, 6]], PARAMS)
    pieces = llm.stream("Hello", params)
    begun = next(pieces)
    assert llm.generate(["A", [5, 6]], PARAMS) == alone
    assert not llm.engine.idle
    assert begun + "".join(pieces) == whole


def test_stream_of_several_choices_is_refused(llm):
    with pytest.raises(UsageError, match="n=2"):
        next(llm.stream("Hello", SamplingParams(n=2)))


# Completions.


def test_choices_are_adjacent_and_distinct(llm):
    params = SamplingParams(max_tokens=12, temperature=1.5, seed=5, n=3, ignore_eos=True)
    completions = llm.generate(["Hello", [5, 6]], params)
    assert [(each.index, each.choice) for each in completions] == [
        (index, choice) for index in range(2) for choice in range(3)
    ]
    assert len({each.tokens for each in completions[:3]}) == 3
    first = SamplingParams(max_tokens=12, temperature=1.5, seed=5, ignore_eos=True)
    assert llm.generate(["Hello"], first)[0].tokens == completions[0].tokens


def test_empty_generate_and_score_return_empty_lists(llm):
    assert llm.generate([]) == [] and llm.score([]) == []


def test_a_prompt_and_its_answer_may_fill_the_context_exactly(llm):
    n_prompt = llm.input_processor.max_seq_len - 2
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    (completion,) = llm.generate([[5] * n_prompt], params)
    assert len(completion.tokens) == 2
    with pytest.raises(UsageError, match=r"prompt 0: .*ask for at most 1 new token,"):
        llm.generate([[5] * (n_prompt + 1)], params)


@pytest.mark.parametrize("block_size", [1, 64])
@pytest.mark.parametrize("max_drafts", [0, 8])
def test_block_size_and_draft_tokens_do_not_change_output(model, llm, block_size, max_drafts):
    prompts = ["Hello", [5, 6, 7] * 20, TOKENS]
    params = SamplingParams(max_tokens=40, ignore_eos=True, logprobs=1)
    other = LLM(
        str(model),
        dtype="float64",
        kv_cache_bytes=CACHE_BYTES,
        block_size=block_size,
        max_drafts=max_drafts,
    )
    ours, theirs = llm.generate(prompts, params), other.generate(prompts, params)
    assert [(c.tokens, c.text) for c in ours] == [(c.tokens, c.text) for c in theirs]
    other.close()


def test_step_without_draft_tokens_yields_one_token(model):
    """The text repeats one token, so prompt lookup can draft every token."""
    params = SamplingParams(max_tokens=20, ignore_eos=True, logit_bias={7: 100.0})
    lengths = []
    for max_drafts in (0, 8):
        llm = LLM(str(model), kv_cache_bytes=CACHE_BYTES, max_drafts=max_drafts)
        requests = llm.input_processor.requests([[7] * 30], params)
        lengths.append({len(progress.tokens) for progress in llm.run(requests)})
        llm.close()
    assert lengths[0] == {1} and max(lengths[1]) > 1


# Errors.


def test_cache_smaller_than_one_block_is_refused_before_reading(model):
    read: list[int] = []
    with pytest.raises(
        UsageError, match=r"a KV cache of 1000 bytes is too small: .* 16 tokens takes \d{4,} bytes"
    ):
        LLM(str(model), dtype="float64", kv_cache_bytes=1000, on_bytes=read.append)
    assert not read


def test_unknown_kv_cache_dtype_is_refused_with_valid_choices(model):
    with pytest.raises(UsageError, match=r"kv_cache_dtype='int4': use one of auto, .*int8, fp8"):
        LLM(str(model), kv_cache_dtype="int4")


def test_int8_kv_cache_capacity_matches_its_row_size(model, llm):
    options = {"dtype": "float64", "kv_cache_bytes": CACHE_BYTES}
    with LLM(str(model), **options, kv_cache_dtype="int8") as narrow:
        head_dim = narrow.args.head_dim
        ratio = narrow.engine.capacity.n_tokens / llm.engine.capacity.n_tokens
        assert ratio == pytest.approx(head_dim * 8 / (head_dim + 4), rel=0.01)
        assert narrow.engine.runner.caches[0].k.dtype == torch.int8
        assert narrow.generate(["Hello"], PARAMS)[0].tokens


def test_request_too_large_for_cache_is_refused_before_any_step(model):
    small = LLM(str(model), dtype="float64", kv_cache_bytes=50_000)
    n_tokens = small.engine.capacity.n_tokens
    params = SamplingParams(max_tokens=n_tokens)
    with pytest.raises(UsageError, match=f"the KV cache has {n_tokens // 16}; ask for at most"):
        small.generate(["Hello", "and goodbye"], params)
    assert small.engine.times.n_steps == 0 and small.engine.idle
    small.close()


def test_model_is_usable_after_nan(llm):
    before = llm.generate(["Hello"], PARAMS)
    fail_once(llm)
    assert llm.generate(["Hello"], PARAMS) == before


def test_open_stream_raises_after_another_call_fails(llm):
    """Neither closing nor reading such a stream hangs."""
    params = SamplingParams(max_tokens=25, ignore_eos=True)
    read, left = (llm.run(llm.input_processor.requests(["Hello"], params)) for _ in range(2))
    next(read), next(left)
    fail_once(llm)
    left.close()
    with pytest.raises(RuntimeError, match="another run failed"):
        list(read)


def test_model_is_usable_after_keyboard_interrupt_in_step(llm, monkeypatch):
    """Regression: after Ctrl-C in a notebook, the next call found an unfinished step."""
    before = llm.generate(["Hello"], PARAMS)
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner, "step", interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["Hello"], PARAMS)
    assert llm.generate(["Hello"], PARAMS) == before


def test_a_closed_llm_leaves_no_process_and_its_tokenizer_works(model):
    """Regression: the tokenizer process ended only when the LLM object was deleted."""
    before = set(psutil.Process().children(recursive=True))
    params = SamplingParams(max_tokens=3, grammar=Grammar("regex", "[a-z]+"))
    with LLM(str(model), kv_cache_bytes=CACHE_BYTES, tp_size=2) as llm:
        llm.chat([{"role": "user", "content": "Hello"}], params)
        ids = llm.input_processor.tokenizer.encode("Hello")
    left = set(psutil.Process().children(recursive=True)) - before
    assert not [each for each in left if "parallel_llama" in " ".join(each.cmdline())]
    assert llm.input_processor.tokenizer.encode("Hello") == ids
