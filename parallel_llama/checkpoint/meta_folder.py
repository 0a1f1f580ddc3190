"""Reads Meta's folders (consolidated.NN.pth) and Mistral's (consolidated.safetensors).

Each file of a Meta folder is the shard of one rank of the run that wrote it. Any number of files
can be read by any number of ranks: the shapes of a tensor's shards show the dimension along which
it was cut. The files are memory-mapped, so only the pages of the requested slice are read.
Mistral's files use Meta's names and store every weight whole.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from parallel_llama.checkpoint.byte_ranges import sliced_shape
from parallel_llama.checkpoint.checkpoint import Checkpoint, refuse_difference
from parallel_llama.checkpoint.manifest import tensor_bytes
from parallel_llama.checkpoint.tensor_files import TensorFiles
from parallel_llama.checkpoint.torch_file import open_torch_file
from parallel_llama.dtypes import DTYPES, STORED
from parallel_llama.errors import CheckpointError, DamagedWeights, listed
from parallel_llama.families import family_of, parameters
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.families.weights import Param
from parallel_llama.files.bounded_files import is_file, read_bytes
from parallel_llama.files.model_files import ModelFiles
from parallel_llama.ops.formats import torch_dtype
from parallel_llama.plan import consecutive, local_kv_heads

_DTYPES = tuple(map(torch_dtype, DTYPES))

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Split:
    """The range of a tensor along `dim` that is in each file.

    The ranges are in order and cover the tensor. Overlapping ranges are copies.
    """

    dim: int
    ranges: list[range]


class MistralFolder(TensorFiles):
    """The tensors of a Mistral folder.

    Raises: CheckpointError if a file is damaged or two files hold the same tensor.
    """

    layout = "meta"
    readable = f"supported: {', '.join(STORED)}; use the unquantised model"


class MetaFolder(Checkpoint):
    """The tensors of a Meta folder.

    Raises: CheckpointError if a file is damaged or holds anything but plain tensors.
    """

    def __init__(self, files: ModelFiles, args: ModelArgs) -> None:
        super().__init__(args, family_of(args).rotary_order["meta"])
        self.path, self._paths = files.path, files.weights
        self._states = [open_torch_file(path) for path in files.weights]
        self._warned = False

    def check(self, args: ModelArgs) -> None:
        params = {param.name: param for param in parameters(args)}
        shards = list(zip(self._paths, self._states, strict=True))
        tensors = [(name, path, tensor) for path, state in shards for name, tensor in state.items()]
        difference = {
            "missing": [
                f"{name} ({path.name})"
                for name in params
                for path, state in shards
                if name not in state
            ],
            "extra": [
                f"{name!r:.200} ({path.name})"
                for name, path, _ in tensors
                if name not in params and not family_of(args).skips(name, "meta", args)
            ],
            "misshapen": [
                f"{param.name} is {_listed_shapes(self._shapes(param.name))} in the files, "
                f"expected {list(param.shape)}"
                for param in params.values()
                if all(param.name in state for state in self._states) and not self._split(param)
            ],
        }
        refuse_difference(self.path, difference)
        for name, path, tensor in tensors:
            if name in params and tensor.dtype not in _DTYPES:
                raise CheckpointError(
                    f"{path}: tensor {name!r:.200} has the dtype {tensor.dtype}; supported: "
                    "float64, float32, float16 and bfloat16"
                )

    def close(self) -> None:
        self._states = []

    def embeddings_dim(self) -> int:
        """The dimension along which the files cut the embeddings; 0 for a single file."""
        split = self._split(next(parameters(self.args)))
        return split.dim if split else 0

    def _stored(self, param: Param, rows: range) -> Tensor:
        if not rows:
            return self._states[0][param.name].new_empty(sliced_shape(param, rows))
        split = self._split(param)
        assert split is not None, "the checkpoint passed its check"
        # Files hold parts along `split.dim`, and everything along other dimensions.
        split_range = rows if split.dim == param.dim else range(param.shape[split.dim])

        def piece(file: int, part: range) -> Tensor:
            tensor = self._states[file][param.name]
            if split.dim != param.dim:
                tensor = tensor.narrow(param.dim, rows.start, len(rows))
            return tensor.narrow(split.dim, part.start - split.ranges[file].start, len(part))

        next_row = split_range.start
        pieces = []
        for file, in_file in enumerate(split.ranges):
            copied = range(max(in_file.start, split_range.start), min(in_file.stop, next_row))
            if copied:
                first = next(n for n, earlier in enumerate(split.ranges) if copied.start in earlier)
                self._compare(param, first, piece(first, copied), file, piece(file, copied))
            added = range(max(in_file.start, next_row), min(in_file.stop, split_range.stop))
            if added:
                pieces.append(piece(file, added))
                next_row = added.stop
        return torch.cat(pieces, split.dim)  # a copy, so that no tensor keeps the file mapped

    def _compare(
        self, param: Param, first: int, first_copy: Tensor, file: int, other_copy: Tensor
    ) -> None:
        """Compare two files' copies of the same rows, and warn about the first that differs.

        Raises: DamagedWeights if copies of KV heads differ.
        """
        if torch.equal(first_copy, other_copy):
            return
        if param.axis is not None:
            raise DamagedWeights(
                f"{self._paths[file]}: {param.name} differs from its copy in "
                f"{self._paths[first].name}; files of one checkpoint have equal copies of KV heads"
            )
        if not self._warned:
            logger.warning(
                "%s differs between %s and %s by up to %g; the first file's copy is used, here "
                "and for any other replicated tensor",
                param.name,
                self._paths[first].name,
                self._paths[file].name,
                (first_copy.double() - other_copy.double()).abs().max().item(),
            )
            self._warned = True

    def _shapes(self, name: str) -> list[tuple[int, ...]]:
        return [tuple(state[name].shape) for state in self._states]

    def _split(self, param: Param) -> Split | None:
        """How the files split a tensor, or None if the shapes of the parts do not fit together."""
        shapes = self._shapes(param.name)
        if param.axis is None:
            same = set(shapes) == {param.shape}
            return Split(0, [range(param.shape[0])] * len(shapes)) if same else None
        # Llama 1 and 2 cut the embeddings along dim 1, Llama 3 along dim 0.
        for dim in (0, 1) if param.name == "tok_embeddings.weight" else (param.file_dim,):
            if _joined(shapes, dim) == param.shape:
                return Split(dim, consecutive([shape[dim] for shape in shapes]))
        ranges = self._kv_ranges(param) if param.axis == "kv_heads" else []
        fit = shapes == [(len(held), *param.shape[1:]) for held in ranges]
        return Split(0, ranges) if fit else None

    def _kv_ranges(self, param: Param) -> list[range]:
        """The rows of KV heads that the query heads of each file need.

        For example, four files of a model with 2 KV heads hold heads 0, 0, 1, 1. If files cut
        between the query heads of a KV head, two files may hold heads 0 1 and 1 2. Empty if the
        query heads of the files do not add up to those of the model.
        """
        head_dim, heads_per_kv = self.args.head_dim, self.args.n_heads // self.args.n_kv_heads
        queries = re.sub(r"\.(w[kv]|k_norm)\.", ".wq.", param.name)
        if not all(queries in state for state in self._states):
            return []
        rows = [state[queries].shape[0] for state in self._states]
        if any(count % head_dim for count in rows) or sum(rows) != self.args.n_heads * head_dim:
            return []
        needed = (
            local_kv_heads(run, heads_per_kv) for run in consecutive([n // head_dim for n in rows])
        )
        return [range(kv.start * head_dim, kv.stop * head_dim) for kv in needed]


def meta_vocab_size(files: ModelFiles) -> int:
    """The number of rows of the embeddings of all files, for a params.json with vocab_size -1.

    Raises: CheckpointError if a file is damaged, or lacks the embeddings or the last norm.
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
        f"{files.path}: tok_embeddings.weight is {_listed_shapes(shapes)} in the files; the "
        f"parts do not form rows of {dim}"
    )


