"""`score`: log-probabilities of the tokens of a text."""

import json
import math
import sys
from collections.abc import Sequence
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING

from parallel_llama.cli.arguments import JSON, Flag, Flags, Job, Verb
from parallel_llama.cli.model import (
    ADAPTER,
    KV_CACHE_BYTES,
    LOADING,
    MODEL,
    RANKS,
    check_model,
    only_adapter,
)
from parallel_llama.cli.parsers import input_file, token_count
from parallel_llama.cli.prompts import check_tokens
from parallel_llama.cli.session import lead, leads
from parallel_llama.cli.terminal import Activity, table
from parallel_llama.engine.input_processor import InputProcessor
from parallel_llama.errors import UsageError
from parallel_llama.files.bounded_files import open_input
from parallel_llama.files.fields import parse_json

if TYPE_CHECKING:
    from parallel_llama.llm import LLM

TEXT_FILE: Flag[str | None] = Flag("text-file", "a text to score", input_file, "FILE")
TOKENS_FILE: Flag[str | None] = Flag(
    "tokens-file", "a JSON list of token ids, or a list of lists", input_file, "FILE"
)
STRIDE: Flag[int | None] = Flag(
    "stride",
    "tokens by which the window moves if a text exceeds the context",
    token_count(1), "N", default_text="half the context",
)  # fmt: skip


def prepare(flags: Flags) -> Job:
    """Checks model and plan, and returns the job, which reads and checks the input."""
    if (flags[TEXT_FILE] is None) == (flags[TOKENS_FILE] is None):
        raise UsageError("give either --text-file FILE or --tokens-file FILE")
    inputs, n_ranks = check_model(flags)
    stride, context, adapter = flags[STRIDE], inputs.longest, only_adapter(flags)
    if stride is not None and stride >= context:
        raise UsageError(
            f"--stride {stride} must be less than the context of {context}; give at most "
            f"{context - 1}"
        )

    def run() -> int:
        sequences = _read_sequences(flags, inputs) if leads() else []
        work = partial(
            _score, sequences=sequences, stride=stride, adapter=adapter, as_json=flags[JSON]
        )
        return lead(flags, inputs, work)

    return Job(run, n_ranks)


def perplexity(logprobs: Sequence[float]) -> float | None:
    """exp of the mean negative log-probability; None for no tokens, inf if no float holds it."""
    if not logprobs:
        return None
    try:
        return math.exp(-math.fsum(logprobs) / len(logprobs))
    except OverflowError:
        return math.inf


def _score(
    llm: "LLM",
    *,
    sequences: Sequence[Sequence[int]],
    stride: int | None,
    adapter: str | None,
    as_json: bool,
) -> int:
    context = llm.input_processor.longest
    longest = max(map(len, sequences), default=0)
    if longest > context:
        step = stride or context // 2
        print(
            f"{longest:,} tokens exceed the context of {context:,}: scoring in windows that move "
            f"by {step:,}, so that each token after the first window has at least "
            f"{context - step:,} tokens before it",
            file=sys.stderr,
        )
    n_all, n_done = sum(map(len, sequences)), 0

    def show(n_tokens: int) -> None:
        nonlocal n_done
        n_done += n_tokens
        activity.what = f"scoring: {n_done:,} of {n_all:,} tokens"

    with Activity(f"scoring {n_all:,} tokens", sys.stderr) as activity:
        scores = llm.score(sequences, stride, show, adapter=adapter)
        scored = list(zip(sequences, scores, strict=True))
    if as_json:
        for tokens, logprobs in scored:
            value = perplexity(logprobs)
            line = {
                "tokens": list(tokens),
                "logprobs": [None, *logprobs],
                "perplexity": None if value == math.inf else value,  # JSON has no infinity
                "tp_size": llm.tp_size,
            }
            print(json.dumps(line, allow_nan=False), flush=True)
        return 0
    rows = []
    for index, (tokens, logprobs) in enumerate(scored):
        value = perplexity(logprobs)
        total = f"{math.fsum(logprobs):.3f}"
        rows.append([str(index), str(len(tokens)), total, "-" if value is None else f"{value:.4f}"])
    header = ["sequence", "tokens", "log-probability", "perplexity"]
    print("\n".join(table(header, rows, sys.stdout)))
    return 0


def _read_sequences(flags: Flags, inputs: InputProcessor) -> list[list[int]]:
    """The checked sequences of token ids to score.

    Raises: UsageError naming the file, and the list in it.
    """
    path = flags[TEXT_FILE] or flags[TOKENS_FILE]
    assert path is not None
    text = _read_text(path)
    try:
        if flags[TOKENS_FILE] is not None:
            sequences = _token_lists(text)
        elif text:
            sequences = [inputs.tokenizer.encode(text)]
        else:
            raise ValueError("the file is empty; there is nothing to score")
    except UsageError:
        raise
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from None
    for index, tokens in enumerate(sequences):
        try:
            inputs.check_sequence(tokens)
        except UsageError as error:
            where = f"{path}, list {index}" if len(sequences) > 1 else path
            raise UsageError(f"{where}: {error}") from None
    return sequences


def _read_text(path: str) -> str:
    try:
        with TextIOWrapper(open_input(Path(path)), encoding="utf-8") as file:
            return file.read()
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 text (byte {error.start})") from error
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from error


def _token_lists(text: str) -> list[list[int]]:
    """One JSON list of token ids, or a list of such lists."""
    value = parse_json(text)
    if isinstance(value, list) and value and isinstance(value[0], list):
        return [check_tokens(tokens, f"list {i}") for i, tokens in enumerate(value)]
    return [check_tokens(value, "the file")]


VERB = Verb(
    "score",
    "Prints the log-probabilities and perplexity of a text.",
    "--text-file FILE | --tokens-file FILE [flags]",
    (TEXT_FILE, TOKENS_FILE, STRIDE, MODEL, ADAPTER, JSON, *RANKS, KV_CACHE_BYTES, *LOADING),
    "parallel-llama score --text-file README.md",
    prepare,
)
