"""A store that accepts only values written with the secret of its run.

In torch's TCPStore, every process that reaches the port can list, read and write all keys. So each
value carries an HMAC-SHA256 of its key and content, with a key derived from the secret. Store keys
have a prefix that is also derived from the secret, so that runs which reach the same store by
accident do not see each other. Values are not encrypted.
"""

import hmac
import secrets
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import Store

from parallel_llama.parallel.failures import RankError

# Ranks and torch write values of a few kilobytes.
MAX_VALUE_BYTES = 1 << 20

_TAG_BYTES = 32


class ForgedValue(RankError):
    """A value was written by a process that does not know the secret of the run."""


class SealedStore(Store):
    """A store for the processes that know `secret`, for one `run`.

    Without a secret, only the names of runs separate different runs, and any process that knows the
    name of a run can write values.

    Args:
        run: a name that the launcher gives to all ranks.

    Raises: ForgedValue from every method that reads a value which no process of this run has
    written; ValueError for a value above MAX_VALUE_BYTES.
    """

    def __init__(self, store: Store, secret: bytes, run: str) -> None:
        super().__init__()
        self._store = store
        self._prefix = _derived(secret, f"prefix {run}").hex()[:32]
        self._key = _derived(secret, f"seal {run}")

    def key_for(self, purpose: str) -> bytes:
        """A key that only processes of this run can derive."""
        return _derived(self._key, purpose)

    def set(self, key: str, value: str | bytes) -> None:
        self._store.set(self._name(key), self._sealed(key, value))  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        return self._opened(key, self._store.get(self._name(key)))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        before = self._sealed(key, expected) if expected else b""
        after = self._sealed(key, desired)
        found = self._store.compare_set(self._name(key), before, after)  # type: ignore[arg-type]
        return self._opened(key, found)

    def add(self, key: str, amount: int) -> int:
        """A loop of `compare_set`, because the store can only add to plain numbers."""
        while True:
            before = self.get(key) if self.check([key]) else b"0"
            total = int(before.split()[0]) + amount
            # The random suffix distinguishes this sum from an equal one of another rank.
            after = f"{total} {secrets.token_hex(8)}".encode()
            if self.compare_set(key, before if before != b"0" else b"", after) == after:
                return total

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys exist; does not check the writer."""
        return self._store.check([self._name(key) for key in keys])

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        names = [self._name(key) for key in keys]
        if timeout is None:
            self._store.wait(names)
        else:
            self._store.wait(names, timeout)

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(self._name(key))

    def num_keys(self) -> int:
        """The number of keys of all runs."""
        return self._store.num_keys()

    def _name(self, key: str) -> str:
        return f"{self._prefix}/{key}"

    def _tag(self, key: str, value: bytes) -> bytes:
        name = key.encode()
        # The length keeps a name's end from being read as a value's start.
        content = len(name).to_bytes(8, "big") + name + value
        return hmac.digest(self._key, content, "sha256")

    def _sealed(self, key: str, value: str | bytes) -> bytes:
        data = value.encode() if isinstance(value, str) else bytes(value)
        if len(data) > MAX_VALUE_BYTES:
            raise ValueError(f"{key} has {len(data)} bytes; at most {MAX_VALUE_BYTES} are allowed")
        return self._tag(key, data) + data

    def _opened(self, key: str, sealed: bytes) -> bytes:
        tag, value = sealed[:_TAG_BYTES], sealed[_TAG_BYTES:]
        is_short = len(value) <= MAX_VALUE_BYTES
        if not is_short or not hmac.compare_digest(tag, self._tag(key, value)):
            raise ForgedValue(
                f"another process has written {key!r} to the store of the ranks without the "
                "secret of this run; end that process, or give the ranks another address"
            )
        return value


def _derived(secret: bytes, purpose: str) -> bytes:
    return hmac.digest(secret, f"parallel_llama {purpose}".encode(), "sha256")
