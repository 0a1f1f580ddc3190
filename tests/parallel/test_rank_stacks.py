"""The stacks in the report of a failure."""

import os
from pathlib import Path

from parallel_llama.parallel import rank_stacks
from parallel_llama.parallel.rank_stacks import StackFile, gather_stacks

PACKAGE = Path(rank_stacks.__file__).parents[1]
PATHLIB = "".join(f'  File "/lib/pathlib.py", line {line} in parse\n' for line in range(6))
REPORTING = f"""Current thread 0x1 (most recent call first):
{PATHLIB}  File "{rank_stacks.__file__}", line 9 in call_site
  File "/package/shared_memory.py", line 8 in _failed
  File "/package/shared_memory.py", line 7 in barrier
  File "{PACKAGE}/engine/runner.py", line 6 in run
"""


class WrittenStacks(StackFile):
    """The stack file of a rank that is looking up its own call site when the signal arrives."""

    def request_dump(self) -> bool:
        return os.write(self.fd, REPORTING.encode()) > 0


def test_frames_of_reporting_code_do_not_hide_the_collective(tmp_path):
    """Regression: six `pathlib` frames came before the collective; a report shows eight frames."""
    file = WrittenStacks(os.getpid(), os.memfd_create("stacks"))
    lines = gather_stacks({1: file}, [1], str(tmp_path))
    os.close(file.fd)
    assert "in barrier" in lines and "pathlib" not in lines
