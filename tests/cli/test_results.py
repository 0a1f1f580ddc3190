"""The file of --output: what an interrupted run leaves, and how --resume continues it."""

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from parallel_llama.cli.results import Key, ResultFile, check_path, run_identity
from parallel_llama.errors import UsageError
from parallel_llama.files.model_files import ModelFiles
from parallel_llama.request import Completion, Request, SamplingParams

RUN = {"model": "m", "dtype": None, "set of prompts": "p"}


def requests(n_prompts: int = 3, **settings: Any) -> list[Request]:
    params = SamplingParams(**settings)
    return [Request(i, (1,) * (i + 1), params, i, frozenset({0})) for i in range(n_prompts)]


def completion(index: int, choice: int = 0, **changes: Any) -> Completion:
    ended = Completion(index, "text", (5,), "stop", index + 1, choice=choice, n_choices=2)
    return replace(ended, **changes)


def write(
    path: Path, keys: Sequence[Key], asked: Sequence[Request], resume: bool = False
) -> ResultFile:
    file = ResultFile(path, asked, RUN, resume)
    file.open()
    for index, choice in keys:
        file.write(completion(index, choice))
    file.close()
    return file


def keys_in(path: Path) -> list[Key]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [(line["index"], line["choice"]) for line in lines]


def refusal(path: Path, asked: Sequence[Request], run: Any = RUN, resume: bool = True) -> str:
    before = path.read_bytes()
    with pytest.raises(UsageError) as raised:
        ResultFile(path, asked, run, resume)
    assert path.read_bytes() == before
    return str(raised.value)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "answers.jsonl"


def test_finished_run_leaves_only_the_output_file(path):
    write(path, [(2, 0), (0, 0), (1, 0)], requests())
    assert keys_in(path) == [(2, 0), (0, 0), (1, 0)]
    assert os.listdir(path.parent) == [path.name]  # noqa: PTH208


def test_completed_requests_are_not_run_again(path):
    asked = requests(4, n=2)
    write(path, [(3, 1), (0, 1), (0, 0), (2, 0)], asked)
    file = ResultFile(path, asked, RUN, resume=True)
    assert [request.index for request in file.missing(asked)] == [1, 2, 3]
    assert (len(file.done), file.n_total, file.is_complete) == (4, 8, False)


def test_existing_choices_are_not_written_twice(path):
    """A request runs with all its choices, even if only one choice is missing."""
    asked = requests(1, n=2)
    write(path, [(0, 1)], asked)
    file = write(path, [(0, 0), (0, 1)], asked, resume=True)
    assert keys_in(path) == [(0, 1), (0, 0)]
    assert file.is_complete and os.listdir(path.parent) == [path.name]  # noqa: PTH208


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(order=st.permutations(range(6)), data=st.data())
def test_truncated_output_is_complete_after_resume(path, order, data):
    """A kill leaves any number of bytes of the last line, which must not stay in the file."""
    asked = requests(6)
    path.unlink(missing_ok=True)
    write(path, [(index, 0) for index in order[:5]], asked)
    whole = path.read_bytes()
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole)))])
    file = ResultFile(path, asked, RUN, resume=True)
    left = file.missing(asked)
    assert len(left) == 6 - path.read_bytes().count(b"\n")
    write(path, [(request.index, 0) for request in left], asked, resume=True)
    assert sorted(keys_in(path)) == [(index, 0) for index in range(6)]
    assert not path.with_name("answers.jsonl.run").exists()


def test_interrupted_completion_is_not_written(path):
    file = ResultFile(path, requests(), RUN, resume=False)
    file.open()
    file.write(completion(0))
    file.write(completion(1, finish_reason="interrupted"))
    file.close()
    assert keys_in(path) == [(0, 0)]


def test_completion_without_an_allowed_next_token_is_written(path):
    """Regression: it was never written, so that --resume generated it again each time."""
    file = ResultFile(path, requests(1), RUN, resume=False)
    file.open()
    file.write(completion(0, finish_reason="no_token"))
    file.close()
    assert keys_in(path) == [(0, 0)] and file.is_complete


def test_each_line_is_flushed_when_it_is_written(path):
    file = ResultFile(path, requests(), RUN, resume=False)
    file.open()
    for n_lines in (1, 2):
        file.write(completion(n_lines))
        assert len(keys_in(path)) == n_lines
    file.close()


@pytest.mark.parametrize("resume", [False, True])
def test_run_that_wrote_no_line_can_be_started_again(path, resume):
    write(path, [], requests())
    assert path.with_name("answers.jsonl.run").exists()
    write(path, [(0, 0), (1, 0), (2, 0)], requests(), resume)
    assert len(keys_in(path)) == 3


