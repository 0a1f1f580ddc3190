"""Requests that harmed other servers, one test for each row of a table in SECURITY.md."""

import json
import pickle
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from canary import Canary
from served import Served

from parallel_llama.serve.wire import Frames, from_engine, to_engine

HI = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}


@pytest.fixture(scope="module")
def canary(tiny: Served) -> Iterator[Canary]:
    with Canary(tiny) as canary:
        yield canary


def refused(served: Served, canary: Canary, path: str, says: str, **fields: Any) -> None:
    """The request gets status 400, with the text in its field or message; others are answered."""
    status, _, body = served.send("POST", path, {"max_tokens": 1, **fields})
    assert status == 400, body
    error = json.loads(body)["error"]
    assert says in f"{error['param']}: {error['message']}", body
    canary.check()


class _Harm:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_a_pickle_on_the_engines_socket_is_refused(tmp_path):
    path = tmp_path / "done"
    data = pickle.dumps(_Harm(path))
    (body,) = Frames().feed(len(data).to_bytes(4, "little") + data)
    for decoder in (to_engine, from_engine):
        with pytest.raises(msgspec.MsgspecError):
            decoder.decode(body)
    assert not path.exists()


def test_a_server_listens_once_and_on_loopback(tiny):
    parent = psutil.Process(tiny.process.pid)
    every = [parent, *parent.children(recursive=True)]
    found = [
        each.laddr
        for process in every
        for each in process.net_connections("inet")
        if each.status == psutil.CONN_LISTEN
    ]
    port = int(tiny.url.rpartition(":")[2])
    assert [tuple(address) for address in found] == [("127.0.0.1", port)]


def test_chat_template_in_a_request_is_refused(tiny, canary):
    text = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    refused(tiny, canary, "/v1/chat/completions", "chat_template", messages=HI, chat_template=text)
    asked = {"messages": HI, "max_tokens": 1}
    plain = tiny.post("/v1/chat/completions", **asked)
    named = tiny.post("/v1/chat/completions", **asked, chat_template_kwargs={"chat_template": text})
    assert named["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]


@pytest.mark.parametrize("name", ["messages", "tools", "bos_token", "add_generation_prompt"])
def test_reserved_chat_template_kwargs_are_refused(tiny, canary, name):
    refused(
        tiny, canary, "/v1/chat/completions", name,
        messages=HI, chat_template_kwargs={name: [1, 2]},
    )  # fmt: skip


@pytest.mark.parametrize("name", ["n", "best_of"])
def test_the_number_of_choices_is_bounded(tiny, canary, name):
    for n in (17, 16_384, 10**9):
        refused(tiny, canary, "/v1/completions", f"{name}: ", prompt="a", **{name: n})


def test_min_tokens_without_max_tokens_is_bounded_by_the_context(tiny, canary):
    path = "/v1/chat/completions"
    for least in (513, 10**6, 2**31 - 1):
        says = f"{least} new tokens need"
        refused(tiny, canary, path, says, messages=HI, min_tokens=least, max_tokens=None)


@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": True, "top_logprobs": 21},
        {"logprob_token_ids": list(range(129))},
        {"logprobs": True, "top_logprobs": 10**9},
    ],
)
def test_number_of_logprobs_is_bounded(tiny, canary, fields):
    refused(tiny, canary, "/v1/chat/completions", "logprob", messages=HI, **fields)


def test_penalties_cost_little_cpu_time_and_are_bounded(tiny, canary):
    front = psutil.Process(tiny.process.pid)

    def cpu_s(**fields: Any) -> float:
        before_s = [each.cpu_times() for each in (front, *front.children(recursive=True))]
        tiny.post("/v1/completions", prompt="a" * 50, max_tokens=400, ignore_eos=True, **fields)
        after_s = [each.cpu_times() for each in (front, *front.children(recursive=True))]
        return sum(t.user + t.system for t in after_s) - sum(t.user + t.system for t in before_s)

    penalties = {"frequency_penalty": 2, "presence_penalty": 2, "repetition_penalty": 100}
    cpu_s(**penalties)
    assert cpu_s(**penalties) < 10 * cpu_s()
    for given in ({"repetition_penalty": 1e308}, {"frequency_penalty": -1e308}):
        refused(tiny, canary, "/v1/completions", *given, prompt="a", **given)


def test_unsupported_thinking_budget_is_refused_by_name(tiny, canary):
    for name in ("thinking_token_budget", "max_thinking_tokens"):
        refused(tiny, canary, "/v1/chat/completions", name, messages=HI, **{name: 10**9})


def test_tensor_prompt_is_refused(tiny, canary):
    refused(tiny, canary, "/v1/completions", "prompt_embeds", prompt="a", prompt_embeds="UEsDBA==")
    refused(tiny, canary, "/v1/completions", "prompt", prompt={"data": "UEsDBA=="})


