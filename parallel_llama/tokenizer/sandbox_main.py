"""A script that processes untrusted input within limits: sandbox_main.py JOB MAX_EXTRA_BYTES.

JOB is the file of a module with a class Job. Neither file imports the package, so that the process
starts in 0.1 s. A request is two lines of JSON (its limits and its fields), then `n_bytes`
bytes of data; the reply is one line of JSON. The kernel enforces the limits: on memory, on written
files, and on CPU time by a timer whose signal kills the process whatever code it runs. The process
exits when its parent exits, because that closes stdin.
"""

import importlib
import json
import os
import resource
import signal
import sys
from contextlib import suppress
from pathlib import Path


def main(path: Path, max_extra_bytes: int) -> None:
    sys.path[0] = str(path.parent)
    job = importlib.import_module(path.stem).Job()
    _keep_priority()
    _limit_process(max_extra_bytes)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin.buffer:
        head = json.loads(line)
        fields = json.loads(sys.stdin.buffer.readline())
        data = sys.stdin.buffer.read(head["n_bytes"])
        signal.setitimer(signal.ITIMER_PROF, head["cpu_s"])
        reply = json.dumps(job.answer(fields, data))
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(reply, flush=True)


def _keep_priority() -> None:
    """Give this session the priority of the thread that started the process.

    Linux schedules a session as a group; a process's own priority counts only inside its group.
    Source: sched(7), "The autogroup feature".
    """
    if nice := os.getpriority(os.PRIO_PROCESS, 0):
        with suppress(OSError):  # a kernel without that feature
            Path("/proc/self/autogroup").write_text(str(nice))


def _limit_process(max_extra_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    try:
        n_pages = int(Path("/proc/self/statm").read_text().split()[0])
        bound = n_pages * resource.getpagesize() + max_extra_bytes
        resource.setrlimit(resource.RLIMIT_AS, (bound, bound))
    except (OSError, ValueError):
        pass  # not Linux: memory is not limited


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
