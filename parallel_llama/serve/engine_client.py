"""The frontend's side of the engine: submits requests, receives outputs, restarts the engine."""

import asyncio
import itertools
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import msgspec

from parallel_llama.errors import (
    DISAGREE,
    CheckpointError,
    ContextExceeded,
    NumericalError,
    UsageError,
)
from parallel_llama.request import Request
from parallel_llama.serve import wire
from parallel_llama.serve.answer import Answer
from parallel_llama.serve.engine_child import AttachedEngine, EngineChild
from parallel_llama.serve.metrics import Metrics

logger = logging.getLogger(__name__)

State = Literal["loading", "ready", "restarting", "draining", "ended"]

PROBE_EVERY_S = 5.0  # interval at which an idle engine must prove that it can step
RESTART_WINDOW_S = 600.0  # older restarts do not count as part of a crash loop
MAX_BACKOFF_S = 30.0
MAX_ENGINES = 3  # engines tried per request, because the request may crash them
WRONG_USE = 2  # exit code of an engine that would end in the same way after a restart
# While other requests are unfinished, a large request and a request for several choices are
# accepted only up to (1 - SMALL_FRACTION) * max_choices unfinished choices. A small request of an
# account without unfinished choices is accepted up to (1 + SMALL_FRACTION) * max_choices.
SMALL_FRACTION = 1 / 8
_READ_BYTES = 1 << 18


class Busy(Exception):
    """The server has as many requests as it accepts, or as it can prepare in time."""


class NotReady(Exception):
    """The engine is not available now; the message says why."""


class UnknownModel(Exception):
    """The request names a model that this server does not serve."""


class EngineEnded(Exception):
    """The engine has ended and is not restarted."""

    def __init__(self, reason: str, code: int) -> None:
        super().__init__(reason)
        self.code = code


@dataclass(frozen=True)
class _AdapterChange:
    """A change of adapters that the engine has not confirmed.

    Args:
        folder: None if the adapter is unloaded.
        reply: receives the reason if the engine refuses, else None. It is itself None if a
            restarted engine loads the adapter again.
    """

    name: str
    folder: str | None
    reply: "asyncio.Future[str | None] | None" = None


