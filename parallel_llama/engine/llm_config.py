"""`LLMConfig`: the settings of an LLM, for callers, the command line, the server and all ranks."""

import json
from collections.abc import Hashable, Mapping
from dataclasses import asdict, dataclass, field
from numbers import Integral, Real
from os import PathLike
from typing import Any, TypedDict, get_args

import msgspec

from parallel_llama.errors import UsageError, counted
from parallel_llama.parallel.launch import MAX_RANKS
from parallel_llama.parallel.rank_stacks import require_log_dir
from parallel_llama.parallel.timeouts import MAX_TIMEOUT_S, Timeouts
from parallel_llama.plan import KVSplit

# With more drafts a token would run in the kernels for prompts, which may give other bits.
MAX_DRAFTS = 8
# Ranks compare the fields of a config as text, so each field must have one type.
_WHOLE_NUMBERS = (
    "seed",
    "random_weights",
    "max_drafts",
    "spares",
    "max_seq_len",
    "kv_cache_bytes",
    "attention_sinks",
    "block_size",
)
# Whether None is allowed, besides True and False.
_SWITCHES = {
    "verify": False,
    "download": False,
    "elastic": False,
    "exact": True,
    "integrity_check": True,
}
MAX_ADAPTER_NAME_CHARS = 256  # also the limit of `model` in a request to a server


def require_elastic(
    device: str, kv_split: KVSplit, slice_of: tuple[int, int] | None = None
) -> None:
    """Raises: UsageError for settings with which ranks cannot continue after a loss."""
    settings = {
        "GPUs": device == "cuda",
        "a KV cache sharded by sequence": kv_split == "sequence",
        "a slice": slice_of is not None,
    }
    why = ": elastic needs CPU ranks, a KV cache sharded by heads, and no slice"
    _require_none("elastic", settings, why)


def require_pipeline(
    pp: object,
    device: str,
    kv_split: KVSplit,
    *,
    elastic: bool = False,
    slice_of: tuple[int, int] | None = None,
) -> None:
    """Raises: UsageError if `pp` is not a number of stages, or settings do not allow stages."""
    if not isinstance(pp, Integral) or not 1 <= int(pp) <= MAX_RANKS:
        raise UsageError(f"a pipeline of {pp!r} stages: use a whole number from 1 to {MAX_RANKS}")
    if int(pp) == 1:
        return
    if device == "cuda":
        raise UsageError("a pipeline (pp) on GPUs is not supported; use the CPU, or drop pp")
    settings = {
        "a KV cache sharded by sequence": kv_split == "sequence",
        "elastic": elastic,
        "a slice": slice_of is not None,
    }
    _require_none("a pipeline (pp)", settings)


def require_draft_model(
    device: str,
    kv_split: KVSplit,
    *,
    pp: int = 1,
    attention_sinks: int = 0,
    slice_of: tuple[int, int] | None = None,
) -> None:
    """Raises: UsageError for settings with which a draft model cannot run."""
    settings = {
        "GPUs": device == "cuda",
        "a KV cache sharded by sequence": kv_split == "sequence",
        "a pipeline (pp)": pp > 1,
        "attention sinks": attention_sinks > 0,
        "a slice": slice_of is not None,
    }
    _require_none("a draft model", settings)


def _require_none(what: str, settings: Mapping[str, bool], why: str = "") -> None:
    """Raises: UsageError for the first setting that is given."""
    for name, is_given in settings.items():
        if is_given:
            raise UsageError(f"{what} and {name} cannot be combined{why}; drop one")


def require_spares(n_spares: int, size: int) -> None:
    """Raises: UsageError for spares of a single rank, or for too many processes."""
    if n_spares and size == 1:
        raise UsageError(
            f"{counted(n_spares, 'spare')} with one rank: only ranks above 0 are replaced; use at "
            "least 2 ranks, or drop the spares"
        )
    if n_spares + size > MAX_RANKS:
        raise UsageError(
            f"{counted(n_spares, 'spare')} and {size} ranks are more than {MAX_RANKS} processes; "
            "use fewer"
        )


def adapter_folders(adapters: object) -> dict[str, str]:
    """The folders of adapters, by name. Raises: UsageError for invalid names or paths."""
    if not isinstance(adapters, Mapping):
        raise UsageError(f"adapters={adapters!r:.200}: use a dict of folders by name")
    for name, folder in adapters.items():
        is_name = isinstance(name, str) and 1 <= len(name) <= MAX_ADAPTER_NAME_CHARS
        if not is_name or not name.isprintable():
            raise UsageError(
                f"adapters has the name {name!r:.80}: use a string of 1 to "
                f"{MAX_ADAPTER_NAME_CHARS} printable characters"
            )
        if not isinstance(folder, str | PathLike):
            raise UsageError(f"adapters[{name!r}]={folder!r:.200}: use the path of a folder")
    return {name: str(folder) for name, folder in adapters.items()}


