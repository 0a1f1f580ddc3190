"""Compiles grammars: first in a separate process, as a job of `sandbox_main`, then in this one.

llguidance does not bound every cost of a grammar: the intersection of twenty patterns takes
minutes, which only killing the process can stop. So every grammar is first compiled in a process
that may be killed. This module imports nothing of the package, so that the process starts in 0.1 s.
"""

from collections.abc import Mapping

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

CPU_LIMIT_S = 1.0
MAX_EXTRA_BYTES = 256 << 20
# A lexer state takes 1 to 2 kB. The other numbers are llguidance's defaults, stated because the
# cost of a hostile grammar depends on them: with these limits a mask takes at most about 20 ms.
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
            # Overrides, because a schema may contain its own options under x-guidance. No optional
            # whitespace: at a high temperature it may never end.
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


class Job:
    """Compiles the grammar of each request; `problem` is why that failed, or ""."""

    def __init__(self) -> None:
        self.tokenizer = LLTokenizer("byte")

    def answer(self, request: Mapping[str, str], _: bytes) -> dict[str, str]:
        try:
            compile_grammar(request["kind"], request["text"], self.tokenizer)
        except ValueError as error:
            return {"problem": str(error)[:1000]}
        return {"problem": ""}
