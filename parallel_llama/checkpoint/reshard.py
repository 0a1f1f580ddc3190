"""From a checkpoint in one layout to a folder in another, tensor by tensor.

Values are moved and not computed: they change only where another dtype is asked for. Memory is
bounded by the largest tensor. Whatever ends the process, under the target's name is nothing or the
whole.
"""

import errno
import resource
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch

from parallel_llama.bounded_files import is_file
from parallel_llama.checkpoint.canonical_pieces import canonical_pieces, dtype_name
from parallel_llama.checkpoint.layout import Layout
from parallel_llama.checkpoint.manifest import (
    FileEntry,
    Manifest,
    Source,
    hash_bytes,
    write_manifest,
)
from parallel_llama.checkpoint.partial_folder import PartialFolder, partial_bytes
from parallel_llama.checkpoint.reading import Checkpoint
from parallel_llama.checkpoint.tensor_writer import TensorWriter, Written
from parallel_llama.config import ModelArgs
from parallel_llama.errors import UsageError, WriteError
from parallel_llama.model_files import ModelFiles
from parallel_llama.plan import parameters

# Beside the files: journal, manifest, and what a file system needs for itself.
SPARE_BYTES = 16 << 20

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class Result:
    """What a run wrote, all small files included, and what it took."""

    files: int
    bytes: int
    seconds: float
    peak_rss_bytes: int


def stored_dtypes(checkpoint: Checkpoint, args: ModelArgs) -> dict[str, torch.dtype]:
    """The dtype of every tensor as it would be read, without reading any."""
    return {param.name: checkpoint.read(param, range(0)).dtype for param in parameters(args)}


class Reshard:
    """One run, checked and not started: a checkpoint that passed, and the layout to write it in.

    `dtypes` are the target's by Meta's names; `beside` the small files that go along.

    Raises: UsageError if there is not enough space.
    """

    def __init__(
        self,
        source: ModelFiles,
        args: ModelArgs,
        checkpoint: Checkpoint,
        layout: Layout,
        target: Path,
        *,
        dtypes: Mapping[str, torch.dtype],
        beside: Mapping[str, bytes],
        resume: bool,
    ) -> None:
        self._source, self._args, self._checkpoint = source, args, checkpoint
        self._layout, self._target, self._resume = layout, target, resume
        self._dtypes = dtypes
        self._small = {**beside, **layout.metadata()}
        self._n_bytes = sum(file.n_bytes for file in layout.files)
        # What an unfinished run must agree with to be continued.
        self._plan = {
            "layout": layout.kind,
            "files": {file.name: file.n_bytes for file in layout.files},
            "dtypes": {name: dtype_name(dtype) for name, dtype in dtypes.items()},
            "source": {path.name: _identity(path) for path in (source.config, *source.weights)},
            "beside": {name: hash_bytes(data) for name, data in self._small.items()},
        }
        self._require_space()

    def run(
        self,
        on_start: Callable[[int, int], None] = lambda _total, _done: None,
        on_bytes: Callable[[int], None] = lambda _: None,
    ) -> Result:
        """Write the folder.

        `on_start` is told the bytes of all weight files, and how many an earlier run has written;
        `on_bytes` of every piece of this one.

        Raises: UsageError if another process writes it, or an unfinished run lies there that is
        not to be, or cannot be, continued; DamagedWeights or WriteError if reading or writing
        fails, after which --resume goes on.
        """
        began = time.monotonic()
        try:
            with closing(PartialFolder(self._target, self._plan, self._resume)) as partial:
                done = [Written.from_line(line) for line in partial.done]
                on_start(self._n_bytes, sum(tensor.n_bytes for tensor in done))
                n_files, n_bytes = self._fill(partial, done, on_bytes)
        except OSError as error:
            raise self._failure(error) from error
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return Result(n_files, n_bytes, time.monotonic() - began, peak)

    def _fill(
        self, partial: PartialFolder, done: list[Written], on_bytes: Callable[[int], None]
    ) -> tuple[int, int]:
        """Write what is not done yet; returns the number of files, and their bytes."""
        self._layout.create(partial.files)
        names = {tensor.name for tensor in done}
        left = [param for param in parameters(self._args) if param.name not in names]
        with closing(TensorWriter(self._layout, partial, on_bytes)) as writer:
            written = done + writer.write(canonical_pieces(self._checkpoint, left, self._dtypes))
            self._layout.finish(partial.files)
            hashes = writer.file_hashes()
        for name, data in self._small.items():
            path = partial.files / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(data)
        write_manifest(partial.files, self._manifest(written, hashes))
        sizes = [path.stat().st_size for path in partial.files.rglob("*") if is_file(path)]
        partial.commit()
        return len(sizes), sum(sizes)

    def _manifest(self, written: list[Written], hashes: Mapping[str, str]) -> Manifest:
        """In the order of the model, whatever a continued run wrote first."""
        by_name = {tensor.name: tensor for tensor in written}
        tensors = [by_name[param.name] for param in parameters(self._args)]
        files = {f.name: FileEntry(f.n_bytes, hashes[f.name]) for f in self._layout.files}
        for name, data in sorted(self._small.items()):
            files[name] = FileEntry(len(data), hash_bytes(data))
        assert self._source.kind != "config"
        return Manifest(
            layout=self._layout.kind,
            tensors={tensor.name: tensor.entry for tensor in tensors},
            files=files,
            units={tensor.name: tensor.units for tensor in tensors if tensor.units},
            source=Source(
                self._source.kind,
                {path.name: path.stat().st_size for path in self._source.weights},
                {tensor.name: tensor.source for tensor in tensors if tensor.source is not None},
            ),
        )

    def _require_space(self) -> None:
        small = sum(len(data) for data in self._small.values())
        wanted = self._n_bytes + small + SPARE_BYTES - partial_bytes(self._target)
        free = shutil.disk_usage(self._target.parent).free
        if wanted > free:
            raise UsageError(
                f"{self._target}: needs {wanted} bytes and {free} are free there; free "
                f"{wanted - free} more, or write to another disk"
            )

    def _failure(self, error: OSError) -> WriteError:
        where = error.filename or self._target
        if error.errno in NO_ROOM:
            return WriteError(
                f"{self._target}: no room for more ({error.strerror}); make room and run again "
                "with --resume"
            )
        return WriteError(
            f"{where}: cannot be written: {error.strerror or error}; run again with --resume when "
            "that is mended"
        )


def _identity(path: Path) -> str:
    """What changes when a file does."""
    stat = path.stat()
    return f"{stat.st_size} bytes of {stat.st_mtime_ns}"
