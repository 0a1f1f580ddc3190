"""Templates and grammars that mean harm, through the server: nobody else waits for them."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from canary import Canary
from hostile_grammars import HOSTILE
from hostile_templates import ENDLESS, ESCAPES, LARGE
from served import Served
from tiny_folder import TEMPLATE, write_chat_folder

# A template that is stopped by the clock has run for 1.5 s of CPU time, and a grammar for 1 s.
MAX_GAP_S = 0.9

TEMPLATES = {
    name: {**ENDLESS, **LARGE, **ESCAPES}[name]
    for name in (
        "nested ranges", "equality of trees", "power of power", "doubling by join",
        "endless recursion", "class",
    )
}  # fmt: skip


@pytest.fixture(scope="module")
def trapped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A model whose template does harm where the first message names it."""
    folder = write_chat_folder(tmp_path_factory.mktemp("trapped"))
    traps = "".join(
        f"{{% if messages[0].content == {name!r} %}}{text}{{% endif %}}"
        for name, text in TEMPLATES.items()
    )
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps({**settings, "chat_template": traps + TEMPLATE}))
    with Served(f"--model={folder}") as served:
        chat(served, "hi")  # the template's process has begun
        yield served


def chat(served: Served, content: str) -> tuple[int, dict[str, Any]]:
    fields = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
    status, _, body = served.send("POST", "/v1/chat/completions", fields)
    return status, json.loads(body)


@contextmanager
def streaming(served: Served) -> Iterator[list[float]]:
    """The seconds between tokens of streams that another client reads meanwhile."""
    gaps: list[float] = []
    is_over = threading.Event()
    asked = {"prompt": "a", "max_tokens": 400, "ignore_eos": True}
    served.post("/v1/completions", **asked)  # the first of its kind takes longer

    def read() -> None:
        while not is_over.is_set():
            before = time.monotonic()
            for _ in served.events("/v1/completions", **asked):
                now = time.monotonic()
                gaps.append(now - before)
                before = now

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield gaps
    finally:
        is_over.set()
        reader.join()


def test_a_hostile_template_holds_nobody_up_but_who_asked(trapped):
    with Canary(trapped) as canary, streaming(trapped) as gaps:
        for name in TEMPLATES:
            started = time.monotonic()
            status, reply = chat(trapped, name)
            assert status in (400, 500) and "template" in reply["error"]["message"], (name, reply)
            assert time.monotonic() - started < 30  # 2 s of CPU time
            assert trapped.get("/health/ready") == {"status": "ready"}
        canary.check()
    assert len(gaps) > 100 and max(gaps) < MAX_GAP_S
    assert chat(trapped, "hi")[0] == 200


def test_hostile_templates_at_once_leave_the_server_as_it_was(trapped):
    with Canary(trapped) as canary:
        asking = [threading.Thread(target=chat, args=(trapped, name)) for name in TEMPLATES]
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join()
        canary.check()
    assert chat(trapped, "hi")[0] == 200
    assert "Traceback" not in trapped.stderr


def test_a_hostile_grammar_holds_nobody_up_but_who_asked(tiny):
    with Canary(tiny) as canary, streaming(tiny) as gaps:
        for kind, text in [*HOSTILE.values()][::2]:
            form = {"json_schema": "json", "regex": "regex", "lark": "grammar"}[kind]
            fields = {"prompt": "a", "max_tokens": 20, "structured_outputs": {form: text}}
            status, _, body = tiny.send("POST", "/v1/completions", fields)
            assert status in (200, 400), body
        canary.check()
    assert len(gaps) > 100 and max(gaps) < MAX_GAP_S


def test_long_bodies_are_answered_beside_others(tiny):
    """Each of a megabyte or more, and of what takes longest to look at."""
    text, many = "a" * (1 << 20), [0] * 600_000
    with Canary(tiny) as canary:
        for path, fields in [
            ("/tokenize", {"prompt": text, "return_token_strs": True}),
            ("/tokenize", {"messages": [{"role": "user", "content": text[:-100]}]}),
            ("/detokenize", {"tokens": many}),
            ("/v1/completions", {"prompt": many}),
            ("/v1/completions", {"prompt": text}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a", "x": many}]}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}] * 10_000}),
        ]:
            status, _, body = tiny.send("POST", path, fields)
            assert status in (200, 400), body[:500]
        canary.check()


def test_forty_templates_and_more_mean_harm():
    every = [*ENDLESS.values(), *LARGE.values(), *ESCAPES.values()]
    assert len(set(every)) == len(every) >= 40
