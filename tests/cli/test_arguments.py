"""Command lines that are accepted or refused before any work starts, and the messages.

All wrong command lines run in one fresh process, which reports at the end whether torch was loaded.
"""

import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from commands import ROOT, run_python
from hypothesis import example, given
from hypothesis import strategies as st

from parallel_llama.cli import main as command_line
from parallel_llama.cli import terminal
from parallel_llama.cli.arguments import (
    JSON,
    Flag,
    Flags,
    HelpRequested,
    Job,
    Verb,
    help_text,
    in_flags,
    parse_flags,
    terminal_width,
)
from parallel_llama.cli.main import VERBS, load_verb
from parallel_llama.cli.model import check_model, llm_config, rank_count
from parallel_llama.cli.parsers import byte_size, plain_text
from parallel_llama.cli.prompts import gather, read_lines
from parallel_llama.cli.sampling_flags import given_sampling
from parallel_llama.errors import UsageError, escaped
from parallel_llama.memory import PROCESS_BYTES
from parallel_llama.tokenizer import Chat

GENERATE = load_verb("generate")
TEXTS = [
    "Hello, world", "42", "None", "True", '{"a":1}', "[1, 2]", "", "-", "--", "-x", "--chat",
    "--prompt", "--help", "a=b", "two\nlines", "'quoted'", '"quoted"', "\u4f60\u597d", "1e5", " ",
]  # fmt: skip

# The files that the command lines below name, in the folder where they run.
FILES = {
    "good.jsonl": '{"prompt": "Hello"}\n\n{"tokens": [1, 2]}\n',
    "empty.jsonl": "\n\n",
    "broken.jsonl": '{"prompt": "a"}\n{"prompt": \n',
    "list.jsonl": "[1, 2]\n",
    "typo.jsonl": '{"promt": "a"}\n',
    "both.jsonl": '{"prompt": "a", "tokens": [1]}\n',
    "none.jsonl": "{}\n",
    "number.jsonl": '{"prompt": 42}\n',
    "notokens.jsonl": '{"tokens": []}\n',
    "negative.jsonl": '{"tokens": [1, -1]}\n',
    "bool.jsonl": '{"tokens": [1, true]}\n',
    "large.jsonl": '{"tokens": [1]}\n{"tokens": [400000]}\n',
    "huge.jsonl": '{"tokens": [' + "9" * 4000 + "]}\n",
    "long.jsonl": json.dumps({"tokens": [1] * 9000}) + "\n",
    "messages.jsonl": '{"messages": [{"role": "user"}]}\n',
    "nomessages.jsonl": '{"messages": []}\n',
    "content.jsonl": '{"messages": [{"role": "user", "content": null}]}\n',
    "surrogate.jsonl": '{"prompt": "\\ud800"}\n',
    "deep.jsonl": '{"prompt": ' + "[" * 100_000 + "\n",
    "text.txt": "some text",
    "empty.txt": "",
    "ids.json": "[1, 2, 3]",
    "mixed.json": '[1, "a"]',
    "object.json": '{"tokens": [1]}',
    "nested.json": "[[1, 2], []]",
    "outside.json": "[[1, 2], [1, 49152]]",
}