class Settings(TypedDict, total=False):
    """The fields of `LLMConfig` without `model`: the keyword arguments of LLM, typed."""

    tp_size: int | None
    pp: int
    memory: tuple[float, ...] | None
    speeds: tuple[float, ...] | None
    dtype: str | None
    quant: str | None
    device: str
    max_seq_len: int | None
    seed: int | None
    random_weights: int | None
    slice_of: tuple[int, int] | None
    verify: bool
    download: bool
    kv_cache_bytes: int | None
    kv_cache_dtype: str
    kv_split: KVSplit
    exact: bool | None
    attention_sinks: int
    block_size: int
    max_drafts: int
    draft_model: str | None
    draft_quant: str | None
    integrity_check: bool | None
    timeout_s: float
    start_timeout_s: float
    log_dir: str | None
    elastic: bool
    spares: int
    adapters: Mapping[str, str]


@dataclass(frozen=True)
class LLMConfig:
    """The model and the settings of an LLM, which can be sent to another process as JSON.

    Args:
        model: a model folder, a .gguf file, or the name of a model.
        tp_size: number of ranks. By default as many as torchrun has started, else one for each
            number of `memory` or `speeds`, else 1.
        pp: number of stages of the pipeline, for hosts with a slow link between them. A stage is
            consecutive layers on consecutive ranks of one host. Ranks exchange activations within
            their stage, and a decode step has pp + 3 exchanges of all ranks. For CPU ranks.
        memory: the GiB that each rank may use for weights, KV cache, its process and the tensors of
            a step. The ranks' shares of the model are in proportion to these numbers. By default
            the shares are equal, and only the free memory limits them.
        speeds: the speed of each rank, in any unit. The ranks' shares are in proportion to the
            speeds, as far as `memory` allows.
        dtype: float32, bfloat16, float16 or float64. By default float64 for a float64 model; for
            others bfloat16 on CUDA, and on the CPU the dtype that the files state, or float32. The
            CPU keeps weights in 16 bits and computes in float32.
        quant: int8, int4 or fp8 quantise the matrices while they are read, with a scale for every
            32 inputs; stored keeps the files' own quantisation; none decodes the weights. By
            default stored if the files can run as stored, else none; none for the model smollm2.
        device: auto, cpu or cuda.
        max_seq_len: lowers the model's context, in tokens.
        seed: seed of requests that have no seed. By default each call draws a new one.
        random_weights: seed of random weights, for a model that is only a configuration.
        slice_of: (rank, n_ranks) runs a single rank with random weights in the shape of one rank of
            n_ranks, without communication. Its timing is meaningful, its tokens are not.
        verify: compare every file with the folder's manifest before reading it; the ranks of a
            host each verify a part of its files.
        download: download the missing files of `model`, if `model` names a model on the Hugging
            Face hub. The first rank of each host downloads the files before the ranks connect.
        kv_cache_bytes: memory for the KV cache of each rank. By default a part of the free memory.
        kv_cache_dtype: bfloat16, int8 or fp8; auto for the dtype of computation.
        kv_split: how the KV cache is sharded: heads; or sequence, by tokens, so that ranks which
            share a KV head do not all store it.
        exact: the same bits on any number of ranks: ranks exchange the inputs and the outputs of wo
            and w2 instead of partial sums. By default True on the CPU if all ranks are on one host
            or `pp` is above 1, except where ranks hold different experts or the CPU's kernels are
            not available; False is usually faster.
        attention_sinks: number of first tokens that stay visible outside a sliding window. With
            them a sequence may be longer than the context.
        block_size: tokens of a block of the KV cache; rounded up to a multiple of 128 with exact
            sums and kv_split='sequence'.
        max_drafts: maximum draft tokens per sequence and step, guessed from earlier text or by
            `draft_model`, and then verified; 0 for none, at most 8. Drafts change the speed and
            never the tokens.
        draft_model: a small model that drafts tokens, given like `model`. It must have the same
            tokenizer, and runs on the same CPU ranks.
        draft_quant: as `quant`, for the draft model.
        integrity_check: on the CPU, check weights and KV cache for flipped bits, and products for
            wrong results. By default True with exact sums.
        timeout_s: seconds that a rank waits for another one in a step.
        start_timeout_s: seconds that a rank waits for another one while the ranks join and load.
        log_dir: folder in which a subfolder with the stacks of the ranks is made after a failure.
            By default the folder of temporary files.
        elastic: after the loss of a rank above 0, the other ranks continue all requests, and a new
            process replaces the lost rank as soon as it has started. For CPU ranks. Ranks that
            another program has started one by one, on any hosts, also continue, but lost ranks are
            not replaced.
        spares: with `elastic`, number of idle processes that replace lost ranks immediately.
        adapters: folders of LoRA adapters, as PEFT saves them, by the names that requests use.
    """

    model: str = "smollm2"
    tp_size: int | None = None
    pp: int = 1
    memory: tuple[float, ...] | None = None
    speeds: tuple[float, ...] | None = None
    dtype: str | None = None
    quant: str | None = None
    device: str = "auto"
    max_seq_len: int | None = None
    seed: int | None = None
    random_weights: int | None = None
    slice_of: tuple[int, int] | None = None
    verify: bool = False
    download: bool = False
    kv_cache_bytes: int | None = None
    kv_cache_dtype: str = "auto"
    kv_split: KVSplit = "heads"
    exact: bool | None = None
    attention_sinks: int = 0
    block_size: int = 16
    max_drafts: int = MAX_DRAFTS
    draft_model: str | None = None
    draft_quant: str | None = None
    integrity_check: bool | None = None
    timeout_s: float = Timeouts.step_s
    start_timeout_s: float = Timeouts.start_s
    log_dir: str | None = None
    elastic: bool = False
    spares: int = 0
    adapters: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises: UsageError for values that no model supports; `ModelSetup` checks more."""
        for name in ("model", "draft_model", "log_dir"):
            if (value := getattr(self, name)) is not None:
                if not isinstance(value, str | PathLike):
                    raise UsageError(f"{name}={value!r:.200}: use a string or a path")
                object.__setattr__(self, name, str(value))
        if self.kv_split not in get_args(KVSplit):
            raise UsageError(f"kv_split={self.kv_split!r}: use heads or sequence")
        for name, or_none in _SWITCHES.items():
            value = getattr(self, name)
            if value is None and or_none:
                continue
            if not isinstance(value, Hashable) or value not in (False, True):
                allowed = "True, False or None" if or_none else "True or False"
                raise UsageError(f"{name}={value!r:.200}: use {allowed}")
            object.__setattr__(self, name, bool(value))
        require_pipeline(
            self.pp, self.device, self.kv_split, elastic=self.elastic, slice_of=self.slice_of
        )
        object.__setattr__(self, "pp", int(self.pp))
        if self.elastic:
            require_elastic(self.device, self.kv_split, self.slice_of)
        elif self.spares:
            raise UsageError(
                f"spares ({self.spares!r}) without elastic: use both, or drop the spares"
            )
        if self.draft_model is not None:
            require_draft_model(
                self.device,
                self.kv_split,
                pp=self.pp,
                attention_sinks=self.attention_sinks,
                slice_of=self.slice_of,
            )
        elif self.draft_quant is not None:
            raise UsageError(
                f"draft_quant={self.draft_quant!r} without draft_model: use both, or drop "
                "draft_quant"
            )
        for name in ("memory", "speeds"):
            if (numbers := getattr(self, name)) is None:
                continue
            try:
                object.__setattr__(self, name, tuple(map(float, numbers)))
            except (TypeError, ValueError):
                raise UsageError(f"{name}={numbers!r}: use one number per rank") from None
            if self.tp_size is None:
                object.__setattr__(self, "tp_size", len(getattr(self, name)))
            if self.elastic:
                raise UsageError(
                    f"elastic and {name} cannot be combined: after a loss the remaining ranks "
                    "get equal shares; drop one"
                )
        for name in _WHOLE_NUMBERS:
            if (value := getattr(self, name)) is not None:
                if not isinstance(value, Integral) or int(value) < 0:
                    raise UsageError(f"{name}={value!r}: use a whole number of at least 0")
                object.__setattr__(self, name, int(value))
        if self.max_drafts > MAX_DRAFTS:
            raise UsageError(f"max_drafts={self.max_drafts}: use at most {MAX_DRAFTS}")
        for name in ("timeout_s", "start_timeout_s"):
            value = getattr(self, name)
            if not isinstance(value, Real) or not 0 < float(value) <= MAX_TIMEOUT_S:
                raise UsageError(
                    f"{name}={value!r}: use a number of seconds above 0, at most {MAX_TIMEOUT_S:g}"
                )
            object.__setattr__(self, name, float(value))
        require_log_dir(self.log_dir)
        object.__setattr__(self, "adapters", adapter_folders(self.adapters))
        if self.slice_of is not None:
            rank, n_ranks = self.slice_of
            if not 0 <= rank < n_ranks:
                raise UsageError(
                    f"slice_of={self.slice_of}: the rank must be at least 0 and less than the "
                    f"number of ranks, {n_ranks}"
                )
            object.__setattr__(self, "random_weights", self.random_weights or 0)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, line: bytes) -> "LLMConfig":
        """Raises: ValueError for a line that is not JSON, or a field of another type or range.

        Keys that are not fields are ignored.
        """
        return msgspec.convert(json.loads(line), cls)

    def facts(self) -> Mapping[str, str]:
        """The settings that must be equal on all ranks; paths may differ."""
        rank_settings = (
            "model",
            "draft_model",
            "download",
            "device",
            "tp_size",
            "log_dir",
            "adapters",
        )
        return {
            name: str(value) for name, value in asdict(self).items() if name not in rank_settings
        }
