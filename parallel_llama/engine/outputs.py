"""Turns drawn tokens into text and completions, and checks stop conditions.

Only rank 0 has text, grammars and stop conditions; the other ranks keep tokens and
log-probabilities.
"""

import logging
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace

from parallel_llama.engine.detokenizer import Detokenizer
from parallel_llama.engine.scheduler import ScheduledTokens, Sequence
from parallel_llama.errors import UsageError
from parallel_llama.request import Completion, FinishReason, Request, TokenLogprob
from parallel_llama.structured.compiler import GrammarCompiler, Matcher, MatchError
from parallel_llama.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# A sequence's state after a step, as rank 0 broadcasts it.
RUNNING, STOP, LENGTH, NO_TOKEN = 0, 1, 2, 3
REASONS: dict[int, FinishReason] = {STOP: "stop", LENGTH: "length", NO_TOKEN: "no_token"}


@dataclass(frozen=True)
class StepOutput:
    """The tokens and new text of one sequence in one step, and its completion if it ended.

    Only rank 0 has `text` and the completion's text. `logprobs` has one entry for each token if the
    request asks for log-probabilities. A sequence that is cancelled or times out ends without a
    token.
    """

    ticket: int
    index: int
    choice: int
    tokens: tuple[int, ...]
    text: str
    completion: Completion | None
    is_last: bool  # whether the request has no unfinished sequence
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(eq=False)
class SequenceOutput:
    """The output of one sequence so far."""

    ticket: int  # of its request
    sequence: Sequence
    matcher: Matcher | None  # on rank 0, for a grammar
    prompt_logprobs: list[TokenLogprob]  # one list for all choices of the request
    detokenizer: Detokenizer | None = None  # on rank 0, from the first token on
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def grammar_mask(self, vocab_size: int) -> bytes:
        """The mask of the tokens that the grammar allows next; empty after an error."""
        assert self.matcher is not None
        try:
            return self.matcher.mask()
        except MatchError:
            return bytes(-(-vocab_size // 8))

    def close(self) -> str:
        """The text that was held back, at the end of the sequence."""
        return self.detokenizer.close() if self.detokenizer else ""

    def step_output(
        self, ids: tuple[int, ...], text: str, completion: Completion | None
    ) -> StepOutput:
        """The output of a step. If the sequence ends, `Scheduler.finish` must be called first."""
        return StepOutput(
            ticket=self.ticket,
            index=self.sequence.request.index,
            choice=self.sequence.number,
            tokens=ids,
            text=text,
            completion=completion,
            is_last=not self.sequence.siblings,
            logprobs=tuple(self.logprobs[-len(ids) :]) if ids else (),
        )

    def completion(self, reason: FinishReason) -> Completion:
        sequence, request = self.sequence, self.sequence.request
        params, detokenizer = request.params, self.detokenizer
        return Completion(
            index=request.index,
            text=detokenizer.text if detokenizer else "",
            tokens=tuple(sequence.tokens[sequence.n_prompt :]),
            finish_reason=reason,
            n_prompt_tokens=sequence.n_prompt,
            logprobs=tuple(self.logprobs) if params.logprobs is not None else None,
            choice=sequence.number,
            n_choices=params.n,
            prompt_logprobs=(
                None if params.prompt_logprobs is None else (None, *self.prompt_logprobs)
            ),
            seed=None if params.is_greedy else request.seed,
            n_cached_tokens=sequence.n_found or 0,
            stop_reason=detokenizer.stop_reason if detokenizer and reason == "stop" else None,
        )


class OutputProcessor:
    """Turns the tokens of sequences into text, and decides when sequences end.

    Args:
        tokenizer, grammars: None on ranks above 0, and for a model without a tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer | None, grammars: GrammarCompiler | None) -> None:
        self._tokenizer, self._grammars = tokenizer, grammars

    def matchers(self, request: Request, *, is_checked: bool = False) -> list[Matcher]:
        """A matcher of the request's grammar for each choice.

        Args:
            is_checked: whether the grammar was compiled before.

        Raises: UsageError if the grammar cannot be used, or the model has no tokenizer.
        """
        assert request.params.grammar is not None
        if self._grammars is None or self._tokenizer is None:
            raise UsageError("a grammar needs a tokenizer and this model has none")
        vocabulary = self._tokenizer.vocabulary
        begins_text = not any(vocabulary.piece(token) for token in request.prompt)
        matcher = self._grammars.matcher(
            request.params.grammar, begins_text=begins_text, is_checked=is_checked
        )
        return [matcher, *(matcher.copy() for _ in range(request.params.n - 1))]

    def replay(self, output: SequenceOutput) -> None:
        """Advance the text and grammar of a new output over the drawn tokens of its sequence."""
        sequence = output.sequence
        drawn = sequence.tokens[sequence.n_prompt :]
        if drawn:
            output.detokenizer = Detokenizer(sequence.request, self._tokenizer)
        for token in drawn:
            assert output.detokenizer is not None
            output.detokenizer.push(token, is_last=False)
            if output.matcher is not None:
                output.matcher.accept(token)

    def with_texts(self, scored: TokenLogprob) -> TokenLogprob:
        """Adds the texts of the tokens, on rank 0."""
        if self._tokenizer is None:
            return scored
        vocabulary = self._tokenizer.vocabulary
        text, *top_texts = (
            vocabulary.piece(token, skip_special=False).decode("utf-8", "replace")
            for token in (scored.token, *(token for token, _ in scored.top))
        )
        return replace(scored, text=text, top_texts=tuple(top_texts))

    def check_stop(
        self, output: SequenceOutput, item: ScheduledTokens, drawn: Items[int]
    ) -> tuple[list[int], str, int]:
        """Decide how many of the drawn tokens a sequence keeps, and whether it ends with them.

        Returns: the tokens that are kept, the text that may be shown now, and RUNNING or why the
            sequence ends.
        """
        detokenizer = output.detokenizer = output.detokenizer or Detokenizer(
            item.request, self._tokenizer
        )
        ids: list[int] = []
        text = ""
        if not drawn:
            return ids, detokenizer.close(), NO_TOKEN
        matcher = output.matcher
        for token, draft in zip(drawn, (*item.drafts, None), strict=False):
            ids.append(token)
            is_last = item.sequence.n_drawn + len(ids) == item.request.max_tokens
            if matcher is not None:
                try:
                    matcher.accept(token)
                except MatchError:  # the grammar exceeds a limit
                    return ids[:-1], text + detokenizer.close(), NO_TOKEN
                if matcher.is_finished:
                    _warn_if_early(item.request, item.sequence.n_drawn + len(ids))
                    is_last = True
            piece, stopped = detokenizer.push(token, is_last)
            text += piece
            if stopped or is_last:
                stopped |= matcher is not None and matcher.is_finished
                return ids, text, STOP if stopped else LENGTH
            if token != draft:
                break
        return ids, text, RUNNING


def _warn_if_early(request: Request, n_drawn: int) -> None:
    if n_drawn < request.params.min_tokens:
        logger.warning(
            "request %d: its grammar ends the completion after %d tokens, before min_tokens=%d",
            request.index,
            n_drawn,
            request.params.min_tokens,
        )
