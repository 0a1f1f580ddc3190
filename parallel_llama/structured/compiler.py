"""Compiles grammars within bounds of time and memory; a matcher follows one completion."""

import re
import threading
from collections import OrderedDict
from functools import cached_property

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from parallel_llama.errors import UsageError
from parallel_llama.request import Grammar
from parallel_llama.structured import grammar_check
from parallel_llama.structured.token_table import TokenTable
from parallel_llama.tokenizer import Tokenizer
from parallel_llama.tokenizer.bounded_process import BoundedProcess, JobRequest, OutOfTime, Stopped


class MatchError(RuntimeError):
    """The grammar exceeded a limit, or no token continues the completion."""


class Matcher:
    """Says which tokens may follow the tokens accepted so far.

    Not thread-safe; each choice of a request uses its own `copy`.
    """

    def __init__(self, state: LLMatcher, table: TokenTable, *, begins_text: bool) -> None:
        self._state, self._table = state, table
        self._at_start = begins_text

    @property
    def is_finished(self) -> bool:
        """Whether the completion can only end; also true after an eos id."""
        return self._state.is_stopped()

    def mask(self) -> bytes:
        """The allowed tokens: bit t % 8 of byte t // 8 for token t, ceil(vocab_size / 8) bytes.

        The eos ids are allowed exactly where the text may end. For a model without eos ids,
        `is_finished` is the only end.

        Raises: MatchError if no token is allowed and the text may not end.
        """
        table = self._table
        # llguidance's bitmask is longer than the vocabulary: end_id's bit and padding follow.
        bits = np.frombuffer(self._state.compute_bitmask(), dtype=np.uint8)
        allowed = bits[: len(table.text_bits)] & table.text_bits
        if self._at_start:
            # At the start of a text, tokens of `opening_bits` decode without their leading space,
            # so their text is not what the grammar matched.
            allowed &= ~table.opening_bits
        if self._state.is_error():
            raise self._failure()
        if self._state.is_accepting():
            allowed |= table.eos_bits
        elif not allowed.any():
            raise MatchError("the grammar allows no token of the vocabulary as the next token")
        return allowed.tobytes()

    def accept(self, token: int) -> None:
        """Advances past a token.

        Raises: MatchError for a token that the mask does not allow.
        """
        id = self._table.end_id if token in self._table.eos_ids else token
        if not self._state.consume_token(id):
            raise self._failure()
        self._at_start = False

    def copy(self) -> "Matcher":
        """An independent matcher at the same position."""
        return Matcher(self._state.deep_copy(), self._table, begins_text=self._at_start)

    def _failure(self) -> MatchError:
        return MatchError(f"the completion cannot follow its grammar: {self._state.get_error()}")


MAX_CACHED_GRAMMARS = 32
MAX_CACHED_CHARS = 512 << 10
# Messages of llguidance that do not say what to change, by their beginning.
_REASONS = {
    "NoExtensionBias": "it matches no text",
    "oneOf constraints are not supported": (
        "oneOf with overlapping parts is not supported; use anyOf"
    ),
}
# llguidance wraps a regular expression in a Lark grammar; its messages quote that grammar.
_IN_LARK = re.compile(r"\Aat \d+\(\d+\): .*?(?=regex parse error:)|\n +\d+ \| start: .*", re.DOTALL)
# A JSON schema inside a Lark grammar, such as the parameters of a function. The message quotes the
# grammar, which the server may have written.
_SCHEMA_IN_LARK = re.compile(
    r"\Aat \d+\(\d+\): failed to compile JSON schema: (.*?)(?:\n +\d+ \| .*)?\Z", re.DOTALL
)
_POSITION = re.compile(r"\A(?:at )?(\d+)\((\d+)\): ")
_NAMES = {"json_schema": "JSON schema", "regex": "regular expression", "lark": "Lark grammar"}


