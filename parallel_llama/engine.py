"""The generation loop that every rank runs.

Each rank holds the same requests and makes the same choices about which tokens to run next. Rank 0
alone turns tokens into text and decides when a completion ends; its ids and decisions are
broadcast, so no rank can go another way. It does not know files, flags or terminals.

A step: choose pieces -> forward -> sample -> broadcast -> append, and free what is finished.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from parallel_llama.cache import OutOfSlots, Span
from parallel_llama.plan import kv_bytes_per_token
from parallel_llama.request import Completion, FinishReason, Request, StopText, TokenLogprob
from parallel_llama.runner import Piece, Runner
from parallel_llama.sampling import Draw, Sampled, sample
from parallel_llama.tokenizer import StreamDecoder, Tokenizer

# Tokens of one forward pass: enough to make prefill a matter of matrix products and not of weight
# traffic, few enough that an interruption is heard between two passes.
MAX_STEP_TOKENS = 512

# The cache holds all requests at once while it stays below this size on the fullest rank.
MAX_CACHE_BYTES = 2 << 30

_RUNNING, _STOP, _LENGTH = 0, 1, 2
_REASONS: dict[int, FinishReason] = {_STOP: "stop", _LENGTH: "length"}
_GO_ON, _INTERRUPT = 0, 1


@dataclass(frozen=True)
class Progress:
    """What one step gave one request: a token, the text that may be shown now, perhaps its end.

    `text` is filled on rank 0 alone. An interrupted request ends without a token.
    """

    index: int
    token: int | None
    text: str
    completion: Completion | None


@dataclass
class _Running:
    """A request that owns cache slots: what is generated and how much of it the cache holds."""

    request: Request
    span: Span
    n_cached: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    text: list[str] = field(default_factory=list)

    def pending(self) -> Sequence[int]:
        """Tokens whose keys and values are not in the cache yet."""
        n_prompt = len(self.request.prompt)
        if self.n_cached < n_prompt:
            return self.request.prompt[self.n_cached :]
        return self.tokens[self.n_cached - n_prompt :]

    def append(self, drawn: Sampled) -> None:
        self.tokens.append(drawn.token)
        if self.request.params.logprobs is not None:
            self.logprobs.append(TokenLogprob(drawn.token, drawn.logprob, drawn.top))

    def complete(self, reason: FinishReason) -> Completion:
        return _completion(self.request, reason, "".join(self.text), self.tokens, self.logprobs)


class _Text:
    """Rank 0's view of a completion: ids to text, and whether a stop string has appeared."""

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        self.request = request
        self.decoder = StreamDecoder(tokenizer, request.prompt)
        self.stop = StopText(request.params.stop)

    def push(self, token: int) -> tuple[str, bool]:
        """Text that may be shown now, and whether the completion stops at this token."""
        if token in self.request.stop_ids:  # an end-of-text id is not a part of the text
            return self.close(), True
        piece = self.stop.push(self.decoder.push(token))
        return piece, self.stop.found

    def close(self) -> str:
        """What was held back, now that nothing more comes."""
        tail = self.stop.push(self.decoder.flush())
        return tail + self.stop.flush()


