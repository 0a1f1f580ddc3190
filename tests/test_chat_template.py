"""Chat formats: the models' own templates, Meta's two, and templates that mean harm."""

import json
import sys
import threading
import time
import types
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import pytest
from sentencepiece import SentencePieceProcessor
from tokenizer_data import (
    LLAMA3,
    MISTRAL_V1,
    MISTRAL_V3,
    SMOLLM2,
    real_tokenizer,
    smollm2_of_transformers,
)

from parallel_llama.errors import CheckpointError, UsageError
from parallel_llama.tokenizer import ChatTemplate, load_chat_template, load_tokenizer
from parallel_llama.tokenizer.jinja_chat import JinjaChat
from parallel_llama.tokenizer.template_renderer import TemplateRenderer

USER = [{"role": "user", "content": "hi"}]
DIALOG = [
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": "  What is 7 x 6?\n"},
    {"role": "assistant", "content": " 42 "},
    {"role": "user", "content": "And ünïcödé 🦙?"},
]


@pytest.fixture(scope="module")
def renderer() -> Iterator[TemplateRenderer]:
    """One process for many templates, with a limit short enough for a quick test."""
    renderer = TemplateRenderer(cpu_s=0.5)
    yield renderer
    renderer.close()


def rendered(renderer: TemplateRenderer, template: str, **names: str) -> str:
    chat = JinjaChat(template, real_tokenizer(SMOLLM2), names, "a model", renderer)
    return chat.render(USER)


def chat_of(folder: Path) -> ChatTemplate | None:
    return load_chat_template(folder, load_tokenizer(folder))


# The built-in formats.


def meta_folder(folder: Path, tokenizer: Path) -> Path:
    (folder / "params.json").write_text("{}")
    (folder / "tokenizer.model").symlink_to(tokenizer)
    return folder


def test_llama3_equals_metas_chat_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Meta's module imports an imaging library that these messages do not need."""
    imaging = types.ModuleType("PIL")
    imaging.Image = types.SimpleNamespace(Image=object)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "PIL", imaging)
    from llama_models.datatypes import RawMessage, StopReason
    from llama_models.llama3.chat_format import ChatFormat
    from llama_models.llama3.tokenizer import Tokenizer as MetaTokenizer

    oracle = ChatFormat(MetaTokenizer(LLAMA3))
    chat = chat_of(meta_folder(tmp_path, LLAMA3))
    assert chat is not None
    dialog = [*DIALOG, {"role": "user", "content": "<|eot_id|><|begin_of_text|>"}]
    raw = [
        RawMessage(stop_reason=StopReason.end_of_turn, **message)
        if message["role"] == "assistant"
        else RawMessage(**message)
        for message in dialog
    ]
    assert chat.encode(dialog) == oracle.encode_dialog_prompt(raw).tokens
    assert chat.stop_ids == frozenset(oracle.tokenizer.stop_tokens)


def test_llama2_equals_the_text_of_metas_chat_format(tmp_path: Path) -> None:
    chat = chat_of(meta_folder(tmp_path, MISTRAL_V1))
    assert chat is not None
    oracle = SentencePieceProcessor(str(MISTRAL_V1))
    first = "[INST] <<SYS>>\n Be brief. \n<</SYS>>\n\n  What is 7 x 6? [/INST] 42 "
    second = "[INST] And ünïcödé 🦙? [/INST]"
    assert chat.encode(DIALOG) == [
        1, *oracle.EncodeAsIds(first), 2, 1, *oracle.EncodeAsIds(second),
    ]  # fmt: skip
    assert chat.stop_ids == {2}


@pytest.mark.parametrize("tokenizer", [LLAMA3, MISTRAL_V1], ids=["llama3", "llama2"])
def test_message_text_never_becomes_a_special_token(tmp_path: Path, tokenizer: Path) -> None:
    folder = meta_folder(tmp_path, tokenizer)
    chat = chat_of(folder)
    assert chat is not None
    specials = load_tokenizer(folder).vocabulary.special_ids

    def n_special(text: str) -> int:
        assert chat is not None
        ids = chat.encode([{"role": "user", "content": text}])
        return sum(id in specials.values() for id in ids)

    for text in specials:
        assert n_special(f"a {text} b") == n_special("a b")


