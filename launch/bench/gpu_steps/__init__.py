"""The steps of the GPU benchmark. Each step runs in its own process.

A step is a module. The module has a generator `rows(setting, ...)`, or `PARTS`: generators by name
that take only a setting. Further arguments of `rows` follow the module's name in the name of the
step, each after a colon. Rows that a step has yielded are kept when it fails or reaches its time
limit. After a crash, the remaining parts run in a new process.
"""

import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

# The names of the rows with the GPU's rates; shares are fractions of these rates.
READ, COPY, MATRIX = "read bandwidth", "copy bandwidth", "bf16 matrix rate"


@dataclass(frozen=True)
class Row:
    """One line of the report.

    Args:
        value: the figure, a median for times and rates; None for a row with a note or an error.
        low, high: the smallest and the largest measured figure; `value` is the median.
        share: the fraction of the read bandwidth; if the row is limited by arithmetic, the fraction
            of the rate of matrix products.
        copy_share: the fraction of the copy bandwidth.
        target: what the figure should reach.
        than: the name of another row with a time; the report compares both.
        wrong: why there is no figure.
    """

    name: str
    value: float | None = None
    unit: str = ""
    low: float | None = None
    high: float | None = None
    share: float | None = None
    copy_share: float | None = None
    target: str = ""
    than: str = ""
    note: str = ""
    wrong: str = ""


@dataclass(frozen=True)
class Setting:
    """A GPU and its measured rates, or a rehearsal with tiny shapes on the CPU.

    Args:
        read_bytes_per_s: bytes read per second by a kernel that only reads.
        copy_bytes_per_s: bytes read plus bytes written per second by a copy.
        matrix_flops: operations per second of bfloat16 products.
    """

    device: torch.device
    is_rehearsal: bool
    read_bytes_per_s: float = 1e9
    copy_bytes_per_s: float = 1e9
    matrix_flops: float = 1e9

    def pick(self, real: int, tiny: int) -> int:
        """The size `real`, or `tiny` in a rehearsal."""
        return tiny if self.is_rehearsal else real

    def moved(self, row: Row, n_bytes: float, seconds: float) -> Row:
        """The row with its rate as a fraction of the read and the copy bandwidth."""
        rate = n_bytes / seconds
        share, copy_share = rate / self.read_bytes_per_s, rate / self.copy_bytes_per_s
        return replace(row, share=share, copy_share=copy_share)


Rows = Iterator[Row]


class Wrong(Exception):
    """A result is wrong."""


class DeviceLost(Exception):
    """An error, such as an illegal address, after which this process cannot use the GPU."""


# The exit code of a process after DeviceLost.
DEVICE_LOST = 3


def attempt(name: str, measure: Callable[[], Rows]) -> Rows:
    """Yields the rows of a part of a step, and a row with the error if it fails.

    Raises: DeviceLost after that row, if later parts of this process would fail as well.
    """
    try:
        yield from measure()
    except DeviceLost:
        raise
    except Exception as error:  # the next parts can still run, except after CUDA errors
        print(f"--- {name}", file=sys.stderr)  # goes to the log
        traceback.print_exc(file=sys.stderr)
        kind = "" if isinstance(error, Wrong) else f"{type(error).__name__}: "
        yield Row(name, wrong=f"{kind}{str(error)[:400]}")
        is_of_device = any(text in str(error) for text in ("CUDA error", "Triton Error [CUDA]"))
        if is_of_device and "out of memory" not in str(error):
            raise DeviceLost from error