# (arguments, what the message says); everything here ends with exit code 2.
WRONG: list[tuple[list[str], str]] = [
    ([], "usage: parallel-llama COMMAND"),
    (["generat"], "unknown command 'generat'; did you mean 'generate'?"),
    (["serve", "--port", "70000"], "70000"),
    (["serve", "--host", "nowhere.invalid", "--port", "0"], "nowhere.invalid"),
    (["--prompt", "x"], "unknown command '--prompt'"),
    (["generate"], "give the prompt with --prompt TEXT"),
    (["generate", "hello"], "unexpected argument 'hello'; a prompt goes after --prompt"),
    (["generate", "--prompt", "x", "y"], "unexpected argument 'y'"),
    (["generate", "--prompt"], "--prompt needs a value: --prompt TEXT"),
    (["generate", "--prompt", "x", "--max-tokens"], "--max-tokens needs a value: --max-tokens N"),
    (["generate", "--promt", "x"], "unknown flag '--promt'; did you mean '--prompt'?"),
    (["generate", "--prompt", "x", "--max-token=5"], "did you mean '--max-tokens'?"),
    (["generate", "--prompt", "x", "--quant", "int3"], "--quant 'int3': not one of none"),
    (["plan", "--context", "8192"], "unknown flag '--context'; did you mean '--max-seq-len'?"),
    (["chat", "--lora_modules", "a=b"], "'--lora_modules'; did you mean '--adapter'?"),
    (["serve", "--max-num-seqs", "8"], "did you mean '--max-requests'?"),
    (["bench", "--lora", "a"], "unknown flag '--lora' "),
    (["generate", "--prompt", "x", "-n", "2"], "unknown flag '-n'"),
    (["generate", "--prompt", "x", "--"], "unknown flag '--'"),
    (["generate", "--prompt", "x", "--chat=yes"], "--chat is a switch and takes no value"),
    (["generate", "--prompt", "x", "--chat", "--nochat"], "--chat is given twice"),
    (["generate", "--prompt", "x", "--no-prompt"], "unknown flag '--no-prompt'"),
    (["generate", "--prompt", "x", "--seed", "1", "--seed", "2"], "--seed is given twice"),
    (["generate", "--prompt", "x", "--max-tokens=1", "--max_tokens=1"], "--max-tokens is given"),
    (["generate", "--prompt", "x", "--max-tokens", "0"], "--max-tokens '0': not a whole number"),
    (["generate", "--prompt", "x", "--max-tokens", "1_000"], "--max-tokens '1_000': not a whole"),
    (["generate", "--prompt", "x", "--max-tokens", "\u0663"], "not a whole number"),
    (["generate", "--prompt", "x", "--max-tokens", "9" * 5000], "not a whole number"),
    (["generate", "--prompt", "x", "--max-tokens", "--seed"], "--max-tokens '--seed': not a whole"),
    (["generate", "--prompt", "x", "--temperature", "nan"], "--temperature 'nan': not a number"),
    (["generate", "--prompt", "x", "--temperature", "1e999"], "not a number from 0"),
    (["generate", "--prompt", "x", "--temperature", "-1"], "not a number from 0"),
    (["generate", "--prompt", "x", "--top-p", "0"], "--top-p '0': not a number above 0, at most 1"),
    (["generate", "--prompt", "x", "--top-p", "1.01"], "not a number above 0, at most 1"),
    (["generate", "--prompt", "x", "--top-k", "-1"], "--top-k '-1': not a whole number from 0"),
    (["generate", "--prompt", "x", "--min-p", "2"], "--min-p '2': not a number from 0 to 1"),
    (["generate", "--prompt", "x", "--logprobs", "21"], "not a whole number from 0 to 20"),
    (["generate", "--prompt", "x", "--seed", "-1"], "--seed '-1': not a whole number from 0"),
    (["generate", "--prompt", "x", "--stop", ""], "--stop '': empty"),
    (["generate", "--prompt", "x", "--dtype", "int4"], "; --quant int4 quantises the weights"),
    (["generate", "--prompt", "x", "--dtype", "auto"], "; omit --dtype for the default"),
    (["generate", "--prompt", "x", "--quant", "Q8_0"], "which run as they are stored"),
    (["generate", "--prompt", "x", "--quant", "q4_k_m"], "that is a format of GGUF files"),
    (["generate", "--prompt", "x", "--quant", "fp16"], "that is a dtype: --dtype float16"),
    (["reshard", "smollm2", "x", "--quant", "awq"], "runs as it is stored; omit --quant"),
    (["generate", "--prompt", "x", "--dtype", "float23"], "did you mean 'float32'?"),
    (["plan", "--kv-cache-dtype", "int4"], "'int4': not one of auto, bfloat16, int8, fp8"),
    (["generate", "--prompt", "x", "--device", "tpu"], "--device 'tpu': not one of auto, cpu"),
    (["generate", "--prompt", "x", "--device", "cuda:1"], "GPUs listed in CUDA_VISIBLE_DEVICES"),
    (["generate", "--prompt", "x", "--tensor-parallel-sise", "2"], "'--tensor-parallel-size'?"),
    (["generate", "--prompt", "x", "--tp", "2", "--nproc", "2"], "--nproc (also --tp, --tensor-"),
    (["serve", "a", "--model", "b"], "--model is given twice; give it once, as an argument or as"),
    (["bench", "a", "b"], "unexpected argument 'b'"),
    (["chat", "no-such-model"], "model 'no-such-model' is not a path that exists"),
    (["generate", "--prompt", "x", "--nproc", "0"], "--nproc '0': not a whole number from 1"),
    (["generate", "--prompt", "x", "--tp", "0"], "--tp '0': not a whole number from 1 to"),
    (["generate", "--prompt", "x", "--tensor_parallel_size"], "-parallel-size needs a value"),
    (["generate", "--prompt", "x", "--nproc", "1-4"], "--nproc '1-4': not a whole number"),
    (["generate", "--prompt", "x", "--nproc", "10"], "9 query heads cannot be split over"),
    (["generate", "--prompt", "x", "--max-seq-len", "0"], "--max-seq-len '0'"),
    (["generate", "--prompt", "x", "--max-seq-len", "9000"], "this model's context is 8192 tokens"),
    (["generate", "--prompt", "x", "--max-tokens", "8192"], "8193 positions, but the context has"),
    (["generate", "--prompt", "x", "--model", ""], "--model '': empty"),
    (["generate", "--prompt", "x", "--model", "no-such-model"], "no-such-model"),
    (["generate", "--prompt", "x", "--output", "."], "--output .: a folder"),
    (["generate", "--prompt", "x", "--output", "no/such/file"], "there is no folder no/such"),
    (["generate", "--prompt", "x", "--system", "Be brief"], "--system needs a chat; add"),
    (["generate", "--prompt", ""], "prompt 0 is empty"),
    (["generate", "--prompt", "\udcff"], "not UTF-8 text"),
    (["generate", "--prompt", "x", "--prompts", "good.jsonl"], ", not both"),
    (["generate", "--prompts", "nowhere.jsonl"], "--prompts 'nowhere.jsonl': no such file"),
    (["generate", "--prompts", "empty.jsonl"], "empty.jsonl: contains no prompts"),
    (["generate", "--prompts", "broken.jsonl"], "broken.jsonl, line 2: not JSON"),
    (["generate", "--prompts", "broken.jsonl"], "; write each line as a JSON object such as"),
    (["generate", "--prompts", "list.jsonl"], "line 1: not an object"),
    (["generate", "--prompts", "typo.jsonl"], "unknown key 'promt'; did you mean 'prompt'?"),
    (["generate", "--prompts", "both.jsonl"], "give exactly one of prompt, tokens, messages"),
    (["generate", "--prompts", "none.jsonl"], "give exactly one of"),
    (["generate", "--prompts", "number.jsonl"], "prompt is '42', not a string"),
    (["generate", "--prompts", "notokens.jsonl"], "tokens must be a list of token ids"),
    (["generate", "--prompts", "negative.jsonl"], "tokens[1] is '-1', not a token id"),
    (["generate", "--prompts", "bool.jsonl"], "tokens[1] is 'true', not a token id"),
    (["generate", "--prompts", "large.jsonl"], "large.jsonl, line 2: token id 400000 is outside"),
    (["generate", "--prompts", "huge.jsonl"], "not a token id from 0 to 2147483647"),
    (["generate", "--prompts", "long.jsonl"], "long.jsonl, line 1: 9000 prompt tokens"),
    (["generate", "--prompts", "messages.jsonl"], "messages[0] has content=None"),
    (["generate", "--prompts", "nomessages.jsonl"], "messages must be a list with at least one"),
    (["generate", "--prompts", "content.jsonl"], "give text or a list of text parts"),
    (["generate", "--prompts", "surrogate.jsonl"], "unpaired surrogate"),
    (["generate", "--prompts", "deep.jsonl"], "nested too deeply"),
    (["chat", "--prompt", "x"], "chat: unknown flag '--prompt'"),
    (["score"], "give either --text-file FILE or --tokens-file FILE"),
    (["score", "--text-file", "text.txt", "--tokens-file", "ids.json"], "give either"),
    (["score", "--text-file", "nowhere.txt"], "--text-file 'nowhere.txt': no such file"),
    (["score", "--text-file", "empty.txt"], "empty.txt: the file is empty"),
    (["score", "--tokens-file", "text.txt"], "text.txt: not JSON"),
    (["score", "--tokens-file", "mixed.json"], "the file[1] is"),
    (["score", "--tokens-file", "object.json"], "must be a list of token ids"),
    (["score", "--tokens-file", "nested.json"], "list 1 must be a list of token ids"),
    (["score", "--tokens-file", "outside.json"], "list 1: token id 49152 is outside"),
    (["plan", "--nproc", "4-2"], "--nproc '4-2': not a number of ranks"),
    (["plan", "--nproc", "10"], "use 1 to 9 ranks"),
    (["plan", "--nproc", "2", "--memory", "8,8,8"], "memory has 3 sizes for 2 ranks"),
    (["plan", "--nproc", "1-2", "--memory", "8,8"], "is a range; give --nproc N"),
    (["plan", "--memory", "8,,8"], "--memory '8,,8': not sizes such as 80 (GiB)"),
    (["plan", "--memory", "0"], "--memory '0': not sizes"),
    (["plan", "--memory", "1e300"], "--memory '1e300': not sizes"),  # regression: crash on NaN
    (["plan", "--memory", "80x0"], "--memory '80x0': not sizes"),
    (["plan", "--memory", "80x1000,80x25"], "for at most 1024 ranks"),
    (["plan", "--memory", "8xH200"], "--memory '8xH200': not sizes such as 80 (GiB)"),
    (["plan", "--gpus", "8xH20"], "--gpus '8xH20': not GPUs such as 8xH200, 3x24 (GiB)"),
    (["plan", "--gpus", "A100"], "the names are B200, H200, H100, A100-80, A100-40, L40S"),
    (["plan", "--gpus", "0x24"], "--gpus '0x24': not GPUs such as"),
    (["plan", "--gpus", "2000x24"], "at most 1024"),
    (["plan", "--gpus", "3x24", "--memory", "24"], "--gpus and --memory cannot"),
    (["plan", "--gpus", "3x24", "--device", "cpu"], "--gpus and --device cpu cannot"),
    (["plan", "--gpus", "3x24", "--nproc", "4"], "--gpus lists 3 GPUs, fewer than --nproc 4"),
    (["plan", "--gpus", "80,40", "--nproc", "1-2"], "--gpus lists 2 ranks, but --nproc is a range"),
    (["plan", "--batch", "0"], "--batch '0': not a whole number"),
    (["plan", "--prompt", "x"], "plan: unknown flag '--prompt'"),
    (["plan", "\x1b[2J"], r"model '\x1b[2J' is not a path"),
    (["score", "\x1b[2J"], r"unexpected argument '\x1b[2J'"),
]  # fmt: skip

