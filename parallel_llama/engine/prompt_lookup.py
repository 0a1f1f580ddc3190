"""Speculative decoding by prompt lookup: guesses of what comes next, from what came before.

Pure Python. It does not know the model: drafts cost rows of a forward, and whether they are right
the model says. A gate per sequence weighs what was right so far against what rows cost.

Source: prompt lookup decoding (Saxena, 2023); speculative decoding, arXiv 2211.17192, section 3.3,
for the expected number of tokens.
"""

from collections.abc import Sequence
from itertools import pairwise

LONGEST, SHORTEST = 4, 2  # tokens of the end that are looked up, longest first

# (rows, cost of a forward of so many, in forwards of one row): measured on two CPU cores with all
# that goes with a step. Costs between these are interpolated; more rows than the last are not run.
ROW_COSTS = ((1, 1.0), (2, 1.1), (4, 1.4), (8, 1.55), (16, 1.8))

MIN_GAIN = 1.05  # tokens per cost, against 1 without drafts
MEMORY = 0.9  # what one judgement leaves of the weight of those before it
PRIOR_KEPT, PRIOR_TRIED = 1.0, 2.0
FIRST_WAIT, LONGEST_WAIT = 16, 256  # chances to draft that a closed gate lets pass between probes


class PromptLookup:
    """Drafts for one growing sequence: what followed the latest occurrence of its last tokens.

    Cost: amortised constant time and three index entries per token of the sequence.
    """

    def __init__(self, row_costs: Sequence[tuple[int, float]] = ROW_COSTS) -> None:
        self._following: dict[tuple[int, ...], int] = {}  # run -> position of the token behind it
        self._n_indexed = 0  # tokens that are entered as followers
        self._gate = Gate(row_costs)

    def draft(self, tokens: Sequence[int], most: int) -> Sequence[int]:
        """At most `most` guesses of what follows `tokens`; none where they would not pay.

        `tokens` must begin with those of the call before it.
        """
        found = self.continuation(tokens, min(most, self._gate.most))
        return found[: self._gate.admit()] if found else ()

    def judge(self, n_drafts: int, n_kept: int) -> None:
        """Learn how many of the drafts that ran were right, counted from the first."""
        self._gate.judge(n_drafts, n_kept)

    def continuation(self, tokens: Sequence[int], most: int) -> Sequence[int]:
        """The tokens behind the latest earlier occurrence of the longest end that has one."""
        for position in range(self._n_indexed, len(tokens)):
            for size in range(SHORTEST, min(LONGEST, position) + 1):
                self._following[tuple(tokens[position - size : position])] = position
        self._n_indexed = len(tokens)
        for size in range(min(LONGEST, len(tokens)), SHORTEST - 1, -1):
            start = self._following.get(tuple(tokens[len(tokens) - size :]))
            if start is not None:
                return tokens[start : start + most]
        return ()


class Gate:
    """How many drafts are worth their rows, by how often drafts were right of late.

    A gate that closed lets one draft through now and then, ever more rarely while those fail.
    """

    def __init__(self, row_costs: Sequence[tuple[int, float]]) -> None:
        self._costs = _interpolated(row_costs)  # [rows - 1]
        self._kept = self._tried = 0.0
        self._wait = self._passed = 0

    @property
    def most(self) -> int:
        """The largest number of drafts that a forward takes."""
        return len(self._costs) - 1

    def admit(self) -> int:
        """How many drafts to run at this chance."""
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

    def judge(self, n_drafts: int, n_kept: int) -> None:
        """Those behind the first wrong draft were not tried."""
        if n_drafts:
            self._kept = MEMORY * self._kept + n_kept
            self._tried = MEMORY * self._tried + min(n_kept + 1, n_drafts)

    def _best(self) -> int:
        """The number of drafts with the most expected tokens for its cost; 0 where none pays."""
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
