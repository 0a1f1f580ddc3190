"""The folder beside a target in which its files grow until they are whole.

`.NAME.partial` holds `files`, which becomes the target by one rename, a journal of the tensors
that are on the disk, and the lock of the process that writes. Whatever ends that process, under
the target's name is nothing or the whole, and another run can go on from the journal.
"""

import json
import os
import shutil
import socket
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from parallel_llama.errors import UsageError, WriteError
from parallel_llama.files.bounded_files import is_file, is_there
from parallel_llama.files.partial_output import changed, sync, take_lock, whole_lines
from parallel_llama.reshard.target_folder import partial_path

_LOCK, _JOURNAL, _FILES = "lock", "journal.jsonl", "files"
_MAX_LOCK_BYTES = 1000


def partial_bytes(target: Path) -> int:
    """What an unfinished run has already taken from the disk."""
    held = (path.stat() for path in (partial_path(target) / _FILES).rglob("*") if is_file(path))
    return sum(stat.st_blocks * 512 for stat in held)


class PartialFolder:
    """The partial folder of one target, locked by this process until `close`.

    `plan` says what is written from what; an unfinished run is continued only if its plan is equal.

    Raises: UsageError if another process holds it, or an unfinished run lies there that is not to
    be, or cannot be, continued.
    """

    def __init__(self, target: Path, plan: Mapping[str, Any], resume: bool) -> None:
        self.target, self.path = target, partial_path(target)
        self.files, self._journal = self.path / _FILES, self.path / _JOURNAL
        self._lock = _locked(self.path, target)
        try:
            _sign(self._lock)
            self.done = self._begin(json.loads(json.dumps(plan)), resume)
        except BaseException:
            self.close()
            raise

    def record(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Note what is on the disk for good, for a later run to skip."""
        text = "".join(json.dumps(line) + "\n" for line in lines)
        with self._journal.open("ab") as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())

    def commit(self) -> None:
        """Make the files the target, at once and for good."""
        for path in sorted(self.files.rglob("*")):
            sync(path)
        sync(self.files)
        if os.path.lexists(self.target):
            raise WriteError(
                f"{self.target}: has appeared meanwhile; move it away and run again with --resume"
            )
        self.files.rename(self.target)
        sync(self.target.parent)
        shutil.rmtree(self.path, ignore_errors=True)

    def close(self) -> None:
        """Give the lock back; what is there stays for --resume."""
        os.close(self._lock)

    def _begin(self, plan: Mapping[str, Any], resume: bool) -> list[dict[str, Any]]:
        """The journal's lines of the run that is continued; none for a new one."""
        if not is_there(self.files):
            self._journal.unlink(missing_ok=True)  # of a run whose files became the target
        if is_there(self._journal):
            if not resume:
                raise UsageError(
                    f"{self.path}: an unfinished run lies there; continue it with --resume, or "
                    "remove it"
                )
            lines = _read_lines(self._journal)
            if lines:
                _require_same(lines[0], plan, self.path)
                return lines[1:]
        self.files.mkdir(exist_ok=True)
        self._journal.unlink(missing_ok=True)
        self.record([plan])
        sync(self.path)
        return []


def _locked(folder: Path, target: Path) -> int:
    """A descriptor that holds the folder's lock; the system gives it back when the process ends."""
    while True:
        folder.mkdir(exist_ok=True)
        try:
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except FileNotFoundError:  # its holder is done, and removed the folder just now
            continue
        if not take_lock(lock):
            holder = os.pread(lock, _MAX_LOCK_BYTES, 0).decode(errors="replace").strip()
            os.close(lock)
            raise UsageError(
                f"{target}: is being written by {holder or 'another process'}; wait for it, or "
                "stop it and run again with --resume"
            )
        if _is_at(lock, folder / _LOCK):
            return lock
        os.close(lock)  # the lock of a folder that is gone


def _sign(lock: int) -> None:
    """Say in the lock who holds it, for a second writer to read."""
    since = time.strftime("%Y-%m-%d %H:%M:%S %z")
    text = f"process {os.getpid()} on {socket.gethostname()} since {since}\n"
    os.truncate(lock, 0)
    os.pwrite(lock, text.encode(), 0)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _read_lines(journal: Path) -> list[dict[str, Any]]:
    """The whole lines of a journal, cut back to them: a kill may leave a torn one at its end."""
    lines = list(whole_lines(journal))
    os.truncate(journal, sum(map(len, lines)))
    try:
        return [json.loads(line) for line in lines]
    except ValueError as error:
        raise UsageError(f"{journal}: damaged ({error}); remove {journal.parent}") from error


def _require_same(before: Mapping[str, Any], now: Mapping[str, Any], where: Path) -> None:
    key = changed(before, now)
    if key is None:
        return
    was, is_now = before.get(key), now.get(key)
    if isinstance(was, dict) and isinstance(is_now, dict) and (part := changed(was, is_now)):
        key, was, is_now = f"{key} {part}", was.get(part), is_now.get(part)
    raise UsageError(
        f"{where}: the unfinished run had {key} {_shown(was)}, and this one has "
        f"{_shown(is_now)}; give the same as then, or remove the folder"
    )


def _shown(value: object) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