def test_resume_without_previous_output_starts_a_new_run(path):
    write(path, [(0, 0), (1, 0), (2, 0)], requests(), resume=True)
    assert len(keys_in(path)) == 3


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"dtype": "float64"}, "a different dtype (none then, float64 now)"),
        ({"model": "n"}, "a different model;"),
        ({"set of prompts": "q"}, "a different set of prompts;"),
    ],
)
def test_output_of_another_run_is_not_resumed(path, change, says):
    write(path, [(0, 0)], requests())
    message = refusal(path, requests(), {**RUN, **change})
    assert says in message and "remove answers.jsonl to start again" in message


@pytest.mark.parametrize(
    "line",
    [
        b"no json\n",
        b"[1]\n",
        b"7\n",
        b"{}\n",
        b'{"index": [0], "n_prompt_tokens": 1}\n',
        b'{"index": 3, "n_prompt_tokens": 4}\n',
        b'{"index": 1, "n_prompt_tokens": 9}\n',
        b'{"index": 1, "choice": 1, "n_prompt_tokens": 2}\n',
        b'{"index": 0, "n_prompt_tokens": 1}\n',
        b"\xff\n",
        b"\n",
    ],
)
def test_invalid_or_foreign_line_is_refused_by_number(path, line):
    write(path, [(0, 0)], requests())
    with path.open("ab") as file:
        file.write(line)
    assert "line 2" in refusal(path, requests())


def test_output_without_sidecar_is_resumed_only_if_complete(path):
    write(path, [(0, 0), (1, 0), (2, 0)], requests())
    assert ResultFile(path, requests(), RUN, resume=True).is_complete
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))
    message = refusal(path, requests())
    assert "2 of 3 completions" in message and "answers.jsonl.run" in message


@pytest.mark.parametrize("text", ["", "[]", "{", "x" * 100_000])
def test_a_damaged_sidecar_is_refused(path, text):
    write(path, [(0, 0)], requests())
    path.with_name("answers.jsonl.run").write_text(text)
    assert "answers.jsonl.run" in refusal(path, requests())


def test_two_runs_cannot_write_the_same_file(path):
    first = ResultFile(path, requests(), RUN, resume=False)
    second = ResultFile(path, requests(), RUN, resume=False)
    first.open()
    with pytest.raises(UsageError, match="another run is writing it"):
        second.open()
    first.write(completion(0))
    first.close()
    with pytest.raises(UsageError, match="another run has written to it"):
        second.open()
    assert keys_in(path) == [(0, 0)]


def test_device_file_has_no_sidecar_and_cannot_be_resumed():
    file = ResultFile(Path("/dev/null"), requests(), RUN, resume=False)
    file.open()
    file.write(completion(0, finish_reason="interrupted"))
    file.close()
    assert file.done == {(0, 0)} and not Path("/dev/null.run").exists()
    with pytest.raises(UsageError, match="not a regular file"):
        ResultFile(Path("/dev/null"), requests(), RUN, resume=True)


def test_paths_that_cannot_be_written_are_refused(tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.touch()
    (tmp_path / "link.jsonl").symlink_to(prompts)
    for name, says in {
        "": "a folder",
        "nowhere/x": "no folder",
        "prompts.jsonl": "the file of the prompts",
        "link.jsonl": "the file of the prompts",
    }.items():
        with pytest.raises(UsageError, match=says):
            check_path(str(tmp_path / name), str(prompts))


def model_in(folder: Path) -> ModelFiles:
    folder.mkdir(exist_ok=True)
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_text(name)
    weights = (folder / "model.safetensors",)
    return ModelFiles("hf", folder, folder / "config.json", weights)


def test_run_identity_depends_on_prompts_sampling_seed_and_dtype(tmp_path):
    model = model_in(tmp_path)
    asked = requests()
    run = run_identity(asked, model, seed=5, dtype=None)
    assert run == run_identity(requests(), model, seed=5, dtype=None)
    others: list[tuple[str, list[Request]]] = [
        ("set of prompts", [replace(asked[0], prompt=(2,)), *asked[1:]]),
        ("sampling or seed", [replace(asked[0], seed=9), *asked[1:]]),
        ("sampling or seed", [replace(asked[0], stop_ids=frozenset({7})), *asked[1:]]),
        ("sampling or seed", requests(max_tokens=5)),
        ("sampling or seed", requests(stop=("a",))),
        ("number of prompts", asked[:2]),
    ]
    for what, other in others:
        assert run_identity(other, model, seed=5, dtype=None)[what] != run[what]
    assert run_identity(asked, model, seed=5, dtype="float64")["dtype"] != run["dtype"]
    assert run_identity(asked, model, seed=6, dtype=None)["seed"] != run["seed"]


def test_changed_mtime_of_weights_changes_the_run_identity(tmp_path):
    model = model_in(tmp_path)
    run = run_identity(requests(), model, seed=5)
    os.utime(model.weights[0], ns=(1, 1))
    assert run_identity(requests(), model, seed=5)["model"] != run["model"]
