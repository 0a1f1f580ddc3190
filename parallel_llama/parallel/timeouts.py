"""How long ranks wait for each other. This module does not import torch."""

from dataclasses import dataclass

MAX_TIMEOUT_S = 1e6


@dataclass(frozen=True)
class Timeouts:
    """How long a rank waits for another rank before it raises a RankError, in seconds.

    Args:
        step_s: in a collective.
        start_s: while the ranks connect and load, and at a barrier.
    """

    step_s: float = 30.0
    start_s: float = 60.0
