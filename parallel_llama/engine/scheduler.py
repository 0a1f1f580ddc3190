"""Which tokens run in the next step: continuous batching with chunked prefill.

Every rank runs the same scheduler over the same requests. It knows no clock, no torch and no
randomness, so the ranks choose the same steps without a word. Whether a completion has ended is
decided elsewhere; here it is told, by `finish`.

The oldest unfinished sequence always gets on: nothing younger is admitted before it for lack of
blocks, younger ones give up theirs for it, and `add` refuses what the pool could not hold alone.
"""

from bisect import bisect_left, insort
from collections import abc
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter

from parallel_llama.engine.block_pool import BlockPool, prefix_keys
from parallel_llama.errors import UsageError
from parallel_llama.request import Request

# Sequences that run at once; more would not make a step of this many rows pay better.
MAX_RUNNING = 256

_arrival = attrgetter("arrival")


@dataclass(eq=False)
class Sequence:
    """One completion of a request on its way.

    `tokens` is the prompt and what was drawn; the keys and values of the first `n_cached` are in
    `blocks`, of which it owns a share. `arrival` counts all sequences: the lower, the older.
    """

    request: Request
    number: int  # 0 .. n - 1
    arrival: int
    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    n_cached: int = 0
    keys: list[bytes] = field(default_factory=list, repr=False)  # of the full blocks of `tokens`
    # The unfinished sequences of the request, oldest first.
    siblings: list["Sequence"] = field(default_factory=list, repr=False)

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

    `context` gives what beside its tokens shapes a request's keys and values; `draft` guesses at
    most so many tokens that may follow a sequence's.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        step_tokens: int = 512,
        max_running: int = MAX_RUNNING,
        context: Callable[[Request], bytes] = lambda _: b"",
        draft: Callable[[Sequence, int], abc.Sequence[int]] = lambda _sequence, _most: (),
    ) -> None:
        self.pool, self.step_tokens, self.max_running = pool, step_tokens, max_running
        self.n_preempted = 0
        self.n_prompt_tokens = 0  # of all admissions, those after a preemption included
        self.n_prefix_tokens = 0  # those of them that the prefix cache held
        self._context, self._draft = context, draft
        self.waiting: list[Sequence] = []  # both in order of arrival
        self.running: list[Sequence] = []
        self._scheduled: dict[int, ScheduledTokens] = {}  # by arrival, until committed
        self._n_arrived = 0

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    def check_fits(self, request: Request) -> None:
        """Raises: UsageError if the pool is too small for a request, even alone."""
        needed, size = self._n_blocks_at_most(request), self.pool.block_size
        if needed <= self.pool.n_blocks:
            return
        n_prompt, most = len(request.prompt), request.max_tokens
        room = self.pool.n_blocks * size + 1 - n_prompt
        remedy = (
            f"lower max_tokens to {room}"
            if room > 0
            else f"shorten the prompt to at most {self.pool.n_blocks * size} tokens"
        )
        raise UsageError(
            f"a prompt of {n_prompt} tokens and max_tokens={most} need {needed} blocks of {size} "
            f"tokens and the KV cache has {self.pool.n_blocks}; {remedy} or enlarge the KV cache"
        )

    def add(self, request: Request) -> list[Sequence]:
        """Queue a request. Returns: its sequences.

        Raises: UsageError if the pool is too small for it, even alone.
        """
        self.check_fits(request)
        keys = prefix_keys(request.prompt, self.pool.block_size, self._context(request))
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
                )
            )
        self._n_arrived += len(siblings)
        self.waiting += siblings
        return list(siblings)

    def schedule(self) -> list[ScheduledTokens]:
        """Choose the next step: one token of each sequence that decodes, then drafts, then prompts.

        Older sequences go first. A sequence that needs a block when there is none takes the
        youngest's, which waits again, keeps what it drew and is computed anew.
        """
        assert not self._scheduled, "the last step is not committed"
        decoding = [sequence for sequence in self.running if sequence.n_pending == 1]
        decoding = self._with_room(decoding[: self.step_tokens])
        # A prompt must get on however well the guesses go, hence half.
        n_left = self.step_tokens - len(decoding)
        n_draftable = n_left // 2
        scheduled = []
        for sequence in decoding:
            drafts = self._drafts(sequence, n_draftable)
            n_draftable -= len(drafts)
            n_left -= len(drafts)
            scheduled.append(_chunk(sequence, 1, drafts))
        scheduled += self._prefill(n_left)
        self._scheduled = {item.sequence.arrival: item for item in scheduled}
        return scheduled

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
        n_full = sequence.n_cached // self.pool.block_size
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
        sequences = self.running if sequence.blocks else self.waiting
        del sequences[bisect_left(sequences, sequence.arrival, key=_arrival)]
        sequence.siblings.remove(sequence)
        self._release(sequence)

    def _n_blocks_at_most(self, request: Request) -> int:
        # Nothing follows the last token that is drawn, so it never enters the cache.
        return self._n_blocks(len(request.prompt) + request.max_tokens - 1)

    def _n_blocks(self, n_tokens: int) -> int:
        return -(-n_tokens // self.pool.block_size)

    def _with_room(self, decoding: abc.Sequence[Sequence]) -> list[Sequence]:
        """Those of the decoding sequences that have a slot for their next token, oldest first."""
        ready = []
        for sequence in decoding:
            if not sequence.blocks:  # preempted for an older one, and so is whatever follows
                break
            if len(sequence.blocks) * self.pool.block_size == sequence.n_cached:
                self._preempt_for(sequence)
                if not sequence.blocks:
                    break
                self._grow(sequence, 1)
            ready.append(sequence)
        return ready

    def _preempt_for(self, sequence: Sequence) -> None:
        """Preempt the youngest until a block can be taken, the sequence itself if it is that."""
        while sequence.blocks and not self.pool.n_takeable():
            victim = self.running.pop()
            self._release(victim)
            insort(self.waiting, victim, key=_arrival)
            self.n_preempted += 1

    def _release(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks, sequence.n_cached = [], 0

    def _grow(self, sequence: Sequence, n: int) -> None:
        room = self._n_blocks_at_most(sequence.request) - len(sequence.blocks)
        after = sequence.blocks[-1] if sequence.blocks else None
        sequence.blocks += self.pool.take(n, after, room)

    def _drafts(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        """Guesses for which there are slots without preempting anyone."""
        most = min(most, sequence.request.max_tokens - sequence.n_drawn - 1)
        if most <= 0:
            return ()
        drafts = tuple(self._draft(sequence, most))[:most]
        short = self._n_blocks(sequence.n_cached + 1 + len(drafts)) - len(sequence.blocks)
        if short > 0:
            self._grow(sequence, min(short, self.pool.n_takeable()))
        return drafts[: len(sequence.blocks) * self.pool.block_size - sequence.n_cached - 1]

    def _prefill(self, n_tokens: int) -> list[ScheduledTokens]:
        """Chunks of prompts, of running sequences first, then of those there is room to admit."""
        scheduled = []
        for sequence in self.running:
            if sequence.n_pending > 1 and n_tokens:
                scheduled.append(_chunk(sequence, n_tokens))
                n_tokens -= len(scheduled[-1].tokens)
        at = 0
        while n_tokens and at < len(self.waiting) and len(self.running) < self.max_running:
            sequence = self.waiting[at]
            if self._awaits_sibling(sequence):
                at += 1
                continue
            if not self._admit(sequence):
                break
            del self.waiting[at]
            insort(self.running, sequence, key=_arrival)
            scheduled.append(_chunk(sequence, n_tokens))
            n_tokens -= len(scheduled[-1].tokens)
        return scheduled

    def _awaits_sibling(self, sequence: Sequence) -> bool:
        """Whether an older sequence is about to cache full blocks that this one could share."""
        first = sequence.siblings[0]
        if (
            first is sequence
            or first.n_cached >= sequence.n_prompt
            or not _shares_prefix(sequence.request)
        ):
            return False
        n_shared = (sequence.n_prompt - 1) // self.pool.block_size
        return n_shared > 0 and not self.pool.lookup(sequence.keys[n_shared - 1 : n_shared])

    def _admit(self, sequence: Sequence) -> bool:
        """Give a sequence blocks for all its known tokens, if there are enough."""
        found = self._find_prefix(sequence)
        n_new = self._n_blocks(len(sequence.tokens)) - len(found)
        # One more for each that can still grow, or the newcomer would be preempted right away.
        n_growing = sum(
            len(other.blocks) < self._n_blocks_at_most(other.request) for other in self.running
        )
        n_growing += len(found) + n_new < self._n_blocks_at_most(sequence.request)
        if n_new + n_growing > self.pool.n_takeable(found):
            return False
        self.pool.acquire(found)
        sequence.blocks = found
        sequence.n_cached = len(found) * self.pool.block_size
        self._grow(sequence, n_new)
        self.n_prompt_tokens += len(sequence.tokens)
        self.n_prefix_tokens += sequence.n_cached
        return True

    def _find_prefix(self, sequence: Sequence) -> list[int]:
        """Blocks that hold the sequence's first tokens, all but one of them at most."""
        if not _shares_prefix(sequence.request):
            return []
        return self.pool.lookup(sequence.keys[: (len(sequence.tokens) - 1) // self.pool.block_size])

    def _publish(self, sequence: Sequence, n_full: int) -> None:
        """Let the blocks be found that were filled since the sequence had `n_full` full ones."""
        size, n_cached = self.pool.block_size, sequence.n_cached
        if n_cached // size > len(sequence.keys):
            context = self._context(sequence.request)
            sequence.keys = prefix_keys(sequence.tokens[:n_cached], size, context, sequence.keys)
        for index in range(n_full, n_cached // size):
            self.pool.publish(sequence.blocks[index], sequence.keys[index])


def _shares_prefix(request: Request) -> bool:
    """Whether it may find tokens in the prefix cache: not if each must be computed to be scored."""
    return request.params.prompt_logprobs is None


def _chunk(sequence: Sequence, most: int, drafts: tuple[int, ...] = ()) -> ScheduledTokens:
    """At most `most` pending tokens, and drafts behind the last of them."""
    pending = tuple(sequence.tokens[sequence.n_cached : sequence.n_cached + most])
    draws = len(pending) == sequence.n_pending
    return ScheduledTokens(sequence, sequence.n_cached, (*pending, *drafts), len(drafts), draws)
