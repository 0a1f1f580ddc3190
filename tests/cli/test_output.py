"""The output of commands: completions in order, files while they are written, conversations."""

import io
import json
import re
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from parallel_llama.cli.chat import Conversation
from parallel_llama.cli.generate import Results, _generate
from parallel_llama.cli.prompts import Line, Prompt, read_lines
from parallel_llama.cli.results import ResultFile
from parallel_llama.cli.terminal import StatusLine
from parallel_llama.errors import UsageError
from parallel_llama.request import (
    Completion,
    FinishReason,
    Request,
    SamplingParams,
    resolve_max_tokens,
)
from parallel_llama.tokenizer import Chat, StreamDecoder, Vocabulary
from parallel_llama.tokenizer.answers import AnswerReader, answer_reader, markers


@dataclass
class Step:
    index: int
    text: str = ""
    completion: Completion | None = None
    tokens: tuple[int, ...] = (1,)
    choice: int = 0


def done(index: int, text: str = "text", choice: int = 0, n: int = 1) -> Step:
    ended = Completion(index, text, (1, 2), "stop", 3, choice=choice, n_choices=n)
    return Step(index, "", ended)


def requests(n_prompts: int, n: int = 1) -> list[Request]:
    params = SamplingParams(n=n)
    return [Request(i, (1, 2, 3), params, 0, frozenset()) for i in range(n_prompts)]


def shown_results(
    prompts: Sequence[Prompt], as_json: bool = False, n: int = 1, template: str = ""
) -> Results:
    lines = [Line(f"prompt {i}", prompt) for i, prompt in enumerate(prompts)]
    asked = requests(len(lines), n)
    return Results(lines, asked, as_json, None, lambda _: answer_reader(template, ""))


def test_stdout_keeps_input_order_and_file_keeps_finish_order(capsys, tmp_path):
    file = tmp_path / "answers.jsonl"
    asked = requests(3)
    with Results([], asked, True, ResultFile(file, asked, {}, resume=False)) as results:
        for index in (2, 0, 1):
            results.take(done(index))
    shown = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["index"] for line in shown] == [0, 1, 2]
    assert shown[0].keys() == {"index", "text", "tokens", "finish_reason", "n_prompt_tokens"}
    written = [json.loads(line)["index"] for line in file.read_text().splitlines()]
    assert written == [2, 0, 1]


def test_completions_after_a_refused_prompt_are_shown(capsys):
    """After the loss of a rank a prompt may no longer fit into the KV cache."""

    def run(*_: object) -> Iterator[Step]:
        yield from (done(2), done(0))
        raise UsageError("the KV cache has 2 blocks")

    results = shown_results(["a", "b", "c"], as_json=True)
    with pytest.raises(UsageError):
        _generate(SimpleNamespace(run=run), [], results, None)
    shown = [json.loads(line)["index"] for line in capsys.readouterr().out.splitlines()]
    assert shown == [0, 2]


def test_a_finished_completion_is_shown_while_later_ones_run(capsys):
    results = shown_results(["a", "b"], as_json=True)
    results.take(done(0))
    assert json.loads(capsys.readouterr().out)["index"] == 0


def test_one_prompt_streams_and_is_not_repeated_at_its_end(capsys):
    results = shown_results(["a"])
    results.take(Step(0, "Par"))
    assert capsys.readouterr().out == "Par"
    results.take(Step(0, "is", done(0, "Paris").completion))
    assert capsys.readouterr().out == "is\n"


CHANNELS = "<|start|><|channel|><|message|>"
THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi"


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_reasoning_is_shown_on_a_terminal_but_not_in_a_pipe(monkeypatch, capsys, size):
    """Regression: the text contained the reasoning and the names of channels."""
    pieces = [THOUGHT[at : at + size] for at in range(0, len(THOUGHT), size)]

    def run() -> None:
        results = shown_results(["a"], template=CHANNELS)
        for piece in pieces:
            results.take(Step(0, piece))
        results.take(done(0, THOUGHT))

    run()
    assert capsys.readouterr().out == "Hi\n"
    monkeypatch.setattr("sys.stdout", terminal := Terminal())
    run()
    assert re.sub(r"\x1b\[\d*m", "", terminal.getvalue()) == "Hm.\n\nHi\n"


