"""Writing a Meta folder: consolidated.NN.pth, one file for each of any number of ranks.

Where the number of files divides the heads, channels and rows the cuts are Meta's own, so Meta's
program loads the files; elsewhere they are the plan's. A KV head that two files need is in both.
"""

import json
import logging
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from parallel_llama.checkpoint.layout import TargetFile
from parallel_llama.checkpoint.manifest import tensor_bytes
from parallel_llama.checkpoint.norm_variants import NORM_VARIANTS, as_bytes
from parallel_llama.checkpoint.rotary import is_rotary, to_interleaved
from parallel_llama.checkpoint.torch_skeleton import Record, TorchSkeleton, torch_skeleton
from parallel_llama.config import ModelArgs
from parallel_llama.config.meta_config import meta_config
from parallel_llama.config.params_writing import beyond_meta, meta_params
from parallel_llama.errors import CheckpointError
from parallel_llama.plan import Param, Share, make_plan, parameters

READ_AT_ONCE = 1 << 22

EMBEDDINGS, OUTPUT = "tok_embeddings.weight", "output.weight"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Cut:
    """What one file holds of a tensor: a range along a dimension, all of the other."""

    dim: int
    rows: range


class MetaLayout:
    """A Meta folder of `n_parts` files; `dtypes` are the tensors' by Meta's names.

    `embeddings_dim` is the dimension along which the embeddings are cut: 0 as in Llama 3, 1 as in
    Llama 1 and 2. `variants` are a source's copies of norms that differ, one for each of its files:
    as many files as it had get them back, and any other number keeps them beside the weights.
    Tied embeddings are stored a second time as output.weight, which Meta's program needs.

    Raises: UsageError unless n_parts is 1 to n_heads, or if params.json and config.json cannot say
    what the model is.
    """

    kind: Literal["meta"] = "meta"

    def __init__(
        self,
        args: ModelArgs,
        dtypes: Mapping[str, torch.dtype],
        n_parts: int,
        embeddings_dim: int = 0,
        variants: Mapping[str, Sequence[Tensor]] | None = None,
    ) -> None:
        self._args = args
        self._variants = variants or {}
        self._params, self._config = meta_params(args), meta_config(args)
        self._cuts = _cuts(args, n_parts, embeddings_dim)
        self._names = [f"consolidated.{number:02}.pth" for number in range(n_parts)]
        self._skeletons = _skeletons(args, dtypes, self._cuts)
        # Of the parts that passed through here; after an interruption the others are read again.
        self._checksums: dict[tuple[str, str], int] = {}
        if beyond := beyond_meta(args):
            logger.warning(
                "Meta's own program cannot run this model, which has %s; config.json says it "
                "beside params.json",
                ", ".join(beyond),
            )

    @property
    def files(self) -> tuple[TargetFile, ...]:
        return tuple(TargetFile(name, skeleton.n_bytes) for name, skeleton in self._by_name())

    def create(self, folder: Path) -> None:
        for name, skeleton in self._by_name():
            descriptor = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                os.truncate(descriptor, skeleton.n_bytes)
                for offset, piece in skeleton.pieces:
                    os.pwrite(descriptor, piece, offset)
            finally:
                os.close(descriptor)

    def parts(self, param: Param, value: Tensor) -> Iterator[tuple[str, int, Tensor]]:
        yield from self._parts(param, value)
        if param.name == EMBEDDINGS and self._args.tied_embeddings:
            yield from self._parts(replace(param, name=OUTPUT), value)

    def finish(self, folder: Path) -> None:
        """Fill in the checksums, so that any program that reads archives finds them whole.

        Raises: CheckpointError if a file has another size than it was made with.
        """
        for name, skeleton in self._by_name():
            descriptor = os.open(folder / name, os.O_RDWR | os.O_CLOEXEC)
            try:
                if (size := os.fstat(descriptor).st_size) != skeleton.n_bytes:
                    raise CheckpointError(
                        f"{folder / name}: has {size} bytes, expected {skeleton.n_bytes}; "
                        "start again"
                    )
                for tensor, record in skeleton.records.items():
                    checksum = self._checksums.get((name, tensor))
                    if checksum is None:
                        checksum = _checksum(folder / name, descriptor, record)
                    for offset in record.checksums:
                        os.pwrite(descriptor, checksum.to_bytes(4, "little"), offset)
            finally:
                os.close(descriptor)

    def metadata(self) -> dict[str, bytes]:
        files = {"params.json": _spelled(self._params), "config.json": _spelled(self._config)}
        if any(len(copies) != len(self._names) for copies in self._variants.values()):
            files[NORM_VARIANTS] = as_bytes(self._variants)
        return files

    def _by_name(self) -> Iterator[tuple[str, TorchSkeleton]]:
        return zip(self._names, self._skeletons, strict=True)

    def _parts(self, param: Param, value: Tensor) -> Iterator[tuple[str, int, Tensor]]:
        copies = self._variants.get(param.name, ())
        for number, (name, skeleton) in enumerate(self._by_name()):
            whole = copies[number].to(value.dtype) if len(copies) == len(self._names) else value
            part = self._cut(param, whole, number)
            if part.nbytes:
                self._checksums[name, param.name] = zlib.crc32(tensor_bytes(part))
                yield name, skeleton.records[param.name].offset, part

    def _cut(self, param: Param, whole: Tensor, number: int) -> Tensor:
        """What a file holds of a tensor, in the file's rotary order."""
        cut = self._cuts[number][param.name]
        part = whole.narrow(cut.dim, cut.rows.start, len(cut.rows))
        if is_rotary(param):
            part = to_interleaved(part, self._args.head_dim)
        return part.contiguous()


