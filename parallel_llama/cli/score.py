"""`score`: how likely a model finds a text, token by token."""

import json
import math
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from parallel_llama.cli.arguments import (
    DEVICE,
    DTYPE,
    JSON,
    MAX_SEQ_LEN,
    MODEL,
    NPROC,
    RANDOM_WEIGHTS,
    TIMEOUT,
    VERIFY,
    Flag,
    Verb,
    input_file,
)
from parallel_llama.cli.json_text import parse_json
from parallel_llama.cli.model import check_model, read_text
from parallel_llama.cli.prompts import check_tokens
from parallel_llama.cli.ranks import Job, leads
from parallel_llama.cli.session import lead
from parallel_llama.cli.terminal import table
from parallel_llama.errors import UsageError
from parallel_llama.intake import Intake


def prepare(
    model: str,
    text_file: str | None,
    tokens_file: str | None,
    json: bool,
    nproc: int | None,
    dtype: str | None,
    device: str,
    max_seq_len: int | None,
    random_weights: int | None,
    verify: bool,
    timeout: float | None,
) -> Job:
    """Check model and plan, and return the job that reads the input, checks it and scores."""
    if (text_file is None) == (tokens_file is None):
        raise UsageError("give the input with --text-file FILE or --tokens-file FILE, one of them")
    intake, n_ranks = check_model(
        model, nproc, max_seq_len=max_seq_len, random_weights=random_weights, verify=verify
    )
    options = {
        "dtype": dtype,
        "device": device,
        "random_weights": random_weights,
        "verify": verify,
        "timeout_s": timeout,
    }

    def run() -> int:
        sequences = _read_sequences(text_file, tokens_file, intake) if leads() else []
        work = partial(_score, sequences=sequences, as_json=json)
        return lead(work, "score", model, intake=intake, **options)

    return Job(run, n_ranks)


def perplexity(logprobs: Sequence[float]) -> float | None:
    """exp of the mean negative log-probability; None where nothing was predicted."""
    if not logprobs:
        return None
    return math.exp(-math.fsum(logprobs) / len(logprobs))


def _score(llm: Any, *, sequences: Sequence[Sequence[int]], as_json: bool) -> int:
    scored = list(zip(sequences, llm.score(sequences), strict=True))
    if as_json:
        for tokens, logprobs in scored:
            line = {
                "tokens": list(tokens),
                "logprobs": [None, *logprobs],
                "perplexity": perplexity(logprobs),
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


def _read_sequences(
    text_file: str | None, tokens_file: str | None, intake: Intake
) -> list[list[int]]:
    """The sequences of token ids to score, checked.

    Raises: UsageError naming the file that cannot be scored, and the list in it.
    """
    path = text_file or tokens_file
    assert path is not None
    text = read_text(path)
    if text_file is not None and not text:
        raise UsageError(f"{path}: the file is empty; there is nothing to score")
    try:
        sequences = [intake.tokenizer.encode(text)] if text_file else _token_lists(text)
    except UsageError:
        raise
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from None
    for index, tokens in enumerate(sequences):
        try:
            intake.check_sequence(tokens)
        except UsageError as error:
            where = f"{path}, list {index}" if len(sequences) > 1 else path
            raise UsageError(f"{where}: {error}") from None
    return sequences


def _token_lists(text: str) -> list[list[int]]:
    """One JSON list of token ids, or a list of such lists."""
    value = parse_json(text)
    if isinstance(value, list) and value and isinstance(value[0], list):
        return [check_tokens(tokens, f"list {i}") for i, tokens in enumerate(value)]
    return [check_tokens(value, "the file")]


VERB = Verb(
    "score",
    "Gives the log-probability of every token of a text.",
    "--text-file FILE | --tokens-file FILE [flags]",
    (
        Flag("text-file", "one text", input_file, "FILE"),
        Flag("tokens-file", "a JSON list of token ids, or a list of lists", input_file, "FILE"),
        MODEL,
        JSON,
        NPROC,
        DTYPE,
        DEVICE,
        MAX_SEQ_LEN,
        RANDOM_WEIGHTS,
        VERIFY,
        TIMEOUT,
    ),
    "parallel-llama score --text-file README.md",
    prepare,
)
