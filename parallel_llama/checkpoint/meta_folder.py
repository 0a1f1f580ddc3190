"""Reading a Meta folder: consolidated.NN.pth, each file the shard of one rank of the past.

Any number of files gives any number of ranks. Which way a tensor was cut is told from its shapes;
rows of wq and wk are reordered from interleaved to half-split. The files are mapped, so only the
pages of a slice are touched.
"""

import logging
import re
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from parallel_llama.checkpoint.byte_ranges import sliced_shape
from parallel_llama.checkpoint.names import is_skipped
from parallel_llama.checkpoint.rotary import is_rotary, to_half, whole_heads
from parallel_llama.checkpoint.structure import listed, refuse_difference
from parallel_llama.checkpoint.torch_file import open_torch_file
from parallel_llama.config import ModelArgs
from parallel_llama.errors import CheckpointError, DamagedWeights
from parallel_llama.model_files import ModelFiles
from parallel_llama.plan import Param, local_kv_heads, parameters

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Copy:
    """A part of a tensor in one file, where it begins at row (or column) `start`."""

    file: int
    start: int = 0


@dataclass(frozen=True)
class Part:
    """Some rows (or columns) of a tensor, and every copy of them."""

    size: int
    copies: tuple[Copy, ...]


@dataclass(frozen=True)
class Layout:
    """How a tensor lies over the files: its parts, joined along `dim` in order, are the whole.

    A replicated tensor is one part with a copy in every file.
    """

    dim: int
    parts: tuple[Part, ...]


class MetaFolder:
    """The tensors of a Meta folder.

    Raises: CheckpointError if a file is damaged or holds anything but plain tensors.
    """

    def __init__(self, files: ModelFiles, args: ModelArgs) -> None:
        self.path, self.args = files.path, args
        self._paths = files.weights
        self._states = [open_torch_file(path) for path in files.weights]
        self._warned = False

    def check(self, args: ModelArgs) -> None:
        params = {param.name: param for param in parameters(args)}
        held = [
            (name, path, tensor)
            for path, state in zip(self._paths, self._states, strict=True)
            for name, tensor in state.items()
        ]
        missing = [
            f"{name} ({path.name})"
            for name in params
            for path, state in zip(self._paths, self._states, strict=True)
            if name not in state
        ]
        complete = [
            param for param in params.values() if all(param.name in s for s in self._states)
        ]
        refuse_difference(
            self.path,
            {
                "missing": missing,
                "extra": [
                    f"{name!r} ({path.name})"
                    for name, path, _ in held
                    if name not in params and not is_skipped(name, "meta", args)
                ],
                "misshapen": [
                    f"{param.name} is {listed(self._shapes(param.name))} over the files, expected "
                    f"{list(param.shape)}"
                    for param in complete
                    if self._layout(param) is None
                ],
            },
        )
        for name, path, tensor in held:
            if name in params and tensor.dtype not in DTYPES:
                raise CheckpointError(
                    f"{path}: tensor {name!r} has the dtype {tensor.dtype}; readable are "
                    "float64, float32, float16 and bfloat16"
                )

    def read(self, param: Param, rows: range) -> Tensor:
        if not is_rotary(param):
            return self._stored(param, rows)
        heads = whole_heads(rows, self.args.head_dim)
        reordered = to_half(self._stored(param, heads), self.args.head_dim)
        return reordered[rows.start - heads.start : rows.stop - heads.start]

    def close(self) -> None:
        self._states = []

    def embeddings_dim(self) -> Literal[0, 1]:
        """The dimension along which the embeddings are cut; 0 if there is one file."""
        embeddings = next(parameters(self.args))
        layout = self._layout(embeddings)
        return 1 if layout is not None and layout.dim == 1 else 0

    def _stored(self, param: Param, rows: range) -> Tensor:
        """A slice with its rows in the order of the files."""
        layout = self._layout(param)
        if layout is None:
            raise CheckpointError(
                f"{self.path}: {param.name} is {listed(self._shapes(param.name))} over the files, "
                f"expected {list(param.shape)}"
            )
        if not rows:
            return torch.empty(sliced_shape(param, rows), dtype=self._states[0][param.name].dtype)
        pieces: list[Tensor] = []
        start = 0
        for part in layout.parts:
            # Cut across the files' own cut: every part gives these rows. Along it: what overlaps.
            cut = rows
            if layout.dim == param.dim:
                cut = range(max(rows.start - start, 0), min(rows.stop - start, part.size))
            start += part.size
            if cut:
                pieces.append(self._same(param, part.copies, cut))
        return torch.cat(pieces, layout.dim)  # copies, so that nothing keeps the map alive

    def _same(self, param: Param, copies: tuple[Copy, ...], cut: range) -> Tensor:
        """A slice of the first copy, after a look at the others."""
        first, *others = (
            self._states[copy.file][param.name].narrow(param.dim, copy.start + cut.start, len(cut))
            for copy in copies
        )
        for copy, other in zip(copies[1:], others, strict=True):
            if torch.equal(first, other):
                continue
            if param.axis is not None:
                raise DamagedWeights(
                    f"{self._paths[copy.file]}: {param.name} differs from its copy in "
                    f"{self._paths[copies[0].file].name}; files of one checkpoint hold equal KV "
                    "heads"
                )
            if not self._warned:
                logger.warning(
                    "%s differs between %s and %s by up to %g; the first file's is taken, here and "
                    "for any other replicated tensor",
                    param.name,
                    self._paths[copies[0].file].name,
                    self._paths[copy.file].name,
                    (first.double() - other.double()).abs().max().item(),
                )
                self._warned = True
        return first

    def _shapes(self, name: str) -> list[str]:
        return [str(list(state[name].shape)) for state in self._states]

    def _layout(self, param: Param) -> Layout | None:
        """How the tensor lies over the files; None if its shapes do not add up."""
        shapes = [tuple(state[param.name].shape) for state in self._states]
        if param.axis is None:
            every = tuple(Copy(file) for file in range(len(shapes)))
            whole = Part(param.shape[0], every)
            return Layout(0, (whole,)) if set(shapes) == {param.shape} else None
        # Llama 1 and 2 cut the embeddings along dim 1, Llama 3 along dim 0.
        dims = (0, 1) if param.name == "tok_embeddings.weight" else (param.dim,)
        for dim in dims:
            if _joined(shapes, dim) == param.shape:
                return Layout(
                    dim,
                    tuple(Part(shape[dim], (Copy(file),)) for file, shape in enumerate(shapes)),
                )
        return self._repeated_heads(param, shapes) if param.axis == "kv_heads" else None

    def _repeated_heads(self, param: Param, shapes: list[tuple[int, ...]]) -> Layout | None:
        """The layout of KV heads of which some are in several files; None if it is none.

        Each file holds those that its own query heads need: with twice as many files as KV heads
        0, 0, 1, 1, and where files cut a group of query heads 0 1, 1 2.
        """
        head_dim, group_size = self.args.head_dim, self.args.n_heads // self.args.n_kv_heads
        queries = re.sub(r"\.w[kv]\.", ".wq.", param.name)
        if not all(queries in state for state in self._states):
            return None
        rows = [state[queries].shape[0] for state in self._states]
        if any(count % head_dim for count in rows) or sum(rows) != self.args.n_heads * head_dim:
            return None
        copies: list[list[Copy]] = [[] for _ in range(self.args.n_kv_heads)]
        stop = 0
        for file, count in enumerate(rows):
            start, stop = stop, stop + count // head_dim
            kv_heads = local_kv_heads(range(start, stop), group_size)
            if shapes[file] != (len(kv_heads) * head_dim, *param.shape[1:]):
                return None
            for place, head in enumerate(kv_heads):
                copies[head].append(Copy(file, place * head_dim))
        return Layout(0, tuple(Part(head_dim, tuple(held)) for held in copies))


