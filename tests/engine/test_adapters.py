"""Requests with LoRA adapters in the engine: many adapters in one batch, and the prefix cache."""

import mmap
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from adapters import merged_weights, write_adapter, write_merged
from mixes import make_engine
from parity_steps import load_runner
from recorded import Recorded
from safetensors.torch import load_file
from thread_ranks import ThreadComm, run_on_threads
from tiny_folder import write_chat_folder
from torch import Tensor

from parallel_llama import LLM, AsyncLLM, SamplingParams, UsageError
from parallel_llama.checkpoint.reading import open_checkpoint
from parallel_llama.config.adapter import load_served_adapter
from parallel_llama.config.layouts import load_model_args
from parallel_llama.dtypes import Precision
from parallel_llama.engine import rank_rpc
from parallel_llama.engine.integrity import IntegrityCheck
from parallel_llama.engine.model_runner import ModelRunner
from parallel_llama.engine.step_buffer import Chunk
from parallel_llama.files.model_files import find_model
from parallel_llama.model.adapters import _layers, low_rank_matrices
from parallel_llama.ops import AdapterRoom, CPUOps, TorchOps
from parallel_llama.parallel.collectives import Solo
from parallel_llama.parallel.failures import IntegrityError
from parallel_llama.plan import make_plan
from parallel_llama.request import Completion, Request

LINEAR = r".*\.\w+_proj"
N_ADAPTERS, N_SEQUENCES = 8, 32
PARAMS = SamplingParams(max_tokens=6, logprobs=2, ignore_eos=True)
SETTINGS = {"dtype": "float32", "kv_cache_bytes": 4 << 20}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_folder(tmp_path_factory.mktemp("base") / "hf")


@pytest.fixture(scope="module")
def adapters(base: Path) -> dict[str, str]:
    """Eight adapters of different ranks and modules."""
    found = {}
    for n in range(N_ADAPTERS):
        names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        names = names[: n + 1] if n % 2 else names[n:]
        folder = write_adapter(
            base.parent / f"adapter{n}", base, rf".*\.({'|'.join(names)})",
            lambda _, n=n: n + 1, seed=n, r=n + 1, target_modules=names,
        )  # fmt: skip
        found[f"adapter{n}"] = str(folder)
    return found


@pytest.fixture(scope="module")
def llm(base: Path, adapters: dict[str, str]) -> Iterator[LLM]:
    with LLM(str(base), adapters=adapters, **SETTINGS) as llm:
        yield llm


def prompts() -> list[list[int]]:
    return [[(5 * at + n) % 190 + 3 for at in range(3 + 3 * n)] for n in range(N_SEQUENCES)]


def names() -> list[str | None]:
    """A quarter of the sequences have no adapter."""
    return [None if n % 4 == 0 else f"adapter{n % N_ADAPTERS}" for n in range(N_SEQUENCES)]


def same(found: Completion, expected: Completion) -> bool:
    return (found.tokens, found.logprobs) == (expected.tokens, expected.logprobs)


def test_batch_with_8_adapters_has_same_bits_as_separate_runs(llm, base):
    """Sequences without an adapter have the bits of an LLM without adapters."""
    together = llm.generate(prompts(), PARAMS, adapter=names())
    alone = [
        llm.generate(prompt, PARAMS, adapter=name)[0]
        for prompt, name in zip(prompts(), names(), strict=True)
    ]
    assert all(map(same, together, alone))
    with LLM(str(base), **SETTINGS) as plain:
        without = plain.generate(prompts(), PARAMS)
    equal = list(map(same, together, without))
    assert equal == [name is None for name in names()]


def test_steps_with_and_without_adapters_have_one_recording_each(llm, adapters):
    """A recording is replayed for any adapter, also for one loaded later; see test_low_rank.

    Regression: steps with adapters ran operator by operator and took 1.6 to 2.9 times as long.
    """
    calls = llm.engine.runner._calls
    llm.generate([[5, 6, 7]] * 3, PARAMS)
    plain = calls._steps[3, False]
    assert plain is not None
    llm.generate([[5, 6, 7]] * 3, PARAMS, adapter=[None, "adapter1", None])
    recorded = calls._steps[3, True]
    assert recorded is not None
    llm.load_adapter("new", adapters["adapter6"])
    llm.generate([[5, 6, 7]] * 3, PARAMS, adapter=["new", "adapter2", "adapter7"])
    llm.unload_adapter("new")
    llm.generate([[5, 6, 7]] * 3, PARAMS)
    assert calls._steps[3, True] is recorded and calls._steps[3, False] is plain


