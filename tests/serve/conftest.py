"""The servers that many tests ask."""

from collections.abc import Iterator

import pytest
from served import Served


@pytest.fixture(scope="module")
def smollm2() -> Iterator[Served]:
    """The embedded chat model on two ranks."""
    with Served("--nproc=2", "--dtype=float32") as served:
        yield served
