"""Fuzzes a server, and checks that the answer to one repeated request never changes.

    python -m venv FUZZ && FUZZ/bin/pip install schemathesis==4.32.5
    PATH=$PATH:FUZZ/bin python -m launch.fuzz [--cases 10000] [--seed 1]

schemathesis generates valid and invalid requests from /openapi.json in three phases: fields at
their bounds (coverage), random bodies (fuzzing), and sequences of requests (stateful). It checks
that no reply is a 5xx, that replies match their schemas, and that invalid requests are refused. The
model is tiny and has random weights. One reported failure is expected: for a stream, schemathesis
compares the event, and not its data, with the schema (ST108).
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SUPPORT = Path(__file__).parents[1] / "tests/support"
PHASES = ("coverage", "fuzzing", "stateful")
# A body that matches the schema may be refused, for example if it exceeds the model's context.
EXCLUDED = "positive_data_acceptance"
CONFIG = """
[checks.negative_data_rejection]
expected-statuses = [400, 401, 403, 404, 405, 413, 415]
"""


def main() -> int:
    """Runs the phases; returns 1 if one failed, otherwise 0."""
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
                print(f"the repeated answer was equal {canary.n_answers} times", flush=True)
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
