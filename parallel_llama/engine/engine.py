"""The generation loop that every rank runs: many requests share one model and one KV cache.

Every rank runs the same scheduler over the same requests. Rank 0 alone hears of requests, turns
tokens into text and decides when a completion ends; its messages, ids and decisions are broadcast,
so no rank can go another way. It does not know files, flags or terminals.

A step: message -> schedule -> forward -> sample -> decide -> commit.
"""

import logging
import struct
import time
import weakref
from collections import abc, deque
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from parallel_llama.engine.block_pool import BlockPool
from parallel_llama.engine.chunk import Chunk
from parallel_llama.engine.detokenizer import Detokenizer
from parallel_llama.engine.draws import draw_each, draws_of, noise_of
from parallel_llama.engine.kv_capacity import Capacity
from parallel_llama.engine.messages import MAX_SIZE, StepMessage, decode_message, size_of
from parallel_llama.engine.model_runner import ModelRunner
from parallel_llama.engine.prompt_lookup import PromptLookup
from parallel_llama.engine.scheduler import ScheduledTokens, Scheduler, Sequence
from parallel_llama.engine.statistics import EngineStatistics, StepTimes
from parallel_llama.engine.step_buffer import RowNoise
from parallel_llama.engine.step_clock import StepClock, tick_of
from parallel_llama.errors import DISAGREE, NumericalError, UsageError
from parallel_llama.model.decode_program import Logits
from parallel_llama.model.rope import base_len
from parallel_llama.parallel.collectives import broadcast_bytes
from parallel_llama.request import Completion, FinishReason, Request, TokenLogprob
from parallel_llama.sampling import (
    Draw,
    History,
    PendingDraws,
    Sampled,
    both,
    can_pend,
    mask_of,
    score_tokens,
)
from parallel_llama.structured import GrammarCompiler, Matcher, MatchError
from parallel_llama.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

BLOCK_SIZE = 16

# Guesses at what follows: of one sequence, and rows of all that decode; beyond them a step takes
# longer by more than guesses bring.
MAX_DRAFTS, _MAX_ROWS = 8, 16

# Prompt positions whose logits exist at once.
SCORE_ROWS = 128

_RUNNING, _STOP, _LENGTH, _NO_TOKEN = 0, 1, 2, 3
_REASONS: dict[int, FinishReason] = {_STOP: "stop", _LENGTH: "length", _NO_TOKEN: "no_token"}


@dataclass(frozen=True)
class StepOutput:
    """What one step gave one sequence of one request: tokens, text to show, perhaps its end.

    `text` and the completion's text are filled on rank 0 alone; `logprobs` has one for each token
    where the request asks for them. A sequence that was ended from outside ends without a token.
    """

    ticket: int
    index: int
    choice: int
    tokens: tuple[int, ...]
    text: str
    completion: Completion | None
    is_last: bool  # whether the request has no sequence left
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(eq=False)
class _SequenceState:
    """What is known of a sequence beside its tokens; detokenizer and matcher on rank 0 alone."""

    ticket: int  # of its request
    sequence: Sequence
    allowed: bytes | None  # the mask of the request's allowed_token_ids
    history: History | None  # for penalties
    matcher: Matcher | None
    prompt_logprobs: list[TokenLogprob]  # the request's: one list for all its choices
    has_begun: bool = False  # whether a step has had any of its tokens
    lookup: PromptLookup = field(default_factory=PromptLookup)
    detokenizer: Detokenizer | None = None  # from the first token on: those who wait need none
    logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def request(self) -> Request:
        return self.sequence.request


