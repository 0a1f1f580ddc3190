"""Flags of the model that a command runs, and its checks before torch is loaded."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from parallel_llama.cli.arguments import Flag, Flags, warn
from parallel_llama.cli.calibration import Calibration, read_calibrations
from parallel_llama.cli.parsers import (
    adapter_folder,
    byte_size,
    device_name,
    dtype_name,
    filled_text,
    input_files,
    kv_dtype_name,
    number,
    one_of,
    quant_name,
    rank_sizes,
    token_count,
    whole,
)
from parallel_llama.config.adapter import load_served_adapters
from parallel_llama.config.layouts import load_model_args
from parallel_llama.engine.drafts import shared_tables
from parallel_llama.engine.llm_config import (
    LLMConfig,
    require_draft_model,
    require_elastic,
    require_pipeline,
    require_spares,
)
from parallel_llama.engine.model_download import require_downloaded
from parallel_llama.errors import UsageError
from parallel_llama.families.model_args import ModelArgs, context_length
from parallel_llama.files.hub_cache import HubName
from parallel_llama.files.model_files import ModelFiles, find_model, missing_from_hub
from parallel_llama.memory import GIB
from parallel_llama.parallel.device_choice import DeviceKind, choose_device, count_gpus
from parallel_llama.parallel.launch import MAX_RANKS
from parallel_llama.parallel.rank_env import (
    is_started_as_rank,
    is_watched,
    launcher_name,
    world,
)
from parallel_llama.parallel.rank_stacks import require_log_dir
from parallel_llama.parallel.timeouts import MAX_TIMEOUT_S
from parallel_llama.plan import KVSplit, make_plan

if TYPE_CHECKING:
    from parallel_llama.engine.input_processor import InputProcessor

MODEL: Flag[str] = Flag(
    "model", "an HF, Meta or native folder, a .gguf file, or the name of a model",
    filled_text, "PATH_OR_NAME", LLMConfig.model, subject="model",
)  # fmt: skip
ADAPTER: Flag[list[tuple[str, str]]] = Flag(
    "adapter", "LoRA adapter: the name that requests use, and the folder that PEFT saved",
    adapter_folder, "NAME=FOLDER", default_text="none", repeatable=True, subject="model",
)  # fmt: skip
DOWNLOAD: Flag[bool] = Flag(
    "download", "download the missing files of a model on the Hugging Face hub (org/name, "
    "org/name@revision, org/name/file.gguf); without the flag, the command asks on a terminal",
    subject="model",
)  # fmt: skip
# vLLM's names of --nproc.
NPROC_ALIASES = "tp", "tensor-parallel-size"
NPROC: Flag[int | None] = Flag(
    "nproc", "ranks to start on this machine; under torchrun, torchrun sets the number",
    whole(1, MAX_RANKS), "N", default_text="1", aliases=NPROC_ALIASES, subject="ranks",
)  # fmt: skip
PP: Flag[int] = Flag(
    "pp", "pipeline stages, for CPU ranks on hosts with a slow link: each stage holds consecutive "
    "layers, on consecutive ranks of one host, so few exchanges cross the link",
    whole(1, MAX_RANKS), "N", default=LLMConfig.pp, aliases=("pipeline-parallel-size",),
    subject="ranks",
)  # fmt: skip
DTYPE: Flag[str | None] = Flag(
    "dtype", "float32, bfloat16, float16 or float64",
    dtype_name, "DTYPE", default_text="bfloat16 on CUDA, the files' or float32 on the CPU",
    subject="model",
)  # fmt: skip
QUANT: Flag[str | None] = Flag(
    "quant", "quantise matrices to int8, int4 or fp8, with a scale per 32 weights; stored: keep "
    "the files' quantisation; none: decode to --dtype",
    quant_name, "FORMAT",
    default_text="stored if the files can run as stored, else none; none for smollm2",
    aliases=("quantization",), subject="model",
)  # fmt: skip
DRAFT_MODEL: Flag[str | None] = Flag(
    "draft-model", "a small model with the same tokenizer, which drafts tokens that the model then "
    "verifies: the same text, usually sooner; for CPU ranks",
    filled_text, "PATH_OR_NAME", default_text="none; drafts are copied from earlier text",
    subject="model",
)  # fmt: skip
DRAFT_QUANT: Flag[str | None] = Flag(
    "draft-quant", "as --quant, for --draft-model", quant_name, "FORMAT",
    default_text="as without --quant", subject="model",
)  # fmt: skip
DEVICE: Flag[str] = Flag(
    "device", "auto, cpu or cuda", device_name, "DEVICE", default=LLMConfig.device, subject="ranks"
)
MAX_SEQ_LEN: Flag[int | None] = Flag(
    "max-seq-len", "maximum tokens of a sequence, prompt and completion together, such as 4096 or "
    "32k",
    token_count(1), "N", default_text="the model's context", subject="context and KV cache",
)  # fmt: skip
KV_CACHE_BYTES: Flag[int | None] = Flag(
    "kv-cache-bytes", "memory for the KV cache on each rank, such as 2GB, 512MiB or 24G (24GiB)",
    byte_size, "SIZE",
    default_text="a part of the free memory, at most 2 GiB on the CPU",
    subject="context and KV cache",
)  # fmt: skip
KV_SPLIT: Flag[KVSplit] = Flag(
    "kv-split",
    "how the KV cache is sharded: by heads, or by sequence (tokens), so that ranks that share a "
    "KV head do not all store it",
    one_of("heads", "sequence"), "WHAT", default=LLMConfig.kv_split, subject="context and KV cache",
)  # fmt: skip
EXACT: Flag[bool | None] = Flag(
    "exact",
    "results have the same bits on any number of ranks; --no-exact is usually faster",
    default_text="on for CPU ranks of one host or with --pp, unless ranks hold different experts "
    "or the CPU's kernels are not available",
    subject="ranks",
)  # fmt: skip
ATTENTION_SINKS: Flag[int] = Flag(
    "attention-sinks",
    "number of tokens at the start of a text, usually 4, that every token attends to, in addition "
    "to a sliding window (the model's own, else the rest of the context); a text can then grow "
    "without limit",
    token_count(0), "N", default=LLMConfig.attention_sinks, subject="context and KV cache",
)  # fmt: skip
BLOCK_SIZE: Flag[int] = Flag(
    "block-size",
    "tokens per block of the paged KV cache; rounded up to a multiple of 128 with --exact and "
    "--kv-split sequence", token_count(1, 4096), "N",
    default=LLMConfig.block_size, subject="context and KV cache",
)  # fmt: skip
KV_CACHE_DTYPE: Flag[str] = Flag(
    "kv-cache-dtype", "dtype of the KV cache: auto (the dtype of computation), bfloat16, int8 or "
    "fp8; the last three take a half to about a quarter of float32's bytes",
    kv_dtype_name, "DTYPE", default=LLMConfig.kv_cache_dtype, subject="context and KV cache",
)  # fmt: skip
RANDOM_WEIGHTS: Flag[int | None] = Flag(
    "random-weights", "random weights from this seed, for a model that is only a configuration",
    whole(0), "SEED", subject="model",
)  # fmt: skip
SEED: Flag[int | None] = Flag(
    "seed", "random seed; the same seed gives the same text",
    whole(0), "N", default_text="random; generate shows it", subject="sampling",
)  # fmt: skip
VERIFY: Flag[bool] = Flag(
    "verify", "check every file of the model against its manifest before reading it",
    subject="model",
)  # fmt: skip
TIMEOUT: Flag[float] = Flag(
    "timeout", "how long a rank waits for another in a step before it fails",
    number(0, MAX_TIMEOUT_S, above=True), "SECONDS", default=LLMConfig.timeout_s, subject="ranks",
)  # fmt: skip
START_TIMEOUT: Flag[float] = Flag(
    "start-timeout", "how long a rank waits for another while the ranks join and load",
    number(0, MAX_TIMEOUT_S, above=True), "SECONDS", default=LLMConfig.start_timeout_s,
    subject="ranks",
)  # fmt: skip
INTEGRITY_CHECK: Flag[bool | None] = Flag(
    "integrity-check",
    "on the CPU, check for flipped bits in weights and KV cache and for wrong products, and name "
    "the rank at fault; --no-integrity-check turns it off",
    default_text="on with exact sums", subject="ranks",
)  # fmt: skip
LOG_DIR: Flag[str | None] = Flag(
    "log-dir", "folder for the stacks of all ranks, which are written only after a failure",
    filled_text, "FOLDER", default_text="the folder of temporary files", subject="ranks",
)  # fmt: skip
MEMORY: Flag[list[int] | None] = Flag(
    "memory",
    "memory in GiB that each rank may use, such as 32,32,16 or 32x2,16; each rank's share of the "
    "model is in proportion to it",
    rank_sizes, "SIZES", default_text="equal shares", subject="ranks",
)  # fmt: skip
CALIBRATION: Flag[list[str] | None] = Flag(
    "calibration",
    "files of bench --calibrate with the rates of all ranks, in rank order, such as a.json,b.json "
    "for two hosts; each rank's share of the model is in proportion to its speed, within --memory",
    input_files, "FILES", default_text="equal shares", subject="ranks",
)  # fmt: skip
SECRET_FILE: Flag[str | None] = Flag(
    "secret-file",
    "file with a secret of at least 32 bytes, the same for all ranks; for ranks that torchrun, "
    "srun or mpirun starts", filled_text, "FILE", default_text="no secret", subject="ranks",
)  # fmt: skip
ELASTIC: Flag[bool] = Flag(
    "elastic", "if a rank other than rank 0 is lost, continue all requests on the others, and "
    "replace the rank if this command has started it; for CPU ranks", subject="ranks",
)  # fmt: skip
SPARES: Flag[int] = Flag(
    "spares", "with --elastic, idle processes that replace lost ranks immediately",
    whole(0, MAX_RANKS), "N", default=LLMConfig.spares, subject="ranks",
)  # fmt: skip
RANKS: tuple[Flag[Any], ...] = (
    NPROC, PP, DTYPE, QUANT, KV_CACHE_DTYPE, KV_SPLIT, EXACT, DEVICE, MAX_SEQ_LEN,
)  # fmt: skip
DRAFTS: tuple[Flag[Any], ...] = (DRAFT_MODEL, DRAFT_QUANT)
CACHE: tuple[Flag[Any], ...] = (KV_CACHE_BYTES, ATTENTION_SINKS, BLOCK_SIZE)
LOADING: tuple[Flag[Any], ...] = (
    RANDOM_WEIGHTS, VERIFY, DOWNLOAD, MEMORY, CALIBRATION, INTEGRITY_CHECK, TIMEOUT, START_TIMEOUT,
    LOG_DIR, SECRET_FILE,
)  # fmt: skip
# Flags with the names of LLMConfig's fields.
_SETTINGS: tuple[Flag[Any], ...] = (
    MODEL, PP, MEMORY, DTYPE, QUANT, DEVICE, MAX_SEQ_LEN, SEED, RANDOM_WEIGHTS, VERIFY, DOWNLOAD,
    KV_CACHE_BYTES, KV_CACHE_DTYPE, KV_SPLIT, EXACT, ATTENTION_SINKS, BLOCK_SIZE, INTEGRITY_CHECK,
    LOG_DIR, ELASTIC, SPARES, DRAFT_MODEL, DRAFT_QUANT,
)  # fmt: skip


def found_model(flags: Flags, name: str) -> ModelFiles:
    """The files of a model, downloaded first with --download or after a yes on the terminal.

    Raises: UsageError as `find_model`, or if the download fails.
    """
    hub_name = missing_from_hub(name)
    if hub_name is not None and (flags[DOWNLOAD] or _may_download(hub_name)):
        require_downloaded(name, flags[START_TIMEOUT], warn)
    return find_model(name)


def _may_download(name: HubName) -> bool:
    """Asks whether to download a model; False without a terminal, in a rank, and offline."""
    if not (sys.stdin and sys.stdin.isatty() and sys.stderr.isatty()) or is_started_as_rank():
        return False
    from parallel_llama.files.hub_download import endpoint, is_offline  # slow

    if is_offline():
        return False
    question = (
        f"{name} is not a path that exists. Download the model of this name from {endpoint()}?"
    )
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def args_of(files: ModelFiles) -> ModelArgs:
    """The ModelArgs of a model's files."""
    return load_model_args(files, _count_vocab)


