"""The scheduler: chooses the tokens of each step, by continuous batching with chunked prefill.

Every rank runs the same scheduler over the same requests. It uses no clock, no torch and no
randomness, so all ranks choose the same steps without communication. The caller decides when a
sequence has ended, and calls `finish`.

A sequence holds blocks in each KV group (layers that share a block table), and runs only if it has
enough blocks in every group.

Policy:

* Prompts with the least remaining work run first, so that a short prompt behind long prompts gets
  its first token soon. While a short request runs, long prompts wait, for at most
  MAX_DEFERRED_STEPS steps in a row.
* The oldest unfinished sequence always makes progress: half of a step's prompt tokens are reserved
  for it, and younger sequences are preempted for it.
* The first sequence in the queue cannot starve. The sequences that overtake it may need at most
  as many blocks in total as the cache has; those that have finished count too.
* `add` refuses a request that does not fit into empty pools.
"""

import math
from bisect import bisect_left, insort
from collections import abc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter

from parallel_llama.engine.block_pool import BlockPool, prefix_keys
from parallel_llama.engine.kv_blocks import BlockTable, KVGroupBlocks
from parallel_llama.errors import ContextExceeded, UsageError, counted
from parallel_llama.request import Request

# Maximum sequences that run at once; more rows would not increase the throughput.
MAX_RUNNING = 256

# The cost of a prompt token with log-probabilities, relative to one without: SmolLM2 on a CPU takes
# 1.6 times as long for a prompt of 500 tokens.
SCORED_TOKEN_WORK = 2

# An interactive request is short if its prompt and completion together are at most this fraction of
# a step's tokens. Long prompts wait while it runs, for at most MAX_DEFERRED_STEPS steps in a row.
SHORT_FRACTION = 1 / 8
MAX_DEFERRED_STEPS = 8
# For this many steps after the last step with a short request, while a request that is not short
# runs or waits, at most SHORT_FRACTION of a step's tokens are prompt tokens, so that the next short
# request starts soon.
RECENT_STEPS = 256

# In the first step after the loss of a rank, at most this fraction of a step's tokens are prompt
# tokens, so that some of the continued requests draw their next token soon.
FIRST_FRACTION = 1 / 4

_arrival = attrgetter("arrival")


@dataclass(eq=False)
class Sequence:
    """One unfinished completion of a request.

    Args:
        number: the completion's number among those of its request, 0 to n - 1.
        arrival: numbers all sequences; an older sequence has a lower number.
        tokens: the prompt and the drawn tokens.
        tables: a block table for each KV group, with the keys and values of the first `n_cached`
            tokens; empty for a waiting sequence.
        n_found: number of tokens found in the prefix cache at the first admission; None before.
        keys: the prefix keys of the full blocks of `tokens`.
        siblings: the unfinished sequences of the request, oldest first.
        is_short: whether the request is interactive and short; see SHORT_FRACTION.
    """

    request: Request
    number: int
    arrival: int
    tokens: list[int]
    tables: list[BlockTable] = field(default_factory=list)
    n_cached: int = 0
    n_found: int | None = None
    keys: list[bytes] = field(default_factory=list, repr=False)
    siblings: list["Sequence"] = field(default_factory=list, repr=False)
    is_short: bool = False

    @property
    def n_prompt(self) -> int:
        return len(self.request.prompt)

    @property
    def n_drawn(self) -> int:
        return len(self.tokens) - self.n_prompt

    @property
    def n_pending(self) -> int:
        """Known tokens whose keys and values are not in the cache."""
        return len(self.tokens) - self.n_cached

    @property
    def scores_prompt(self) -> bool:
        """Whether its prefill also scores the prompt; only the first choice does, for all choices.

        The step that scores the last token of a prompt also draws the first token.
        """
        is_scored = self.request.params.prompt_logprobs is not None
        return self.number == 0 and not self.n_drawn and is_scored

    @property
    def token_work(self) -> int:
        """The cost of each pending token, relative to a token that is not scored."""
        return SCORED_TOKEN_WORK if self.scores_prompt else 1

    @property
    def pending_work(self) -> int:
        """The cost of all pending tokens."""
        return self.n_pending * self.token_work


