"""Files that anybody may have written, read with a bound on their size."""

from pathlib import Path

from parallel_llama.errors import CheckpointError


def read_bytes(path: Path, max_bytes: int) -> bytes:
    """The content of a file.

    Raises: CheckpointError if it cannot be read or is larger than `max_bytes`.
    """
    try:
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    if len(data) > max_bytes:
        raise CheckpointError(f"{path}: larger than {max_bytes} bytes, the most that is read")
    return data
