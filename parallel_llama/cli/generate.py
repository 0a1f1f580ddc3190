"""`generate`: completes prompts."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from parallel_llama.cli import model, prompts
from parallel_llama.cli.arguments import JSON, Flag, Flags, Job, Verb, warn
from parallel_llama.cli.host_checks import warn_of_host
from parallel_llama.cli.parsers import filled_text, one_of_many
from parallel_llama.cli.results import ResultFile, check_path, earlier_seed, run_identity
from parallel_llama.cli.sampling_flags import FLAGS, given_sampling, warn_of_idle_filters
from parallel_llama.cli.session import Meter, closing_line, lead, leads
from parallel_llama.cli.terminal import BOLD, DIM, Activity, StatusLine, ctrl_c, painted, table
from parallel_llama.config.adapter import adapter_digest, load_served_adapters
from parallel_llama.engine.input_processor import InputProcessor
from parallel_llama.errors import UsageError, counted, escaped, quoted
from parallel_llama.parallel.rank_env import world
from parallel_llama.request import Completion, Request, TokenLogprob
from parallel_llama.tokenizer import Chat, text_of
from parallel_llama.tokenizer.answers import AnswerReader, AnswerSplitter, split_answer

if TYPE_CHECKING:
    from parallel_llama.engine.outputs import StepOutput
    from parallel_llama.llm import LLM

INTERRUPTED = 130

OUTPUT: Flag[str | None] = Flag(
    "output", "write completions to a file, one JSON object per line", filled_text, "FILE",
    subject="output",
)  # fmt: skip
PART: Flag[tuple[int, int] | None] = Flag(
    "part", "complete only the prompts I, I + N, I + 2 N, ..., counted from 0",
    one_of_many("part", "I", prompts.MAX_PROMPTS), "I/N", subject="prompts",
)  # fmt: skip
RESUME: Flag[bool] = Flag(
    "resume", "continue an interrupted run: generate what is missing in --output", subject="output"
)


def prepare(flags: Flags) -> Job:
    """Checks what can be checked before the prompts are read, and returns the job."""
    prompts.require_one_source(flags)
    sampling = given_sampling(flags)
    output, resume = flags[OUTPUT], flags[RESUME]
    if resume and output is None:
        raise UsageError("--resume continues the file of --output; add --output FILE")
    path = None if output is None else check_path(output, flags[prompts.PROMPTS])
    adapter = model.only_adapter(flags)
    inputs, n_ranks = model.check_model(flags)
    device = model.device_kind(flags[model.DEVICE], n_ranks)
    ranks: dict[str, Any] = {}
    warn_of_host(flags, flags[model.MODEL], inputs.files, inputs.args, n_ranks)

    def run() -> int:
        if not leads():
            return lead(flags, inputs, lambda _: 0)
        # Before the weights are read, so that errors are reported early.
        with Activity("reading the prompts", sys.stderr):
            lines = prompts.gather(flags)
            run_seed = earlier_seed(path) if resume and path and flags[model.SEED] is None else None
            run_seed = inputs.run_seed() if run_seed is None else run_seed
            part, n_parts = flags[PART] or (0, 1)
            indices = range(part, len(lines), n_parts)
            requests = _requests(lines, indices, inputs, sampling, run_seed, adapter)
            file = None
            if path is not None:
                identity = run_identity(
                    requests,
                    inputs.files,
                    seed=run_seed,
                    dtype=flags[model.DTYPE],
                    quant=flags[model.QUANT],
                    random_weights=flags[model.RANDOM_WEIGHTS],
                    adapter=_adapter_digest(flags, inputs),
                    device=device,
                    kv_cache_dtype=flags[model.KV_CACHE_DTYPE],
                    attention_sinks=flags[model.ATTENTION_SINKS],
                    max_seq_len=inputs.max_seq_len,
                )
                file = ResultFile(path, requests, identity, resume)
                requests = file.missing(requests)
        if not requests and world()[1] == 1:  # otherwise the other ranks wait for this one
            reason = f"no prompt is in part {part}/{n_parts}" if file is None else _count(file)
            warn(f"{reason}; nothing to do")
            return 0

        def work(llm: "LLM") -> int:
            warn_of_idle_filters(sampling, (request.params for request in requests))
            if file is not None and file.done:
                warn(f"{_count(file)}; {'generating the rest' if requests else 'nothing to do'}")
            results = Results(lines, requests, flags[JSON], file, _reader_factory(lines, inputs))
            return _generate(llm, requests, results, _shown_seed(requests, run_seed))

        return lead(flags, inputs, work, **ranks)

    # A launcher would end all ranks when one is lost, so this process becomes rank 0 and starts
    # the others itself.
    if flags[model.ELASTIC]:
        ranks, n_ranks = {"tp_size": n_ranks}, 1
    return Job(run, n_ranks)


class Results:
    """Writes completions to the file, if there is one, as they finish.

    With --json or without a file, they are written to stdout in input order. If there is
    neither --json nor a file, a single completion is streamed. Otherwise a status line on stderr
    shows the progress. Reasoning is shown only on a terminal, and has its own key in JSON.

    Args:
        new_reader: returns a reader of the answer to a request; None for answers without markers.

    Raises: UsageError if the file cannot be written.
    """

    def __init__(
        self,
        lines: Sequence[prompts.Line],
        requests: Sequence[Request],
        as_json: bool,
        file: ResultFile | None,
        new_reader: Callable[[Request], AnswerReader | None] = lambda _: None,
    ) -> None:
        self.lines, self.as_json, self.file = lines, as_json, file
        self.order = [
            (request.index, choice) for request in requests for choice in range(request.params.n)
        ]
        self.finished: dict[tuple[int, int], Completion] = {}
        self.n_shown = 0
        self.needs_gap = False  # an empty line between reasoning and text
        self.streams = len(self.order) == 1 and not as_json and file is None
        self.requests = {request.index: request for request in requests}
        self.new_reader = new_reader
        reader = new_reader(requests[0]) if self.streams else None
        self.splitter = None if reader is None else AnswerSplitter(reader)
        self.meter, self.status = Meter(requests), StatusLine(sys.stderr)

    def __enter__(self) -> "Results":
        if self.file is not None:
            self.file.open()
        return self

    def __exit__(self, *error: object) -> None:
        self.status.clear()
        if self.file is not None:
            self.file.close()

    @property
    def is_silent(self) -> bool:
        """Whether nothing is written to stdout."""
        return self.file is not None and not self.as_json

    def take(self, output: "StepOutput") -> None:
        """Adds the output of one step for one choice."""
        self.meter.take(output)
        if self.streams:
            self._stream(output.text, output.completion)
        if output.completion is not None:
            self._finish(self._split(output.completion))
        if not self.streams:
            self.status.show(self.meter.line)

    def _stream(self, text: str, completion: Completion | None) -> None:
        if self.splitter is None:
            write_text(text)
            return
        for shown, is_reasoning in self.splitter.push(text, is_last=completion is not None):
            if not is_reasoning:
                write_text("\n\n" * self.needs_gap + shown)
                self.needs_gap = False
            elif sys.stdout.isatty():
                write_reasoning(shown)
                self.needs_gap = True

    def _split(self, completion: Completion) -> Completion:
        """A completion with its reasoning separated from its text."""
        reader = self.new_reader(self.requests[completion.index])
        if reader is None:
            return completion
        reasoning, text = split_answer(reader, completion.text)
        if not text and completion.finish_reason == "length":
            warn(f"prompt {completion.index}: cut off while reasoning; raise --max-tokens")
        return replace(completion, text=text, reasoning=reasoning)

    def _finish(self, completion: Completion) -> None:
        if self.file is not None:
            self.file.write(completion)
            if self.is_silent:
                return
        self.finished[completion.index, completion.choice] = completion
        while self.n_shown < len(self.order) and self.order[self.n_shown] in self.finished:
            self.status.clear()
            self._show(self.finished.pop(self.order[self.n_shown]))
            self.n_shown += 1

    def show_finished(self) -> None:
        """Shows the completions that still wait for an earlier one, which will never finish."""
        self.status.clear()
        for key in self.order:
            if key in self.finished:
                self._show(self.finished.pop(key))

    def _show(self, completion: Completion) -> None:
        if self.as_json:
            print(json.dumps(completion.to_json()), flush=True)
            return
        if self.streams:
            print(flush=True)
        else:
            print(painted(self._title(completion), BOLD, sys.stdout))
            if completion.reasoning and sys.stdout.isatty():
                write_reasoning(f"{completion.reasoning}\n\n")
            write_text(completion.text)
            print("\n", flush=True)
        scored = [each for each in completion.prompt_logprobs or () if each is not None]
        if scored and completion.choice == 0:
            print("\n".join([*_logprob_rows(scored, "prompt token"), ""]), flush=True)
        if completion.logprobs is not None:
            print("\n".join([*_logprob_rows(completion.logprobs, "token"), ""]), flush=True)

    def _title(self, completion: Completion) -> str:
        number = f"{completion.index}"
        if completion.n_choices > 1:
            number += f", {completion.choice + 1} of {completion.n_choices}"
        return f"[{number}] {_title(self.lines[completion.index].prompt)}"


def write_text(text: str) -> None:
    """Writes generated text to stdout; control characters are escaped on a terminal."""
    sys.stdout.write(escaped(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def write_reasoning(text: str) -> None:
    """Writes the reasoning of an answer to stdout, which is a terminal."""
    sys.stdout.write(painted(escaped(text), DIM, sys.stdout))
    sys.stdout.flush()


def _requests(
    lines: Sequence[prompts.Line],
    indices: range,
    inputs: InputProcessor,
    sampling: Mapping[str, Any],
    run_seed: int,
    adapter: str | None,
) -> list[Request]:
    """The requests of the lines with these numbers.

    Sampling parameters of a line take precedence over flags, and flags over the model's defaults.

    Raises: UsageError that names the line.
    """
    shared = inputs.sampling_params(**sampling)
    requests = []
    for index in indices:
        line = lines[index]
        try:
            params = (
                inputs.sampling_params(**{**sampling, **line.settings}) if line.settings else shared
            )
            request = inputs.request(index, line.prompt, params, run_seed, adapter)
            requests.append(inputs.with_markers(line.prompt, request))
        except UsageError as error:
            raise UsageError(f"{line.where}: {error}") from error
    return requests


def _reader_factory(
    lines: Sequence[prompts.Line], inputs: InputProcessor
) -> Callable[[Request], AnswerReader | None]:
    """The `new_reader` of `Results`."""

    def new_reader(request: Request) -> AnswerReader | None:
        is_chat = isinstance(lines[request.index].prompt, Chat)
        return inputs.answer_reader(request) if is_chat else None

    return new_reader


def _adapter_digest(flags: Flags, inputs: InputProcessor) -> str | None:
    """A digest of the adapter's files; None without one."""
    adapters = load_served_adapters(model.adapters_of(flags), inputs.args)
    return next(map(adapter_digest, adapters.values()), None)


