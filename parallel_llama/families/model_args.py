"""`ModelArgs`: a model's sizes and features, whatever its file format; checked when created."""

import math
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from parallel_llama.dtypes import DTYPES
from parallel_llama.errors import UsageError, shown

# The largest accepted sizes, far above those of any model: a damaged file could state terabytes.
MAX_SIZES = {
    "dim": 1 << 20, "n_layers": 1 << 12, "n_heads": 1 << 14, "n_kv_heads": 1 << 14,
    "head_dim": 1 << 14, "ffn_dim": 1 << 24, "vocab_size": 1 << 24, "max_seq_len": 1 << 30,
}  # fmt: skip
# Rope factors beyond these overflow in the tables.
_LEAST_FACTOR, _LARGEST_FACTOR = 1e-6, 1e6
MAX_EXPERTS = 1 << 12
MAX_EXPERTS_OF_ALL_LAYERS = 1 << 16


def require_size(name: str, value: int) -> int:
    """Check a size before ModelArgs can be created, and return it.

    Raises: UsageError for a size below 1 or above `MAX_SIZES`.
    """
    if not 1 <= value <= MAX_SIZES[name]:
        raise UsageError(f"{name}={value}: use a whole number from 1 to {MAX_SIZES[name]}")
    return value


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are scaled beyond the trained context.

    Kinds: `linear` divides positions by `factor`. `dynamic` raises the base with the length of the
    sequence when a token is processed. `llama3` and `yarn` treat low and high frequencies
    differently. `factors` divides each frequency by its own factor (llama3 scaling in GGUF files).
    `longrope` divides frequencies by `factors` if the model's `max_seq_len` is at most
    `original_max_seq_len`, and by `long_factors` if it is longer (see `for_context`).

    Raises: UsageError for a value that gives no valid rotary table.
    Source: linear arXiv 2306.15595; yarn arXiv 2309.00071; llama3 as in Meta's llama-models;
        longrope arXiv 2402.13753.
    """

    kind: Literal["linear", "dynamic", "llama3", "yarn", "factors", "longrope"]
    factor: float = 1.0
    original_max_seq_len: int | None = None
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn, longrope; None: from factor and the mscales
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn: round the correction range outwards
    factors: tuple[float, ...] = ()  # factors, longrope: one per rotary pair
    long_factors: tuple[float, ...] = ()  # longrope: for longer contexts, one per rotary pair

    def kept_part(self, freq: float) -> float:
        """The fraction of a rotary frequency that llama3 scaling does not divide by `factor`.

        Source: Llama 3.1, apply_scaling in Meta's llama-models (models/llama3/model.py).
        """
        assert self.original_max_seq_len is not None
        low, high = self.low_freq_factor, self.high_freq_factor
        rotations = self.original_max_seq_len * freq / (2 * math.pi)  # in the trained context
        if low == high:
            return float(rotations >= low)
        return min(max((rotations - low) / (high - low), 0.0), 1.0)

    def llama3_factors(self, rope_theta: float, head_dim: int) -> list[float]:
        """The divisor of each rotary frequency, as Meta's program computes it."""
        kept = (self.kept_part(rope_theta ** (-at / head_dim)) for at in range(0, head_dim, 2))
        return [1 / (part + (1 - part) / self.factor) for part in kept]

    def __post_init__(self) -> None:
        names = "factor", "low_freq_factor", "beta_fast", "beta_slow"
        positive: dict[str, float | None] = {name: getattr(self, name) for name in names}
        for name in ("factors", "long_factors"):
            positive |= {f"{name}[{i}]": factor for i, factor in enumerate(getattr(self, name))}
        positive["attention_factor"] = self.attention_factor
        for name, value in positive.items():
            if value is not None and not (math.isfinite(value) and value > 0):
                raise UsageError(f"rope scaling {name}={value}: use a finite number above 0")
        for name in ("factor", "beta_fast", "beta_slow"):
            if not _LEAST_FACTOR <= (value := getattr(self, name)) <= _LARGEST_FACTOR:
                raise UsageError(
                    f"rope scaling {name}={value:g}: use a number from {_LEAST_FACTOR:g} to "
                    f"{_LARGEST_FACTOR:g}"
                )
        if self.kind in ("llama3", "yarn", "longrope") and self.original_max_seq_len is None:
            raise UsageError(
                f"rope scaling {self.kind!r} needs the length of the trained context; "
                "set original_max_position_embeddings"
            )
        limit = MAX_SIZES["max_seq_len"]
        if self.original_max_seq_len is not None and not 1 <= self.original_max_seq_len <= limit:
            raise UsageError(
                f"rope scaling with a trained context of {self.original_max_seq_len} tokens; "
                f"use 1 to {limit}"
            )
        if self.kind == "longrope" and self.original_max_seq_len == 1:
            raise UsageError("longrope scaling with a trained context of 1 token; use 2 or more")
        if self.kind == "llama3" and not self.low_freq_factor <= self.high_freq_factor:
            raise UsageError(
                f"low_freq_factor={self.low_freq_factor} and high_freq_factor="
                f"{self.high_freq_factor}: the high one must not be smaller"
            )