RUNNER = """
import contextlib, io, json, sys
from parallel_llama.cli.main import main

def run(argv):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(argv)
    return [code, out.getvalue(), err.getvalue()]

results = [run(argv) for argv in json.load(sys.stdin)]
json.dump({"results": results, "torch": "torch" in sys.modules}, sys.stdout)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("command_line")
    for name, text in FILES.items():
        (path / name).write_text(text)
    return path


def run_all(folder: Path, lines: list[list[str]]) -> dict[str, Any]:
    """Exit code, stdout and stderr of each command line, all in one process."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = run_python("-c", RUNNER, input=json.dumps(lines), cwd=folder, env=env)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@pytest.fixture(scope="module")
def answers(folder: Path) -> dict[str, Any]:
    return run_all(folder, [argv for argv, _ in WRONG])


@pytest.mark.parametrize("case", range(len(WRONG)), ids=lambda case: " ".join(WRONG[case][0])[:60])
def test_usage_error_is_reported_with_exit_code_2(answers, case):
    code, out, err = answers["results"][case]
    assert code == 2, err
    assert out == ""
    assert WRONG[case][1] in err
    assert len(err) < 2000
    assert "Traceback" not in err


def test_usage_errors_are_found_before_torch_is_loaded(answers):
    assert answers["torch"] is False


def test_plan_does_not_load_torch(folder):
    lines = [
        ["plan", "--nproc", "3"],
        ["plan", "--nproc", "1-12"],
        ["plan", "--memory", "1"],
        ["plan", "--model", "llama-3.1-70b", "--gpus", "4xH100"],
        ["plan", "--help"],
        ["--version"],
    ]
    answer = run_all(folder, lines)
    assert [code for code, _, _ in answer["results"]] == [0] * len(lines)
    assert answer["torch"] is False


def parsed(verb: Verb, argv: Sequence[str]) -> dict[str, Any]:
    """The value of each flag of a command, by the flag's name."""
    flags = parse_flags(verb, argv)
    return {flag.name: flags[flag] for flag in verb.flags}


@pytest.mark.parametrize("text", TEXTS)
def test_prompt_flag_accepts_any_text_after_space_or_equals(text):
    assert parsed(GENERATE, ["--prompt", text])["prompt"] == [text]
    assert parsed(GENERATE, [f"--prompt={text}"])["prompt"] == [text]


def echo(flags: Flags) -> Job:
    """A command's function that starts nothing and records what fire passed."""
    kept.append(flags)
    return Job(lambda: 0)


kept: list[Flags] = []
PROMPT: Flag[list[str]] = Flag("prompt", "", plain_text, repeatable=True)
CHAT: Flag[bool] = Flag("chat", "")
N_X: Flag[int | None] = Flag("n-x", "", int)
ECHO = Verb("echo", "", "", (PROMPT, CHAT, N_X), "", echo)


