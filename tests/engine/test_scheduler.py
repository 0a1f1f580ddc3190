"""Every token sees only its own prefix, every request ends, and all ranks choose the same steps."""

from collections import abc

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from parallel_llama.engine.block_pool import BlockPool
from parallel_llama.engine.scheduler import MAX_DEFERRED_STEPS, ScheduledTokens, Scheduler, Sequence
from parallel_llama.errors import ContextExceeded, UsageError
from parallel_llama.request import Request, SamplingParams


def make_request(
    prompt: abc.Sequence[int], index: int = 0, *, is_interactive: bool = True, **params: object
) -> Request:
    own = SamplingParams(**{"max_tokens": 8, **params})
    return Request(index, tuple(prompt), own, 0, frozenset(), is_interactive=is_interactive)


def salt(request: Request) -> bytes:
    return (request.params.cache_salt or "").encode()


def next_token(sequence: Sequence, n_known: int) -> int:
    """The token that the model draws; of 3 tokens, so that completions and drafts often match."""
    return (sequence.tokens[0] + sequence.number * n_known) % 3


def guess(sequence: Sequence, most: int) -> list[int]:
    """Drafts that are right for a while."""
    right = [next_token(sequence, len(sequence.tokens) + ahead) for ahead in range(most)]
    return [token if (ahead + len(sequence.tokens)) % 4 else 7 for ahead, token in enumerate(right)]


