"""Slots have one owner at a time, and what is refused changes nothing."""

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from parallel_llama.cache import KVCache, OutOfSlots, Span
from parallel_llama.config import ModelArgs
from parallel_llama.plan import make_plan

ARGS = ModelArgs(dim=8, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=2, ffn_dim=8, vocab_size=8)
N_SLOTS = 40


def make_cache() -> KVCache:
    share = make_plan(ARGS, 1).shares[0]
    return KVCache(ARGS, share, N_SLOTS, dtype=torch.float32, device=torch.device("cpu"))


class Allocation(RuleBasedStateMachine):
    spans = Bundle("spans")

    def __init__(self) -> None:
        super().__init__()
        self.cache = make_cache()
        self.owned: set[Span] = set()

    @rule(target=spans, n_tokens=st.integers(1, N_SLOTS + 1))
    def allocate(self, n_tokens: int) -> Span:
        before = self.cache.n_used
        try:
            span = self.cache.allocate(n_tokens)
        except OutOfSlots:
            assert self.cache.n_used == before
            assert not self._fits(n_tokens)
            return Span(0, 0)
        assert len(span) == n_tokens
        self.owned.add(span)
        return span

    @rule(span=consumes(spans))
    def free(self, span: Span) -> None:
        if len(span):
            self.cache.free(span)
            self.owned.remove(span)

    @invariant()
    def every_slot_has_at_most_one_owner(self) -> None:
        slots = [slot for span in self.owned for slot in range(span.start, span.stop)]
        assert len(slots) == len(set(slots)) == self.cache.n_used
        assert all(0 <= slot < N_SLOTS for slot in slots)

    def _fits(self, n_tokens: int) -> bool:
        used = {slot for span in self.owned for slot in range(span.start, span.stop)}
        return any(
            not used & set(range(start, start + n_tokens))
            for start in range(N_SLOTS - n_tokens + 1)
        )


TestAllocation = Allocation.TestCase
TestAllocation.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_freeing_a_span_twice_is_an_error():
    cache = make_cache()
    span = cache.allocate(3)
    cache.free(span)
    with pytest.raises(ValueError):
        cache.free(span)


def test_a_write_touches_its_own_slots_and_layer_alone():
    cache = make_cache()
    cache.k.zero_()
    cache.v.zero_()
    k, v = torch.randn(2, 2, 2), torch.randn(2, 2, 2)  # [T, K, D]
    cache.write(1, torch.tensor([7, 3]), k, v)
    assert torch.equal(cache.k[1, :, 7], k[0]) and torch.equal(cache.v[1, :, 3], v[1])
    cache.k[1, :, [3, 7]] = 0
    assert not cache.k.any()