@pytest.mark.parametrize(
    ("parameters", "says"),
    [
        ({"type": "object", "properties": {"a": {"type": "string", "pattern": "*"}}}, "schema"),
        ({"type": "object", "properties": {"a": {"type": "something given"}}}, "schema"),
        ({"type": 7}, "the type 7; use 'object'"),
        ({"type": "object", "properties": 7}, "schema"),
    ],
)
def test_tool_parameters_with_an_invalid_schema_are_refused(tiny, canary, parameters, says):
    function = {"name": "f", "parameters": parameters, "strict": True}
    refused(
        tiny, canary, "/v1/chat/completions", says, messages=HI, tool_choice="required",
        tools=[{"type": "function", "function": function}],
    )  # fmt: skip


def test_invalid_json_schema_is_refused(tiny, canary):
    for schema in ({"type": "nothing"}, {"$ref": "#/nowhere"}, {"properties": 7}):
        given = {"prompt": "a", "structured_outputs": {"json": schema}}
        refused(tiny, canary, "/v1/completions", "JSON schema", **given)


def test_invalid_regex_is_refused(tiny, canary):
    for regex in ("(", "*", "[", "(?P<a", "a{99999999999}"):
        given = {"prompt": "a", "structured_outputs": {"regex": regex}}
        refused(tiny, canary, "/v1/completions", "regular expression", **given)


def test_a_malformed_grammar_behind_a_good_one_is_refused(tiny, canary):
    good = {"prompt": "a", "max_tokens": 3, "structured_outputs": {"grammar": 'start: "abc"'}}
    for _ in range(3):
        assert tiny.post("/v1/completions", **good)["choices"][0]["text"] == "abc"
        bad = {"grammar": 'start: "abc" )'}
        refused(tiny, canary, "/v1/completions", "grammar", prompt="a", structured_outputs=bad)


@pytest.mark.parametrize("salt", ["a" * 257, "\U0001f999" * 65, 7, ["a"], {}])
def test_cache_salt_must_be_a_short_string(tiny, canary, salt):
    refused(tiny, canary, "/v1/completions", "cache_salt", prompt="a", cache_salt=salt)


def test_huge_tool_name_is_refused_without_backtracking(tiny, canary):
    """A pattern could backtrack on these names of a megabyte."""
    for name in ("a" * (1 << 20), "a." * (1 << 19) + "!", "f(" * (1 << 19)):
        function = {"name": name, "parameters": SCHEMA}
        started = time.monotonic()
        refused(
            tiny, canary, "/v1/chat/completions", "name",
            messages=HI, tools=[{"type": "function", "function": function}],
        )  # fmt: skip
        assert time.monotonic() - started < 60


@pytest.mark.parametrize("own", ["a", "a" * 32, ""])
def test_no_client_ends_anothers_request_by_its_id(tiny, own):
    """A client that disconnects or reuses another client's id cancels only its own request."""
    fields = {"prompt": "a", "max_tokens": 300, "ignore_eos": True, "request_id": "a" * 32}
    texts: list[str] = []

    def read() -> None:
        stream = tiny.events("/v1/completions", **fields)
        texts.append("".join(event["choices"][0]["text"] for event in stream))

    reading = [threading.Thread(target=read) for _ in range(2)]
    for thread in reading:
        thread.start()
    leaving = tiny.connect()
    body = json.dumps({**fields, "request_id": own, "stream": True, "max_tokens": 400}).encode()
    kind = {"content-type": "application/json", "x-request-id": own or "a"}
    leaving.request("POST", "/v1/completions", body, kind)
    leaving.getresponse().read(1)
    leaving.close()
    for thread in reading:
        thread.join()
    assert len(texts[0]) > 100 and texts[0] == texts[1]


def test_nothing_is_fetched_for_a_client(tiny, canary):
    with socket.create_server(("127.0.0.1", 0)) as own:
        own.settimeout(0.2)
        url = f"http://127.0.0.1:{own.getsockname()[1]}/"
        for part in (
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "input_audio", "input_audio": {"data": url}},
            {"type": "file", "file": {"url": url}},
            {"type": "text", "text": "a", "url": url, "$ref": url},
        ):
            messages = [{"role": "user", "content": [part]}]
            fields = {"messages": messages, "max_tokens": 1}
            status, _, _ = tiny.send("POST", "/v1/chat/completions", fields)
            assert status == (200 if part["type"] == "text" else 400)
        schema = {"$ref": url}
        tiny.send(
            "POST", "/v1/completions", {"prompt": "a", "structured_outputs": {"json": schema}}
        )
        with pytest.raises(TimeoutError):
            own.accept()
    canary.check()


@pytest.mark.parametrize(
    "path",
    ["/invocations", "/pause", "/resume", "/sleep", "/wake_up", "/collective_rpc", "/server_info",
     "/reset_prefix_cache", "/start_profile", "/stop_profile", "/v1/load_lora_adapter", "/dumper",
     "/set_internal_state", "/update_weights_from_disk", "/flush_cache", "/abort_request",
     "/inference/v1/generate", "/debug", "/docs", "/shutdown", "/props", "/slots"],
)  # fmt: skip
def test_admin_and_debug_routes_do_not_exist(tiny, path):
    for method in ("GET", "POST", "PUT", "DELETE"):
        assert tiny.send(method, path, b"{}", {"content-type": "application/json"})[0] == 404
