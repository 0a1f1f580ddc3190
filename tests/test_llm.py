"""The class that users hold: alone, and in a script of theirs under torchrun."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from llm_program import PARAMS
from tiny_folder import write_chat_folder

from parallel_llama import LLM, SamplingParams
from parallel_llama.cache import Span
from parallel_llama.errors import UsageError
from parallel_llama.request import Completion
from parallel_llama.runner import Piece

ROOT = Path(__file__).parent.parent
TOKENS = [5, 17, 3, 200, 42, 42, 9]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_folder(tmp_path_factory.mktemp("models") / "chat")


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    llm = LLM(str(model), dtype="float64")
    yield llm
    llm.close()


@pytest.mark.parametrize("nproc", [2, 3])
def test_a_script_under_torchrun_gets_the_same_completions_on_every_rank(
    model: Path, llm: LLM, nproc: int
) -> None:
    """Beside that, rank 0 asks for the impossible and leaves a stream early: nobody hangs."""
    torchrun = ("torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}")
    program = str(ROOT / "tests" / "llm_program.py")
    command = [sys.executable, "-m", *torchrun, program, str(model)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=90)
    assert done.returncode == 0, done.stderr
    lines = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert sorted(lines) == [str(rank) for rank in range(nproc)]
    alone = llm.generate(["Hello", [5, 6, 7]], PARAMS)
    for line in lines.values():
        completions = msgspec.json.decode(line, type=list[Completion])
        assert [(c.text, c.tokens) for c in completions] == [(c.text, c.tokens) for c in alone]


def test_a_score_is_the_log_softmax_of_the_full_logits(llm: LLM) -> None:
    (ours,) = llm.score([TOKENS])
    llm.runner.reserve(len(TOKENS))
    hidden = llm.runner.forward([Piece(Span(0, len(TOKENS)), TOKENS, 0)])
    logprobs = llm.runner.full_logits(hidden).double().log_softmax(-1)
    expected = logprobs[:-1].gather(1, torch.tensor(TOKENS[1:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(ours, dtype=torch.float64), expected)


def test_a_single_token_has_nothing_to_score(llm: LLM) -> None:
    assert llm.score([[5], [5, 6]])[0] == []


def test_a_stream_that_is_left_early_leaves_the_model_usable(llm: LLM) -> None:
    params = SamplingParams(max_tokens=20)
    whole = "".join(llm.stream("Hello", params))
    pieces = llm.stream("Hello", params)
    next(pieces)
    pieces.close()
    assert "".join(llm.stream("Hello", params)) == whole


def test_nothing_asked_is_nothing_done(llm: LLM) -> None:
    assert llm.generate([]) == [] and llm.score([]) == []


def test_a_prompt_and_its_answer_may_fill_the_context_exactly(llm: LLM) -> None:
    n_prompt = llm.intake.max_seq_len - 2
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    (completion,) = llm.generate([[5] * n_prompt], params)
    assert len(completion.tokens) == 2
    with pytest.raises(UsageError, match=r"prompt 0: .*lower max_tokens to 1"):
        llm.generate([[5] * (n_prompt + 1)], params)