class Model:
    """Replaces the device: records the tokens of each slot, and draws the next tokens."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        # The prefix up to this token, by group of layers and slot.
        self.slots: dict[tuple[int, int], tuple[bytes, tuple[int, ...]]] = {}

    def run(self, scheduled: abc.Sequence[ScheduledTokens]) -> None:
        """Check that each token sees only its own prefix if the whole step runs at once."""
        for number, kv_group in enumerate(self.scheduler.kv_groups):
            written = [slot for item in scheduled for slot in self.write(item, number)]
            assert len(written) == len(set(written)), "two scheduled write one slot"
            for item in scheduled:
                first = 0 if kv_group.window is None else max(item.start - kv_group.window + 1, 0)
                known = [*item.sequence.tokens[: item.start], *item.tokens]
                for at in range(first, len(known)):
                    seen = self.slots[number, self.slot(item, number, at)]
                    assert seen == (salt(item.request), tuple(known[: at + 1]))

    def write(self, item: ScheduledTokens, number: int) -> list[int]:
        known = [*item.sequence.tokens[: item.start], *item.tokens]
        slots = [self.slot(item, number, at) for at in range(item.start, len(known))]
        for slot, at in zip(slots, range(item.start, len(known)), strict=True):
            self.slots[number, slot] = (salt(item.request), tuple(known[: at + 1]))
        return slots

    def slot(self, item: ScheduledTokens, number: int, position: int) -> int:
        block, within = divmod(position, self.scheduler.block_size)
        return item.sequence.tables[number][block] * self.scheduler.block_size + within

    def draw(self, item: ScheduledTokens) -> list[int]:
        if not item.draws:
            return []
        sequence, drawn = item.sequence, []
        n_left = sequence.request.params.max_tokens - sequence.n_drawn
        drafts = item.tokens[len(item.tokens) - item.n_drafts :]
        assert len(drafts) < n_left
        for draft in (*drafts, None):
            drawn.append(next_token(sequence, len(sequence.tokens) + len(drawn)))
            if drawn[-1] != draft:
                break
        return drawn


def step(scheduler: Scheduler, model: Model) -> list[ScheduledTokens]:
    scheduled = scheduler.schedule()
    check_step(scheduler, scheduled)
    model.run(scheduled)
    for item in scheduled:
        before = list(item.sequence.tokens)
        drawn = model.draw(item)
        scheduler.commit(item, drawn)
        assert item.sequence.tokens == before + drawn
    for item in scheduled:
        if item.sequence.n_drawn == item.sequence.request.params.max_tokens:
            scheduler.finish(item.sequence)
    return scheduled


def check_step(scheduler: Scheduler, scheduled: abc.Sequence[ScheduledTokens]) -> None:
    assert scheduled or scheduler.idle
    assert sum(len(item.tokens) for item in scheduled) <= scheduler.step_tokens
    assert len(scheduler.running) <= scheduler.max_running
    assert len({item.sequence.arrival for item in scheduled}) == len(scheduled)
    for item in scheduled:
        sequence = item.sequence
        assert sequence in scheduler.running and item.start == sequence.n_cached
        pending = sequence.tokens[item.start :]
        n_own = len(item.tokens) - item.n_drafts
        assert n_own >= 1 and list(item.tokens[:n_own]) == pending[:n_own]
        assert item.draws == (n_own == len(pending))
        assert item.draws or not item.n_drafts
    for sequences in (scheduler.waiting, scheduler.running):
        arrivals = [sequence.arrival for sequence in sequences]
        assert arrivals == sorted(arrivals)


def signature(scheduled: abc.Sequence[ScheduledTokens]) -> list[tuple[object, ...]]:
    return [
        (
            item.sequence.arrival,
            item.start,
            item.tokens,
            item.n_drafts,
            [tuple(table.blocks) for table in item.sequence.tables],
        )
        for item in scheduled
    ]


class Traffic(RuleBasedStateMachine):
    """Requests arrive, are cancelled and end; two schedulers get the same events."""

    @initialize(
        n_blocks=st.integers(2, 12),
        block_size=st.integers(1, 4),
        step_tokens=st.integers(1, 12) | st.just(64),
        max_running=st.integers(1, 6),
        drafts=st.booleans(),
    )
    def start(
        self, n_blocks: int, block_size: int, step_tokens: int, max_running: int, drafts: bool
    ) -> None:
        self.begin([n_blocks], [None], block_size, step_tokens, max_running, drafts)

    def begin(
        self,
        sizes: abc.Sequence[int],
        windows: abc.Sequence[int | None],
        block_size: int,
        step_tokens: int,
        max_running: int,
        drafts: bool,
    ) -> None:
        options = {"draft": guess} if drafts else {}
        self.schedulers = [
            Scheduler(
                [BlockPool(n_blocks, block_size) for n_blocks in sizes],
                windows,
                step_tokens=step_tokens,
                max_running=max_running,
                context=salt,
                **options,
            )
            for _ in range(2)
        ]
        self.models = [Model(scheduler) for scheduler in self.schedulers]
        self.sequences: list[list[Sequence]] = [[], []]
        self.n_requests = 0

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=14),
        max_tokens=st.integers(1, 12),
        n=st.integers(1, 3),
        cache_salt=st.sampled_from([None, "salt"]),
        prompt_logprobs=st.sampled_from([None, None, 0]),
    )
    def add(self, prompt: list[int], **params: object) -> None:
        request = make_request(prompt, self.n_requests, **params)
        n_tokens = len(prompt) + request.params.max_tokens - 1
        fits = all(
            kv_group.n_held(n_tokens) <= kv_group.pool.n_blocks
            for kv_group in self.schedulers[0].kv_groups
        )
        for scheduler, sequences in zip(self.schedulers, self.sequences, strict=True):
            if fits:
                sequences += scheduler.add(request)
            else:
                with pytest.raises(UsageError):
                    scheduler.add(request)
        self.n_requests += 1

    @rule(n_steps=st.integers(1, 6))
    def run(self, n_steps: int) -> None:
        for _ in range(n_steps):
            first, second = (
                signature(step(*both)) for both in zip(self.schedulers, self.models, strict=True)
            )
            assert first == second

    @precondition(lambda self: not self.schedulers[0].idle)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        held = [*self.schedulers[0].waiting, *self.schedulers[0].running]
        arrival = data.draw(st.sampled_from(sorted(sequence.arrival for sequence in held)))
        for scheduler, sequences in zip(self.schedulers, self.sequences, strict=True):
            scheduler.finish(sequences[arrival])
            with pytest.raises(ValueError, match="finished already"):
                scheduler.finish(sequences[arrival])

    @invariant()
    def owners_are_the_running_sequences(self) -> None:
        for scheduler in self.schedulers:
            assert not any(sequence.tables or sequence.n_cached for sequence in scheduler.waiting)
            for number, kv_group in enumerate(scheduler.kv_groups):
                pool = kv_group.pool
                tables = [sequence.tables[number] for sequence in scheduler.running]
                owned = {block for table in tables for block in table.blocks}
                assert len(owned) == pool.n_used
                assert pool.n_used + pool.n_cached + pool.n_free == pool.n_blocks
                for sequence, table in zip(scheduler.running, tables, strict=True):
                    request = sequence.request
                    n_tokens = len(request.prompt) + request.params.max_tokens - 1
                    assert 0 < len(table.blocks) <= kv_group.n_held(n_tokens)

    def teardown(self) -> None:
        if not hasattr(self, "schedulers"):
            return
        for scheduler, model in zip(self.schedulers, self.models, strict=True):
            held = [*scheduler.waiting, *scheduler.running]
            # A sequence computes its tokens once, and again after each preemption. The oldest never
            # waits for long, so the limit is that each runs alone twice, with one token per step.
            most = 2 * sum(len(c.request.prompt) + c.request.params.max_tokens for c in held)
            for _ in range(most):
                if scheduler.idle:
                    break
                step(scheduler, model)
            assert scheduler.idle
            assert not any(kv_group.pool.n_used for kv_group in scheduler.kv_groups)


class WindowedTraffic(Traffic):
    """The same with a window in some or all layers, and with pools of any sizes."""

    @initialize(
        sizes=st.lists(st.integers(2, 12), min_size=2, max_size=2),
        block_size=st.integers(1, 4),
        step_tokens=st.integers(1, 12) | st.just(64),
        max_running=st.integers(1, 6),
        drafts=st.booleans(),
        window=st.integers(1, 12),
        hybrid=st.booleans(),
    )
    def start(self, sizes, block_size, step_tokens, max_running, drafts, window, hybrid) -> None:
        windows = (None, window) if hybrid else (window,)
        self.begin(sizes[: len(windows)], windows, block_size, step_tokens, max_running, drafts)


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestWindowedTraffic = WindowedTraffic.TestCase
TestWindowedTraffic.settings = settings(max_examples=80, stateful_step_count=25, deadline=None)


def make(n_blocks: int, block_size: int = 4, **options: object) -> tuple[Scheduler, Model]:
    scheduler = Scheduler([BlockPool(n_blocks, block_size)], context=salt, **options)
    return scheduler, Model(scheduler)


def test_prompts_run_in_order_of_arrival():
    scheduler, model = make(64, step_tokens=8)
    sequences = [scheduler.add(make_request([index] * 11, index))[0] for index in range(5)]
    firsts: list[Sequence] = []
    while len(firsts) < 5:
        firsts += [
            item.sequence
            for item in step(scheduler, model)
            if item.draws and item.start + 8 >= 11 > item.start
        ]
    assert firsts == sequences


def test_short_prompt_draws_in_its_first_step_among_long_prompts():
    """Regression: long prompts took all tokens of every step, in order of arrival."""
    scheduler, model = make(2048, step_tokens=16)
    for index in range(100):
        scheduler.add(make_request([index] * 64, index))
    step(scheduler, model)
    (short,) = scheduler.add(make_request([7] * 6, 100))
    ran = step(scheduler, model)
    assert short.n_drawn == 1 and sum(len(item.tokens) for item in ran) == 16


def test_long_prompts_wait_for_a_short_request():
    """Regression: each step of the short request also ran 512 tokens of a long prompt."""
    scheduler, model = make(2048, step_tokens=64)
    for index in range(4):
        scheduler.add(make_request([index] * 400, index))
    (short,) = scheduler.add(make_request([7] * 4, 4, max_tokens=5))
    for _ in range(5):
        assert [item.sequence for item in step(scheduler, model)] == [short]
    assert not short.siblings


def test_long_prompt_progresses_while_short_requests_arrive():
    scheduler, model = make(2048, step_tokens=64)
    (long,) = scheduler.add(make_request([1] * 400))
    steps = []
    while not long.n_drawn:
        scheduler.add(make_request([2] * 4, 1, max_tokens=2))
        steps.append(
            sum(len(item.tokens) for item in step(scheduler, model) if item.sequence is long)
        )
    held = [0] * MAX_DEFERRED_STEPS
    assert steps[:10] == [*held, 8 - 4, 0] and len(steps) < 1000


def test_offline_batch_prefills_long_prompts_in_full_steps():
    """Regression: `LLM.generate` ran 51 steps instead of 9, and took 1.5 times as long."""
    scheduler, model = make(2048, step_tokens=64)
    scheduler.add(make_request([1] * 400, is_interactive=False))
    scheduler.add(make_request([7] * 4, 1, is_interactive=False, max_tokens=5))
    steps = [sum(len(item.tokens) for item in step(scheduler, model)) for _ in range(6)]
    assert steps == [64] * 6


@pytest.mark.slow
def test_steps_are_small_for_a_while_after_a_short_request():
    """The next short request has to wait for the end of a step."""
    scheduler, model = make(16384, step_tokens=64)
    scheduler.add(make_request([7] * 4, max_tokens=1))
    step(scheduler, model)
    scheduler.add(make_request([1] * 64 * 257, 1))
    n_tokens = [sum(len(item.tokens) for item in step(scheduler, model)) for _ in range(257)]
    assert n_tokens == [8] * 256 + [64]


def test_first_step_of_resumed_requests_is_short():
    """Regression: after the loss of a rank, 512 tokens were recomputed before any was drawn."""
    scheduler, model = make(256, step_tokens=32)
    for index in range(8):
        scheduler.add(make_request([index] * 5, index), {0: [1] * 3})
    scheduler.add(make_request([7] * 64, 8))
    first, second = step(scheduler, model), step(scheduler, model)
    assert [len(item.tokens) for item in first] == [8]
    assert [item.draws for item in first] == [True]
    assert sum(len(item.tokens) for item in second) == 32


def test_oldest_prompt_gets_half_of_each_step_among_short_prompts():
    scheduler, model = make(64, step_tokens=16)
    (long,) = scheduler.add(make_request([1] * 64))
    for index in range(1, 9):
        scheduler.add(make_request([index] * 9, index, max_tokens=1))
        step(scheduler, model)
        assert long.n_cached == 8 * index


def test_a_scored_prompt_is_charged_for_its_logits_beside_others():
    scheduler, model = make(128, step_tokens=64)
    (scored,) = scheduler.add(make_request([1] * 200, prompt_logprobs=0))
    step(scheduler, model)
    assert scored.n_cached == 64  # a prompt on its own gets the whole step
    scheduler.add(make_request([2] * 4, 1))
    step(scheduler, model)
    step(scheduler, model)  # beside a token that is decoded
    assert scored.n_cached == 64 + 30 + 32


def test_short_prompt_overtakes_a_prompt_that_waits_for_blocks():
    scheduler, model = make(6)
    scheduler.add(make_request([1] * 16, max_tokens=4))
    big, small = (scheduler.add(make_request([2] * n, max_tokens=2))[0] for n in (12, 2))
    step(scheduler, model)
    assert list(scheduler.waiting) == [big] and small.n_drawn == 1


def test_overtaking_prompts_take_at_most_the_blocks_of_the_cache():
    scheduler, model = make(12)
    scheduler.add(make_request([1] * 4, max_tokens=20))
    step(scheduler, model)
    (big,) = scheduler.add(make_request([2] * 36, max_tokens=4))
    small: list[Sequence] = []
    while not big.tables:
        n_passed = sum(each.n_drawn for each in small)
        small += scheduler.add(make_request([3], 2 + len(small), max_tokens=1))
        step(scheduler, model)
    assert n_passed == 12 < len(small)


def test_decoding_continues_while_a_long_prompt_is_prefilled():
    scheduler, model = make(64, step_tokens=8)
    (short,) = scheduler.add(make_request([1], max_tokens=20))
    step(scheduler, model)
    scheduler.add(make_request([2] * 40))
    for _ in range(5):
        assert [item.sequence is short for item in step(scheduler, model)] == [True, False]


def test_drafts_leave_room_for_prompts_in_a_step():
    scheduler, model = make(64, step_tokens=9, draft=lambda _choice, most: [7] * most)
    scheduler.add(make_request([1], max_tokens=20))
    step(scheduler, model)
    scheduler.add(make_request([2] * 40))
    draft, prompt = step(scheduler, model)
    assert (draft.n_drafts, len(prompt.tokens)) == (4, 4)


def test_choices_share_their_prompt_through_the_cache():
    scheduler, model = make(64)
    first, *others = scheduler.add(make_request(range(10), n=3))
    assert [item.sequence for item in step(scheduler, model)] == [first]
    assert [item.start for item in step(scheduler, model)] == [10, 8, 8]
    assert all(sequence.tables[0].blocks[:2] == first.tables[0].blocks[:2] for sequence in others)
    assert scheduler.n_prefix_tokens == 16


def test_a_request_runs_beside_choices_that_wait_for_a_prompt():
    scheduler, model = make(64)
    first, _ = scheduler.add(make_request(range(10), n=2))
    (other,) = scheduler.add(make_request(range(20, 30), 1))
    assert [item.sequence for item in step(scheduler, model)] == [first, other]


def test_next_choice_runs_when_the_first_choice_is_cancelled():
    scheduler, model = make(64, step_tokens=4)
    first, second, _ = scheduler.add(make_request(range(10), n=3))
    step(scheduler, model)
    scheduler.finish(first)
    assert [item.sequence for item in step(scheduler, model)] == [second]


def test_scored_prompt_ignores_the_prefix_cache():
    scheduler, model = make(64)
    for index in range(2):
        scheduler.add(make_request(range(10), index, prompt_logprobs=0, max_tokens=1))
        (item,) = step(scheduler, model)
        assert (item.start, len(item.tokens)) == (0, 10)


def test_choices_share_a_scored_prompt_that_the_first_computes():
    scheduler, model = make(64, step_tokens=8)
    scheduler.add(make_request(range(30), prompt_logprobs=0, n=4, max_tokens=1))
    n_prefilled = 0
    while not scheduler.idle:
        n_prefilled += sum(len(item.tokens) for item in step(scheduler, model))
    # The other choices share its 7 full blocks of 4 tokens, and compute the last 2 tokens.
    assert n_prefilled == 30 + 3 * 2


def test_fully_cached_prompt_recomputes_its_last_block():
    scheduler, model = make(64)
    for start in (0, 4):
        scheduler.add(make_request(range(8), max_tokens=1))
        (item,) = step(scheduler, model)
        assert item.start == start


def test_youngest_request_is_preempted_and_keeps_its_tokens():
    scheduler, model = make(4)
    old, young = (
        scheduler.add(make_request([index] * 3, index, max_tokens=9))[0] for index in range(2)
    )
    while not scheduler.n_preempted:
        step(scheduler, model)
    assert list(scheduler.running) == [old] and list(scheduler.waiting) == [young]
    assert young.n_drawn > 0 and young.n_cached == 0


def test_requests_that_fit_together_are_never_preempted_nor_kept_waiting():
    scheduler, model = make(9)
    for index in range(3):
        scheduler.add(make_request([index] * 2, index, max_tokens=11))
    step(scheduler, model)
    assert len(scheduler.running) == 3
    while not scheduler.idle:
        step(scheduler, model)
        for sequence in scheduler.running:
            blocks = sequence.tables[0].blocks
            assert blocks == list(range(blocks[0], blocks[-1] + 1))
    assert scheduler.n_preempted == 0


def drawing(scheduler: Scheduler, n_drawn: int = 1) -> list[ScheduledTokens]:
    """The items of the step after `n_drawn` steps in which every sequence drew a token."""
    for drawn in range(n_drawn):
        for item in scheduler.schedule():
            scheduler.commit(item, [drawn])
    return scheduler.schedule()


def test_prepare_next_allocates_the_block_of_the_next_step():
    scheduler, _ = make(n_blocks=4)
    scheduler.add(make_request(range(3)))
    (item,) = drawing(scheduler)
    assert item.start == 3 and len(item.sequence.tables[0].blocks) == 1
    assert scheduler.prepare_next()
    assert len(item.sequence.tables[0].blocks) == 2
    scheduler.commit(item, [5])
    (again,) = scheduler.schedule_in_flight([item.sequence])
    assert (again.start, again.tokens, again.draws) == (4, (5,), True)


def test_schedule_in_flight_omits_finished_sequences():
    scheduler, _ = make(n_blocks=4)
    first, second = (scheduler.add(make_request([n], n))[0] for n in range(2))
    items = drawing(scheduler)
    assert scheduler.prepare_next()
    for item in items:
        scheduler.commit(item, [5])
    scheduler.finish(first)
    assert [item.sequence for item in scheduler.schedule_in_flight([first, second])] == [second]


def test_prepare_next_refuses_if_a_request_waits_ends_or_lacks_blocks():
    scheduler, _ = make(n_blocks=2)
    scheduler.add(make_request(range(3), max_tokens=5))
    items = drawing(scheduler)
    (waiting,) = scheduler.add(make_request([1], 1))
    assert not scheduler.prepare_next()
    scheduler.finish(waiting)
    assert scheduler.prepare_next()
    scheduler.commit(items[0], [5])
    drawing(scheduler, 2)
    assert not scheduler.prepare_next()  # the last token is being drawn

    scheduler, _ = make(n_blocks=2)
    for n in range(2):
        scheduler.add(make_request(range(n, n + 2), n, max_tokens=3))
    drawing(scheduler, 2)
    assert not scheduler.prepare_next()


def test_new_request_leaves_a_block_for_each_growing_sequence():
    scheduler, model = make(3)
    for index in range(2):
        scheduler.add(make_request([index] * 4, index, max_tokens=6))
    step(scheduler, model)
    assert len(scheduler.running) == 1


def test_request_that_never_fits_is_refused_with_a_remedy():
    scheduler, _ = make(2)
    assert scheduler.add(make_request([1] * 5, max_tokens=4))
    ask_for_fewer = r"3 blocks .* has 2; ask for at most 4 new tokens, or"
    with pytest.raises(ContextExceeded, match=ask_for_fewer):
        scheduler.add(make_request([1] * 5, max_tokens=5))
    with pytest.raises(ContextExceeded, match="shorten the prompt to at most 8 tokens"):
        scheduler.add(make_request([1] * 9, max_tokens=1))


def test_finishing_between_schedule_and_commit_is_caught():
    scheduler, _ = make(4)
    (sequence,) = scheduler.add(make_request([1]))
    scheduler.schedule()
    with pytest.raises(AssertionError):
        scheduler.finish(sequence)