def in_dtype(dtype: str, quant: str) -> str:
    """How the weights are stored in memory, in words."""
    return {"none": dtype, "stored": "weights as stored"}.get(quant, quant)


def in_dtypes(dtype: str, quant: str, kv_cache_dtype: str) -> str:
    """How the weights are stored in memory, and the KV cache if it differs, in words."""
    weights = in_dtype(dtype, quant)
    return weights if kv_cache_dtype == weights else f"{weights}, KV cache in {kv_cache_dtype}"


def rank_count(
    nproc: int | None, memory: Sequence[int] | None = None, calibration: Calibration | None = None
) -> int:
    """The number of ranks that a command runs on.

    It is --nproc, else one for each size in --memory, else the ranks in --calibration, else 1.

    Raises: UsageError if --nproc contradicts torchrun, or torchrun's variables are inconsistent.
    """
    _, size = world()
    if not is_started_as_rank():
        return nproc or len(memory or (calibration and calibration.ranks) or (1,))
    if nproc is not None and nproc != size:
        raise UsageError(
            f"--nproc {nproc} inside {launcher_name()}, which started {size} ranks; omit --nproc"
        )
    return size


def device_kind(asked: str, n_ranks: int) -> DeviceKind:
    """The kind of device for `n_ranks` ranks; an explicit --device need not exist here."""
    return choose_device(asked, n_ranks, count_gpus() if asked == "auto" else n_ranks)


