"""Which tokens run in the next step: continuous batching with chunked prefill.

Every rank runs the same scheduler over the same requests. It uses no clock, no torch and no
randomness, so the ranks choose the same steps without communication. The caller decides when a
sequence has ended, and calls `finish`.

A sequence holds blocks in each KV group (layers that share a block table), and runs only if it has
enough blocks in every group.

Prompts with the least work left run first, so that a short prompt behind long prompts gets its
first token soon. Long prompts wait while a short request runs, for at most MAX_HELD_STEPS steps.

The oldest unfinished sequence always makes progress: half of a step's prompt tokens are reserved
for it, and younger sequences are preempted for it. The first sequence in the queue cannot starve:
others are admitted ahead of it only until the blocks that they may need add up to the size of the
cache, including blocks that finished ones have released. `add` refuses a request that does not fit
into empty pools.
"""

import math
from bisect import bisect_left, insort
from collections import abc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter

from parallel_llama.engine.block_pool import BlockPool, prefix_keys
from parallel_llama.engine.kv_blocks import BlockTable, KVGroupBlocks
from parallel_llama.errors import UsageError, counted
from parallel_llama.request import Request

# Sequences that run at once; more rows would not increase the throughput.
MAX_RUNNING = 256

# The cost of a prompt token with log-probabilities, relative to one without: SmolLM2 on a CPU takes
# 1.6 times as long for a prompt of 500 tokens.
SCORED_TOKEN_WORK = 2

# An interactive request is short if prompt and completion together are at most this fraction of a
# step's tokens: long prompts wait for it, for at most MAX_HELD_STEPS steps in a row.
SHORT_FRACTION = 1 / 8
MAX_HELD_STEPS = 8
# For this many steps after the last short request, at most SHORT_FRACTION of a step's tokens are
# prompt tokens: short steps let the next short request start soon.
RECENT_STEPS = 256

# The first step that continues requests of another scheduler has at most this fraction of a step's
# tokens as prompt tokens, so that some requests draw their next token soon.
FIRST_FRACTION = 1 / 4

_arrival = attrgetter("arrival")


@dataclass(eq=False)
class Sequence:
    """One unfinished completion of a request.

    `tokens` is the prompt and the drawn tokens. The keys and values of the first `n_cached` tokens
    are in the blocks of `tables`, one table for each KV group; a waiting sequence has no tables.
    `arrival` numbers all sequences: the lower, the older.
    """

    request: Request
    number: int  # 0 .. n - 1
    arrival: int
    tokens: list[int]
    tables: list[BlockTable] = field(default_factory=list)
    n_cached: int = 0
    n_found: int | None = None  # tokens found in the prefix cache at its start
    keys: list[bytes] = field(default_factory=list, repr=False)  # of the full blocks of `tokens`
    # The unfinished sequences of the request, oldest first.
    siblings: list["Sequence"] = field(default_factory=list, repr=False)
    is_short: bool = False  # by SHORT_FRACTION; only of an interactive request

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
        """Whether its steps score the request's prompt: the first choice does so for all choices.

        The step that scores the last token of a prompt also draws the first token.
        """
        is_scored = self.request.params.prompt_logprobs is not None
        return self.number == 0 and not self.n_drawn and is_scored

    @property
    def token_work(self) -> int:
        """The cost of each pending token, in prompt tokens without scores."""
        return SCORED_TOKEN_WORK if self.scores_prompt else 1

    @property
    def pending_work(self) -> int:
        """The cost of all pending tokens."""
        return self.n_pending * self.token_work


