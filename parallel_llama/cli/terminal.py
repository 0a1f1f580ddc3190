"""Terminal output: colours, bars, sizes, tables, status lines; and handling of Ctrl-C."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TextIO

from parallel_llama.parallel.launch import ENDING_SIGNALS

BOLD, DIM, RED, GREEN, YELLOW = "1", "2", "31", "32", "33"
KIB = 1024

_SHOW_AFTER_S = 0.5  # shorter activities are not shown
_REDRAW_S = 0.1


def has_colors(stream: TextIO) -> bool:
    """Whether to use colours: on a terminal, unless NO_COLOR is set or TERM is dumb."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def painted(text: str, code: str, stream: TextIO) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if has_colors(stream) else text


def bar_fills(stream: TextIO) -> tuple[str, str]:
    """The characters of a bar: one per part, in order; and one for the empty rest."""
    utf8 = (stream.encoding or "").lower().replace("-", "") == "utf8"
    return ("\u2588\u2593\u2592", "\u2591") if utf8 else ("#=-", ".")


def bar(parts: Sequence[float], width: int, stream: TextIO, limit: float = 1) -> str:
    """A bar of `width` characters that shows up to three consecutive fractions of it.

    Parts beyond the fraction `limit` are drawn as !, at least one.

    >>> import io
    >>> bar([0.5, 0.25], 8, io.StringIO()), bar([0.25, 0.5], 8, io.StringIO(), limit=0.5)
    ('####==..', '##==!!  ')
    """
    fills, empty = bar_fills(stream)
    text, total = "", 0.0
    for part, fill in zip(parts, fills, strict=False):
        total += part
        text += fill * (min(width, round(total * width)) - len(text))
    n_within = min(width, round(limit * width))
    if total <= limit:
        return text[:n_within].ljust(n_within, empty).ljust(width)
    n_within = min(n_within, width - 1)
    return (text[:n_within].ljust(n_within, empty) + "!" * max(1, len(text) - n_within)).ljust(
        width
    )


def size(n_bytes: float) -> str:
    """Bytes in a readable unit.

    >>> size(512), size(30 * 1024), size(3.5 * 1024**3)
    ('512 B', '30.0 KiB', '3.50 GiB')
    >>> size(265.98 * 1024**3)
    '266.0 GiB'
    """
    if n_bytes < KIB:
        return f"{n_bytes:.0f} B"
    for unit in ("KiB", "MiB"):
        n_bytes /= KIB
        if n_bytes < KIB:
            return f"{n_bytes:.1f} {unit}"
    return f"{n_bytes / KIB:.{2 if n_bytes < 100 * KIB else 1}f} GiB"


def table(header: Sequence[str], rows: Sequence[Sequence[str]], stream: TextIO) -> list[str]:
    """Lines of a table; the last column is left-aligned, the others are right-aligned."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        *left, last = cells
        return "  ".join([*(c.rjust(w) for c, w in zip(left, widths, strict=False)), last]).rstrip()

    return [painted(line(header), BOLD, stream), *map(line, rows)]


def duration(seconds: float) -> str:
    """Seconds in readable units.

    >>> duration(48), duration(200), duration(7500)
    ('48 s', '3 min 20 s', '2 h 5 min')
    """
    minutes, rest_s = divmod(round(seconds), 60)
    hours, rest_min = divmod(minutes, 60)
    if hours:
        return f"{hours} h {rest_min} min"
    return f"{minutes} min {rest_s} s" if minutes else f"{rest_s} s"


class StatusLine:
    """A line on a terminal that is redrawn as work progresses; no output elsewhere."""

    def __init__(self, stream: TextIO) -> None:
        self.stream, self.shown = stream, stream.isatty()
        self.next_s = 0.0

    def show(self, text: Callable[[], str]) -> None:
        """Draws the line, unless it was drawn less than _REDRAW_S ago."""
        now = time.monotonic()
        if self.shown and now >= self.next_s:
            self.next_s = now + _REDRAW_S
            # A wrapped line could not be erased.
            self._write(f"\r\x1b[K{text()[: _columns(self.stream) - 1]}")

    def clear(self) -> None:
        """Erases the line."""
        if self.shown and self.next_s:
            self.next_s = 0.0
            self._write("\r\x1b[K")

    def _write(self, text: str) -> None:
        self.stream.write(text)
        self.stream.flush()


class Activity:
    """A status line for work that takes longer than _SHOW_AFTER_S; no output without a terminal.

    A thread draws the line, because the work may be a single call of several seconds.
    """

    def __init__(self, what: str, stream: TextIO) -> None:
        self.what = what
        self._status = StatusLine(stream)
        self._start_s = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._draw, daemon=True)
        if self._status.shown:
            self._thread.start()

    def __enter__(self) -> "Activity":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Erases the line; may be called twice."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        self._status.clear()

    def _draw(self) -> None:
        wait_s = _SHOW_AFTER_S
        while not self._ended.wait(wait_s):
            wait_s = _REDRAW_S
            self._status.show(lambda: f"{self.what} ({time.monotonic() - self._start_s:.0f} s)")


def ctrl_c_raises() -> None:
    """From now on Ctrl-C raises KeyboardInterrupt."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def ending_raises() -> None:
    """From now on signals that end the process raise SystemExit, which restores the terminal."""
    for number in ENDING_SIGNALS:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _exit)


def _exit(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)


@contextmanager
def ctrl_c(raises_at: int = 2) -> Iterator[Callable[[], bool]]:
    """Yields a function that returns whether Ctrl-C has been pressed.

    Press number `raises_at` raises KeyboardInterrupt; with 0, no press does.
    """
    n_pressed = 0

    def press(signum: int, frame: FrameType | None) -> None:
        nonlocal n_pressed
        n_pressed += 1
        if n_pressed == raises_at:
            signal.default_int_handler(signum, frame)

    old_handler = signal.signal(signal.SIGINT, press)
    try:
        yield lambda: n_pressed > 0
    finally:
        signal.signal(signal.SIGINT, old_handler)


def _columns(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or _DEFAULT_COLUMNS
    except (OSError, ValueError):  # ValueError if the stream is not a file
        return _DEFAULT_COLUMNS


_DEFAULT_COLUMNS = 80
