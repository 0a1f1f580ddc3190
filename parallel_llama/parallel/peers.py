"""Which of the other ranks of this host are still alive."""

import os
import select
from collections.abc import Mapping


class Peers:
    """Watches processes by file descriptors, which neither zombies nor reused ids can deceive.

    `gone` holds the ranks that were found to have ended; it never shrinks.

    Raises: OSError if a process cannot be watched.
    """

    def __init__(self, pids: Mapping[int, int]) -> None:
        self.gone: set[int] = set()
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

    def close(self) -> None:
        for fd in self._ranks:
            os.close(fd)
        self._ranks.clear()
        self._poller = select.poll()
