"""`generate` and `chat` with --adapter."""

import io
import json
import shutil
from pathlib import Path

import pytest
from adapters import write_adapter

from parallel_llama import LLM, SamplingParams
from parallel_llama.cli import generate, results
from parallel_llama.cli.main import main

KV_CACHE = "--kv-cache-bytes=4MiB"


@pytest.fixture(scope="module")
def folders(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    parent = tmp_path_factory.mktemp("adapters")
    return [
        str(
            write_adapter(
                parent / f"{seed}", model, r".*\.\w+_proj", seed=seed, target_modules="all-linear"
            )
        )
        for seed in range(2)
    ]


def test_generate_uses_adapter_and_run_identity_covers_it(model, folders, tmp_path, monkeypatch):
    """The run identity of --resume depends on the adapter's weights, not on its path."""
    found = []

    def run_identity(*args: object, **settings: object) -> object:
        found.append(settings["adapter"])
        return results.run_identity(*args, **settings)

    monkeypatch.setattr(generate, "run_identity", run_identity)
    moved = str(shutil.copytree(folders[0], tmp_path / "moved"))
    argv = ["generate", f"--model={model}", KV_CACHE, "--prompt=Once", "--max-tokens=6"]
    given = [[f"--adapter=x={folder}"] for folder in (folders[0], moved, folders[1])]
    texts = []
    for number, flags in enumerate([*given, []]):
        output = tmp_path / f"{number}.jsonl"
        assert main([*argv, "--temperature=0", f"--output={output}", *flags]) == 0
        texts.append(json.loads(output.read_text())["text"])
    assert found[0] == found[1] and len({*found}) == 3 and found[3] is None
    assert texts[0] == texts[1] and len({*texts}) == 3
    with LLM(str(model), adapters={"y": folders[0]}, kv_cache_bytes=4 << 20) as llm:
        assert llm.generate("Once", SamplingParams(max_tokens=6), adapter="y")[0].text == texts[0]


def test_chat_answers_with_adapter(model, folders, monkeypatch, capsys):
    argv = ["chat", str(model), "--max-tokens=6", "--temperature=0"]
    answers = []
    for flags in ([], [f"--adapter=x={folders[1]}"]):
        monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n"))
        assert main([*argv, *flags]) == 0
        answers.append(capsys.readouterr().out)
    chat = [{"role": "user", "content": "Hello"}]
    with LLM(str(model), adapters={"y": folders[1]}, kv_cache_bytes=4 << 20) as llm:
        (wanted,) = llm.chat(chat, SamplingParams(max_tokens=6), adapter="y")
    text = wanted.text.strip()
    assert text and answers[0] != answers[1] and text in answers[1]


def test_score_uses_adapter_and_is_equal_on_1_and_2_ranks(model, folders, tmp_path, capfd):
    text = tmp_path / "text"
    text.write_text("Once upon a time there was a king.")
    lines = []
    for flags in ([], [f"--adapter=x={folders[0]}"], [f"--adapter=x={folders[0]}", "--nproc=2"]):
        assert main(["score", f"--model={model}", f"--text-file={text}", "--json", *flags]) == 0
        lines.append(json.loads(capfd.readouterr().out)["logprobs"])
    assert lines[0] != lines[1] == lines[2]