def _shown_seed(requests: Sequence[Request], run_seed: int) -> int | None:
    """The --seed that reproduces the run; None if no request used it."""
    is_used = any(
        not request.params.is_greedy and request.params.seed is None for request in requests
    )
    return run_seed if is_used else None


def _generate(llm: "LLM", requests: Sequence[Request], results: Results, seed: int | None) -> int:
    # Writing to a terminal or a pipe may block until a person continues to read.
    is_unattended = results.is_silent and not sys.stderr.isatty()
    limited = llm.unattended() if is_unattended else nullcontext()
    with results, ctrl_c() as interrupted, limited:
        # Ends the run even if writing to stdout fails: the other ranks wait for its end.
        with closing(llm.run(requests, interrupted)) as steps:
            try:
                for output in steps:
                    results.take(output)
            except UsageError:  # a request no longer fits after a loss; the others have finished
                results.show_finished()
                raise
        code = INTERRUPTED if interrupted() else 0
    file = results.file
    if file is not None:
        warn(_count(file))
    state = llm.engine.statistics()
    drafts = state.n_accepted_tokens, state.n_draft_tokens
    line = closing_line(results.meter, llm.statistics.weight_bytes, seed, drafts)
    print(painted(line, DIM, sys.stderr), file=sys.stderr, flush=True)
    if code:
        warn(f"interrupted; {_remedy(file)}")
    return code


