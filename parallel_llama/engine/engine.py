"""The engine: runs many requests at once on one model and one KV cache.

Every rank runs the same scheduler over the same requests. Only rank 0 receives requests, turns
tokens into text and decides when sequences end; it broadcasts its messages, token ids and
decisions, so ranks cannot diverge. The engine does not depend on files, flags or terminals.

A step: message -> schedule -> forward -> sample -> check stop conditions -> commit.
"""

import struct
import time
import weakref
from collections import abc, deque
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from parallel_llama.engine.block_pool import BlockPool
from parallel_llama.engine.draft_model import DraftModel, DraftRequest
from parallel_llama.engine.drafts import SequenceDrafts
from parallel_llama.engine.kv_capacity import Capacity
from parallel_llama.engine.llm_config import LLMConfig
from parallel_llama.engine.machine import tick_of
from parallel_llama.engine.messages import (
    MAX_SIZE,
    DrawnTokens,
    StepMessage,
    Unfinished,
    decode_message,
    size_of,
)
from parallel_llama.engine.model_runner import ModelRunner
from parallel_llama.engine.outputs import REASONS, OutputProcessor, SequenceOutput, StepOutput
from parallel_llama.engine.prompt_lookup import PromptLookup
from parallel_llama.engine.recorded_steps import Logits
from parallel_llama.engine.sampling_rows import draw_each, sampling_keys_of, sampling_rows_of
from parallel_llama.engine.scheduler import ScheduledTokens, Scheduler, Sequence
from parallel_llama.engine.statistics import EngineStatistics, StepClock, StepTimes
from parallel_llama.engine.step_buffer import Chunk, SamplingKey
from parallel_llama.errors import DISAGREE, NumericalError, UsageError, listed
from parallel_llama.model.rope import base_len
from parallel_llama.parallel.collectives import Slice, broadcast_bytes
from parallel_llama.request import FinishReason, Request, TokenLogprob
from parallel_llama.sampling.draw import (
    History,
    SampledToken,
    SamplingRow,
    intersect_masks,
    mask_of,
)
from parallel_llama.sampling.pending import PendingDraws, can_pend
from parallel_llama.sampling.scoring import score_tokens
from parallel_llama.structured.compiler import GrammarCompiler, Matcher
from parallel_llama.tokenizer import Tokenizer

# Maximum rows of a step with drafts: more rows slow the step by more than the drafts gain.
_MAX_ROWS = 16

# Logits of at most this many prompt positions exist at once.
SCORE_ROWS = 128


@dataclass(eq=False)
class _SequenceState:
    """The engine's state of a sequence."""

    output: SequenceOutput
    allowed: bytes | None  # the mask of the request's allowed_token_ids
    history: History | None  # for penalties
    drafts: PromptLookup | SequenceDrafts
    has_begun: bool = False  # whether a step has run any of its tokens