class Engine:
    """Requests on their way to completion, on one rank.

    All ranks build it alike and call `step` equally often; `submit`, `cancel` and `send` are for
    rank 0. As many requests run as the cache holds, those with short prompts first; a long prompt
    goes in chunks, mixed with the others' decode steps.

    Collective: the constructor and `step`.
    """

    def __init__(
        self,
        runner: ModelRunner,
        capacity: Capacity,
        tokenizer: Tokenizer | None = None,
        grammars: GrammarCompiler | None = None,
        *,
        step_tokens: int | None = None,
        max_drafts: int = MAX_DRAFTS,
    ) -> None:
        self.runner, self.comm, self.capacity = runner, runner.comm, capacity
        self.step_tokens = step_tokens or capacity.step_tokens
        self.max_drafts = max_drafts
        self.call = b""
        self.begun: list[int] = []  # tickets that the last step was the first of
        self.times = StepTimes()
        self._clock = StepClock(self.times, tick_of(runner.device))
        self._tokenizer, self._grammars = tokenizer, grammars
        self._n_tickets = 0
        self._ahead: _Ahead | None = None
        runner.reserve(capacity.n_blocks, capacity.block_size)
        self._reset()

    @property
    def idle(self) -> bool:
        """Whether no request is here; on rank 0 none has been submitted either."""
        return self.scheduler.idle and not self._incoming

    def statistics(self) -> EngineStatistics:
        """How busy it is; to another thread, numbers may stem from two neighbouring steps."""
        return EngineStatistics(
            n_running=len(self.scheduler.running),
            n_waiting=len(self.scheduler.waiting),
            n_blocks_used=sum(pool.n_used for pool in self.pools),
            n_blocks_cached=sum(pool.n_cached for pool in self.pools),
            n_blocks_free=sum(pool.n_free for pool in self.pools),
            n_prompt_tokens=self.scheduler.n_prompt_tokens,
            n_prefix_tokens=self.scheduler.n_prefix_tokens,
            n_preempted=self.scheduler.n_preempted,
            times=replace(self.times),
        )

    def check(self, request: Request) -> None:
        """Raises: UsageError if a request can never fit into the cache."""
        self.scheduler.check_fits(request)

    def submit(self, request: Request, timeout_s: float | None = None) -> int:
        """Take in a request, which begins at one of the next steps; its ticket.

        A request that takes longer than `timeout_s` ends with what it has.

        Raises: UsageError if it can never fit into the cache, or its grammar cannot be used.
        """
        self.check(request)
        ticket = self._n_tickets
        if request.params.grammar is not None:
            self._matchers[ticket] = self._new_matchers(request)
        if timeout_s is not None:
            self._deadlines[ticket] = time.monotonic() + timeout_s
        self._n_tickets += 1
        self._incoming.append((ticket, request))
        return ticket

    def cancel(self, ticket: int, reason: FinishReason = "cancelled") -> None:
        """End a request at the next step; one that has ended already stays as it is."""
        self._outgoing.append((ticket, reason))

    def send(self, call: bytes) -> None:
        """Give the other ranks something else to do, which they find in `call` after `step`.

        Collective: like `step`, for which the others take it.
        """
        broadcast_bytes(self.comm, StepMessage(call=call).encode(), no_timeout=True)

    def step(self) -> list[StepOutput]:
        """Run one forward pass and give every sequence that is through its prompt a token or more.

        Ranks above 0 wait for rank 0 to call it without a limit of time. What it has sent them to
        do instead is in `call` then, which is empty after a step.

        Collective: a broadcast of a message; where something runs, those of a forward pass, one
        head exchange and one broadcast; two broadcasts more for grammars, and a barrier where
        there are no numbers.

        Raises: NumericalError, on all ranks, if a forward pass gave no numbers; every request that
        was here is gone then.
        """
        try:
            self._clock.begin()
            outputs = self._step()
            self._clock.end()
            return outputs
        except BaseException as error:
            # Other ranks meet a NumericalError alike; after anything else nobody knows where
            # they are, but for a rank alone that was interrupted.
            if isinstance(error, NumericalError):
                # A card that has given up a lost rank has no numbers either, and here it is told.
                self.comm.barrier()
            if isinstance(error, NumericalError) or self.comm.size == 1:
                self._reset()
            raise

    def _step(self) -> list[StepOutput]:
        own = self._new_message().encode() if self.comm.rank == 0 else None
        message = decode_message(broadcast_bytes(self.comm, own, no_timeout=True))
        self.call = message.call
        outputs = self._carry_out(message)
        self.begun = []
        self._clock.lap("messages_s")
        ahead, self._ahead = self._ahead, None
        scheduled: list[ScheduledTokens] = []
        if not self.call:
            # Of a step that is launched already, those who are still here.
            scheduled = self.scheduler.schedule_again(ahead.sequences) if ahead else []
            ahead = ahead if scheduled else None
            scheduled = scheduled or self.scheduler.schedule()
        self._clock.lap("schedule_s")
        return outputs + self._run(scheduled, ahead) if scheduled else outputs

    def _run(
        self, scheduled: abc.Sequence[ScheduledTokens], ahead: "_Ahead | None"
    ) -> list[StepOutput]:
        for state in (self._states[item.sequence] for item in scheduled):
            if not state.has_begun and state.sequence.number == 0:
                self.begun.append(state.ticket)
            state.has_begun = True
        drawing, scoring = self._wanted_rows(scheduled)
        if ahead is None:
            chunks = [_chunk(item, item.start, item.tokens) for item in scheduled]
            noise = self._noise_of(item for item in scheduled if item.draws)
            others = [row for _, row, _ in scoring]
            logits, hidden = self.runner.step(chunks, drawing, others, noise)
        else:
            logits = ahead.of(scheduled)
            hidden = logits.values[:0]
        self._clock.lap("forward_s")
        items = [item for item in scheduled if item.draws]
        drawn = self._sample(items, logits) if items else []
        self._score_prompts(scoring, hidden)
        self._clock.lap("sample_s")
        for item in scheduled:
            if not item.draws:
                self.scheduler.commit(item, ())
        outputs = self._decide(items, drawn)
        self._clock.lap("decide_s")
        self.times.n_steps += 1
        return outputs

    def _reset(self) -> None:
        """Begin without requests and with an empty cache: what it held may be worth nothing."""
        block_size = self.capacity.block_size
        self.pools = [BlockPool(n_blocks, block_size) for n_blocks in self.capacity.n_blocks]
        # In a cycle, weights and cache would outlive whoever uses them last.
        engine = weakref.proxy(self)
        self.scheduler = Scheduler(
            self.pools,
            self.capacity.windows,
            self.capacity.n_sinks,
            step_tokens=self.step_tokens,
            context=lambda request: engine._context(request),
            draft=lambda sequence, most: engine._draft(sequence, most),
        )
        self._ahead = None
        self._states: dict[Sequence, _SequenceState] = {}
        self._unfinished: dict[int, list[Sequence]] = {}  # by ticket; the scheduler's own lists
        # Rank 0's alone: what the others have not heard of, and when requests are late.
        self._incoming: deque[tuple[int, Request]] = deque()
        self._outgoing: list[tuple[int, FinishReason]] = []
        self._matchers: dict[int, list[Matcher]] = {}
        self._deadlines: dict[int, float] = {}

    # What rank 0 tells all ranks

    def _new_message(self) -> StepMessage:
        if self._deadlines:
            now = time.monotonic()
            for ticket in [ticket for ticket, when in self._deadlines.items() if when <= now]:
                del self._deadlines[ticket]
                self._outgoing.append((ticket, "timeout"))
        begin: list[tuple[int, Request]] = []
        size = 0
        while self._incoming and size < MAX_SIZE:
            begin.append(self._incoming.popleft())
            size += size_of(begin[-1][1])
        # A request is ended once the others have heard of it.
        unheard = {ticket for ticket, _ in self._incoming} if self._outgoing else set()
        end = tuple(each for each in self._outgoing if each[0] not in unheard)
        self._outgoing = [each for each in self._outgoing if each[0] in unheard]
        return StepMessage(tuple(begin), end)

    def _carry_out(self, message: StepMessage) -> list[StepOutput]:
        for ticket, request in message.begin:
            self._begin(ticket, request)
        outputs = []
        for ticket, reason in message.end:
            for sequence in list(self._unfinished.get(ticket, ())):
                state = self._states[sequence]
                tail = state.detokenizer.close() if state.detokenizer else ""
                outputs.append(self._output(state, (), tail, reason))
        return outputs

    def _begin(self, ticket: int, request: Request) -> None:
        params = request.params
        allowed = None if params.allowed_token_ids is None else mask_of(params.allowed_token_ids)
        matchers = self._matchers.pop(ticket, [])
        prompt_logprobs: list[TokenLogprob] = []
        for sequence in self.scheduler.add(request):
            self._unfinished[ticket] = sequence.siblings
            self._states[sequence] = _SequenceState(
                ticket,
                sequence,
                allowed,
                History(request.prompt) if params.has_penalties else None,
                matchers[sequence.number] if matchers else None,
                prompt_logprobs,
            )

    def _new_matchers(self, request: Request) -> list[Matcher]:
        assert request.params.grammar is not None
        if self._grammars is None or self._tokenizer is None:
            raise UsageError("a grammar needs a tokenizer and this model has none")
        vocabulary = self._tokenizer.vocabulary
        begins_text = not any(vocabulary.piece(token) for token in request.prompt)
        first = self._grammars.matcher(request.params.grammar, begins_text=begins_text)
        return [first, *(first.copy() for _ in range(request.params.n - 1))]

    # The scheduler's questions

    def _context(self, request: Request) -> bytes:
        """What shapes keys and values beside the tokens before them."""
        salt = (request.params.cache_salt or "").encode()
        return struct.pack("<q", base_len(self.runner.args, len(request.prompt))) + salt

    def _draft(self, sequence: Sequence, most: int) -> abc.Sequence[int]:
        """Guesses at the next tokens: none where a grammar has to see each token first."""
        if sequence.request.params.grammar is not None:
            return ()
        most = min(most, self._most_drafts())
        return self._states[sequence].lookup.draft(sequence.tokens, most) if most > 0 else ()

    def _most_drafts(self) -> int:
        """How many tokens are guessed of each sequence at the most; none for 0 and below."""
        return min(self.max_drafts, _MAX_ROWS // len(self.scheduler.running) - 1)

    # The step

    def _wanted_rows(
        self, scheduled: abc.Sequence[ScheduledTokens]
    ) -> tuple[list[int], list[tuple[_SequenceState, int, int]]]:
        """The rows from which tokens are drawn, and those whose successor in the prompt is scored.

        Returns: for the second the state of the request's first sequence, the row, and that
        successor, which has no score yet.
        """
        drawing: list[int] = []
        scoring = []
        first = 0
        for item in scheduled:
            after = first + len(item.tokens)
            if item.draws:
                drawing += range(after - 1 - item.n_drafts, after)
            state, prompt = self._states[item.sequence], item.request.prompt
            if item.request.params.prompt_logprobs is not None and item.sequence.number == 0:
                stop = min(item.start + len(item.tokens), len(prompt) - 1)
                for at in range(max(item.start, len(state.prompt_logprobs)), stop):
                    scoring.append((state, first + at - item.start, prompt[at + 1]))
            first = after
        return drawing, scoring

    def _score_prompts(
        self, wanted: abc.Sequence[tuple[_SequenceState, int, int]], hidden: Tensor
    ) -> None:
        for start in range(0, len(wanted), SCORE_ROWS):
            part = wanted[start : start + SCORE_ROWS]
            scored = score_tokens(
                self.runner.logits(hidden[start : start + len(part)]),
                self.runner.share.vocab,
                torch.tensor([target for _, _, target in part], device=hidden.device),
                [state.request.params.prompt_logprobs or 0 for state, _, _ in part],
                self.comm,
            )
            for (state, _, _), one in zip(part, scored, strict=True):
                state.prompt_logprobs.append(self._spelled(one))

    def _sample(
        self, drawing: abc.Sequence[ScheduledTokens], logits: Logits
    ) -> list[list[Sampled]]:
        """The draws of each sequence: one for its last token and one for each draft.

        Fewer where a draw has no token to take. Where the device knows the tokens by itself, the
        next step is launched before they are read.
        """
        masks = self._exchange_masks(drawing)
        draws = []
        for item in drawing:
            state = self._states[item.sequence]
            mask = both(masks.get(item.sequence), state.allowed)
            draws.append(draws_of(item, state.history, mask))
        flat = [draw for own in draws for draw in own]
        if logits.drawn is not None and self._may_look_ahead(flat):
            return [[drawn] for drawn in self._read_ahead(drawing, flat, logits, logits.drawn)]
        is_greedy = all(draw.params.is_greedy for draw in flat)
        best = logits.largest if logits.drawn is None and is_greedy else logits.drawn
        return draw_each(logits.values, self.runner.share.vocab, draws, self.comm, best)

    def _read_ahead(
        self,
        drawing: abc.Sequence[ScheduledTokens],
        draws: abc.Sequence[Draw],
        logits: Logits,
        drawn: Tensor,
    ) -> list[Sampled]:
        """What is drawn, read once the next step is launched."""
        vocab, vocab_size = self.runner.share.vocab, self.runner.args.vocab_size
        ops = self.runner.model.ops
        pending = PendingDraws(logits.values, drawn, vocab, vocab_size, draws, self.comm, ops)
        if self.scheduler.look_ahead():
            self._clock.lap("sample_s")
            self._ahead = self._launch(drawing, pending.tokens)
            self._clock.lap("forward_s")  # of the next step, which is this one's on the device
        found, were_known = pending.read()
        if not were_known:
            self._ahead = None  # it went on from no token, and is taken again
        return found

    def _may_look_ahead(self, draws: abc.Sequence[Draw]) -> bool:
        """Whether the next step's tokens are these draws', and nobody has to see them first."""
        is_plain = self._most_drafts() <= 0 and len(draws) == len(self.scheduler.running)
        return self.runner.draws_on_device and is_plain and all(map(can_pend, draws))

    def _noise_of(self, items: abc.Iterable[ScheduledTokens], n_later: int = 0) -> list[RowNoise]:
        """The noise of what these sequences draw, for the device where that draws."""
        if not self.runner.draws_on_device:
            return []
        return [row for item in items for row in noise_of(item, n_later)]

    def _launch(self, items: abc.Sequence[ScheduledTokens], tokens: Tensor) -> "_Ahead":
        """Launch the step after the one of these items, which drew these tokens."""
        chunks = [_chunk(item, item.start + len(item.tokens), (0,)) for item in items]
        logits = self.runner.step_ahead(chunks, self._noise_of(items, 1), tokens)
        return _Ahead([item.sequence for item in items], logits)

    def _exchange_masks(self, drawing: abc.Sequence[ScheduledTokens]) -> dict[Sequence, bytes]:
        """Which tokens each sequence's grammar allows, from rank 0's matchers."""
        bound = [item.sequence for item in drawing if item.request.params.grammar is not None]
        if not bound:
            return {}
        own = b"".join(map(self._mask, bound)) if self.comm.rank == 0 else None
        message = broadcast_bytes(self.comm, own)
        width = len(message) // len(bound)
        return {each: message[n * width : (n + 1) * width] for n, each in enumerate(bound)}

    def _decide(
        self, drawing: abc.Sequence[ScheduledTokens], drawn: abc.Sequence[list[Sampled]]
    ) -> list[StepOutput]:
        """Rank 0's ids and decisions go to all ranks; what is finished gives its blocks back."""
        shown = [""] * len(drawing)
        width = max((len(own) for own in drawn), default=0)
        rows = [[0] * (2 + width)] * len(drawing)
        if self.comm.rank == 0:
            for row, (item, own) in enumerate(zip(drawing, drawn, strict=True)):
                ids, shown[row], end = self._read(item, [one.token for one in own])
                rows[row] = [end, len(ids), *ids, *[0] * (width - len(ids))]
        if self.comm.size > 1:
            rows = self.comm.broadcast(torch.tensor(rows, dtype=torch.int64)).tolist()
        outputs = []
        for row, (item, own) in enumerate(zip(drawing, drawn, strict=True)):
            end, n_kept, *ids = rows[row]
            kept = own[:n_kept]
            if [one.token for one in kept] != ids[:n_kept]:
                raise RuntimeError(
                    f"rank {self.comm.rank} drew tokens {[one.token for one in kept]} for request "
                    f"{item.request.index} and rank 0 drew {ids[:n_kept]}: {DISAGREE}"
                )
            outputs.append(self._keep(item, kept, shown[row], _REASONS.get(end)))
        return outputs

    def _read(self, item: ScheduledTokens, drawn: abc.Sequence[int]) -> tuple[list[int], str, int]:
        """What is kept of the draws, the text to show for it, and whether the completion ends."""
        state = self._states[item.sequence]
        detokenizer = state.detokenizer = state.detokenizer or Detokenizer(
            item.request, self._tokenizer
        )
        ids: list[int] = []
        text = ""
        if not drawn:
            return ids, detokenizer.close(), _NO_TOKEN
        for token, draft in zip(drawn, (*item.drafts, None), strict=False):
            ids.append(token)
            is_last = item.sequence.n_drawn + len(ids) == item.request.max_tokens
            if state.matcher is not None:
                try:
                    state.matcher.accept(token)
                except MatchError:  # beyond a limit of the grammar's
                    return ids[:-1], text + detokenizer.close(), _NO_TOKEN
                if state.matcher.is_finished:
                    _warn_if_early(item.request, item.sequence.n_drawn + len(ids))
                    is_last = True
            piece, stopped = detokenizer.push(token, is_last)
            text += piece
            if stopped or is_last:
                stopped |= state.matcher is not None and state.matcher.is_finished
                return ids, text, _STOP if stopped else _LENGTH
            if token != draft:
                break
        return ids, text, _RUNNING

    def _keep(
        self,
        item: ScheduledTokens,
        kept: abc.Sequence[Sampled],
        text: str,
        reason: FinishReason | None,
    ) -> StepOutput:
        state = self._states[item.sequence]
        ids = tuple(one.token for one in kept)
        for one in kept:
            if state.history is not None:
                state.history.append(one.token)
            if one.logprobs is not None:
                state.logprobs.append(self._spelled(one.logprobs))
        state.lookup.judge(item.n_drafts, max(0, len(kept) - 1))
        self.scheduler.commit(item, ids)
        return self._output(state, ids, text, reason)

    def _output(
        self, state: _SequenceState, ids: tuple[int, ...], text: str, reason: FinishReason | None
    ) -> StepOutput:
        """What a sequence got; with a reason it ends here."""
        sequence = state.sequence
        completion = None
        if reason is not None:
            completion = self._completion(state, reason)
            self.scheduler.finish(sequence)
            del self._states[sequence]
            if not sequence.siblings:
                del self._unfinished[state.ticket]
                self._deadlines.pop(state.ticket, None)
        return StepOutput(
            ticket=state.ticket,
            index=state.request.index,
            choice=sequence.number,
            tokens=ids,
            text=text,
            completion=completion,
            is_last=not sequence.siblings,
            logprobs=tuple(state.logprobs[-len(ids) :]) if ids else (),
        )

    def _completion(self, state: _SequenceState, reason: FinishReason) -> Completion:
        sequence, request, params = state.sequence, state.request, state.request.params
        return Completion(
            index=request.index,
            text=state.detokenizer.text if state.detokenizer else "",
            tokens=tuple(sequence.tokens[sequence.n_prompt :]),
            finish_reason=reason,
            n_prompt_tokens=sequence.n_prompt,
            logprobs=tuple(state.logprobs) if params.logprobs is not None else None,
            choice=sequence.number,
            n_choices=params.n,
            prompt_logprobs=(
                None if params.prompt_logprobs is None else (None, *state.prompt_logprobs)
            ),
            seed=None if params.is_greedy else request.seed,
            n_cached_tokens=sequence.n_found or 0,
            stop_reason=(
                state.detokenizer.stop_reason if state.detokenizer and reason == "stop" else None
            ),
        )

    def _spelled(self, scored: TokenLogprob) -> TokenLogprob:
        """With the text of its tokens, on rank 0."""
        if self._tokenizer is None:
            return scored
        vocabulary = self._tokenizer.vocabulary
        text, *others = (
            vocabulary.piece(token, skip_special=False).decode("utf-8", "replace")
            for token in (scored.token, *(token for token, _ in scored.top))
        )
        return replace(scored, text=text, top_texts=tuple(others))

    def _mask(self, sequence: Sequence) -> bytes:
        """What a sequence's grammar allows next; no token where it can go nowhere."""
        matcher = self._states[sequence].matcher
        assert matcher is not None
        try:
            return matcher.mask()
        except MatchError:
            return bytes(-(-self.runner.args.vocab_size // 8))


@dataclass(frozen=True)
class _Ahead:
    """A step that is launched: a token of each of these sequences, a row each of the logits."""

    sequences: abc.Sequence[Sequence]
    logits: Logits

    def of(self, scheduled: abc.Sequence[ScheduledTokens]) -> Logits:
        """The rows of those that are scheduled for it: some may have ended meanwhile."""
        if len(scheduled) == len(self.sequences):
            return self.logits
        return self.logits.rows([self.sequences.index(item.sequence) for item in scheduled])


def _chunk(item: ScheduledTokens, start: int, tokens: abc.Sequence[int]) -> Chunk:
    return Chunk(tokens, start, item.sequence.tables, item.sequence.n_prompt)


def _warn_if_early(request: Request, n_drawn: int) -> None:
    """Say where a grammar's end comes before the tokens that were asked for as well."""
    if n_drawn < request.params.min_tokens:
        logger.warning(
            "request %d: its grammar ends the completion after %d tokens, before min_tokens=%d",
            request.index,
            n_drawn,
            request.params.min_tokens,
        )
