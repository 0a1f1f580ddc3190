"""The generation loop that every rank runs: many requests share one model and one KV cache.

Every rank runs the same scheduler over the same requests. Rank 0 alone hears of requests, turns
tokens into text and decides when a completion ends; its orders, ids and decisions are broadcast, so
no rank can go another way. It does not know files, flags or terminals.

A step: obey orders -> schedule -> forward -> sample -> decide -> commit.
"""

import logging
import struct
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import torch
from torch import Tensor

from parallel_llama.blocks import BlockPool
from parallel_llama.capacity import Capacity
from parallel_llama.drafting import Lookup
from parallel_llama.drawing import draw_or_none, draws_of, rows_to_draw, until_none
from parallel_llama.errors import NumericalError, UsageError
from parallel_llama.orders import MAX_SIZE, Orders, decode_orders, size_of
from parallel_llama.parallel import broadcast_bytes
from parallel_llama.request import Completion, FinishReason, Request, TokenLogprob
from parallel_llama.rope import base_len
from parallel_llama.runner import Piece, Runner
from parallel_llama.sampling import Draw, History, Sampled, both, mask_of, score_tokens
from parallel_llama.scheduler import Choice, Scheduler, Work
from parallel_llama.structured import GrammarCompiler, Matcher, MatchError
from parallel_llama.tokenizer import Tokenizer
from parallel_llama.transcript import Transcript

logger = logging.getLogger(__name__)

# Tokens of one forward pass: enough to make prefill a matter of matrix products and not of weight
# traffic, few enough that those who decode do not wait long and an interruption is heard.
STEP_TOKENS = 512
BLOCK_SIZE = 16

# Guesses at what follows: of one choice, and rows of all that decode; beyond them a step takes
# longer by more than guesses bring.
MAX_DRAFTS, _MAX_ROWS = 8, 16

# Prompt positions whose logits exist at once.
_SCORE_ROWS = 128

_RUNNING, _STOP, _LENGTH, _NO_TOKEN = 0, 1, 2, 3
_REASONS: dict[int, FinishReason] = {_STOP: "stop", _LENGTH: "length", _NO_TOKEN: "no_token"}


@dataclass(frozen=True)
class Progress:
    """What one step gave one choice of one request: tokens, text to show, perhaps its end.

    `text` and the completion's text are filled on rank 0 alone. A choice that was ended from
    outside ends without a token.
    """

    ticket: int
    index: int
    choice: int
    tokens: tuple[int, ...]
    text: str
    completion: Completion | None
    is_last: bool  # whether the request has no choice left


@dataclass
class StepTimes:
    """Where the time of all steps so far went. Units: seconds."""

    n_steps: int = 0
    orders_s: float = 0.0
    schedule_s: float = 0.0
    forward_s: float = 0.0
    sample_s: float = 0.0
    decide_s: float = 0.0


@dataclass(eq=False)
class _Job:
    """A request under its ticket, and those of its choices that have not ended."""

    ticket: int
    request: Request
    allowed: bytes | None  # the mask of its allowed_token_ids
    branches: list["_Branch"] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)


@dataclass(eq=False)
class _Branch:
    """What is known of a choice beside its tokens; transcript and matcher on rank 0 alone."""

    job: _Job
    choice: Choice
    history: History | None  # for penalties
    lookup: Lookup
    matcher: Matcher | None
    transcript: Transcript | None = None  # from the first token on: those who wait need none
    logprobs: list[TokenLogprob] = field(default_factory=list)


