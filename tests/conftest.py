"""What all tests share."""

from collections.abc import Iterator

import pytest
from hypothesis import settings
from ranks import Pools

# The same examples on every machine and in every run, however slow.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pools]:
    """`ranks(tp_size).run(function, *args)`: a function on real ranks, with its results."""
    pools = Pools()
    yield pools
    pools.end()