@dataclass(frozen=True)
class ModelArgs:
    """Everything about a model that determines the shapes of its weights or its arithmetic.

    Names are those of Meta's params.json where it has the argument.

    Raises: UsageError for values that no model can have, or that contradict each other.
    """

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn_dim: int
    vocab_size: int
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    max_seq_len: int = 2048
    tied_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    dtype: str = "bfloat16"  # of the weights as stored; 'float32' for quantised GGUF files
    # Features. native.json states those that differ from the default, and all arguments above.
    family: str = "llama"
    wo_bias: bool | None = None  # None: attention_bias, the bias of wq, wk and wv
    # Norms and residual stream
    norm: Literal["rms", "layer"] = "rms"
    norm_bias: bool = False  # of LayerNorm
    norm_offset: float = 0.0  # added to every norm's weight; 1 in Gemma and Nemotron
    parallel_block: bool = False  # x + attention + feed-forward, both of the same x
    shared_norm: bool = False  # in a parallel block: one norm for both
    pre_norms: bool = True  # norms of the inputs of attention and feed-forward
    post_norms: bool = False  # norms of the outputs of attention and feed-forward
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of the outputs of attention and feed-forward when added to x
    logit_scale: float = 1.0
    logit_soft_cap: float | None = None  # c: logits become c tanh(logit / c)
    # Attention
    qk_norm: bool = False  # norms of every head's query and key before rotation
    qk_norm_across_heads: bool = False  # qk_norm: one norm of all queries, and one of all keys
    qk_layer_norm: bool = False  # qk_norm: LayerNorm, with weights for each head, and not RMSNorm
    qk_unit_norm: bool = False  # in rotated layers: RMSNorm of every query and key, no weights
    # s and n: unrotated layers multiply the query at position p by
    # 1 + s ln(1 + floor((p + 1) / n)).
    query_scale: float = 0.0
    query_scale_step: int = 8192
    scales_all_queries: bool = False  # in every layer, with p instead of p + 1
    attention_scale: float | None = None  # of q k^T; None: 1 / sqrt(head_dim)
    attention_soft_cap: float | None = None  # c: scores become c tanh(score / c)
    sliding_window: int | None = None  # keys that a token attends to, its own among them
    window_chunks: bool = False  # a window begins at a multiple of its size, and ends at the token
    full_layers: tuple[int, ...] = ()  # with a window: the layers that attend to all keys
    local_rope_theta: float | None = None  # unscaled base in layers with a window; None: rope_theta
    rotary_dim: int | None = None  # values of each head that are rotated; None: all
    unrotated_layers: tuple[int, ...] = ()  # layers without rotary embeddings (NoPE)
    attention_sinks: int = 0  # first tokens that stay visible outside the window; not in files
    sink_logits: bool = False  # each head's softmax has the term exp(sink), without a value vector
    # Feed-forward
    activation: Literal["silu", "gelu", "gelu_tanh", "relu2", "clamped_swiglu"] = "silu"
    swiglu_alpha: float = 1.702  # clamped_swiglu: the factor inside the sigmoid
    swiglu_limit: float = 7.0  # clamped_swiglu: the bound of its inputs
    gated: bool = True  # w2(f(w1 x) * w3 x), else w2(f(w1 x))
    n_experts: int = 0  # 0: one feed-forward; else ffn_dim has the channels of one expert
    n_active_experts: int = 0  # experts per token
    normed_experts: bool = True  # the routing weights of a token sum to 1
    routed_scale: float = 1.0  # of the routing weights
    sigmoid_router: bool = False  # weights are sigmoids; a bias is added only to choose experts
    router_bias: bool = True  # with sigmoid_router: whether it has that bias
    scaled_inputs: bool = False  # routing weights scale the inputs of experts, not their outputs
    n_expert_groups: int = 1  # with sigmoid_router: the number of groups of consecutive experts
    n_active_groups: int = 1  # the number of groups from which a token's experts come
    expert_bias: bool = False  # biases of the router and of every expert
    shared_ffn_dim: int = 0  # channels of the shared expert, which runs on every token; 0: none
    shared_gate: bool = False  # the shared expert's output is scaled by the sigmoid of a score
    dense_layers: tuple[int, ...] = ()  # layers with one feed-forward instead of experts
    dense_ffn_dim: int = 0  # channels of that feed-forward

    def __post_init__(self) -> None:
        if self.wo_bias == self.attention_bias:
            object.__setattr__(self, "wo_bias", None)
        for name in MAX_SIZES:
            require_size(name, getattr(self, name))
        if self.n_heads % self.n_kv_heads:
            raise UsageError(
                f"n_heads={self.n_heads} and n_kv_heads={self.n_kv_heads}: every KV head serves "
                "the same number of query heads; use a divisor of n_heads"
            )
        if self.head_dim % 2:
            raise UsageError(f"head_dim={self.head_dim}: rotary pairs need an even number")
        self._check_numbers()
        self._check_layers()
        self._check_combinations()
        if not 0 <= self.norm_eps < math.inf:
            raise UsageError(f"norm_eps={self.norm_eps}: use a finite number from 0, such as 1e-5")
        if not (math.isfinite(self.rope_theta) and self.rope_theta > 1):
            raise UsageError(f"rope_theta={self.rope_theta}: use a finite number above 1")
        self._check_experts()
        if self.dtype not in DTYPES:
            raise UsageError(f"dtype={shown(self.dtype)}: use one of {', '.join(DTYPES)}")
        scaling, rotary_dim = self.rope_scaling, self.rotary_dim
        if rotary_dim is not None and (rotary_dim % 2 or not 2 <= rotary_dim <= self.head_dim):
            raise UsageError(
                f"rotary_dim={rotary_dim} and head_dim={self.head_dim}: use an even number from 2 "
                f"to {self.head_dim}, or leave rotary_dim out to rotate all values"
            )
        if scaling is None:
            return
        if rotary_dim is not None and scaling.kind == "factors":
            raise UsageError(
                f"rotary_dim={rotary_dim} and a factor for each frequency (rope_freqs.weight) "
                "cannot be combined; use the Hugging Face folder of the model"
            )
        n_pairs = (rotary_dim or self.head_dim) // 2
        sets = {"factors": [scaling.factors], "longrope": [scaling.factors, scaling.long_factors]}
        for factors in sets.get(scaling.kind, []):
            if len(factors) != n_pairs:
                raise UsageError(
                    f"rope scaling has {len(factors)} factors and head_dim={self.head_dim}: "
                    f"use one for each of the {n_pairs} rotary pairs"
                )
        if scaling.kind == "dynamic" and n_pairs == 1:
            name = "head_dim" if rotary_dim is None else "rotary_dim"
            raise UsageError(f"{name}=2 has one rotary pair, and dynamic rope scaling needs two")

    def _check_numbers(self) -> None:
        caps = "attention_soft_cap", "logit_soft_cap"
        for name in ("attention_scale", "logit_scale", "swiglu_alpha", "swiglu_limit", *caps):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise UsageError(f"{name}={value}: use a finite number above 0")
        if not 1e-6 <= self.residual_scale <= 1e6:  # norm_eps is divided by its square
            raise UsageError(f"residual_scale={self.residual_scale}: use a number from 1e-6 to 1e6")
        if not (math.isfinite(self.query_scale) and self.query_scale >= 0):
            raise UsageError(f"query_scale={self.query_scale}: use a finite number from 0")
        if not 1 <= self.query_scale_step <= MAX_SIZES["max_seq_len"]:
            raise UsageError(
                f"query_scale_step={self.query_scale_step}: use a whole number from 1 to "
                f"{MAX_SIZES['max_seq_len']}"
            )
        for name in ("norm_offset", "embedding_scale"):
            if not math.isfinite(value := getattr(self, name)):
                raise UsageError(f"{name}={value}: use a finite number")
        local = self.local_rope_theta
        if local is not None and not (math.isfinite(local) and local > 1):
            raise UsageError(f"local_rope_theta={local}: use a finite number above 1")

    def _check_layers(self) -> None:
        window, full = self.sliding_window, list(self.full_layers)
        if window is not None and window < 1:
            raise UsageError(
                f"sliding_window={window}: a token attends to at least itself; use 1 or more"
            )
        if full and window is None:
            raise UsageError(f"full_layers={full[:10]} without a sliding_window; give one")
        for name, layers in (
            ("full_layers", full),
            ("unrotated_layers", list(self.unrotated_layers)),
            ("dense_layers", list(self.dense_layers)),
        ):
            if layers != sorted(set(layers) & set(range(self.n_layers))):
                raise UsageError(
                    f"{name}={layers[:10]}: use numbers from 0 to {self.n_layers - 1}, in order"
                )

    def _check_combinations(self) -> None:
        impossible = {
            "norm_bias needs norm='layer'": self.norm_bias and self.norm == "rms",
            "shared_norm needs parallel_block": self.shared_norm and not self.parallel_block,
            "post_norms and parallel_block cannot be combined": (
                self.post_norms and self.parallel_block
            ),
            "qk_norm_across_heads needs qk_norm": self.qk_norm_across_heads and not self.qk_norm,
            "qk_norm_across_heads and norm_offset cannot be combined": (
                self.qk_norm_across_heads and self.norm_offset != 0
            ),
            "qk_unit_norm and qk_norm cannot be combined": self.qk_unit_norm and self.qk_norm,
            "qk_unit_norm and a factor of rope scaling on queries and keys cannot be combined": (
                self.qk_unit_norm
                and self.rope_scaling is not None
                and self.rope_scaling.kind in ("yarn", "longrope")
            ),
            "window_chunks needs sliding_window": (
                self.window_chunks and self.sliding_window is None
            ),
            "window_chunks and attention_sinks cannot be combined": (
                self.window_chunks and self.attention_sinks > 0
            ),
            "scales_all_queries needs query_scale": (
                self.scales_all_queries and self.query_scale == 0
            ),
            "qk_layer_norm needs qk_norm": self.qk_layer_norm and not self.qk_norm,
            "qk_layer_norm and qk_norm_across_heads cannot be combined": (
                self.qk_layer_norm and self.qk_norm_across_heads
            ),
            "qk_layer_norm and norm_offset cannot be combined": (
                self.qk_layer_norm and self.norm_offset != 0
            ),
            "parallel_block needs pre_norms": self.parallel_block and not self.pre_norms,
            "pre_norms or post_norms is needed": not (self.pre_norms or self.post_norms),
            "post_norms and residual_scale cannot be combined": (
                self.post_norms and self.residual_scale != 1
            ),
            "activation='silu' needs gated": not self.gated and self.activation == "silu",
            "activation='relu2' and gated cannot be combined": (
                self.gated and self.activation == "relu2"
            ),
            "activation='clamped_swiglu' needs gated": (
                not self.gated and self.activation == "clamped_swiglu"
            ),
            "attention_sinks and sink_logits cannot be combined": (
                self.attention_sinks > 0 and self.sink_logits
            ),
            "expert_bias needs n_experts": self.expert_bias and not self.n_experts,
            "expert_bias and sigmoid_router cannot be combined": (
                self.expert_bias and self.sigmoid_router
            ),
            "n_experts and mlp_bias cannot be combined": self.n_experts > 0 and self.mlp_bias,
            "n_experts needs gated": self.n_experts > 0 and not self.gated,
            "shared_ffn_dim needs n_experts": self.shared_ffn_dim > 0 and not self.n_experts,
            "sigmoid_router needs n_experts": self.sigmoid_router and not self.n_experts,
            "a router without router_bias needs sigmoid_router": (
                not self.router_bias and not self.sigmoid_router
            ),
            "scaled_inputs needs n_experts": self.scaled_inputs and not self.n_experts,
            "scaled_inputs and expert_bias cannot be combined": (
                self.scaled_inputs and self.expert_bias
            ),
            "n_expert_groups and routed_scale need sigmoid_router": (
                (self.n_expert_groups != 1 or self.routed_scale != 1) and not self.sigmoid_router
            ),
            "shared_gate needs shared_ffn_dim": self.shared_gate and not self.shared_ffn_dim,
            "dense_layers needs n_experts": len(self.dense_layers) > 0 and not self.n_experts,
            "dense_layers and dense_ffn_dim need each other": (
                (len(self.dense_layers) > 0) != (self.dense_ffn_dim > 0)
            ),
            "n_experts needs a layer that is not in dense_layers": (
                self.n_experts > 0 and len(self.dense_layers) == self.n_layers
            ),
            "n_experts and parallel_block cannot be combined": (
                self.n_experts > 0 and self.parallel_block
            ),
        }
        for reason, applies in impossible.items():
            if applies:
                raise UsageError(f"the model's features contradict each other: {reason}")

    def _check_experts(self) -> None:
        if not 0 <= self.n_experts <= MAX_EXPERTS:
            raise UsageError(f"n_experts={self.n_experts}: use a whole number up to {MAX_EXPERTS}")
        if self.n_layers * self.n_experts > MAX_EXPERTS_OF_ALL_LAYERS:
            raise UsageError(
                f"n_experts={self.n_experts} in each of {self.n_layers} layers: use at most "
                f"{MAX_EXPERTS_OF_ALL_LAYERS} in all"
            )
        for name in ("shared_ffn_dim", "dense_ffn_dim"):
            if not 0 <= (size := getattr(self, name)) <= MAX_SIZES["ffn_dim"]:
                raise UsageError(
                    f"{name}={size}: use a whole number from 0 to {MAX_SIZES['ffn_dim']}"
                )
        if not (math.isfinite(self.routed_scale) and self.routed_scale > 0):
            raise UsageError(f"routed_scale={self.routed_scale}: use a finite number above 0")
        self._check_expert_groups()
        least = min(1, self.n_experts)
        if not least <= self.n_active_experts <= self.n_experts:
            raise UsageError(
                f"n_active_experts={self.n_active_experts} and n_experts={self.n_experts}: use "
                f"{least} to {self.n_experts} active experts"
            )

    def _check_expert_groups(self) -> None:
        n_groups, n_active = self.n_expert_groups, self.n_active_groups
        if not 1 <= n_active <= n_groups:
            raise UsageError(
                f"n_active_groups={n_active} and n_expert_groups={n_groups}: use at least 1 group, "
                "and at least 1 and at most all of the groups as active groups"
            )
        size = self.n_experts // n_groups
        if n_groups > 1 and (self.n_experts % n_groups or size < 2):
            raise UsageError(
                f"n_expert_groups={n_groups} and n_experts={self.n_experts}: use groups of the "
                "same size, of 2 or more experts"
            )
        if n_groups > 1 and n_active * size < self.n_active_experts:
            raise UsageError(
                f"n_active_experts={self.n_active_experts} in {n_active} groups of {size} experts: "
                f"use at most {n_active * size}"
            )

    @property
    def has_gate_bias(self) -> bool:
        """Whether the router of a layer with experts has a bias."""
        return self.expert_bias or (self.sigmoid_router and self.router_bias)

    @property
    def first_scaled_position(self) -> int | None:
        """The first position at which some layers scale the queries; None if no layer does."""
        if self.query_scale == 0 or not (self.scales_all_queries or self.unrotated_layers):
            return None
        return self.query_scale_step - (not self.scales_all_queries)

    @property
    def has_wo_bias(self) -> bool:
        return self.attention_bias if self.wo_bias is None else self.wo_bias