def check_model(flags: Flags) -> tuple["InputProcessor", int]:
    """The model's input processor, and the number of ranks.

    With --verify, the files read here are first checked against the model's manifest; the weights
    are checked when they are read.

    Raises: UsageError if the model does not exist, has no weights, or cannot be sharded over that
    many ranks; CheckpointError if its files are damaged.
    """
    # Slow, and `plan` does not need it.
    from parallel_llama.engine.input_processor import InputProcessor

    require_log_dir(flags[LOG_DIR])
    require_pipeline(flags[PP], flags[DEVICE], flags[KV_SPLIT], elastic=flags[ELASTIC])
    if flags[ELASTIC]:
        if is_started_as_rank() and is_watched():
            raise UsageError(
                f"--elastic cannot work inside {launcher_name()}, which ends all ranks when one is "
                "lost; use --nproc, start each rank with RANK, WORLD_SIZE, MASTER_ADDR and "
                "MASTER_PORT, or drop --elastic"
            )
        if is_started_as_rank() and flags[SPARES]:
            raise UsageError(
                f"--spares {flags[SPARES]} with ranks that another program has started: only a "
                "command that starts its ranks itself can replace them; drop --spares"
            )
        require_elastic(flags[DEVICE], flags[KV_SPLIT])
    elif flags[SPARES]:
        raise UsageError(f"--spares {flags[SPARES]} without --elastic: use both, or drop --spares")
    files = found_model(flags, flags[MODEL])
    if flags[VERIFY]:
        _verify_metadata(flags)
    if flags[RANDOM_WEIGHTS] is None:
        files.require_weights()
    args = load_model_args(files, _count_vocab)
    memory = flags[MEMORY]
    calibration = read_calibrations(flags[CALIBRATION])
    n_ranks = rank_count(flags[NPROC], memory, calibration)
    if calibration is not None:
        _check_calibration(flags, calibration, n_ranks)
    require_spares(flags[SPARES], n_ranks)
    load_served_adapters(adapters_of(flags), args)
    make_plan(
        args,
        n_ranks,
        memory,
        kv_split=flags[KV_SPLIT],
        exact=bool(flags[EXACT]),
        pp=flags[PP],
    )
    inputs = InputProcessor(
        files,
        args,
        max_seq_len=flags[MAX_SEQ_LEN],
        seed=flags[SEED],
        attention_sinks=flags[ATTENTION_SINKS],
    )
    _check_draft_model(flags, inputs, n_ranks)
    return inputs, n_ranks


