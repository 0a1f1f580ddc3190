"""`python -m parallel_llama` and the console script `parallel-llama`."""

import sys

from parallel_llama.cli.main import main


def entry() -> None:
    sys.exit(main(sys.argv[1:]))


if __name__ == "__main__":
    entry()
