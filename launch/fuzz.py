"""Thousands of generated requests at a server, beside one whose answer must stay the same.

    python -m venv FUZZ && FUZZ/bin/pip install schemathesis==4.32.5
    PATH=$PATH:FUZZ/bin python -m launch.fuzz [--cases 10000] [--seed 1]

schemathesis makes them from /openapi.json, good ones and bad ones, phase by phase: each field at
its bounds (coverage), random bodies (fuzzing), and one request after another (stateful). No reply
may be a 5xx, each has the form that the document gives it, and what the document forbids is
refused. The model is a tiny one of random weights. One failure is none: for a stream, schemathesis
holds the event itself, and not its data, to the document (ST108).
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SUPPORT = Path(__file__).parents[1] / "tests/support"
PHASES = ("coverage", "fuzzing", "stateful")
# A body can be as the document says and still be refused, such as one beyond the model's context.
EXCLUDED = "positive_data_acceptance"
CONFIG = """
[checks.negative_data_rejection]
expected-statuses = [400, 401, 403, 404, 405, 413, 415]
"""


def main() -> int:
    """1 where a phase failed, 0 otherwise."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--cases", type=int, default=500, help="for each operation and phase")
    parser.add_argument("--seed", type=int, default=1)
    flags = parser.parse_args()

    sys.path.insert(0, str(SUPPORT))
    from canary import Canary
    from served import Served
    from tiny_folder import write_chat_folder

    n_failed = 0
    with tempfile.TemporaryDirectory() as name:
        folder = write_chat_folder(Path(name))
        config = folder / "schemathesis.toml"
        config.write_text(CONFIG)
        with Served(f"--model={folder}") as served, Canary(served) as canary:
            for phase in PHASES:
                started = time.monotonic()
                done = subprocess.run(command(served.url, phase, flags, config))
                n_failed += done.returncode != 0
                canary.check()
                took_s = time.monotonic() - started
                print(f"{phase}: exit code {done.returncode} after {took_s:.0f} s", flush=True)
                print(f"the other answer is what it was, {canary.n_answers} times", flush=True)
            print("the server said:", *served.lines, sep="\n  ")
    return min(1, n_failed)


def command(url: str, phase: str, flags: argparse.Namespace, config: Path) -> list[str]:
    return [
        "schemathesis", f"--config-file={config}", "run", f"{url}/openapi.json",
        f"--phases={phase}", "--checks=all",
        f"--exclude-checks={EXCLUDED}", f"--max-examples={flags.cases}", "--continue-on-failure",
        "--suppress-health-check=all", "--request-timeout=60", "--no-shrink", "--warnings=off",
        "--generation-database=none", f"--seed={flags.seed}",
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
