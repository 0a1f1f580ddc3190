"""Suggests changes that make a plan fit, after planning each change. Without torch."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations, product
from typing import Any

from parallel_llama.cli.estimate import Estimate, estimate
from parallel_llama.cli.plan_request import PlanRequest
from parallel_llama.cli.terminal import size
from parallel_llama.dtypes import ITEM_BYTES, KVFormat
from parallel_llama.errors import UsageError

# The fields of a request that a remedy changes, with their new values. FLAGS has each flag that is
# not named like its field.
Change = dict[str, Any]
FLAGS = {"tp_size": "nproc"}


@dataclass(frozen=True)
class Remedy:
    """A change of a request, and the resulting plan, which fits."""

    change: Change
    planned: Estimate

    @property
    def words(self) -> str:
        """The change as flags; if it lists each rank's memory, the ranks come first, in words."""
        flags = [
            f"--{FLAGS.get(name, name).replace('_', '-')} {value}"
            for name, value in self.change.items()
            if name != "draft" and not ("memory" in self.change and name in ("memory", "tp_size"))
        ]
        listed = [_ranks_of(self.change["memory"])] if "memory" in self.change else []
        dropped = ["no --draft-model"] if "draft" in self.change else []
        return ", ".join([*listed, *([" ".join(flags)] if flags else []), *dropped])


def find_remedies(request: PlanRequest) -> list[Remedy]:
    """The changes that make a request fit, the least lossy first.

    The order is: lossless changes, more ranks, fewer bits, fewer tokens. Only the most precise
    fitting format of each kind is suggested; formats are combined if none fits alone.
    """
    no_draft_model: list[Change] = [{"draft": None}] if request.draft else []
    lossless = _fitting(request, [*lossless_changes(request), *no_draft_model])
    narrower_formats = [narrower_weights(request), narrower_caches(request)]
    narrower = [remedy for changes in narrower_formats for remedy in _fitting(request, changes)[:1]]
    if not lossless and not narrower:
        narrower = _fitting_combination(request)
    more_ranks = _more_ranks(request, [] if lossless else lossless_changes(request))
    remedies = [*lossless, *more_ranks, *narrower, *_fewer_tokens(request)]
    if remedies:
        return remedies
    kinds = (*narrower_formats, _kv_split_changes(request), no_draft_model)
    narrowest_change = _merge(changes[-1] for changes in kinds if changes)
    narrow_request = replace(request, **narrowest_change)
    return [
        Remedy(_merge((remedy.change, narrowest_change)), remedy.planned)
        for remedy in (*_fewest_more(narrow_request), *_fewer_tokens(narrow_request))
    ]


def _ranks_of(memory: Sequence[int]) -> str:
    counts = Counter(memory)
    if len(counts) == 1:
        return f"{len(memory)} ranks of {size(memory[0])}"
    groups = ", ".join(f"{n} of {size(n_bytes)}" for n_bytes, n in counts.items())
    return f"{len(memory)} ranks ({groups})"


def _plan_if_fits(request: PlanRequest, change: Change) -> Estimate | None:
    """The plan of a changed request if it fits."""
    try:
        planned = estimate(replace(request, **change))
    except UsageError:  # this model does not support the change
        return None
    return planned if planned.fits else None


def _merge(changes: Iterable[Change]) -> Change:
    return {name: value for change in changes for name, value in change.items()}


def _fitting(request: PlanRequest, changes: Sequence[Change]) -> list[Remedy]:
    plans = ((change, _plan_if_fits(request, change)) for change in changes)
    return [Remedy(change, planned) for change, planned in plans if planned is not None]


def lossless_changes(request: PlanRequest) -> list[Change]:
    """Shards the KV cache by tokens, or keeps the format or the dtype of the files."""
    changes = _kv_split_changes(request)
    if request.stored and request.quant == "none":
        changes.append({"quant": "stored"})
    if _is_wider(request, request.args.dtype):
        changes.append({"dtype": request.args.dtype})
    return changes


def _kv_split_changes(request: PlanRequest) -> list[Change]:
    has_choice = request.kv_split == "heads" and request.pp == 1 and request.draft is None
    return [{"kv_split": "sequence"}] if has_choice else []


