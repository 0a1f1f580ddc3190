"""Reading a Meta folder: consolidated.NN.pth, each file the shard of one rank of the past.

Any number of files gives any number of ranks. Which way a tensor was cut is told from its shapes;
rows of wq and wk are reordered from interleaved to half-split. The files are mapped, so only the
pages of a slice are touched.
"""

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel_llama.checkpoint.byte_ranges import sliced_shape
from parallel_llama.checkpoint.names import is_skipped
from parallel_llama.checkpoint.rotary import is_rotary, to_half, whole_heads
from parallel_llama.checkpoint.structure import listed, refuse_difference
from parallel_llama.checkpoint.torch_file import open_torch_file
from parallel_llama.config import ModelArgs
from parallel_llama.errors import CheckpointError
from parallel_llama.model_files import ModelFiles
from parallel_llama.plan import Param, parameters

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Layout:
    """How a tensor lies over the files.

    Its parts, joined along `dim` in order, are the whole; each part names the files that hold a
    copy of it. A replicated tensor is one part with a copy in every file.
    """

    dim: int
    parts: tuple[tuple[int, ...], ...]


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
        for copies in layout.parts:
            size = self._states[copies[0]][param.name].shape[layout.dim]
            # Cut across the files' own cut: every part gives these rows. Along it: what overlaps.
            cut = rows
            if layout.dim == param.dim:
                cut = range(max(rows.start - start, 0), min(rows.stop - start, size))
            start += size
            if cut:
                pieces.append(self._same(param, copies, cut))
        return torch.cat(pieces, layout.dim)  # copies, so that nothing keeps the map alive

    def _same(self, param: Param, copies: tuple[int, ...], cut: range) -> Tensor:
        """A slice of the first copy, after a look at the others."""
        first, *others = (
            self._states[file][param.name].narrow(param.dim, cut.start, len(cut)) for file in copies
        )
        for file, other in zip(copies[1:], others, strict=True):
            if torch.equal(first, other):
                continue
            if param.axis is not None:
                raise CheckpointError(
                    f"{self._paths[file]}: {param.name} differs from its copy in "
                    f"{self._paths[copies[0]].name}; files of one checkpoint hold equal KV heads"
                )
            if not self._warned:
                logger.warning(
                    "%s differs between %s and %s by up to %g; the first file's is taken, here and "
                    "for any other replicated tensor",
                    param.name,
                    self._paths[copies[0]].name,
                    self._paths[file].name,
                    (first.double() - other.double()).abs().max().item(),
                )
                self._warned = True
        return first

    def _shapes(self, name: str) -> list[str]:
        return [str(list(state[name].shape)) for state in self._states]

    def _layout(self, param: Param) -> Layout | None:
        """How the tensor lies over the files; None if its shapes do not add up."""
        shapes = [tuple(state[param.name].shape) for state in self._states]
        every = tuple(range(len(shapes)))
        if param.axis is None:
            return Layout(0, (every,)) if set(shapes) == {param.shape} else None
        # Llama 1 and 2 cut the embeddings along dim 1, Llama 3 along dim 0.
        dims = (0, 1) if param.name == "tok_embeddings.weight" else (param.dim,)
        for dim in dims:
            if _joined(shapes, dim) == param.shape:
                return Layout(dim, tuple((file,) for file in every))
        # More files than KV heads: each holds one head, neighbours the same one (0, 0, 1, 1).
        head = (self.args.head_dim, *param.shape[1:])
        copies, rest = divmod(len(shapes), self.args.n_kv_heads)
        if param.axis == "kv_heads" and set(shapes) == {head} and not rest:
            return Layout(0, tuple(every[at : at + copies] for at in every[::copies]))
        return None


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
