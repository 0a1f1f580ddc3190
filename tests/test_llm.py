"""The class that users hold: alone, and in a script of theirs under torchrun."""

import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

import msgspec
import pytest
import torch
from llm_program import PARAMS, fail_once
from tiny_folder import write_chat_folder

from parallel_llama import LLM, SamplingParams
from parallel_llama.errors import UsageError
from parallel_llama.plan import make_plan
from parallel_llama.request import Completion
from parallel_llama.runner import Piece, Runner

ROOT = Path(__file__).parent.parent
TOKENS = [5, 17, 3, 200, 42, 42, 9]
CACHE_BYTES = 4 << 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_folder(tmp_path_factory.mktemp("models") / "chat")


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    llm = LLM(str(model), dtype="float64", kv_cache_bytes=CACHE_BYTES)
    yield llm
    llm.close()


@pytest.fixture(autouse=True)
def nothing_is_left(llm: LLM) -> Iterator[None]:
    yield
    assert llm.engine.idle and llm.engine.paused
    assert llm.engine.pool.n_used == 0 and not llm._runs


@pytest.mark.parametrize("nproc", [2, 3])
def test_a_script_under_torchrun_gets_the_same_completions_on_every_rank(
    model: Path, llm: LLM, nproc: int
) -> None:
    """Beside that, rank 0 fails, is refused and leaves streams early: nobody hangs."""
    torchrun = ("torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}")
    program = str(ROOT / "tests" / "llm_program.py")
    command = [sys.executable, "-m", *torchrun, program, "script", str(model)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=90)
    assert done.returncode == 0, done.stderr
    lines = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert sorted(lines) == [str(rank) for rank in range(nproc)]
    alone = llm.generate(["Hello", [5, 6, 7]], PARAMS)
    for line in lines.values():
        completions = msgspec.json.decode(line, type=list[Completion])
        assert [(c.text, c.tokens) for c in completions] == [(c.text, c.tokens) for c in alone]


# Scores.


