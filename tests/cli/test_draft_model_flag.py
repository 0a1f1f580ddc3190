"""`generate` and `chat` with --draft-model."""

import io
import json
import shutil
from pathlib import Path

import pytest

from parallel_llama.cli.main import main

KV_CACHE = "--kv-cache-bytes=8MiB"


@pytest.fixture(scope="module")
def short(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with a context of 16 tokens."""
    folder = shutil.copytree(model, tmp_path_factory.mktemp("drafts") / "short")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 16}))
    return folder


@pytest.mark.parametrize("n_ranks", ["1", "2"])
def test_draft_model_keeps_text_and_reports_accepted_tokens(model, capfd, n_ranks):
    argv = ["generate", f"--model={model}", KV_CACHE, "--prompt=Once", "--max-tokens=24"]
    argv += ["--min-tokens=24", "--temperature=0.7", "--seed=5", f"--nproc={n_ranks}"]
    found = []
    for flags in ([], [f"--draft-model={model}", "--draft-quant=none"]):
        assert main([*argv, *flags]) == 0
        found.append(capfd.readouterr())
    assert found[0].out == found[1].out != ""
    assert " draft tokens accepted" in found[1].err


@pytest.mark.parametrize("has_draft_model", [False, True])
def test_elastic_ranks_generate_the_same_text(model, capfd, has_draft_model):
    """Regression: the ranks diverged, because only rank 0 knew which command ran."""
    argv = ["generate", f"--model={model}", KV_CACHE, "--prompt=Once", "--max-tokens=24"]
    argv += ["--min-tokens=24", "--temperature=0.7", "--seed=5"]
    flags = [f"--draft-model={model}"] * has_draft_model
    texts = []
    for elastic in ([], ["--nproc=2", "--elastic", *flags]):
        assert main([*argv, *elastic]) == 0
        texts.append(capfd.readouterr().out)
    assert texts[0] == texts[1] != ""


def test_chat_answer_is_the_same_with_a_draft_model(model, monkeypatch, capsys):
    answers = []
    for flags in ([], [f"--draft-model={model}"]):
        monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n"))
        assert main(["chat", str(model), "--max-tokens=9", "--temperature=0", *flags]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1] != ""


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--draft-model=/no/such"], "/no/such"),
        (["--draft-quant=int4"], "--draft-quant int4 without --draft-model"),
        (["--draft-model={short}"], "this model's context is 16 tokens"),
        (["--draft-model=smollm2"], "its vocabulary has 49152 tokens and that of the model 211"),
        (["--draft-model={model}", "--pp=2", "--nproc=2"], "a draft model and a pipeline"),
        (["--draft-model={model}", "--kv-split=sequence"], "a draft model and a KV cache sharded"),
        (["--draft-model={model}", "--device=cuda"], "a draft model and GPUs"),
        (["--draft-model={model}", "--attention-sinks=4"], "a draft model and attention sinks"),
    ],
)
def test_draft_model_that_cannot_run_is_refused(model, short, capsys, flags, error):
    given = [flag.format(model=model, short=short) for flag in flags]
    assert main(["generate", f"--model={model}", "--prompt=Once", *given]) == 2
    out, err = capsys.readouterr()
    assert error in err and "Traceback" not in err and not out