def _check_draft_model(flags: Flags, inputs: "InputProcessor", n_ranks: int) -> None:
    """Raises: UsageError if the draft model does not exist or cannot run with the model."""
    found = draft_model(flags, inputs.args, inputs.max_seq_len, flags[DEVICE])
    if found is None:
        return
    files, args = found
    try:
        if flags[RANDOM_WEIGHTS] is None:
            files.require_weights()
        make_plan(args, n_ranks, exact=bool(flags[EXACT]))
    except UsageError as error:
        raise UsageError(f"--draft-model {flags[DRAFT_MODEL]}: {error}") from error


def draft_model(
    flags: Flags, args: ModelArgs, max_seq_len: int, device: str
) -> tuple[ModelFiles, ModelArgs] | None:
    """The files of --draft-model, and their ModelArgs; None without the flag.

    `args` and `max_seq_len` are those of the model that verifies the drafts.

    Raises: UsageError if the draft model does not exist or cannot run with the model.
    """
    name, quant = flags[DRAFT_MODEL], flags[DRAFT_QUANT]
    if name is None:
        if quant is not None:
            raise UsageError(
                f"--draft-quant {quant} without --draft-model: use both, or drop --draft-quant"
            )
        return None
    require_draft_model(
        device,
        flags[KV_SPLIT],
        pp=flags[PP],
        attention_sinks=flags[ATTENTION_SINKS],
    )
    files = found_model(flags, name)
    try:
        draft_args = args_of(files)
        shared_tables(args, draft_args)
        context_length(draft_args, max_seq_len)
    except UsageError as error:
        raise UsageError(f"--draft-model {name}: {error}") from error
    return files, draft_args