def test_prefill_computes_all_adapters_of_a_layer_in_one_call(llm, monkeypatch):
    """Regression: each adapter had products of its own, which took 1.4 times as long."""
    calls = []

    def counted(self: CPUOps, y: Tensor, x: Tensor, adapters: AdapterRoom, layer: int) -> None:
        calls.append((layer, len(x)))
        compute(self, y, x, adapters, layer)

    compute = CPUOps.add_low_ranks_
    monkeypatch.setattr(CPUOps, "add_low_ranks_", counted)
    adapter = ["adapter1", None, "adapter2", "adapter3"]
    llm.generate([[n] * 20 for n in range(4)], SamplingParams(max_tokens=1), adapter=adapter)
    assert calls and len(set(calls)) == len(calls)
    assert {n_rows for _, n_rows in calls} == {80, 4}


def test_different_adapters_share_no_prefix_cache_blocks(llm):
    """The name of an adapter must not match an equal cache salt either."""
    prompt, one = [9] * 50, SamplingParams(max_tokens=1)
    salted = SamplingParams(max_tokens=1, cache_salt="adapter2")

    def n_cached(params: SamplingParams, adapter: str | None) -> int:
        return llm.generate(prompt, params, adapter=adapter)[0].n_cached_tokens

    for params, name in ((one, None), (one, "adapter1"), (one, "adapter2"), (salted, None)):
        assert n_cached(params, name) == 0
        assert n_cached(params, name) == 48


def test_drafts_and_scored_prompts_use_the_adapter(llm, base, adapters, tmp_path):
    """Compares with the merged weights; the prompt repeats itself, so that there are drafts."""
    ranks = {name: load_file(f"{folder}/adapter_model.safetensors") for name, folder in
             adapters.items()}  # fmt: skip
    n_rank = next(t for n, t in ranks["adapter4"].items() if "lora_A" in n).shape[0]
    weights = merged_weights(base, Path(adapters["adapter4"]), lambda _: 8 / n_rank)
    merged = write_merged(tmp_path / "merged", base, weights)
    params = SamplingParams(max_tokens=24, logprobs=0, prompt_logprobs=0, ignore_eos=True)
    n_before = llm.engine.statistics().n_draft_tokens
    (found,) = llm.generate([4, 5, 6] * 6, params, adapter="adapter4")
    assert llm.engine.statistics().n_draft_tokens > n_before
    with LLM(str(merged), **SETTINGS) as other:
        (expected,) = other.generate([4, 5, 6] * 6, params)
    assert found.tokens == expected.tokens
    for ours, theirs in (
        (found.logprobs, expected.logprobs),
        (found.prompt_logprobs[1:], expected.prompt_logprobs[1:]),
    ):
        wanted = torch.tensor([each.logprob for each in theirs])
        got = torch.tensor([each.logprob for each in ours])
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-3)


def test_generate_stream_and_chat_accept_an_adapter(llm):
    expected = llm.generate("Once", PARAMS, adapter="adapter3")[0].text
    assert expected != llm.generate("Once", PARAMS)[0].text
    assert "".join(llm.stream("Once", PARAMS, adapter="adapter3")) == expected
    chat = [{"role": "user", "content": "Once"}]
    replies = [llm.chat(chat, PARAMS, adapter=name)[0].tokens for name in (None, "adapter3")]
    assert replies[0] != replies[1]


def test_score_with_adapter_equals_prompt_logprobs(llm):
    tokens, params = prompts()[20], SamplingParams(max_tokens=1, prompt_logprobs=0)
    scores = []
    for name in (None, "adapter3", "adapter6"):
        (completion,) = llm.generate(tokens, params, adapter=name)
        scores.append([entry.logprob for entry in completion.prompt_logprobs[1:]])
        assert llm.score([tokens], adapter=name) == [scores[-1]]
    assert scores[0] != scores[1] != scores[2]
    with pytest.raises(UsageError, match="'adapter9' is not loaded"):
        llm.score([tokens], adapter="adapter9")


