"""Speculative decoding by prompt lookup: draft tokens copied from earlier in the sequence.

The model verifies the drafts. Each draft costs a row of a forward pass, so a budget for each
sequence limits the drafts by their acceptance rate and the cost of rows.

Source: prompt lookup decoding (Saxena, 2023); speculative decoding, arXiv 2211.17192, sections 3.1
and 3.3, for the expected number of tokens and the speed-up.
"""

from collections.abc import Sequence
from itertools import pairwise

LONGEST, SHORTEST = 4, 2  # lengths of the suffixes that are looked up, longest first

# (rows, cost of a step with this many rows relative to a step of one row), measured on two CPU
# cores. Costs in between are interpolated; a step has at most as many rows as the last entry.
ROW_COSTS = ((1, 1.0), (2, 1.1), (4, 1.4), (8, 1.55), (16, 1.8))

MIN_GAIN = 1.05  # tokens per cost, against 1 without drafts
MEMORY = 0.9  # decay of earlier observations with each new one
PRIOR_KEPT, PRIOR_TRIED = 1.0, 2.0
FIRST_WAIT, LONGEST_WAIT = 16, 256  # steps between the probes of an empty budget


class PromptLookup:
    """Drafts for one growing sequence: what followed the latest occurrence of its last tokens.

    Cost: amortised constant time and three index entries per token of the sequence.
    """

    def __init__(self, row_costs: Sequence[tuple[int, float]] = ROW_COSTS) -> None:
        self._following: dict[tuple[int, ...], int] = {}  # tokens -> the position after them
        self._n_indexed = 0  # tokens that are indexed
        self._budget = DraftBudget(row_costs)

    def draft(self, tokens: Sequence[int], most: int) -> Sequence[int]:
        """At most `most` drafts of what follows `tokens`; none if they would not pay off.

        `tokens` must start with the tokens of the previous call.
        """
        found = self.continuation(tokens, min(most, self._budget.most))
        return found[: self._budget.n_allowed()] if found else ()

    def update(self, n_drafts: int, n_kept: int) -> None:
        """Update the acceptance rate: the first `n_kept` of a step's drafts were right."""
        self._budget.update(n_drafts, n_kept)

    def continuation(self, tokens: Sequence[int], most: int) -> Sequence[int]:
        """The tokens after the latest earlier occurrence of the longest suffix that has one."""
        for position in range(self._n_indexed, len(tokens)):
            for size in range(SHORTEST, min(LONGEST, position) + 1):
                self._following[tuple(tokens[position - size : position])] = position
        self._n_indexed = len(tokens)
        for size in range(min(LONGEST, len(tokens)), SHORTEST - 1, -1):
            start = self._following.get(tuple(tokens[len(tokens) - size :]))
            if start is not None:
                return tokens[start : start + most]
        return ()


class DraftBudget:
    """The number of drafts that maximises expected tokens per cost, by recent acceptance.

    An empty budget allows a single draft as a probe, ever more rarely while probes fail.
    """

    def __init__(self, row_costs: Sequence[tuple[int, float]]) -> None:
        self._costs = _interpolated(row_costs)  # [rows - 1]
        self._kept = self._tried = 0.0
        self._wait = self._passed = 0

    @property
    def most(self) -> int:
        """The most drafts of a step."""
        return len(self._costs) - 1

    def n_allowed(self) -> int:
        """How many drafts to run now."""
        best = self._best()
        if best:
            self._wait = self._passed = 0
            return best
        self._wait = self._wait or FIRST_WAIT
        self._passed += 1
        if self._passed < self._wait:
            return 0
        self._wait, self._passed = min(2 * self._wait, LONGEST_WAIT), 0
        return 1

    def update(self, n_drafts: int, n_kept: int) -> None:
        """Update the acceptance rate; drafts after the first wrong one do not count."""
        if n_drafts:
            self._kept = MEMORY * self._kept + n_kept
            self._tried = MEMORY * self._tried + min(n_kept + 1, n_drafts)

    def _best(self) -> int:
        """The number of drafts with the most expected tokens per cost; 0 if none pays off."""
        right = (self._kept + PRIOR_KEPT) / (self._tried + PRIOR_TRIED)
        best, best_gain = 0, MIN_GAIN
        n_tokens = all_right = 1.0
        for n_drafts in range(1, len(self._costs)):
            all_right *= right
            n_tokens += all_right
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