def test_json_line_separates_reasoning_from_text(capsys):
    results = shown_results(["a", "b"], as_json=True, template=CHANNELS)
    results.take(done(0, THOUGHT))
    line = json.loads(capsys.readouterr().out)
    assert (line["text"], line["reasoning"]) == ("Hi", "Hm.")
    results.take(Step(1, "", Completion(1, THOUGHT[:30], (1,), "length", 3)))
    out, err = capsys.readouterr()
    assert json.loads(out)["text"] == "" and "prompt 1: cut off while reasoning" in err


def test_completions_of_several_prompts_have_titles(capsys):
    results = shown_results(["a\x1b", [1, 2]])
    results.take(done(1, "two"))
    results.take(done(0, "one"))
    out = capsys.readouterr().out
    assert out == "[0] 'a\\x1b'\none\n\n[1] 2 token ids\ntwo\n\n"


def test_every_choice_of_a_prompt_is_shown_in_order(capsys):
    results = shown_results(["a"], n=2)
    results.take(done(0, "second", choice=1, n=2))
    assert capsys.readouterr().out == ""
    results.take(done(0, "first", choice=0, n=2))
    assert capsys.readouterr().out == "[0, 1 of 2] 'a'\nfirst\n\n[0, 2 of 2] 'a'\nsecond\n\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_cut_to_one_line_of_the_terminal():
    """A wrapped progress line would leave its first part behind at each redraw."""
    terminal = Terminal()
    status = StatusLine(terminal)
    status.clear()
    assert terminal.getvalue() == ""
    status.show(lambda: "x" * 200)
    assert terminal.getvalue() == "\r\x1b[K" + "x" * 79
    status.show(lambda: "too soon")
    status.clear()
    assert terminal.getvalue().endswith("x\r\x1b[K")


def test_progress_is_not_shown_without_a_terminal():
    pipe = io.StringIO()
    status = StatusLine(pipe)
    status.show(lambda: "progress")
    status.clear()
    assert pipe.getvalue() == ""


UNLIMITED = 1 << 30


@dataclass
class EchoModel:
    """Answers with the number of messages it was shown, and refuses one that says 'refuse'.

    An answer has two tokens, 1 and 1, and ends as `finish_reason` says. A message has 10 tokens, or
    5,000 if it says 'long'. The bytes of a token are its id.
    """

    tp_size: int = 1
    max_seq_len: int = 1000
    n_cache_tokens: int = 1000
    has_sinks: bool = False
    finish_reason: FinishReason = "stop"
    seen: list[list[dict[str, str]]] = field(default_factory=list)
    asked: list[Request] = field(default_factory=list)
    presses: int = 0  # of Ctrl-C in every answer
    template: str = ""

    @property
    def has_markers(self) -> bool:
        return bool(markers(self.template))

    @property
    def has_special_markers(self) -> bool:
        return self.has_markers

    def answer_reader(self, _: Request) -> AnswerReader | None:
        return answer_reader(self.template, "")

    @property
    def input_processor(self) -> "EchoModel":
        return self

    @property
    def longest(self) -> int:
        return UNLIMITED if self.has_sinks else self.max_seq_len

    @property
    def tokenizer(self) -> "EchoModel":
        return self

    @property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary([bytes([id]) for id in range(256)], {})

    def request(self, index: int, prompt: Chat | list[int], params: SamplingParams) -> Request:
        if isinstance(prompt, Chat):
            if prompt.messages[-1]["content"] == "refuse":
                raise UsageError("the template refuses it")
            self.seen.append(list(prompt.messages))
        ids = prompt
        if isinstance(prompt, Chat):
            n_long = sum(message["content"] == "long" for message in prompt.messages)
            ids = [1] * (10 * len(prompt.messages) + 4990 * n_long)
        limit = self.longest
        if params.max_tokens is None:
            limit = min(self.max_seq_len, self.n_cache_tokens + 1)
        most = resolve_max_tokens(len(ids), params, limit)
        return Request(index, tuple(ids), replace(params, max_tokens=most), 0, frozenset())

    def run(self, requests: Sequence[Request], interrupted: Any) -> Iterator[Step]:
        assert not interrupted()
        self.asked += requests
        yield Step(0, "answer ")
        for _ in range(self.presses):
            signal.raise_signal(signal.SIGINT)
        if interrupted():
            return
        ended = Completion(0, "", (1, 1), self.finish_reason, 3)
        yield Step(0, f"to {len(self.seen[-1])}\x1b[2J", ended)