class Generation:
    """Some requests on their way to completion.

    All ranks build it with the same requests and call `step` until `done`. Requests start in order,
    as many as the cache holds; a long prompt goes in pieces, mixed with the others' decode steps.

    Collective: every method that runs a step.
    """

    def __init__(
        self, runner: Runner, requests: Sequence[Request], tokenizer: Tokenizer | None
    ) -> None:
        self.runner = runner
        self.waiting = deque(requests)
        self.running: list[_Running] = []
        self.texts = (
            {request.index: _Text(request, tokenizer) for request in requests}
            if tokenizer is not None and runner.comm.rank == 0
            else {}
        )
        self._interrupted = False
        runner.reserve(_cache_slots(runner, requests))

    @property
    def done(self) -> bool:
        return not self.waiting and not self.running

    def interrupt(self) -> None:
        """End every request at the next step; heard on rank 0 alone, which tells the others."""
        self._interrupted = True

    def step(self) -> list[Progress]:
        """Run one forward pass and give every sequence that is through its prompt one token.

        Collective: 2 n_layers + 1 all_reduces, one head exchange, one broadcast.
        """
        self._admit()
        pieces, ready = self._choose()
        hidden = self.runner.forward(pieces)  # [T, dim] replicated
        last = torch.tensor([row for row, _ in ready], dtype=torch.int64, device=hidden.device)
        drawn: list[Sampled] = []
        if ready:
            drawn = sample(
                self.runner.logits(hidden[last]),
                self.runner.share.vocab,
                [_draw(sequence) for _, sequence in ready],
                self.runner.comm,
            )
        return self._finish_step([sequence for _, sequence in ready], drawn)

    def _admit(self) -> None:
        while self.waiting:
            request = self.waiting[0]
            try:
                span = self.runner.cache.allocate(_n_slots(request))
            except OutOfSlots:
                return
            self.running.append(_Running(self.waiting.popleft(), span))

    def _choose(self) -> tuple[list[Piece], list[tuple[int, _Running]]]:
        """The pieces of this step, and the sequences (with their last row) that get a token."""
        pieces, ready, n_tokens = [], [], 0
        by_need = sorted(self.running, key=lambda sequence: len(sequence.pending()) > 1)
        for sequence in by_need:  # decode first: one token each
            pending = sequence.pending()
            tokens = pending[: MAX_STEP_TOKENS - n_tokens]
            if not tokens:
                break
            pieces.append(Piece(sequence.span, tokens, sequence.n_cached))
            n_tokens += len(tokens)
            sequence.n_cached += len(tokens)
            if len(tokens) == len(pending):
                ready.append((n_tokens - 1, sequence))
        return pieces, ready

    def _finish_step(self, ready: list[_Running], drawn: list[Sampled]) -> list[Progress]:
        """Rank 0's ids and decisions go to all ranks; finished sequences give their slots back."""
        shown = [""] * len(ready)
        message = torch.zeros(1 + 2 * len(ready), dtype=torch.int64)
        if self.runner.comm.rank == 0:
            message[0] = _INTERRUPT if self._interrupted else _GO_ON
            for row, (sequence, own) in enumerate(zip(ready, drawn, strict=True)):
                shown[row], ended = self._decide(sequence, own.token)
                message[1 + 2 * row], message[2 + 2 * row] = own.token, ended
        message = self.runner.comm.broadcast(message.to(self.runner.device)).cpu()
        progress = []
        for row, (sequence, own) in enumerate(zip(ready, drawn, strict=True)):
            token, ended = int(message[1 + 2 * row]), int(message[2 + 2 * row])
            if token != own.token:
                raise RuntimeError(
                    f"rank {self.runner.comm.rank} drew token {own.token} for request "
                    f"{sequence.request.index} and rank 0 drew {token}: the ranks disagree"
                )
            sequence.append(own)
            sequence.text.append(shown[row])
            completion = None
            if ended != _RUNNING:
                completion = self._end(sequence, _REASONS[ended])
            progress.append(Progress(sequence.request.index, token, shown[row], completion))
        if int(message[0]) == _INTERRUPT:
            progress += self._end_all()
        return progress

    def _decide(self, sequence: _Running, token: int) -> tuple[str, int]:
        """Text to show and how the completion goes on, once this token is appended."""
        request = sequence.request
        is_last = len(sequence.tokens) + 1 == request.params.max_tokens
        text = self.texts.get(request.index)
        if text is None:
            stopped, shown = token in request.stop_ids, ""
        else:
            shown, stopped = text.push(token)
            if is_last and not stopped:
                shown += text.close()
                stopped = text.stop.found
        return shown, _STOP if stopped else _LENGTH if is_last else _RUNNING

    def _end(self, sequence: _Running, reason: FinishReason) -> Completion:
        self.runner.cache.free(sequence.span)
        self.running.remove(sequence)
        return sequence.complete(reason)

    def _end_all(self) -> list[Progress]:
        """Every request that is left ends as interrupted, with what it has."""
        ended = []
        for sequence in list(self.running):
            text = self.texts.get(sequence.request.index)
            tail = text.close() if text else ""
            sequence.text.append(tail)
            completion = self._end(sequence, "interrupted")
            ended.append(Progress(sequence.request.index, None, tail, completion))
        for request in self.waiting:
            completion = _completion(request, "interrupted", "", [], [])
            ended.append(Progress(request.index, None, "", completion))
        self.waiting.clear()
        return ended


def _draw(sequence: _Running) -> Draw:
    request = sequence.request
    position = len(request.prompt) + len(sequence.tokens)
    return Draw(request.params, request.seed, 0, position, request.index)


def _n_slots(request: Request) -> int:
    return len(request.prompt) + request.params.max_tokens


def _cache_slots(runner: Runner, requests: Sequence[Request]) -> int:
    """Slots for all requests, or as many as the size limit allows, but enough for the longest."""
    needs = [_n_slots(request) for request in requests]
    widest = max(
        kv_bytes_per_token(runner.args, share, runner.dtype.itemsize)
        for share in runner.plan.shares
    )
    return max(max(needs, default=0), min(sum(needs), MAX_CACHE_BYTES // widest))


def _completion(
    request: Request,
    reason: FinishReason,
    text: str,
    tokens: Sequence[int],
    logprobs: Sequence[TokenLogprob],
) -> Completion:
    return Completion(
        index=request.index,
        text=text,
        tokens=tuple(tokens),
        finish_reason=reason,
        n_prompt_tokens=len(request.prompt),
        logprobs=tuple(logprobs) if request.params.logprobs is not None else None,
    )
