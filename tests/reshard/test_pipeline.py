"""The parts of resharding: direct writes, reused memory, prefetching threads."""

import errno
import os
import random
import signal
import threading
import time

import pytest
import torch

from parallel_llama.checkpoint.byte_ranges import ReusedMemory
from parallel_llama.checkpoint.manifest import tensor_bytes
from parallel_llama.checkpoint.prefetch import prefetch
from parallel_llama.cli.reshard import Progress
from parallel_llama.reshard import tensor_writer
from parallel_llama.reshard.tensor_writer import DirectFile, Staging, UnitHashes


@pytest.mark.parametrize("refusal", [None, "open", "write"])
@pytest.mark.parametrize("step", [1, 64, 4095, 4096, 5000, 70_000])
def test_writes_of_any_piece_size_produce_the_same_file(tmp_path, monkeypatch, step, refusal):
    """Also if the file system refuses direct I/O, at open or at the first write."""
    size = min(200_001, step * 300)
    data = bytearray(random.Random(step).randbytes(size))
    path = tmp_path / "file"
    path.write_bytes(bytes(size))
    monkeypatch.setattr(tensor_writer, "STAGED_BYTES", 8192)
    if refusal == "open":
        monkeypatch.setattr(os, "O_DIRECT", os.O_DIRECTORY)
    file = DirectFile(path, Staging())
    real = os.pwrite

    def pwrite(descriptor, piece, offset):
        if refusal == "write" and descriptor == file._direct:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(descriptor, piece, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    for start in range(0, size, step):
        file.write(memoryview(data)[start : start + step], start)
    file.sync()
    file.close()
    assert path.read_bytes() == data


def test_memory_is_reused_only_after_its_last_view_is_freed():
    memory = ReusedMemory()
    tensor = memory.empty(5000)
    place, view = tensor.data_ptr(), tensor_bytes(tensor.view(-1)[10:])
    assert place % 4096 == 0
    del tensor
    other = memory.empty(5000)
    assert other.data_ptr() != place
    del view
    assert memory.empty(5000).data_ptr() == place
    assert memory.empty(0).shape == (0,)
    assert memory.empty(6000).dtype == torch.uint8


def test_prefetch_yields_in_order_and_raises_at_the_failed_item():
    def items():
        yield from range(5)
        raise ValueError("the sixth")

    taken = []
    with pytest.raises(ValueError, match="the sixth"):
        for item in prefetch(items(), 2):
            taken.append(item)
    assert taken == [0, 1, 2, 3, 4]


def test_closing_prefetch_early_leaves_no_thread_or_open_generator():
    closed = []

    def items():
        try:
            while True:
                yield 1
        finally:
            closed.append(True)

    before = threading.active_count()
    running = prefetch(items(), 3)
    next(running)
    running.close()
    assert closed == [True] and threading.active_count() == before


def test_ctrl_c_while_a_thread_starts_raises_keyboard_interrupt(monkeypatch):
    """The interrupt arrives in `Thread.start`, before the executor knows that it has a thread."""
    began, over = threading.Event(), threading.Event()

    def items():
        began.set()
        over.wait()
        yield 1

    def start(thread):
        monkeypatch.undo()
        thread.start()
        began.wait(0.2)  # time to make items that no caller would wait for
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", start)
    try:
        with pytest.raises(KeyboardInterrupt):
            next(prefetch(items(), 2))
    finally:
        over.set()


def test_ctrl_c_while_prefetch_closes_raises_keyboard_interrupt():
    main, stopped = threading.get_ident(), threading.Event()

    def items():
        yield 1
        stopped.wait()
        time.sleep(0.1)
        signal.pthread_kill(main, signal.SIGINT)
        time.sleep(0.1)
        yield 2

    running = prefetch(items(), 1)
    next(running)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            stopped.set()
            running.close()
    finally:
        signal.signal(signal.SIGINT, before)


def test_unit_hashes_do_not_depend_on_how_the_data_is_split():
    data = memoryview(bytearray(range(100)))
    whole, parts = UnitHashes([30, 30, 40]), UnitHashes([30, 30, 40])
    whole.add(data)
    for start in range(0, 100, 7):
        parts.add(data[start : start + 7])
    assert parts.hashes == whole.hashes and len(parts.hashes) == 3


def test_resumed_progress_shows_total_bytes_and_its_own_speed(monkeypatch):
    monkeypatch.setattr("time.monotonic", lambda: 100.0)
    progress = Progress("writing x")
    progress.start(8 << 20, 4 << 20)
    progress.add(2 << 20)
    monkeypatch.setattr("time.monotonic", lambda: 101.0)
    assert progress.line() == "writing x: 6.0 MiB of 8.0 MiB, 2.0 MiB/s, 1 s left"


def test_sync_calls_fdatasync_on_the_file(tmp_path, monkeypatch):
    """Without a loss of power the file is complete either way, so only the call shows a sync."""
    path = tmp_path / "file"
    path.write_bytes(bytes(10_000))
    synced: list[int] = []
    monkeypatch.setattr(
        tensor_writer.os, "fdatasync", lambda fd: synced.append(os.fstat(fd).st_ino)
    )
    file = DirectFile(path, Staging())
    file.write(memoryview(bytearray(b"x" * 9_000)), 500)
    assert synced == []
    file.sync()
    file.close()
    assert synced == [path.stat().st_ino]
