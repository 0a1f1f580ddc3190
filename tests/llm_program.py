"""A user's script, for tests that run it under torchrun: `python llm_program.py MODEL`."""

import sys

import msgspec

from parallel_llama import LLM, SamplingParams
from parallel_llama.errors import UsageError

PARAMS = SamplingParams(max_tokens=12, temperature=0.8, seed=3, logprobs=2)


def main() -> None:
    llm = LLM(sys.argv[1], dtype="float64")
    everywhere = [llm.generate(["Hello", [5, 6, 7]], PARAMS) for _ in range(2)]
    assert everywhere[0] == everywhere[1]
    # One write each: lines of several ranks do not mix.
    sys.stdout.write(f"{llm.rank} {msgspec.json.encode(everywhere[0]).decode()}\n")
    sys.stdout.flush()
    if llm.rank:
        llm.follow()
    else:
        for wrong in ([""], ["x" * 600], [[5, 999]]):
            try:
                llm.generate(wrong, PARAMS)
            except UsageError:
                continue
            raise AssertionError(f"{wrong} was accepted")
        pieces = llm.stream("Hello", PARAMS)
        next(pieces)
        pieces.close()
        assert llm.generate(["Hello", [5, 6, 7]], PARAMS) == everywhere[0]
    llm.close()


if __name__ == "__main__":
    main()