class GrammarCompiler:
    """Makes matchers for one model, and caches the most recently used grammars. Thread-safe.

    JSON is generated without whitespace between its tokens, whatever the schema says, because
    optional whitespace may never end at a high temperature. A regular expression or Lark grammar
    matches the whole completion; its syntax is llguidance's, without look-around and back
    references. JSON Schema keywords that llguidance does not support are refused, never ignored. A
    known fault of llguidance: between two bounds with the same integer part, an exclusive integer
    bound can itself be generated (7 for 7 < x < 7.5).

    A grammar that is not cached is first compiled in a separate process, which is limited to
    `grammar_check.CPU_LIMIT_S` of CPU time and `grammar_check.MAX_EXTRA_BYTES` of memory, and then
    in this one.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: frozenset[int]) -> None:
        self._vocabulary = tokenizer, vocab_size, eos_ids
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()
        self._checker = BoundedProcess(grammar_check.__file__, grammar_check.MAX_EXTRA_BYTES)

    def close(self) -> None:
        """Ends the process that checks grammars; the next grammar starts it again."""
        self._checker.close()

    def matcher(
        self, grammar: Grammar, *, begins_text: bool = False, is_checked: bool = False
    ) -> Matcher:
        """A matcher at the start of a grammar.

        Args:
            begins_text: whether no text precedes the completion, so that some tokenizers drop its
                leading space.
            is_checked: whether another process of this server has compiled the grammar within the
                limits.

        Raises: UsageError for a grammar that is invalid, unsupported, or beyond the limits.
        """
        with self._lock:
            start = self._compiled.get(grammar)
        if start is None:
            start = self._compile(grammar, is_checked)
        with self._lock:
            self._keep(grammar, start)
            state = start.deep_copy()
        return Matcher(state, self._table, begins_text=begins_text)

    def is_compiled(self, grammar: Grammar) -> bool:
        """Whether the grammar is cached, so that `matcher` does not compile."""
        with self._lock:
            return grammar in self._compiled

    # Built for the first grammar, so that loading a model does not wait for it.
    @cached_property
    def _table(self) -> TokenTable:
        return TokenTable(*self._vocabulary)

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        return self._table.to_llguidance()

    def _compile(self, grammar: Grammar, is_checked: bool) -> LLMatcher:
        problem = "" if is_checked else self._check(grammar)
        if not problem:
            try:
                return grammar_check.compile_grammar(grammar.kind, grammar.text, self._tokenizer)
            except ValueError as error:
                problem = str(error)
        name = _NAMES[grammar.kind]
        if grammar.kind == "regex":
            problem = _IN_LARK.sub("", problem)
        elif (in_lark := _SCHEMA_IN_LARK.match(problem)) is not None:
            name, problem = _NAMES["json_schema"], in_lark[1]
        plain = (reason for start, reason in _REASONS.items() if problem.startswith(start))
        problem = _POSITION.sub(r"line \1, column \2: ", problem, count=1)
        reason = next(plain, problem.removesuffix("<non-verbose/>").strip()[:400])
        raise UsageError(f"the {name} cannot be used: {reason}")

    def _check(self, grammar: Grammar) -> str:
        """Compiles a grammar in the separate process. Returns: why that failed, or ""."""
        fields = {"kind": grammar.kind, "text": grammar.text}
        request = JobRequest(grammar_check.CPU_LIMIT_S, 0.0, fields)
        for _ in range(2):
            try:
                return str(self._checker.ask(request)["problem"])
            except OutOfTime:
                return f"compiling it takes more than {grammar_check.CPU_LIMIT_S:g} s; simplify it"
            except Stopped:  # earlier grammars may have used the memory, so try a new process
                continue
        return (
            f"compiling it takes more than {grammar_check.MAX_EXTRA_BYTES >> 20} MiB of memory, or "
            "crashes the process that checks it; simplify it"
        )

    def _keep(self, grammar: Grammar, start: LLMatcher) -> None:
        self._compiled[grammar] = start
        self._compiled.move_to_end(grammar)
        n_chars = sum(len(cached.text) for cached in self._compiled)
        while len(self._compiled) > MAX_CACHED_GRAMMARS or n_chars > MAX_CACHED_CHARS:
            oldest, _ = self._compiled.popitem(last=False)
            n_chars -= len(oldest.text)
