"""What is measured on a card, step by step, each in a process of its own.

A step is a module with `rows(setting)`, which gives one row after another: what has been given is
kept when a step fails or runs out of time.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Row:
    """One line of the report: a figure, or why there is none.

    `share` is the part of what the card gives, as a step's docstring says of which rate; `target`
    is what the figure is held to. A configuration that computes something wrong has no figure, and
    `wrong` says what it was.
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
    """Where a step runs: a card and its measured rates, or a rehearsal of tiny shapes on the CPU.

    Units: bytes copied in a second, read and written together; operations of bfloat16 products in
    a second.
    """

    device: torch.device
    is_rehearsal: bool
    copy_bytes_per_s: float = 1e9
    matrix_flops: float = 1e9

    def pick(self, real: int, tiny: int) -> int:
        """A size: of the real thing, or of its rehearsal."""
        return tiny if self.is_rehearsal else real


Rows = Iterator[Row]


def attempt(name: str, measure: Callable[[], Rows]) -> Rows:
    """What a part of a step gives; where it fails, a row that says how, and the step goes on."""
    try:
        yield from measure()
    except Exception as error:  # whatever it is, the parts after this one are worth having
        yield Row(name, wrong=f"{type(error).__name__}: {str(error)[:400]}")
