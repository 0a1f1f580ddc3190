"""The steps of the GPU benchmark. Each step runs in its own process.

A step is a module with a generator `rows(setting)`, or with several such generators by name in
`PARTS`. Rows that a step has yielded are kept when it fails or reaches its time limit. After a
crash, the remaining parts run in a new process.
"""

import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Row:
    """One line of the report.

    Args:
        value: the figure; None for a configuration with wrong results.
        share: the fraction of a rate of the GPU; the docstring of the step names the rate.
        target: what the figure should reach.
        wrong: why there is no figure.
    """

    name: str
    value: float | None = None
    unit: str = ""
    share: float | None = None
    target: str = ""
    note: str = ""
    wrong: str = ""


@dataclass(frozen=True)
class Setting:
    """A GPU and its measured rates, or a rehearsal with tiny shapes on the CPU.

    Args:
        copy_bytes_per_s: bytes read plus bytes written per second by a copy.
        matrix_flops: operations per second of bfloat16 products.
    """

    device: torch.device
    is_rehearsal: bool
    copy_bytes_per_s: float = 1e9
    matrix_flops: float = 1e9

    def pick(self, real: int, tiny: int) -> int:
        """The size `real`, or `tiny` in a rehearsal."""
        return tiny if self.is_rehearsal else real


Rows = Iterator[Row]


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
    except Exception as error:  # after any other error the next parts can still run
        traceback.print_exc(file=sys.stderr)  # goes to the log
        yield Row(name, wrong=f"{type(error).__name__}: {str(error)[:400]}")
        if "CUDA error" in str(error) and "out of memory" not in str(error):
            raise DeviceLost from error