def differing_norms(files: ModelFiles) -> dict[str, list[Tensor]]:
    """The norms of which the files hold different copies, with the copy of each file.

    Compared byte for byte, so that what is kept of them is exact.

    Raises: CheckpointError if a file is damaged.
    """
    states = [open_torch_file(path) for path in files.weights]
    held = {name for state in states for name in state if name.endswith("norm.weight")}
    norms = {
        name: [state[name].clone() for state in states]
        for name in sorted(held)
        if all(name in state for state in states)
    }
    return {
        name: copies
        for name, copies in norms.items()
        if any(not _identical(copies[0], other) for other in copies[1:])
    }


def _identical(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.dtype) == (other.shape, other.dtype) and torch.equal(
        one.view(-1).view(torch.uint8), other.view(-1).view(torch.uint8)
    )


def meta_vocab_size(files: ModelFiles) -> int:
    """Rows of the embeddings over all files, for params.json files that say vocab_size -1.

    Raises: CheckpointError if a file is damaged or lacks the embeddings or the last norm.
    """
    shapes: list[tuple[int, ...]] = []
    dim = 0
    for path in files.weights:
        state = open_torch_file(path)
        for name, n_dims in (("tok_embeddings.weight", 2), ("norm.weight", 1)):
            if name not in state or state[name].dim() != n_dims:
                raise CheckpointError(f"{path}: lacks {name}, needed to count the vocabulary")
        shapes.append(tuple(state["tok_embeddings.weight"].shape))
        dim = state["norm.weight"].shape[0]
    for cut in (0, 1):
        whole = _joined(shapes, cut)
        if whole is not None and whole[1] == dim:
            return whole[0]
    raise CheckpointError(
        f"{files.path}: tok_embeddings.weight is {listed([str(list(s)) for s in shapes])} over the "
        f"files, which does not add up to rows of {dim}"
    )


def _joined(shapes: list[tuple[int, ...]], dim: int) -> tuple[int, ...] | None:
    """The shape of the parts joined along `dim`; None if they do not fit together."""
    others = {(*shape[:dim], *shape[dim + 1 :]) for shape in shapes}
    if len(others) != 1 or any(len(shape) <= dim for shape in shapes):
        return None
    first = shapes[0]
    return (*first[:dim], sum(shape[dim] for shape in shapes), *first[dim + 1 :])
