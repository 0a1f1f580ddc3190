"""How a grammar is compiled, here and first of all in a process of its own, as a job of `worker`.

llguidance bounds most of what a grammar can cost, but not all: the intersection of twenty patterns
takes minutes, and nothing stops it but the end of the process that it runs in. So that process is
not the model's. It imports nothing of this package, so that it starts in a tenth of a second.
"""

from collections.abc import Mapping

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


class Job:
    """Tries the grammar of a request; `problem` is why it cannot be compiled, "" where it can."""

    def __init__(self) -> None:
        self.tokenizer = LLTokenizer("byte")

    def answer(self, request: Mapping[str, str], _: bytes) -> dict[str, str]:
        try:
            compile_grammar(request["kind"], request["text"], self.tokenizer)
        except ValueError as error:
            return {"problem": str(error)[:1000]}
        return {"problem": ""}
