"""Reads Hugging Face folders: one file or an index of several, safetensors or torch's own."""

from collections.abc import Collection, Mapping
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor

from parallel_llama.checkpoint.bitsandbytes import FourBitMatrix, Int8Matrix
from parallel_llama.checkpoint.byte_ranges import Empty, as_blocks, new_memory
from parallel_llama.checkpoint.quantised import PACKED_DTYPES, PackedMatrix, read_packed
from parallel_llama.checkpoint.scaled import (
    TYPES,
    ScaledBlock,
    ScaledMatrix,
    WantedTensors,
    joined_rows,
)
from parallel_llama.checkpoint.stacked_experts import MXFP4Matrix, read_stacked
from parallel_llama.checkpoint.tensor_files import TensorFiles, decoded, read_header
from parallel_llama.config.bitsandbytes import (
    QUANT_STATE,
    BitsAndBytes,
    bitsandbytes_types,
    read_quant_state,
)
from parallel_llama.config.quantised import (
    Packing,
    hf_packing,
    is_kept,
    packed_weights,
    stored_form,
)
from parallel_llama.config.scaled import (
    BESIDE_WEIGHTS,
    BYTE_DTYPES,
    MARKS,
    MXFP4_BLOCKS,
    MXFP4_SCALES,
    Schemes,
    mxfp4_weights,
    scaled_weights,
)
from parallel_llama.config.tied import why_untied, with_embeddings
from parallel_llama.dtypes import STORED, QuantFormat, ScaledFormat
from parallel_llama.errors import CheckpointError, listed
from parallel_llama.families import family_of, stored_slices
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.families.stored_slices import StoredSlice, whole
from parallel_llama.families.weights import Param
from parallel_llama.files.fields import read_json_object
from parallel_llama.files.model_files import MAX_INDEX_BYTES, ModelFiles
from parallel_llama.files.safetensors_header import DTYPE_BITS, FileTensor, HeldTensors, merged
from parallel_llama.ops.formats import torch_dtype
from parallel_llama.ops.quant import QuantMatrix, joined

# Suffixes of the tensors of quantised weights, in every supported format.
_QUANTISED = (
    *(".qweight", ".qzeros", ".SCB", ".absmax", ".quant_map", ".bitsandbytes__nf4"),
    *(".bitsandbytes__fp4", *(f".{mark}" for mark in MARKS), MXFP4_BLOCKS, MXFP4_SCALES),
)
_INSTEAD = "use the unquantised model, or a GGUF file of it"


