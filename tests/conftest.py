"""What all tests share."""

import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings
from ranks import Pools

# The same examples on every machine and in every run, however slow.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")

# A shell's background jobs ignore Ctrl-C, and so would every process that a test starts and stops.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pools]:
    """`ranks(tp_size).run(function, *args)`: a function on real ranks, with its results."""
    pools = Pools()
    yield pools
    pools.end()