@given(st.lists(st.text(max_size=20), max_size=4))
@example(TEXTS)
def test_prompts_reach_the_command_unchanged(texts):
    """fire alone turns 'a, b' into a tuple, keeps the last repeat, and takes '-x' for a flag."""
    argv = [word for text in texts for word in ("--prompt", text)]
    command_line._prepare(ECHO, ["--n_x=3", *argv, "--chat"])
    flags = kept.pop()
    assert (flags[PROMPT], flags[CHAT], flags[N_X]) == (texts, True, 3)


def test_flag_that_a_command_does_not_have_returns_its_default():
    command_line._prepare(ECHO, [])
    flags = kept.pop()
    assert (flags[Flag("b", "", int, "N", 7)], flags[Flag("c", "")]) == (7, False)


@pytest.mark.parametrize(("verb", "most"), [("generate", 128), ("chat", 512)])
def test_max_tokens_default_is_128_in_generate_and_512_in_chat(verb, most):
    """Regression: chat used the default of generate's --max-tokens, 128."""
    assert given_sampling(parse_flags(load_verb(verb), []))["max_tokens"] == most


@pytest.mark.parametrize("name", ["generate", "chat"])
def test_the_default_model_is_sampled_unless_the_temperature_is_0(name):
    """Regression: the default model was greedy, and its answers repeated themselves."""
    found = []
    for argv in ([], ["--temperature", "0"], ["--top-p", "0.5"]):
        flags = parse_flags(load_verb(name), argv)
        params = check_model(flags)[0].sampling_params(**given_sampling(flags))
        found.append((params.temperature, params.top_p))
    assert found == [(0.2, 0.9), (0, 0.9), (0.2, 0.5)]


def test_fire_prints_nothing_of_its_own(capsys):
    command_line._prepare(ECHO, [])
    assert capsys.readouterr() == ("", "")


def test_repeated_flags_keep_their_order():
    argv = ["--stop", "b", "--prompt", "2", "--stop=a", "--prompt=1", "--prompt", "2"]
    values = parsed(GENERATE, argv)
    assert (values["prompt"], values["stop"]) == (["2", "1", "2"], ["b", "a"])


def test_hyphens_and_underscores_in_flags_are_equivalent():
    for argv in (["--max-tokens", "5"], ["--max_tokens=5"], ["--max-tokens=5"]):
        assert parsed(GENERATE, argv)["max-tokens"] == 5


def test_a_switch_can_be_turned_off():
    values = [
        parsed(GENERATE, argv)["chat"] for argv in ([], ["--chat"], ["--nochat"], ["--no-chat"])
    ]
    assert values == [False, True, False, False]


@pytest.mark.parametrize("name", ["serve", "chat", "bench", "plan"])
def test_model_may_be_a_positional_argument(name):
    """As in `vllm serve MODEL`."""
    verb = load_verb(name)
    for argv in (["M", "--nproc", "2"], ["--nproc", "2", "M"], ["--model", "M"]):
        assert parsed(verb, argv)["model"] == "M"
    assert parsed(verb, [])["model"] == "smollm2"


@pytest.mark.parametrize(
    ("argv", "flag", "value"),
    [
        ("--tp 2", "nproc", 2),
        ("--tensor-parallel-size=2", "nproc", 2),
        ("--tensor_parallel_size 2", "nproc", 2),
        ("--temp 0.5", "temperature", 0.5),
        ("--quantization int8", "quant", "int8"),
        ("--quant fp8_e4m3", "quant", "fp8"),
        ("--kv-cache-dtype fp8_e4m3", "kv-cache-dtype", "fp8"),
        ("--device GPU", "device", "cuda"),
        ("--dtype BF16", "dtype", "bfloat16"),
        ("--dtype fp16", "dtype", "float16"),
        ("--dtype half", "dtype", "float16"),
        ("--dtype fp32", "dtype", "float32"),
        ("--dtype float", "dtype", "float32"),
        ("--dtype double", "dtype", "float64"),
    ],
)
def test_flag_names_and_values_of_other_programs_are_accepted(argv, flag, value):
    assert parsed(GENERATE, argv.split())[flag] == value


def test_no_two_flags_of_a_command_share_a_name():
    for verb in map(load_verb, VERBS):
        names = [name for flag in verb.flags for name in flag.names]
        assert len(set(names)) == len(names), verb.name


@pytest.mark.parametrize("word", ["-V", "--version"])
def test_the_version_is_shown(capsys, word):
    assert command_line.main([word]) == 0
    assert capsys.readouterr().out.startswith("parallel_llama ")


@pytest.mark.parametrize("width", [60, 80, 120])
def test_help_fits_the_terminal(monkeypatch, width):
    """Regression: lines had up to 250 characters, and the terminal broke words in the middle."""
    monkeypatch.setenv("COLUMNS", str(width))
    for text in (command_line.overview(), *(help_text(load_verb(name)) for name in VERBS)):
        assert max(map(len, text.splitlines())) <= width
    monkeypatch.delenv("COLUMNS")
    assert terminal_width() == 80  # stdout is not a terminal here