def talk(
    monkeypatch: pytest.MonkeyPatch,
    typed: str | io.TextIOWrapper,
    model: EchoModel,
    system: str | None = None,
    params: SamplingParams | None = None,
) -> Conversation:
    stdin = io.StringIO(typed) if isinstance(typed, str) else typed
    monkeypatch.setattr("sys.stdin", stdin)
    before = signal.getsignal(signal.SIGINT)
    try:
        conversation = Conversation(model, params or SamplingParams(), system, {})
        assert conversation.run("echo") == 0
    finally:
        signal.signal(signal.SIGINT, before)
    return conversation


def test_a_conversation_keeps_its_turns(monkeypatch):
    model = EchoModel()
    talk(monkeypatch, "one\n\ntwo\\\nlines\n/clear\nthree\n/quit\nfour\n", model, "Be brief")
    system = {"role": "system", "content": "Be brief"}
    first = [system, {"role": "user", "content": "one"}]
    answer = {"role": "assistant", "content": "answer to 2\x1b[2J"}
    assert model.seen == [
        first,
        [*first, answer, {"role": "user", "content": "two\nlines"}],
        [system, {"role": "user", "content": "three"}],
    ]


def test_answer_is_shown_without_escape_codes(monkeypatch, capsys):
    talk(monkeypatch, "one\n", EchoModel())
    assert capsys.readouterr().out == "answer to 1\\x1b[2J\n"


@dataclass
class Thinker(EchoModel):
    """Answers in two channels; the first answer is cut off inside the second channel."""

    template: str = "<|start|><|channel|><|message|>"
    pieces: list[str] = field(
        default_factory=lambda: [
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>fin",
            " there<|end|>",
        ]
    )

    def run(self, requests: Sequence[Request], _: Any) -> Iterator[Step]:
        self.asked += requests
        if len(self.asked) == 1:
            yield Step(0, self.pieces[0])
            yield Step(0, "al<|message|>Hi", Completion(0, "", (1, 1), "length", 3))
        else:
            yield Step(0, self.pieces[1], Completion(0, "", (1,), "stop", 3))


def test_reasoning_is_shown_and_is_not_a_part_of_the_answer(monkeypatch, capsys):
    """Regression: markers were shown as text, and the reasoning was sent back as an answer."""
    model = Thinker()
    conversation = talk(monkeypatch, "one\n/continue\n", model)
    assert capsys.readouterr().out == "Hm.\n\nHi\n there\n"
    assert conversation.turns[-1] == {"role": "assistant", "content": "Hi there"}
    assert not model.asked[0].params.skip_special_tokens and model.asked[0].hides_markers


def test_continued_answer_keeps_its_line_breaks(monkeypatch):
    model = Thinker()
    model.pieces[1] = "\nthere<|end|>"
    conversation = talk(monkeypatch, "one\n/continue\n", model)
    assert conversation.turns[-1] == {"role": "assistant", "content": "Hi\nthere"}


def test_line_that_is_not_utf_8_is_refused_and_the_conversation_continues(monkeypatch, capsys):
    """In a locale with UTF-8, Python refuses such a byte; it ended the conversation."""
    model = EchoModel()
    stdin = io.TextIOWrapper(io.BytesIO(b"caf\xe9\n2\n"), encoding="utf-8", errors="strict")
    talk(monkeypatch, stdin, model)
    assert [messages[-1]["content"] for messages in model.seen] == ["2"]
    assert "unpaired surrogate, which is not text" in capsys.readouterr().err


def test_a_refused_turn_is_forgotten_and_the_conversation_goes_on(monkeypatch, capsys):
    model = EchoModel()
    talk(monkeypatch, "1\nrefuse\n2\n/system New\n3\n", model)
    assert [len(messages) for messages in model.seen] == [1, 3, 2]
    assert "refuses it; /clear starts a new conversation" in capsys.readouterr().err


def test_message_that_is_too_long_keeps_the_conversation(monkeypatch, capsys):
    """Regression: all turns were dropped without a notice, and /continue raised IndexError."""
    model = EchoModel(finish_reason="length")
    talked = talk(monkeypatch, "1\nlong\n/continue\n", model)
    assert [turn["content"] for turn in talked.turns] == ["1", "answer to 1\x1b[2J" * 2]
    err = capsys.readouterr().err
    assert "but the context has 1000" in err and "dropped" not in err


