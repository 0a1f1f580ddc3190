"""What a verification finds."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from parallel_llama.errors import CheckpointError, UnreadableFile, UsageError


@dataclass
class Report:
    """What was looked at and what is wrong with it.

    `files` and `bytes` count the files that are there, but for the manifest; `tensors` those of
    the model; `hashed` the files and tensors whose hash was compared. `notes` are no faults.
    """

    files: int = 0
    tensors: int = 0
    hashed: int = 0
    bytes: int = 0
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems

    @contextmanager
    def noting(self, where: object) -> Iterator[None]:
        """Turn whatever a damaged file makes the readers raise into a problem.

        Raises: UnreadableFile, which says nothing of what the file holds.
        """
        try:
            yield
        except UnreadableFile:
            raise
        except (CheckpointError, UsageError) as error:
            self.problems.append(str(error))
        except Exception as error:  # no reader can foresee all that damaged bytes can do
            reason = (str(error).strip().splitlines() or [""])[0][:300]
            self.problems.append(f"{where}: cannot be read: {type(error).__name__} {reason}")