def features_of(args: ModelArgs) -> dict[str, Any]:
    """The features that differ from the defaults, including the family's name."""
    defaults = {field.name: field.default for field in fields(ModelArgs)}
    names = list(defaults)
    features = names[names.index("family") :]
    return {name: value for name in features if (value := getattr(args, name)) != defaults[name]}


def head_size(dim_key: str, dim: int, heads_key: str, n_heads: int) -> int:
    """The size of a head, from the model's width and number of heads.

    Raises: UsageError, with the file's keys, unless the width is a multiple of the heads.
    """
    if n_heads < 1 or dim % n_heads:
        raise UsageError(
            f"{dim_key}={dim} and {heads_key}={n_heads}: the width must be a multiple of the heads"
        )
    return dim // n_heads


def longest_sequence(max_seq_len: int, scaling: RopeScaling | None) -> int:
    """The length of the longest sequence: dynamic and YaRN scaling may extend `max_seq_len`.

    The files of a model to which YaRN was added later, as Qwen describes it, keep the context of
    the training as `max_seq_len`.
    """
    extended = 0.0
    if scaling is not None and scaling.kind == "dynamic":
        extended = max_seq_len * scaling.factor
    elif scaling is not None and scaling.kind == "yarn":
        extended = (scaling.original_max_seq_len or 0) * scaling.factor
    return max(max_seq_len, round(min(extended, MAX_SIZES["max_seq_len"])))


