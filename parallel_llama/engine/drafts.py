"""Limits the number of draft tokens per step, and checks that a draft model fits its model.

The model verifies drafts in one forward pass, and each draft adds a row to it. So each sequence has
a budget, which follows from the acceptance rate of its drafts and the cost of rows.

Source: speculative decoding, arXiv 2211.17192, sections 3.1 and 3.3, for the expected number of
tokens and the speed-up.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from parallel_llama.errors import UsageError
from parallel_llama.families.model_args import ModelArgs, kv_groups
from parallel_llama.request import SamplingParams

# (rows, cost of a step with this many rows relative to a step of one row), measured on two CPU
# cores. Costs in between are interpolated. With drafts, a step decodes at most as many rows as the
# last entry has.
ROW_COSTS = ((1, 1.0), (2, 1.1), (4, 1.4), (8, 1.55), (16, 1.8))

MIN_GAIN = 1.05  # expected tokens per cost; 1 without drafts
DECAY = 0.9  # decay of earlier observations with each new one
PRIOR_ACCEPTED, PRIOR_TRIED = 1.0, 2.0
FIRST_PROBE_STEPS, MAX_PROBE_STEPS = 16, 256  # between probes, while drafts do not pay off

# Models of one tokenizer may pad their vocabularies to different sizes.
MAX_PADDING = 128


def shared_tables(args: ModelArgs, draft: ModelArgs) -> tuple[int, ...]:
    """For each KV group of a draft model, the index of the model's group with the same block table.

    Raises: UsageError if the draft model has another vocabulary, or another sliding window.
    """
    if abs(args.vocab_size - draft.vocab_size) > MAX_PADDING:
        raise UsageError(
            f"its vocabulary has {draft.vocab_size} tokens and that of the model "
            f"{args.vocab_size}; use a draft model with the tokenizer of the model"
        )
    windows = [(group.window, group.has_chunks) for group in kv_groups(args)]
    tables = []
    for group in kv_groups(draft):
        if (group.window, group.has_chunks) not in windows:
            visible = f"the last {group.window} tokens" if group.window else "all tokens"
            raise UsageError(
                f"some of its layers attend to {visible}, and no layer of the model does; use a "
                "draft model with the sliding windows of the model"
            )
        tables.append(windows.index((group.window, group.has_chunks)))
    return tuple(tables)


def draft_kv_bytes(
    args: ModelArgs, tables: Sequence[int], per_token: Sequence[int]
) -> tuple[int, ...]:
    """Bytes of a draft model's KV cache for one token, by KV group of the model.

    Args:
        tables: as `shared_tables`.
        per_token: bytes for one token in each KV group of the draft model.
    """
    n_bytes = [0] * len(kv_groups(args))
    for table, n_group_bytes in zip(tables, per_token, strict=True):
        n_bytes[table] += n_group_bytes
    return tuple(n_bytes)


class DraftBudget:
    """Chooses the number of drafts with the most expected tokens per cost.

    The expectation follows from the recent acceptance rate. While no number of drafts pays off, a
    single draft runs now and then as a probe, less often after each probe that fails.
    """

    def __init__(self, row_costs: Sequence[tuple[int, float]]) -> None:
        self._costs = _interpolated(row_costs)  # [rows - 1]
        self._accepted = self._tried = 0.0
        self._n_steps_to_wait = self._n_steps_waited = 0

    @property
    def max_drafts(self) -> int:
        """The maximum number of drafts in a step."""
        return len(self._costs) - 1

    def n_allowed(self) -> int:
        """The number of drafts to run in this step.

        Call it at most once per step, because each call counts as a step.
        """
        best = self._best()
        if best:
            self._n_steps_to_wait = self._n_steps_waited = 0
            return best
        self._n_steps_to_wait = self._n_steps_to_wait or FIRST_PROBE_STEPS
        self._n_steps_waited += 1
        if self._n_steps_waited < self._n_steps_to_wait:
            return 0
        self._n_steps_to_wait, self._n_steps_waited = (
            min(2 * self._n_steps_to_wait, MAX_PROBE_STEPS),
            0,
        )
        return 1

    def update(self, n_drafts: int, n_accepted: int) -> None:
        """Update the acceptance rate; drafts after the first wrong one do not count."""
        if n_drafts:
            self._accepted = DECAY * self._accepted + n_accepted
            self._tried = DECAY * self._tried + min(n_accepted + 1, n_drafts)

    def _best(self) -> int:
        """The number of drafts with the most expected tokens per cost; 0 if drafts do not pay."""
        acceptance = (self._accepted + PRIOR_ACCEPTED) / (self._tried + PRIOR_TRIED)
        best, best_gain = 0, MIN_GAIN
        n_tokens = all_accepted = 1.0
        for n_drafts in range(1, len(self._costs)):
            all_accepted *= acceptance
            n_tokens += all_accepted
            if n_tokens / self._costs[n_drafts] > best_gain:
                best, best_gain = n_drafts, n_tokens / self._costs[n_drafts]
        return best


def _interpolated(row_costs: Sequence[tuple[int, float]]) -> list[float]:
    """The cost of 1, 2, 3, ... rows.

    >>> _interpolated([(1, 1.0), (3, 2.0)])
    [1.0, 1.5, 2.0]
    """
    costs = [row_costs[0][1]]
    for (rows, cost), (more_rows, more_cost) in pairwise(row_costs):
        step = (more_cost - cost) / (more_rows - rows)
        costs += [cost + step * n for n in range(1, more_rows - rows + 1)]
    return costs


class SequenceDrafts:
    """The drafts of one sequence: how many to make, and which tokens the draft model has run.

    Args:
        params: the sampling parameters of its request.
        costs: as `row_costs`.
    """

    def __init__(self, params: SamplingParams, costs: Sequence[tuple[int, float]]) -> None:
        self.params = replace(params, logprobs=None, prompt_logprobs=None)
        self.n_run = 0  # tokens and drafts that the draft model has run
        self._budget = DraftBudget(costs)

    def draft(self, _tokens: Sequence[int], max_drafts: int) -> Sequence[int]:
        """Placeholders for at most `max_drafts` drafts, which `DraftModel.run` replaces."""
        return (0,) * min(max_drafts, self._budget.n_allowed())

    def update(self, n_drafts: int, n_accepted: int) -> None:
        """Update the acceptance rate: the first `n_accepted` of a step's drafts were right."""
        self._budget.update(n_drafts, n_accepted)


def row_costs(relative_cost: float) -> list[tuple[int, float]]:
    """Relative costs of steps with a draft model, as (rows, cost), for `DraftBudget`.

    A step with n rows makes and verifies n - 1 drafts. Its cost is relative to a step without
    drafts, in which the draft model runs once too, because it runs every token of the model.

    Args:
        relative_cost: the cost of a step of the draft model, relative to a step of the model.
    """
    return [
        (rows, (cost + max(rows - 1, 1) * relative_cost) / (1 + relative_cost))
        for rows, cost in ROW_COSTS
    ]