class Engine:
    """Runs requests to completion, on one rank.

    All ranks construct it, and call `step` the same number of times; `submit`, `cancel` and
    `send_rpc` are for rank 0. At most `MAX_RUNNING` sequences run at once, fewer if the KV cache is
    full. Short prompts run first. A long prompt runs in chunks, in steps that also decode other
    requests.

    Args:
        tokenizer: None for a model without a tokenizer, and on ranks above 0.
        grammars: the grammar compiler; None without a tokenizer.
        step_tokens: maximum tokens per step; by default that of `capacity`.
        max_drafts: maximum draft tokens per sequence and step.
        integrity_check: whether to check memory and products, on CPU ranks only; see
            `IntegrityCheck`.
        draft_model: drafts tokens instead of prompt lookup, on CPU ranks only.

    Collective: the constructor and `step`.
    """

    # Set by `_reset`; the first two are for rank 0.
    _incoming: deque[tuple[int, Request]]  # not yet sent to the other ranks
    _unapplied: StepMessage | None  # the message of the current step until it is applied
    _pending_outputs: list[StepOutput]  # committed, and not yet returned by `step`
    # Requests that no longer fit, by ticket, since the latest `resume`; for rank 0.
    refused: list[tuple[int, UsageError]]

    def __init__(
        self,
        runner: ModelRunner,
        capacity: Capacity,
        tokenizer: Tokenizer | None = None,
        grammars: GrammarCompiler | None = None,
        *,
        step_tokens: int | None = None,
        max_drafts: int = LLMConfig.max_drafts,
        integrity_check: bool = False,
        draft_model: DraftModel | None = None,
    ) -> None:
        self.runner, self.comm, self.capacity = runner, runner.comm, capacity
        self._draft_model = draft_model
        self.step_tokens = step_tokens or capacity.step_tokens
        self.max_drafts = max_drafts
        self.rpc = b""
        self.held_adapters: list[str | None] = []  # of texts that are being scored; for rank 0
        # Tickets of requests that ran for the first time, or for the first time since `resume`, in
        # the latest step.
        self.begun: list[int] = []
        self.times = StepTimes()
        self._clock = StepClock(self.times, tick_of(runner.device))
        self._outputs = OutputProcessor(tokenizer, grammars)
        self._n_tickets = 0
        self._in_flight: _InFlightStep | None = None
        self._reserve(capacity.n_blocks, capacity.block_size)
        self._checks_integrity = integrity_check
        self._integrity = runner.check_integrity() if integrity_check else None
        self._reset()

    @property
    def _has_peers(self) -> bool:
        return self.comm.size > 1 and not isinstance(self.comm, Slice)

    @property
    def idle(self) -> bool:
        """Whether all requests are finished; on rank 0, including those that are not yet sent."""
        return self.scheduler.idle and not self._incoming

    def statistics(self) -> EngineStatistics:
        """The load of the engine. Another thread may see numbers of two consecutive steps."""
        return EngineStatistics(
            n_running=len(self.scheduler.running),
            n_waiting=len(self.scheduler.waiting),
            n_blocks_used=sum(pool.n_used for pool in self.pools),
            n_blocks_cached=sum(pool.n_cached for pool in self.pools),
            n_blocks_free=sum(pool.n_free for pool in self.pools),
            n_prompt_tokens=self.scheduler.n_prompt_tokens,
            n_prefix_tokens=self.scheduler.n_prefix_tokens,
            n_preempted=self.scheduler.n_preempted,
            n_draft_tokens=self.scheduler.n_draft_tokens,
            n_accepted_tokens=self.scheduler.n_accepted_tokens,
            times=replace(self.times),
        )

    def check(self, request: Request) -> None:
        """Raises: UsageError for an unknown adapter; ContextExceeded as `Scheduler.check_fits`."""
        self._fitted(request)

    def _fitted(self, request: Request, n_drawn: int = 0) -> Request:
        """The request, shortened if the KV cache has become smaller since it was made.

        Args:
            n_drawn: as in `Request.shortened`.

        Raises: as `check`.
        """
        self.require_adapter(request.adapter)
        if request.fills_cache:
            n_cached = self.capacity.longest(len(request.prompt) + request.max_tokens - 1)
            request = request.shortened(n_cached + 1, n_drawn)  # the last token is not cached
        self.scheduler.check_fits(request)
        return request

    def require_adapter(self, name: str | None) -> None:
        """Raises: UsageError if the adapter of this name is not loaded."""
        loaded = self.runner.adapters
        if name is not None and name not in loaded:
            raise UsageError(
                f"the adapter {name!r:.200} is not loaded; "
                f"{f'use {listed(sorted(loaded))}' if loaded else 'load the model with adapters'}"
            )

    def submit(self, request: Request, timeout_s: float | None = None) -> int:
        """Queue a request, which starts at one of the next steps. Returns: its ticket.

        After `timeout_s` the request ends with the tokens so far.

        Raises: UsageError as `check`, or if its grammar cannot be used.
        """
        request = self._fitted(request)
        ticket = self._n_tickets
        if request.params.grammar is not None:
            self._matchers[ticket] = self._outputs.matchers(request)
        if timeout_s is not None:
            self._deadlines[ticket] = time.monotonic() + timeout_s
        self._n_tickets += 1
        self._incoming.append((ticket, request))
        return ticket

    def unfinished(self) -> tuple[Unfinished, ...]:
        """On rank 0, the requests to continue after a step that raised a RankError, oldest first.

        They have the tokens of all completed steps; the tokens of the failed step are lost.
        """
        if self._unapplied is not None:
            self._pending_outputs += self._apply(self._unapplied)
            self._unapplied = None
        return tuple(
            Unfinished(
                ticket,
                sequences[0].request,
                tuple(
                    DrawnTokens(
                        sequence.number,
                        tuple(sequence.tokens[sequence.n_prompt :]),
                        sequence.n_found,
                    )
                    for sequence in sequences
                ),
            )
            for ticket, sequences in self._unfinished.items()
        )

    def _reserve(self, n_blocks: abc.Sequence[int], block_size: int) -> None:
        """Allocate the KV caches of the model and of the draft model."""
        self.runner.reserve(n_blocks, block_size)
        if self._draft_model is not None:
            self._draft_model.reserve(n_blocks, block_size)

    def free_cache(self) -> None:
        """Free the KV caches, before `resume` allocates new ones."""
        self._integrity = None  # it holds the old caches
        self._reserve([0] * len(self.capacity.n_blocks), 1)

    def resume(
        self,
        runner: ModelRunner,
        capacity: Capacity,
        unfinished: abc.Sequence[Unfinished],
        draft_model: DraftModel | None = None,
    ) -> None:
        """Continue requests, with another runner or on a rank that is new in the group.

        Their keys and values are computed again, as after a preemption. Requests that fill the KV
        cache are shortened to `capacity`, equally on all ranks. On rank 0 requests that do not fit
        are moved to `refused`.

        Collective: all ranks call it; no communication.
        """
        old_outputs = {
            (state.output.ticket, sequence.number): state.output
            for sequence, state in self._states.items()
        }
        if runner is not self.runner:
            self.runner, self.comm, self.capacity = runner, runner.comm, capacity
            self._draft_model = draft_model
            self._reserve(capacity.n_blocks, capacity.block_size)
            if self._checks_integrity:
                self._integrity = runner.check_integrity()
        self._reset_scheduler()
        for item in unfinished:
            n_drawn = max(len(choice.tokens) for choice in item.choices)
            request = self._fitted_or_refused(item.ticket, item.request, n_drawn)
            if request is not None:
                self._restore(replace(item, request=request), old_outputs)
        self._incoming = deque(
            (ticket, fitted)
            for ticket, request in self._incoming
            if (fitted := self._fitted_or_refused(ticket, request)) is not None
        )

    def uses_adapter(self, name: str) -> bool:
        """Whether an unfinished request or a call of `score` uses this adapter; for rank 0."""
        waiting = (request for _, request in self._incoming)
        started = (sequences[0].request for sequences in self._unfinished.values())
        requested = (request.adapter for request in (*waiting, *started))
        return name in (*self.held_adapters, *requested)

    def cancel(self, ticket: int, reason: FinishReason = "cancelled") -> None:
        """End a request at the next step; does nothing if the request has ended."""
        self._outgoing.append((ticket, reason))

    def send_rpc(self, rpc: bytes) -> None:
        """Send the other ranks a call instead of a step; their `step` stores it in `rpc`.

        Collective: the other ranks call `step`.
        """
        self._in_flight = None  # the other ranks discard it too
        broadcast_bytes(self.comm, StepMessage(rpc=rpc).encode(), no_timeout=True)

    def step(self) -> list[StepOutput]:
        """Run one forward pass and draw tokens for every sequence whose prompt is in the cache.

        Ranks above 0 wait for rank 0 without a timeout. If rank 0 sends a call instead of a step,
        no tokens run and `rpc` has the call; otherwise `rpc` is empty.

        Collective: `broadcast_bytes` of a message. If any tokens run: with a draft model, as
        `DraftModel.run`; as a forward pass; for grammars, `broadcast_bytes` of the masks; as
        `draw_each`, or as `PendingDraws` if the device draws the tokens; for log-probabilities of
        prompts, as `score_tokens`; one broadcast; and as `IntegrityCheck.after_step`. After a
        NumericalError: a barrier, and as `IntegrityCheck.compare_products`.

        Raises: NumericalError, on all ranks, if a forward pass produced NaN or Inf; all requests
        are then discarded. IntegrityError if a bit has flipped or a product is wrong; the ranks
        then end.
        """
        try:
            self._clock.begin()
            outputs = self._step()
            self._clock.end()
            return outputs
        except BaseException as error:
            # All ranks raise a NumericalError together. After any other error the state of the
            # other ranks is unknown, so only a single rank can be reset.
            if isinstance(error, NumericalError):
                if self._integrity is not None:
                    self._integrity.compare_memory()
                # A collective that was aborted because of a lost rank also produces NaN; then the
                # barrier raises RankError.
                self.comm.barrier()
                if self._integrity is not None:
                    self._integrity.compare_products()
            if isinstance(error, NumericalError) or not self._has_peers:
                self._reset()
            raise

    def _step(self) -> list[StepOutput]:
        encoded = None
        if self.comm.rank == 0:
            self._unapplied = self._new_message()
            encoded = self._unapplied.encode()
        message = decode_message(broadcast_bytes(self.comm, encoded, no_timeout=True))
        self._unapplied = None
        self.rpc = message.rpc
        self._pending_outputs += self._apply(message)
        self.begun = []
        self._clock.lap("messages_s")
        in_flight, self._in_flight = self._in_flight, None
        scheduled: list[ScheduledTokens] = []
        if not self.rpc:
            # If the step has been launched already, run its sequences that have not ended.
            scheduled = self.scheduler.schedule_in_flight(in_flight.sequences) if in_flight else []
            in_flight = in_flight if scheduled else None
            scheduled = scheduled or self.scheduler.schedule()
        self._clock.lap("schedule_s")
        if scheduled:
            self._run(scheduled, in_flight)
        outputs, self._pending_outputs = self._pending_outputs, []
        return outputs

    def _run(
        self, scheduled: abc.Sequence[ScheduledTokens], in_flight: "_InFlightStep | None"
    ) -> None:
        began_s = time.perf_counter()
        for state in (self._states[item.sequence] for item in scheduled):
            if not state.has_begun and state.output.sequence.number == 0:
                self.begun.append(state.output.ticket)
            state.has_begun = True
        scheduled = self._with_drafts(scheduled)
        sampled_rows, scored = self._output_rows(scheduled)
        if in_flight is None:
            chunks = [_chunk(item, item.start, item.tokens) for item in scheduled]
            sampling_keys = self._sampling_keys_of(item for item in scheduled if item.draws)
            scored_rows = [row for _, row, _ in scored]
            logits, hidden = self.runner.step(chunks, sampled_rows, scored_rows, sampling_keys)
        else:
            logits = in_flight.logits_of(scheduled)
            hidden = logits.values[:0]
        self._clock.lap("forward_s")
        drawing = [item for item in scheduled if item.draws]
        drawn = self._sample(drawing, logits) if drawing else []
        self._score_prompts(scored, hidden)
        self._clock.lap("sample_s")
        for item in scheduled:
            if not item.draws:
                self.scheduler.commit(item, ())
        # If a rank is lost in the integrity check below, the next step returns these outputs.
        self._pending_outputs += self._commit_outputs(drawing, drawn)
        if self._integrity is not None:
            self._integrity.after_step(time.perf_counter() - began_s)
        self._clock.lap("decide_s")
        self.times.n_steps += 1

    def _reset(self) -> None:
        """Discard all requests and the contents of the KV cache, which may be invalid."""
        self._reset_scheduler()
        # For rank 0: requests and cancellations not yet sent to the other ranks, and deadlines.
        self._incoming = deque()
        self._outgoing: list[tuple[int, FinishReason]] = []
        self._matchers: dict[int, list[Matcher]] = {}
        self._deadlines: dict[int, float] = {}
        self._unapplied = None
        self._pending_outputs, self.refused = [], []

    def _reset_scheduler(self) -> None:
        block_size = self.capacity.block_size
        self.pools = [BlockPool(n_blocks, block_size) for n_blocks in self.capacity.n_blocks]
        # A proxy: a reference cycle would keep weights and KV cache alive after the engine.
        engine = weakref.proxy(self)
        self.scheduler = Scheduler(
            self.pools,
            self.capacity.windows,
            self.capacity.n_sinks,
            step_tokens=self.step_tokens,
            context=lambda request: engine._context(request),
            draft=lambda sequence, most: engine._draft(sequence, most),
        )
        self._in_flight = None
        if self._integrity is not None:
            self._integrity.forget_blocks()
        self._states: dict[Sequence, _SequenceState] = {}
        self._unfinished: dict[int, list[Sequence]] = {}  # by ticket; the scheduler's own lists

    # The message from rank 0 to all ranks

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
        # A request can end only after it has been sent to the other ranks.
        # The garbage collector may close a stream, and so cancel its request, at any line.
        ended, self._outgoing = self._outgoing, []
        unsent = {ticket for ticket, _ in self._incoming} if ended else set()
        end = tuple(each for each in ended if each[0] not in unsent)
        self._outgoing += [each for each in ended if each[0] in unsent]
        return StepMessage(tuple(begin), end)

    def _apply(self, message: StepMessage) -> list[StepOutput]:
        for ticket, request in message.begin:
            self._start_request(ticket, request)
        outputs = []
        for ticket, reason in message.end:
            for sequence in list(self._unfinished.get(ticket, ())):
                output = self._states[sequence].output
                outputs.append(self._finish(output, (), output.close(), reason))
        return outputs

    def _start_request(
        self,
        ticket: int,
        request: Request,
        drawn: abc.Mapping[int, abc.Sequence[int]] | None = None,
    ) -> None:
        params = request.params
        allowed = None if params.allowed_token_ids is None else mask_of(params.allowed_token_ids)
        matchers = self._matchers.pop(ticket, [])
        prompt_logprobs: list[TokenLogprob] = []
        for sequence in self.scheduler.add(request, drawn):
            self._unfinished[ticket] = sequence.siblings
            matcher = matchers[sequence.number] if matchers else None
            self._states[sequence] = _SequenceState(
                SequenceOutput(ticket, sequence, matcher, prompt_logprobs),
                allowed,
                History(request.prompt) if params.has_penalties else None,
                PromptLookup()
                if self._draft_model is None
                else self._draft_model.sequence_drafts(params),
            )

    def _fitted_or_refused(self, ticket: int, request: Request, n_drawn: int = 0) -> Request | None:
        """As `_fitted`; None for a request that no longer fits, which is moved to `refused`."""
        try:
            return self._fitted(request, n_drawn)
        except UsageError as error:
            if self.comm.rank == 0:
                self.refused.append((ticket, error))
                self._matchers.pop(ticket, None)
                self._deadlines.pop(ticket, None)
            return None

    def _restore(
        self, unfinished: Unfinished, old_outputs: abc.Mapping[tuple[int, int], SequenceOutput]
    ) -> None:
        """Queue an unfinished request with its tokens; on rank 0, also with its old outputs."""
        ticket, request = unfinished.ticket, unfinished.request
        if self.comm.rank == 0 and request.params.grammar is not None:
            self._matchers[ticket] = self._outputs.matchers(request, is_checked=True)
        self._start_request(
            ticket, request, {choice.choice: choice.tokens for choice in unfinished.choices}
        )
        sequences = self._unfinished[ticket]
        for sequence, choice in zip(sequences, unfinished.choices, strict=True):
            state, sequence.n_found = self._states[sequence], choice.n_found
            if state.history is not None:
                for token in choice.tokens:
                    state.history.append(token)
            if self.comm.rank == 0:
                state.output.logprobs += old_outputs[ticket, choice.choice].logprobs
                self._outputs.replay(state.output)
        if self.comm.rank == 0 and not sequences[0].scores_prompt:
            scored = old_outputs[ticket, sequences[0].number].prompt_logprobs
            self._states[sequences[0]].output.prompt_logprobs += scored  # shared by all choices

    # Callbacks of the scheduler

    def _context(self, request: Request) -> bytes:
        """What determines the contents of cached blocks, besides tokens."""
        salt = (request.params.cache_salt or "").encode()
        # A number and not the name: the name may be loaded again with other weights.
        adapter = -1 if request.adapter is None else self.runner.adapters[request.adapter]
        length = base_len(self.runner.args, len(request.prompt))
        return struct.pack("<qq", length, adapter) + salt

    def _draft(self, sequence: Sequence, max_drafts: int) -> abc.Sequence[int]:
        """Draft tokens; none with a grammar, because its mask depends on the previous token."""
        if sequence.request.params.grammar is not None:
            return ()
        max_drafts = min(max_drafts, self._max_drafts_now())
        return (
            self._states[sequence].drafts.draft(sequence.tokens, max_drafts)
            if max_drafts > 0
            else ()
        )

    def _max_drafts_now(self) -> int:
        """Maximum draft tokens per sequence in this step; may be 0 or negative for none."""
        return min(self.max_drafts, _MAX_ROWS // len(self.scheduler.running) - 1)

    # The step

    def _with_drafts(self, scheduled: abc.Sequence[ScheduledTokens]) -> list[ScheduledTokens]:
        """Replace the placeholders of drafts by the drafts of the draft model, if there is one."""
        if self._draft_model is None:
            return list(scheduled)
        requests = []
        for item in scheduled:
            state = self._states[item.sequence]
            assert isinstance(state.drafts, SequenceDrafts)
            requests.append(DraftRequest(item, state.drafts, state.history, state.allowed))
        drafts = self._draft_model.run(requests)
        return list(map(self.scheduler.replace_drafts, scheduled, drafts))

    def _output_rows(
        self, scheduled: abc.Sequence[ScheduledTokens]
    ) -> tuple[list[int], list[tuple[SequenceOutput, int, int]]]:
        """The rows of the batch that are sampled, and the rows that score the next prompt token.

        Returns: the sampled rows; for each scored row, the output of the request's first sequence,
            the row, and the next prompt token.
        """
        sampled_rows: list[int] = []
        scored = []
        first_row = 0
        for item in scheduled:
            stop_row = first_row + len(item.tokens)
            if item.draws:
                sampled_rows += range(stop_row - 1 - item.n_drafts, stop_row)
            output, prompt = self._states[item.sequence].output, item.request.prompt
            if item.sequence.scores_prompt:
                stop = min(item.start + len(item.tokens), len(prompt) - 1)
                for position in range(max(item.start, len(output.prompt_logprobs)), stop):
                    scored.append((output, first_row + position - item.start, prompt[position + 1]))
            first_row = stop_row
        return sampled_rows, scored

    def _score_prompts(
        self, rows: abc.Sequence[tuple[SequenceOutput, int, int]], hidden: Tensor
    ) -> None:
        for start in range(0, len(rows), SCORE_ROWS):
            rows_at_once = rows[start : start + SCORE_ROWS]
            scored = score_tokens(
                self.runner.logits(hidden[start : start + len(rows_at_once)]),
                self.runner.shard.vocab,
                torch.tensor([target for _, _, target in rows_at_once], device=hidden.device),
                [
                    output.sequence.request.params.prompt_logprobs or 0
                    for output, _, _ in rows_at_once
                ],
                self.comm,
            )
            for (output, _, _), token_logprob in zip(rows_at_once, scored, strict=True):
                output.prompt_logprobs.append(self._outputs.with_texts(token_logprob))

    def _sample(
        self, drawing: abc.Sequence[ScheduledTokens], logits: Logits
    ) -> list[list[SampledToken]]:
        """Draw the tokens of each sequence: one after its last token and one after each draft.

        A sequence gets fewer tokens if a row has no allowed token. If the device draws the tokens
        and the next step needs nothing from the host, the next step is launched before the host
        reads the tokens.
        """
        masks = self._exchange_masks(drawing)
        draws = []
        for item in drawing:
            state = self._states[item.sequence]
            mask = intersect_masks(masks.get(item.sequence), state.allowed)
            draws.append(sampling_rows_of(item, state.history, mask))
        all_draws = [draw for draws_of_sequence in draws for draw in draws_of_sequence]
        if logits.drawn is not None and self._may_prepare_next(all_draws):
            return [
                [drawn]
                for drawn in self._launch_then_read(drawing, all_draws, logits, logits.drawn)
            ]
        is_greedy = all(draw.params.is_greedy for draw in all_draws)
        best = logits.largest if logits.drawn is None and is_greedy else logits.drawn
        return draw_each(logits.values, self.runner.shard.vocab, draws, self.comm, best)

    def _launch_then_read(
        self,
        drawing: abc.Sequence[ScheduledTokens],
        draws: abc.Sequence[SamplingRow],
        logits: Logits,
        drawn: Tensor,
    ) -> list[SampledToken]:
        """Launch the next step, then read the tokens that this step drew."""
        vocab, vocab_size = self.runner.shard.vocab, self.runner.args.vocab_size
        ops = self.runner.model.ops
        pending = PendingDraws(logits.values, drawn, vocab, vocab_size, draws, self.comm, ops)
        if self.scheduler.prepare_next():
            self._clock.lap("sample_s")
            self._in_flight = self._launch(drawing, pending.tokens)
            self._clock.lap("forward_s")  # the next step's, counted in this step
        tokens, are_as_launched = pending.read()
        if not are_as_launched:
            self._in_flight = None  # that step has a wrong token and must run again
        return tokens

    def _may_prepare_next(self, draws: abc.Sequence[SamplingRow]) -> bool:
        """Whether the next step will run exactly the tokens that these rows draw."""
        is_one_each = self._max_drafts_now() <= 0 and len(draws) == len(self.scheduler.running)
        return self.runner.draws_on_device and is_one_each and all(map(can_pend, draws))

    def _sampling_keys_of(
        self, items: abc.Iterable[ScheduledTokens], n_later: int = 0
    ) -> list[SamplingKey]:
        """The sampling keys of these sequences; empty if the device does not sample."""
        if not self.runner.draws_on_device:
            return []
        return [row for item in items for row in sampling_keys_of(item, n_later)]

    def _launch(self, items: abc.Sequence[ScheduledTokens], tokens: Tensor) -> "_InFlightStep":
        """Launch the step that runs the tokens drawn for these items."""
        chunks = [_chunk(item, item.start + len(item.tokens), (0,)) for item in items]
        logits = self.runner.step_ahead(chunks, self._sampling_keys_of(items, 1), tokens)
        return _InFlightStep([item.sequence for item in items], logits)

    def _exchange_masks(self, drawing: abc.Sequence[ScheduledTokens]) -> dict[Sequence, bytes]:
        """Broadcast, from rank 0, the mask of the tokens that each sequence's grammar allows."""
        with_grammar = [
            item.sequence for item in drawing if item.request.params.grammar is not None
        ]
        if not with_grammar:
            return {}
        masks, vocab_size = None, self.runner.args.vocab_size
        if self.comm.rank == 0:
            outputs = (self._states[sequence].output for sequence in with_grammar)
            masks = b"".join(output.grammar_mask(vocab_size) for output in outputs)
        message = broadcast_bytes(self.comm, masks)
        width = len(message) // len(with_grammar)
        return {
            sequence: message[n * width : (n + 1) * width]
            for n, sequence in enumerate(with_grammar)
        }

    def _commit_outputs(
        self, drawing: abc.Sequence[ScheduledTokens], drawn: abc.Sequence[list[SampledToken]]
    ) -> list[StepOutput]:
        """Commit the tokens that rank 0 accepts, and finish the sequences that end, on all ranks.

        Collective: one broadcast.
        """
        texts = [""] * len(drawing)
        width = max((len(sampled) for sampled in drawn), default=0)
        rows = [[0] * (2 + width)] * len(drawing)
        if self.comm.rank == 0:
            for row, (item, sampled) in enumerate(zip(drawing, drawn, strict=True)):
                output = self._states[item.sequence].output
                tokens = [draw.token for draw in sampled]
                ids, texts[row], end = self._outputs.check_stop(output, item, tokens)
                rows[row] = [end, len(ids), *ids, *[0] * (width - len(ids))]
        if self.comm.size > 1:
            rows = self.comm.broadcast(torch.tensor(rows, dtype=torch.int64)).tolist()
        outputs = []
        for row, (item, sampled) in enumerate(zip(drawing, drawn, strict=True)):
            end, n_kept, *ids = rows[row]
            kept = sampled[:n_kept]
            tokens = [draw.token for draw in kept]
            if tokens != ids[:n_kept]:
                raise RuntimeError(
                    f"rank {self.comm.rank} drew tokens {tokens} for request "
                    f"{item.request.index} and rank 0 drew {ids[:n_kept]}: {DISAGREE}"
                )
            outputs.append(self._append(item, kept, texts[row], REASONS.get(end)))
        return outputs

    def _append(
        self,
        item: ScheduledTokens,
        kept: abc.Sequence[SampledToken],
        text: str,
        reason: FinishReason | None,
    ) -> StepOutput:
        state = self._states[item.sequence]
        ids = tuple(draw.token for draw in kept)
        for draw in kept:
            if state.history is not None:
                state.history.append(draw.token)
            if draw.logprobs is not None:
                state.output.logprobs.append(self._outputs.with_texts(draw.logprobs))
        state.drafts.update(item.n_drafts, max(0, len(kept) - 1))
        self.scheduler.commit(item, ids)
        return self._finish(state.output, ids, text, reason)

    def _finish(
        self, output: SequenceOutput, ids: tuple[int, ...], text: str, reason: FinishReason | None
    ) -> StepOutput:
        """The output of a step for one sequence; with a `reason` the sequence ends."""
        completion = None
        if reason is not None:
            completion = output.completion(reason)
            self.scheduler.finish(output.sequence)
            del self._states[output.sequence]
            if not output.sequence.siblings:
                del self._unfinished[output.ticket]
                self._deadlines.pop(output.ticket, None)
        return output.step_output(ids, text, completion)


@dataclass(frozen=True)
class _InFlightStep:
    """A step that was launched before the previous step's tokens were read.

    It has one token and one row of logits for each sequence.
    """

    sequences: abc.Sequence[Sequence]
    logits: Logits

    def logits_of(self, scheduled: abc.Sequence[ScheduledTokens]) -> Logits:
        """The logits of the scheduled sequences; other sequences have ended since the launch."""
        if len(scheduled) == len(self.sequences):
            return self.logits
        return self.logits.rows([self.sequences.index(item.sequence) for item in scheduled])


def _chunk(item: ScheduledTokens, start: int, tokens: abc.Sequence[int]) -> Chunk:
    sequence = item.sequence
    return Chunk(tokens, start, sequence.tables, sequence.n_prompt, item.request.adapter)