def _logprob_rows(logprobs: Sequence[TokenLogprob], name: str) -> list[str]:
    """A row per token: its log-probability, its text under the heading `name`, and alternatives."""
    rows = []
    for token in logprobs:
        alternatives = [
            f"{text!r} {logprob:.3f}"
            for (_, logprob), text in zip(token.top, token.top_texts, strict=False)
        ]
        rows.append([f"{token.logprob:.3f}", repr(token.text), ", ".join(alternatives)])
    return table(
        ["logprob", name, "alternatives" if any(token.top for token in logprobs) else ""],
        rows,
        sys.stdout,
    )


def _count(file: ResultFile) -> str:
    done = counted(len(file.done), "completion")
    if not file.is_complete:
        done = f"{len(file.done)} of {counted(file.n_total, 'completion')}"
    return f"{done} in {file.path}"


def _remedy(file: ResultFile | None) -> str:
    if file is None:
        return "the completions so far are above"
    if file.resumable and not file.is_complete:
        return "the same command with --resume continues"
    return f"the completions so far are in {file.path}"


def _title(prompt: prompts.Prompt) -> str:
    if isinstance(prompt, str):
        return quoted(prompt)
    if isinstance(prompt, Chat):
        return quoted(text_of(prompt.messages[-1]))
    return f"{len(prompt)} token ids"


VERB = Verb(
    "generate",
    "Completes prompts.",
    "--prompt TEXT | --prompts FILE.jsonl [flags]",
    (
        *(*prompts.PROMPT_FLAGS, model.MODEL, model.ADAPTER, *model.DRAFTS, *FLAGS, JSON),
        *(PART, OUTPUT, RESUME, *model.RANKS, model.ELASTIC, model.SPARES),
        *(*model.CACHE, *model.LOADING),
    ),
    "parallel-llama generate --chat --prompt 'What is the capital of France?' --nproc 2",
    prepare,
)
