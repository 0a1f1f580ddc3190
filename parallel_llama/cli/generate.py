"""`generate`: prompts in, completions out."""

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

from parallel_llama.cli.arguments import (
    BLOCK_SIZE,
    DEVICE,
    DTYPE,
    JSON,
    KV_CACHE_BYTES,
    MAX_SEQ_LEN,
    MODEL,
    NPROC,
    RANDOM_WEIGHTS,
    VERIFY,
    Flag,
    Verb,
    filled_text,
    input_file,
    plain_text,
    shown,
    warn,
)
from parallel_llama.cli.model import check_model
from parallel_llama.cli.progress import Meter
from parallel_llama.cli.prompts import Line, Prompt, gather
from parallel_llama.cli.ranks import Job, inside_torchrun, leads
from parallel_llama.cli.results import ResultFile, check_path, run_of
from parallel_llama.cli.sampling_flags import FLAGS, given_sampling, warn_of_idle_filters
from parallel_llama.cli.session import closing_line, lead
from parallel_llama.cli.terminal import BOLD, DIM, StatusLine, ctrl_c, painted, printable
from parallel_llama.errors import UsageError
from parallel_llama.intake import Intake
from parallel_llama.request import (
    Completion,
    Request,
)
from parallel_llama.tokenizer import Chat, text_of

INTERRUPTED = 130


def prepare(
    model: str,
    prompt: list[str],
    prompts: str | None,
    chat: bool,
    system: str | None,
    seed: int,
    json: bool,
    output: str | None,
    resume: bool,
    nproc: int | None,
    dtype: str | None,
    device: str,
    max_seq_len: int | None,
    kv_cache_bytes: int | None,
    block_size: int | None,
    random_weights: int | None,
    verify: bool,
    **sampling: Any,
) -> Job:
    """Check prompts, sampling, model, plan and output, and return the job that generates."""
    lines = gather(prompt, prompts, chat, system)
    given = given_sampling(**sampling)
    if resume and output is None:
        raise UsageError("--resume goes on with the file of --output; add --output FILE")
    path = None if output is None else check_path(output, prompts)
    intake, n_ranks = check_model(
        model,
        nproc,
        max_seq_len=max_seq_len,
        random_weights=random_weights,
        seed=seed,
        verify=verify,
    )
    requests, file = [], None
    if leads():
        # Tokenised here, so that a prompt that is too long is refused before anything is loaded.
        requests = _requests(lines, intake, given)
        if path is not None:
            run = run_of(requests, intake.files, dtype=dtype, random_weights=random_weights)
            file = ResultFile(path, requests, run, resume)
            requests = file.missing(requests)
    if file is not None and not requests and not inside_torchrun():
        return Job(lambda: _say_complete(file, json))

    def work(llm: Any) -> int:
        warn_of_idle_filters(given, (request.params for request in requests))
        if file is not None and file.done:
            warn(f"{_count(file)}; going on with the others")
        return _generate(llm, requests, Results(lines, requests, json, file))

    options = {"dtype": dtype, "device": device, "random_weights": random_weights, "verify": verify}
    cache = {"kv_cache_bytes": kv_cache_bytes, "block_size": block_size}
    options |= {name: value for name, value in cache.items() if value is not None}
    return Job(lambda: lead(work, model, intake=intake, **options), n_ranks)


class Results:
    """Where completions go as they finish: stdout in input order, a file at once.

    With one prompt on a terminal its text appears piece by piece; with several, a line on stderr
    says how far they are.

    Raises: UsageError if the file cannot be written.
    """

    def __init__(
        self,
        lines: Sequence[Line],
        requests: Sequence[Request],
        as_json: bool,
        file: ResultFile | None,
    ) -> None:
        self.lines, self.as_json, self.file = lines, as_json, file
        self.order = [
            (request.index, choice) for request in requests for choice in range(request.params.n)
        ]
        self.finished: dict[tuple[int, int], Completion] = {}
        self.n_shown = 0
        self.streams = len(self.order) == 1 and not as_json and file is None
        self.meter, self.status = Meter(requests), StatusLine(sys.stderr)

    def __enter__(self) -> "Results":
        if self.file is not None:
            self.file.open()
        return self

    def __exit__(self, *error: object) -> None:
        self.status.clear()
        if self.file is not None:
            self.file.close()

    def take(self, progress: Any) -> None:
        """One step's progress of one choice."""
        self.meter.take(progress)
        if self.streams and progress.text:
            write_text(progress.text)
        if progress.completion is not None:
            self._finish(progress.completion)
        if not self.streams:
            self.status.show(self.meter.line)

    def _finish(self, completion: Completion) -> None:
        if self.file is not None:
            self.file.write(completion)
            if not self.as_json:
                return
        self.finished[completion.index, completion.choice] = completion
        while self.n_shown < len(self.order) and self.order[self.n_shown] in self.finished:
            self.status.clear()
            self._show(self.finished.pop(self.order[self.n_shown]))
            self.n_shown += 1

    def _show(self, completion: Completion) -> None:
        if self.as_json:
            print(json.dumps(completion.to_json()), flush=True)
        elif self.streams:
            print(flush=True)
        else:
            print(painted(self._title(completion), BOLD, sys.stdout))
            write_text(completion.text)
            print("\n", flush=True)

    def _title(self, completion: Completion) -> str:
        number = f"{completion.index}"
        if completion.n_choices > 1:
            number += f", {completion.choice + 1} of {completion.n_choices}"
        return f"[{number}] {_title(self.lines[completion.index].prompt)}"