def _listed_shapes(shapes: list[tuple[int, ...]]) -> str:
    return listed([str(list(shape)) for shape in shapes])


def _joined(shapes: list[tuple[int, ...]], dim: int) -> tuple[int, ...] | None:
    """The shape of the parts concatenated along `dim`, or None if they do not fit together."""
    others = {(*shape[:dim], *shape[dim + 1 :]) for shape in shapes}
    if len(others) != 1 or any(len(shape) <= dim for shape in shapes):
        return None
    first = shapes[0]
    return (*first[:dim], sum(shape[dim] for shape in shapes), *first[dim + 1 :])


NORM_VARIANTS = "norm_variants.safetensors"
MAX_BYTES = 1 << 30


def norm_variants(files: ModelFiles) -> dict[str, list[Tensor]]:
    """The copies of norms that differ, by Meta's names, one for each file of the original folder.

    Copies differ in Meta's 70B files, because rounding differed between the ranks in training. The
    model uses the copy of the first file. A conversion stores all copies in a small file beside the
    weights, so that a conversion back to as many Meta files restores the copy of each file. Logs a
    warning if copies differ.

    Raises: CheckpointError if a file is damaged.
    """
    variants = (differing_norms(files) if files.is_pickled else {}) or _stored_variants(files)
    if variants:
        name, gap = max(((name, _gap(v)) for name, v in variants.items()), key=lambda item: item[1])
        logger.warning(
            "%s: %d replicated norms differ between the %d files of the Meta folder, most of all "
            "%s, by up to %g; the first file's copies are used",
            files.path,
            len(variants),
            len(variants[name]),
            name,
            gap,
        )
    return variants


def as_bytes(variants: Mapping[str, Sequence[Tensor]]) -> bytes:
    """The content of the file NORM_VARIANTS: a tensor [n_files, dim] for each norm."""
    data: bytes = save({name: torch.stack(list(copies)) for name, copies in variants.items()})
    return data


def differing_norms(files: ModelFiles) -> dict[str, list[Tensor]]:
    """The copies of each norm, one per file, if their bytes differ; other norms are left out."""
    states = [open_torch_file(path) for path in files.weights]
    common = sorted(set.intersection(*map(set, states)))
    norms = {
        name: [state[name].clone() for state in states]
        for name in common
        if name.endswith("norm.weight") and ".attention." not in name  # may be sharded
    }
    return {
        name: copies
        for name, copies in norms.items()
        if len({(copy.shape, copy.dtype, bytes(tensor_bytes(copy))) for copy in copies}) > 1
    }


def _stored_variants(files: ModelFiles) -> dict[str, list[Tensor]]:
    path = files.path / NORM_VARIANTS
    if not is_file(path):
        return {}
    data = read_bytes(path, MAX_BYTES)
    try:
        stacks: dict[str, Tensor] = load(data)
    except (SafetensorError, KeyError) as error:  # KeyError: a dtype unknown to torch
        raise CheckpointError(f"{path}: damaged ({error}); fetch it again") from error
    if any(s.dim() != 2 for s in stacks.values()) or len({len(s) for s in stacks.values()}) != 1:
        raise CheckpointError(f"{path}: damaged; fetch it again")
    return {name: list(stack) for name, stack in stacks.items()}


def _gap(copies: Sequence[Tensor]) -> float:
    """The largest absolute difference from the first copy."""
    first = copies[0].double()
    return max(float((copy.double() - first).abs().max()) for copy in copies)