@dataclass(frozen=True)
class ScheduledTokens:
    """The tokens that one sequence runs in one step, from position `start` on.

    The last `n_drafts` tokens are drafts, the others pending tokens. If `draws` is true, they
    include the last known token, and 1 + n_drafts rows are sampled.
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

    Each KV group has a pool, all with blocks of one size, and a window: the number of keys that a
    token sees, None for all. `context` returns what determines a request's cached blocks besides
    its tokens; `draft` returns at most a given number of draft tokens of a sequence.
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
        self.n_prompt_tokens = 0  # of all admissions, those after a preemption included
        self.n_prefix_tokens = 0  # of n_prompt_tokens, those found in the prefix cache
        self.n_draft_tokens = 0  # of all steps
        self.n_accepted_tokens = 0  # of n_draft_tokens, those that the model has accepted
        self._context, self._draft = context, draft
        self.waiting: list[Sequence] = []  # both in order of arrival
        self.running: list[Sequence] = []
        self._scheduled: dict[int, ScheduledTokens] = {}  # by arrival, until committed
        self._n_arrived = 0
        # Arrival of the first waiting sequence, and the blocks of sequences admitted before it.
        self._passed: tuple[int, int] = (-1, 0)
        self._n_held = 0  # steps in a row, this one included, in which long prompts wait
        self._n_since_short = RECENT_STEPS  # steps since the last one with a short request
        self._is_resuming = False  # whether the next step is the first that continues requests

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    def check_fits(self, request: Request) -> None:
        """Raises: UsageError if a request does not fit into an empty pool."""
        for kv_group in self.kv_groups:
            needed, n_blocks = kv_group.n_held(_most_tokens(request)), kv_group.pool.n_blocks
            if needed > n_blocks:
                raise UsageError(self._too_large(request, needed, n_blocks))

    def _too_large(self, request: Request, needed: int, n_blocks: int) -> str:
        n_prompt, most, size = len(request.prompt), request.max_tokens, self.block_size
        room = n_blocks * size + 1 - n_prompt
        remedy = (
            f"ask for at most {counted(room, 'new token')}"
            if room > 0
            else f"shorten the prompt to at most {counted(n_blocks * size, 'token')}"
        )
        return (
            f"{counted(n_prompt, 'prompt token')} and {counted(most, 'new token')} need {needed} "
            f"blocks of {size}, but the KV cache has {n_blocks}; {remedy}, or enlarge the KV cache"
        )

    def add(
        self, request: Request, drawn: Mapping[int, abc.Sequence[int]] | None = None
    ) -> list[Sequence]:
        """Queue a request. Returns: its sequences.

        Args:
            drawn: the tokens drawn so far of each choice that is not finished, to continue a
                request of another scheduler; by default all choices begin.

        Raises: UsageError as `check_fits`.
        """
        self.check_fits(request)
        self._is_resuming |= drawn is not None
        if drawn is None:
            drawn = dict.fromkeys(range(request.params.n), ())
        keys = prefix_keys(request.prompt, self.block_size, self._context(request))
        is_small = _most_tokens(request) <= self.step_tokens * SHORT_FRACTION
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
        sequence needs a block and none is free, the youngest sequence is preempted: it waits again,
        keeps the tokens it has drawn, and computes its keys and values again.
        """
        assert not self._scheduled, "the last step is not committed"
        decoding = self._allocate_running()
        # At most half: prompts must make progress, however good the drafts are.
        n_left = self.step_tokens - len(decoding)
        n_draftable = n_left // 2
        scheduled = []
        for sequence in decoding:
            drafts = self._drafts(sequence, n_draftable)
            n_draftable -= len(drafts)
            n_left -= len(drafts)
            scheduled.append(_chunk(sequence, 1, drafts))
        scheduled += self._prefill(self._most_prompt_tokens(n_left), decodes=bool(scheduled))
        self._scheduled = {item.sequence.arrival: item for item in scheduled}
        self._is_resuming = False
        return scheduled

    def prepare_next(self) -> bool:
        """Allocate blocks for the next step, before this one is committed.

        Only for a next step that decodes one token of each running sequence. Returns: False, with
        nothing allocated, if a sequence waits, is in its prompt or ends, or no block is free.
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
            n_taken = sum(
                kv_group.blocks_needed(item.sequence.tables[number], item.start, stop)
                for item, stop in zip(items, stops, strict=True)
            )
            if n_taken > kv_group.pool.n_allocatable():
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
        changed = replace(item, tokens=(*pending, *drafts), n_drafts=len(drafts))
        self._scheduled[item.sequence.arrival] = changed
        return changed

    def commit(self, item: ScheduledTokens, drawn: abc.Sequence[int]) -> None:
        """Record a sequence's step: its tokens are cached, and `drawn` is appended.

        Each id of `drawn` except the last equals the draft at its position. `drawn` is empty if the
        step draws nothing, or no token was allowed.
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

    def _most_prompt_tokens(self, n_left: int) -> int:
        """The most prompt tokens of a step that has `n_left` tokens left."""
        here = *self.running, *self.waiting[: self.max_running]
        is_long = any(not sequence.is_short for sequence in here)
        if is_long and self._n_since_short < RECENT_STEPS:
            return min(n_left, int(self.step_tokens * SHORT_FRACTION))
        if self._is_resuming:
            return min(n_left, math.ceil(self.step_tokens * FIRST_FRACTION))
        return n_left

    def _allocate_running(self) -> list[Sequence]:
        """Allocate blocks for the tokens of running sequences, preempting the youngest ones.

        A prompt's blocks are allocated when it is admitted. It needs more here only in
        sliding-window layers, if blocks behind its window are shared and so cannot be reused. No
        sequence loses blocks that this step has given it.

        Returns: the sequences that decode, oldest first.
        """
        decoding = [sequence for sequence in self.running if sequence.n_pending == 1]
        del decoding[self.step_tokens :]
        n_left = self._most_prompt_tokens(self.step_tokens - len(decoding))
        shares = self._shares(self._reading(), n_left)
        ready = []
        for sequence in list(self.running):
            decodes = sequence.n_pending == 1
            if decodes and sequence.arrival > decoding[-1].arrival:
                continue
            n = 1 if decodes else shares.get(sequence, 0)
            if not self._allocate(sequence, n):
                break  # preempted for an older sequence, and so are all younger ones
            if decodes:
                ready.append(sequence)
        return ready

    def _allocate(self, sequence: Sequence, n: int) -> bool:
        """Allocate blocks for a sequence's next `n` tokens; False if it is preempted instead.

        Preempts the youngest sequences, perhaps this one too, until enough blocks are free.
        """
        start, stop = sequence.n_cached, sequence.n_cached + n
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
        most = _most_tokens(sequence.request)
        for kv_group, table in zip(self.kv_groups, sequence.tables, strict=True):
            kv_group.extend(table, sequence.n_cached, stop, most)

    def _drafts(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        """Drafts of a sequence, as many as fit without preemption."""
        most = min(most, sequence.request.max_tokens - sequence.n_drawn - 1)
        if most <= 0:
            return ()
        drafts = tuple(self._draft(sequence, most))[:most]
        if not drafts:
            return ()
        first = sequence.n_cached + 1
        stop = first + len(drafts)
        for kv_group, table in zip(self.kv_groups, sequence.tables, strict=True):
            stop = kv_group.reach(table, sequence.n_cached, stop)
        self._extend(sequence, stop)
        return drafts[: stop - first]

    def _reading(self) -> list[Sequence]:
        """The running sequences whose prompts are not yet in the cache."""
        return [sequence for sequence in self.running if sequence.n_pending > 1]

    def _prefill(self, n_tokens: int, *, decodes: bool) -> list[ScheduledTokens]:
        """Chunks of the prompts of running sequences, and of those admitted for this step.

        While a short request runs, only short ones have chunks, for at most MAX_HELD_STEPS steps in
        a row. With `decodes` the step has other tokens, so it may have no chunks.
        """
        reading = self._reading()
        reading += self._admit_waiting(reading, n_tokens)
        is_short = any(sequence.is_short for sequence in self.running)
        self._n_since_short = 0 if is_short else self._n_since_short + 1
        self._n_held = self._n_held + 1 if is_short and self._n_held < MAX_HELD_STEPS else 0
        if self._n_held:
            chunks = self._chunks([each for each in reading if each.is_short], n_tokens)
            if chunks or decodes:
                return chunks
        return self._chunks(reading, n_tokens)

    def _chunks(self, sequences: abc.Sequence[Sequence], n_tokens: int) -> list[ScheduledTokens]:
        scheduled = []
        for sequence, n in self._shares(sequences, n_tokens).items():
            # After a preemption a sequence's share may exceed the tokens that it has blocks for.
            if n := min(n, self._n_allocated(sequence)):
                scheduled.append(_chunk(sequence, n))
        return scheduled

    def _shares(self, sequences: abc.Sequence[Sequence], n_tokens: int) -> dict[Sequence, int]:
        """Divide a step's prompt tokens. Returns: the tokens of each sequence that gets any.

        The sequence with the least work goes first, and half of the tokens are reserved for the
        oldest sequence. Tokens that are scored count as SCORED_TOKEN_WORK, unless no other sequence
        waits for the step to end.
        """
        if not sequences or n_tokens <= 0:
            return {}
        oldest = min(sequences, key=_arrival)
        is_alone = len(sequences) == 1 and n_tokens == self.step_tokens
        left, kept = n_tokens, -(-n_tokens // 2)
        shares = {}
        for sequence in sorted(sequences, key=_least_work):
            if sequence is oldest:
                kept = 0
            if left <= kept:
                continue
            cost = 1 if is_alone else sequence.token_work
            shares[sequence] = min(sequence.n_pending, -(-(left - kept) // cost))
            left = max(kept, left - shares[sequence] * cost)
        return shares

    def _admit_waiting(self, reading: list[Sequence], n_tokens: int) -> list[Sequence]:
        """Admit the waiting sequences that get tokens of this step, if there are blocks."""
        admitted: list[Sequence] = []
        # Tokens found in the prefix cache leave budget for more sequences.
        while more := self._admit_some([*reading, *admitted], n_tokens):
            admitted += more
        return admitted

    def _admit_some(self, reading: list[Sequence], n_tokens: int) -> list[Sequence]:
        """Admit sequences that get tokens of this step even without prefix cache hits.

        The first waiting sequence is tried first. The module's docstring says how many others may
        be admitted ahead of it.
        """
        # More than max_running could not run, and scanning a very long queue would be slow.
        waiting = [
            sequence
            for sequence in self.waiting[: self.max_running]
            if not self._awaits_sibling(sequence)
        ]
        if not waiting or n_tokens <= 0:
            return []
        first = waiting[0]
        shares = self._shares([*reading, *waiting], n_tokens)
        admitted: list[Sequence] = []
        for sequence in sorted(shares, key=lambda each: each is not first):
            if sequence.tables:
                continue
            if len(self.running) >= self.max_running:
                break
            passes = sequence is not first and not first.tables
            n_passed = self._n_passed(first) + passes * self._most_blocks(sequence)
            if passes and n_passed > self.kv_groups[0].pool.n_blocks:
                break
            if self._admit(sequence):
                self.waiting.remove(sequence)
                insort(self.running, sequence, key=_arrival)
                admitted.append(sequence)
                self._passed = first.arrival, n_passed
            elif sequence is not first:
                break
        return admitted

    def _n_passed(self, first: Sequence) -> int:
        """Blocks of the sequences admitted while this one was first in the queue."""
        arrival, n_blocks = self._passed
        return n_blocks if arrival == first.arrival else 0

    def _most_blocks(self, sequence: Sequence) -> int:
        return self.kv_groups[0].n_held(_most_tokens(sequence.request))

    def _n_allocated(self, sequence: Sequence) -> int:
        """The number of uncached tokens that have blocks."""
        return min(table.stop for table in sequence.tables) * self.block_size - sequence.n_cached

    def _awaits_sibling(self, sequence: Sequence) -> bool:
        """Whether an older choice is about to score the prompt, or to cache blocks of it."""
        first = sequence.siblings[0]
        if first is sequence:
            return False
        if first.scores_prompt:
            return True  # a choice must not end before its prompt is scored
        if first.n_cached >= sequence.n_prompt:
            return False
        n_shared = (sequence.n_prompt - 1) // self.block_size
        last = sequence.keys[n_shared - 1 : n_shared]
        return not all(len(kv_group.pool.lookup(last)) == len(last) for kv_group in self.kv_groups)

    def _admit(self, sequence: Sequence) -> bool:
        """Allocate blocks for a sequence's known tokens, or their window, if enough are free."""
        n_known, most = len(sequence.tokens), _most_tokens(sequence.request)
        n_found = self._find_prefix(sequence)
        tables = [kv_group.prefix(sequence.keys[:n_found]) for kv_group in self.kv_groups]
        for number, (kv_group, table) in enumerate(zip(self.kv_groups, tables, strict=True)):
            n_new = kv_group.n_for_start(table, n_known)
            # Keep a block for each sequence that can grow, or this one would soon be preempted.
            n_growing = sum(
                len(other.tables[number].blocks) < kv_group.n_held(_most_tokens(other.request))
                for other in self.running
            )
            n_growing += len(table.blocks) + n_new < kv_group.n_held(most)
            if n_new + n_growing > kv_group.pool.n_allocatable(table.blocks):
                return False
        for kv_group, table in zip(self.kv_groups, tables, strict=True):
            kv_group.pool.acquire(table.blocks)
            kv_group.start(table, n_known, most)
        sequence.tables = tables
        sequence.n_cached = n_found * self.block_size
        if sequence.n_found is None:
            sequence.n_found = sequence.n_cached
        self.n_prompt_tokens += n_known
        self.n_prefix_tokens += sequence.n_cached
        return True

    def _find_prefix(self, sequence: Sequence) -> int:
        """The number of leading blocks in the prefix cache; at least one token remains uncached."""
        if sequence.scores_prompt:  # each token must be computed to be scored
            return 0
        n = (len(sequence.tokens) - 1) // self.block_size
        # Full attention comes first: a prefix that it finds may be cut at any block.
        for kv_group in self.kv_groups:
            n = kv_group.held_prefix(sequence.keys[:n])
        return n

    def _publish(self, sequence: Sequence, n_full: int) -> None:
        """Publish the blocks that were filled since the sequence had `n_full` full ones."""
        size, n_cached = self.block_size, sequence.n_cached
        if n_cached // size > len(sequence.keys):
            context = self._context(sequence.request)
            sequence.keys = prefix_keys(sequence.tokens[:n_cached], size, context, sequence.keys)
        for kv_group, table in zip(self.kv_groups, sequence.tables, strict=True):
            for number in range(n_full, n_cached // size):
                kv_group.pool.publish(table[number], sequence.keys[number])


def _most_tokens(request: Request) -> int:
    """Maximum tokens in the cache; the last drawn token does not enter it."""
    return len(request.prompt) + request.max_tokens - 1


def _least_work(sequence: Sequence) -> tuple[int, int]:
    return sequence.pending_work, sequence.arrival


def _chunk(sequence: Sequence, most: int, drafts: tuple[int, ...] = ()) -> ScheduledTokens:
    """At most `most` pending tokens, followed by drafts."""
    pending = tuple(sequence.tokens[sequence.n_cached : sequence.n_cached + most])
    draws = len(pending) == sequence.n_pending
    return ScheduledTokens(sequence, sequence.n_cached, (*pending, *drafts), len(drafts), draws)
