"""How busy an engine is, as plain numbers."""

from dataclasses import dataclass


@dataclass
class StepTimes:
    """Where the time of all steps so far went. Units: seconds.

    On a card by its clock, on which what the host does beside its work takes no time.
    """

    n_steps: int = 0
    messages_s: float = 0.0
    schedule_s: float = 0.0
    forward_s: float = 0.0
    sample_s: float = 0.0
    decide_s: float = 0.0


@dataclass(frozen=True)
class EngineStatistics:
    """The state of an engine between two steps. Units: choices, blocks, tokens."""

    n_running: int
    n_waiting: int
    n_blocks_used: int
    n_blocks_cached: int
    n_blocks_free: int
    n_prompt_tokens: int
    n_prefix_tokens: int
    n_preempted: int
    times: StepTimes
