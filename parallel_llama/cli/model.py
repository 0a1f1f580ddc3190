"""What every verb checks about its model before a rank starts or torch is loaded."""

from pathlib import Path

from parallel_llama.cli.ranks import rank_count
from parallel_llama.config import ModelArgs, load_model_args
from parallel_llama.errors import UsageError
from parallel_llama.intake import Intake
from parallel_llama.model_files import ModelFiles, find_model
from parallel_llama.plan import make_plan


def find_args(model: str) -> ModelArgs:
    """The arguments of the model that --model names."""
    return load_model_args(find_model(model), _count_vocab)


def check_model(
    model: str,
    nproc: int | None,
    *,
    max_seq_len: int | None,
    random_weights: int | None,
    seed: int | None = None,
    verify: bool = False,
) -> tuple[Intake, int]:
    """The text side of a model that is to run, and the number of ranks that its plan allows.

    With `verify`, what is read here is compared with the model's manifest first; the weights are
    when they are read.

    Raises: UsageError if it is not there, has no weights, or cannot be cut into `nproc` shares;
    CheckpointError if its files are damaged.
    """
    if verify:
        _verify_metadata(model, random_weights)
    files = find_model(model)
    if random_weights is None:
        files.require_weights()
    args = load_model_args(files, _count_vocab)
    n_ranks = rank_count(nproc)
    make_plan(args, n_ranks)
    return Intake(files, args, max_seq_len=max_seq_len, seed=seed), n_ranks


def _verify_metadata(model: str, random_weights: int | None) -> None:
    # Costs the start torch, and is asked for.
    from parallel_llama.checkpoint import require_whole

    if random_weights is not None:
        raise UsageError("--verify with --random-weights: there are no files to verify; drop one")
    require_whole(model, weights=False)


def _count_vocab(files: ModelFiles) -> int:
    # Llama 1 and 2 leave their vocabulary open: only the weights know it, and those need torch.
    from parallel_llama.checkpoint import meta_vocab_size

    return meta_vocab_size(files)


def read_text(path: str) -> str:
    """A file's text.

    Raises: UsageError if it cannot be read or is not UTF-8.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 text (byte {error.start})") from error
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from error
