"""Changes that make a plan fit; each is planned before it is suggested. No torch."""

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

# Changed fields of a request, and the flags of fields that are named differently.
Change = dict[str, Any]
FLAGS = {"tp_size": "nproc"}


@dataclass(frozen=True)
class Remedy:
    """A change of a request, and the resulting plan, which fits."""

    change: Change
    found: Estimate

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


def find_remedies(asked: PlanRequest) -> list[Remedy]:
    """The changes that make a request fit, the least lossy first.

    The order is: lossless changes, more ranks, fewer bits, fewer tokens. Only the most precise
    fitting format of each kind is suggested; formats are combined if none fits alone.
    """
    without_draft: list[Change] = [{"draft": None}] if asked.draft else []
    lossless = _that_fit(asked, [*lossless_changes(asked), *without_draft])
    ladders = [narrower_weights(asked), narrower_caches(asked)]
    narrower = [remedy for changes in ladders for remedy in _that_fit(asked, changes)[:1]]
    if not lossless and not narrower:
        narrower = _combined(asked)
    more = _more_ranks(asked, [] if lossless else lossless_changes(asked))
    found = [*lossless, *more, *narrower, *_fewer_tokens(asked)]
    if found:
        return found
    narrowest = _joined(
        changes[-1] for changes in (*ladders, _splits(asked), without_draft) if changes
    )
    narrow = replace(asked, **narrowest)
    return [
        Remedy(_joined((each.change, narrowest)), each.found)
        for each in (*_fewest_more(narrow), *_fewer_tokens(narrow))
    ]


def _ranks_of(memory: Sequence[int]) -> str:
    counts = Counter(memory)
    if len(counts) == 1:
        return f"{len(memory)} ranks of {size(memory[0])}"
    each = ", ".join(f"{n} of {size(n_bytes)}" for n_bytes, n in counts.items())
    return f"{len(memory)} ranks ({each})"


def _planned(asked: PlanRequest, change: Change) -> Estimate | None:
    """The plan of a changed request if it fits."""
    try:
        found = estimate(replace(asked, **change))
    except UsageError:  # this model does not support the change
        return None
    return found if found.fits else None


def _joined(changes: Iterable[Change]) -> Change:
    return {name: value for change in changes for name, value in change.items()}


def _that_fit(asked: PlanRequest, changes: Sequence[Change]) -> list[Remedy]:
    planned = ((change, _planned(asked, change)) for change in changes)
    return [Remedy(change, found) for change, found in planned if found is not None]


def lossless_changes(asked: PlanRequest) -> list[Change]:
    """Shards the KV cache by tokens, or keeps the format or the dtype of the files."""
    changes = _splits(asked)
    if asked.stored and asked.quant == "none":
        changes.append({"quant": "stored"})
    if _is_wider(asked, asked.args.dtype):
        changes.append({"dtype": asked.args.dtype})
    return changes


def _splits(asked: PlanRequest) -> list[Change]:
    has_choice = asked.kv_split == "heads" and asked.pp == 1 and asked.draft is None
    return [{"kv_split": "sequence"}] if has_choice else []


def _is_wider(asked: PlanRequest, dtype: str) -> bool:
    """Whether weights are not quantised and have more bytes than `dtype`."""
    return asked.quant == "none" and ITEM_BYTES[asked.dtype] > ITEM_BYTES[dtype]


def narrower_weights(asked: PlanRequest) -> list[Change]:
    """Formats of weights with fewer bits than the requested ones, the most precise first."""
    changes: list[Change] = []
    if _is_wider(asked, "bfloat16") and ITEM_BYTES[asked.args.dtype] > 2:  # else lossless
        changes.append({"dtype": "bfloat16"})
    if asked.quant == "none":
        changes.append({"quant": "int8"})
    if asked.quant in ("none", "int8", "fp8"):
        changes.append({"quant": "int4"})
    return changes


def narrower_caches(asked: PlanRequest) -> list[Change]:
    """Formats of the KV cache with fewer bits than the requested one, the most precise first."""
    head_dim = asked.args.head_dim
    return [
        {"kv_cache_dtype": name}
        for name in ("bfloat16", "int8")
        if KVFormat(name).n_bytes(head_dim) < asked.kv.n_bytes(head_dim)
    ]


def _more_ranks(asked: PlanRequest, lossless: Sequence[Change]) -> list[Remedy]:
    """The fewest additional ranks that fit, combined with lossless changes.

    Added ranks have as much memory as the largest of the given ranks.
    """
    several = chain.from_iterable(combinations(lossless, n) for n in range(3))
    found = [
        Remedy(_joined((more.change, *changes)), more.found)
        for changes in several
        for more in _fewest_more(replace(asked, **_joined(changes)))
    ]
    return sorted(found, key=lambda remedy: remedy.found.plan.tp_size)[:1]


def _fewest_more(asked: PlanRequest) -> list[Remedy]:
    """The fewest additional ranks that fit with the request's formats."""
    assert asked.memory is not None
    least = _bytes_of_one_rank(asked)
    for tp_size in range(asked.tp_size + 1, asked.most_ranks + 1):
        change: Change = {"tp_size": tp_size}
        if isinstance(asked.memory, tuple):
            added = (max(asked.memory),) * (tp_size - len(asked.memory))
            change["memory"] = (*asked.memory, *added)
        memory = change.get("memory", (asked.memory,) * tp_size)
        if sum(memory) >= least and (found := _planned(asked, change)) is not None:
            return [Remedy(change, found)]
    return []


def _bytes_of_one_rank(asked: PlanRequest) -> int:
    """The weights and the KV cache of a single rank; several ranks together need at least this."""
    try:
        alone = replace(asked, tp_size=1, memory=None, bandwidth=None, hosts=None, pp=1)
        (found,) = estimate(replace(alone, hardware=None, speeds=None, kv_split="heads")).ranks
    except UsageError:
        return 0
    return found.all_weights + found.kv.needed


def _combined(asked: PlanRequest) -> list[Remedy]:
    """The first fitting combination of the formats of weights and KV cache, and its sharding."""
    weights = [change for change in lossless_changes(asked) if "kv_split" not in change]
    kinds = ([*weights, *narrower_weights(asked)], narrower_caches(asked), _splits(asked))
    for parts in product(*([{}, *changes] for changes in kinds)):
        change = _joined(parts)
        if (found := _planned(asked, change)) is not None:
            return [Remedy(change, found)]
    return []


def _fewer_tokens(asked: PlanRequest) -> list[Remedy]:
    """The largest batch that fits, and the longest sequences."""
    remedies: list[Remedy] = []
    for name in ("batch", "max_seq_len"):
        most = most_that_fit(asked, name, range(1, getattr(asked, name)))
        remedies += _that_fit(asked, [{name: most}] if most else [])
    return remedies


def most_that_fit(asked: PlanRequest, name: str, counts: range) -> int:
    """The largest count with which the request fits; 0 if none does."""
    return bisect_left(counts, True, key=lambda n: not _planned(asked, {name: n}))