def test_wrapped_example_in_help_can_be_copied(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    for verb in map(load_verb, VERBS):
        shown = help_text(verb).split("example:\n")[1]
        assert shlex.split(shown.replace("\\\n", "")) == shlex.split(verb.example)


def test_help_groups_flags_by_subject_with_own_flags_first():
    text = help_text(load_verb("serve"))
    headings = re.findall(r"^(\S.*):$", text, re.M)
    subjects = ["model", "ranks", "context and KV cache"]
    assert headings == ["arguments", "flags of serve", *subjects, "help", "example"]
    for verb in map(load_verb, VERBS):
        for flag in verb.flags:
            for alias in flag.aliases:
                assert len(re.findall(rf"--{alias}\b(?!-)", help_text(verb))) == 1


@pytest.mark.parametrize("verb", list(map(load_verb, VERBS)), ids=lambda verb: verb.name)
def test_help_names_every_flag_and_its_default(verb, monkeypatch):
    monkeypatch.setenv("COLUMNS", "999")
    with pytest.raises(HelpRequested):
        parse_flags(verb, ["--json", "-h"] if JSON in verb.flags else ["--help"])
    text = help_text(verb)
    for flag in verb.flags:
        assert f"--{flag.name}" in text
        if flag.default is not None:
            assert f"default: {flag.default}" in text
    assert text.startswith(f"usage: parallel-llama {verb.name} ")
    assert verb.example in text


@pytest.mark.parametrize("verb", list(map(load_verb, VERBS)), ids=lambda verb: verb.name)
def test_the_example_in_the_help_is_valid(verb, monkeypatch):
    monkeypatch.chdir(ROOT)
    program, name, *argv = shlex.split(verb.example)
    assert (program, name) == ("parallel-llama", verb.name)
    parse_flags(verb, argv)


def test_prompts_file_may_mix_text_and_token_ids(folder):
    lines = read_lines(str(folder / "good.jsonl"))
    assert [line.prompt for line in lines] == ["Hello", [1, 2]]


def gathered(*argv: str) -> list[Any]:
    return [line.prompt for line in gather(parse_flags(GENERATE, argv))]


def test_chat_flag_turns_text_prompts_into_chats(folder):
    user = {"role": "user", "content": "Hello"}
    system = {"role": "system", "content": "Be brief"}
    path = str(folder / "good.jsonl")
    chats = gathered("--prompts", path, "--chat", "--system", "Be brief")
    assert chats == [Chat([system, user]), [1, 2]]
    assert gathered("--prompt", "Hello", "--prompt", "", "--chat")[0] == Chat([user])
    assert gathered("--prompt", "Hello", "--nochat") == ["Hello"]
    with_variable = gathered("--prompt", "Hello", "--chat", "--template-var", "a=1")
    assert with_variable == [Chat([user], template_vars={"a": 1})]
    own = folder / "vars.jsonl"
    own.write_text(json.dumps({"messages": [user], "template_vars": {"a": 2}}))
    given = ("--template-var", "a=1", "--template-var", "b=3")
    assert gathered("--prompts", str(own), *given) == [Chat([user], template_vars={"a": 2, "b": 3})]


def test_system_flag_is_the_system_message_of_chats_without_one(folder):
    """Regression: the flag had no effect on lines with messages."""
    user = {"role": "user", "content": "Hello"}
    system = {"role": "system", "content": "Be brief"}
    own = [[user], [{**system, "content": "Rhyme"}, user], [{**system, "role": "developer"}, user]]
    path = folder / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in own))
    chats = gathered("--prompts", str(path), "--chat", "--system", "Be brief")
    assert chats == [Chat([system, user]), Chat(own[1]), Chat(own[2])]


@pytest.mark.parametrize(
    ("file", "flags", "name"),
    [
        ("good.jsonl", ("--template-var", "a=1"), "template-var"),
        ("large.jsonl", ("--chat", "--system", "Be brief"), "system"),
    ],
)
def test_chat_flag_is_refused_if_no_line_is_a_chat(folder, file, flags, name):
    """Regression: the flag had no effect."""
    with pytest.raises(UsageError, match=f"--{name} needs a chat, but no line of --prompts is one"):
        gathered("--prompts", str(folder / file), *flags)


def test_stdout_escapes_characters_that_its_encoding_lacks():
    """Regression: the first such character of an answer ended the command with a traceback."""
    program = """if True:
        from parallel_llama.cli.generate import write_text
        from parallel_llama.cli.main import main
        main(["--version"])
        write_text("caf\\xe9 \\u2019")
    """
    for encoding, expected in (("latin-1", b"caf\xe9 \\u2019"), ("latin-1:replace", b"caf\xe9 ?")):
        env = {**os.environ, "PYTHONIOENCODING": encoding}
        done = run_python("-c", program, env=env, text=False)
        assert done.stdout.endswith(expected), done.stderr


@pytest.mark.parametrize("flag", ["--prompt", "--prompts"])
def test_closed_stdin_is_a_usage_error(flag):
    """Regression: the command showed a traceback, because Python sets sys.stdin to None."""
    command = f"{shlex.quote(sys.executable)} -m parallel_llama generate {flag} - <&-"
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("parallel-llama: stdin is closed; ")


