"""From the text of a grammar to a matcher, within bounds of time and memory."""

import threading
from collections import OrderedDict
from functools import cached_property

from llguidance import LLMatcher, LLTokenizer

from parallel_llama.errors import UsageError
from parallel_llama.request import Grammar
from parallel_llama.structured import trial
from parallel_llama.structured.matcher import Matcher
from parallel_llama.structured.token_table import TokenTable
from parallel_llama.tokenizer import Tokenizer
from parallel_llama.tokenizer.bounded_process import BoundedProcess, OutOfTime, Request, Stopped

MAX_CACHED_GRAMMARS = 32
MAX_CACHED_CHARS = 512 << 10
# What llguidance says where a person could not tell from it what to do.
_REASONS = {
    "NoExtensionBias": "it matches no text",
    "oneOf constraints are not supported": "oneOf whose parts overlap is not supported; use anyOf",
}
_NAMES = {"json_schema": "JSON schema", "regex": "regular expression", "lark": "Lark grammar"}


class GrammarCompiler:
    """Makes matchers for one model and keeps the grammars that were compiled last.

    JSON comes out compact, without any whitespace between its tokens, whatever the schema says:
    whitespace that may go on for ever does so at a high temperature. A regular expression or Lark
    grammar matches the whole completion, in the syntax of llguidance, without look-around and back
    references. What llguidance does not know of JSON Schema is refused and never ignored, but for
    words that are no keyword of it. One fault of its own is known: under two bounds with the same
    whole part, an exclusive one that is whole can be drawn itself (7 where 7 < x < 7.5).

    A grammar that is not in the cache is first compiled in a process of its own, within
    `trial.CPU_LIMIT_S` of CPU time and `trial.MAX_EXTRA_BYTES` of memory, and then in this process.
    Threads may share a compiler.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: frozenset[int]) -> None:
        self._vocabulary = tokenizer, vocab_size, eos_ids
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()
        self._trial = BoundedProcess(trial.__file__, trial.MAX_EXTRA_BYTES)

    def matcher(
        self, grammar: Grammar, *, begins_text: bool = False, is_tried: bool = False
    ) -> Matcher:
        """A matcher at the start of a grammar.

        `begins_text` says that the prompt spells nothing, so that the completion loses a leading
        space where the tokenizer has it so. `is_tried` says that another process of this program
        has compiled the grammar within the limits already.

        Raises: UsageError for a grammar that is invalid, unsupported, or beyond the limits.
        """
        with self._lock:
            start = self._compiled.get(grammar)
        if start is None:
            start = self._compile(grammar, is_tried)
        with self._lock:
            self._keep(grammar, start)
            state = start.deep_copy()
        return Matcher(state, self._table, begins_text=begins_text)

    def is_compiled(self, grammar: Grammar) -> bool:
        """Whether a grammar is in the cache, so that a matcher costs nothing."""
        with self._lock:
            return grammar in self._compiled

    # Made for the first grammar: a model that is never given one starts sooner without.
    @cached_property
    def _table(self) -> TokenTable:
        return TokenTable(*self._vocabulary)

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        return self._table.to_llguidance()

    def _compile(self, grammar: Grammar, is_tried: bool) -> LLMatcher:
        problem = "" if is_tried else self._try(grammar)
        if not problem:
            try:
                return trial.compile_grammar(grammar.kind, grammar.text, self._tokenizer)
            except ValueError as error:
                problem = str(error)
        plain = (ours for theirs, ours in _REASONS.items() if problem.startswith(theirs))
        reason = next(plain, problem.removesuffix("<non-verbose/>").strip()[:400])
        raise UsageError(f"the {_NAMES[grammar.kind]} cannot be used: {reason}")

    def _try(self, grammar: Grammar) -> str:
        """Why a grammar cannot be compiled, as the process for that found out; "" where it can."""
        fields = {"kind": grammar.kind, "text": grammar.text}
        request = Request(trial.CPU_LIMIT_S, 0.0, fields)
        try:
            try:
                reply = self._trial.ask(request)
            except OutOfTime:
                raise
            except Stopped:  # in a new process, for grammars before this one may have taken memory
                reply = self._trial.ask(request)
        except OutOfTime:
            return f"compiling it takes more than {trial.CPU_LIMIT_S:g} s; simplify it"
        except Stopped:
            return (
                f"compiling it takes more than {trial.MAX_EXTRA_BYTES >> 20} MiB of memory, or "
                "ends the process that tries it; simplify it"
            )
        return str(reply["problem"])

    def _keep(self, grammar: Grammar, start: LLMatcher) -> None:
        self._compiled[grammar] = start
        self._compiled.move_to_end(grammar)
        n_chars = sum(len(each.text) for each in self._compiled)
        while len(self._compiled) > MAX_CACHED_GRAMMARS or n_chars > MAX_CACHED_CHARS:
            oldest, _ = self._compiled.popitem(last=False)
            n_chars -= len(oldest.text)
