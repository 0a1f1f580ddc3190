"""How a grammar is compiled, and the process that tries it first, started as a script.

llguidance bounds most of what a grammar can cost, but not all: the intersection of twenty patterns
takes minutes, and nothing stops it but the end of the process that it runs in. So that process is
not the model's. It imports nothing of this package, so that it starts in a tenth of a second.
"""

import json
import resource
import signal
import sys
from pathlib import Path

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

CPU_LIMIT_S = 1.0
MAX_EXTRA_BYTES = 256 << 20
# A state takes 1 to 2 kB; the others are llguidance's own numbers, kept by name because what a
# hostile grammar can cost hangs on them. A mask costs at most about 20 ms within them.
LIMITS = LLParserLimits(
    max_items_in_row=2_000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=20_000,
    max_grammar_size=500_000,
    verbose_errors=False,
)


def compile_grammar(kind: str, text: str, tokenizer: LLTokenizer) -> LLMatcher:
    """A matcher at the start of a grammar, with its first mask computed.

    Raises: ValueError with llguidance's reason.
    """
    match kind:
        case "json_schema":
            # As overrides, because a schema may carry options of its own under x-guidance.
            # Whitespace that may go on for ever does so at a high temperature, hence none at all.
            source = LLMatcher.grammar_from_json_schema(
                text,
                overrides={
                    "whitespace_flexible": False,
                    "whitespace_pattern": None,
                    "item_separator": ",",
                    "key_separator": ":",
                    "coerce_one_of": False,
                    "lenient": False,
                },
            )
        case "regex":
            source = LLMatcher.grammar_from_regex(text)
        case _:
            source = LLMatcher.grammar_from_lark(text)
    matcher = LLMatcher(tokenizer, source, log_level=0, limits=LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        raise ValueError(matcher.get_error())
    return matcher


def _limit_process() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    try:
        n_pages = int(Path("/proc/self/statm").read_text().split()[0])
        bound = n_pages * resource.getpagesize() + MAX_EXTRA_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (bound, bound))
    except (OSError, ValueError):
        pass  # not Linux: time is bounded there, memory is not
    # CPU time, so that a busy machine refuses nothing; the signal ends the process in any code.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, CPU_LIMIT_S)


def main() -> None:
    grammar = json.load(sys.stdin)
    tokenizer = LLTokenizer("byte")
    _limit_process()
    try:
        compile_grammar(grammar["kind"], grammar["text"], tokenizer)
        problem = ""
    except ValueError as error:
        problem = str(error)
    json.dump({"problem": problem[:1000]}, sys.stdout)


if __name__ == "__main__":
    main()