@dataclass(frozen=True)
class ScheduledTokens:
    """The tokens that one sequence runs in one step, from position `start` on.

    The last `n_drafts` tokens are drafts; the tokens before the drafts are pending tokens. If
    `draws` is true, the last pending token is the last known token, and 1 + n_drafts rows are
    sampled.
    """

    sequence: Sequence
    start: int
    tokens: tuple[int, ...]
    n_drafts: int
    draws: bool

    @property
    def request(self) -> Request:
        return self.sequence.request

    @property
    def drafts(self) -> tuple[int, ...]:
        return self.tokens[len(self.tokens) - self.n_drafts :]


class Scheduler:
    """Schedules requests step by step: `schedule`, then `commit` for each sequence that ran.

    Args:
        pools: the pool of each KV group, all with blocks of one size.
        windows: the sliding window of each KV group in tokens; None for full attention.
        n_sinks: the number of attention sinks.
        step_tokens: maximum tokens of a step.
        context: returns what determines the contents of a request's blocks besides its tokens.
        draft: returns at most the given number of draft tokens of a sequence.
    """

    def __init__(
        self,
        pools: abc.Sequence[BlockPool],
        windows: abc.Sequence[int | None] = (None,),
        n_sinks: int = 0,
        *,
        step_tokens: int = 512,
        max_running: int = MAX_RUNNING,
        context: Callable[[Request], bytes] = lambda _: b"",
        draft: Callable[[Sequence, int], abc.Sequence[int]] = lambda _sequence, _most: (),
    ) -> None:
        self.kv_groups = [
            KVGroupBlocks(pool, window, step_tokens, n_sinks)
            for pool, window in zip(pools, windows, strict=True)
        ]
        self.block_size = pools[0].block_size
        assert all(pool.block_size == self.block_size for pool in pools)
        self.step_tokens, self.max_running = step_tokens, max_running
        self.n_preempted = 0
        self.n_prompt_tokens = 0  # of all admissions, including those after a preemption
        self.n_prefix_tokens = 0  # the part of n_prompt_tokens that was found in the prefix cache
        self.n_draft_tokens = 0  # of all steps
        self.n_accepted_tokens = 0  # the part of n_draft_tokens that the model has accepted
        self._context, self._draft = context, draft
        self.waiting: list[Sequence] = []  # both in order of arrival
        self.running: list[Sequence] = []
        self._scheduled: dict[int, ScheduledTokens] = {}  # by arrival, until committed
        self._n_arrived = 0
        # The arrival of the first waiting sequence, and the blocks of sequences that overtook it.
        self._overtaking: tuple[int, int] = (-1, 0)
        self._n_deferred = 0  # steps in a row, including this one, in which long prompts wait
        self._n_since_short = RECENT_STEPS  # steps since the last one with a short request
        self._is_resuming = False  # whether the next step is the first that continues requests

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    def check_fits(self, request: Request) -> None:
        """Raises: ContextExceeded if a request does not fit into an empty pool."""
        for kv_group in self.kv_groups:
            needed, n_blocks = kv_group.n_held(_max_cached_tokens(request)), kv_group.pool.n_blocks
            if needed > n_blocks:
                raise ContextExceeded(self._too_large(request, needed, n_blocks))

    def check_length(self, n_tokens: int) -> None:
        """Raises: UsageError if a sequence of `n_tokens` tokens does not fit into an empty pool."""
        for kv_group in self.kv_groups:
            n_blocks = kv_group.pool.n_blocks
            if kv_group.n_held(n_tokens) > n_blocks:
                raise UsageError(
                    f"{n_tokens} tokens, but the KV cache has room for "
                    f"{n_blocks * self.block_size}; enlarge the KV cache"
                )

    def has_room(self, n_tokens: int) -> bool:
        """Whether a sequence of `n_tokens` tokens fits beside the others."""
        return all(
            kv_group.n_held(n_tokens) <= kv_group.pool.n_allocatable()
            for kv_group in self.kv_groups
        )

    def _too_large(self, request: Request, needed: int, n_blocks: int) -> str:
        n_prompt, max_tokens, size = len(request.prompt), request.max_tokens, self.block_size
        n_fitting = n_blocks * size + 1 - n_prompt
        remedy = (
            f"ask for at most {counted(n_fitting, 'new token')}"
            if n_fitting > 0
            else f"shorten the prompt to at most {counted(n_blocks * size, 'token')}"
        )
        needs = f"{counted(n_prompt, 'prompt token')} and {counted(max_tokens, 'new token')} need"
        return (
            f"{needs} {needed} blocks of {size}, but the KV cache has {n_blocks}; {remedy}, or "
            "enlarge the KV cache"
        )

    def add(
        self, request: Request, drawn: Mapping[int, abc.Sequence[int]] | None = None
    ) -> list[Sequence]:
        """Queue a request. Returns: its sequences.

        Args:
            drawn: the tokens drawn so far of each choice that is not finished, to continue a
                request of another scheduler; by default all choices begin.

        Raises: ContextExceeded as `check_fits`.
        """
        self.check_fits(request)
        self._is_resuming |= drawn is not None
        if drawn is None:
            drawn = dict.fromkeys(range(request.params.n), ())
        keys = prefix_keys(request.prompt, self.block_size, self._context(request))
        is_small = _max_cached_tokens(request) <= self.step_tokens * SHORT_FRACTION
        siblings: list[Sequence] = []
        for number, tokens in drawn.items():
            siblings.append(
                Sequence(
                    request,
                    number,
                    arrival=self._n_arrived + len(siblings),
                    tokens=[*request.prompt, *tokens],
                    keys=keys,
                    siblings=siblings,
                    is_short=is_small and request.is_interactive,
                )
            )
        self._n_arrived += len(siblings)
        self.waiting += siblings
        return list(siblings)

    def schedule(self) -> list[ScheduledTokens]:
        """Choose the next step: one token of each decoding sequence, then drafts, then prompts.

        Older sequences decode first; `_shares` divides the remaining tokens among prompts. If a
        sequence needs a block and no block is free, the youngest sequence is preempted: it returns
        to the queue with the tokens it has drawn, and its keys and values are computed again.
        """
        assert not self._scheduled, "the last step is not committed"
        decoding = self._allocate_running()
        # Drafts get at most half of the tokens, so that prompts make progress.
        n_left = self.step_tokens - len(decoding)
        n_draftable = n_left // 2
        scheduled = []
        for sequence in decoding:
            drafts = self._drafts(sequence, n_draftable)
            n_draftable -= len(drafts)
            n_left -= len(drafts)
            scheduled.append(_chunk(sequence, 1, drafts))
        scheduled += self._prefill(self._max_prompt_tokens(n_left), decodes=bool(scheduled))
        self._scheduled = {item.sequence.arrival: item for item in scheduled}
        self._is_resuming = False
        return scheduled

    def prepare_next(self) -> bool:
        """Allocate blocks for the next step, before this one is committed.

        The next step must decode one token of each running sequence, without drafts.

        Returns: False, with nothing allocated, if a sequence is waiting, in its prefill or about to
            end, or too few blocks are free.
        """
        if self.waiting or len(self._scheduled) < len(self.running):
            return False
        items = [self._scheduled[sequence.arrival] for sequence in self.running]
        if any(
            item.n_drafts or not item.draws or item.sequence.n_drawn + 1 >= item.request.max_tokens
            for item in items
        ):
            return False
        stops = [item.start + len(item.tokens) + 1 for item in items]
        for number, kv_group in enumerate(self.kv_groups):
            n_needed = sum(
                kv_group.blocks_needed(item.sequence.tables[number], item.start, stop)
                for item, stop in zip(items, stops, strict=True)
            )
            if n_needed > kv_group.pool.n_allocatable():
                return False
        for item, stop in zip(items, stops, strict=True):
            self._extend(item.sequence, stop)
        return True

    def schedule_in_flight(self, sequences: abc.Iterable[Sequence]) -> list[ScheduledTokens]:
        """Schedule the step of `prepare_next`, for its sequences that have not ended."""
        assert not self._scheduled, "the last step is not committed"
        items = [_chunk(sequence, 1) for sequence in sequences if sequence in sequence.siblings]
        self._scheduled = {item.sequence.arrival: item for item in items}
        return items

    def replace_drafts(self, item: ScheduledTokens, drafts: tuple[int, ...]) -> ScheduledTokens:
        """Replace the drafts of a scheduled sequence by at most as many. Returns: the new item."""
        assert len(drafts) <= item.n_drafts
        pending = item.tokens[: len(item.tokens) - item.n_drafts]
        new_item = replace(item, tokens=(*pending, *drafts), n_drafts=len(drafts))
        self._scheduled[item.sequence.arrival] = new_item
        return new_item

    def commit(self, item: ScheduledTokens, drawn: abc.Sequence[int]) -> None:
        """Record a sequence's step: its tokens are cached, and `drawn` is appended.

        Each token of `drawn` except the last equals the draft at its position. `drawn` is empty if
        the step draws no token, or no token was allowed.
        """
        sequence = item.sequence
        assert self._scheduled.pop(sequence.arrival, None) is item, "this is not scheduled"
        n_pending = len(item.tokens) - item.n_drafts
        n_accepted = max(len(drawn) - 1, 0)
        assert (item.draws or not drawn) and n_accepted <= item.n_drafts
        assert tuple(drawn[:n_accepted]) == item.tokens[n_pending : n_pending + n_accepted]
        self.n_draft_tokens += item.n_drafts
        self.n_accepted_tokens += n_accepted
        n_full = sequence.n_cached // self.block_size
        sequence.tokens += drawn
        sequence.n_cached = item.start + n_pending + n_accepted
        self._publish(sequence, n_full)

    def finish(self, sequence: Sequence) -> None:
        """Remove a waiting or running sequence and release its blocks.

        Raises: ValueError if it is finished already.
        """
        assert sequence.arrival not in self._scheduled, "a step of this sequence is not committed"
        if sequence not in sequence.siblings:
            raise ValueError(
                f"sequence {sequence.number} of request {sequence.request.index} is finished "
                "already"
            )
        sequences = self.running if sequence.tables else self.waiting
        del sequences[bisect_left(sequences, sequence.arrival, key=_arrival)]
        sequence.siblings.remove(sequence)
        self._release(sequence)

    def _max_prompt_tokens(self, n_left: int) -> int:
        """The maximum number of prompt tokens in a step with `n_left` tokens left."""
        candidates = *self.running, *self.waiting[: self.max_running]
        has_long = any(not sequence.is_short for sequence in candidates)
        if has_long and self._n_since_short < RECENT_STEPS:
            return min(n_left, int(self.step_tokens * SHORT_FRACTION))
        if self._is_resuming:
            return min(n_left, math.ceil(self.step_tokens * FIRST_FRACTION))
        return n_left

    def _allocate_running(self) -> list[Sequence]:
        """Allocate blocks for the tokens of running sequences, preempting the youngest ones.

        A prompt's blocks are allocated when it is admitted. It needs more here only in
        sliding-window layers, if blocks behind its window are shared and so cannot be reused. A
        sequence that has received blocks in this step is not preempted.

        Returns: the sequences that decode, oldest first.
        """
        decoding = [sequence for sequence in self.running if sequence.n_pending == 1]
        del decoding[self.step_tokens :]
        n_left = self._max_prompt_tokens(self.step_tokens - len(decoding))
        shares = self._shares(self._prefilling(), n_left)
        allocated = []
        for sequence in list(self.running):
            decodes = sequence.n_pending == 1
            if decodes and sequence.arrival > decoding[-1].arrival:
                continue
            n_tokens = 1 if decodes else shares.get(sequence, 0)
            if not self._allocate(sequence, n_tokens):
                break  # preempted for an older sequence, like all younger ones
            if decodes:
                allocated.append(sequence)
        return allocated

    def _allocate(self, sequence: Sequence, n_tokens: int) -> bool:
        """Allocate blocks for a sequence's next `n_tokens` tokens; False if it is preempted.

        Preempts the youngest sequences, including this one if necessary, until enough blocks are
        free.
        """
        start, stop = sequence.n_cached, sequence.n_cached + n_tokens
        while sequence.tables:
            if all(
                kv_group.blocks_needed(table, start, stop) <= kv_group.pool.n_allocatable()
                for kv_group, table in zip(self.kv_groups, sequence.tables, strict=True)
            ):
                self._extend(sequence, stop)
                return True
            victim = self.running.pop()
            self._release(victim)
            insort(self.waiting, victim, key=_arrival)
            self.n_preempted += 1
        return False

    def _release(self, sequence: Sequence) -> None:
        for kv_group, table in zip(self.kv_groups, sequence.tables, strict=False):
            kv_group.release(table)
        sequence.tables, sequence.n_cached = [], 0

    def _extend(self, sequence: Sequence, stop: int) -> None:
        max_tokens = _max_cached_tokens(sequence.request)
        for kv_group, table in zip(self.kv_groups, sequence.tables, strict=True):
            kv_group.extend(table, sequence.n_cached, stop, max_tokens)

    def _drafts(self, sequence: Sequence, max_drafts: int) -> tuple[int, ...]:
        """Drafts of a sequence, as many as have blocks without preemption; allocates the blocks."""
        max_drafts = min(max_drafts, sequence.request.max_tokens - sequence.n_drawn - 1)
        if max_drafts <= 0:
            return ()
        drafts = tuple(self._draft(sequence, max_drafts))[:max_drafts]
        if not drafts:
            return ()
        start = sequence.n_cached + 1
        stop = start + len(drafts)
        for kv_group, table in zip(self.kv_groups, sequence.tables, strict=True):
            stop = kv_group.reach(table, sequence.n_cached, stop)
        self._extend(sequence, stop)
        return drafts[: stop - start]

    def _prefilling(self) -> list[Sequence]:
        """The running sequences whose prompts are not yet in the cache."""
        return [sequence for sequence in self.running if sequence.n_pending > 1]

    def _prefill(self, n_tokens: int, *, decodes: bool) -> list[ScheduledTokens]:
        """Schedule prompt chunks of running sequences and of sequences admitted for this step.

        While a short request runs, only short requests get chunks, for at most MAX_DEFERRED_STEPS
        steps in a row.

        Args:
            decodes: whether the step decodes, so that it may have no chunks.
        """
        prefilling = self._prefilling()
        prefilling += self._admit_waiting(prefilling, n_tokens)
        runs_short = any(sequence.is_short for sequence in self.running)
        self._n_since_short = 0 if runs_short else self._n_since_short + 1
        self._n_deferred = (
            self._n_deferred + 1 if runs_short and self._n_deferred < MAX_DEFERRED_STEPS else 0
        )
        if self._n_deferred:
            chunks = self._chunks(
                [sequence for sequence in prefilling if sequence.is_short], n_tokens
            )
            if chunks or decodes:
                return chunks
        return self._chunks(prefilling, n_tokens)

    def _chunks(self, sequences: abc.Sequence[Sequence], n_tokens: int) -> list[ScheduledTokens]:
        scheduled = []
        for sequence, n in self._shares(sequences, n_tokens).items():
            # After a preemption, a sequence's share may exceed its allocated blocks.
            if n := min(n, self._n_allocated(sequence)):
                scheduled.append(_chunk(sequence, n))
        return scheduled

    def _shares(self, sequences: abc.Sequence[Sequence], n_tokens: int) -> dict[Sequence, int]:
        """Divide a step's prompt tokens among sequences. Returns: the tokens of each, if not 0.

        The sequence with the least work goes first, and half of the tokens are reserved for the
        oldest sequence. A token that is scored counts as SCORED_TOKEN_WORK, unless no other
        sequence waits for the step to end.
        """
        if not sequences or n_tokens <= 0:
            return {}
        oldest = min(sequences, key=_arrival)
        is_alone = len(sequences) == 1 and n_tokens == self.step_tokens
        n_left, n_reserved = n_tokens, -(-n_tokens // 2)
        shares = {}
        for sequence in sorted(sequences, key=_least_work):
            if sequence is oldest:
                n_reserved = 0
            if n_left <= n_reserved:
                continue
            cost = 1 if is_alone else sequence.token_work
            shares[sequence] = min(sequence.n_pending, -(-(n_left - n_reserved) // cost))
            n_left = max(n_reserved, n_left - shares[sequence] * cost)
        return shares

    def _admit_waiting(self, prefilling: list[Sequence], n_tokens: int) -> list[Sequence]:
        """Admit the waiting sequences that get tokens in this step, if there are blocks."""
        admitted: list[Sequence] = []
        # Hits in the prefix cache leave token budget for more sequences.
        while newly_admitted := self._admit_without_hits([*prefilling, *admitted], n_tokens):
            admitted += newly_admitted
        return admitted

    def _admit_without_hits(self, prefilling: list[Sequence], n_tokens: int) -> list[Sequence]:
        """Admit the sequences that get tokens in this step even without prefix cache hits.

        The first waiting sequence is tried first. The module's docstring says how many sequences
        may overtake it.
        """
        # More than max_running could not run, and scanning a very long queue would be slow.
        waiting = [
            sequence
            for sequence in self.waiting[: self.max_running]
            if not self._waits_for_sibling(sequence)
        ]
        if not waiting or n_tokens <= 0:
            return []
        first = waiting[0]
        shares = self._shares([*prefilling, *waiting], n_tokens)
        admitted: list[Sequence] = []
        for sequence in sorted(shares, key=lambda sequence: sequence is not first):
            if sequence.tables:
                continue
            if len(self.running) >= self.max_running:
                break
            overtakes = sequence is not first and not first.tables
            n_overtaking_blocks = self._n_overtaking_blocks(first) + overtakes * self._max_blocks(
                sequence
            )
            if overtakes and n_overtaking_blocks > self.kv_groups[0].pool.n_blocks:
                break
            if self._admit(sequence):
                self.waiting.remove(sequence)
                insort(self.running, sequence, key=_arrival)
                admitted.append(sequence)
                self._overtaking = first.arrival, n_overtaking_blocks
            elif sequence is not first:
                break
        return admitted

    def _n_overtaking_blocks(self, first: Sequence) -> int:
        """The blocks of the sequences that overtook `first`, the first sequence of the queue."""
        arrival, n_blocks = self._overtaking
        return n_blocks if arrival == first.arrival else 0

    def _max_blocks(self, sequence: Sequence) -> int:
        return self.kv_groups[0].n_held(_max_cached_tokens(sequence.request))

    def _n_allocated(self, sequence: Sequence) -> int:
        """The number of uncached tokens that have blocks."""
        return min(table.stop for table in sequence.tables) * self.block_size - sequence.n_cached

    def _waits_for_sibling(self, sequence: Sequence) -> bool:
        """Whether an older choice of the request will score the prompt or cache its blocks."""
        first = sequence.siblings[0]
        if first is sequence:
            return False
        if first.scores_prompt:
            return True  # a choice must not end before its prompt is scored
        if first.n_cached >= sequence.n_prompt:
            return False
        n_shared_blocks = (sequence.n_prompt - 1) // self.block_size
        last_shared_key = sequence.keys[n_shared_blocks - 1 : n_shared_blocks]
        return not all(
            len(kv_group.pool.lookup(last_shared_key)) == len(last_shared_key)
            for kv_group in self.kv_groups
        )

    def _admit(self, sequence: Sequence) -> bool:
        """Allocate blocks for a sequence's known tokens or their window, if enough are free."""
        n_known, max_tokens = len(sequence.tokens), _max_cached_tokens(sequence.request)
        n_prefix_blocks = self._find_prefix(sequence)
        tables = [kv_group.prefix(sequence.keys[:n_prefix_blocks]) for kv_group in self.kv_groups]
        for number, (kv_group, table) in enumerate(zip(self.kv_groups, tables, strict=True)):
            n_new = kv_group.n_blocks_to_start(table, n_known)
            # Leave a block for each sequence that can grow; otherwise this one is soon preempted.
            n_growing = sum(
                len(other.tables[number].blocks)
                < kv_group.n_held(_max_cached_tokens(other.request))
                for other in self.running
            )
            n_growing += len(table.blocks) + n_new < kv_group.n_held(max_tokens)
            if n_new + n_growing > kv_group.pool.n_allocatable(table.blocks):
                return False
        for kv_group, table in zip(self.kv_groups, tables, strict=True):
            kv_group.pool.acquire(table.blocks)
            kv_group.start(table, n_known, max_tokens)
        sequence.tables = tables
        sequence.n_cached = n_prefix_blocks * self.block_size
        if sequence.n_found is None:
            sequence.n_found = sequence.n_cached
        self.n_prompt_tokens += n_known
        self.n_prefix_tokens += sequence.n_cached
        return True

    def _find_prefix(self, sequence: Sequence) -> int:
        """The number of leading blocks in the prefix cache; at least one token remains uncached."""
        if sequence.scores_prompt:  # each token must be computed to be scored
            return 0
        n_blocks = (len(sequence.tokens) - 1) // self.block_size
        # Full attention comes first: a prefix that it finds may be cut at any block.
        for kv_group in self.kv_groups:
            n_blocks = kv_group.cached_prefix(sequence.keys[:n_blocks])
        return n_blocks

    def _publish(self, sequence: Sequence, n_full: int) -> None:
        """Publish the blocks that have become full since the sequence had `n_full` full blocks."""
        size, n_cached = self.block_size, sequence.n_cached
        if n_cached // size > len(sequence.keys):
            context = self._context(sequence.request)
            sequence.keys = prefix_keys(sequence.tokens[:n_cached], size, context, sequence.keys)
        for kv_group, table in zip(self.kv_groups, sequence.tables, strict=True):
            for number in range(n_full, n_cached // size):
                kv_group.pool.publish(table[number], sequence.keys[number])


def _max_cached_tokens(request: Request) -> int:
    """The maximum tokens of a sequence in the cache; its last token is not cached."""
    return len(request.prompt) + request.max_tokens - 1


def _least_work(sequence: Sequence) -> tuple[int, int]:
    return sequence.pending_work, sequence.arrival


def _chunk(sequence: Sequence, max_tokens: int, drafts: tuple[int, ...] = ()) -> ScheduledTokens:
    """At most `max_tokens` pending tokens, followed by drafts."""
    pending = tuple(sequence.tokens[sequence.n_cached : sequence.n_cached + max_tokens])
    draws = len(pending) == sequence.n_pending
    return ScheduledTokens(sequence, sequence.n_cached, (*pending, *drafts), len(drafts), draws)
