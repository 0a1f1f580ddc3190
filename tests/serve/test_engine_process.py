"""The engine process's reports to the frontend, with simulated ranks."""

import socket
import threading
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from parallel_llama import engine_process
from parallel_llama.engine import ranks as ranks_module
from parallel_llama.engine.ranks import Ranks
from parallel_llama.engine_process import EngineProcess
from parallel_llama.errors import UsageError
from parallel_llama.parallel.failures import RankError
from parallel_llama.serve.wire import (
    AdapterChanged,
    ChangeAdapter,
    Frames,
    FrameSocket,
    FromEngine,
    Working,
    framed,
    from_engine,
)


@pytest.fixture
def frontend(monkeypatch):
    """The frontend's end of the socket, and the ranks of an engine process at the other end."""
    monkeypatch.setattr(engine_process, "_REPORT_EVERY_S", 0.01)
    own, engine_socket = socket.socketpair()
    ranks = Mock()
    with own, engine_socket:
        EngineProcess(ranks, FrameSocket(engine_socket))
        own.settimeout(20)
        yield own, ranks


def messages_in(data: bytes) -> list[FromEngine]:
    return [from_engine.decode(body) for body in Frames().feed(data)]


def require_silence(own: socket.socket) -> None:
    """Check that nothing arrives, except what was sent before."""
    own.setblocking(False)
    with pytest.raises(BlockingIOError):
        while own.recv(1 << 10):
            pass
    own.settimeout(0.1)
    with pytest.raises(TimeoutError):
        own.recv(1)


def test_engine_process_reports_while_the_ranks_form_a_group(frontend):
    own, ranks = frontend
    with ranks.regrouping():
        messages = messages_in(own.recv(1 << 10))
    assert messages and set(messages) == {Working()}
    require_silence(own)


@pytest.mark.parametrize("refused", [None, "folder: not a folder"])
def test_engine_process_reports_while_an_adapter_is_loaded(monkeypatch, refused):
    """Regression: the frontend stopped an engine that needed longer than for a step."""
    monkeypatch.setattr(engine_process, "_REPORT_EVERY_S", 0.01)
    own, engine_socket = socket.socketpair()
    reports = []

    def change_adapter(*_: object) -> None:
        reports.append(own.recv(1 << 10))  # waits until the engine process has sent a report
        if refused is not None:
            raise UsageError(refused)

    ranks = Mock(change_adapter=change_adapter)
    with own, engine_socket:
        process = EngineProcess(ranks, FrameSocket(engine_socket))
        own.settimeout(20)
        own.sendall(framed(ChangeAdapter(3, "sql", "folder")))
        process.take_commands(wait=False)
        *working, changed = messages_in(reports[0] + own.recv(1 << 10))
        assert set(working) == {Working()} and changed == AdapterChanged(3, refused)
        require_silence(own)


def test_ranks_continue_if_the_frontend_has_closed_the_socket(frontend, monkeypatch):
    errors = []
    monkeypatch.setattr(threading, "excepthook", errors.append)
    own, ranks = frontend
    own.close()
    with ranks.regrouping():
        (reporting,) = (each for each in threading.enumerate() if each.name == "working")
        reporting.join(20)  # its first report finds the socket closed
        assert not reporting.is_alive() and errors == []


def test_failed_regroup_ends_the_reports(frontend):
    own, ranks = frontend
    with pytest.raises(RankError), ranks.regrouping():
        own.recv(1)
        raise RankError("rank 1 has died")
    require_silence(own)


def test_ranks_report_the_whole_regroup_even_if_a_second_rank_is_lost(monkeypatch):
    """`rebuild` reads weights, and is the part that takes long."""
    events: list[str] = []
    ranks = Mock(regroups=[], comm=SimpleNamespace(size=1))
    ranks.regrouping.return_value.__enter__ = lambda _: events.append("begin")
    ranks.regrouping.return_value.__exit__ = lambda *_: events.append("end")
    ranks._drop_lost.side_effect = ["rank 1 was lost", "rank 2 was lost"]
    ranks._rank_processes.return_value.take_spares.return_value = 0

    def rebuild(*_: object) -> None:
        events.append("rebuild")
        if len(events) == 2:
            raise RankError("rank 2 was lost")

    ranks._rebuild = rebuild
    monkeypatch.setattr(ranks_module, "lead_group", Mock())
    Ranks._regroup(ranks, RankError("rank 1 was lost"))
    assert events == ["begin", "rebuild", "rebuild", "end"]
    assert ranks.regroups[0].lost == "rank 1 was lost; rank 2 was lost"
