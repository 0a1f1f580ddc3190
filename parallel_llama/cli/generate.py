"""`generate`: prompts in, completions out."""

import json
import os
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, TextIO

from parallel_llama.cli.arguments import (
    DEVICE,
    DTYPE,
    JSON,
    MAX_SEQ_LEN,
    MODEL,
    NPROC,
    RANDOM_WEIGHTS,
    SAMPLING,
    SEED,
    VERIFY,
    Flag,
    Verb,
    filled_text,
    input_file,
    plain_text,
    shown,
    warn,
    whole,
)
from parallel_llama.cli.model import check_model
from parallel_llama.cli.prompts import Prompt, gather
from parallel_llama.cli.ranks import Job, leads
from parallel_llama.cli.session import closing_line, lead
from parallel_llama.cli.terminal import BOLD, DIM, ctrl_c, painted, printable
from parallel_llama.errors import UsageError
from parallel_llama.request import Completion, Request, SamplingParams

INTERRUPTED = 130


def prepare(
    model: str,
    prompt: list[str],
    prompts: str | None,
    chat: bool,
    system: str | None,
    max_tokens: int,
    temperature: float | None,
    top_p: float | None,
    top_k: int | None,
    min_p: float | None,
    stop: list[str],
    logprobs: int | None,
    seed: int,
    json: bool,
    output: str | None,
    nproc: int | None,
    dtype: str | None,
    device: str,
    max_seq_len: int | None,
    random_weights: int | None,
    verify: bool,
) -> Job:
    """Check prompts, sampling, model and plan, and return the job that generates."""
    gathered = gather(prompt, prompts, chat, system)
    sampling = given_sampling(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        stop=stop or None,
        logprobs=logprobs,
    )
    _check_output(output)
    intake, n_ranks = check_model(
        model,
        nproc,
        max_seq_len=max_seq_len,
        random_weights=random_weights,
        seed=seed,
        verify=verify,
    )
    # Tokenised here, so that a prompt that is too long is refused before anything is loaded.
    requests = intake.requests(gathered, intake.sampling_params(**sampling)) if leads() else []

    def work(llm: Any) -> int:
        return _generate(llm, requests, Results(gathered, json, output))

    options = {"dtype": dtype, "device": device, "random_weights": random_weights, "verify": verify}
    return Job(lambda: lead(work, model, intake=intake, **options), n_ranks)


def given_sampling(**flags: Any) -> dict[str, Any]:
    """The sampling settings that were given, checked; the model's own fill the rest later."""
    given = {name: value for name, value in flags.items() if value is not None}
    SamplingParams(**given)
    return given


class Results:
    """Where completions go as they finish: stdout in input order, a file at once.

    With one prompt on a terminal its text appears piece by piece.

    Raises: UsageError if the file cannot be written.
    """

    def __init__(self, prompts: Sequence[Prompt], as_json: bool, output: str | None) -> None:
        self.prompts, self.as_json, self.output = prompts, as_json, output
        self.finished: dict[int, Completion] = {}
        self.n_shown = 0
        self.streams = len(prompts) == 1 and not as_json and output is None
        self.file: TextIO | None = None

    def __enter__(self) -> "Results":
        if self.output is not None:
            self.file = _opened(self.output)
        return self

    def __exit__(self, *error: object) -> None:
        if self.file is not None:
            self.file.close()

    def take(self, progress: Any) -> None:
        """One step's progress of one prompt."""
        if self.streams and progress.text:
            write_text(progress.text)
        if progress.completion is not None:
            self._finish(progress.completion)

    def _finish(self, completion: Completion) -> None:
        if self.file is not None:
            self.file.write(json.dumps(completion.to_json()) + "\n")
            self.file.flush()
        self.finished[completion.index] = completion
        while self.n_shown in self.finished:
            self._show(self.finished.pop(self.n_shown))
            self.n_shown += 1

    def _show(self, completion: Completion) -> None:
        if self.as_json:
            print(json.dumps(completion.to_json()), flush=True)
        elif self.streams:
            print(flush=True)
        elif self.file is None:
            title = f"[{completion.index}] {_title(self.prompts[completion.index])}"
            print(painted(title, BOLD, sys.stdout))
            write_text(completion.text)
            print("\n", flush=True)


def write_text(text: str) -> None:
    """A model's text on stdout: harmless on a terminal, as it is into a pipe or file."""
    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def _generate(llm: Any, requests: Sequence[Request], results: Results) -> int:
    # Closed even if the reader goes away in between: the other ranks wait for the end.
    with results, ctrl_c() as interrupted, closing(llm.run(requests, interrupted)) as steps:
        for progress in steps:
            results.take(progress)
        code = INTERRUPTED if interrupted() else 0
    if results.output and not results.as_json:
        print(f"{len(requests)} completions in {results.output}")
    stream = sys.stderr if results.as_json else sys.stdout
    print(painted(closing_line(llm.statistics), DIM, stream), file=stream, flush=True)
    if code:
        warn("interrupted; the completions so far are above")
    return code


def _opened(output: str) -> TextIO:
    try:
        return Path(output).open("w", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--output {output}: {error.strerror or error}") from error


def _check_output(output: str | None) -> None:
    if output is None:
        return
    path = Path(output)
    if path.is_dir():
        raise UsageError(f"--output {output}: a folder; give the name of a file in it")
    if not path.parent.is_dir():
        raise UsageError(f"--output {output}: there is no folder {path.parent}; make it first")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"--output {output}: it cannot be written; name a file that can")


def _title(prompt: Prompt) -> str:
    if isinstance(prompt, str):
        return shown(prompt)
    last = prompt[-1]
    return shown(last["content"]) if isinstance(last, dict) else f"{len(prompt)} token ids"


VERB = Verb(
    "generate",
    "Completes prompts.",
    "--prompt TEXT | --prompts FILE.jsonl [flags]",
    (
        Flag("prompt", "text to complete", plain_text, "TEXT", repeatable=True),
        Flag(
            "prompts",
            'a {"prompt"}, {"tokens"} or {"messages"} object per line',
            input_file,
            "FILE.jsonl",
        ),
        Flag("chat", "put each prompt into the model's chat template"),
        Flag("system", "what a chat begins with", plain_text, "TEXT"),
        MODEL,
        Flag("max-tokens", "longest completion", whole(1, 2**31 - 1), "N", 128),
        *SAMPLING,
        Flag("stop", "text that ends a completion", filled_text, "TEXT", repeatable=True),
        SEED,
        Flag("logprobs", "log-probabilities, and N alternatives each", whole(0, 20), "N"),
        JSON,
        Flag("output", "a JSON line per completion, as each is finished", filled_text, "FILE"),
        NPROC,
        DTYPE,
        DEVICE,
        MAX_SEQ_LEN,
        RANDOM_WEIGHTS,
        VERIFY,
    ),
    "parallel-llama generate --chat --prompt 'What is the capital of France?' --nproc 2",
    prepare,
)
