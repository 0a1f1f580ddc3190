"""The file of --output: a JSON line per completion, written when it finishes.

Until all lines are written, FILE.run beside it identifies the run, so that --resume generates only
the missing completions. If the process is killed, at most the line being written is lost.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from io import BufferedWriter
from pathlib import Path
from typing import Any

import msgspec

from parallel_llama.cli.parsers import STDIN, path_in_folder
from parallel_llama.errors import CheckpointError, UsageError, WriteError
from parallel_llama.files.bounded_files import has_short_name, is_file, is_there
from parallel_llama.files.fields import read_json_object
from parallel_llama.files.model_files import ModelFiles
from parallel_llama.files.partial_output import (
    changed,
    growing_file,
    replace_file,
    take_lock_if_supported,
    whole_lines,
)
from parallel_llama.request import Completion, Request

Key = tuple[int, int]  # request index, choice

_COMPLETE = ("stop", "length", "no_token")  # finish reasons of uninterrupted completions
_MAX_RUN_BYTES = 64 << 10
_DIGESTS = ("model", "adapter", "set of prompts", "sampling or seed")
_ENCODER = msgspec.msgpack.Encoder(order="deterministic")


def check_path(output: str, prompts: str | None) -> Path:
    """The path of --output.

    Raises: UsageError if it cannot be written.
    """
    try:
        path = path_in_folder(output)
    except ValueError as error:
        raise UsageError(f"--output {output}: {error}") from None
    if not has_short_name(growing_file(_sidecar(path))):
        raise UsageError(f"--output {path.name[:80]}...: the name is too long; give a shorter one")
    exists = is_there(path)
    if prompts not in (None, STDIN) and exists and path.samefile(prompts):
        raise UsageError(f"--output {output}: is the file of the prompts; give another name")
    if not os.access(path if exists else path.parent, os.W_OK):
        raise UsageError(f"--output {output}: is not writable; give another file")
    if _is_resumable(path) and not os.access(path.parent, os.W_OK | os.X_OK):
        raise UsageError(f"--output {output}: the folder {path.parent} is not writable")
    return path


def _sidecar(path: Path) -> Path:
    """The file that identifies the run which writes `path`."""
    return path.with_name(f"{path.name}.run")


def run_identity(
    requests: Sequence[Request], model: ModelFiles, *, seed: int, **settings: Any
) -> dict[str, Any]:
    """What identifies a run: equal for runs that generate the same completions.

    Args:
        seed: seed of the run.
        settings: the settings of the model and its KV cache.
    """
    prompts, sampling = hashlib.blake2b(digest_size=16), hashlib.blake2b(digest_size=16)
    for request in requests:
        prompts.update(_ENCODER.encode((request.index, request.prompt)))
        sampling.update(_ENCODER.encode((request.params, request.seed, request.stop_ids)))
    return {
        "model": _model_digest(model),
        "seed": seed,
        **settings,
        "number of prompts": len(requests),
        "set of prompts": prompts.hexdigest(),
        "sampling or seed": sampling.hexdigest(),
    }


def earlier_seed(path: Path) -> int | None:
    """The seed of the unfinished run of a file, to be used again on --resume."""
    sidecar = _sidecar(path)
    seed = _read_run(sidecar).get("seed") if is_there(sidecar) else None
    return seed if isinstance(seed, int) else None


class ResultFile:
    """The lines of one run, including those of earlier processes. Nothing is written before `open`.

    A path that is not a regular file, such as a pipe, cannot be resumed.

    Raises: UsageError if the file has lines, and they are of another run or `resume` is false.
    """

    def __init__(
        self, path: Path, requests: Sequence[Request], run: Mapping[str, Any], resume: bool
    ) -> None:
        self.path, self.run = path, json.loads(json.dumps(run))
        self.resumable = _is_resumable(path)
        self._sidecar = _sidecar(path)
        self._expected = _expected(requests)
        self.n_total = len(self._expected)
        self.done: set[Key] = set()
        self._n_complete_bytes = 0  # bytes of the complete lines, which are kept
        self._file: BufferedWriter | None = None
        if resume and not self.resumable:
            raise UsageError(f"--resume: {path} is not a regular file, so it cannot be continued")
        self._n_bytes_at_start = path.stat().st_size if self.resumable and is_there(path) else 0
        if self._n_bytes_at_start and resume:
            self._continue()
        elif self._n_bytes_at_start:
            what = "an unfinished run" if is_there(self._sidecar) else "results"
            raise UsageError(
                f"{path}: contains {what}; continue with --resume, remove the file, or give "
                "another name"
            )

    @property
    def is_complete(self) -> bool:
        return len(self.done) == self.n_total

    def missing(self, requests: Sequence[Request]) -> list[Request]:
        """Requests with at least one missing choice."""
        return [
            request
            for request in requests
            if any((request.index, choice) not in self.done for choice in range(request.params.n))
        ]

    def open(self) -> None:
        """Opens the file for appending, and removes an incomplete last line.

        Raises: UsageError if the file cannot be written, or another process writes it.
        """
        try:
            self._file = self.path.open("ab")
            if self.resumable:
                self._lock(self._file.fileno())
                self._file.truncate(self._n_complete_bytes)
                # The sidecar must be complete on disk before any line is written.
                run = json.dumps(self.run, indent=1).encode()
                replace_file(self._sidecar, growing_file(self._sidecar), run)
        except OSError as error:
            raise UsageError(f"--output {self.path}: {error.strerror or error}") from error

    def write(self, completion: Completion) -> None:
        """Appends a missing completion; --resume generates interrupted ones again.

        Raises: WriteError if the disk is full or fails.
        """
        assert self._file is not None
        key = (completion.index, completion.choice)
        if key in self.done or (self.resumable and completion.finish_reason not in _COMPLETE):
            return
        try:
            self._file.write(json.dumps(completion.to_json()).encode() + b"\n")
            self._file.flush()
        except OSError as error:
            raise self._write_error(error) from error
        self.done.add(key)

    def close(self) -> None:
        """Closes the file, and removes the sidecar if no completion is missing."""
        assert self._file is not None
        try:
            if self.resumable and self.is_complete:
                os.fsync(self._file.fileno())
                self._sidecar.unlink(missing_ok=True)
            self._file.close()
        except OSError as error:
            raise self._write_error(error) from error

    def _continue(self) -> None:
        if is_there(self._sidecar):
            self._require_same(_read_run(self._sidecar))
        for number, line in enumerate(whole_lines(self.path), start=1):
            self.done.add(self._key(number, line))
            self._n_complete_bytes += len(line)
        if not is_there(self._sidecar) and not self.is_complete:
            raise UsageError(
                f"{self.path}: has {len(self.done)} of {self.n_total} completions, but "
                f"{self._sidecar.name}, which identifies their run, is missing; remove the file to "
                "start again, or give another name"
            )

    def _require_same(self, earlier_run: Mapping[str, Any]) -> None:
        difference = changed(earlier_run, self.run)
        if difference is None:
            return
        earlier, current = _shown(earlier_run.get(difference)), _shown(self.run.get(difference))
        values = "" if difference in _DIGESTS else f" ({earlier} then, {current} now)"
        raise UsageError(
            f"{self.path}: the unfinished run in it had a different {difference}{values}; give the "
            f"same one, or remove {self.path.name} to start again"
        )

    def _key(self, number: int, line: bytes) -> Key:
        """The request and choice of a line's completion."""
        try:
            value = json.loads(line)
            key = value["index"], value.get("choice", 0)
            is_expected = self._expected.get(key) == value["n_prompt_tokens"]
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            is_expected, key = False, (0, 0)
        if not is_expected or key in self.done:
            raise UsageError(
                f"{self.path}, line {number}: not a completion of these prompts, or a second one "
                f"for the same choice; remove the line, or {self.path.name} to start again"
            )
        return key

    def _lock(self, descriptor: int) -> None:
        """Locks the file against other runs, and checks that none has written since it was read."""
        if not take_lock_if_supported(descriptor):
            raise UsageError(f"{self.path}: another run is writing it; wait until that run ends")
        if os.fstat(descriptor).st_size != self._n_bytes_at_start:
            raise UsageError(f"{self.path}: another run has written to it; start again")

    def _write_error(self, error: OSError) -> WriteError:
        text = f"{self.path}: {error.strerror or error}; {len(self.done)} completions are written"
        return WriteError(f"{text}; --resume continues after them" if self.resumable else text)


def _is_resumable(path: Path) -> bool:
    return is_file(path) or not is_there(path)


def _expected(requests: Sequence[Request]) -> dict[Key, int]:
    """The number of prompt tokens of every expected completion."""
    return {
        (request.index, choice): len(request.prompt)
        for request in requests
        for choice in range(request.params.n)
    }


def _model_digest(model: ModelFiles) -> str:
    """A digest of the names, sizes and times of a model's files."""
    digest = hashlib.blake2b(digest_size=16)
    for path in (model.config, *model.weights):
        stat = path.stat()
        digest.update(repr((path.name, stat.st_size, stat.st_mtime_ns)).encode())
    return digest.hexdigest()


def _read_run(sidecar: Path) -> dict[str, Any]:
    try:
        return read_json_object(sidecar, _MAX_RUN_BYTES)
    except CheckpointError as error:
        raise UsageError(f"{error}; remove it and the output file to start again") from error


def _shown(value: object) -> str:
    return "none" if value is None else str(value)[:100]
