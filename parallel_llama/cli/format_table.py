"""The table of weight and KV cache formats with the hardware they need. Without torch.

Formats that take the same bytes share a row: fp8 and int8.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from parallel_llama.cli.estimate import Estimate, estimate, fewest_that_fit
from parallel_llama.cli.largest import Largest, find_largest
from parallel_llama.cli.model import in_dtype
from parallel_llama.cli.plan_request import PlanRequest
from parallel_llama.cli.remedies import (
    Change,
    lossless_changes,
    narrower_caches,
    narrower_weights,
)
from parallel_llama.cli.terminal import GREEN, RED, painted, size, table
from parallel_llama.errors import UsageError

# Formats that take as many bytes as the key and are less precise.
_SAME_BYTES: Mapping[str, tuple[str, ...]] = {"int8": ("fp8",)}


@dataclass(frozen=True)
class FormatRow:
    """A format of the weights and a format of the KV cache.

    Args:
        planned: the plan with these formats: the fewest ranks that fit, or the given number.
        largest: the limits of that plan.
    """

    planned: Estimate
    largest: Largest

    @property
    def weights(self) -> tuple[str, ...]:
        """The format of the weights, and formats of the same size."""
        precision = self.planned.request.precision
        name = (
            "stored" if precision.quant == "stored" else in_dtype(precision.dtype, precision.quant)
        )
        return (name, *_SAME_BYTES.get(precision.quant, ()))

    @property
    def caches(self) -> tuple[str, ...]:
        """The format of the KV cache, and formats of the same size."""
        name = self.planned.request.kv.dtype
        return (name, *_SAME_BYTES.get(name, ()))

    @property
    def flags(self) -> str:
        """The flags that select the most precise formats of this row."""
        request = self.planned.request
        given = {"dtype": request.dtype} if request.quant == "none" else {"quant": request.quant}
        given |= (
            {} if request.kv_cache_dtype == "auto" else {"kv-cache-dtype": request.kv_cache_dtype}
        )
        return " ".join(f"--{name} {value}" for name, value in given.items())


@dataclass(frozen=True)
class FormatTable:
    """The formats of a model on the given hardware, the most precise weights first.

    Args:
        finds_fewest: whether each row has the fewest ranks that fit.
        refused: formats of weights that the model does not support, and why.
    """

    request: PlanRequest
    finds_fewest: bool
    rows: tuple[FormatRow, ...]
    refused: dict[str, str]

    @property
    def fits(self) -> bool:
        """Whether any format fits."""
        return any(row.planned.fits for row in self.rows)


def format_table(request: PlanRequest, *, finds_fewest: bool) -> FormatTable:
    """Plans a request in each format.

    Args:
        finds_fewest: plan the fewest ranks that fit, instead of the request's number.

    Raises: UsageError if there is no plan for the request's number of ranks.
    """
    request = replace(request, quant="none")
    stored = [change for change in lossless_changes(request) if "kv_split" not in change]
    caches: list[Change] = [{}, *narrower_caches(request)]
    rows: list[FormatRow] = []
    refused: dict[str, str] = {}
    for weights, cache in product(({}, *stored, *narrower_weights(request)), caches):
        changed = replace(request, **weights, **cache)
        try:
            rows.append(_row(changed, finds_fewest=finds_fewest))
        except UsageError as error:
            if not weights:
                raise
            refused[", ".join(map(str, weights.values()))] = str(error)
    return FormatTable(request, finds_fewest, tuple(rows), refused)


def _row(request: PlanRequest, *, finds_fewest: bool) -> FormatRow:
    planned = fewest_that_fit(request)[0] if finds_fewest else estimate(request)
    largest = find_largest(planned.request)
    assert largest is not None, "the caller knows the memory"
    return FormatRow(planned, largest)


def format_objects(formats: FormatTable) -> list[dict[str, Any]]:
    """A JSON object for each pair of formats."""
    return [
        {
            "weights": weights,
            "kv_cache_dtype": cache,
            "tp_size": row.planned.plan.tp_size,
            "fits": row.planned.fits,
            "weight_bytes": row.planned.weights,
            "needed_bytes": row.planned.tightest.needed,
            "memory_bytes": row.planned.tightest.memory,
            "largest_context": row.largest.context,
            "largest_batch": row.largest.batch,
        }
        for row in formats.rows
        for weights, cache in product(row.weights, row.caches)
    ]


def format_lines(formats: FormatTable) -> list[str]:
    """The table as text, without the lines that explain its columns."""
    header = ["weights", "KV cache", "ranks", "needs", "context", "batch", "fits"]
    return table(header, [_cells(row) for row in formats.rows], sys.stdout)


def _cells(row: FormatRow) -> Sequence[str]:
    fits = bool(row.planned.fits)
    return [
        ", ".join(row.weights),
        ", ".join(row.caches),
        str(row.planned.plan.tp_size),
        size(row.planned.tightest.needed),
        f"{row.largest.context:,}",
        f"{row.largest.batch:,}",
        painted("yes", GREEN, sys.stdout) if fits else painted("no", RED, sys.stdout),
    ]
