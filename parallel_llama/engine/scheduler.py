"""Which tokens run in the next step: continuous batching with chunked prefill.

Every rank runs the same scheduler over the same requests. It knows no clock, no torch and no
randomness, so the ranks choose the same steps without a word. Whether a completion has ended is
decided elsewhere; here it is told, by `finish`.

A sequence holds blocks in each group of layers, and runs where it has them in all.

Prompts with little work left go first, so that a short one behind long ones has its first token
soon, and long prompts wait while a short request runs, for MAX_HELD_STEPS at most. The oldest
unfinished sequence always gets on: half of a step's prompt tokens are kept for it, younger ones
give up their blocks for it, those that are admitted before it while it waits for blocks take no
more than a cache holds, and `add` refuses what the pools could not hold alone.
"""

from bisect import bisect_left, insort
from collections import abc
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter

from parallel_llama.engine.block_group import BlockGroup, BlockTable
from parallel_llama.engine.block_pool import BlockPool, prefix_keys
from parallel_llama.errors import UsageError
from parallel_llama.request import Request

# Sequences that run at once; more would not make a step of this many rows pay better.
MAX_RUNNING = 256

# What a prompt token with log-probabilities is charged, in prompt tokens without: on SmolLM2, on a
# CPU, a prompt of 500 tokens takes 1.6 times as long with them.
SCORED_TOKEN_WORK = 2

# A request of at most this fraction of a step's tokens, prompt and completion together, is short:
# long prompts wait for it, but no more than so many steps in a row.
SHORT_FRACTION = 1 / 8
MAX_HELD_STEPS = 8
# For so many steps after the last short request, at most that fraction of a step's tokens are from
# prompts: the next short request waits for the end of a step.
RECENT_STEPS = 256

_arrival = attrgetter("arrival")


@dataclass(eq=False)
class Sequence:
    """One completion of a request on its way.

    `tokens` is the prompt and what was drawn; the keys and values of the first `n_cached` are in
    the blocks of its `tables`, one for each group of layers, of which it owns a share; while it
    waits it has none. `arrival` counts all sequences: the lower, the older.
    """

    request: Request
    number: int  # 0 .. n - 1
    arrival: int
    tokens: list[int]
    tables: list[BlockTable] = field(default_factory=list)
    n_cached: int = 0
    n_found: int | None = None  # tokens that the prefix cache held when it began
    keys: list[bytes] = field(default_factory=list, repr=False)  # of the full blocks of `tokens`
    # The unfinished sequences of the request, oldest first.
    siblings: list["Sequence"] = field(default_factory=list, repr=False)
    is_short: bool = False  # beside a step's tokens

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
        """Whether its steps score the request's prompt: the first choice does it for all of them.

        The step that scores the last token of a prompt is also the one of the first draw.
        """
        return self.number == 0 and not self.n_drawn and _is_scored(self.request)

    @property
    def token_work(self) -> int:
        """What a step is charged for each pending token, in prompt tokens without scores."""
        return SCORED_TOKEN_WORK if self.scores_prompt else 1

    @property
    def pending_work(self) -> int:
        """What all pending tokens cost."""
        return self.n_pending * self.token_work