def test_a_score_is_the_log_softmax_of_the_full_logits(llm: LLM) -> None:
    (ours,) = llm.score([TOKENS])
    runner = Runner(llm.args, make_plan(llm.args, 1), llm.comm, llm.runner.model)
    runner.reserve(1, len(TOKENS))
    hidden = runner.forward([Piece(TOKENS, 0, [0], len(TOKENS))])
    logprobs = runner.full_logits(hidden).double().log_softmax(-1)
    expected = logprobs[:-1].gather(1, torch.tensor(TOKENS[1:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(ours, dtype=torch.float64), expected)


def test_a_single_token_has_nothing_to_score(llm: LLM) -> None:
    assert llm.score([[5], [5, 6]])[0] == []


def test_a_score_while_a_stream_is_suspended_disturbs_neither(llm: LLM) -> None:
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    whole, scores = "".join(llm.stream("Hello", params)), llm.score([TOKENS * 8])
    pieces = llm.stream("Hello", params)
    begun = next(pieces)
    assert llm.score([TOKENS * 8]) == scores
    assert begun + "".join(pieces) == whole


def test_a_score_that_a_suspended_stream_leaves_no_room_for_is_refused(model: Path) -> None:
    small = LLM(str(model), dtype="float64", kv_cache_bytes=50_000)
    room = small.engine.capacity.n_tokens
    assert room < small.intake.max_seq_len
    (whole,) = small.score([[5] * room])
    pieces = small.stream([5] * (room - 40), SamplingParams(max_tokens=40, ignore_eos=True))
    next(pieces)
    with pytest.raises(UsageError, match=rf"sequence 0: {room} tokens .* raise kv_cache_bytes"):
        small.score([[5] * room])
    pieces.close()
    assert small.score([[5] * room]) == [whole]
    small.close()


# Streams.


def test_a_stream_that_is_left_early_leaves_the_model_usable(llm: LLM) -> None:
    params = SamplingParams(max_tokens=20)
    whole = "".join(llm.stream("Hello", params))
    pieces = llm.stream("Hello", params)
    next(pieces)
    pieces.close()
    assert "".join(llm.stream("Hello", params)) == whole


def test_streams_that_are_read_in_turns_are_what_each_is_alone(llm: LLM) -> None:
    prompts = ["Hello", "Good day to you", "A", "of the"]
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (9, 30, 1, 17)]
    asked = list(zip(prompts, params, strict=True))
    alone = ["".join(llm.stream(*each)) for each in asked]
    streams = [llm.stream(*each) for each in asked]
    together = [""] * len(asked)
    for pieces in zip_longest(*streams, fillvalue=""):
        together = [text + piece for text, piece in zip(together, pieces, strict=True)]
    assert together == alone


def test_one_of_several_streams_can_be_left(llm: LLM) -> None:
    params = SamplingParams(max_tokens=25, ignore_eos=True)
    whole = "".join(llm.stream("Hello", params))
    left, read = llm.stream("Good day", params), llm.stream("Hello", params)
    next(left)
    begun = next(read)
    left.close()
    assert begun + "".join(read) == whole


def test_completions_while_a_stream_is_suspended_are_the_same(llm: LLM) -> None:
    params = SamplingParams(max_tokens=25, ignore_eos=True)
    whole, alone = "".join(llm.stream("Hello", params)), llm.generate(["A", [5, 6]], PARAMS)
    pieces = llm.stream("Hello", params)
    begun = next(pieces)
    assert llm.generate(["A", [5, 6]], PARAMS) == alone
    assert llm.engine.paused and not llm.engine.idle
    assert begun + "".join(pieces) == whole


def test_a_stream_is_one_text(llm: LLM) -> None:
    with pytest.raises(UsageError, match="n=2"):
        next(llm.stream("Hello", SamplingParams(n=2)))


# Completions.


def test_choices_come_side_by_side_and_each_is_another(llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, temperature=1.5, seed=5, n=3, ignore_eos=True)
    completions = llm.generate(["Hello", [5, 6]], params)
    assert [(each.index, each.choice) for each in completions] == [
        (index, choice) for index in range(2) for choice in range(3)
    ]
    assert len({each.tokens for each in completions[:3]}) == 3
    first = SamplingParams(max_tokens=12, temperature=1.5, seed=5, ignore_eos=True)
    assert llm.generate(["Hello"], first)[0].tokens == completions[0].tokens


def test_nothing_asked_is_nothing_done(llm: LLM) -> None:
    assert llm.generate([]) == [] and llm.score([]) == []


def test_a_prompt_and_its_answer_may_fill_the_context_exactly(llm: LLM) -> None:
    n_prompt = llm.intake.max_seq_len - 2
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    (completion,) = llm.generate([[5] * n_prompt], params)
    assert len(completion.tokens) == 2
    with pytest.raises(UsageError, match=r"prompt 0: .*lower max_tokens to 1"):
        llm.generate([[5] * (n_prompt + 1)], params)


@pytest.mark.parametrize("block_size", [1, 64])
@pytest.mark.parametrize("max_drafts", [0, 8])
def test_blocks_and_guesses_change_nothing(
    model: Path, llm: LLM, block_size: int, max_drafts: int
) -> None:
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


def test_without_guesses_a_step_gives_one_token(model: Path) -> None:
    """The same text over and over, of which everything can be guessed."""
    params = SamplingParams(max_tokens=20, ignore_eos=True, logit_bias={7: 100.0})
    lengths = []
    for max_drafts in (0, 8):
        llm = LLM(str(model), kv_cache_bytes=CACHE_BYTES, max_drafts=max_drafts)
        requests = llm.intake.requests([[7] * 30], params)
        lengths.append({len(progress.tokens) for progress in llm.run(requests)})
        llm.close()
    assert lengths[0] == {1} and max(lengths[1]) > 1


# Errors.


def test_a_cache_for_not_even_one_block_is_refused_before_weights_are_read(model: Path) -> None:
    read: list[int] = []
    with pytest.raises(UsageError, match=r"kv_cache_bytes=1000 .* 16 tokens takes \d{4,} bytes"):
        LLM(str(model), dtype="float64", kv_cache_bytes=1000, on_bytes=read.append)
    assert not read


def test_a_request_that_the_cache_cannot_hold_is_refused_before_any_begins(model: Path) -> None:
    small = LLM(str(model), dtype="float64", kv_cache_bytes=50_000)
    n_tokens = small.engine.capacity.n_tokens
    params = SamplingParams(max_tokens=n_tokens)
    with pytest.raises(UsageError, match=f"the KV cache has {n_tokens // 16}; lower max_tokens to"):
        small.generate(["Hello", "and goodbye"], params)
    assert small.engine.times.n_steps == 0 and small.engine.idle
    small.close()


def test_after_numbers_that_are_none_the_model_can_be_asked_again(llm: LLM) -> None:
    before = llm.generate(["Hello"], PARAMS)
    fail_once(llm)
    assert llm.generate(["Hello"], PARAMS) == before


def test_a_stream_hears_that_it_ended_when_another_failed(llm: LLM) -> None:
    """Left or read on, it does not wait for what never comes."""
    params = SamplingParams(max_tokens=25, ignore_eos=True)
    read, left = (llm.run(llm.intake.requests(["Hello"], params)) for _ in range(2))
    next(read), next(left)
    fail_once(llm)
    left.close()
    with pytest.raises(RuntimeError, match="another run failed"):
        list(read)


def test_an_interruption_in_the_middle_of_a_step_leaves_the_model_usable(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in a notebook: the next call found a step that was never finished."""
    before = llm.generate(["Hello"], PARAMS)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(llm.runner, "logits", interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["Hello"], PARAMS)
    assert llm.generate(["Hello"], PARAMS) == before