class EngineClient:
    """The engine's process and its requests; `run` keeps it running.

    Unfinished requests have at most `max_choices` choices together. SMALL_FRACTION says for which
    requests this limit is lower or higher, so that one account cannot use it up. If a step takes
    longer than `step_timeout_s`, the engine is stopped. An engine is restarted at most `restarts`
    times in RESTART_WINDOW_S; unfinished requests then run again from their prompts. `probe` is a
    cheap request for an idle engine.

    A restarted engine has the adapters of the previous engine, except those that cannot be loaded
    again: they are removed from `adapters`, and requests that name them fail with UnknownModel.

    Args:
        start: starts an engine, which loads the adapters in these folders, by name.
        adapters: the folders of the adapters that the first engine loads at its start, by name.
        check_adapter: called with the name and the folder of an adapter, in a thread, before a
            restarted engine loads it at its start. Raises UsageError or CheckpointError if the
            adapter cannot be loaded.
    """

    def __init__(
        self,
        start: Callable[[Mapping[str, str]], EngineChild | AttachedEngine],
        probe: Request,
        metrics: Metrics,
        *,
        adapters: Mapping[str, str],
        check_adapter: Callable[[str, str], object],
        max_choices: int,
        restarts: int,
        step_timeout_s: float,
    ) -> None:
        self._start, self._probe = start, probe
        self.metrics = metrics
        self._max_choices, self._restarts = max_choices, restarts
        self._step_timeout_s = step_timeout_s
        self._keys = itertools.count()
        self._answers: dict[int, Answer] = {}
        # The folders of the adapters that an engine loads at its start, before it chooses the size
        # of the KV cache, and of those that clients have loaded later, by name.
        self._start_adapters, self._later_adapters = dict(adapters), dict[str, str]()
        self._check_adapter = check_adapter
        self._adapter_changes: dict[int, _AdapterChange] = {}  # by key
        # Choices of requests that are being prepared for the engine, by account.
        self._preparing: Counter[str] = Counter()
        self._probe_key: int | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._restarted_s: list[float] = []
        self._is_draining = False
        self._state: State = "loading"
        self._last_message_s = self._last_idle_submit_s = time.monotonic()
        self.loaded: wire.Loaded | None = None
        self.last_step: wire.Stepped | None = None
        self.n_restarts = 0
        self.n_failed_steps = 0
        self.n_losses = 0  # times that ranks were lost and the remaining ranks continued
        self.n_returns = 0  # processes that have replaced lost ranks
        self.on_loaded: Callable[[wire.Loaded], None] = lambda _: None

    @property
    def state(self) -> State:
        """The state of the engine; "ready" if it accepts new requests."""
        return "draining" if self._is_draining and self._state == "ready" else self._state

    @property
    def adapters(self) -> list[str]:
        """The names of the adapters of the engine, or while it is down, of the last engine."""
        return [*self._start_adapters, *self._later_adapters]

    def require_adapter(self, name: str | None) -> None:
        """Raises: UnknownModel if there is no adapter of this name."""
        if name is not None and name not in self.adapters:
            raise UnknownModel(f"the adapter {name!r:.200} is not loaded; see /v1/models")

    @property
    def n_choices(self) -> int:
        """The number of choices of unfinished requests."""
        return self._choices_by_account().total()

    def _choices_by_account(self) -> Counter[str]:
        counts = self._preparing.copy()
        for key, answer in self._answers.items():
            if key != self._probe_key:
                counts[answer.account] += answer.request.params.n
        return counts

    @property
    def step_age_s(self) -> float | None:
        """Seconds since the engine's last message; None while it is down."""
        return time.monotonic() - self._last_message_s if self._writer is not None else None

    @property
    def is_ready(self) -> bool:
        """Whether new requests are accepted, and the engine has sent a message recently.

        The engine's last message must be younger than `step_timeout_s`.
        """
        age_s = self.step_age_s
        return self.state == "ready" and age_s is not None and age_s < self._step_timeout_s

    def require_room(self, n_choices: int, account: str, *, is_large: bool = False) -> None:
        """Check that an account may have `n_choices` more choices now.

        Raises: NotReady; UsageError for more choices than the server accepts at once; Busy.
        """
        if self.state != "ready":
            self.metrics.rejected("not_ready")
            raise NotReady(_WHY[self.state])
        self._require_choices(n_choices, account, is_large)

    def _require_choices(self, n_choices: int, account: str, is_large: bool) -> None:
        if n_choices > self._max_choices:
            raise UsageError(
                f"{n_choices} completions at once exceed the limit of {self._max_choices}; ask for "
                "fewer"
            )
        counts, max_choices = self._choices_by_account(), self._max_choices
        n_unfinished = counts.total()
        if n_unfinished and (is_large or n_choices > 1):
            max_choices -= int(max_choices * SMALL_FRACTION)
        elif not counts[account]:
            max_choices += math.ceil(max_choices * SMALL_FRACTION)
        if n_unfinished + n_choices > max_choices:
            raise self.busy(
                f"{n_unfinished} of at most {max_choices} completions are waiting or running"
            )

    def busy(self, message: str) -> Busy:
        """Counts a rejected request. Returns: its error."""
        self.metrics.rejected("busy")
        return Busy(message)

    @contextmanager
    def preparing(self, n_choices: int, account: str, *, is_large: bool) -> Iterator[None]:
        """While a request is tokenised, counts its choices as unfinished choices.

        Raises: UsageError or Busy, as `require_room`, if there are too many.
        """
        self._require_choices(n_choices, account, is_large)
        self._preparing[account] += n_choices
        try:
            yield
        finally:
            self._preparing[account] -= n_choices
            self._preparing += Counter()  # drops accounts with a count of 0

    def submit(self, requests: Sequence[Request], account: str = "") -> list[Answer]:
        """Sends all requests of an account to the engine, or none.

        Raises: as `require_room` for the choices of all requests; UnknownModel for an adapter that
        was unloaded, or could not be loaded again, while the request was prepared.
        """
        self.require_room(sum(request.params.n for request in requests), account)
        for request in requests:
            self.require_adapter(request.adapter)
        answers: list[Answer] = []
        try:
            for request in requests:
                answers.append(self._submit(request, account))
                self.metrics.submitted(answers[-1])
        except BaseException:
            for answer in answers:
                answer.abandon()
            raise
        return answers

    def _submit(self, request: Request, account: str = "") -> Answer:
        answer = Answer(next(self._keys), request, self._cancel, account)
        self._send(wire.Submit(answer.key, request))
        if not self._answers:
            self._last_idle_submit_s = time.monotonic()
        self._answers[answer.key] = answer
        return answer

    async def change_adapter(self, name: str, folder: str | None) -> None:
        """Loads an adapter, or unloads it if `folder` is None; a restarted engine does it again.

        Raises: UsageError if the engine refuses; NotReady if it is not ready, or ends.
        """
        if self.state != "ready":
            raise NotReady(_WHY[self.state])
        reply = asyncio.get_running_loop().create_future()
        self._send_change(_AdapterChange(name, folder, reply))
        if (refused := await reply) is not None:
            raise UsageError(refused)

    def _send_change(self, change: _AdapterChange) -> None:
        key = next(self._keys)
        self._adapter_changes[key] = change
        self._send(wire.ChangeAdapter(key, change.name, change.folder))

    def drain(self) -> None:
        """Rejects new requests; unfinished requests continue."""
        self._is_draining = True

    def fail_unfinished(self) -> None:
        """Ends all unfinished requests with NotReady, because the server is shutting down."""
        self._fail_all(shutting_down())

    async def run(self) -> None:
        """Keeps an engine running until cancelled.

        Raises: EngineEnded if the engine is not restarted, after all unfinished requests have
        failed; RankError if the engine's process cannot be started.
        """
        while True:
            child = self._start(self._start_adapters)
            try:
                await self._converse(child)
            except BaseException:
                await child.end(0.0)
                raise
            was_loaded, self._writer = self._writer is not None, None
            self._state = "restarting"
            for change in self._adapter_changes.values():
                if change.reply is not None and not change.reply.done():
                    change.reply.set_exception(NotReady(_WHY["restarting"]))
            self._adapter_changes.clear()
            code, reason = await child.end()
            if DISAGREE in reason:
                self.metrics.mismatched()
            delay_s = self._delay_s()
            has_dropped = delay_s is not None and await self._drop_unreadable()
            if delay_s is None or (code == WRONG_USE and not was_loaded and not has_dropped):
                self._state = "ended"
                self._fail_all(NotReady(reason))
                raise EngineEnded(reason, code if code > 0 else 1)
            logger.error("the engine has ended and is being restarted: %s", reason)
            self.n_restarts += 1
            await asyncio.sleep(delay_s)

    async def _drop_unreadable(self) -> bool:
        """Before a restart, drops the adapters that would end an engine at its start.

        Returns: whether there were any. Before an engine has been loaded, this does nothing.
        """
        if self.loaded is None:
            return False
        before = list(self._start_adapters.items())
        for name, folder in before:
            try:
                await asyncio.to_thread(self._check_adapter, name, folder)
            except (UsageError, CheckpointError) as error:
                self._drop_adapter(name, str(error))
        return len(self._start_adapters) < len(before)

    def _drop_adapter(self, name: str, why: str) -> None:
        logger.error("an adapter could not be loaded again and is no longer served: %s", why)
        self._forget_adapter(name)

    def _forget_adapter(self, name: str) -> None:
        self._start_adapters.pop(name, None)
        self._later_adapters.pop(name, None)

    def _delay_s(self) -> float | None:
        """Seconds until the next restart; None after too many restarts."""
        now = time.monotonic()
        self._restarted_s = [when for when in self._restarted_s if now - when < RESTART_WINDOW_S]
        if len(self._restarted_s) >= self._restarts:
            return None
        self._restarted_s.append(now)
        is_first = len(self._restarted_s) == 1
        return 0.0 if is_first else min(MAX_BACKOFF_S, 2.0 ** (len(self._restarted_s) - 2))

    async def _converse(self, child: EngineChild | AttachedEngine) -> None:
        """Receives the messages of one engine until it ends or hangs."""
        reader, writer = await asyncio.open_connection(sock=child.socket)
        frames = wire.Frames()
        watching = asyncio.create_task(self._watch(writer))
        try:
            while data := await reader.read(_READ_BYTES):
                for body in frames.feed(data):
                    self._on_message(wire.from_engine.decode(body), writer)
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            logger.error("the engine's messages cannot be read: %s", error)
        finally:
            watching.cancel()
            writer.close()

    async def _watch(self, writer: asyncio.StreamWriter) -> None:
        """Sends probes to an idle engine, and stops an engine that does not step."""
        probe_every_s = min(PROBE_EVERY_S, self._step_timeout_s / 2)
        while True:
            await asyncio.sleep(probe_every_s / 5)
            now, is_loaded = time.monotonic(), self._writer is not None
            if is_loaded and not self._answers and now - self._last_message_s > probe_every_s:
                self._probe_key = self._submit(self._probe).key
            waited_s = now - max(self._last_message_s, self._last_idle_submit_s)
            if is_loaded and self._answers and waited_s > self._step_timeout_s:
                logger.error("the engine has not stepped for %.1f s and is stopped", waited_s)
                writer.transport.abort()
                return

    def _on_message(self, message: wire.FromEngine, writer: asyncio.StreamWriter) -> None:
        self._last_message_s = time.monotonic()
        match message:
            case wire.Stepped():
                self.last_step = message
                self.metrics.stepped(message, self._probe_key)
                for key in message.begun:
                    if (answer := self._answers.get(key)) is not None:
                        answer.start()
                for output in message.outputs:
                    if (answer := self._answers.get(output.key)) is not None:
                        self._on_output(answer, output)
            case wire.Scored():
                if (answer := self._answers.get(message.key)) is not None:
                    answer.put_prompt_logprobs(message.logprobs)
            case wire.Loaded():
                self._begin(message, writer)
            case wire.Working():
                pass  # it shows that the engine does not hang
            case wire.Regrouped():
                self.n_losses += message.has_lost
                self.n_returns += message.n_new
                self.loaded = message.loaded
                self.on_loaded(message.loaded)
            case wire.EngineRefused():
                kind = ContextExceeded if message.exceeds_context else UsageError
                self._fail(message.key, kind(message.reason))
            case wire.AdapterChanged():
                self._on_changed(message)
            case wire.Failed():
                self.n_failed_steps += 1
                logger.error("a step failed: %s", message.reason)
                for key in message.keys:
                    self._fail(key, NumericalError(message.reason))

    def _on_changed(self, message: wire.AdapterChanged) -> None:
        change = self._adapter_changes.pop(message.key)
        if message.refused is None:
            if change.folder is None:
                self._forget_adapter(change.name)
            else:
                self._later_adapters[change.name] = change.folder
        if change.reply is not None:
            if not change.reply.done():
                change.reply.set_result(message.refused)
            return
        if message.refused is not None:
            self._drop_adapter(change.name, message.refused)
        if not self._adapter_changes:
            self._resume()

    def _on_output(self, answer: Answer, output: wire.Output) -> None:
        is_first, before_s = answer.first_token_s is None, answer.last_token_s[output.choice]
        is_counted = answer.key != self._probe_key
        new = answer.put(output)
        if new is not None and is_counted:
            self.metrics.emitted(answer, new, before_s, is_first=is_first)
        if answer.has_ended:
            self._forget(answer.key)
            if answer.n_engines > 1:  # choices that had ended in an earlier engine may still run
                self._send(wire.Cancel(answer.key))
            if is_counted:
                self.metrics.ended(answer)
                _log(answer)

    def _begin(self, loaded: wire.Loaded, writer: asyncio.StreamWriter) -> None:
        """Makes a new engine ready, after it has loaded the previous engine's adapters again."""
        self.loaded, self._writer = loaded, writer
        for name, folder in self._later_adapters.items():
            self._send_change(_AdapterChange(name, folder))
        if not self._adapter_changes:
            self._resume()

    def _resume(self) -> None:
        """Makes the engine ready, and submits the previous engine's unfinished requests again."""
        assert self.loaded is not None
        self._state = "ready"
        self.on_loaded(self.loaded)
        for key, answer in list(self._answers.items()):
            if answer.is_abandoned or key == self._probe_key:
                self._forget(key)
            elif answer.n_engines == MAX_ENGINES:
                self._fail(key, NotReady("every engine that ran this request has ended"))
            else:
                self._submit_again(answer)

    def _submit_again(self, answer: Answer) -> None:
        try:
            self.require_adapter(answer.request.adapter)
        except UnknownModel as error:
            self._fail(answer.key, error)
        else:
            answer.restart()
            self._send(wire.Submit(answer.key, answer.request))

    def _forget(self, key: int) -> Answer | None:
        """Returns: the answer; None if it has ended, which the engine may not know yet."""
        if key == self._probe_key:
            self._probe_key = None
        return self._answers.pop(key, None)

    def _fail(self, key: int, error: Exception) -> None:
        if (answer := self._forget(key)) is not None:
            answer.fail(error)

    def _cancel(self, answer: Answer) -> None:
        if answer.key in self._answers:
            self._send(wire.Cancel(answer.key))

    def _send(self, message: wire.ToEngine) -> None:
        """No-op while the engine is down: requests are submitted again when it is back."""
        if self._writer is not None:
            self._writer.write(wire.framed(message))

    def _fail_all(self, error: Exception) -> None:
        for key in list(self._answers):
            self._fail(key, error)


def shutting_down() -> NotReady:
    """The error of requests that are unfinished when the server shuts down."""
    return NotReady(_WHY["draining"])


def _log(answer: Answer) -> None:
    """Logs one line for an answer that has ended, without its text. Units: seconds."""
    now, asked_s = time.monotonic(), answer.submitted_s
    first_s = answer.first_token_s
    fields = {
        "request_id": answer.request_id,
        "prompt_tokens": len(answer.request.prompt),
        "completion_tokens": answer.n_tokens,
        "finish_reason": ",".join(answer.ends),
        "first_token_s": None if first_s is None else round(first_s - asked_s, 4),
        "total_s": round(now - asked_s, 4),
    }
    logger.info("answered", extra={"fields": fields})


_WHY = {
    "loading": "the model is being loaded",
    "restarting": "the engine is being restarted",
    "draining": "the server is shutting down",
    "ended": "the engine has ended",
}
