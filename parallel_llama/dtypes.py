"""The dtypes and formats of weights and of the KV cache, and the precision of a model.

Plain data, without torch. `ops.formats` has torch's dtypes and the classes that apply weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

from parallel_llama.errors import UsageError

DTypeName = Literal["float32", "bfloat16", "float16", "float64"]

DTYPES: tuple[DTypeName, ...] = get_args(DTypeName)

# Bytes per value.
ITEM_BYTES: dict[str, int] = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}

# Kinds of weights, which may have different formats: matrices of layers; "outer", the embedding and
# the head; and vectors, which have the dtype of computation (router biases and sinks: at least
# float32).
Kind = Literal["matrix", "outer", "vector"]

# dtypes by their names in safetensors files; only the last three can be read from GGUF files.
STORED: dict[str, DTypeName] = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
}
STORED_NAMES = {dtype: name for name, dtype in STORED.items()}

# dtypes of the KV cache, by vLLM's names; auto is the dtype of computation.
KV_DTYPES = "auto", "bfloat16", "int8", "fp8"

# Bytes of the float32 scale of one quantised key or value.
KV_SCALE_BYTES = 4

# How weights are quantised when a model is loaded; "stored" keeps the formats of the files.
QUANTS = "none", "int8", "int4", "fp8", "stored"

# Inputs of a matrix per quantisation group; a group is contiguous and on one rank.
QUANT_GROUP_SIZE = 32
_SCALE_BYTES = 2  # a float16


@dataclass(frozen=True)
class DenseFormat:
    """Unquantised weights of one dtype."""

    dtype: str

    @property
    def name(self) -> str:
        return self.dtype

    def n_bytes(self, n_values: int) -> int:
        """Bytes of `n_values` values."""
        return n_values * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class QuantFormat:
    """Quantised weights: integers of `n_bits` with a scale for every `block` inputs of an output.

    Asymmetric formats store unsigned integers and a minimum per block; symmetric ones store signed
    integers.

    Args:
        has_min: whether the format is asymmetric.
        n_parts: parts of a group of QUANT_GROUP_SIZE inputs, each with its own factors.
        scale_factors: whether each part has a small integer that multiplies the scale.
        min_factors: whether each part has a small integer that multiplies the minimum.
        is_float: whether the 8 bits are an e4m3 float instead of an integer.

    Source: the blocks of GGUF, ggml's docs/gguf.md; e4m3, arXiv 2209.05433.
    """

    n_bits: Literal[2, 3, 4, 5, 6, 8]
    has_min: bool = False
    block: int = QUANT_GROUP_SIZE
    n_parts: int = 1
    scale_factors: bool = False
    min_factors: bool = False
    is_float: bool = False

    @property
    def name(self) -> str:
        if self.is_float:
            return f"fp{self.n_bits}"
        minima = " with minima" if self.has_min else ""
        is_simple = self.n_shared == 1 and not self.n_factors
        return f"int{self.n_bits}{minima}" + ("" if is_simple else f" by {self.block}")

    @property
    def zero(self) -> int:
        """The zero point: the unsigned integer that stands for 0."""
        return 0 if self.has_min or self.is_float else 1 << (self.n_bits - 1)

    @property
    def n_shared(self) -> int:
        """Number of groups that share a scale."""
        return self.block // QUANT_GROUP_SIZE

    @property
    def n_inputs_per_scale(self) -> int:
        """Number of consecutive inputs that share a scale; with `scale_factors`, a group."""
        return QUANT_GROUP_SIZE if self.scale_factors else self.block

    @property
    def n_factors(self) -> int:
        """Number of factors of a group: those of its scales, then those of its minima."""
        return self.n_parts * (self.scale_factors + self.min_factors)

    def n_bytes(self, n_values: int) -> int:
        """Bytes of `n_values` values; `n_values` must be a multiple of QUANT_GROUP_SIZE.

        A block that is cut between ranks counts a fraction of its scale on each rank.
        """
        n_groups = n_values // QUANT_GROUP_SIZE
        scale_bytes = n_groups * _SCALE_BYTES * (1 + self.has_min) // self.n_shared
        return n_values * self.n_bits // 8 + n_groups * self.n_factors + scale_bytes


def _in_256(n_bits: Literal[2, 3, 4, 5, 6], n_parts: int, *, has_min: bool) -> QuantFormat:
    return QuantFormat(n_bits, has_min, 256, n_parts, scale_factors=True, min_factors=has_min)


# The weight format that each value of `quant` selects.
QUANT_FORMATS = {
    "int8": QuantFormat(8),
    "int4": QuantFormat(4, has_min=True),
    "fp8": QuantFormat(8, is_float=True),
}

# The GGUF types that stay quantised in memory.
GGUF_QUANTS = {
    "Q8_0": QuantFormat(8),
    "Q5_0": QuantFormat(5),
    "Q5_1": QuantFormat(5, has_min=True),
    "Q4_0": QuantFormat(4),
    "Q4_1": QuantFormat(4, has_min=True),
    "Q6_K": _in_256(6, 2, has_min=False),
    "Q5_K": _in_256(5, 1, has_min=True),
    "Q4_K": _in_256(4, 1, has_min=True),
    "Q3_K": _in_256(3, 2, has_min=False),
    "Q2_K": _in_256(2, 2, has_min=True),
}

MatrixFormat = DenseFormat | QuantFormat


@dataclass(frozen=True)
class ScaledFormat:
    """A weight in a native folder: numbers and scales, decoded while the weight is loaded.

    A value is (number - zero point) * scale; with a divisor, it is number * (scale / divisor).

    Args:
        numbers: the type of the numbers; two e2m1 floats of 4 bits share a byte.
        block: the rows and columns of a matrix that share a scale; 0 stands for all.
        scales: the dtype of scales by its name in safetensors files. U8 stands for exponents of
            powers of two, plus 127; F8_E4M3 for scales with a divisor.
        has_zeros: whether every scale has a zero point, in the type of the numbers.

    Source: e2m1 and powers of two, OCP Microscaling Formats (MX) Specification 1.0, section 5.
    """

    numbers: Literal["e4m3", "e2m1", "int8"]
    block: tuple[int, int]
    scales: Literal["F32", "BF16", "F16", "F8_E4M3", "U8"]
    has_zeros: bool = False

    @property
    def has_divisor(self) -> bool:
        return self.scales == "F8_E4M3"

    @property
    def name(self) -> str:
        height, width = (side or "all" for side in self.block)
        zeros = " with zero points" if self.has_zeros else ""
        return f"{self.numbers}{zeros} by {height} x {width} in {self.scales}"

    @property
    def kind(self) -> str:
        """The common name of the format."""
        if self.numbers == "e2m1":
            return "nvfp4" if self.has_divisor else "mxfp4"
        return "fp8" if self.numbers == "e4m3" else "int8"


# The formats of a native folder's quantised weights.
StoredFormat = QuantFormat | ScaledFormat


@dataclass(frozen=True)
class InputFormat:
    """How the inputs of a matrix are rounded before a product.

    An input becomes (q - zero point) * scale, where q is the number nearest to input / scale + zero
    point; values outside of the range of q saturate.

    Args:
        numbers: the type of q.
        group: the consecutive inputs of a token that share a scale; 0 stands for all.
        has_zeros: whether integers have a zero point.
        most: an upper bound on the largest absolute value from which a scale is computed, if any.
        scale: the scale of all inputs; None if the values of each group determine its scale and
            its zero point.
        zero: the zero point of `scale`.
    """

    numbers: Literal["e4m3", "int8"]
    group: int = 0
    has_zeros: bool = False
    most: float | None = None
    scale: float | None = None
    zero: int = 0


@dataclass(frozen=True)
class Precision:
    """The dtype of computation, and the format of the matrices of layers.

    Args:
        computed: the dtype of activations, and of vectors except router biases and sinks.
        matrices: the format of the matrices of layers.
        stored: by Meta's names, the formats of matrices that run as the files store them.
        inputs: by name, the input formats of matrices that the files store quantised and that are
            decoded.
    """

    computed: DTypeName
    matrices: MatrixFormat
    stored: Mapping[str, MatrixFormat] | None = None
    inputs: Mapping[str, InputFormat] | None = None

    @classmethod
    def plain(cls, dtype: DTypeName) -> "Precision":
        """Weights and computation in one dtype."""
        return cls(dtype, DenseFormat(dtype))

    @classmethod
    def on(
        cls,
        device: str,
        dtype: DTypeName,
        quant: str = "none",
        stored: Mapping[str, MatrixFormat] | None = None,
        inputs: Mapping[str, InputFormat] | None = None,
    ) -> "Precision":
        """The precision on 'cpu' or 'cuda' of a model in this dtype, quantised as one of `QUANTS`.

        A CPU computes in float32 with weights of 16 bits: speed is limited by memory, so rounding
        after each product would lose digits and save nothing.
        """
        is_half = ITEM_BYTES[dtype] == 2
        computed: DTypeName = "float32" if is_half and device == "cpu" else dtype
        if quant in ("none", "stored"):
            return cls(computed, DenseFormat(dtype), stored, inputs)
        return cls(computed, QUANT_FORMATS[quant])

    @property
    def dtype(self) -> str:
        """The dtype of the weights before quantisation."""
        return self.matrices.dtype if isinstance(self.matrices, DenseFormat) else self.computed

    @property
    def quant(self) -> str:
        """One of `QUANTS`."""
        if self.stored is not None:
            return "stored"
        return next((name for name, form in QUANT_FORMATS.items() if form == self.matrices), "none")

    @property
    def quant_group_size(self) -> int:
        """Number of consecutive channels that must stay on one rank; 1 for unquantised weights."""
        if self.quant == "none":
            return 1
        stored = (self.stored or {}).values()
        groups = (form.n_inputs_per_scale for form in stored if isinstance(form, QuantFormat))
        return max(groups, default=QUANT_GROUP_SIZE)

    def form_of(self, kind: Kind, name: str) -> MatrixFormat:
        """The format of the weight of this kind and name.

        With int4 layers the embedding and the head have int8, because their errors reach the logits
        directly.
        """
        if self.stored is not None and name in self.stored:
            return self.stored[name]
        if kind == "vector":
            # With a bias rounded to 16 bits, a router could select other experts. Kernels read
            # sinks in the dtype of the softmax.
            is_wide = name.endswith((".gate.bias", ".sinks")) and self.computed != "float64"
            return DenseFormat("float32" if is_wide else self.computed)
        if kind == "outer" and self.matrices == QUANT_FORMATS["int4"]:
            return QUANT_FORMATS["int8"]
        return self.matrices


@dataclass(frozen=True)
class KVFormat:
    """The KV cache in one of `DTYPES`, or in int8 or fp8 (e4m3) with a scale per key and value.

    Source: e4m3, FP8 formats for deep learning, arXiv 2209.05433.
    """

    dtype: str

    def n_bytes(self, head_dim: int) -> int:
        """Bytes of one key or one value."""
        if self.dtype in ("int8", "fp8"):
            return head_dim + KV_SCALE_BYTES
        return head_dim * ITEM_BYTES[self.dtype]


class ModelSizes(Protocol):
    """The attributes of `ModelArgs` that decide which precisions a model can have."""

    @property
    def dim(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def ffn_dim(self) -> int: ...
    @property
    def shared_ffn_dim(self) -> int: ...
    @property
    def dense_ffn_dim(self) -> int: ...
    @property
    def dtype(self) -> str: ...


def make_precision(
    args: ModelSizes,
    dtype: str,
    device: str,
    quant: str = "none",
    stored: Mapping[str, MatrixFormat] | None = None,
    inputs: Mapping[str, InputFormat] | None = None,
) -> Precision:
    """The precision of a model in one of `DTYPES`, quantised as one of `QUANTS`.

    Args:
        device: 'cpu' or 'cuda'.
        stored: the formats of matrices that the files store quantised.
        inputs: the formats of the inputs of decoded matrices.

    Raises: UsageError for an unknown name, and for a combination that the model cannot have.
    """
    if dtype not in DTYPES:
        raise UsageError(f"dtype={dtype!r}: use one of {', '.join(DTYPES)}")
    if quant not in QUANTS:
        raise UsageError(f"quant={quant!r}: use one of {', '.join(QUANTS)}")
    if quant != "none" and (reason := why_unquantised(args, dtype)):
        raise UsageError(f"{quant} weights: {reason}")
    if quant == "stored" and not stored:
        known = ", ".join(GGUF_QUANTS)
        raise UsageError(
            f"no weight of the model can stay as stored (these can: {known} in a GGUF file, "
            "GPTQ, AWQ, integers of compressed-tensors, quantised native folders); use int8, "
            "int4 or fp8, or none to decode the weights"
        )
    if quant != "stored":
        return Precision.on(device, dtype, quant, inputs=inputs)
    decoded = {name: form for name, form in (inputs or {}).items() if name not in (stored or {})}
    return Precision.on(device, dtype, quant, stored, decoded)


def why_unquantised(args: ModelSizes, dtype: str) -> str | None:
    """Why a model cannot have quantised matrices in this dtype; None if it can."""
    for name in ("dim", "head_dim", "ffn_dim", "shared_ffn_dim", "dense_ffn_dim"):
        if (size := getattr(args, name)) % QUANT_GROUP_SIZE:
            return (
                f"{name}={size} is not a multiple of the {QUANT_GROUP_SIZE} values that share a "
                "scale; use unquantised weights, such as bfloat16"
            )
    if dtype == "float64":
        return "quantised matrices are computed in float32, not in float64; use float32"
    return None


def kv_format(kv_cache_dtype: str, computed: str) -> KVFormat:
    """The format of the KV cache of a model that computes in the dtype `computed`.

    Raises: UsageError for a name that is not in `KV_DTYPES`.
    """
    if kv_cache_dtype not in KV_DTYPES:
        raise UsageError(f"kv_cache_dtype={kv_cache_dtype!r}: use one of {', '.join(KV_DTYPES)}")
    return KVFormat(computed if kv_cache_dtype == "auto" else kv_cache_dtype)