async def test_async_llm_takes_an_adapter(llm):
    expected = llm.generate("Once", PARAMS, adapter="adapter3")[0].text
    engine = AsyncLLM(llm)
    try:
        (completion,) = await engine.generate(["Once"], PARAMS, adapter="adapter3")
        with pytest.raises(UsageError, match="'other' is not loaded"):
            await engine.submit("Once", PARAMS, adapter="other")
    finally:
        await engine.close()
    assert completion.text == expected


def test_an_unknown_adapter_is_refused_before_anything_runs(llm):
    with pytest.raises(UsageError, match="'adapter9' is not loaded; use adapter0, adapter1"):
        llm.generate([[5], [6]], PARAMS, adapter=[None, "adapter9"])
    with pytest.raises(UsageError, match="2 prompts and 3 adapters; give one for each"):
        llm.generate([[5], [6]], PARAMS, adapter=[None, None, "adapter1"])
    assert llm.engine.idle


@pytest.mark.parametrize(
    ("adapters", "expected"),
    [
        ({"": "x"}, "adapters has the name ''"),
        ({"a\n": "x"}, "printable characters"),
        ({"a": 3}, r"adapters\['a'\]=3: use the path"),
        (["a"], "use a dict of folders by name"),
        ({"a": "nowhere"}, "adapter 'a': nowhere: not a folder"),
    ],
)
def test_invalid_adapters_argument_is_refused(base, adapters, expected):
    with pytest.raises(UsageError, match=expected):
        LLM(str(base), adapters=adapters)


def test_memory_of_adapters_counts_as_weights(llm, base):
    with LLM(str(base), **SETTINGS) as plain:
        before = plain.statistics.weight_bytes[0]
    held = {
        part.data_ptr(): part.nbytes
        for block in llm.engine.runner.model.layers.values()
        for layer in (
            block.attention.wqkv, block.attention.wo, block.feed_forward.w13, block.feed_forward.w2
        )
        for pairs in layer.low_ranks.values()
        for pair in pairs
        for part in (pair.a, pair.b)
    }  # fmt: skip
    assert llm.statistics.weight_bytes[0] == before + sum(held.values())


class PagedOps(TorchOps):
    """torch's operators, called with block tables as on a GPU."""

    is_paged = True


def tokens_of(base: Path, adapters: dict[str, str], ops: TorchOps, recorder: Recorded) -> object:
    """The tokens of requests with and without adapters; their steps are recorded where possible."""
    files = find_model(str(base))
    args = load_model_args(files)
    runner = ModelRunner.load(
        args, open_checkpoint(files, args), make_plan(args, 1), Solo(),
        precision=Precision.plain("float64"), device=torch.device("cpu"), ops=ops,
    )  # fmt: skip
    for name in ("adapter1", "adapter4"):
        runner.load_adapter(name, load_served_adapter(Path(adapters[name]), args))
    engine, found = make_engine(runner), {}
    runner.record(recorder)
    for names in ((None, "adapter1", "adapter4", None), (None, None)):
        for index, name in enumerate(names):
            params = SamplingParams(max_tokens=9, temperature=index % 2, ignore_eos=True)
            prompt = (5 + index, 9, 11)
            engine.submit(Request(index, prompt, params, 7, frozenset(), adapter=name))
        while not engine.idle:
            for output in engine.step():
                found[names, output.index] = [*found.get((names, output.index), []), output.tokens]
    return found


def test_paged_steps_with_adapters_replay_no_graph(base, adapters):
    """Covers block tables, sampling on the device, and steps launched before tokens are read."""
    recorder = Recorded()
    paged = tokens_of(base, adapters, PagedOps(), recorder)
    assert 0 < recorder.n_replays < 10  # only the steps of the requests without adapters
    assert paged == tokens_of(base, adapters, TorchOps(), Recorded())


