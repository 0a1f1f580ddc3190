"""Converts a model from one layout to another, tensor by tensor.

Values change only if another dtype or quantisation is requested, or an adapter is merged. Memory
is bounded by the largest tensor. However the process ends, the target is missing or complete.
"""

import errno
import resource
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch

from parallel_llama.checkpoint import manifest
from parallel_llama.checkpoint.byte_ranges import ReusedMemory
from parallel_llama.checkpoint.canonical import canonical_pieces
from parallel_llama.checkpoint.checkpoint import Checkpoint
from parallel_llama.checkpoint.merged import MergedCheckpoint
from parallel_llama.checkpoint.meta_folder import (
    NORM_VARIANTS,
    MetaFolder,
    as_bytes,
    meta_vocab_size,
    norm_variants,
)
from parallel_llama.checkpoint.reading import open_checkpoint
from parallel_llama.config.adapter import Adapter, load_adapter
from parallel_llama.config.layouts import (
    input_formats,
    load_generation_defaults,
    load_model_args,
)
from parallel_llama.dtypes import STORED, InputFormat, QuantFormat, ScaledFormat, StoredFormat
from parallel_llama.errors import UsageError, WriteError
from parallel_llama.families import parameters
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.families.weights import Param
from parallel_llama.files.bounded_files import is_file
from parallel_llama.files.model_files import ModelFiles
from parallel_llama.files.partial_output import sync
from parallel_llama.ops.formats import dtype_name, torch_dtype
from parallel_llama.reshard.gguf_types import copied_types, copies_tensors, weight_types
from parallel_llama.reshard.layout import Layout
from parallel_llama.reshard.meta_layout import MetaLayout
from parallel_llama.reshard.safetensors_layout import HFLayout, NativeLayout
from parallel_llama.reshard.sidecar_files import gguf_file_fields, sidecar_files
from parallel_llama.reshard.target_folder import (
    PartialFolder,
    TargetKind,
    check_parts,
    check_target,
    default_target_quant,
    merged_quant,
    partial_bytes,
    target_formats,
)
from parallel_llama.reshard.tensor_writer import Pieces, TensorWriter, Written

# Disk space for the journal, the manifest and the file system's metadata.
SPARE_BYTES = 16 << 20

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class Result:
    """The number of files and bytes of the target, and the time and memory that the run took."""

    files: int
    bytes: int
    seconds: float
    peak_rss_bytes: int