def test_torchrun_decides_the_number_of_ranks(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert rank_count(None) == rank_count(3) == 3
    with pytest.raises(UsageError, match=r"--nproc 2 inside torchrun, which started 3 ranks"):
        rank_count(2)
    monkeypatch.setenv("WORLD_SIZE", "three")
    with pytest.raises(UsageError, match="WORLD_SIZE='three'"):
        rank_count(None)


def test_secret_file_is_refused_without_another_launcher(capsys):
    assert command_line.main(["generate", "--secret-file", "secret", "--prompt", "a"]) == 2
    assert "ranks that this command starts have a secret of their own" in capsys.readouterr().err


def test_nproc_decides_the_number_of_ranks_without_torchrun(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert (rank_count(None), rank_count(4)) == (1, 4)
    assert (rank_count(None, [2, 1]), rank_count(4, [2, 1])) == (2, 4)


def test_memory_needs_one_size_per_rank(capsys):
    argv = ["generate", "--prompt", "a", "--nproc", "3", "--memory", "32x2"]
    assert command_line.main(argv) == 2
    assert "memory has 2 sizes for 3 ranks; give one per rank" in capsys.readouterr().err


def plan_json(capsys: pytest.CaptureFixture[str], *argv: str) -> Any:
    """The JSON object that `plan` prints; the exit code must agree with its key `fits`."""
    code = command_line.main(["plan", "--json", *argv])
    plan = json.loads(capsys.readouterr().out)
    assert code == (1 if plan["fits"] is False else 0)
    return plan


def plan_page(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    command_line.main(["plan", *argv])
    return capsys.readouterr().out


def plan_words(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The page of a plan, joined into one line."""
    return " ".join(plan_page(capsys, *argv).split())


def test_plan_json_ranges_cover_heads_ffn_and_vocab_once(capsys):
    decoded = ["--nproc", "4", "--quant", "none", "--dtype"]
    plan = plan_json(capsys, *decoded, "bfloat16")
    keys = {"rank", "stage", "layers", "heads", "kv_heads", "ffn", "experts", "vocab", "outputs"}
    keys |= {"shared_ffn", "dense_ffn"}
    keys |= {"weight_bytes", "kv_bytes_per_token", "working_bytes", "needed_bytes", "memory_bytes"}
    keys |= {"adapter_bytes", "draft_weight_bytes"}
    keys |= {"step_read_bytes", "step_s", "bandwidth_bytes_per_s"}
    assert [rank.keys() for rank in plan["ranks"]] == [keys] * plan["tp_size"] == [keys] * 4
    for axis, size in (("heads", 9), ("ffn", 1536), ("vocab", 49152)):
        ends = [rank[axis] for rank in plan["ranks"]]
        assert [start for start, _ in ends] == [0, *(stop for _, stop in ends[:-1])]
        assert ends[-1][1] == size
    assert plan["imbalance"] == pytest.approx(12 / 9)
    assert plan["fits"] is None
    wider = plan_json(capsys, *decoded, "float32")
    norms = 4 * 61 * 576  # of all ranks; norms stay in float32 on the CPU
    assert wider["weight_bytes"] == 2 * (plan["weight_bytes"] - 2 * norms)


def test_plan_counts_kv_bytes_of_each_cache_dtype(capsys):
    """30 layers, 3 KV heads of 64 values: two bytes a value, or one byte and a scale a head."""
    in_float32 = ["--quant", "none", "--kv-cache-dtype"]
    for name, n_bytes in (("bfloat16", 2 * 64), ("int8", 64 + 4), ("fp8", 64 + 4)):
        plan = plan_json(capsys, *in_float32, name)
        assert plan["ranks"][0]["kv_bytes_per_token"] == 30 * 2 * 3 * n_bytes
        assert plan["kv_cache_dtype"] == name
    assert ", float32, KV cache in int8" in plan_page(capsys, *in_float32, "int8")


def test_plan_says_whether_it_fits(capsys):
    assert plan_json(capsys, "--memory", "1,1")["fits"] is True
    memory = ["--memory", "0.8,0.8", "--quant", "none"]
    most = plan_json(capsys, *memory)["room_for_kv_tokens"]
    assert 1000 < most < 8192
    fits = [plan_json(capsys, *memory, "--max-seq-len", str(n))["fits"] for n in (most, most + 1)]
    assert fits == [True, False]


def test_plan_counts_working_memory_of_gpus_and_cpu_ranks(capsys):
    """Regression: weights and KV cache filled the GPU, and the first step ran out of memory."""
    asked = ["--model", "llama-3.1-8b", "--nproc", "2", "--dtype", "bfloat16"]
    on_cpu, on_cuda = (plan_json(capsys, *asked, "--device", each) for each in ("cpu", "cuda"))
    on_cpu_step = 512 * (4 * 4096 + 4 * 7168 + 14336) * 4 + 64128 * 4 * 4  # one row of scores
    expected = on_cpu_step + PROCESS_BYTES + (22 << 20)  # buffers of the exchange
    tokenizer = 600 * 128256  # on rank 0
    assert [rank["working_bytes"] for rank in on_cpu["ranks"]] == [expected + tokenizer, expected]
    working = on_cuda["ranks"][0]["working_bytes"]
    step = 4096 * (4 * 4096 + 4 * 7168) * 2  # tokens, numbers of each, bytes
    scores = 256 * 64128 * (2 + 3 * 4)
    rotations = 131072 * 64 * 8  # a complex number for each pair of a head
    assert working == step + scores + rotations + (1 << 30)
    quantised = plan_json(capsys, *asked, "--device", "cuda", "--quant", "int8")["ranks"][0]
    # Steps of many rows convert a matrix to 16 bits, in CUDA graphs and outside.
    assert quantised["working_bytes"] - working == 2 * (4096 * 64128 * 2)
    held = on_cuda["ranks"][0]["weight_bytes"] + on_cuda["ranks"][0]["kv_bytes_per_token"] * 131072
    for n_bytes, fits in ((held + working, True), (held + working - 1, False)):
        memory = f"{n_bytes}B"
        plan = plan_json(capsys, *asked, "--device", "cuda", "--memory", f"{memory},{memory}")
        assert plan["fits"] is fits
    page = plan_page(capsys, *asked, "--device", "cuda")
    assert re.search(rf"^ +0 .* 1.62 GiB  {terminal.size(held + working)} ", page, re.M)
    assert "rest       rotary tables, activations and scores of a step of 4096 tokens, and" in page
    assert "1.00 GiB for CUDA's libraries and graphs" in page
    page = plan_page(capsys, *asked, "--device", "cpu")
    process = PROCESS_BYTES + (22 << 20) + tokenizer
    assert f"rest       a process (about {process >> 20} MiB on rank 0: torch, LLVM" in page


def test_plan_takes_cuda_only_where_each_rank_gets_a_gpu(capsys, monkeypatch):
    """--nproc 2 on a host with one GPU runs on the CPU, in float32."""
    for n_gpus, dtype in ((0, "float32"), (1, "float32"), (2, "bfloat16")):
        monkeypatch.setattr("parallel_llama.cli.model.count_gpus", lambda n=n_gpus: n)
        assert plan_json(capsys, "--nproc", "2")["dtype"] == dtype
        assert plan_json(capsys, "--nproc", "2", "--device", "cuda")["dtype"] == "bfloat16"


def test_plan_of_a_range_gives_the_reason_for_each_refusal(capsys):
    plans = plan_json(capsys, "--nproc", "8-10")["plans"]
    assert [plan["tp_size"] for plan in plans] == [8, 9, 10]
    assert "use 1 to 9 ranks" in plans[2]["error"]
    assert "for 10 ranks: 9 query heads cannot be" in plan_page(capsys, "--nproc", "8-10")


def test_sliding_window_bounds_the_kv_cache_of_a_sequence(capsys):
    """A long sequence keeps 4095 tokens of its window and the 512 tokens of a step."""
    asked = ["--model", "mistral-7b-v0.1", "--dtype", "bfloat16", "--nproc", "1"]
    for length, kept in (("4000", 4000), ("30000", 4095 + 512)):
        plan = plan_json(capsys, *asked, "--max-seq-len", length, "--batch", "3", "--memory", "20")
        assert (plan["kv_tokens"], plan["sliding_window"]) == (3 * kept, 4096)
        assert plan["kv_bytes_per_sequence"] == kept * 32 * 2 * 8 * 128 * 4
        assert plan["fits"] is (plan["room_for_kv_tokens"] >= 3 * kept)
    page = plan_words(capsys, *asked, "--memory", "20")
    assert "window of 4,096 tokens in 32 of 32 layers" in page
    assert "sequences of 32,768 tokens" in page


def test_refused_numbers_of_ranks_share_one_row(capsys):
    """Regression: each number of ranks beyond the model's heads repeated the same reason."""
    page = plan_page(capsys, "--nproc", "8-1024")
    assert len(page.splitlines()) < 16
    assert re.search(r"^10-1024 .* no$", page, re.M)
    assert "no plan    for 10-1024 ranks: 9 query heads cannot be split over 10" in page


def test_plans_of_largest_model_for_1_to_1024_ranks_take_under_5_s(capsys):
    """Regression: planning took over a minute, as each layer of each shard was counted again."""
    started_s = time.process_time()
    asked = ["--model", "llama-3.1-405b", "--nproc", "1-1024", "--memory", "80"]
    plans = plan_json(capsys, *asked)["plans"]
    assert time.process_time() - started_s < 5
    assert [len(plan["ranks"]) for plan in plans[:128]] == list(range(1, 129))


@pytest.mark.parametrize(
    ("verb", "flag"),
    [
        ("generate", "--max-tokens"),
        ("generate", "--min-tokens"),
        ("generate", "--max-seq-len"),
        ("generate", "--attention-sinks"),
        ("chat", "--max-tokens"),
        ("serve", "--max-seq-len"),
        ("bench", "--prompt-tokens"),
        ("bench", "--max-tokens"),
        ("score", "--stride"),
        ("plan", "--max-seq-len"),
    ],
)
def test_token_count_flags_accept_k_and_m_suffixes(verb, flag):
    name = flag.removeprefix("--")
    for text, n_tokens in (("32k", 32_768), ("32K", 32_768), ("1M", 1 << 20), ("77", 77)):
        assert parsed(load_verb(verb), [flag, text])[name] == n_tokens
    for text in ("32kk", "1.5k", "-1k", "k", "32kB", "1 k", "99999999999999M"):
        with pytest.raises(UsageError, match=rf"{flag} .*{text}.*: not a whole number .*32k"):
            parsed(load_verb(verb), [flag, text])


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        ("24G", 24 << 30),
        ("24g", 24 << 30),
        ("24GiB", 24 << 30),
        ("24Gi", 24 << 30),
        ("24 GB", 24 * 10**9),
        ("512M", 512 << 20),
        ("1.5T", 3 << 39),
        ("64kB", 64_000),
        ("4096B", 4096),
    ],
)
def test_kv_cache_bytes_and_memory_accept_the_same_units(text, n_bytes):
    assert parsed(GENERATE, ["--kv-cache-bytes", text])["kv-cache-bytes"] == n_bytes
    assert parsed(load_verb("plan"), ["--memory", text])["memory"] == n_bytes


@pytest.mark.parametrize("name", ["generate", "chat", "serve", "score", "bench"])
def test_commands_that_load_a_model_accept_kv_cache_bytes(name):
    flags = parse_flags(load_verb(name), ["--kv-cache-bytes=1G"])
    assert llm_config(flags).kv_cache_bytes == 1 << 30


@given(st.text("0123456789.eE+- kmgtibKMGTIB", max_size=9))
def test_byte_size_is_parsed_or_refused_with_allowed_forms(text):
    try:
        assert 1 <= byte_size(text) < 2**63
    except ValueError as error:
        assert "not a size such as 2GB, 512MiB, 24G" in str(error)


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("80", 80 * 2**30),
        ("0.5", 2**29),
        ("0.4876995086669922", 523663360),
        ("1e2", 100 * 2**30),
        ("24GB", 24 * 10**9),
        ("80 gib", 80 * 2**30),
        ("24576MiB", 24 * 2**30),
        ("80,80, 40", [80 * 2**30, 80 * 2**30, 40 * 2**30]),
        ("80x1", [80 * 2**30]),
        ("80X2", [80 * 2**30] * 2),
        ("24GBx2,1", [24 * 10**9] * 2 + [2**30]),
    ],
)
def test_memory_accepts_one_size_or_a_list_with_gib_as_default_unit(text, sizes):
    assert parsed(load_verb("plan"), ["--memory", text])["memory"] == sizes