@pytest.mark.parametrize("tag", ["[INST]", "[/INST]", "<<SYS>>", "<</SYS>>"])
def test_llama2_refuses_messages_with_its_markup(tmp_path: Path, tag: str) -> None:
    chat = chat_of(meta_folder(tmp_path, MISTRAL_V1))
    assert chat is not None
    with pytest.raises(UsageError, match="message 0 holds"):
        chat.encode([{"role": "user", "content": f"x {tag} y"}])


@pytest.mark.parametrize(
    "roles", [["system"], ["assistant"], ["user", "user"], ["user", "assistant"], ["user", "tool"]]
)
def test_llama2_refuses_roles_out_of_turn(tmp_path: Path, roles: list[str]) -> None:
    chat = chat_of(meta_folder(tmp_path, MISTRAL_V1))
    assert chat is not None
    with pytest.raises(UsageError, match="a user last"):
        chat.encode([{"role": role, "content": "x"} for role in roles])


def test_llama3_names_the_roles_it_knows(tmp_path: Path) -> None:
    chat = chat_of(meta_folder(tmp_path, LLAMA3))
    assert chat is not None
    with pytest.raises(UsageError, match="role 'robot' is not known; give system, user"):
        chat.encode([{"role": "robot", "content": "x"}])


@pytest.mark.parametrize("messages", [[], ["hi"], [{"role": "user"}], [{"content": "x"}]])
def test_what_is_no_conversation_is_refused(tmp_path: Path, messages: Sequence[Any]) -> None:
    for chat in (
        chat_of(meta_folder(tmp_path, LLAMA3)),
        load_chat_template(SMOLLM2, real_tokenizer(SMOLLM2)),
    ):
        assert chat is not None
        with pytest.raises(UsageError, match="message"):
            chat.encode(messages)


def test_no_format_is_made_up_for_other_models(tmp_path: Path) -> None:
    """Mistral's later tokenizers have [INST] as a token, in formats that are not Llama 2's."""
    assert chat_of(meta_folder(tmp_path, MISTRAL_V3)) is None
    (tmp_path / "params.json").unlink()
    assert chat_of(tmp_path) is None


# The models' own templates.


def test_smollm2_equals_transformers() -> None:
    oracle = smollm2_of_transformers()
    chat = load_chat_template(SMOLLM2, real_tokenizer(SMOLLM2))
    assert chat is not None
    for messages in (USER, DIALOG, DIALOG[1:]):
        text = oracle.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert chat.encode(messages) == oracle(text, add_special_tokens=False).input_ids
    assert chat.stop_ids == {2}