def _stored(args: ModelArgs) -> Iterator[Param]:
    """Every tensor of a file: those of the model, and the output that is tied to the embeddings."""
    for param in parameters(args):
        yield param
        if param.name == EMBEDDINGS:
            embeddings = param
    if args.tied_embeddings:
        yield replace(embeddings, name=OUTPUT)


def _cuts(args: ModelArgs, n_parts: int, embeddings_dim: int) -> list[dict[str, Cut]]:
    """For each file, where every tensor is cut."""
    files = []
    for share in make_plan(args, n_parts).shares:
        own = _equal_where_possible(args, n_parts, share)
        cuts = {param.name: Cut(param.dim, param.local_range(own)) for param in _stored(args)}
        if embeddings_dim == 1:
            cuts[EMBEDDINGS] = Cut(1, _equal_part(args.dim, n_parts, share.rank))
        files.append(cuts)
    return files


def _equal_where_possible(args: ModelArgs, n_parts: int, share: Share) -> Share:
    """A share of the plan, with Meta's equal parts of channels and rows where they divide.

    Of the heads the plan makes equal parts itself.
    """

    def part(size: int, planned: range) -> range:
        return planned if size % n_parts else _equal_part(size, n_parts, share.rank)

    return replace(
        share, ffn=part(args.ffn_dim, share.ffn), vocab=part(args.vocab_size, share.vocab)
    )


def _equal_part(size: int, n_parts: int, number: int) -> range:
    return range(size * number // n_parts, size * (number + 1) // n_parts)


def _skeletons(
    args: ModelArgs, dtypes: Mapping[str, torch.dtype], files: Sequence[Mapping[str, Cut]]
) -> list[TorchSkeleton]:
    """One for each file; files of the same shapes share theirs."""
    made: dict[tuple[int, ...], TorchSkeleton] = {}
    skeletons = []
    for cuts in files:
        sizes = tuple(len(cut.rows) for cut in cuts.values())
        if sizes not in made:
            made[sizes] = torch_skeleton(
                {
                    param.name: (_cut_shape(param, cuts[param.name]), dtypes[_origin(param, args)])
                    for param in _stored(args)
                }
            )
        skeletons.append(made[sizes])
    return skeletons


def _cut_shape(param: Param, cut: Cut) -> tuple[int, ...]:
    return (*param.shape[: cut.dim], len(cut.rows), *param.shape[cut.dim + 1 :])


def _origin(param: Param, args: ModelArgs) -> str:
    """The model's own tensor that a tensor of a file is."""
    return EMBEDDINGS if param.name == OUTPUT and args.tied_embeddings else param.name


def _checksum(path: Path, descriptor: int, record: Record) -> int:
    """The CRC-32 of a record that is in the file already."""
    checksum, offset, end = 0, record.offset, record.offset + record.n_bytes
    while offset < end:
        data = os.pread(descriptor, min(READ_AT_ONCE, end - offset), offset)
        if not data:
            raise CheckpointError(f"{path}: ends at byte {offset}, inside a tensor; start again")
        checksum = zlib.crc32(data, checksum)
        offset += len(data)
    return checksum


def _spelled(value: object) -> bytes:
    return json.dumps(value, indent=2).encode() + b"\n"
