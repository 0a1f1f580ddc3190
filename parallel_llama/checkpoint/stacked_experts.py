"""Reads weights of experts from HF folders in which all experts of a layer are in one tensor.

Plain matrices are stored as [experts, in, out], so the rows of w1 and w3 of an expert are columns
of one stored matrix: alternating (columns 0, 2, 4, ... and 1, 3, 5, ...) in gpt-oss, and all of w1
before all of w3 in Llama 4. In MXFP4 a matrix is stored as [out, in], in two tensors:

    _blocks    e2m1 floats of 4 bits, two in a byte, the first in the low bits: [experts, out,
               in / 32, 16]
    _scales    the exponents of powers of two, plus 127: [experts, out, in / 32]

Source: GptOssExperts, Llama4TextExperts and convert_moe_packed_tensors of transformers 5.24; MXFP4,
OCP Microscaling Formats (MX) Specification 1.0, section 5.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from parallel_llama.checkpoint.scaled import Read, ScaledBlock, WantedTensors
from parallel_llama.config.scaled import MXFP4_BLOCKS, MXFP4_INPUTS, MXFP4_SCALES
from parallel_llama.families.stored_slices import StoredSlice
from parallel_llama.families.weights import Param


def read_stacked(
    param: Param,
    stored_slice: StoredSlice,
    rows: range,
    read: Callable[[range, range], Tensor],
) -> Tensor:
    """A slice of an expert's weight in a stacked tensor of plain values.

    Args:
        read: reads some rows and columns of the stored tensor, as a matrix.

    Returns: a contiguous tensor; `rows` along `param.dim`.
    """
    step = stored_slice.step
    if len(param.shape) == 1:
        # The stored biases of all experts are read as a matrix of one row.
        return read(range(1), _covering(stored_slice, rows))[0, ::step].contiguous()
    outputs, inputs = _block(param, rows)
    n_inputs, n_outputs = stored_slice.shape[-2:]
    first = stored_slice.first // n_outputs * n_inputs
    covering = _covering(stored_slice, outputs)
    columns = range(covering.start % n_outputs, covering.start % n_outputs + len(covering))
    stored = read(range(first + inputs.start, first + inputs.stop), columns)
    return stored[:, ::step].t().contiguous()


@dataclass(frozen=True)
class MXFP4Matrix:
    """An expert's matrix [out, in] in MXFP4, with the slice of the plain matrix."""

    stored_slice: StoredSlice

    @property
    def base(self) -> str:
        """The common prefix of the names of its tensors."""
        return self.stored_slice.name

    @property
    def tensors(self) -> WantedTensors:
        """The dtypes and possible shapes of its tensors, by the suffixes of their names."""
        *outputs, n_inputs = self.stored_slice.matrix_shape
        scales = (*outputs, n_inputs // MXFP4_INPUTS)
        return {
            MXFP4_BLOCKS: (("U8",), [(*scales, MXFP4_INPUTS // 2)]),
            MXFP4_SCALES: (("U8", "F8_E8M0"), [scales]),
        }

    def stored(self, param: Param, rows: range, read: Read) -> ScaledBlock:
        """A slice of the matrix with floats and scales as stored; `rows` along `param.dim`."""
        stored_slice = self.stored_slice
        outputs, inputs = _block(param, rows)
        n_blocks = stored_slice.matrix_shape[-1] // MXFP4_INPUTS
        blocks = range(inputs.start // MXFP4_INPUTS, -(-inputs.stop // MXFP4_INPUTS))
        stored_rows, step = _covering(stored_slice, outputs), stored_slice.step
        byte_columns = range(inputs.start // 2, -(-inputs.stop // 2))
        row_bytes = n_blocks * MXFP4_INPUTS // 2
        pairs = read(MXFP4_BLOCKS, row_bytes, stored_rows, byte_columns)[::step].contiguous()
        exponents = read(MXFP4_SCALES, n_blocks, stored_rows, blocks)[::step].contiguous()
        names = self.base + MXFP4_SCALES, ""
        return ScaledBlock((1, MXFP4_INPUTS), outputs, inputs, pairs, exponents, names)


def _block(param: Param, rows: range) -> tuple[range, range]:
    """The outputs and the inputs of a slice of a matrix."""
    n_outputs, n_inputs = param.shape
    return (rows, range(n_inputs)) if param.dim == 0 else (range(n_outputs), rows)


def _covering(stored_slice: StoredSlice, rows: range) -> range:
    """The range of stored rows from the first to the last of these rows of the weight."""
    if not rows:
        return range(0)
    first, step = stored_slice.first, stored_slice.step
    return range(first + rows.start * step, first + (rows.stop - 1) * step + 1)
