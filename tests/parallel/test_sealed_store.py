"""Values that a process writes to the store without the secret of the run are rejected."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest
from torch.distributed import HashStore, Store

from parallel_llama.parallel import process_group
from parallel_llama.parallel.failures import RankError
from parallel_llama.parallel.handshake import RankInfo, rendezvous, require_same
from parallel_llama.parallel.process_group import _Heartbeats
from parallel_llama.parallel.sealed_store import MAX_VALUE_BYTES, ForgedValue, SealedStore


def sealed(store: Store, secret: bytes = b"s", run: str = "a") -> SealedStore:
    return SealedStore(store, secret, run)


def forge(store: Store, ending: str, value: str) -> None:
    """Overwrites a key like a process that has listed all keys."""
    (key,) = (key for key in store.list_keys() if key.endswith(ending))
    store.set(key, value)


def test_ranks_with_the_same_secret_read_each_others_values():
    bare = HashStore()
    first, second = sealed(bare), sealed(bare)
    first.set("info", b"\x00\xff")
    assert second.check(["info"]) and not second.check(["info", "other"])
    assert second.get("info") == b"\x00\xff"
    assert second.compare_set("info", "", "mine") == b"\x00\xff"
    assert second.compare_set("info", b"\x00\xff", "mine") == b"mine" == first.get("info")
    second.wait(["info"])
    assert second.delete_key("info") and not first.check(["info"])


@pytest.mark.parametrize("n_ranks", [3, 5])
def test_concurrent_adds_are_all_counted(n_ranks):
    bare = HashStore()

    def add_some(_: int) -> list[int]:
        own = sealed(bare)
        return [own.add("count", 1) for _ in range(50)]

    with ThreadPoolExecutor(n_ranks) as pool:
        sums = [total for each in pool.map(add_some, range(n_ranks)) for total in each]
    assert sorted(sums) == list(range(1, 50 * n_ranks + 1))


@pytest.mark.parametrize(("secret", "run"), [(b"t", "a"), (b"", "a"), (b"s", "b")])
def test_values_of_another_run_or_secret_are_not_visible(secret, run):
    bare = HashStore()
    sealed(bare).set("info", "ours")
    other = sealed(bare, secret, run)
    assert not other.check(["info"])
    assert other.compare_set("info", "", "theirs") == b"theirs"
    assert sealed(bare).get("info") == b"ours"


FORGERIES: list[Callable[[Store], None]] = [
    lambda store: forge(store, "/info/0", ""),
    lambda store: forge(store, "/info/0", "[" * 100_000),
    lambda store: forge(store, "/info/0", "x" * (MAX_VALUE_BYTES + 33)),
    # The value of rank 1 under the key of rank 0.
    lambda store: forge(store, "/info/0", store.get(sealed(store)._name("info/1")).decode("latin")),
]


@pytest.mark.parametrize("forgery", FORGERIES)
def test_forged_value_is_refused_and_its_key_named(forgery):
    bare = HashStore()
    own = sealed(bare)
    for rank in range(2):
        own.set(f"info/{rank}", "a rank's")
    forgery(bare)
    with pytest.raises(ForgedValue, match="another process has written 'info/0' to the store"):
        own.get("info/0")
    assert own.get("info/1") == b"a rank's"


def test_value_above_the_size_limit_is_not_written():
    with pytest.raises(ValueError, match="at most"):
        sealed(HashStore()).set("info", "x" * (MAX_VALUE_BYTES + 1))


BAD_INFOS = [
    "[" * 100_000,
    "{",
    "3",
    "{}",
    RankInfo(1, 2, {}, "h", 1, "t").encode(),
    RankInfo(0, 2, {"f": "x" * 70_000}, "h", 1, "t").encode(),
    RankInfo(0, 2, {}, "h", 1, "t").encode().replace('"pid":1', '"pid":"1"'),
    RankInfo(0, 2, {"f": ""}, "h", 1, "t").encode().replace('"f":""', '"f":[]'),
]


@pytest.mark.parametrize("info", BAD_INFOS, ids=lambda info: info[:10])
def test_invalid_rank_info_is_refused_with_the_rank_named(info):
    """Regression: 100,000 brackets caused a RecursionError. Torchrun alone sets no secret."""
    store = sealed(HashStore(), b"")
    store.set("info/0", info)
    with pytest.raises(RankError, match=r"the entry of rank 0 .* not written by a rank"):
        rendezvous(store, RankInfo.of_this_process(1, 2, {}), {0, 1}, Event())


def test_text_from_other_ranks_is_made_printable_and_short():
    """Regression: an objection was printed with its escape sequences."""
    store = sealed(HashStore(), b"")
    store.set("objection", "\x1b[2J\r\n" + "x" * 100_000)
    with pytest.raises(RankError) as caught:
        rendezvous(store, RankInfo.of_this_process(0, 1, {}), {0}, Event())
    assert str(caught.value).isprintable() and len(str(caught.value)) < 3000

    colors = ["\x1b[31m", "red"]
    infos = [RankInfo(rank, 2, {"col\x07or": c}, "", rank, "") for rank, c in enumerate(colors)]
    with pytest.raises(RankError) as caught:
        require_same(infos)
    assert str(caught.value).isprintable()


def test_forged_heartbeats_do_not_keep_a_dead_rank_alive(monkeypatch):
    """Another process writes values of its own, and replays a heartbeat that it has read before."""
    monkeypatch.setattr(process_group, "_BEAT_S", 0.01)
    monkeypatch.setattr(process_group, "_DEAD_S", 0.2)
    bare = HashStore()
    dead, own = _Heartbeats(sealed(bare), 1, 2), _Heartbeats(sealed(bare), 0, 2)
    try:
        while own.read("heartbeat", 1) < 2:
            time.sleep(0.01)
        old = bare.get(sealed(bare)._name("heartbeat/1"))
        while own.read("heartbeat", 1) < 4:
            time.sleep(0.01)
        assert own.dead_ranks() == []
        dead.end()
        time.sleep(0.1)
        words: list[str | bytes] = [old, "99", b"\xff" * 40, old]

        def interfere() -> None:
            for word in words:
                time.sleep(0.04)
                bare.set(sealed(bare)._name("heartbeat/1"), word)

        with ThreadPoolExecutor(1) as stranger:
            interfering = stranger.submit(interfere)
            assert own.dead_ranks() == [1]
            interfering.result()
    finally:
        dead.end()
        own.end()


def test_forged_value_does_not_pass_a_barrier():
    bare = HashStore()
    own = _Heartbeats(sealed(bare), 0, 2)
    try:
        own.publish("barrier 1", 1)
        bare.set(sealed(bare)._name("barrier 1/1"), "1")
        assert own.missing("barrier 1") == [1]
        sealed(bare).set("barrier 1/1", "1")
        assert own.missing("barrier 1") == []
    finally:
        own.end()