def test_real_constructs_of_templates_equal_transformers(renderer: TemplateRenderer) -> None:
    oracle = smollm2_of_transformers()
    template = """
    {%- set ns = namespace(n=0, last='') %}
    {%- macro line(message, mark='-') %}{{ mark * 3 }} {{ message.content | trim }}{% endmacro %}
    {{- bos_token }}
    {% for message in messages %}
        {%- if loop.index0 == 7 %}{% break %}{% endif %}
        {%- if tools is not none %}{% continue %}{% endif %}
        {%- set ns.n = ns.n + 1 %}
        {% generation %}{{ line(message) }}{% endgeneration %}
        {{- {'a': message['content'], 'b': [1, true, none]} | tojson(indent=2) }}
        {{- '%05d|%s' % (ns.n, message.role) }}{{ (2 ** 10) ~ ns.n % 2 }}
        {{- message.content.split(' ')[-1].strip() | upper }}
    {% endfor %}
    {%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
    expected = oracle.apply_chat_template(
        DIALOG, chat_template=template, tokenize=False, add_generation_prompt=True
    )
    names = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    chat = JinjaChat(template, real_tokenizer(SMOLLM2), names, "a model", renderer)
    assert chat.render(DIALOG) == expected


def test_the_date_of_today_can_be_asked_for(renderer: TemplateRenderer) -> None:
    assert rendered(renderer, "{{ strftime_now('%Y') }}") == str(datetime.now().year)


def hf_folder(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "tokenizer.model").symlink_to(MISTRAL_V1)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("template", "n_bos"),
    [("{{ bos_token }}{{ messages[0].content }}", 1), ("{{ messages[0].content }}", 1)],
)
def test_there_is_one_bos_whether_or_not_the_template_writes_it(
    tmp_path: Path, template: str, n_bos: int
) -> None:
    chat = chat_of(hf_folder(tmp_path, {"chat_template": template, "bos_token": "<s>"}))
    assert chat is not None
    oracle = SentencePieceProcessor(str(MISTRAL_V1))
    assert chat.encode(USER) == [1] * n_bos + oracle.EncodeAsIds("hi")


def test_the_template_is_found_where_hf_puts_it(tmp_path: Path) -> None:
    def text() -> str | None:
        chat = chat_of(tmp_path)
        return chat.render(USER) if isinstance(chat, JinjaChat) else None

    hf_folder(tmp_path, {})
    assert text() is None
    config = tmp_path / "tokenizer_config.json"
    config.write_text('{"chat_template": "plain"}')
    assert text() == "plain"
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "this"}]
    config.write_text(json.dumps({"chat_template": named}))
    assert text() == "this"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert text() == "file"


@pytest.mark.parametrize("template", [7, {}, [], [{"name": "x", "template": "y"}], "x" * (1 << 21)])
def test_a_damaged_template_is_named(tmp_path: Path, template: Any) -> None:
    hf_folder(tmp_path, {"chat_template": template})
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: .*chat.template"):
        chat_of(tmp_path)


def test_stop_ids_are_the_turn_ends_that_the_template_writes(tmp_path: Path) -> None:
    added = {"32000": {"content": "<|im_end|>", "special": True}}
    added["32001"] = {"content": "<|eot_id|>", "special": True}
    config = {"chat_template": "x<|im_end|>", "eos_token": "</s>", "added_tokens_decoder": added}
    chat = chat_of(hf_folder(tmp_path, config))
    assert chat is not None
    assert chat.stop_ids == {2, 32000}


def test_what_the_template_refuses_is_wrong_use(renderer: TemplateRenderer) -> None:
    with pytest.raises(UsageError, match="refuses the messages: roles must alternate"):
        rendered(renderer, "{{ raise_exception('roles must alternate') }}")


def test_messages_that_a_template_cannot_render_are_wrong_use(renderer: TemplateRenderer) -> None:
    with pytest.raises(UsageError, match="a model: the chat template cannot render"):
        rendered(renderer, "{{ messages[0].absent.deeper }}")


def test_a_template_that_does_not_parse_is_named_with_its_line(renderer: TemplateRenderer) -> None:
    with pytest.raises(CheckpointError, match="a model: the chat template does not parse: line 2"):
        rendered(renderer, "x\n{% if %}")


def test_threads_share_a_renderer(renderer: TemplateRenderer) -> None:
    chat = JinjaChat("{{ messages[0].content }}", real_tokenizer(SMOLLM2), {}, "a model", renderer)
    texts: dict[int, str] = {}

    def run(number: int) -> None:
        texts[number] = chat.render([{"role": "user", "content": f"{number} " * 20_000}])

    threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {number: f"{number} " * 20_000 for number in range(8)}


# Templates that mean harm.

ENDLESS = {
    "nested ranges": "{% for a in range(99999) %}{% for b in range(99999) %}"
    "{% endfor %}{% endfor %}",
    "nested ranges behind filters": "{{ range(99999)|map('string')|map('length')|list|length }}"
    "{% for a in range(99999) %}{{ range(99999)|list|length and '' }}{% endfor %}",
    "nested lists": "{% set l = [1]*999 %}"
    "{% for a in l %}{% for b in l %}{% for c in l %}{% for d in l %}{% endfor %}{% endfor %}"
    "{% endfor %}{% endfor %}",
    "nested strings": "{% set s = 'a'*999999 %}{% for a in s %}{% for b in s %}"
    "{% endfor %}{% endfor %}",
    "macro that branches": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}"
    "{% endmacro %}{{ f(60) }}",
    "recursive loop": "{% for a in range(300) recursive %}{{ loop(range(300)) }}{% endfor %}",
    "equality of trees": "{% set ns = namespace(a=[1], b=[1]) %}{% for i in range(60) %}"
    "{% set ns.a = [ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}{% endfor %}{{ ns.a == ns.b }}",
    "order of trees": "{% set ns = namespace(a=[1], b=[1]) %}{% for i in range(60) %}"
    "{% set ns.a = [ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}{% endfor %}{{ ns.a < ns.b }}",
    "search in text": "{% set s = 'a'*1000000 %}{% for i in range(99999) %}"
    "{{ 'b' in s and '' }}{% endfor %}",
    "sort again and again": "{% for i in range(99999) %}"
    "{{ (range(99999)|sort|length) and '' }}{% endfor %}",
    "sum of lists": "{{ ([[1]*999]*99999)|sum(start=[])|length }}",
    "urlize": "{% for i in range(99999) %}{{ ('http://a.b '*90000)|urlize and '' }}{% endfor %}",
}
LARGE = {
    "power": "{{ 10**(10**7) > 1 }}",
    "power of power": "{{ 9**(9**9) }}",
    "long text": "{{ 'a'*10**10 }}",
    "long text from the right": "{{ 10**10*'a' }}",
    "long list": "{{ ([0]*10**10)|length }}",
    "long format": "{{ '%10000000000d' % 1 }}",
    "long format by argument": "{{ '%*d' % (1000000000, 1) }}",
    "long precision": "{{ '%.1000000000f' % 1.0 }}",
    "format method": "{{ '{:>10000000000}'.format('a') }}",
    "format filter": "{{ '%2000000000d'|format(1) }}",
    "center": "{{ 'a'|center(10**10) }}",
    "center method": "{{ 'a'.center(10000000000) }}",
    "ljust": "{{ 'a'.ljust(10000000000) }}",
    "zfill": "{{ 'a'.zfill(10000000000) }}",
    "expandtabs": "{{ '\t'.expandtabs(2000000000) }}",
    "indent": "{{ ('a\n'*9999)|indent(1000000) }}",
    "doubling by ~": "{% set ns = namespace(s='a') %}{% for i in range(99) %}"
    "{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s|length }}",
    "doubling by +": "{% set ns = namespace(s='a') %}{% for i in range(99) %}"
    "{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s|length }}",
    "doubling by join": "{% set ns = namespace(s='a') %}{% for i in range(99) %}"
    "{% set ns.s = [ns.s, ns.s]|join %}{% endfor %}{{ ns.s|length }}",
    "doubling by replace": "{% set ns = namespace(s='a') %}{% for i in range(99) %}"
    "{% set ns.s = ns.s.replace('a', 'aa') %}{% endfor %}{{ ns.s|length }}",
    "text of a tree": "{% set ns = namespace(a=[1]) %}{% for i in range(60) %}"
    "{% set ns.a = [ns.a, ns.a] %}{% endfor %}{{ ns.a|string|length }}",
    "JSON of a tree": "{% set ns = namespace(a=[1]) %}{% for i in range(60) %}"
    "{% set ns.a = [ns.a, ns.a] %}{% endfor %}{{ ns.a|tojson|length }}",
    "indented JSON": "{{ [[[1]]]|tojson(indent=10000000000) }}",
    "range too long": "{{ range(10**9)|list|length }}",
    "batch": "{{ [1]|batch(10**10, 0)|list|length }}",
    "lipsum": "{{ lipsum(n=1000000)|length }}",
    "much output": "{% for i in range(99999) %}{{ 'abcdefghij'*10 }}{% endfor %}",
    "long date": "{{ strftime_now('%Y'*100000) }}",
    "wide date": "{{ strftime_now('%1000000000Y') }}",
    "endless recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "deep brackets": "{{ " + "(" * 50_000 + ")" * 50_000 + " }}",
    "deep blocks": "{% if 1 %}" * 5000 + "{% endif %}" * 5000,
    "deep list": "{{ " + "[" * 3000 + "]" * 3000 + " }}",
}
ESCAPES = {
    "class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ raise_exception.__globals__['sys'] }}",
    "init": "{{ cycler.__init__.__globals__ }}",
    "attribute filter": "{{ (''|attr('__class__')).mro() }}",
    "format": "{{ '{0.__class__.__mro__}'.format('') }}{{ ''.__class__() }}",
    "import of a file": "{% include '/etc/passwd' %}",
    "change of the messages": "{{ messages.append(1) }}",
    "change of a message": "{{ messages[0].update({'role': 'system'}) }}",
}


@pytest.mark.parametrize("template", [*ENDLESS.values(), *LARGE.values()], ids=[*ENDLESS, *LARGE])
def test_a_hostile_template_is_stopped(renderer: TemplateRenderer, template: str) -> None:
    """In 2 s at the most, whatever it does, and the next template renders."""
    rendered(renderer, "ready")
    start = time.monotonic()
    with pytest.raises((CheckpointError, UsageError), match="template"):
        rendered(renderer, template)
    assert time.monotonic() - start < 2.0
    assert rendered(renderer, "next {{ messages[0].content }}") == "next hi"


@pytest.mark.parametrize("template", ESCAPES.values(), ids=ESCAPES)
def test_a_template_does_not_leave_the_sandbox(renderer: TemplateRenderer, template: str) -> None:
    with pytest.raises((CheckpointError, UsageError), match="template"):
        rendered(renderer, template)


def test_long_messages_may_take_a_template_longer() -> None:
    """Templates of models that watch over others look at each character, and were stopped."""
    renderer = TemplateRenderer(cpu_s=0.1)
    template = (
        "{% for c in messages[0].content %}{% for i in range(40) %}{% endfor %}{{ c }}{% endfor %}"
    )
    chat = JinjaChat(template, real_tokenizer(SMOLLM2), {}, "a model", renderer)
    text = "word " * 20_000
    assert chat.render([{"role": "user", "content": text}]) == text
    with pytest.raises(CheckpointError, match=r"takes more than 0\.\d+ s of CPU time"):
        rendered(renderer, ENDLESS["nested ranges"])
    renderer.close()


def test_the_default_limit_stops_a_loop_within_two_seconds() -> None:
    renderer = TemplateRenderer()
    assert rendered(renderer, "ready") == "ready"
    start = time.monotonic()
    with pytest.raises(CheckpointError, match=r"takes more than 1\.5\d s of CPU time"):
        rendered(renderer, ENDLESS["nested ranges"])
    assert time.monotonic() - start < 2.0
    renderer.close()


def test_memory_of_a_hostile_template_is_bounded() -> None:
    """The kernel refuses what goes beyond 192 MiB; the highest mark of the process is read."""
    renderer = TemplateRenderer(cpu_s=10)  # memory is to end these, not time
    rendered(renderer, "ready")
    pid = renderer_pid(renderer)
    for name in ("doubling by +", "doubling by join", "center", "ljust", "expandtabs", "batch"):
        with pytest.raises(CheckpointError, match="needs more memory than it may have"):
            rendered(renderer, LARGE[name])
    assert renderer_pid(renderer) == pid
    status = Path(f"/proc/{pid}/status").read_text()
    (peak,) = (line for line in status.splitlines() if line.startswith("VmHWM"))
    assert int(peak.split()[1]) * 1024 < 256 << 20
    renderer.close()


def test_output_is_bounded(renderer: TemplateRenderer) -> None:
    assert len(rendered(renderer, "{{ 'a' * 1048576 }}")) == 1048576
    with pytest.raises(CheckpointError, match="writes more than 1048576 characters"):
        rendered(renderer, "{{ 'a' * 1048576 }}b")


def renderer_pid(renderer: TemplateRenderer) -> int:
    child = renderer._process._child
    assert child is not None
    return child._process.pid


def test_a_dead_renderer_is_started_again(renderer: TemplateRenderer) -> None:
    rendered(renderer, "ready")
    process = psutil.Process(renderer_pid(renderer))
    process.kill()
    process.wait(5)
    assert rendered(renderer, "again") == "again"
