"""The request that `plan` answers: a model, its formats and its ranks. No torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import mul

from parallel_llama.cli import model
from parallel_llama.cli.arguments import Flags
from parallel_llama.cli.hardware import Hardware
from parallel_llama.cli.hosts import Hosts
from parallel_llama.config.adapter import Adapter, load_served_adapters
from parallel_llama.config.layouts import default_dtype, default_quant, stored_formats
from parallel_llama.dtypes import KVFormat, MatrixFormat, Precision, kv_format, make_precision
from parallel_llama.engine.kv_blocks import STEP_TOKENS
from parallel_llama.engine.llm_config import require_draft_model
from parallel_llama.engine.scheduler import MAX_RUNNING
from parallel_llama.families.model_args import ModelArgs, context_length, kv_groups
from parallel_llama.files.model_files import ModelFiles
from parallel_llama.memory import blocks_held, pool_sizes, working_bytes
from parallel_llama.parallel.device_choice import DeviceKind
from parallel_llama.parallel.launch import MAX_RANKS
from parallel_llama.plan import KVSplit, Shard, resolve_exact, stage_sizes


@dataclass(frozen=True)
class PlanRequest:
    """A requested plan: a model on some ranks, with `batch` sequences in the KV cache.

    Args:
        stored: formats of the matrices in the model's files.
        memory: bytes, one number for all ranks or one per rank; None if not known.
        bandwidth: bytes per second that a rank can read, one number or one per rank.
        hardware: the rates and costs from which the speed is predicted; None if not known.
        speeds: measured speeds, used if the plan has as many ranks; None if not known.
        hosts: the hosts of the ranks, from --hosts; None without this flag.
        pp: the number of stages of the pipeline.
        adapters: LoRA adapters that the ranks hold in addition to the model.
        draft: the draft model; None without one. Its ranks are those of this request.
        from_gguf: whether the model's files are GGUF files.
    """

    args: ModelArgs
    stored: Mapping[str, MatrixFormat]
    device: DeviceKind
    dtype: str
    quant: str
    kv_cache_dtype: str
    kv_split: KVSplit
    exact: bool | None
    max_seq_len: int
    batch: int = 1
    tp_size: int = 1
    memory: int | tuple[int, ...] | None = None
    bandwidth: int | tuple[int | None, ...] | None = None
    hardware: Hardware | None = None
    speeds: tuple[float, ...] | None = None
    hosts: Hosts | None = None
    pp: int = 1
    adapters: tuple[Adapter, ...] = ()
    draft: "PlanRequest | None" = None
    from_gguf: bool = False

    @cached_property
    def precision(self) -> Precision:
        """Raises: UsageError if the model does not support the requested formats."""
        return make_precision(self.args, self.dtype, self.device, self.quant, self.stored)

    @property
    def kv(self) -> KVFormat:
        return kv_format(self.kv_cache_dtype, self.precision.computed)

    @property
    def is_exact(self) -> bool:
        """Whether the sums over ranks are exact."""
        in_stage = max(stage_sizes(self.tp_size, self.pp))
        return resolve_exact(self.exact, self.args, in_stage, self.device)

    @property
    def step_tokens(self) -> int:
        return STEP_TOKENS[self.device]

    def working(self, shard: Shard) -> int:
        """Memory of a rank for its process or CUDA's libraries, and for the tensors of a step."""
        # CUDA reserves memory for the largest batch; the CPU allocates what the batch needs.
        n_drawn = MAX_RUNNING if self.device == "cuda" else min(self.batch, MAX_RUNNING)
        return working_bytes(
            self.args,
            shard,
            self.precision,
            self.step_tokens,
            n_drawn,
            self.device,
            self.max_seq_len,
            from_gguf=self.from_gguf,
        )

    @property
    def tokens_each(self) -> tuple[int, ...]:
        """Maximum tokens of a sequence in the cache of each KV group."""
        return tuple(
            blocks_held(self.max_seq_len, 1, kv_group.window, self.step_tokens)
            for kv_group in kv_groups(self.args)
        )

    @property
    def n_tokens(self) -> int:
        """Maximum tokens of all sequences in the cache of the first KV group."""
        return self.tokens_each[0] * self.batch

    def blocks_each(self, block_size: int) -> int:
        """Maximum blocks of a sequence in the cache of the first KV group."""
        full = kv_groups(self.args)[0]
        return blocks_held(self.max_seq_len, block_size, full.window, self.step_tokens)

    def pools(self, block_size: int, n_blocks: int) -> tuple[int, ...]:
        """The number of blocks of each KV group if the first has `n_blocks`."""
        return pool_sizes(self.args, n_blocks, block_size, self.max_seq_len, self.step_tokens)

    def cache_bytes(self, per_kv_group: Sequence[int], block_size: int) -> int:
        """The --kv-cache-bytes needed, in whole blocks, given each KV group's bytes per token."""
        sizes = self.pools(block_size, self.batch * self.blocks_each(block_size))
        n_bytes: int = block_size * sum(map(mul, sizes, per_kv_group))
        return n_bytes

    @property
    def most_ranks(self) -> int:
        """The largest number of ranks that can have a plan."""
        n_heads = min(each.args.n_heads for each in (self, self.draft) if each is not None)
        return min(n_heads * self.pp, MAX_RANKS)

    @property
    def draft_on_ranks(self) -> "PlanRequest | None":
        """The draft model on the ranks of this request; None without a draft model.

        Raises: UsageError for settings with which a draft model cannot run.
        """
        if self.draft is None:
            return None
        require_draft_model(self.device, self.kv_split, pp=self.pp)
        return replace(
            self.draft,
            kv_cache_dtype=self.kv_cache_dtype,
            tp_size=self.tp_size,
            memory=self.memory,
            speeds=self.speeds,
        )


def plan_request(
    flags: Flags, files: ModelFiles, args: ModelArgs, device: DeviceKind, tp_size: int
) -> PlanRequest:
    """The plan for one sequence on `tp_size` ranks, with the adapters and the draft model of flags.

    Raises: UsageError for an adapter or a draft model that cannot run with the model.
    """
    request = _model_request(flags, files, args, device, flags[model.QUANT])
    request = replace(
        request,
        kv_split=flags[model.KV_SPLIT],
        tp_size=tp_size,
        pp=flags[model.PP],
        adapters=tuple(load_served_adapters(model.adapters_of(flags), args).values()),
    )
    planned = model.draft_model(flags, args, request.max_seq_len, device)
    if planned is None:
        return request
    return replace(request, draft=_model_request(flags, *planned, device, flags[model.DRAFT_QUANT]))


def _model_request(
    flags: Flags, files: ModelFiles, args: ModelArgs, device: DeviceKind, quant: str | None
) -> PlanRequest:
    dtype = flags[model.DTYPE] or default_dtype(files, args, device)
    return PlanRequest(
        args,
        stored_formats(files, args),
        device,
        dtype,
        quant or default_quant(files, args, dtype),
        flags[model.KV_CACHE_DTYPE],
        "heads",
        flags[model.EXACT],
        context_length(args, flags[model.MAX_SEQ_LEN]),
        from_gguf=files.kind == "gguf",
    )