def test_system_message_that_is_not_utf_8_is_refused(monkeypatch, capsys, tmp_path):
    """Regression: /save raised UnicodeEncodeError, and left an empty file."""
    path = tmp_path / "talk.jsonl"
    stdin = io.BytesIO(b"1\n/system caf\xe9\n/save " + bytes(path) + b"\n")
    talked = talk(monkeypatch, io.TextIOWrapper(stdin, "utf-8"), EchoModel(), "Be brief")
    assert talked.system == "Be brief" and len(talked.turns) == 2
    assert "/system 'caf\\udce9': not UTF-8 text" in capsys.readouterr().err
    assert len(read_lines(str(path))[0].prompt.messages) == 3


def test_unknown_command_is_not_sent_as_a_message(monkeypatch, capsys):
    model = EchoModel()
    talk(monkeypatch, "/claer\n/system\n/help\n/exi\n/exit\nnever\n", model)
    err = capsys.readouterr().err
    assert "not a command: '/claer'; did you mean '/clear'?" in err
    assert "not a command: '/exi'; did you mean '/exit'?" in err
    assert "write /system TEXT" in err
    assert "Ctrl-D" in err
    assert model.seen == []


@pytest.mark.parametrize("max_seq_len", [75, 85])
def test_a_long_conversation_loses_its_oldest_turns_and_goes_on(monkeypatch, capsys, max_seq_len):
    """Regression: a full context refused all messages. An answer is dropped with its question."""
    model = EchoModel(max_seq_len=max_seq_len)
    talk(monkeypatch, "1\n2\n3\n4\n", model, "Be brief", SamplingParams(max_tokens=30))
    assert [len(request.prompt) for request in model.asked] == [20, 40, 40, 40]
    assert all(len(each.prompt) + each.max_tokens <= max_seq_len for each in model.asked)
    assert [each.max_tokens for each in model.asked] == [30, 30, 30, 30]
    assert model.seen[-1][0]["content"] == "Be brief"
    assert [message["content"] for message in model.seen[-1][1::2]] == ["3", "4"]
    assert capsys.readouterr().err.count("dropped the 2 oldest messages") == 2


def test_answer_is_limited_to_the_remaining_context(monkeypatch):
    model = EchoModel(max_seq_len=15)
    talk(monkeypatch, "1\n", model, None, SamplingParams(max_tokens=30))
    assert [each.max_tokens for each in model.asked] == [5]


def test_retry_answers_the_last_message_again(monkeypatch):
    model = EchoModel()
    talked = talk(monkeypatch, "/retry\n1\n2\n/retry\n", model)
    assert [len(messages) for messages in model.seen] == [1, 3, 3]
    assert model.seen[1] == model.seen[2]
    assert [turn["content"] for turn in talked.turns[::2]] == ["1", "2"]


def test_settings_are_changed_and_shown(monkeypatch, capsys):
    model = EchoModel()
    typed = "temperature 0.7\n/set top-p 2\n/set tempe 1\n/set top_k\n/set --max-tokens 9\n1\n/set"
    talked = talk(monkeypatch, f"/set {typed}\n", model)
    assert (talked.params.temperature, model.asked[0].max_tokens) == (0.7, 9)
    err = capsys.readouterr().err
    assert "top-p '2': not a number above 0, at most 1" in err
    assert "not a setting: 'tempe 1'; did you mean 'temperature'?" in err
    assert "not a setting: 'top_k'; write /set NAME VALUE" in err
    assert "max-tokens 9" in err.splitlines()[-1] and "temperature 0.7" in err.splitlines()[-1]


def test_a_conversation_is_saved_as_a_line_for_generate(monkeypatch, capsys, tmp_path):
    path = tmp_path / "talk.jsonl"
    talk(monkeypatch, f"1\n/save {path}\n/save {path}\n/save\n", EchoModel(), "Be brief")
    (line,) = read_lines(str(path))
    roles = [message["role"] for message in line.prompt.messages]
    assert roles == ["system", "user", "assistant"]
    err = capsys.readouterr().err
    assert f"2 messages in {path}" in err and "File exists; give another name" in err
    assert "write /save FILE" in err