def test_single_memory_size_applies_to_every_rank(capsys):
    plans = [
        plan_json(capsys, *argv)
        for argv in (
            ["--memory", "0.8,0.8,0.8"],
            ["--memory", "0.8x3"],
            ["--memory", "0.8x2,0.8"],
            ["--memory", "0.8", "--nproc", "3"],
        )
    ]
    assert plans[1:] == plans[:1] * 3
    in_range = plan_json(capsys, "--memory", "0.8", "--nproc", "3-4")["plans"][0]
    of_one_plan = "largest_context", "largest_batch", "other_stages", "fewer_hosts"
    largest = {key: plans[0][key] for key in of_one_plan}
    assert {"model": "smollm2", **in_range, "remedies": [], **largest} == plans[0]


@pytest.mark.parametrize("memory", ["1.3", "790MiB", "690MiB", "640MiB", "580MiB"])
def test_memory_without_nproc_plans_the_fewest_ranks_that_fit(capsys, memory):
    compared = plan_json(capsys, "--nproc", "1-9", "--memory", memory)
    fits = [plan["fits"] for plan in compared["plans"]]
    fewest = fits.index(True) + 1
    assert compared["smallest_that_fits"] == fewest
    found = plan_json(capsys, "--memory", memory)
    assert (found["tp_size"], found["fits"], found["smallest_that_fits"]) == (fewest, True, fewest)
    fewer = found["next_smaller"]
    assert fewer == (compared["plans"][fewest - 2] if fewest > 1 else None)
    assert not fewer or fewer["fits"] is False