def test_integrity_check_finds_a_flipped_bit_in_an_adapter(llm):
    check = IntegrityCheck(llm.engine.runner.model, (), Solo(), exact=True)
    check.compare_memory()
    pair = llm.engine.runner.model.layers[1].attention.wqkv.low_ranks["adapter3"][1]
    pair.b[2, 1] *= -1
    with pytest.raises(IntegrityError, match=r"B 1 for layers\.1\.wqkv of adapter 'adapter3' has"):
        check.compare_memory()
    pair.b[2, 1] *= -1


def test_integrity_check_holds_no_memory_of_an_unloaded_adapter(base, adapters):
    """Regression: the check held it until its rotation over all weights had ended."""
    with LLM(str(base), adapters=adapters, **SETTINGS, integrity_check=True) as llm:
        check = llm.engine.runner.integrity
        for stops_at_adapter in (False, True):
            llm.load_adapter("new", adapters["adapter2"])
            held = [weakref.ref(check._stored[name]) for name in check._stored if "'new'" in name]
            check._rotation = iter(())
            n_parts = sum(stored.n_parts for stored in check._stored.values())
            for _ in range(n_parts if stops_at_adapter else 1):
                check._compare_part()
            llm.unload_adapter("new")
            assert held and not any(each() for each in held)
            check._compare_part()


def test_adapters_add_no_collectives_to_a_step(base, adapters):
    """The low-rank product of a row-parallel layer is part of its partial sum."""

    def counts(comm: ThreadComm, name: str | None) -> object:
        runner = load_runner(comm, base, 16)
        loaded = load_served_adapter(Path(adapters["adapter0"]), runner.args)
        runner.load_adapter("adapter0", loaded)
        comm.counts.clear()
        runner.forward([Chunk([5, 6, 7], 0, [[0]], 3, name)])
        return dict(comm.counts)

    assert run_on_threads(2, counts, None) == run_on_threads(2, counts, "adapter0")


def test_an_adapter_is_loaded_and_unloaded_while_requests_run(llm, adapters):
    """A name can be reused for other weights, which find no cached blocks of the old weights."""
    prompt = [8] * 40

    def answer(name: str | None) -> Completion:
        return llm.generate(prompt, PARAMS, adapter=name)[0]

    expected = {name: answer(name) for name in ("adapter2", "adapter7", None)}
    running = llm.run(llm.input_processor.requests([[7, 8]], SamplingParams(max_tokens=30)))
    next(running)
    for name in ("adapter2", "adapter7"):
        llm.load_adapter("new", adapters[name])
        assert same(answer("new"), expected[name])
        assert same(answer(None), expected[None])
        llm.unload_adapter("new")
        with pytest.raises(UsageError, match="'new' is not loaded"):
            answer("new")
    assert len(list(running)[-1].completion.tokens) == 30
    assert not any("new" in layer.low_ranks for _, layer in _layers(llm.engine.runner.model))


def test_an_adapter_is_not_unloaded_while_a_text_is_scored_with_it(llm, adapters):
    """Regression: windows after the first had log-probabilities of the model without it."""
    n_context = llm.input_processor.max_seq_len
    text = [(7 * at) % 190 + 3 for at in range(n_context + 50)]
    llm.load_adapter("new", adapters["adapter2"])
    counts: list[int] = []

    def unload(n_tokens: int) -> None:
        counts.append(n_tokens)
        with pytest.raises(UsageError, match="requests use the adapter 'new'; try again"):
            llm.unload_adapter("new")

    assert llm.score([text], None, unload, adapter="new") == llm.score([text], adapter="adapter2")
    assert len(counts) == 2
    llm.unload_adapter("new")