class Engine:
    """Requests on their way to completion, on one rank.

    All ranks build it alike and call `step` equally often; `submit`, `cancel` and `send` are for
    rank 0. Requests start in the order in which they come, as many as the cache holds; a long
    prompt goes in pieces, mixed with the others' decode steps.

    Collective: the constructor and `step`.
    """

    def __init__(
        self,
        runner: Runner,
        capacity: Capacity,
        tokenizer: Tokenizer | None = None,
        grammars: GrammarCompiler | None = None,
        *,
        step_tokens: int = STEP_TOKENS,
        max_drafts: int = MAX_DRAFTS,
    ) -> None:
        self.runner, self.comm, self.capacity = runner, runner.comm, capacity
        self.step_tokens, self.max_drafts = step_tokens, max_drafts
        self.errand = b""
        self.times = StepTimes()
        self._tokenizer, self._grammars = tokenizer, grammars
        self._jobs: dict[int, _Job] = {}
        self._branches: dict[Choice, _Branch] = {}
        # Rank 0's alone: what the others have not heard of, and when requests are late.
        self._incoming: deque[tuple[int, Request]] = deque()
        self._outgoing: list[tuple[int, FinishReason]] = []
        self._matchers: dict[int, list[Matcher]] = {}
        self._deadlines: dict[int, float] = {}
        self._n_tickets = 0
        runner.reserve(capacity.n_blocks, capacity.block_size)
        self._reset()

    @property
    def idle(self) -> bool:
        """Whether no request is here; on rank 0 none has been submitted either."""
        return not self._jobs and not self._incoming

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

    def send(self, errand: bytes) -> None:
        """Give the other ranks something else to do, which they find in `errand` after `step`.

        Collective: like `step`, for which the others take it.
        """
        broadcast_bytes(self.comm, Orders(errand=errand).encode(), patient=True)

    def step(self) -> list[Progress]:
        """Run one forward pass and give every choice that is through its prompt a token or more.

        Ranks above 0 wait for rank 0 to call it without a limit of time. What it has sent them to
        do instead is in `errand` then, which is empty after a step.

        Collective: a broadcast of orders; where something runs, 2 n_layers + 1 all_reduces, one
        head exchange and one broadcast; two broadcasts more for grammars.

        Raises: NumericalError, on all ranks, if a forward pass gave no numbers; every request that
        was here is gone then.
        """
        try:
            return self._step(_Clock())
        except BaseException as error:
            # Other ranks meet a NumericalError alike; after anything else nobody knows where
            # they are, but for a rank alone that was interrupted.
            if isinstance(error, NumericalError) or self.comm.size == 1:
                self._reset()
            raise

    def _step(self, clock: "_Clock") -> list[Progress]:
        orders = self._exchange_orders()
        self.errand = orders.errand
        progress = self._obey(orders)
        self.times.orders_s += clock.lap()
        works = [] if self.errand else self.scheduler.schedule()
        self.times.schedule_s += clock.lap()
        return progress + self._run(works, clock) if works else progress

    def _run(self, works: Sequence[Work], clock: "_Clock") -> list[Progress]:
        drawing, scoring = rows_to_draw(works), self._rows_to_score(works)
        hidden = self._forward(works, [*drawing, *(row for _, row, _ in scoring)])
        logits = self.runner.logits(hidden[: len(drawing)])
        self.times.forward_s += clock.lap()
        drawn = self._sample(works, logits)
        self._score_prompts(scoring, hidden[len(drawing) :])
        self.times.sample_s += clock.lap()
        progress = self._decide(works, drawn)
        self.times.decide_s += clock.lap()
        self.times.n_steps += 1
        return progress

    def _reset(self) -> None:
        """Begin without requests and with an empty cache: what it held may be worth nothing."""
        self.pool = BlockPool(self.capacity.n_blocks, self.capacity.block_size)
        # In a cycle, weights and cache would outlive whoever uses them last.
        engine = weakref.proxy(self)
        self.scheduler = Scheduler(
            self.pool,
            step_tokens=self.step_tokens,
            context=lambda request: engine._context(request),
            draft=lambda choice, most: engine._draft(choice, most),
        )
        for own in (
            self._jobs,
            self._branches,
            self._incoming,
            self._outgoing,
            self._matchers,
            self._deadlines,
        ):
            own.clear()

    # Orders

    def _exchange_orders(self) -> Orders:
        """Rank 0's orders on every rank."""
        own = self._new_orders().encode() if self.comm.rank == 0 else None
        return decode_orders(broadcast_bytes(self.comm, own, patient=True))

    def _new_orders(self) -> Orders:
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
        end = tuple(order for order in self._outgoing if order[0] not in unheard)
        self._outgoing = [order for order in self._outgoing if order[0] in unheard]
        return Orders(tuple(begin), end)

    def _obey(self, orders: Orders) -> list[Progress]:
        for ticket, request in orders.begin:
            self._begin(ticket, request)
        progress = []
        for ticket, reason in orders.end:
            for branch in list(self._jobs[ticket].branches) if ticket in self._jobs else []:
                tail = branch.transcript.close() if branch.transcript else ""
                progress.append(self._progress(branch, (), tail, reason))
        return progress

    def _begin(self, ticket: int, request: Request) -> None:
        allowed = request.params.allowed_token_ids
        job = _Job(ticket, request, None if allowed is None else mask_of(allowed))
        self._jobs[ticket] = job
        matchers = self._matchers.pop(ticket, [])
        for choice in self.scheduler.add(request):
            branch = _Branch(
                job,
                choice,
                History(request.prompt) if request.params.has_penalties else None,
                Lookup(),
                matcher=matchers[choice.number] if matchers else None,
            )
            job.branches.append(branch)
            self._branches[choice] = branch

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

    def _draft(self, choice: Choice, most: int) -> Sequence[int]:
        """Guesses at the next tokens: none where a grammar has to see each token first."""
        if choice.request.params.grammar is not None:
            return ()
        most = min(most, self.max_drafts, _MAX_ROWS // len(self.scheduler.running) - 1)
        return self._branches[choice].lookup.draft(choice.tokens, most) if most > 0 else ()

    # The step

    def _forward(self, works: Sequence[Work], rows: Sequence[int]) -> Tensor:
        """The wanted rows of the residual stream after the last block, [len(rows), dim] replicated.

        The middle of a prompt wants none, and a forward gives one at least.
        """
        pieces = [
            Piece(work.tokens, work.start, work.choice.blocks, work.choice.n_prompt)
            for work in works
        ]
        return self.runner.forward(pieces, rows or [0])

    def _rows_to_score(self, works: Sequence[Work]) -> list[tuple[_Job, int, int]]:
        """Rows whose successor in the prompt is to be scored for the first time.

        Returns: the request, the row, and that successor.
        """
        wanted = []
        first = 0
        for work in works:
            job = self._branches[work.choice].job
            prompt = job.request.prompt
            if job.request.params.prompt_logprobs is not None and work.choice.number == 0:
                stop = min(work.start + len(work.tokens), len(prompt) - 1)
                for at in range(max(work.start, len(job.prompt_logprobs)), stop):
                    wanted.append((job, first + at - work.start, prompt[at + 1]))
            first += len(work.tokens)
        return wanted

    def _score_prompts(self, wanted: Sequence[tuple[_Job, int, int]], hidden: Tensor) -> None:
        for start in range(0, len(wanted), _SCORE_ROWS):
            part = wanted[start : start + _SCORE_ROWS]
            scored = score_tokens(
                self.runner.logits(hidden[start : start + len(part)]),
                self.runner.share.vocab,
                torch.tensor([target for _, _, target in part], device=hidden.device),
                [job.request.params.prompt_logprobs or 0 for job, _, _ in part],
                self.comm,
            )
            for (job, _, _), one in zip(part, scored, strict=True):
                job.prompt_logprobs.append(one)

    def _sample(self, works: Sequence[Work], logits: Tensor) -> list[list[Sampled]]:
        """The draws of each work that draws: one for its last token and one for each draft.

        Fewer where a draw has no token to take.
        """
        drawing = [work for work in works if work.draws]
        if not drawing:
            return []
        masks = iter(self._exchange_masks(drawing))
        draws: list[Draw] = []
        for work in drawing:
            branch = self._branches[work.choice]
            grammar = next(masks) if work.choice.request.params.grammar is not None else None
            draws += draws_of(work, branch.history, both(grammar, branch.job.allowed))
        drawn = iter(draw_or_none(logits, self.runner.share.vocab, draws, self.comm))
        return [until_none(islice(drawn, 1 + work.n_drafts)) for work in drawing]

    def _exchange_masks(self, drawing: Sequence[Work]) -> list[bytes]:
        """For each draw under a grammar which tokens it allows, from rank 0's matchers."""
        bound = [work.choice for work in drawing if work.choice.request.params.grammar is not None]
        if not bound:
            return []
        own = None
        if self.comm.rank == 0:
            own = b"".join(self._mask(choice) for choice in bound)
        message = broadcast_bytes(self.comm, own)
        width = len(message) // len(bound)
        return [message[at : at + width] for at in range(0, len(message), width)]

    def _decide(self, works: Sequence[Work], drawn: Sequence[list[Sampled]]) -> list[Progress]:
        """Rank 0's ids and decisions go to all ranks; what is finished gives its blocks back."""
        drawing = [work for work in works if work.draws]
        shown = [""] * len(drawing)
        width = 2 + max((len(own) for own in drawn), default=0)
        message = torch.zeros((len(drawing), width), dtype=torch.int64)
        if self.comm.rank == 0:
            for row, (work, own) in enumerate(zip(drawing, drawn, strict=True)):
                ids, shown[row], end = self._read(work, [one.token for one in own])
                message[row, : 2 + len(ids)] = torch.tensor([end, len(ids), *ids])
        message = self.comm.broadcast(message.to(self.runner.device)).cpu()
        for work in works:
            if not work.draws:
                self.scheduler.commit(work, ())
        progress = []
        for row, (work, own) in enumerate(zip(drawing, drawn, strict=True)):
            end, n_kept, *ids = message[row].tolist()
            kept = own[:n_kept]
            if [one.token for one in kept] != ids[:n_kept]:
                raise RuntimeError(
                    f"rank {self.comm.rank} drew tokens {[one.token for one in kept]} for request "
                    f"{work.choice.request.index} and rank 0 drew {ids[:n_kept]}: the ranks "
                    "disagree"
                )
            progress.append(self._keep(work, kept, shown[row], _REASONS.get(end)))
        return progress

    def _read(self, work: Work, drawn: Sequence[int]) -> tuple[list[int], str, int]:
        """What is kept of the draws, the text to show for it, and whether the completion ends."""
        branch = self._branches[work.choice]
        transcript = branch.transcript = branch.transcript or Transcript(
            work.choice.request, self._tokenizer
        )
        ids: list[int] = []
        text = ""
        if not drawn:
            return ids, transcript.close(), _NO_TOKEN
        for token, draft in zip(drawn, (*work.drafts, None), strict=False):
            ids.append(token)
            is_last = work.choice.n_drawn + len(ids) == work.choice.request.max_tokens
            if branch.matcher is not None:
                try:
                    branch.matcher.accept(token)
                except MatchError:  # beyond a limit of the grammar's
                    return ids[:-1], text + transcript.close(), _NO_TOKEN
                if branch.matcher.is_finished:
                    _warn_if_early(work.choice.request, work.choice.n_drawn + len(ids))
                    is_last = True
            piece, stopped = transcript.push(token, is_last)
            text += piece
            if stopped or is_last:
                stopped |= branch.matcher is not None and branch.matcher.is_finished
                return ids, text, _STOP if stopped else _LENGTH
            if token != draft:
                break
        return ids, text, _RUNNING

    def _keep(
        self, work: Work, kept: Sequence[Sampled], text: str, reason: FinishReason | None
    ) -> Progress:
        branch = self._branches[work.choice]
        ids = tuple(one.token for one in kept)
        for one in kept:
            if branch.history is not None:
                branch.history.append(one.token)
            if one.logprobs is not None:
                branch.logprobs.append(one.logprobs)
        branch.lookup.judge(work.n_drafts, max(0, len(kept) - 1))
        self.scheduler.commit(work, ids)
        return self._progress(branch, ids, text, reason)

    def _progress(
        self, branch: _Branch, ids: tuple[int, ...], text: str, reason: FinishReason | None
    ) -> Progress:
        """What a choice got; with a reason it ends here."""
        job, choice = branch.job, branch.choice
        completion = None if reason is None else self._completion(branch, reason)
        if reason is not None:
            self._end(branch)
        return Progress(
            ticket=job.ticket,
            index=job.request.index,
            choice=choice.number,
            tokens=ids,
            text=text,
            completion=completion,
            is_last=not job.branches,
        )

    def _completion(self, branch: _Branch, reason: FinishReason) -> Completion:
        job, choice = branch.job, branch.choice
        params = job.request.params
        logprobs = tuple(map(self._spelled, branch.logprobs))
        prompt_logprobs = (None, *map(self._spelled, job.prompt_logprobs))
        return Completion(
            index=job.request.index,
            text=branch.transcript.text if branch.transcript else "",
            tokens=tuple(choice.tokens[choice.n_prompt :]),
            finish_reason=reason,
            n_prompt_tokens=choice.n_prompt,
            logprobs=logprobs if params.logprobs is not None else None,
            choice=choice.number,
            n_choices=params.n,
            prompt_logprobs=prompt_logprobs if params.prompt_logprobs is not None else None,
            seed=None if params.is_greedy else job.request.seed,
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

    def _end(self, branch: _Branch) -> None:
        job = branch.job
        self.scheduler.finish(branch.choice)
        del self._branches[branch.choice]
        job.branches.remove(branch)
        if not job.branches:
            del self._jobs[job.ticket]
            self._deadlines.pop(job.ticket, None)

    def _mask(self, choice: Choice) -> bytes:
        """What a choice's grammar allows next; no token where it can go nowhere."""
        matcher = self._branches[choice].matcher
        assert matcher is not None
        try:
            return matcher.mask()
        except MatchError:
            return bytes(-(-self.runner.args.vocab_size // 8))


class _Clock:
    """Seconds between one lap and the next."""

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def lap(self) -> float:
        before, self._last = self._last, time.perf_counter()
        return self._last - before


def _warn_if_early(request: Request, n_drawn: int) -> None:
    """Say where a grammar's end comes before the tokens that were asked for as well."""
    if n_drawn < request.params.min_tokens:
        logger.warning(
            "request %d: its grammar ends the completion after %d tokens, before min_tokens=%d",
            request.index,
            n_drawn,
            request.params.min_tokens,
        )
