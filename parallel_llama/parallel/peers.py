"""Detects which other ranks of this host have ended, and which are stopped."""

import os
import select
from collections.abc import Mapping
from pathlib import Path


class Peers:
    """Watches processes by pidfds, which are correct for zombies and for reused process ids.

    `gone` holds the ranks whose processes have ended; it only grows.

    Args:
        pids: process ids by rank.

    Raises: OSError if a process cannot be watched.
    """

    def __init__(self, pids: Mapping[int, int]) -> None:
        self.gone: set[int] = set()
        self._pids = dict(pids)
        self._ranks: dict[int, int] = {}
        self._poller = select.poll()
        try:
            for rank, pid in pids.items():
                fd = os.pidfd_open(pid)
                self._ranks[fd] = rank
                self._poller.register(fd, select.POLLIN)
        except OSError:
            self.close()
            raise

    def look(self) -> None:
        """Updates `gone`."""
        for fd, _ in self._poller.poll(0):
            self._poller.unregister(fd)
            self.gone.add(self._ranks.pop(fd))
            os.close(fd)

    def is_stopped(self, rank: int) -> bool:
        """Whether a signal or a debugger has stopped the process of a rank."""
        try:
            stat = Path(f"/proc/{self._pids[rank]}/stat").read_text(encoding="utf-8")
        except OSError:  # it has ended
            return False
        # The state follows the name, which may contain any characters.
        return stat[stat.rindex(")") + 1 :].split()[0] in ("T", "t")

    def close(self) -> None:
        for fd in self._ranks:
            os.close(fd)
        self._ranks.clear()
        self._poller = select.poll()