def test_unloaded_adapters_free_their_memory(llm, base):
    """Loads and unloads an adapter of 0.7 MB 50 times."""
    folder = write_adapter(
        base.parent / "large", base, LINEAR, lambda _: 96, r=96, target_modules="all-linear"
    )
    runner = llm.engine.runner

    def load_and_drop() -> int:
        """Returns: the bytes of the adapter."""
        llm.load_adapter("large", str(folder))
        llm.generate([[5, 6]] * 2, SamplingParams(max_tokens=3, ignore_eos=True), adapter="large")
        n_bytes = sum(each.nbytes for name, each in low_rank_matrices(runner.model) if
                      name.endswith("'large'"))  # fmt: skip
        llm.unload_adapter("large")
        return n_bytes

    n_bytes, before = load_and_drop(), resident_bytes()
    for _ in range(50):
        load_and_drop()
    assert n_bytes > 600_000 and resident_bytes() < before + 20 * n_bytes
    assert len(runner._adapter_addresses) == len(runner.adapters) == N_ADAPTERS


def resident_bytes() -> int:
    """The memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_invalid_adapter_loads_and_unloads_are_refused(llm, base, adapters):
    folder = adapters["adapter1"]
    with pytest.raises(UsageError, match="'adapter1' is loaded already; unload it first"):
        llm.load_adapter("adapter1", folder)
    with pytest.raises(UsageError, match="adapter 'new': nowhere: not a folder"):
        llm.load_adapter("new", "nowhere")
    with pytest.raises(UsageError, match="use a string of 1 to 256"):
        llm.load_adapter("", folder)
    with pytest.raises(UsageError, match="'new' is not loaded"):
        llm.unload_adapter("new")
    requests = llm.input_processor.requests([[5, 6]], SamplingParams(max_tokens=9), "adapter1")
    running = llm.run(requests)
    next(running)
    with pytest.raises(UsageError, match="requests use the adapter 'adapter1'; try again"):
        llm.unload_adapter("adapter1")
    assert list(running)[-1].completion is not None
    refusal = pytest.raises(UsageError, match="adapters cannot be changed with elastic")
    with LLM(str(base), elastic=True, **SETTINGS) as elastic, refusal:
        elastic.load_adapter("new", folder)


@pytest.mark.parametrize("is_missing", [False, True])
def test_ranks_wait_at_a_barrier_for_a_rank_that_reads_an_adapter(base, adapters, is_missing):
    """Regression: they waited in an all_gather, where a rank that reads for long is late."""
    folder = "nowhere" if is_missing else adapters["adapter0"]

    def calls_of(comm: ThreadComm) -> list[str]:
        engine, calls = make_engine(load_runner(comm, base, 16)), list[str]()

        def record(name: str, call: Callable[..., object], *args: object) -> object:
            calls.append(name)
            return call(*args)

        for name in ("keepalive", "barrier", "all_gather"):
            setattr(comm, name, partial(record, name, getattr(comm, name)))
        rank_rpc._load_adapter(engine, "new", folder)
        return calls

    for *keepalives, barrier, all_gather in run_on_threads(2, calls_of):
        assert (barrier, all_gather) == ("barrier", "all_gather")
        assert {*keepalives} == (set() if is_missing else {"keepalive"})


@pytest.mark.parametrize("is_missing", [False, True])
def test_adapter_is_loaded_on_all_ranks_or_on_none(base, adapters, monkeypatch, is_missing):
    """If one rank cannot read the folder, rank 0 raises an error and all ranks continue."""
    own = threading.local()
    monkeypatch.setattr(rank_rpc, "expanded", lambda folder: own.parent / Path(folder).name)

    def serve(comm: ThreadComm) -> tuple[object, object]:
        own.parent = base / "nowhere" if is_missing and comm.rank == 1 else base.parent
        engine, refused = make_engine(load_runner(comm, base, 16)), ""
        if comm.rank:
            rank_rpc.serve_rank(engine)
        else:
            try:
                rank_rpc.load_adapter(engine, "new", adapters["adapter1"])
            except UsageError as error:
                refused = str(error)
            rank_rpc.close(engine)
        layers = [layer for _, layer in _layers(engine.runner.model)]
        return refused, ([*engine.runner.adapters], any("new" in each.low_ranks for each in layers))

    (refused, _), *others = found = run_on_threads(3, serve)
    loaded = ([], False) if is_missing else (["new"], True)
    assert [each for _, each in found] == [loaded] * 3 and not any(each for each, _ in others)
    assert bool(refused) == is_missing
    assert not is_missing or "cannot be read on rank 1, or its files differ there" in refused
