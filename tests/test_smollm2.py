"""The embedded chat model, end to end: real weights, real tokenizer, real processes.

SmolLM2 has 9 query heads and 3 KV heads, so most of these world sizes divide nothing.
"""

import json
import math
from pathlib import Path

import pytest
import torch
from smollm2 import CAPITAL, parallel_llama
from transformers_oracle import decoded_smollm2

from parallel_llama.errors import UsageError
from parallel_llama.files.model_files import find_model
from parallel_llama.llm import LLM

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
N_SCORED = 600


@pytest.fixture(scope="module")
def answer() -> dict:
    (line,) = parallel_llama(*CAPITAL, "--nproc=1")
    assert "Paris" in line["text"]
    assert line["finish_reason"] in ("stop", "length")
    return line


def test_the_answer_is_the_same_on_seven_ranks(answer):
    """tests/engine/test_exact_sums.py checks that 3 and 5 ranks give the same bits."""
    assert parallel_llama(*CAPITAL, "--nproc=7") == [answer]


def test_quant_stored_with_random_weights_is_refused():
    with pytest.raises(UsageError, match="no weight of the model can stay as stored"):
        LLM("smollm2", random_weights=1, quant="stored")


def test_the_answer_is_the_same_under_torchrun(answer):
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node=3", "--standalone")
    assert parallel_llama(*CAPITAL, launcher=launcher) == [answer]


@pytest.fixture(scope="module")
def scored(
    tmp_path_factory: pytest.TempPathFactory, decoded_folder: Path
) -> tuple[Path, list[int], torch.Tensor]:
    """The first tokens of this project's own prose, and their log-probabilities in transformers."""
    from parallel_llama.tokenizer import load_tokenizer

    prose = "".join((ROOT / name).read_text() for name in ("README.md", "CONTRIBUTING.md"))
    tokens = load_tokenizer(find_model("smollm2").path).encode(prose)[:N_SCORED]
    assert len(tokens) == N_SCORED
    model = decoded_smollm2(decoded_folder)
    with torch.inference_mode():
        logprobs = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    expected = logprobs[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    file = tmp_path_factory.mktemp("scored") / "tokens.json"
    file.write_text(json.dumps(tokens))
    return file, tokens, expected


def test_logprobs_match_transformers(scored):
    file, tokens, expected = scored
    (line,) = parallel_llama("score", f"--tokens-file={file}", "--quant=none", "--nproc=3")
    assert line["tokens"] == tokens and line["tp_size"] == 3
    assert line["logprobs"][0] is None
    ours = torch.tensor(line["logprobs"][1:])
    # Float32 on both sides; one wrong weight would differ by 1e-2 and more.
    torch.testing.assert_close(ours, expected, rtol=0, atol=5e-4)
    assert line["perplexity"] == pytest.approx(math.exp(-float(expected.mean())), rel=1e-4)