def write_text(text: str) -> None:
    """A model's text on stdout: harmless on a terminal, as it is into a pipe or file."""
    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def _requests(lines: Sequence[Line], intake: Intake, given: Mapping[str, Any]) -> list[Request]:
    """A request for each line, drawn as the line says, else the flags, else the model.

    Raises: UsageError that names the line.
    """
    shared = intake.sampling_params(**given)
    requests = []
    for index, line in enumerate(lines):
        try:
            own = intake.sampling_params(**{**given, **line.settings}) if line.settings else shared
            requests.append(intake.request(index, line.prompt, own))
        except UsageError as error:
            raise UsageError(f"{line.where}: {error}") from error
    return requests


def _generate(llm: Any, requests: Sequence[Request], results: Results) -> int:
    with results, ctrl_c() as interrupted:
        # Closed even if the reader goes away in between: the other ranks wait for the end.
        with closing(llm.run(requests, interrupted)) as steps:
            for progress in steps:
                results.take(progress)
        code = INTERRUPTED if interrupted() else 0
    file = results.file
    stream = sys.stderr if results.as_json else sys.stdout
    if file is not None:
        print(_count(file), file=stream)
    line = closing_line(results.meter, llm.statistics.weight_bytes)
    print(painted(line, DIM, stream), file=stream, flush=True)
    if code:
        warn(f"interrupted; {_remedy(file)}")
    return code


def _say_complete(file: ResultFile, as_json: bool) -> int:
    stream = sys.stderr if as_json else sys.stdout
    print(f"{_count(file)}; nothing is left to do", file=stream)
    return 0


def _count(file: ResultFile) -> str:
    of = "" if file.is_complete else f" of {file.n_total}"
    return f"{len(file.done)}{of} completions in {file.path}"


def _remedy(file: ResultFile | None) -> str:
    if file is None:
        return "the completions so far are above"
    if file.resumable and not file.is_complete:
        return "the same command with --resume goes on"
    return f"the completions so far are in {file.path}"


def _title(prompt: Prompt) -> str:
    if isinstance(prompt, str):
        return shown(prompt)
    if isinstance(prompt, Chat):
        return shown(text_of(prompt.messages[-1]))
    last = prompt[-1]
    return shown(text_of(last)) if isinstance(last, dict) else f"{len(prompt)} token ids"


VERB = Verb(
    "generate",
    "Completes prompts.",
    "--prompt TEXT | --prompts FILE.jsonl [flags]",
    (
        Flag("prompt", "text to complete", plain_text, "TEXT", repeatable=True),
        Flag(
            "prompts",
            'a {"prompt"}, {"tokens"} or {"messages"} object per line, beside it perhaps settings '
            'of its own, such as "max_tokens"',
            input_file,
            "FILE.jsonl",
        ),
        Flag("chat", "put each prompt into the model's chat template"),
        Flag("system", "what a chat begins with", plain_text, "TEXT"),
        MODEL,
        *FLAGS,
        JSON,
        Flag("output", "a JSON line per completion, as each is finished", filled_text, "FILE"),
        Flag("resume", "go on with an interrupted --output: run what is missing in it"),
        NPROC,
        DTYPE,
        DEVICE,
        MAX_SEQ_LEN,
        KV_CACHE_BYTES,
        BLOCK_SIZE,
        RANDOM_WEIGHTS,
        VERIFY,
    ),
    "parallel-llama generate --chat --prompt 'What is the capital of France?' --nproc 2",
    prepare,
)
