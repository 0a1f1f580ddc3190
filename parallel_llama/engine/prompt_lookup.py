"""Speculative decoding by prompt lookup: draft tokens copied from earlier in the sequence.

Source: prompt lookup decoding (Saxena, 2023).
"""

from collections.abc import Sequence

from parallel_llama.engine.drafts import ROW_COSTS, DraftBudget

LONGEST, SHORTEST = 4, 2  # lengths of the suffixes that are looked up, longest first


class PromptLookup:
    """Drafts for one sequence: the tokens after the latest earlier occurrence of its last tokens.

    Cost: amortised constant time and three index entries per token of the sequence.
    """

    def __init__(self, row_costs: Sequence[tuple[int, float]] = ROW_COSTS) -> None:
        self._following: dict[tuple[int, ...], int] = {}  # tokens -> the position after them
        self._n_indexed = 0  # tokens that are indexed
        self._budget = DraftBudget(row_costs)

    def draft(self, tokens: Sequence[int], max_drafts: int) -> Sequence[int]:
        """At most `max_drafts` drafts that continue `tokens`; none if they would not pay off.

        `tokens` must start with the tokens of the previous call.
        """
        found = self.continuation(tokens, min(max_drafts, self._budget.max_drafts))
        return found[: self._budget.n_allowed()] if found else ()

    def update(self, n_drafts: int, n_accepted: int) -> None:
        """Update the acceptance rate: the first `n_accepted` of a step's drafts were right."""
        self._budget.update(n_drafts, n_accepted)

    def continuation(self, tokens: Sequence[int], max_drafts: int) -> Sequence[int]:
        """The tokens after the latest earlier occurrence of the longest suffix that has one."""
        for position in range(self._n_indexed, len(tokens)):
            for size in range(SHORTEST, min(LONGEST, position) + 1):
                self._following[tuple(tokens[position - size : position])] = position
        self._n_indexed = len(tokens)
        for size in range(min(LONGEST, len(tokens)), SHORTEST - 1, -1):
            start = self._following.get(tuple(tokens[len(tokens) - size :]))
            if start is not None:
                return tokens[start : start + max_drafts]
        return ()
