"""Hostile templates and grammars, through the server: no other client waits for them."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import psutil
import pytest
from canary import Canary
from hostile_inputs import ENDLESS, ESCAPES, GRAMMARS, LARGE
from served import Served
from tiny_folder import TEMPLATE, write_chat_folder

TEMPLATES = {
    name: {**ENDLESS, **LARGE, **ESCAPES}[name]
    for name in (
        "nested ranges", "equality of trees", "power of power", "doubling by join",
        "endless recursion", "class",
    )
}  # fmt: skip


@pytest.fixture(scope="module")
def trapped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A model with a hostile chat template; the first message selects the attack."""
    folder = write_chat_folder(tmp_path_factory.mktemp("trapped"))
    traps = "".join(
        f"{{% if messages[0].content == {name!r} %}}{text}{{% endif %}}"
        for name, text in TEMPLATES.items()
    )
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps({**settings, "chat_template": traps + TEMPLATE}))
    with Served(f"--model={folder}") as served:
        chat(served, "hi")  # starts the template's process
        yield served


def chat(served: Served, content: str) -> tuple[int, dict[str, Any]]:
    fields = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
    status, _, body = served.send("POST", "/v1/chat/completions", fields)
    return status, json.loads(body)


class Arrivals:
    """The arrival times of the tokens of streams that another client reads."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.n_checked = 0

    @contextmanager
    def go_on(self) -> Iterator[None]:
        """Requires that tokens arrive all the time while the body of the context runs.

        The time is divided into ten parts instead of seconds, because everything takes longer on a
        busy machine. A stream that is blocked gets tokens only in the first and the last part.
        """
        started = time.monotonic()
        yield
        part_s = (time.monotonic() - started) / 10
        if part_s < 0.1:  # ended early: all time limits are at least 1 s of CPU time
            return
        self.n_checked += 1
        parts = {int((when - started) / part_s) for when in self.times if when >= started}
        assert len(parts) > 5, f"tokens came in {sorted(parts)} of 10 parts of {part_s} s"


@contextmanager
def streaming(served: Served) -> Iterator[Arrivals]:
    arrivals = Arrivals()
    is_over = threading.Event()
    asked = {"prompt": "a", "max_tokens": 400, "ignore_eos": True}
    served.post("/v1/completions", **asked)  # the first of its kind takes longer

    def read() -> None:
        while not is_over.is_set():
            for _ in served.events("/v1/completions", **asked):
                arrivals.times.append(time.monotonic())

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield arrivals
    finally:
        is_over.set()
        reader.join()


def test_hostile_template_delays_no_other_client(trapped):
    with Canary(trapped) as canary, streaming(trapped) as arrivals:
        with arrivals.go_on():
            status, reply = chat(trapped, "equality of trees")
        assert status == 500 and "template was stopped" in reply["error"]["message"], reply
        assert trapped.get("/health/ready") == {"status": "ready", "tp_size": 1}
        canary.check()
    assert arrivals.n_checked  # a template that is stopped has run for 1.5 s of CPU time
    assert chat(trapped, "hi")[0] == 200


def test_concurrent_hostile_templates_leave_the_server_working(trapped):
    with Canary(trapped) as canary:
        with ThreadPoolExecutor(len(TEMPLATES)) as pool:
            replies = list(pool.map(partial(chat, trapped), TEMPLATES))
        canary.check()
    for status, reply in replies:
        assert status in (400, 429, 500), reply  # 429 if the others took too long
    assert chat(trapped, "hi")[0] == 200
    assert "Traceback" not in trapped.stderr


def test_hostile_grammars_delay_no_other_client(tiny):
    with Canary(tiny) as canary, streaming(tiny) as arrivals:
        for kind, text in [*GRAMMARS.values()][::2]:
            form = {"json_schema": "json", "regex": "regex", "lark": "grammar"}[kind]
            fields = {"prompt": "a", "max_tokens": 20, "structured_outputs": {form: text}}
            with arrivals.go_on():
                status, _, body = tiny.send("POST", "/v1/completions", fields)
            assert status == 200 or (status == 400 and b"cannot be used: " in body), body
        canary.check()
    assert arrivals.n_checked  # a grammar that is stopped has been compiled for 1 s of CPU time


def test_long_bodies_get_a_reply_and_do_not_change_other_answers(tiny):
    """Bodies of a megabyte or more, of the kinds that take longest to check."""
    text, many = "a" * (1 << 20), [0] * 600_000
    message = {"role": "user", "content": "a"}
    with Canary(tiny) as canary:
        for path, fields, expected in [
            ("/tokenize", {"prompt": text, "return_token_strs": True}, 200),
            ("/tokenize", {"messages": [{**message, "content": text[:-100]}]}, 200),
            ("/detokenize", {"tokens": many}, 200),
            ("/v1/completions", {"prompt": many}, 400),
            ("/v1/completions", {"prompt": text}, 400),
            ("/v1/chat/completions", {"messages": [{**message, "x": many}]}, 200),
            ("/v1/chat/completions", {"messages": [message] * 10_000}, 400),
        ]:
            status, _, body = tiny.send("POST", path, fields)
            assert status == expected, body[:500]
        canary.check()


def test_there_are_at_least_40_distinct_hostile_templates():
    every = [*ENDLESS.values(), *LARGE.values(), *ESCAPES.values()]
    assert len(set(every)) == len(every) >= 40


JSON = {"content-type": "application/json"}


def test_memory_of_unfinished_bodies_is_released(tiny):
    """Regression: 1,000 unfinished bodies took 2.3 GB, and 1.5 GB stayed after a disconnect."""
    front = psutil.Process(tiny.process.pid)
    head = f"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-length: {2 << 20}\r\n"
    data = head.encode() + b"content-type: application/json\r\n\r\n" + b" " * 1_900_000
    address = ("127.0.0.1", int(tiny.url.rpartition(":")[2]))
    for _ in range(3):  # freeing such sizes makes malloc use its heap for them
        tiny.send("POST", "/tokenize", b'{"prompt":"a"}' + b" " * 1_900_000, JSON)
    before = front.memory_info().rss
    held = [socket.create_connection(address, 10) for _ in range(110)]
    for each in held:
        each.sendall(data)
    deadline = time.monotonic() + 25
    while front.memory_info().rss < before + (128 << 20):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    for each in held[:-1]:  # the last keeps the top of the heap in use
        each.close()
    deadline = time.monotonic() + 60
    while front.memory_info().rss > before + (40 << 20):
        assert time.monotonic() < deadline, (before, front.memory_info().rss)
        time.sleep(0.5)
    held[-1].close()