@dataclass(frozen=True)
class ScheduledTokens:
    """What one sequence runs in one step: `tokens` from position `start` on.

    The last `n_drafts` of the tokens are guesses, the others pending tokens. Where `draws` is true
    they reach the last known token, and 1 + n_drafts rows are sampled.
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
    """Requests from arrival to their end, step by step: `schedule`, then `commit` of what ran.

    `pools` are those of the groups of layers, with blocks of one size, and `windows` says how many
    keys a token sees in each, None for all. `context` gives what beside its tokens shapes a
    request's keys and values; `draft` guesses at most so many tokens that may follow a sequence's.
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
        self.groups = [
            BlockGroup(pool, window, step_tokens, n_sinks)
            for pool, window in zip(pools, windows, strict=True)
        ]
        self.block_size = pools[0].block_size
        assert all(pool.block_size == self.block_size for pool in pools)
        self.step_tokens, self.max_running = step_tokens, max_running
        self.n_preempted = 0
        self.n_prompt_tokens = 0  # of all admissions, those after a preemption included
        self.n_prefix_tokens = 0  # those of them that the prefix cache held
        self._context, self._draft = context, draft
        self.waiting: list[Sequence] = []  # both in order of arrival
        self.running: list[Sequence] = []
        self._scheduled: dict[int, ScheduledTokens] = {}  # by arrival, until committed
        self._n_arrived = 0
        # Blocks for sequences that were admitted before the first waiting one, by its arrival.
        self._passed: tuple[int, int] = (-1, 0)
        self._n_held = 0  # steps in a row, this one included, in which long prompts wait
        self._n_since_short = RECENT_STEPS  # steps since the last one with a short request

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    def check_fits(self, request: Request) -> None:
        """Raises: UsageError if a pool is too small for a request, even alone."""
        for group in self.groups:
            needed, n_blocks = group.n_held(_most_tokens(request)), group.pool.n_blocks
            if needed > n_blocks:
                raise UsageError(self._too_large(request, needed, n_blocks))

    def _too_large(self, request: Request, needed: int, n_blocks: int) -> str:
        n_prompt, most, size = len(request.prompt), request.max_tokens, self.block_size
        room = n_blocks * size + 1 - n_prompt
        remedy = (
            f"lower max_tokens to {room}"
            if room > 0
            else f"shorten the prompt to at most {n_blocks * size} tokens"
        )
        return (
            f"a prompt of {n_prompt} tokens and max_tokens={most} need {needed} blocks of {size} "
            f"tokens and the KV cache has {n_blocks}; {remedy} or enlarge the KV cache"
        )

    def add(self, request: Request) -> list[Sequence]:
        """Queue a request. Returns: its sequences.

        Raises: UsageError if a pool is too small for it, even alone.
        """
        self.check_fits(request)
        keys = prefix_keys(request.prompt, self.block_size, self._context(request))
        is_short = _most_tokens(request) <= self.step_tokens * SHORT_FRACTION
        siblings: list[Sequence] = []
        for number in range(request.params.n):
            siblings.append(
                Sequence(
                    request,
                    number,
                    arrival=self._n_arrived + number,
                    tokens=list(request.prompt),
                    keys=keys,
                    siblings=siblings,
                    is_short=is_short,
                )
            )
        self._n_arrived += len(siblings)
        self.waiting += siblings
        return list(siblings)

    def schedule(self) -> list[ScheduledTokens]:
        """Choose the next step: one token of each sequence that decodes, then drafts, then prompts.

        Older sequences decode first; `_shares` divides what is left among prompts. A sequence that
        needs a block when there is none takes the youngest's, which waits again, keeps what it drew
        and is computed anew.
        """
        assert not self._scheduled, "the last step is not committed"
        decoding = self._make_room()
        # A prompt must get on however well the guesses go, hence half.
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
        for number, group in enumerate(self.groups):
            n_taken = sum(
                group.n_to_take(item.sequence.tables[number], item.start, stop)
                for item, stop in zip(items, stops, strict=True)
            )
            if n_taken > group.pool.n_takeable():
                return False
        for item, stop in zip(items, stops, strict=True):
            self._extend(item.sequence, stop)
        return True

    def schedule_in_flight(self, sequences: abc.Iterable[Sequence]) -> list[ScheduledTokens]:
        """Schedule the step of `prepare_next`, for those of its sequences that have not ended."""
        assert not self._scheduled, "the last step is not committed"
        items = [_chunk(sequence, 1) for sequence in sequences if sequence in sequence.siblings]
        self._scheduled = {item.sequence.arrival: item for item in items}
        return items

    def commit(self, item: ScheduledTokens, drawn: abc.Sequence[int]) -> None:
        """Take in what a sequence's step gave: its tokens are cached, and `drawn` follows them.

        Each id of `drawn` but the last equals the draft in its place; there is none where
        nothing is drawn, or could be.
        """
        sequence = item.sequence
        assert self._scheduled.pop(sequence.arrival, None) is item, "this is not scheduled"
        n_pending = len(item.tokens) - item.n_drafts
        n_accepted = max(len(drawn) - 1, 0)
        assert (item.draws or not drawn) and n_accepted <= item.n_drafts
        assert tuple(drawn[:n_accepted]) == item.tokens[n_pending : n_pending + n_accepted]
        n_full = sequence.n_cached // self.block_size
        sequence.tokens += drawn
        sequence.n_cached = item.start + n_pending + n_accepted
        self._publish(sequence, n_full)

    def finish(self, sequence: Sequence) -> None:
        """Forget a sequence, waiting or running, and give back all it holds.

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
        """How many of the tokens that a step has left may be from prompts."""
        here = *self.running, *self.waiting[: self.max_running]
        is_long = any(not sequence.is_short for sequence in here)
        is_recent = is_long and self._n_since_short < RECENT_STEPS
        return min(n_left, int(self.step_tokens * SHORT_FRACTION)) if is_recent else n_left

    def _make_room(self) -> list[Sequence]:
        """Places for the tokens that are to run, whatever they cost the youngest.

        Those of a prompt need some here only where older ones of its own are still shared, in a
        layer with a window. Nobody who has places loses them in this step.

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
            if not self._find_places(sequence, n):
                break  # preempted for an older one, and so is whatever follows
            if decodes:
                ready.append(sequence)
        return ready

    def _find_places(self, sequence: Sequence, n: int) -> bool:
        """Give a sequence's next `n` tokens places; False if it is preempted instead.

        The youngest are preempted until there are enough, the sequence itself if it is that.
        """
        start, stop = sequence.n_cached, sequence.n_cached + n
        while sequence.tables:
            if all(
                group.n_to_take(table, start, stop) <= group.pool.n_takeable()
                for group, table in zip(self.groups, sequence.tables, strict=True)
            ):
                self._extend(sequence, stop)
                return True
            victim = self.running.pop()
            self._release(victim)
            insort(self.waiting, victim, key=_arrival)
            self.n_preempted += 1
        return False

    def _release(self, sequence: Sequence) -> None:
        for group, table in zip(self.groups, sequence.tables, strict=False):
            group.release(table)
        sequence.tables, sequence.n_cached = [], 0

    def _extend(self, sequence: Sequence, stop: int) -> None:
        most = _most_tokens(sequence.request)
        for group, table in zip(self.groups, sequence.tables, strict=True):
            group.extend(table, sequence.n_cached, stop, most)

    def _drafts(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        """Guesses for which there are places without preempting anyone."""
        most = min(most, sequence.request.max_tokens - sequence.n_drawn - 1)
        if most <= 0:
            return ()
        drafts = tuple(self._draft(sequence, most))[:most]
        if not drafts:
            return ()
        first = sequence.n_cached + 1
        stop = first + len(drafts)
        for group, table in zip(self.groups, sequence.tables, strict=True):
            stop = group.reach(table, sequence.n_cached, stop)
        self._extend(sequence, stop)
        return drafts[: stop - first]

    def _reading(self) -> list[Sequence]:
        """The running sequences whose prompts are not in the cache yet."""
        return [sequence for sequence in self.running if sequence.n_pending > 1]

    def _prefill(self, n_tokens: int, *, decodes: bool) -> list[ScheduledTokens]:
        """Chunks of prompts, of running sequences and of those that are admitted for this step.

        While a short request runs, only short ones have any, for MAX_HELD_STEPS in a row at most.
        `decodes` says that the step has other tokens, so that it may do without prompts.
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
            # Preemption may have freed tokens of the step for sequences without places for them.
            if n := min(n, self._n_places(sequence)):
                scheduled.append(_chunk(sequence, n))
        return scheduled

    def _shares(self, sequences: abc.Sequence[Sequence], n_tokens: int) -> dict[Sequence, int]:
        """Divide a step's prompt tokens: how many each sequence runs, none where it has none.

        The least work goes first, and half of the tokens are kept for the oldest sequence. Scored
        tokens are charged as what they cost wherever somebody else waits for the step's end.
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
        """Admit the waiting sequences that have a share of this step, if there are blocks."""
        admitted: list[Sequence] = []
        # Those whose tokens the prefix cache holds leave shares to others.
        while more := self._admit_some([*reading, *admitted], n_tokens):
            admitted += more
        return admitted

    def _admit_some(self, reading: list[Sequence], n_tokens: int) -> list[Sequence]:
        """Admit those that have a share if they must compute all their tokens.

        The first one that waits is asked first. Those that pass it take as many blocks as the cache
        has at the most, until it is admitted.
        """
        # No more than these can run; looking at all would take long where very many wait.
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
            if passes and n_passed > self.groups[0].pool.n_blocks:
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
        """Blocks for sequences that were admitted while this one was the first that waits."""
        arrival, n_blocks = self._passed
        return n_blocks if arrival == first.arrival else 0

    def _most_blocks(self, sequence: Sequence) -> int:
        return self.groups[0].n_held(_most_tokens(sequence.request))

    def _n_places(self, sequence: Sequence) -> int:
        """How many tokens that are not in the cache have a place in it."""
        return min(table.stop for table in sequence.tables) * self.block_size - sequence.n_cached

    def _awaits_sibling(self, sequence: Sequence) -> bool:
        """Whether an older one is about to score its prompt, or to cache blocks it could share."""
        first = sequence.siblings[0]
        if first is sequence:
            return False
        if first.scores_prompt:
            return True  # it may not end before its prompt is scored
        if first.n_cached >= sequence.n_prompt:
            return False
        n_shared = (sequence.n_prompt - 1) // self.block_size
        last = sequence.keys[n_shared - 1 : n_shared]
        return not all(len(group.pool.lookup(last)) == len(last) for group in self.groups)

    def _admit(self, sequence: Sequence) -> bool:
        """Give a sequence blocks for all its known tokens, or a window of them, if there are."""
        n_known, most = len(sequence.tokens), _most_tokens(sequence.request)
        n_found = self._find_prefix(sequence)
        tables = [group.prefix(sequence.keys[:n_found]) for group in self.groups]
        for number, (group, table) in enumerate(zip(self.groups, tables, strict=True)):
            n_new = group.n_for_start(table, n_known)
            # One more for each that can still grow, or the newcomer would be preempted right away.
            n_growing = sum(
                len(other.tables[number].blocks) < group.n_held(_most_tokens(other.request))
                for other in self.running
            )
            n_growing += len(table.blocks) + n_new < group.n_held(most)
            if n_new + n_growing > group.pool.n_takeable(table.blocks):
                return False
        for group, table in zip(self.groups, tables, strict=True):
            group.pool.acquire(table.blocks)
            group.start(table, n_known, most)
        sequence.tables = tables
        sequence.n_cached = n_found * self.block_size
        if sequence.n_found is None:
            sequence.n_found = sequence.n_cached
        self.n_prompt_tokens += n_known
        self.n_prefix_tokens += sequence.n_cached
        return True

    def _find_prefix(self, sequence: Sequence) -> int:
        """How many blocks of the sequence's first tokens are held, all but one token at most."""
        if sequence.scores_prompt:  # each token must be computed to be scored
            return 0
        n = (len(sequence.tokens) - 1) // self.block_size
        for (
            group
        ) in self.groups:  # what the first finds, where it sees all keys, may be cut anywhere
            n = group.held_prefix(sequence.keys[:n])
        return n

    def _publish(self, sequence: Sequence, n_full: int) -> None:
        """Let the blocks be found that were filled since the sequence had `n_full` full ones."""
        size, n_cached = self.block_size, sequence.n_cached
        if n_cached // size > len(sequence.keys):
            context = self._context(sequence.request)
            sequence.keys = prefix_keys(sequence.tokens[:n_cached], size, context, sequence.keys)
        for group, table in zip(self.groups, sequence.tables, strict=True):
            for number in range(n_full, n_cached // size):
                group.pool.publish(table[number], sequence.keys[number])


def _most_tokens(request: Request) -> int:
    """Tokens that enter the cache at most: nothing follows the last one that is drawn."""
    return len(request.prompt) + request.max_tokens - 1


def _least_work(sequence: Sequence) -> tuple[int, int]:
    return sequence.pending_work, sequence.arrival


def _is_scored(request: Request) -> bool:
    """Whether the prompt's own tokens have log-probabilities."""
    return request.params.prompt_logprobs is not None


def _chunk(sequence: Sequence, most: int, drafts: tuple[int, ...] = ()) -> ScheduledTokens:
    """At most `most` pending tokens, and drafts behind the last of them."""
    pending = tuple(sequence.tokens[sequence.n_cached : sequence.n_cached + most])
    draws = len(pending) == sequence.n_pending
    return ScheduledTokens(sequence, sequence.n_cached, (*pending, *drafts), len(drafts), draws)
