"""Fixtures and options of all tests, and the tests that `launch/test.sh --fast` leaves out."""

import asyncio
import inspect
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from parity_steps import use_torch_operators
from ranks import Pools
from tiny_folder import write_chat_folder

from parallel_llama.parallel.launch import ENDING_SIGNALS

# Without a GPU, Triton kernels run in Triton's interpreter. The variable must be set before
# transformers imports Triton.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# The same examples on every machine and in every run, without a deadline.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")

# Background jobs of a shell ignore SIGINT, and processes started by tests would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Folders whose tests start processes, as the fixture `ranks` does.
SLOW = {"cli", "parallel", "serve"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--torch-ops", action="store_true", help="run models on torch's operators")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--torch-ops"):
        use_torch_operators()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skips folders of slow tests with `-m "not slow"`, so that their files are not imported."""
    return True if config.option.markexpr == "not slow" and collection_path.name in SLOW else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    slow_files = set()
    for item in items:
        if item.path.parent.name in SLOW or "ranks" in getattr(item, "fixturenames", ()):
            item.add_marker("slow")
        if item.get_closest_marker("slow"):
            slow_files.add(item.path)
    # Run files without slow tests last: a long file that starts last would run on one core alone.
    items.sort(key=lambda item: item.path not in slow_files)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a test that is a coroutine function, for 200 seconds at most."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given = {
        name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters
    }
    asyncio.run(asyncio.wait_for(pyfuncitem.obj(**given), 200))
    return True


@pytest.fixture(autouse=True)
def handlers_are_restored() -> Iterator[None]:
    """Restores signal handlers, because commands replace them and tests share a process."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, *ENDING_SIGNALS)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session", autouse=True)
def temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Puts temporary files of processes, such as those of torchrun, below pytest's folder."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("TMPDIR", str(tmp_path_factory.mktemp("tmp")))
        monkeypatch.setattr(tempfile, "tempdir", None)
        yield


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chat model with random weights; tests must not change its files."""
    return write_chat_folder(tmp_path_factory.mktemp("models") / "chat")


@pytest.fixture(scope="session")
def decoded_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that `transformers_oracle.decoded_smollm2` fills once for all workers."""
    own = tmp_path_factory.getbasetemp()
    return (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "decoded smollm2"


@pytest.fixture(scope="session")
def ranks(request: pytest.FixtureRequest) -> Iterator[Pools]:
    """`ranks(tp_size).run(function, *args)` calls a function on rank processes."""
    pools = Pools(use_torch_operators if request.config.getoption("--torch-ops") else None)
    yield pools
    pools.end()