@pytest.mark.parametrize(
    ("name", "reason"),
    [("~no-such-user-x/a.jsonl", "No such file or directory"), ("a\0b", "embedded null byte")],
)
def test_conversation_continues_after_save_to_an_invalid_path(monkeypatch, capsys, name, reason):
    """Regression: an unknown user or a NUL in the path ended the chat with a traceback."""
    talk(monkeypatch, f"1\n/save {name}\n2\n", model := EchoModel())
    assert len(model.asked) == 2
    assert f"{reason}; give another name" in capsys.readouterr().err


def test_cut_off_answer_is_reported_and_can_be_continued(monkeypatch, capsys):
    """Regression: such an answer ended in the middle of a sentence without a message."""
    model = EchoModel(finish_reason="length")
    talked = talk(monkeypatch, "1\n/continue\n", model, None, SamplingParams(max_tokens=2))
    err = capsys.readouterr().err
    assert err.count("cut off at --max-tokens 2; /continue continues") == 2
    assert [request.prompt for request in model.asked] == [(1,) * 10, (1,) * 12]
    assert [request.max_tokens for request in model.asked] == [2, 2]
    roles = [turn["role"] for turn in talked.turns]
    assert roles == ["user", "assistant"]
    assert talked.turns[1]["content"] == "answer to 1\x1b[2J" * 2


def test_continue_is_refused_unless_an_answer_was_cut_off(monkeypatch, capsys):
    model = EchoModel()
    talk(monkeypatch, "/continue\n1\n/continue\n/clear\n/continue\n", model)
    err = capsys.readouterr().err
    assert err.count("no message yet") == 2 and err.count("the last answer was not cut off") == 1
    assert len(model.asked) == 1 and "--max-tokens" not in err


@dataclass
class EmojiModel(EchoModel):
    """Answers with the four bytes of an emoji; the first answer is cut off after two bytes."""

    def run(self, requests: Sequence[Request], _: Any) -> Iterator[Step]:
        self.asked += requests
        is_first = len(self.asked) == 1
        tokens = tuple("🙂".encode())[:2] if is_first else tuple("🙂".encode())[2:]
        decoder = StreamDecoder(self, requests[0].prompt)
        text = "".join(map(decoder.push, tokens)) + decoder.flush()
        ended = Completion(0, text, tokens, "length" if is_first else "stop", 3)
        yield Step(0, text, ended, tokens)


def test_answer_cut_off_inside_a_character_continues_with_that_character(monkeypatch):
    """Regression: U+FFFD stayed in front of the character."""
    talked = talk(monkeypatch, "1\n/continue\n", EmojiModel())
    assert talked.turns[-1]["content"] == "🙂"


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("limits", [(12, 1000), (1000, 11)], ids=["context", "cache"])
def test_answer_that_fills_context_or_cache_cannot_be_continued(
    monkeypatch, capsys, limits, has_sinks
):
    """Regression: a full KV cache was reported as the limit of --max-tokens."""
    model = EchoModel(1, *limits, has_sinks, finish_reason="length")
    talked = talk(monkeypatch, "1\n/continue\n", model)
    err = capsys.readouterr().err
    assert "cut off: the context or KV cache is full; ask for the rest in a new message" in err
    assert len(model.asked) == 1 and len(talked.turns) == 2


def test_conversation_with_attention_sinks_grows_beyond_the_context(monkeypatch, capsys):
    """Regression: the oldest turns were dropped at the context, as without sinks."""
    model = EchoModel(1, 15, UNLIMITED, has_sinks=True)
    talk(monkeypatch, "1\n2\n3\n", model, None, SamplingParams(max_tokens=30))
    assert [len(request.prompt) for request in model.asked] == [10, 30, 50]
    assert [request.max_tokens for request in model.asked] == [30, 30, 30]
    assert "dropped" not in capsys.readouterr().err


@pytest.mark.parametrize("presses", [1, 3])
def test_repeated_ctrl_c_stops_only_the_answer(monkeypatch, capsys, presses):
    """Regression: the second Ctrl-C ended the ranks during a step, and the chat with the ranks."""
    model = EchoModel(presses=presses)
    talked = talk(monkeypatch, "1\n2\n/continue\n", model)
    assert [turn["content"] for turn in talked.turns] == ["1", "answer ", "2", "answer answer "]
    assert capsys.readouterr().err.count("stopped; /continue continues") == 3
