"""`chat`: an interactive conversation in the terminal."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import replace
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parallel_llama.cli.arguments import Flag, Flags, Job, Verb
from parallel_llama.cli.model import (
    ADAPTER,
    ATTENTION_SINKS,
    DRAFTS,
    KV_CACHE_BYTES,
    LOADING,
    MODEL,
    RANKS,
    SEED,
    check_model,
    only_adapter,
)
from parallel_llama.cli.parsers import plain_text, token_count
from parallel_llama.cli.prompts import TEMPLATE_VAR
from parallel_llama.cli.sampling_flags import FLAGS, SAMPLING, given_sampling, warn_of_idle_filters
from parallel_llama.cli.session import Meter, lead, leads
from parallel_llama.cli.terminal import ctrl_c, ctrl_c_raises, ending_raises
from parallel_llama.errors import CheckpointError, ContextExceeded, UsageError, escaped, quoted
from parallel_llama.files.bounded_files import expanded
from parallel_llama.files.fields import did_you_mean
from parallel_llama.request import MAX_TOKEN_ID, Request, SamplingParams, with_special_tokens
from parallel_llama.tokenizer import Chat, Message, StreamDecoder
from parallel_llama.tokenizer.answers import AnswerReader
from parallel_llama.tokenizer.channels import ChannelText

if TYPE_CHECKING:
    from parallel_llama.llm import LLM

SYSTEM: Flag[str | None] = Flag("system", "system message of the conversation", plain_text, "TEXT")
MAX_TOKENS: Flag[int] = Flag(
    "max-tokens", "maximum tokens of an answer", token_count(1, MAX_TOKEN_ID), "N", 512
)

COMMANDS = {
    "/help": "list the commands",
    "/clear": "start a new conversation",
    "/system TEXT": "start a new conversation with this system message",
    "/retry": "answer the last message again",
    "/continue": "continue an answer that was cut off",
    "/set NAME VALUE": "change a sampling parameter, like the flag --NAME; /set alone lists them",
    "/save FILE": "write the conversation to a new file, as a line for generate --prompts",
    "/exit": "leave, like /quit and Ctrl-D",
}
NAMES = (*(command.split()[0] for command in COMMANDS), "/quit")
HINT = "/help lists the commands; Ctrl-C stops an answer, Ctrl-D leaves"
SETTINGS = {flag.key: flag for flag in FLAGS if flag.key in ("max_tokens", "seed")} | {
    flag.key: flag for flag in SAMPLING
}

# Old turns are dropped until the context has room for an answer of at least this many tokens.
MIN_ANSWER_TOKENS = 256


def prepare(flags: Flags) -> Job:
    """Checks sampling parameters, model and plan, and returns the job."""
    model, sampling = flags[MODEL], given_sampling(flags)
    adapter = only_adapter(flags)
    inputs, n_ranks = check_model(flags)

    def run() -> int:
        if not leads():
            return lead(flags, inputs, lambda _: 0)
        if inputs.chat_template is None:
            raise UsageError(f"{model} has no chat template: it is not a chat model; use generate")
        params = inputs.sampling_params(**sampling)

        def work(llm: "LLM") -> int:
            warn_of_idle_filters(sampling, [params])
            variables = dict(flags[TEMPLATE_VAR])
            return Conversation(llm, params, flags[SYSTEM], variables, adapter).run(model)

        return lead(flags, inputs, work)

    return Job(run, n_ranks, interactive=True)


class Conversation:
    """The turns so far, and the loop that reads lines and answers them."""

    def __init__(
        self,
        llm: "LLM",
        params: SamplingParams,
        system: str | None,
        variables: Mapping[str, Any],
        adapter: str | None = None,
    ) -> None:
        # Slow to import, and needed only by this command.
        from rich.console import Console

        self.has_markers = llm.input_processor.has_markers
        self.llm, self.params, self.system, self.variables = llm, params, system, variables
        self.adapter = adapter
        self.console = Console(highlight=False, markup=False, emoji=False)
        self.notices = Console(stderr=True, highlight=False, markup=False, emoji=False)
        self.turns: list[Message] = []
        # Tokens of the last prompt and answer if the answer was cut off; else empty.
        self.cut_off: tuple[int, ...] = ()
        # For answers with markers: the reader of the last answer, and its number of messages.
        self.reader: AnswerReader | None = None
        self.n_messages = 0

    def run(self, model: str) -> int:
        """Runs until the input ends. Ctrl-C cancels a line or an answer, not the program."""
        ctrl_c_raises()
        ending_raises()
        self._say(f"{model} on {self.llm.tp_size} rank{'s' * (self.llm.tp_size > 1)}. {HINT}")
        for text in self._lines():
            if text.split()[0] in ("/quit", "/exit"):
                break
            if text.startswith("/"):
                self._command(text)
            else:
                self._answer(text)
        return 0

    def _lines(self) -> Iterator[str]:
        """The user's inputs; a line that ends in a backslash continues on the next line."""
        if sys.stdin is None:
            return
        if isinstance(sys.stdin, TextIOWrapper):
            # Bytes that are not UTF-8 are then refused with their message, not with a traceback.
            sys.stdin.reconfigure(errors="surrogateescape")
        if sys.stdin.isatty():
            # Line editing, history, and pasting of several lines at once.
            with suppress(ImportError):
                import readline

                readline.parse_and_bind("set enable-bracketed-paste on")
        unfinished = ""
        while True:
            try:
                line = input("... " if unfinished else "> ") if sys.stdin.isatty() else input()
            except EOFError:
                if sys.stdin.isatty():
                    print()
                return
            except KeyboardInterrupt:  # cancels the line, not the program
                print()
                self._say("Ctrl-D or /exit leaves")
                unfinished = ""
                continue
            if line.endswith("\\"):
                unfinished += line[:-1] + "\n"
            elif (unfinished + line).strip():
                yield unfinished + line
                unfinished = ""

    def _command(self, text: str) -> None:
        name, _, rest = text.partition(" ")
        rest = rest.strip()
        if name == "/help":
            for command, meaning in COMMANDS.items():
                self._say(f"  {command:<17}{meaning}")
            self._say("  a line that ends in \\ continues on the next line")
        elif name == "/clear" and not rest:
            self.turns, self.cut_off = [], ()
            self._say("a new conversation")
        elif name == "/system" and rest:
            self._set_system(rest)
        elif name == "/retry" and not rest:
            self._retry()
        elif name == "/continue" and not rest:
            self._continue()
        elif name == "/set":
            self._set(rest)
        elif name == "/save" and rest:
            self._save(expanded(rest))
        else:
            usage = "" if name not in NAMES else f"; write {_usage(name)}"
            self._say(f"not a command: {quoted(text)}{usage or did_you_mean(name, NAMES)}")

    def _set_system(self, text: str) -> None:
        try:
            self.system = plain_text(text)
        except ValueError:
            self._say(f"/system {quoted(text)}: not UTF-8 text; type it in UTF-8")
            return
        self.turns, self.cut_off = [], ()
        self._say("a new conversation with this system message")

    def _answer(self, text: str) -> None:
        turn = {"role": "user", "content": text}

        def make_request() -> Request:
            request = self._request(turn)
            self.reader = self.llm.input_processor.answer_reader(request)
            self.n_messages = 0
            return request

        answer = self._generate(make_request)
        if answer is not None:
            self.turns += [turn, {"role": "assistant", "content": self._content(answer)}]

    def _continue(self) -> None:
        if not self.cut_off:
            self._say("the last answer was not cut off" if self.turns else "no message yet")
            return
        # The continuation begins with the whole character in which the answer was cut off, if any.
        decoder = StreamDecoder(self.llm.input_processor.tokenizer, self.cut_off)
        answer = self._generate(lambda: self._limited_request(list(self.cut_off)))
        if answer is not None:
            start = self.turns[-1]["content"].removesuffix(decoder.flush())
            content = self._content(start + answer)
            self.turns[-1] = {"role": "assistant", "content": content}

    def _content(self, answer: str) -> str:
        """An answer without the line breaks that separate it from the reasoning before it."""
        return answer.lstrip("\n") if self.has_markers else answer

    def _generate(self, make_request: Callable[[], Request]) -> str | None:
        """Streams a completion; returns its text, or None if the request was refused.

        Reasoning and calls are printed and are not a part of the text.
        """
        pieces: list[str] = []
        tokens: list[int] = []
        reason = None
        try:
            request = make_request()
            meter = Meter([request])
            # Ends the run even if the terminal closes: the other ranks wait for its end.
            with (
                ctrl_c(raises_at=0) as interrupted,
                closing(self.llm.run([request], interrupted)) as steps,
            ):
                for step in steps:
                    meter.take(step)
                    tokens += step.tokens
                    reason = step.completion and step.completion.finish_reason
                    is_last = reason == "stop"
                    pieces += [self._show(*part) for part in self._read(step.text, is_last)]
        except (UsageError, CheckpointError) as error:
            self._say(f"{error}; /clear starts a new conversation")
            return None
        print(flush=True)
        if sys.stdout.isatty():
            rate = f", {meter.tokens_per_s:.1f} tokens/s" if meter.tokens_per_s else ""
            self._say(f"{meter.n_tokens} token{'s' * (meter.n_tokens != 1)}{rate}")
        is_cut_off = reason in (None, "length", "interrupted")
        self.cut_off = (*request.prompt, *tokens) if is_cut_off else ()
        if reason == "length":
            self._say(self._cut_off_line(request.max_tokens))
        elif is_cut_off and interrupted():
            self._say("stopped; /continue continues the answer")
        return "".join(pieces)

    def _read(self, text: str, is_last: bool) -> list[tuple[str, bool]]:
        """The texts to show for a piece of an answer, and whether each is reasoning."""
        if self.reader is None:
            return [(text, False)]
        parts: list[ChannelText] = self.reader.push(text)
        parts += self.reader.finish() if is_last else []
        shown = []
        for part in parts:
            is_new = part.number > self.n_messages > 0
            self.n_messages = part.number
            shown.append(("\n\n" * is_new + part.text, part.channel != "final"))
        return shown

    def _show(self, text: str, is_reasoning: bool) -> str:
        """Prints a text, and returns the part of it that belongs to the answer."""
        style = "dim" if is_reasoning else "cyan"
        self.console.print(escaped(text), end="", style=style, soft_wrap=True)
        return "" if is_reasoning else text

    def _cut_off_line(self, max_tokens: int) -> str:
        """Why an answer was cut off, and how to get the rest."""
        try:
            self._limited_request(list(self.cut_off))
        except ContextExceeded:
            return (
                "the answer is cut off: the context or KV cache is full; ask for the rest in a new "
                "message"
            )
        return (
            f"the answer is cut off at --max-tokens {max_tokens}; /continue continues it, "
            "/set max-tokens N allows longer answers"
        )

    def _request(self, turn: Message) -> Request:
        """The request for an answer to a turn.

        Drops the oldest turns, with a notice, until the context has room for a short answer.
        """
        turns = self.turns
        min_tokens = min(self._max_tokens, MIN_ANSWER_TOKENS)
        while True:
            chat = Chat([*self._system_messages(), *turns, turn], template_vars=self.variables)
            try:
                request = self._limited_request(chat)
            except ContextExceeded:
                if not turns:
                    raise
            else:
                if request.max_tokens >= min_tokens or not turns:
                    break
            turns = turns[2:]
        if n_dropped := len(self.turns) - len(turns):
            self._say(f"the context or KV cache is full: dropped the {n_dropped} oldest messages")
        self.turns = turns
        return request

    @property
    def _max_tokens(self) -> int:
        return self.params.max_tokens or self.llm.input_processor.max_seq_len

    def _limited_request(self, prompt: Chat | list[int]) -> Request:
        """The request for --max-tokens tokens, or for as many as fit in context and KV cache.

        Raises: ContextExceeded if none fits.
        """
        inputs = self.llm.input_processor
        # With attention sinks, a text can grow without limit if the KV cache holds its window.
        is_unlimited = inputs.n_cache_tokens == inputs.longest > inputs.max_seq_len
        params = replace(self.params, max_tokens=self._max_tokens if is_unlimited else None)
        request: Request = inputs.request(0, prompt, params)
        max_tokens = min(self._max_tokens, request.max_tokens)
        params = replace(request.params, max_tokens=max_tokens)
        request = replace(request, params=params, adapter=self.adapter)
        return with_special_tokens(request) if inputs.has_special_markers else request

    def _system_messages(self) -> list[Message]:
        return [] if self.system is None else [{"role": "system", "content": self.system}]

    def _retry(self) -> None:
        if not self.turns:
            self._say("no message yet")
            return
        question = self.turns[-2]["content"]
        self.turns = self.turns[:-2]
        self._answer(question)

    def _set(self, text: str) -> None:
        name, _, value = text.partition(" ")
        flag = SETTINGS.get(name.removeprefix("--").replace("-", "_"))
        if flag is not None and value.strip():
            assert flag.parse is not None
            try:
                changed = {flag.key: flag.parse(value.strip())}
                self.params = replace(self.params, **changed)
            except ValueError as error:
                self._say(f"{name} {quoted(value.strip())}: {error}")
                return
            warn_of_idle_filters(changed, [self.params])
        elif text:
            usage = did_you_mean(name, SETTINGS) if flag is None else "; write /set NAME VALUE"
            self._say(f"not a setting: {quoted(text)}{usage}")
            return
        values = (f"{key.replace('_', '-')} {getattr(self.params, key)}" for key in SETTINGS)
        self._say(", ".join(values))

    def _save(self, path: Path) -> None:
        line = json.dumps({"messages": [*self._system_messages(), *self.turns]}, ensure_ascii=False)
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(line + "\n")
        except (OSError, ValueError) as error:  # ValueError: a NUL in the path
            reason = getattr(error, "strerror", None) or error
            self._say(f"{path}: {reason}; give another name")
            return
        self._say(f"{len(self.turns)} messages in {path}")

    def _say(self, text: str) -> None:
        """Prints a message of the program, as opposed to the model's text, to stderr."""
        self.notices.print(text, style="dim", soft_wrap=True)


def _usage(name: str) -> str:
    return next((usage for usage in COMMANDS if usage.split()[0] == name), name)


VERB = Verb(
    "chat",
    "Starts a conversation in the terminal.",
    "[MODEL] [flags]",
    (
        *(MODEL, ADAPTER, *DRAFTS, SYSTEM, MAX_TOKENS, *SAMPLING, SEED, TEMPLATE_VAR),
        *(*RANKS, KV_CACHE_BYTES, ATTENTION_SINKS, *LOADING),
    ),
    "parallel-llama chat --nproc 2",
    prepare,
    argument=MODEL,
)
