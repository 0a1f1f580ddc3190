"""Which tokens run in the next step.

Every rank runs the same scheduler over the same requests. It knows no clock, no torch and no
randomness, so the ranks choose the same steps without a word. Whether a completion has ended is
decided elsewhere; here it is told, by `finish`.

The oldest unfinished choice always gets on: nothing younger is admitted before it for lack of
blocks, younger ones give up theirs for it, and `add` refuses what the pool could not hold alone.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from parallel_llama.blocks import BlockPool, block_key, prefix_keys, root_key
from parallel_llama.errors import UsageError
from parallel_llama.request import Request

# Choices that run at once; more would not make a step of this many rows pay better.
MAX_RUNNING = 256


@dataclass(eq=False)
class Choice:
    """One completion of a request on its way.

    `tokens` is the prompt and what was drawn; the keys and values of the first `n_cached` are in
    `blocks`, of which it owns a share. `n_prefix` tokens were found in the prefix cache when it was
    last admitted. `arrival` counts all choices: the lower, the older.
    """

    request: Request
    number: int  # 0 .. n - 1
    arrival: int
    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    n_cached: int = 0
    n_prefix: int = 0
    keys: list[bytes] = field(default_factory=list, repr=False)  # of the full blocks of `tokens`
    # The unfinished choices of the request, oldest first.
    siblings: list["Choice"] = field(default_factory=list, repr=False)

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
class Work:
    """What one choice runs in one step: `tokens` from position `start` on.

    The last `n_drafts` of the tokens are guesses, the others pending tokens. Where `draws` is true
    they reach the last known token, and 1 + n_drafts rows are sampled.
    """

    choice: Choice
    start: int
    tokens: tuple[int, ...]
    n_drafts: int
    draws: bool

    @property
    def drafts(self) -> tuple[int, ...]:
        return self.tokens[len(self.tokens) - self.n_drafts :]


class Scheduler:
    """Requests from arrival to their end, step by step: `schedule`, then `commit` of each work.

    `context` gives what beside its tokens shapes a request's keys and values; `draft` guesses at
    most so many tokens that may follow a choice's.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        step_tokens: int = 512,
        max_running: int = MAX_RUNNING,
        context: Callable[[Request], bytes] = lambda _: b"",
        draft: Callable[[Choice, int], Sequence[int]] = lambda _choice, _most: (),
    ) -> None:
        self.pool, self.step_tokens, self.max_running = pool, step_tokens, max_running
        self.n_preempted = 0
        self.n_prompt_tokens = 0  # of all admissions, those after a preemption included
        self.n_prefix_tokens = 0  # those of them that the prefix cache held
        self._context, self._draft = context, draft
        self._waiting: list[Choice] = []  # both in order of arrival
        self._running: list[Choice] = []
        self._scheduled: dict[int, Work] = {}  # by arrival, until committed
        self._n_arrived = 0

    @property
    def waiting(self) -> Sequence[Choice]:
        return self._waiting

    @property
    def running(self) -> Sequence[Choice]:
        return self._running

    @property
    def idle(self) -> bool:
        return not self._waiting and not self._running

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

    def add(self, request: Request) -> list[Choice]:
        """Queue a request. Returns: its choices.

        Raises: UsageError if the pool is too small for it, even alone.
        """
        self.check_fits(request)
        keys = prefix_keys(request.prompt, self.pool.block_size, self._context(request))
        siblings: list[Choice] = []
        for number in range(request.params.n):
            tokens = list(request.prompt)
            choice = Choice(request, number, self._n_arrived, tokens, keys=list(keys))
            choice.siblings = siblings
            siblings.append(choice)
            self._waiting.append(choice)
            self._n_arrived += 1
        return list(siblings)

    def schedule(self) -> list[Work]:
        """Choose the next step: one token of each choice that decodes, then drafts, then prompts.

        Older choices go first. A choice that needs a block when there is none takes those of the
        youngest, which waits again, keeps what it drew and is computed anew.
        """
        assert not self._scheduled, "the last step is not committed"
        decoding = [choice for choice in self._running if choice.n_pending == 1]
        decoding = self._with_room(decoding[: self.step_tokens])
        # A prompt must get on however well the guesses go, hence half.
        n_left = self.step_tokens - len(decoding)
        n_draftable = n_left // 2
        works = []
        for choice in decoding:
            drafts = self._drafts(choice, n_draftable)
            n_draftable -= len(drafts)
            n_left -= len(drafts)
            tokens = (choice.tokens[-1], *drafts)
            works.append(Work(choice, choice.n_cached, tokens, len(drafts), True))
        works += self._prefill(n_left)
        self._scheduled = {work.choice.arrival: work for work in works}
        return works

    def commit(self, work: Work, drawn: Sequence[int]) -> None:
        """Take in what a work gave: its tokens are cached, and `drawn` follows them.

        Each id of `drawn` but the last equals the draft in its place; there is none where the work
        does not draw, or could not.
        """
        choice = work.choice
        assert self._scheduled.pop(choice.arrival, None) is work, "this work is not scheduled"
        n_pending = len(work.tokens) - work.n_drafts
        n_accepted = max(len(drawn) - 1, 0)
        assert (work.draws or not drawn) and n_accepted <= work.n_drafts
        assert tuple(drawn[:n_accepted]) == work.tokens[n_pending : n_pending + n_accepted]
        n_full = choice.n_cached // self.pool.block_size
        choice.tokens += drawn
        choice.n_cached = work.start + n_pending + n_accepted
        self._publish(choice, n_full)

    def finish(self, choice: Choice) -> None:
        """Forget a choice, waiting or running, and give back all it holds.

        Raises: ValueError if it is finished already.
        """
        assert choice.arrival not in self._scheduled, "a work of this choice is not committed"
        if choice not in choice.siblings:
            raise ValueError(
                f"choice {choice.number} of request {choice.request.index} is finished already"
            )
        choices = self._running if choice.blocks else self._waiting
        del choices[bisect_left(choices, choice.arrival, key=_arrival)]
        choice.siblings.remove(choice)
        self._release(choice)

    def _n_blocks_at_most(self, request: Request) -> int:
        # Nothing follows the last token that is drawn, so it never enters the cache.
        return self._n_blocks(len(request.prompt) + request.max_tokens - 1)

    def _n_blocks(self, n_tokens: int) -> int:
        return -(-n_tokens // self.pool.block_size)

    def _with_room(self, decoding: Sequence[Choice]) -> list[Choice]:
        """Those of the decoding choices that have a slot for their next token, oldest first."""
        ready = []
        for choice in decoding:
            if not choice.blocks:  # preempted for an older one, and so is whatever follows
                break
            if len(choice.blocks) * self.pool.block_size == choice.n_cached:
                self._preempt_for(choice)
                if not choice.blocks:
                    break
                self._grow(choice, 1)
            ready.append(choice)
        return ready

    def _preempt_for(self, choice: Choice) -> None:
        """Preempt the youngest until a block can be taken, the choice itself if it is that."""
        while choice.blocks and not self.pool.n_free + self.pool.n_cached:
            victim = self._running.pop()
            self._release(victim)
            insort(self._waiting, victim, key=_arrival)
            self.n_preempted += 1

    def _release(self, choice: Choice) -> None:
        self.pool.release(choice.blocks)
        choice.blocks, choice.n_cached = [], 0

    def _grow(self, choice: Choice, n: int) -> None:
        room = self._n_blocks_at_most(choice.request) - len(choice.blocks)
        after = choice.blocks[-1] if choice.blocks else None
        choice.blocks += self.pool.take(n, after, room)

    def _drafts(self, choice: Choice, most: int) -> tuple[int, ...]:
        """Guesses for which there are slots without preempting anyone."""
        most = min(most, choice.request.max_tokens - choice.n_drawn - 1)
        if most <= 0:
            return ()
        drafts = tuple(self._draft(choice, most))[:most]
        short = self._n_blocks(choice.n_cached + 1 + len(drafts)) - len(choice.blocks)
        if short > 0:
            self._grow(choice, min(short, self.pool.n_free + self.pool.n_cached))
        return drafts[: len(choice.blocks) * self.pool.block_size - choice.n_cached - 1]

    def _prefill(self, n_tokens: int) -> list[Work]:
        """Pieces of prompts, of running choices first, then of those there is room to admit."""
        works = []
        for choice in self._running:
            if choice.n_pending > 1 and n_tokens:
                works.append(_piece(choice, n_tokens))
                n_tokens -= len(works[-1].tokens)
        at = 0
        while n_tokens and at < len(self._waiting) and len(self._running) < self.max_running:
            choice = self._waiting[at]
            if self._awaits_sibling(choice):
                at += 1
                continue
            if not self._admit(choice):
                break
            del self._waiting[at]
            insort(self._running, choice, key=_arrival)
            works.append(_piece(choice, n_tokens))
            n_tokens -= len(works[-1].tokens)
        return works

    def _awaits_sibling(self, choice: Choice) -> bool:
        """Whether an older choice is about to cache full blocks that this one could share."""
        first = choice.siblings[0]
        if (
            first is choice
            or first.n_cached >= choice.n_prompt
            or not _shares_prefix(choice.request)
        ):
            return False
        n_shared = (choice.n_prompt - 1) // self.pool.block_size
        return n_shared > 0 and not self.pool.lookup(choice.keys[n_shared - 1 : n_shared])

    def _admit(self, choice: Choice) -> bool:
        """Give a choice blocks for all its known tokens, if there are enough."""
        found = self._find_prefix(choice)
        n_new = self._n_blocks(len(choice.tokens)) - len(found)
        # One more for each that can still grow, or the newcomer would be preempted right away.
        n_growing = sum(
            len(other.blocks) < self._n_blocks_at_most(other.request) for other in self._running
        )
        n_growing += len(found) + n_new < self._n_blocks_at_most(choice.request)
        if n_new + n_growing > self.pool.n_takeable(found):
            return False
        self.pool.acquire(found)
        choice.blocks = found
        choice.n_cached = choice.n_prefix = len(found) * self.pool.block_size
        self._grow(choice, n_new)
        self.n_prompt_tokens += len(choice.tokens)
        self.n_prefix_tokens += choice.n_prefix
        return True

    def _find_prefix(self, choice: Choice) -> list[int]:
        """Blocks that hold the choice's first tokens, all but one of them at most."""
        if not _shares_prefix(choice.request):
            return []
        return self.pool.lookup(choice.keys[: (len(choice.tokens) - 1) // self.pool.block_size])

    def _publish(self, choice: Choice, n_full: int) -> None:
        """Let the blocks be found that were filled since the choice had `n_full` full ones."""
        size = self.pool.block_size
        for index in range(n_full, choice.n_cached // size):
            if index == len(choice.keys):
                parent = choice.keys[-1] if choice.keys else root_key(self._context(choice.request))
                tokens = choice.tokens[index * size : (index + 1) * size]
                choice.keys.append(block_key(parent, tokens))
            self.pool.publish(choice.blocks[index], choice.keys[index])


def _arrival(choice: Choice) -> int:
    return choice.arrival


def _shares_prefix(request: Request) -> bool:
    """Whether it may find tokens in the prefix cache: not if each must be computed to be scored."""
    return request.params.prompt_logprobs is None


def _piece(choice: Choice, most: int) -> Work:
    start = choice.n_cached
    tokens = tuple(choice.tokens[start : start + most])
    return Work(choice, start, tokens, 0, start + len(tokens) == len(choice.tokens))