class HFFolder(TensorFiles):
    """The tensors of an HF folder; a quantised matrix has several.

    Raises: CheckpointError if a file is damaged, or the files and their index disagree.
    """

    layout = "hf"
    readable = f"supported: {', '.join(STORED)}; only F16 for scales of GPTQ and AWQ; {_INSTEAD}"

    def __init__(self, files: ModelFiles, args: ModelArgs, empty: Empty = new_memory) -> None:
        headers = {path: _header(path, args) for path in files.weights}
        tensors = with_embeddings(merged(files.path, headers), args)
        # For safetensors files, `load_model_args` has compared the tensors and untied the model.
        is_pickled = any(path.suffix != ".safetensors" for path in files.weights)
        if is_pickled and (why := why_untied(tensors, args)) is not None:
            raise CheckpointError(
                f"{files.path}: {why}; set tie_word_embeddings to false in config.json to use "
                "both, or remove the tensor of the output from the files"
            )
        if files.index is not None:
            _require_index(files.index, headers, args)
        is_quantised = any(
            name.endswith(_QUANTISED) or tensor.dtype in BYTE_DTYPES or BESIDE_WEIGHTS.search(name)
            for name, (_, tensor) in tensors.items()
        )
        packing, slices = hf_packing(files) if is_quantised else None, stored_slices(args, "hf")
        self._method = None if packing is None else packing.method
        self._packed: dict[str, PackedMatrix] = {}
        self._scaled: dict[str, ScaledMatrix] = {}
        self._bits: dict[str, Int8Matrix | FourBitMatrix] = {}  # of bitsandbytes
        self._mxfp4: dict[str, MXFP4Matrix] = {}  # of experts
        if isinstance(packing, Packing):
            for name, own in packed_weights(args, tensors, packing).items():
                self._packed[name] = PackedMatrix(own, slices[name])
        elif isinstance(packing, Schemes):
            held = {name: tensor for name, (_, tensor) in tensors.items()}
            for name, scheme in scaled_weights(packing, args, held).items():
                self._scaled[name] = ScaledMatrix(scheme, slices[name])
            if packing.method == "mxfp4":
                for name in mxfp4_weights(args, held):
                    self._mxfp4[name] = MXFP4Matrix(slices[name])
            tensors = {
                name: value for name, value in tensors.items() if not BESIDE_WEIGHTS.search(name)
            }
        elif isinstance(packing, BitsAndBytes):
            held = {name: tensor for name, (_, tensor) in tensors.items()}
            for name, kind in bitsandbytes_types(args, held).items():
                self._bits[name] = _bits(kind, slices[name], tensors)
            read = {m.quant_state for m in self._bits.values() if isinstance(m, FourBitMatrix)}
            tensors = {name: value for name, value in tensors.items() if name not in read}
        super().__init__(files, args, empty, tensors)

    def check(self, args: ModelArgs) -> None:
        known = {stored_slice.name for stored_slice in self._slices_of(args).values()}
        for name, (path, _) in self._tensors.items():
            is_needed = not family_of(args).skips(name, "hf", args)
            if name.endswith(_QUANTISED) and name not in known and is_needed:
                why = f"config.json states no supported quantisation; {_INSTEAD}"
                if self._method is not None:
                    why = (
                        f"the model has no such weight in the format {self._method!r} that "
                        "config.json states, or its other tensors are missing; use the "
                        "config.json that belongs to the weights, or fetch the files again"
                    )
                raise CheckpointError(
                    f"{path}: tensor {name!r:.200} is part of a quantised weight, and {why}"
                )
        self._require_dtypes()
        super().check(args)
        for matrix in self._packed.values():
            if not matrix.packing.any_order:
                self._require_order(matrix, "g_idx", matrix.group_size)
            self._require_no_bias(matrix)
        for scaled in self._scaled.values():
            if scaled.scheme.any_order:
                self._require_groups(scaled)
            else:
                self._require_order(scaled, "weight_g_idx", scaled.scheme.block[1])
            self._require_shape(scaled)
        for bits in self._bits.values():
            bits.check(partial(self._bytes, bits.base))

    def _slices_of(self, args: ModelArgs) -> Mapping[str, StoredSlice]:
        quantised = self._packed, self._scaled, self._bits, self._mxfp4
        slices = {
            name: stored_slice
            for name, stored_slice in super()._slices_of(args).items()
            if not any(name in matrices for matrices in quantised)
        }
        plain_names = {stored_slice.name for stored_slice in slices.values()}
        for matrix in self._packed.values():
            for suffix, shape in {**matrix.shapes, **matrix.optional_shapes}.items():
                name = matrix.base + suffix
                if suffix in matrix.shapes or (name in self._tensors and name not in plain_names):
                    slices[name] = whole(name, shape)
        for name, (_, shapes) in self._scaled_tensors.items():
            shape_in_file = self._tensors[name][1].shape if name in self._tensors else ()
            shape = shape_in_file if shape_in_file in shapes else shapes[0]
            slices[name] = StoredSlice(name, shape, 0, 1, 1)
        return slices

    @cached_property
    def _scaled_tensors(self) -> WantedTensors:
        """The dtypes and possible shapes of the tensors of matrices with scales, by name."""
        expected: WantedTensors = {}
        for matrix in (*self._scaled.values(), *self._bits.values(), *self._mxfp4.values()):
            expected |= {matrix.base + suffix: kind for suffix, kind in matrix.tensors.items()}
        for scaled in self._scaled.values():
            for suffix, kind in scaled.optional_tensors.items():
                if scaled.base + suffix in self._tensors:
                    expected[scaled.base + suffix] = kind
        return expected

    def _require_dtypes(self) -> None:
        """Check the dtypes of the tensors of matrices with scales."""
        for name, (dtypes, _) in self._scaled_tensors.items():
            path, tensor = self._tensors.get(name, (None, None))
            if tensor is not None and tensor.dtype not in dtypes:
                raise CheckpointError(
                    f"{path}: tensor {name!r:.200} has the dtype {tensor.dtype}; config.json asks "
                    f"for {' or '.join(dtypes)}; use the config.json that belongs to the weights"
                )

    def _dtypes(self, name: str) -> Collection[str]:
        if name in self._scaled_tensors:
            return DTYPE_BITS  # any: `_require_dtypes` has checked it
        return PACKED_DTYPES.get(name.rpartition(".")[2]) or super()._dtypes(name)

    def _stored(self, param: Param, rows: range) -> Tensor:
        if (packed := self._packed.get(param.name)) is not None:
            if packed.packing.form is not None:
                return decoded(param, rows, partial(self._groups, param, packed.packing.form))
            blocks = as_blocks(param, packed.stored_slice, rows)
            return _concatenated(
                [packed.values(block, partial(self._part, packed)) for block in blocks]
            )
        if (matrix := self._scaled.get(param.name)) is not None:
            read = partial(self._numbers, matrix)
            blocks = as_blocks(param, matrix.stored_slice, rows)
            return _concatenated([matrix.values(block, read) for block in blocks])
        if (bits := self._bits.get(param.name)) is not None:
            blocks = as_blocks(param, bits.stored_slice, rows)
            return _concatenated(
                [bits.values(block, partial(self._bytes, bits.base)) for block in blocks]
            )
        if (experts := self._mxfp4.get(param.name)) is not None:
            return experts.stored(param, rows, partial(self._numbers, experts)).values()
        if (stored_slice := self._slices[param.name]).count is not None:
            return read_stacked(param, stored_slice, rows, partial(self._plain, stored_slice))
        return super()._stored(param, rows)

    def _stored_quant(self, param: Param, rows: range, form: QuantFormat) -> QuantMatrix | None:
        if (matrix := self._packed.get(param.name)) is not None:
            return self._groups(param, form, rows) if matrix.packing.form == form else None
        if (scaled := self._scaled.get(param.name)) is not None:
            stored_slice, read = scaled.stored_slice, partial(self._numbers, scaled)
            _, scale = self._tensors[scaled.base + scaled.scheme.scale]
            if is_kept(scale) and stored_form(scaled.scheme, stored_slice.shape[1]) == form:
                blocks = as_blocks(param, stored_slice, rows)
                return joined([scaled.quantised(form, block, read) for block in blocks], dim=0)
        return None

    def _stored_scaled(self, param: Param, rows: range, form: ScaledFormat) -> ScaledBlock | None:
        if (experts := self._mxfp4.get(param.name)) is not None:
            return experts.stored(param, rows, partial(self._numbers, experts))
        if (matrix := self._scaled.get(param.name)) is None or matrix.scheme.is_packed:
            return None
        blocks, read = as_blocks(param, matrix.stored_slice, rows), partial(self._numbers, matrix)
        parts = [matrix.stored(block, read) for block in blocks]
        parts = [part if part.block == form.block else part.by_row() for part in parts]
        return joined_rows(parts, range(param.shape[0]) if param.dim else rows)

    def _groups(self, param: Param, form: QuantFormat, rows: range) -> QuantMatrix:
        """A slice of a quantised weight; slices of columns must be whole groups of 32."""
        matrix = self._packed[param.name]
        read, blocks = partial(self._part, matrix), as_blocks(param, matrix.stored_slice, rows)
        return joined([read_packed(matrix.packing, form, block, read) for block in blocks], dim=0)

    def _part(
        self, matrix: PackedMatrix | ScaledMatrix, suffix: str, rows: range, columns: range
    ) -> Tensor:
        """A block of one tensor of a quantised weight, as bytes."""
        _, tensor = self._tensors[matrix.base + suffix]
        width = DTYPE_BITS[tensor.dtype] // 8
        byte_columns = range(columns.start * width, columns.stop * width)
        return self._bytes(matrix.base, suffix, tensor.shape[-1] * width, rows, byte_columns)

    def _bytes(self, base: str, suffix: str, row_bytes: int, rows: range, columns: range) -> Tensor:
        """A block of one tensor, viewed as a matrix with rows of `row_bytes` bytes."""
        path, tensor = self._tensors[base + suffix]
        return self._files[path].matrix(tensor.offset, row_bytes, rows, columns)

    def _plain(self, stored_slice: StoredSlice, rows: range, columns: range) -> Tensor:
        """A block of a tensor of plain values, as a matrix."""
        path, tensor = self._tensors[stored_slice.name]
        dtype, n_columns = torch_dtype(STORED[tensor.dtype]), stored_slice.shape[-1]
        return self._files[path].block(tensor.offset, dtype, n_columns, rows, columns)

    def _numbers(
        self,
        matrix: ScaledMatrix | MXFP4Matrix,
        suffix: str,
        n_columns: int,
        rows: range,
        columns: range,
    ) -> Tensor:
        """A block of one tensor, with `n_columns` columns, of a matrix with scales."""
        path, tensor = self._tensors[matrix.base + suffix]
        return self._files[path].block(tensor.offset, TYPES[tensor.dtype], n_columns, rows, columns)

    def _require_shape(self, matrix: ScaledMatrix) -> None:
        """Refuse packed integers if the shape in weight_shape is not the model's."""
        if not matrix.scheme.is_packed:
            return
        file_shape = self._numbers(matrix, "weight_shape", 2, range(1), range(2))[0].tolist()
        if file_shape != [*matrix.stored_slice.shape]:
            name = matrix.base + "weight_shape"
            raise CheckpointError(
                f"{self._tensors[name][0]}: {name!r:.200} is {file_shape}, expected "
                f"{[*matrix.stored_slice.shape]}; use the config.json that belongs to the weights"
            )

    def _require_order(self, matrix: PackedMatrix | ScaledMatrix, suffix: str, size: int) -> None:
        """Refuse a matrix whose groups are not consecutive inputs."""
        name, n_inputs = matrix.base + suffix, matrix.stored_slice.shape[1]
        if name not in self._slices:
            return
        groups = self._part(matrix, suffix, range(1), range(n_inputs)).view(torch.int32)[0]
        misplaced = (groups != torch.arange(n_inputs) // size).nonzero().flatten()
        if len(misplaced):
            index = int(misplaced[0])
            raise CheckpointError(
                f"{self._tensors[name][0]}: {name!r:.200} has input {index} in group "
                f"{int(groups[index])}, expected {index // size}: the {size} inputs of a group "
                "must be consecutive, unless config.json states desc_act=true for GPTQ, or "
                "actorder='group' for compressed-tensors"
            )

    def _require_groups(self, matrix: ScaledMatrix) -> None:
        """Refuse group numbers that are out of range, and groups of a wrong size."""
        name, n_inputs = matrix.base + "weight_g_idx", matrix.stored_slice.shape[1]
        n_groups, size = matrix.grid[1], matrix.scheme.block[1]
        groups = self._numbers(matrix, "weight_g_idx", n_inputs, range(1), range(n_inputs))[0]
        damaged = f"{self._tensors[name][0]}: {name!r:.200} has "
        if (wrong := ((groups < 0) | (groups >= n_groups)).nonzero()).numel():
            at = int(wrong[0])
            raise CheckpointError(
                f"{damaged}input {at} in group {int(groups[at])} of {n_groups}; the weights are "
                "damaged: fetch them again"
            )
        expected = torch.arange(n_inputs).div(size, rounding_mode="floor").bincount()
        found = groups.bincount(minlength=n_groups)
        if (wrong := (found != expected).nonzero()).numel():
            at = int(wrong[0])
            raise CheckpointError(
                f"{damaged}{int(found[at])} inputs in group {at}, expected {int(expected[at])}; "
                "the weights are damaged: fetch them again"
            )

    def _require_no_bias(self, matrix: PackedMatrix) -> None:
        """Refuse a bias that the model lacks, unless it is zero; many programs write zeros."""
        name = matrix.base + "bias"
        if name not in self._slices:  # the files lack the bias, or the model has it
            return
        path, tensor = self._tensors[name]
        bias = self._part(matrix, "bias", range(1), range(matrix.stored_slice.shape[0]))
        if bias.view(torch_dtype(STORED[tensor.dtype])).any():
            raise CheckpointError(
                f"{path}: {name!r:.200} is not zero, and the model that config.json describes "
                "has no such bias; use the config.json that belongs to the weights"
            )


def _bits(kind: str, stored_slice: StoredSlice, tensors: HeldTensors) -> Int8Matrix | FourBitMatrix:
    """A bitsandbytes matrix; `kind` is its value in `bitsandbytes_types`."""
    name = stored_slice.name
    base = name.removesuffix("weight")
    if kind == "int8":
        return Int8Matrix(stored_slice, base + "weight_format" in tensors)
    state = base + QUANT_STATE + kind
    path, tensor = tensors[state]
    dtype = tensors[name][1].dtype if name in tensors else "U8"
    return FourBitMatrix(
        stored_slice, read_quant_state(path, state, tensor, stored_slice.shape), dtype
    )


def _concatenated(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _header(path: Path, args: ModelArgs) -> dict[str, FileTensor]:
    """The tensors of a file by full name; names of a base model get the missing prefix."""
    tensors: dict[str, FileTensor] = {}
    for name, tensor in read_header(path).items():
        full_name = family_of(args).hf_name(name)
        if full_name in tensors:
            base = full_name.partition(".")[0]
            raise CheckpointError(
                f"{path}: has {full_name!r:.200} with and without '{base}.'; remove one"
            )
        tensors[full_name] = tensor
    return tensors


def _require_index(
    index: Path, headers: dict[Path, dict[str, FileTensor]], args: ModelArgs
) -> None:
    """Check that the index names every tensor, with the file that holds it."""
    weight_map = read_json_object(index, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
        raise CheckpointError(f"{index}: needs a weight_map from tensor names to file names")
    hf_name = family_of(args).hf_name
    listing = {hf_name(name): index.parent / file for name, file in weight_map.items()}
    path_of = {name: path for path, header in headers.items() for name in header}
    wrong = [
        f"{name!r:.200} should be in {file.name!r} and is "
        + (f"in {path_of[name].name!r}" if name in path_of else "in none of the files")
        for name, file in listing.items()
        if path_of.get(name) != file
    ]
    unlisted = [
        repr(name)
        for name in path_of
        if name not in listing and not family_of(args).skips(name, "hf", args)
    ]
    if wrong or unlisted:
        parts = [listed(wrong)] if wrong else []
        parts += [f"not listed: {listed(unlisted)}"] if unlisted else []
        raise CheckpointError(
            f"{index}: does not fit the files beside it; {'; '.join(parts)}; fetch them again"
        )
