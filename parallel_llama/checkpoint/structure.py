"""Does a checkpoint hold exactly the weights of the model? Names and shapes only, no data."""

from collections.abc import Callable, Mapping, Sequence

from parallel_llama.errors import CheckpointError

MAX_LISTED = 10


def require_structure(
    where: object,
    found: Mapping[str, tuple[int, ...]],
    wanted: Mapping[str, tuple[int, ...]],
    is_skipped: Callable[[str], bool],
) -> None:
    """Check that every wanted tensor is there in its shape and that none is left over.

    Shapes: `found` and `wanted` map the names that the files use to whole shapes.

    Raises: CheckpointError that lists what is missing, left over and misshapen.
    """
    missing = [name for name in wanted if name not in found]
    extra = [repr(name) for name in found if name not in wanted and not is_skipped(name)]
    misshapen = [
        f"{name} is {list(found[name])}, expected {list(shape)}"
        for name, shape in wanted.items()
        if name in found and found[name] != shape
    ]
    refuse_difference(where, {"missing": missing, "extra": extra, "misshapen": misshapen})


def refuse_difference(where: object, difference: Mapping[str, Sequence[str]]) -> None:
    """Raise one CheckpointError for all kinds of difference that are not empty."""
    parts = [f"{kind}: {listed(names)}" for kind, names in difference.items() if names]
    if parts:
        raise CheckpointError(
            f"{where}: the tensors do not fit the model's configuration; {'; '.join(parts)}; "
            "use the configuration that belongs to these weights, or fetch the files again"
        )


def listed(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    more = len(names) - MAX_LISTED
    shown = ", ".join(name[:200] for name in names[:MAX_LISTED])
    return shown + (f" ... and {more} more" if more > 0 else "")
