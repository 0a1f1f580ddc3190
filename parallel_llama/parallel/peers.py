"""Which of the other ranks of this host are still alive, and which are stopped."""

import os
import select
from collections.abc import Mapping
from pathlib import Path


class Peers:
    """Watches processes by file descriptors, which neither zombies nor reused ids can deceive.

    `gone` holds the ranks that were found to have ended; it never shrinks.

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
        """Bring `gone` up to date."""
        for fd, _ in self._poller.poll(0):
            self._poller.unregister(fd)
            self.gone.add(self._ranks.pop(fd))
            os.close(fd)

    def is_stopped(self, rank: int) -> bool:
        """Whether a signal or a debugger holds a rank's process, so that none of its code runs."""
        try:
            stat = Path(f"/proc/{self._pids[rank]}/stat").read_text(encoding="utf-8")
        except OSError:  # it has ended
            return False
        # The state stands behind the name, which may hold anything.
        return stat[stat.rindex(")") + 1 :].split()[0] in ("T", "t")

    def close(self) -> None:
        for fd in self._ranks:
            os.close(fd)
        self._ranks.clear()
        self._poller = select.poll()