def reshard(
    source: ModelFiles,
    target: Path,
    *,
    layout: TargetKind,
    n_parts: int,
    dtype: str | None = None,
    quant: str | None = None,
    merge_adapter: Path | None = None,
    resume: bool = False,
    on_start: Callable[[int, int], None] = lambda _total, _done: None,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> Result:
    """Write the files of a model in another layout.

    Args:
        n_parts: number of files of weights.
        dtype: dtype of unquantised weights; by default the dtype of the source.
        quant: quantisation of the matrices, one of `QUANTS`, or of `BLOCK_TYPES` for a GGUF file.
        merge_adapter: the folder of a LoRA adapter that is merged into the weights.
        resume: continue an unfinished run.
        on_start: called after all checks with the bytes of all weights, and the bytes that an
            earlier run has written.
        on_bytes: called with the size of each piece that is written.

    Raises: UsageError for an invalid request and CheckpointError for a damaged source or adapter,
    both before anything is written; DamagedWeights or WriteError if reading or writing fails.
    """
    source.require_weights()
    check_target(source, target, layout)
    args = load_model_args(source, meta_vocab_size)
    adapter = None if merge_adapter is None else load_adapter(merge_adapter, args)
    check_parts(layout, args, n_parts)
    formats = target_formats(source, args, layout, quant, dtype, adapter)
    is_scaled = any(isinstance(form, ScaledFormat) for form in formats.values())
    has_dtype = dtype is not None or (
        default_target_quant(source, args) == "none" and not is_scaled
    )
    with closing(open_checkpoint(source, args, ReusedMemory().empty)) as base:
        base.check(args)
        dtypes = {p.name: base.read(p, range(0)).dtype for p in parameters(args)}
        if dtype is not None:
            dtypes = dict.fromkeys(dtypes, torch_dtype(dtype))
        checkpoint: Checkpoint = base
        if adapter is not None:
            args, quant = adapter.args, merged_quant(quant)
            dtypes = _with_output(dtypes, args)
            checkpoint = MergedCheckpoint(base, adapter, dtypes)
        if has_dtype:
            args = replace(args, dtype=_dtype_of_matrices(args, dtypes))
        if layout == "gguf":
            copies = copies_tensors(source, quant, dtype)
            quantised = {n: form for n, form in formats.items() if isinstance(form, QuantFormat)}
            job = _gguf_job(source, args, checkpoint, target, dtypes, quantised, quant, copies)
        else:
            keeps = bool(formats) and quant in (None, "stored")
            inputs = input_formats(source, args) if keeps else {}
            job = _folder_job(
                source, args, checkpoint, target, layout, n_parts, dtypes, formats, inputs
            )
        job = replace(job, adapter=adapter)
        job.require_space()
        return job.write(resume, on_start, on_bytes)


def _folder_job(
    source: ModelFiles,
    args: ModelArgs,
    checkpoint: Checkpoint,
    target: Path,
    layout: TargetKind,
    n_parts: int,
    dtypes: Mapping[str, torch.dtype],
    formats: Mapping[str, StoredFormat],
    inputs: Mapping[str, InputFormat],
) -> "ReshardJob":
    """The conversion into a folder of `n_parts` files of weights."""
    defaults, variants = load_generation_defaults(source), norm_variants(source)
    base = checkpoint.base if isinstance(checkpoint, MergedCheckpoint) else checkpoint
    if isinstance(checkpoint, MergedCheckpoint):
        variants = {n: copies for n, copies in variants.items() if not checkpoint.changes(n)}
    sidecars = sidecar_files(source, defaults)
    target_layout: Layout
    if layout == "meta":
        dim = base.embeddings_dim() if isinstance(base, MetaFolder) else 0
        target_layout = MetaLayout(args, dtypes, n_parts, dim, variants)
    else:
        if variants:
            sidecars[NORM_VARIANTS] = as_bytes(variants)
        if layout == "hf":
            target_layout = HFLayout(args, dtypes, n_parts, defaults)
        else:
            target_layout = NativeLayout(args, dtypes, n_parts, formats, inputs)
    small = {**sidecars, **target_layout.metadata()}
    pieces = partial(canonical_pieces, checkpoint, dtypes=dtypes, formats=formats)
    return ReshardJob(source, args, target_layout, target, dtypes, formats, small, pieces)


def _gguf_job(
    source: ModelFiles,
    args: ModelArgs,
    checkpoint: Checkpoint,
    target: Path,
    dtypes: Mapping[str, torch.dtype],
    formats: Mapping[str, QuantFormat],
    quant: str | None,
    copies: bool,
) -> "ReshardJob":
    """The conversion into a GGUF file. With `copies`, the tensors of a GGUF source are copied."""
    # The gguf package is slow to import.
    from parallel_llama.reshard.copied_tensors import copied_pieces
    from parallel_llama.reshard.gguf_layout import GGUFLayout

    names = {name: dtype_name(dtype) for name, dtype in dtypes.items()}
    types = copied_types(source, args) if copies else weight_types(args, names, formats, quant)
    target_layout = GGUFLayout(target.name, args, types, gguf_file_fields(source, args, types))
    dtypes = {name: torch_dtype(STORED.get(kind, "float32")) for name, kind in types.items()}
    pieces: Callable[[Sequence[Param]], Pieces]
    if copies:
        pieces = partial(copied_pieces, checkpoint)
    else:
        pieces = partial(canonical_pieces, checkpoint, dtypes=dtypes, formats=formats)
    return ReshardJob(source, args, target_layout, target, dtypes, formats, {}, pieces)


@dataclass(frozen=True)
class ReshardJob:
    """A conversion that passed all checks and can be started.

    Args:
        dtypes: The dtypes of the target's weights, by Meta's names.
        formats: The formats of the target's quantised weights, by Meta's names.
        small: The files beside the weights, by name.
        pieces: Yields the pieces of the given weights.
        adapter: The adapter that `pieces` merges into the weights.
    """

    source: ModelFiles
    args: ModelArgs
    layout: Layout
    target: Path
    dtypes: Mapping[str, torch.dtype]
    formats: Mapping[str, StoredFormat]
    small: Mapping[str, bytes]
    pieces: Callable[[Sequence[Param]], Pieces]
    adapter: Adapter | None = None

    @property
    def n_bytes(self) -> int:
        return sum(file.n_bytes for file in self.layout.files)

    def require_space(self) -> None:
        """Raises: UsageError if there is not enough disk space."""
        small = sum(len(data) for data in self.small.values())
        needed = self.n_bytes + small + SPARE_BYTES - partial_bytes(self.target)
        free = shutil.disk_usage(self.target.parent).free
        if needed > free:
            raise UsageError(
                f"{self.target}: needs {needed} bytes and {free} are free there; free "
                f"{needed - free} more, or write to another disk"
            )

    def write(
        self, resume: bool, on_start: Callable[[int, int], None], on_bytes: Callable[[int], None]
    ) -> Result:
        """Writes the folder or the GGUF file.

        Raises: UsageError as `PartialFolder`; DamagedWeights or WriteError if reading or writing
        fails, after which --resume continues.
        """
        start_s, plan = time.monotonic(), self._plan()
        try:
            with closing(PartialFolder(self.target, plan, resume)) as unfinished:
                done = [Written.from_line(line) for line in unfinished.done]
                on_start(self.n_bytes, sum(tensor.n_bytes for tensor in done))
                n_files, n_bytes = self._fill(unfinished, done, on_bytes)
        except OSError as error:
            raise self._failure(error) from error
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return Result(n_files, n_bytes, time.monotonic() - start_s, peak)

    @property
    def _weights(self) -> tuple[Path, ...]:
        """The weight files that are read."""
        return (*self.source.weights, *([] if self.adapter is None else [self.adapter.weights]))

    def _plan(self) -> dict[str, Any]:
        """Describes the run; an unfinished run is continued only if its description is equal."""
        configs = [self.source.config, *([] if self.adapter is None else [self.adapter.config])]
        is_gguf = self.layout.kind == "gguf"
        header = {file.name: file.pieces[0][1] for file in self.layout.files if is_gguf}
        return {
            "layout": self.layout.kind,
            "dtypes": {
                **{name: dtype_name(dtype) for name, dtype in self.dtypes.items()},
                **{name: form.name for name, form in self.formats.items()},
            },
            "files": {file.name: file.n_bytes for file in self.layout.files},
            "source": {p.name: _identity(p) for p in (*configs, *self._weights)},
            "beside": {
                name: manifest.hash_bytes(data) for name, data in {**self.small, **header}.items()
            },
        }

    def _fill(
        self, unfinished: PartialFolder, done: list[Written], on_bytes: Callable[[int], None]
    ) -> tuple[int, int]:
        """Write the remaining tensors. Returns: the number of files and their bytes."""
        if done:
            self._require_files(unfinished)
        self.layout.create(unfinished.files)
        if not done:
            for file in self.layout.files:
                sync(unfinished.files / file.name)
            sync(unfinished.files)
        done_names = {tensor.name for tensor in done}
        remaining = [
            p for p in parameters(self.args) if self.layout.written_with(p) not in done_names
        ]
        with closing(TensorWriter(self.layout, unfinished, on_bytes)) as writer:
            written = done + writer.write(self.pieces(remaining))
            self.layout.finish(unfinished.files)
            if self.layout.kind == "gguf":
                (file,) = self.layout.files
                unfinished.commit(file.name)
                return 1, file.n_bytes
            hashes = writer.file_hashes()
        for name, data in self.small.items():
            path = unfinished.files / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(data)
        manifest.write_manifest(unfinished.files, self._manifest(written, hashes))
        sizes = [path.stat().st_size for path in unfinished.files.rglob("*") if is_file(path)]
        unfinished.commit()
        return len(sizes), sum(sizes)

    def _require_files(self, unfinished: PartialFolder) -> None:
        """Raises: UsageError unless all files of an earlier run have their final size.

        The size is on the disk before the first tensor is recorded.
        """
        for file in self.layout.files:
            path = unfinished.files / file.name
            size = path.stat().st_size if is_file(path) else 0
            if size != file.n_bytes:
                raise UsageError(
                    f"{path}: has {size} bytes, and the unfinished run wrote {file.n_bytes}; "
                    f"remove {unfinished.path}, and run again"
                )

    def _manifest(self, written: list[Written], hashes: Mapping[str, str]) -> manifest.Manifest:
        """The manifest, in the order of the model's parameters also for a continued run."""
        by_name = {tensor.name: tensor for tensor in written}
        tensors = [by_name[param.name] for param in parameters(self.args)]
        files = {f.name: manifest.FileEntry(f.n_bytes, hashes[f.name]) for f in self.layout.files}
        for name, data in sorted(self.small.items()):
            files[name] = manifest.FileEntry(len(data), manifest.hash_bytes(data))
        assert self.source.kind != "config"
        return manifest.Manifest(
            layout=self.layout.kind,
            tensors={tensor.name: tensor.entry for tensor in tensors},
            files=files,
            units={name: hashes for tensor in tensors for name, hashes in tensor.units.items()},
            source=manifest.Source(
                self.source.kind,
                {path.name: path.stat().st_size for path in self._weights},
                {tensor.name: tensor.source for tensor in tensors if tensor.source is not None},
            ),
        )

    def _failure(self, error: OSError) -> WriteError:
        where = error.filename or self.target
        if error.errno in NO_ROOM:
            return WriteError(
                f"{self.target}: no space ({error.strerror}); free space and run again "
                "with --resume"
            )
        return WriteError(
            f"{where}: cannot be written: {error.strerror or error}; run again with --resume once "
            "this is fixed"
        )


def _identity(path: Path) -> str:
    """A string that changes when the file changes."""
    stat = path.stat()
    return f"{stat.st_size} bytes of {stat.st_mtime_ns}"


def _with_output(dtypes: Mapping[str, torch.dtype], args: ModelArgs) -> dict[str, torch.dtype]:
    """The dtypes of a merged model. An output that was tied gets the dtype of the embeddings."""
    embeddings = dtypes["tok_embeddings.weight"]
    return {p.name: dtypes.get(p.name, embeddings) for p in parameters(args)}


def _dtype_of_matrices(args: ModelArgs, dtypes: Mapping[str, torch.dtype]) -> str:
    """The dtype that all matrices fit into, because config.json states one dtype."""
    matrices = {dtypes[param.name] for param in parameters(args) if len(param.shape) > 1}
    return dtype_name(reduce(torch.promote_types, matrices))
