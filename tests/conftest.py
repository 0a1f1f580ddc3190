"""What all tests share."""

from collections.abc import Iterator

import pytest
from ranks import Pools


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pools]:
    """`ranks(tp_size).run(function, *args)`: a function on real ranks, with its results."""
    pools = Pools()
    yield pools
    pools.end()
