"""`chat`: a conversation in the terminal."""

import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any

from parallel_llama.cli.arguments import (
    DEVICE,
    DTYPE,
    MAX_SEQ_LEN,
    MODEL,
    NPROC,
    RANDOM_WEIGHTS,
    SEED,
    VERIFY,
    Flag,
    Verb,
    plain_text,
    shown,
    whole,
)
from parallel_llama.cli.model import check_model
from parallel_llama.cli.prompts import Message
from parallel_llama.cli.ranks import Job, leads
from parallel_llama.cli.sampling_flags import SAMPLING, given_sampling, warn_of_idle_filters
from parallel_llama.cli.session import lead
from parallel_llama.cli.terminal import ctrl_c, ctrl_c_raises, printable
from parallel_llama.errors import CheckpointError, UsageError
from parallel_llama.fields import did_you_mean

COMMANDS = {
    "/help": "this list",
    "/clear": "begin a new conversation",
    "/system TEXT": "begin a new conversation with this instruction",
    "/quit": "leave, as Ctrl-D does",
}
HINT = "/help lists the commands; Ctrl-C stops an answer, Ctrl-D leaves"


def prepare(
    model: str,
    system: str | None,
    max_tokens: int,
    temperature: float | None,
    top_p: float | None,
    top_k: int | None,
    min_p: float | None,
    repetition_penalty: float | None,
    seed: int,
    nproc: int | None,
    dtype: str | None,
    device: str,
    max_seq_len: int | None,
    random_weights: int | None,
    verify: bool,
) -> Job:
    """Check sampling, model and plan, and return the job that chats."""
    sampling = given_sampling(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
    )
    intake, n_ranks = check_model(
        model,
        nproc,
        max_seq_len=max_seq_len,
        random_weights=random_weights,
        seed=seed,
        verify=verify,
    )
    if leads() and intake.chat_template is None:
        raise UsageError(f"{model} has no chat template, so it is no chat model; use generate")
    params = intake.sampling_params(**sampling) if leads() else None

    def work(llm: Any) -> int:
        assert params is not None  # rank 0 alone works, and it leads
        warn_of_idle_filters(sampling, [params])
        return Conversation(llm, params, system).run(model)

    options = {"dtype": dtype, "device": device, "random_weights": random_weights, "verify": verify}
    return Job(lambda: lead(work, model, intake=intake, **options), n_ranks, interactive=True)


class Conversation:
    """The turns so far, and the loop that reads a line and answers it."""

    def __init__(self, llm: Any, params: Any, system: str | None) -> None:
        # Needed by this verb alone, and slow to load.
        from rich.console import Console

        self.llm, self.params, self.system = llm, params, system
        self.console = Console(highlight=False, markup=False, emoji=False)
        self.remarks = Console(stderr=True, highlight=False, markup=False, emoji=False)
        self.turns: list[Message] = []

    def run(self, model: str) -> int:
        """Talk until the input ends; Ctrl-C gives up a line, not the program."""
        ctrl_c_raises()
        self._say(f"{model} on {self.llm.tp_size} rank{'s' * (self.llm.tp_size > 1)}. {HINT}")
        for text in self._lines():
            if text.startswith("/"):
                if text.split()[0] == "/quit":
                    break
                self._command(text)
            else:
                self._answer(text)
        return 0

    def _lines(self) -> Iterator[str]:
        """What the person enters; a line that ends in a backslash goes on in the next."""
        if sys.stdin.isatty():
            # Line editing and a history with the arrow keys; a pasted text stays in one piece.
            with suppress(ImportError):
                import readline

                readline.parse_and_bind("set enable-bracketed-paste on")
        held = ""
        while True:
            try:
                line = input("... " if held else "> ") if sys.stdin.isatty() else input()
            except EOFError:
                if sys.stdin.isatty():
                    print()
                return
            except KeyboardInterrupt:  # gives up the line, not the program
                print()
                held = ""
                continue
            if line.endswith("\\"):
                held += line[:-1] + "\n"
            elif (held + line).strip():
                yield held + line
                held = ""

    def _command(self, text: str) -> None:
        name, _, rest = text.partition(" ")
        if name == "/help":
            for command, meaning in COMMANDS.items():
                self._say(f"  {command:<14}{meaning}")
            self._say("  a line that ends in \\ goes on in the next")
        elif name == "/clear" and not rest:
            self.turns = []
            self._say("a new conversation")
        elif name == "/system" and rest.strip():
            self.turns, self.system = [], rest.strip()
            self._say("a new conversation, with this instruction")
        else:
            known = [command.split()[0] for command in COMMANDS]
            usage = "" if name not in known else f"; write {_usage(name)}"
            self._say(f"not a command: {shown(text)}{usage or did_you_mean(name, known)}")

    def _answer(self, text: str) -> None:
        turn = {"role": "user", "content": text}
        pieces = []
        try:
            with ctrl_c() as interrupted:
                for piece in self._stream([*self._first(), *self.turns, turn], interrupted):
                    pieces.append(piece)
                    self.console.print(printable(piece), end="", style="cyan", soft_wrap=True)
        except (UsageError, CheckpointError) as error:
            self._say(f"{error}; /clear begins a new conversation")
            return
        except KeyboardInterrupt:  # pressed twice: the answer is given up at once
            pass
        print(flush=True)
        stats = self.llm.statistics
        if sys.stdout.isatty():
            self._say(f"{stats.n_new_tokens} tokens, {stats.tokens_per_s:.1f} tokens/s")
        self.turns += [turn, {"role": "assistant", "content": "".join(pieces)}]

    def _stream(self, messages: list[Message], interrupted: Any) -> Iterator[str]:
        # Closed even if the terminal goes away in between: the other ranks wait for the end.
        requests = self.llm.intake.requests([messages], self.params)
        with closing(self.llm.run(requests, interrupted)) as progress:
            for step in progress:
                yield step.text

    def _first(self) -> list[Message]:
        return [] if self.system is None else [{"role": "system", "content": self.system}]

    def _say(self, text: str) -> None:
        """A remark of the program's own, apart from what the model says."""
        self.remarks.print(text, style="dim", soft_wrap=True)


def _usage(name: str) -> str:
    return next(command for command in COMMANDS if command.split()[0] == name)


VERB = Verb(
    "chat",
    "A conversation in the terminal.",
    "[--model PATH_OR_NAME] [flags]",
    (
        MODEL,
        Flag("system", "an instruction that the conversation begins with", plain_text, "TEXT"),
        Flag("max-tokens", "longest answer", whole(1, 2**31 - 1), "N", 512),
        *SAMPLING,
        SEED,
        NPROC,
        DTYPE,
        DEVICE,
        MAX_SEQ_LEN,
        RANDOM_WEIGHTS,
        VERIFY,
    ),
    "parallel-llama chat --nproc 2",
    prepare,
)