def context_length(args: ModelArgs, max_seq_len: int | None = None) -> int:
    """The longest sequence that may run: `max_seq_len`, or the model's own context.

    Raises: UsageError for more than the model's own context.
    """
    limit = longest_sequence(args.max_seq_len, args.rope_scaling)
    if max_seq_len is None:
        return limit
    if not 1 <= max_seq_len <= limit:
        raise UsageError(
            f"max_seq_len={max_seq_len}: this model's context is {limit} tokens; use 1 to {limit}"
        )
    return max_seq_len


def for_context(args: ModelArgs, max_seq_len: int) -> ModelArgs:
    """The model for sequences of at most `max_seq_len` tokens, which decides LongRoPE's factors.

    All sequences of a run use the same factors, so that cached keys stay valid while a sequence
    grows.
    """
    scaling = args.rope_scaling
    if scaling is None or scaling.kind != "longrope":
        return args
    return replace(args, max_seq_len=max_seq_len)


def with_sinks(args: ModelArgs, n_sinks: int, max_seq_len: int) -> ModelArgs:
    """The model with attention sinks and a sliding window, for sequences of any length.

    The window is the model's own, or `max_seq_len` less the sinks for a model without one.

    Raises: UsageError if only some layers have a window, if a layer has no rotary embeddings, with
        dynamic rope scaling, or with `sink_logits`.
    Source: StreamingLLM, arXiv 2309.17453.
    """
    scaling = args.rope_scaling
    if args.full_layers:
        raise UsageError(
            f"attention_sinks={n_sinks}: some layers attend to all keys, so the KV cache "
            "would grow without limit; use a model in which all layers or no layer has a window"
        )
    if scaling is not None and scaling.kind == "dynamic":
        raise UsageError(
            f"attention_sinks={n_sinks} and dynamic rope scaling, whose base grows with the "
            "length, cannot be combined; drop one"
        )
    if args.sink_logits:
        raise UsageError(
            f"attention_sinks={n_sinks}: the model has sinks of its own, a logit for each head; "
            "drop attention_sinks"
        )
    if args.unrotated_layers:
        raise UsageError(
            f"attention_sinks={n_sinks} and layers without rotary embeddings cannot be combined, "
            "because sinks are moved next to the window by rotating queries; drop attention_sinks"
        )
    window = args.sliding_window or max_seq_len - n_sinks
    if not 1 <= n_sinks < max_seq_len or window < 1:
        raise UsageError(f"attention_sinks={n_sinks}: use 1 to {max_seq_len - 1}, such as 4")
    return replace(args, sliding_window=window, attention_sinks=n_sinks)


@dataclass(frozen=True)
class KVGroup:
    """Layers that attend to the same keys: all keys, or the keys of a window.

    With `has_chunks`, a window begins at a multiple of its size.
    """

    layers: tuple[int, ...]
    window: int | None
    has_chunks: bool = False


def kv_groups(args: ModelArgs) -> tuple[KVGroup, ...]:
    """The KV groups of a model: layers without a window first; no group is empty."""
    full = tuple(range(args.n_layers)) if args.sliding_window is None else args.full_layers
    local = tuple(layer for layer in range(args.n_layers) if layer not in full)
    kv_groups = KVGroup(full, None), KVGroup(local, args.sliding_window, args.window_chunks)
    return tuple(kv_group for kv_group in kv_groups if kv_group.layers)