def _is_wider(request: PlanRequest, dtype: str) -> bool:
    """Whether weights are not quantised and have more bytes than `dtype`."""
    return request.quant == "none" and ITEM_BYTES[request.dtype] > ITEM_BYTES[dtype]


def narrower_weights(request: PlanRequest) -> list[Change]:
    """Formats of weights with fewer bits than the requested ones, the most precise first."""
    changes: list[Change] = []
    if _is_wider(request, "bfloat16") and ITEM_BYTES[request.args.dtype] > 2:  # else lossless
        changes.append({"dtype": "bfloat16"})
    if request.quant == "none":
        changes.append({"quant": "int8"})
    if request.quant in ("none", "int8", "fp8"):
        changes.append({"quant": "int4"})
    return changes


def narrower_caches(request: PlanRequest) -> list[Change]:
    """Formats of the KV cache with fewer bits than the requested one, the most precise first."""
    head_dim = request.args.head_dim
    return [
        {"kv_cache_dtype": name}
        for name in ("bfloat16", "int8")
        if KVFormat(name).n_bytes(head_dim) < request.kv.n_bytes(head_dim)
    ]


def _more_ranks(request: PlanRequest, lossless: Sequence[Change]) -> list[Remedy]:
    """The fewest additional ranks that fit, combined with lossless changes.

    Added ranks have as much memory as the largest of the given ranks.
    """
    combinations_of_changes = chain.from_iterable(combinations(lossless, n) for n in range(3))
    remedies = [
        Remedy(_merge((more.change, *changes)), more.planned)
        for changes in combinations_of_changes
        for more in _fewest_more(replace(request, **_merge(changes)))
    ]
    return sorted(remedies, key=lambda remedy: remedy.planned.plan.tp_size)[:1]


def _fewest_more(request: PlanRequest) -> list[Remedy]:
    """The fewest additional ranks that fit with the request's formats."""
    assert request.memory is not None
    min_bytes = _bytes_on_one_rank(request)
    for tp_size in range(request.tp_size + 1, request.most_ranks + 1):
        change: Change = {"tp_size": tp_size}
        if isinstance(request.memory, tuple):
            added = (max(request.memory),) * (tp_size - len(request.memory))
            change["memory"] = (*request.memory, *added)
        memory = change.get("memory", (request.memory,) * tp_size)
        if sum(memory) >= min_bytes and (planned := _plan_if_fits(request, change)) is not None:
            return [Remedy(change, planned)]
    return []


def _bytes_on_one_rank(request: PlanRequest) -> int:
    """The weights and the KV cache of a single rank; several ranks together need at least this."""
    try:
        on_one_rank = replace(request, tp_size=1, memory=None, bandwidth=None, hosts=None, pp=1)
        (rank,) = estimate(replace(on_one_rank, hardware=None, speeds=None, kv_split="heads")).ranks
    except UsageError:
        return 0
    return rank.all_weights + rank.kv.needed


def _fitting_combination(request: PlanRequest) -> list[Remedy]:
    """The first fitting combination of the formats of weights and KV cache, and its sharding."""
    weights = [change for change in lossless_changes(request) if "kv_split" not in change]
    kinds = (
        [*weights, *narrower_weights(request)],
        narrower_caches(request),
        _kv_split_changes(request),
    )
    for parts in product(*([{}, *changes] for changes in kinds)):
        change = _merge(parts)
        if (planned := _plan_if_fits(request, change)) is not None:
            return [Remedy(change, planned)]
    return []


def _fewer_tokens(request: PlanRequest) -> list[Remedy]:
    """The largest batch that fits, and the longest sequences."""
    remedies: list[Remedy] = []
    for name in ("batch", "max_seq_len"):
        largest = most_that_fit(request, name, range(1, getattr(request, name)))
        remedies += _fitting(request, [{name: largest}] if largest else [])
    return remedies


def most_that_fit(request: PlanRequest, name: str, counts: range) -> int:
    """The largest count with which the request fits; 0 if none does."""
    return bisect_left(counts, True, key=lambda n: not _plan_if_fits(request, {name: n}))
