"""Combines an LLM's settings with its model, before ranks start or weights are read."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from operator import add

import torch

from parallel_llama.checkpoint.checkpoint import Checkpoint, random_checkpoint
from parallel_llama.checkpoint.file_manifest import require_whole
from parallel_llama.checkpoint.meta_folder import meta_vocab_size
from parallel_llama.checkpoint.reading import open_checkpoint
from parallel_llama.config.adapter import kept_in_memory, load_served_adapters
from parallel_llama.config.inputs import why_differing_inputs
from parallel_llama.config.layouts import (
    default_dtype,
    default_quant,
    input_formats,
    load_model_args,
    stored_formats,
    why_decoded,
    why_own_kv_scales,
)
from parallel_llama.dtypes import DenseFormat, kv_format, make_precision
from parallel_llama.engine.drafts import draft_kv_bytes, shared_tables
from parallel_llama.engine.input_processor import InputProcessor
from parallel_llama.engine.kv_blocks import STEP_TOKENS
from parallel_llama.engine.kv_capacity import CacheSize, MemoryLimit
from parallel_llama.engine.llm_config import (
    LLMConfig,
    require_draft_model,
    require_elastic,
    require_pipeline,
    require_spares,
)
from parallel_llama.engine.model_download import require_downloaded
from parallel_llama.engine.scheduler import MAX_RUNNING
from parallel_llama.errors import CheckpointError, DamagedWeights, UsageError
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.files.model_files import ModelFiles, find_model
from parallel_llama.memory import (
    GIB,
    adapter_bytes,
    kv_bytes_per_token,
    values_of_stages,
    weight_bytes,
    working_bytes,
)
from parallel_llama.ops.cpu.gemm_amx import tiles_are_allowed
from parallel_llama.ops.cpu.jit import why_no_kernels
from parallel_llama.ops.triton_toolchain import why_unusable
from parallel_llama.parallel.communicators import own_device, visible_gpus
from parallel_llama.parallel.device_choice import (
    DeviceKind,
    choose_device,
    ranks_sharing_gpus,
    too_few,
)
from parallel_llama.parallel.launch import MAX_RANKS
from parallel_llama.parallel.rank_env import is_one_host, is_started_as_rank, ranks_here, world
from parallel_llama.plan import resolve_exact, stage_sizes, why_unrecorded
from parallel_llama.shares import plan_with_shares

logger = logging.getLogger(__name__)

_WITHOUT_KERNELS = "the model runs on torch's operators, many times slower and without exact sums"
_WHY_UNROUNDED = (
    "activations are not rounded, although config.json asks for it: a scale depends on inputs of "
    "all ranks, and only exact sums gather these; use --exact on the CPU, or one rank"
)


class ModelSetup:
    """The plan, precision, device and checkpoint of a model on this rank.

    Args:
        inputs: the model's InputProcessor, if the caller already has one.

    Raises: UsageError for settings that cannot run; CheckpointError for files that cannot be used;
    DamagedWeights for files that differ from their manifest.
    """

    def __init__(self, config: LLMConfig, inputs: InputProcessor | None = None) -> None:
        self.size = resolve_size(config.tp_size)
        slice_of, has_files = config.slice_of, config.random_weights is None
        _require_single_rank(slice_of, self.size)
        if config.download and inputs is None:
            require_downloaded(config.model, config.start_timeout_s)
        if config.verify:
            model = config.model if inputs is None else str(inputs.files.path)
            rank, n_ranks = ranks_here(self.size)  # each host may have a copy of its own
            require_whole(model, part=slice(rank, None, n_ranks))
        self.inputs = inputs or _input_processor(config)
        self.args, files = self.inputs.args, self.inputs.files
        # This is sent to the other ranks, so it has the context length of `inputs`.
        self.config = replace(config, tp_size=self.size, max_seq_len=self.inputs.max_seq_len)
        self.adapters = load_served_adapters(self.config.adapters, self.args)
        self.kind, gpu = _choose_device(config.device, self.size)
        _require_checkable(bool(config.integrity_check), self.kind)
        self.device = own_device(self.kind, gpu)
        require_pipeline(config.pp, self.kind, config.kv_split)
        if config.elastic:
            require_elastic(self.kind, config.kv_split)
            require_spares(config.spares, self.size)
            # Each new group of ranks reads the adapters again.
            self.adapters = {name: kept_in_memory(each) for name, each in self.adapters.items()}
        self.dtype = config.dtype or default_dtype(files, self.args, self.kind)
        slice_rank, n_shards = slice_of or (None, self.size)
        # Exact sums send more data, so they are not the default on several hosts, unless stages
        # keep that data on one host.
        is_local = is_one_host(self.size) or config.pp > 1
        requested_exact = config.exact if is_local else bool(config.exact)
        if self.kind == "cpu" and why_no_kernels() is not None:
            requested_exact = _inexact(config.exact)
        max_stage_size = max(stage_sizes(n_shards, config.pp))
        self.exact = resolve_exact(requested_exact, self.args, max_stage_size, self.kind)
        stored = stored_formats(files, self.args) if has_files else None
        self.quant = config.quant or "none"
        if has_files and config.quant is None:
            self.quant = default_quant(files, self.args, self.dtype)
        input_forms = input_formats(files, self.args) if has_files else {}
        rounded_inputs = {
            name: form
            for name, form in input_forms.items()
            if self.exact or max_stage_size == 1 or form.scale is not None
        }
        self.precision = make_precision(
            self.args, self.dtype, self.kind, self.quant, stored, rounded_inputs
        )
        self.kv_format = kv_format(config.kv_cache_dtype, self.precision.computed)
        checks_integrity = config.integrity_check
        if checks_integrity is None:
            checks_integrity = self.exact and slice_of is None
        self.integrity_check = checks_integrity
        self.draft = self._draft_setup()
        self.shard_over(n_shards, slice_rank)
        warnings = [why_unrecorded(self.args, self.plan.kv_parts, self.kind)]
        if self.exact and config.exact is None and self.precision.dtype == "bfloat16":
            warnings.append(_why_without_tiles())
        if self.kind == "cpu" and (why := why_no_kernels()) is not None:
            warnings.append(f"{_WITHOUT_KERNELS}, because {why}")
        if self.kind == "cuda":
            warnings.append(why_unusable())
        if has_files:
            warnings.append(why_decoded(files, self.args, self.dtype, config.quant))
            warnings.append(why_own_kv_scales(files))
            if self.precision.inputs and self.kind == "cpu":
                warnings.append(why_differing_inputs(self.args, self.precision.inputs))
            if any(self._is_decoded(name) for name in input_forms.keys() - rounded_inputs.keys()):
                warnings.append(_WHY_UNROUNDED)
        for reason in filter(None, warnings if world()[0] == 0 else ()):
            logger.warning(reason)
        random_device = torch.device("cpu") if slice_of is None else self.device
        self.checkpoint = _open_weights(files, self.args, config, random_device)

    def shard_over(self, n_shards: int, alone: int | None = None) -> None:
        """Compute the plan, the size of the KV cache and `weight_bytes` for a number of ranks.

        Args:
            alone: the rank that runs without the other ranks; None if all ranks run.

        Raises: UsageError if the model cannot be sharded over that many ranks, or does not fit into
        their memory.
        """
        config = self.config
        memory = config.memory and [gib * GIB for gib in config.memory]
        from_gguf = self.inputs.files.kind == "gguf"
        plan = plan_with_shares(
            self.args,
            n_shards,
            memory,
            config.speeds,
            self.precision,
            self.kv_format,
            config.kv_split,
            exact=self.exact,
            device=self.kind,
            max_seq_len=self.inputs.max_seq_len,
            step_tokens=STEP_TOKENS[self.kind],
            pp=config.pp,
            from_gguf=from_gguf,
        )
        self.plan = plan if alone is None else plan.alone(alone)
        values = values_of_stages(self.args, self.precision, self.plan)
        self.weight_bytes = tuple(
            weight_bytes(shard, values[shard.stage])
            + sum(adapter_bytes(each, shard, self.precision) for each in self.adapters.values())
            for shard in self.plan.shards
        )
        draft_bytes: list[tuple[int, ...]] = []
        if self.draft is not None:
            self.draft.shard_over(n_shards)
            self.weight_bytes = tuple(map(add, self.weight_bytes, self.draft.weight_bytes))
            draft_bytes = [
                draft_kv_bytes(
                    self.args,
                    self.draft_tables,
                    kv_bytes_per_token(self.draft.args, shard, self.draft.kv_format),
                )
                for shard in self.draft.plan.shards
            ]
        step_tokens = STEP_TOKENS[self.kind]
        # A GPU reserves memory for the largest batch; the CPU allocates what the batch needs.
        n_drawn = MAX_RUNNING if self.kind == "cuda" else 1
        working = [
            working_bytes(
                self.args,
                shard,
                self.precision,
                step_tokens,
                n_drawn,
                self.kind,
                self.inputs.max_seq_len,
                from_gguf=from_gguf,
            )
            for shard in self.plan.shards
        ]
        self.cache_size = CacheSize(
            self.args,
            self.plan,
            self.kv_format,
            self.plan.shards[0].block_size(self.config.block_size),
            self.config.kv_cache_bytes,
            self.inputs.max_seq_len,
            working if self.kind == "cuda" else (),
            step_tokens,
            self._limits(working),
            draft_bytes,
        )

    def _draft_setup(self) -> "ModelSetup | None":
        """The setup of the draft model on the same ranks.

        Raises: UsageError for a draft model that cannot run with this model.
        """
        config = self.config
        if config.draft_model is None:
            return None
        require_draft_model(self.kind, config.kv_split)
        try:
            draft = ModelSetup(
                replace(
                    config,
                    model=config.draft_model,
                    quant=config.draft_quant,
                    draft_model=None,
                    draft_quant=None,
                    kv_cache_bytes=None,
                    adapters={},
                )
            )
            self.draft_tables = shared_tables(self.args, draft.args)
        except UsageError as error:
            raise UsageError(f"draft model {config.draft_model!r}: {error}") from error
        return draft

    def _is_decoded(self, matrix: str) -> bool:
        return isinstance(self.precision.form_of("matrix", matrix), DenseFormat)

    def _limits(self, working: Sequence[int]) -> list[MemoryLimit]:
        """The memory of each rank that runs; empty if the user does not limit it."""
        if (memory := self.config.memory) is None:
            return []
        return [
            MemoryLimit(int(memory[shard.rank] * GIB), *parts)
            for shard, *parts in zip(self.plan.shards, self.weight_bytes, working, strict=True)
        ]


def resolve_size(requested: int | None) -> int:
    """The number of ranks: `requested`, or the number of ranks that torchrun has started.

    Raises: UsageError if both are given and differ, or for a number that is out of range.
    """
    _, size = world()
    if requested is None or requested == size:
        return size
    if type(requested) is not int or not 1 <= requested <= MAX_RANKS:
        raise UsageError(f"tp_size={requested!r}: use a whole number from 1 to {MAX_RANKS}")
    if size > 1 or is_started_as_rank():
        raise UsageError(
            f"tp_size={requested} and there are {size} ranks, which torchrun or another program "
            "has started; leave tp_size out"
        )
    return requested


def _require_single_rank(slice_of: tuple[int, int] | None, size: int) -> None:
    if slice_of is not None and (size > 1 or is_started_as_rank()):
        raise UsageError(
            f"slice_of={slice_of} with {size} ranks: a slice runs alone; leave tp_size out"
        )


def _require_checkable(integrity_check: bool, kind: DeviceKind) -> None:
    if integrity_check and kind != "cpu":
        raise UsageError(
            "the integrity check is only for memory of the CPU; drop it, or use the CPU"
        )


def _input_processor(config: LLMConfig) -> InputProcessor:
    files = find_model(config.model)
    return InputProcessor(
        files,
        load_model_args(files, meta_vocab_size),
        max_seq_len=config.max_seq_len,
        seed=config.seed,
        attention_sinks=config.attention_sinks,
    )


def _inexact(requested: bool | None) -> bool:
    """Returns: False, because without kernels a sum's order depends on the shape of its matrix.

    Raises: UsageError if exact sums are requested.
    """
    if requested:
        raise UsageError(
            "exact sums need kernels, which need fused multiply-add instructions of the CPU and a "
            "torch with GNU OpenMP; leave --exact out"
        )
    return False


def _why_without_tiles() -> str | None:
    """Why prefill is slower than this CPU allows, and the remedy; None if AMX is not usable."""
    if not tiles_are_allowed():
        return None
    return (
        "exact sums do not use the matrix tiles of this CPU (AMX), which process prompts up to "
        "twice as fast; use --no-exact if the last bits may depend on the number of ranks"
    )


def _open_weights(
    files: ModelFiles, args: ModelArgs, config: LLMConfig, random_device: torch.device
) -> Checkpoint:
    """The model's checkpoint, its structure checked, before any weight is read."""
    if config.random_weights is not None:
        return random_checkpoint(args, config.random_weights, random_device)
    files.require_weights()
    try:
        checkpoint = open_checkpoint(files, args)
        checkpoint.check(args)
    except CheckpointError as error:
        if config.verify:  # another rank may report this damage as DamagedWeights
            raise DamagedWeights(str(error)) from error
        raise
    return checkpoint


def _choose_device(requested: str, size: int) -> tuple[DeviceKind, int]:
    """The kind of this rank's device, and the index of its GPU; warns if auto ignores GPUs.

    Args:
        size: the number of ranks on all hosts.
    """
    n_gpus = visible_gpus()
    gpu, n_ranks = ranks_sharing_gpus(requested, size, n_gpus)
    kind = choose_device(requested, n_ranks, n_gpus)
    if n_gpus and requested == "auto" and kind == "cpu" and world()[0] == 0:
        logger.warning("running on the CPU: %s", too_few(n_ranks, n_gpus))
    return kind, gpu