def _check_calibration(flags: Flags, found: Calibration, n_ranks: int) -> None:
    """Raises: UsageError if the files of --calibration have other ranks than the command."""
    paths = flags[CALIBRATION]
    named = f"--calibration {','.join(paths or [])}"
    if len(found.ranks) != n_ranks:
        raise UsageError(
            f"{named} has {len(found.ranks)} ranks, but the command runs on {n_ranks}; use "
            f"{len(found.ranks)} ranks, or calibrate again"
        )
    if device_kind(flags[DEVICE], n_ranks) == "cuda":
        raise UsageError(
            f"{named} has rates of CPU ranks, but this command runs on GPUs; add --device cpu, or "
            "drop --calibration"
        )
    if found.speeds is not None and flags[ELASTIC]:
        raise UsageError(f"--elastic and {named} cannot be combined; drop one")


def adapters_of(flags: Flags) -> dict[str, str]:
    """The folders of --adapter by name. Raises: UsageError for a name that is given twice."""
    folders: dict[str, str] = {}
    for name, folder in flags[ADAPTER]:
        if name in folders:
            raise UsageError(f"--adapter {name}={folder}: the name is given twice; use two names")
        folders[name] = folder
    return folders


def only_adapter(flags: Flags) -> str | None:
    """The name of the adapter that all prompts of a command use; None without one.

    Raises: UsageError for several adapters.
    """
    names = list(adapters_of(flags))
    if len(names) > 1:
        raise UsageError(
            f"--adapter is given {len(names)} times: {flags.verb} uses one for all prompts; give "
            "one, or use serve"
        )
    return names[0] if names else None


def llm_config(flags: Flags, **settings: Any) -> LLMConfig:
    """The LLM that the flags describe; `settings` are fields without a flag."""
    own = {flag.name.replace("-", "_"): flags[flag] for flag in _SETTINGS}
    settings |= {"timeout_s": flags[TIMEOUT], "start_timeout_s": flags[START_TIMEOUT]}
    settings |= {"adapters": adapters_of(flags)}
    if (calibration := read_calibrations(flags[CALIBRATION])) is not None:
        own["speeds"] = calibration.speeds
    if own["memory"] is not None:
        own["memory"] = tuple(n_bytes / GIB for n_bytes in own["memory"])
    return LLMConfig(**own, **settings)


def _verify_metadata(flags: Flags) -> None:
    # Imports torch, which delays the start only with --verify.
    from parallel_llama.checkpoint.file_manifest import require_whole

    if flags[RANDOM_WEIGHTS] is not None:
        raise UsageError("random weights have no files to --verify; drop one of the two flags")
    require_whole(flags[MODEL], weights=False)


def _count_vocab(files: ModelFiles) -> int:
    # Meta's Llama 1 and 2 have the vocabulary size only in the weights, which torch reads.
    from parallel_llama.checkpoint.meta_folder import meta_vocab_size

    return meta_vocab_size(files)
