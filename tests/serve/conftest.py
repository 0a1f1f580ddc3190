"""Servers that many tests share."""

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from served import Served


@pytest.fixture(scope="session")
def smollm2() -> Iterator[Served]:
    """The embedded chat model on two ranks."""
    with Served("--nproc=2", "--dtype=float32") as served:
        yield served


@pytest.fixture(scope="session")
def client(smollm2: Served) -> Iterator[openai.OpenAI]:
    """OpenAI's own client, checking every field of every reply."""
    with openai.OpenAI(
        base_url=f"{smollm2.url}/v1",
        api_key="none",
        max_retries=0,
        timeout=120,
        _strict_response_validation=True,
    ) as client:
        yield client


@pytest.fixture(scope="session")
def tiny(model: Path) -> Iterator[Served]:
    """A model of random weights, which answers nonsense at once."""
    with Served(f"--model={model}", "--served-model-name=tiny") as served:
        yield served