def test_page_names_fewest_ranks_and_need_with_one_fewer(capsys):
    page = plan_page(capsys, "--memory", "690MiB", "--quant", "none")
    assert "fewest     3 ranks are enough in float32; with 2, rank 0 would need 900.6 MiB" in page
    page = plan_page(capsys, "--memory", "1.3", "--dtype", "bfloat16", "--quant", "none")
    assert "fewest     1 rank is enough in bfloat16" in page
    page = plan_page(capsys, "--memory", "80", "--pp", "2", "--quant", "none")
    assert "fewest     2 ranks are enough in float32" in page


def test_largest_plan_says_why_no_number_of_ranks_fits(capsys):
    plan = plan_json(capsys, "--memory", "30MiB")
    assert (plan["tp_size"], plan["fits"], plan["smallest_that_fits"]) == (9, False, None)
    page = plan_words(capsys, "--memory", "30MiB", "--dtype", "float32")
    assert "and has 30.0 MiB; the weights leave no room for KV cache" in page
    assert "no number of ranks is enough; the maximum is 9" in page
    assert "give each rank more memory" in page and plan["remedies"] == []


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (["--nproc", "2"], 0),
        (["--nproc", "1-12"], 0),
        (["--nproc", "10-12"], 0),
        (["--nproc", "2", "--memory", "1"], 0),
        (["--nproc", "2", "--memory", "0.1"], 1),
        (["--memory", "1,0.01"], 1),
        (["--memory", "0.01"], 1),
        (["--nproc", "1-12", "--memory", "0.7"], 0),
        (["--nproc", "1-12", "--memory", "0.01"], 1),
        (["--nproc", "10-12", "--memory", "80"], 1),
    ],
)
def test_plan_that_does_not_fit_exits_with_1(argv, code):
    assert command_line.main(["plan", *argv]) == code
    assert command_line.main(["plan", *argv, "--json"]) == code


def test_range_with_memory_shows_which_numbers_of_ranks_fit(capsys):
    memory = ["--memory", "690MiB", "--quant", "none"]
    page = plan_page(capsys, "--nproc", "2-4", *memory)
    plans = plan_json(capsys, "--nproc", "2-4", *memory)["plans"]
    rooms = [f"{plan['room_for_kv_tokens']:,}" for plan in plans]
    rows = re.findall(r"^ +([234]) .* ([0-9,]+)  (yes|no)$", page, re.M)
    assert rows == list(zip("234", rooms, ("no", "yes", "no"), strict=True))
    assert "of these, 3 ranks are enough" in page
    none = plan_words(capsys, "--nproc", "1-2", *memory)
    assert "none of these is enough; with 2, rank 0 needs 900.6 MiB and has 690.0 MiB;" in none


def test_page_counts_replicated_kv_heads_as_copies(capsys):
    """Regression: the page said that 6 of 3 KV heads were stored again."""
    page = plan_words(capsys, "--nproc", "9")
    assert "9 KV heads stored instead of 3 (+200%)" in page


def test_plan_output_to_a_pipe_has_no_escape_codes(capsys):
    command_line.main(["plan", "--nproc", "2", "--memory", "1,1"])
    assert "\x1b" not in capsys.readouterr().out


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_colors_are_used_only_on_terminals_without_no_color(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert terminal.has_colors(Terminal())
    assert not terminal.has_colors(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not terminal.has_colors(Terminal())


def test_escaped_answer_has_no_terminal_control_codes():
    """Escape codes in an answer could retitle the window or rewrite what is on the screen."""
    hostile = "a\x1b]0;owned\x07\u202eb\r\x9b2J"
    shown = escaped(hostile)
    assert not any(ord(char) < 32 or 127 <= ord(char) < 160 for char in shown)
    assert "\u202e" not in shown
    assert escaped("tab\tline\n\u4f60 \U0001f600") == "tab\tline\n\u4f60 \U0001f600"


def test_first_ctrl_c_is_recorded_and_second_one_interrupts():
    with pytest.raises(KeyboardInterrupt), terminal.ctrl_c() as pressed:
        assert not pressed()
        signal.raise_signal(signal.SIGINT)
        assert pressed()
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("max_seq_len=9: use 1 to 8", "--max-seq-len 9: use 1 to 8"),
        ("device='cuda', but no GPU; drop device", "--device cuda, but no GPU; drop device"),
        ("seed=1: raise kv_cache_bytes, or", "--seed 1: raise --kv-cache-bytes, or"),
        ("prompts.jsonl: line 2: seed='x' is", "prompts.jsonl: line 2: seed='x' is"),
        ("n_heads=3: no max_seq_len", "n_heads=3: no max_seq_len"),
    ],
)
def test_settings_in_library_messages_become_flags(message, shown):
    assert in_flags(message, GENERATE) == shown


def test_a_wrong_setting_is_reported_as_a_flag(capsys):
    assert command_line.main(["generate", "--prompt=x", "--max-seq-len=9000"]) == 2
    said = "parallel-llama: --max-seq-len 9000: this model's context is 8192 tokens"
    assert capsys.readouterr().err.startswith(said)
