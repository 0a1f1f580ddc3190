"""Access control: API keys, Host headers, requests of other web pages, and the log."""

import base64
import json
import logging
import os
import re
import socket
import time
from unittest.mock import MagicMock

import pytest
from commands import run_command
from served import Served
from starlette.routing import Route
from tiny_folder import write_chat_folder

from parallel_llama.cli.parsers import origin as origin_of
from parallel_llama.errors import UsageError
from parallel_llama.serve import access
from parallel_llama.serve.access import OPEN, is_loopback, read_keys
from parallel_llama.serve.app import make_app
from parallel_llama.serve.bodies import MAX_BODY_BYTES
from parallel_llama.serve.log import _TextFormatter
from parallel_llama.serve.server import bound_socket

KEYS = ["sk-of-one-person", "sk-of-another-person"]
APP = make_app(MagicMock())
ROUTES = [route for route in APP.routes if isinstance(route, Route)]
# Content types that a page can send without a preflight request.
FORMS = (
    "text/plain",
    "application/x-www-form-urlencoded",
    "multipart/form-data; boundary=x",
    "text/plain; application/json",
    "application/jsonp",
    "text/json",
)
PATHS = [
    *[re.sub("{name:path}|{file:path}", "x", route.path) for route in ROUTES],
    *["/", "/docs", "/metrics", "/v1", "/admin", "/health/", "/health/../v1/models", "//health"],
    *["/health%00", "/HEALTH", "/%68ealth/x", "/v1/models/health"],
]
METHODS = ["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE"]


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory):
    folder = write_chat_folder(tmp_path_factory.mktemp("model"))
    path = folder / "keys"
    path.write_text("# ours\n\n" + "\n".join(KEYS) + "\n")
    path.chmod(0o600)
    with Served(f"--model={folder}", f"--api-key-file={path}", "--host=localhost") as served:
        yield served


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def basic(text: str | bytes) -> dict[str, str]:
    data = text if isinstance(text, bytes) else text.encode()
    return {"authorization": "Basic " + base64.b64encode(data).decode()}


# Keys


@pytest.mark.parametrize("path", PATHS)
def test_without_a_key_only_health_answers(keyed, path):
    for method in METHODS:
        status, headers, body = keyed.send(method, path)
        if path in OPEN:
            assert status in ((200,) if method in ("GET", "HEAD") else (405,)), (method, body)
            continue
        assert status == 401, (method, body)
        assert headers["www-authenticate"].startswith("Basic ")
        if method != "HEAD":
            assert json.loads(body)["error"]["type"] == "authentication_error"


@pytest.mark.parametrize(
    "headers",
    [
        *[bearer(key) for key in KEYS],
        {"authorization": f"bearer {KEYS[0]}"},
        basic(f"anybody:{KEYS[0]}"),
        basic(f":{KEYS[1]}"),
    ],
)
def test_each_key_is_accepted_as_bearer_and_basic(keyed, headers):
    assert keyed.send("GET", "/v1/models", headers=headers)[0] == 200


@pytest.mark.parametrize(
    "headers",
    [
        bearer(""),
        bearer("sk-of-one-perso"),
        bearer("sk-of-one-person-"),
        bearer("sk-of-one-person, sk-of-another-person"),
        bearer("# ours"),
        bearer("None"),
        {"authorization": KEYS[0]},
        {"authorization": f"Token {KEYS[0]}"},
        {"api-key": KEYS[0]},
        {"x-api-key": KEYS[0]},
        {"cookie": f"key={KEYS[0]}"},
        basic(KEYS[0]),
        basic(f"{KEYS[0]}:"),
        basic(b"\xff\xfe:\xff"),
        {"authorization": "Basic \xff"},
        {"authorization": "Basic ===="},
        {"authorization": "Basic"},
        {"authorization": "Bearer \xe4\xf6\xfc"},
        {"authorization": "Bearer " + "a" * 60_000},
    ],
)
def test_wrong_malformed_or_misplaced_keys_get_401(keyed, headers):
    """Regression: Basic credentials with bytes outside ASCII caused a 500."""
    assert keyed.send("GET", "/v1/models", headers=headers)[0] == 401
    assert keyed.send("GET", f"/v1/models?api_key={KEYS[0]}", headers=headers)[0] == 401


def test_body_is_not_read_without_a_key(keyed):
    connection = keyed.connect(10)
    connection.putrequest("POST", "/v1/chat/completions")
    connection.putheader("content-length", str(MAX_BODY_BYTES))
    connection.endheaders()
    assert connection.getresponse().status == 401
    connection.close()


@pytest.mark.parametrize(
    ("keys", "requests", "n_accounts"),
    [
        # Without keys an account is an address, whatever the client sends or its port is.
        ([], [("10.0.0.1", "a"), ("10.0.0.1", "b")], 1),
        ([], [("10.0.0.1", "a"), ("10.0.0.2", "a")], 2),
        (KEYS, [("10.0.0.1", KEYS[0]), ("10.0.0.2", KEYS[0])], 1),
        (KEYS, [("10.0.0.1", KEYS[0]), ("10.0.0.1", KEYS[1])], 2),
    ],
)
async def test_account_is_the_key_or_without_keys_the_address(keys, requests, n_accounts):
    accounts = set()

    async def app(scope, _receive, _send) -> None:
        accounts.add(scope["state"][access.ACCOUNT])

    for port, (address, key) in enumerate(requests):
        headers = [(b"host", b"localhost"), (b"authorization", f"Bearer {key}".encode())]
        scope = {"type": "http", "path": "/", "headers": headers, "client": (address, port)}
        await access.Access(app, keys, "localhost")(scope, MagicMock(), MagicMock())
    assert len(accounts) == n_accounts


def test_all_keys_are_compared_in_constant_time(monkeypatch):
    """The comparison takes equally long for every key and every common prefix."""
    compared = []

    def compare(given: bytes, kept: bytes) -> bool:
        compared.append((len(given), len(kept)))
        return given == kept

    monkeypatch.setattr(access.hmac, "compare_digest", compare)
    held = access.Access(None, [*KEYS, "sk-of-a-third"], "127.0.0.1")
    for key in (*KEYS, "sk-of-", "x" * 1000, ""):
        compared.clear()
        headers = access.Headers(bearer(key))
        assert held._has_key(headers) == (key in KEYS)
        assert compared == [(32, 32)] * 3  # digests, which do not reveal a key's length


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o660, 0o620, 0o601])
def test_key_file_accessible_to_other_users_is_refused(tmp_path, mode):
    path = tmp_path / "keys"
    path.write_text(KEYS[0])
    path.chmod(mode)
    with pytest.raises(UsageError, match=f"others can read it; run: chmod 600 {path}"):
        read_keys(str(path))
    for own in (0o600, 0o400):
        path.chmod(own)
        assert read_keys(str(path)) == [KEYS[0]]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_readable_key_file_of_another_owner_is_accepted(tmp_path):
    path = tmp_path / "keys"
    path.write_text(KEYS[0])
    path.chmod(0o644)
    os.chown(path, 65534, 65534)
    assert read_keys(str(path)) == [KEYS[0]]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "has 0 keys"),
        ("# none\n\n", "has 0 keys"),
        ("short", "key 1 has 5 characters"),
        ("a" * 513, "key 1 has 513 characters"),
        ("sk-of-one-person\n\x1b[2Jsk-of-one", "key 2"),
        ("sk-\xe4\xf6\xfc\xe4\xf6\xfc", "key 1"),
        ("a" * 10 + "\x00", "key 1"),
        ("sk-of-one-person\n" * 1025, "has 1025 keys"),
    ],
)
def test_invalid_key_file_is_refused_without_quoting_keys(tmp_path, text, says):
    path = tmp_path / "keys"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(UsageError, match=says) as refused:
        read_keys(str(path))
    assert "sk-" not in str(refused.value).replace(str(path), "")


def test_non_loopback_host_without_keys_prints_a_warning(model):
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        done = run_command("serve", f"--model={model}", "--host=0.0.0.0", f"--port={port}")
    assert "--host 0.0.0.0 without --api-key-file: anyone who can reach" in done.stderr
    assert done.returncode == 2


# Web pages


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:80", "localhost.evil.example", "127.0.0.1.evil.example", "",
     "0.0.0.0", "192.168.0.1", "[::2]", "[", "[::1].evil.example", "[::1",
     "localhost:80.evil.example", "localhost@evil.example", "127.1", "0x7f000001"],
)  # fmt: skip
def test_foreign_host_header_is_refused(tiny, host):
    """Otherwise a web page could read replies through DNS rebinding."""
    status, _, body = tiny.send("GET", "/v1/models", headers={"host": host})
    assert status == 403 and b"use localhost" in body


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:1", "localhost.", "127.0.0.1", "127.9.9.9:80", "[::1]:80"]
)
def test_loopback_host_header_is_accepted(tiny, host):
    assert tiny.send("GET", "/v1/models", headers={"host": host})[0] == 200


@pytest.mark.parametrize("hosts", [[], ["localhost", "evil.example"], ["localhost", "localhost"]])
def test_missing_or_repeated_host_header_is_refused(tiny, hosts):
    connection = tiny.connect(10)
    connection.putrequest("GET", "/v1/models", skip_host=True)
    for host in hosts:
        connection.putheader("host", host)
    connection.endheaders()
    response = connection.getresponse()
    assert response.status == 400 and b"Host headers; send one" in response.read()
    connection.close()


@pytest.mark.parametrize(
    ("version", "path", "status"),
    [("1.0", "/health", 200), ("1.0", "/v1/models", 400), ("1.1", "/health", 400)],
)
async def test_http_1_0_health_check_needs_no_host_header(version, path, status):
    """Load balancers send such health checks, for example HAProxy's `option httpchk`."""
    statuses = []

    async def app(_scope, _receive, _send) -> None:
        statuses.append(200)

    async def send(message) -> None:
        statuses.extend(filter(None, [message.get("status")]))

    scope = {"type": "http", "path": path, "headers": [], "client": None, "http_version": version}
    await access.Access(app, (), "localhost")(scope, MagicMock(), send)
    assert statuses == [status]


def test_is_loopback_accepts_only_loopback_hosts():
    assert all(map(is_loopback, ("127.0.0.1", "::1", "localhost", "127.0.0.53")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "", "10.0.0.1", "example.org", "::2")))


@pytest.mark.parametrize("path", PATHS)
def test_other_origins_get_no_cors_headers_by_default(tiny, path):
    """Preflight requests of other origins are refused, too."""
    asks = {
        "origin": "https://evil.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "content-type, authorization",
        "access-control-request-private-network": "true",
    }
    for method in METHODS:
        status, headers, _ = tiny.send(method, path, headers=asks)
        assert not [name for name in headers if name.lower().startswith("access-control")]
        assert method != "OPTIONS" or status in (404, 405)


ORIGIN = "https://chat.example.org"


@pytest.fixture(scope="module")
def with_origins(tmp_path_factory: pytest.TempPathFactory):
    folder = write_chat_folder(tmp_path_factory.mktemp("model"))
    path = folder / "keys"
    path.write_text(KEYS[0])
    path.chmod(0o600)
    given = [f"--allowed-origin={ORIGIN}", "--allowed-origin=http://localhost:3000"]
    with Served(f"--model={folder}", f"--api-key-file={path}", *given) as served:
        yield served


def preflight(served: Served, origin: str, **headers: str) -> tuple[int, dict[str, str]]:
    asks = {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-stainless-lang",
        **headers,
    }
    status, found, _ = served.send("OPTIONS", "/v1/chat/completions", headers=asks)
    return status, {name.lower(): value for name, value in found.items()}


@pytest.mark.parametrize("origin", [ORIGIN, "http://localhost:3000"])
def test_allowed_origin_gets_cors_headers_and_needs_a_key(with_origins, origin):
    """Regression: no option let pages of other origins use the server."""
    status, headers = preflight(with_origins, origin)
    assert status == 200 and headers["access-control-allow-origin"] == origin
    assert "authorization" in headers["access-control-allow-headers"]
    assert "access-control-allow-credentials" not in headers  # no stored passwords
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    for key, expected in ((KEYS[0], 200), ("sk-of-nobody", 401)):
        status, headers, _ = with_origins.send(
            "POST", "/v1/chat/completions", body, {"origin": origin, **bearer(key)}
        )
        assert status == expected and headers["access-control-allow-origin"] == origin
        assert "Origin" in headers["vary"] and "x-request-id" in headers


@pytest.mark.parametrize(
    "origin",
    ["https://evil.example", "http://chat.example.org", f"{ORIGIN}:8443", f"{ORIGIN}.evil.example",
     "https://evil.chat.example.org", "null", "*", "", ORIGIN.upper(), f"{ORIGIN}/",
     "localhost:3000"],
)  # fmt: skip
def test_origin_that_is_not_allowed_gets_no_cors_headers(with_origins, origin):
    status, headers = preflight(with_origins, origin)
    assert status == 400 and "access-control-allow-origin" not in headers
    _, headers, _ = with_origins.send(
        "GET", "/v1/models", headers={"origin": origin, **bearer(KEYS[0])}
    )
    assert "access-control-allow-origin" not in {name.lower() for name in headers}


def test_allowed_origin_does_not_allow_other_methods_or_hosts(with_origins):
    assert preflight(with_origins, ORIGIN, **{"access-control-request-method": "DELETE"})[0] == 400
    headers = {"origin": ORIGIN, "host": "evil.example", **bearer(KEYS[0])}
    assert with_origins.send("GET", "/v1/models", headers=headers)[0] == 403


def test_allowed_origin_star_allows_every_origin_with_a_warning(tmp_path):
    folder = write_chat_folder(tmp_path)
    with Served(f"--model={folder}", "--allowed-origin=*") as served:
        assert "every web page" in served.stderr
        status, headers = preflight(served, "https://evil.example")
        assert status == 200 and headers["access-control-allow-origin"] == "*"
        _, headers, _ = served.send("GET", "/v1/models", headers={"origin": "null"})
        assert headers["access-control-allow-origin"] == "*"


@pytest.mark.parametrize(
    "text",
    ["null", "", "chat.example.org", f"{ORIGIN}/", f"{ORIGIN}:443", "http://a:80", "https://*.a",
     f"{ORIGIN}, https://b", "HTTPS://a", "https://a:b@c", "https://a?b"],
)  # fmt: skip
def test_invalid_allowed_origin_is_refused(text):
    with pytest.raises(ValueError, match="not an origin"):
        origin_of(text)


@pytest.mark.parametrize(
    "path",
    [route.path for route in ROUTES
     if "POST" in (route.methods or ()) and "lora_adapter" not in route.path],
)  # fmt: skip
@pytest.mark.parametrize("kind", [*FORMS, "", None])
def test_post_with_non_json_content_type_is_refused(tiny, path, kind):
    """The routes of adapters, which `tiny` does not have, are in test_served_adapters_http.py."""
    body = json.dumps({"prompt": "a", "messages": [{"role": "user", "content": "a"}]}).encode()
    connection = tiny.connect(10)
    connection.request("POST", path, body, {} if kind is None else {"content-type": kind})
    response = connection.getresponse()
    assert response.status == 415 and b"send application/json" in response.read()
    connection.close()


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON; charset=utf-8"])
def test_json_content_type_is_accepted(tiny, kind):
    status, _, _ = tiny.send("POST", "/tokenize", b'{"prompt":"a"}', {"content-type": kind})
    assert status == 200


# Sizes


def padded(n_bytes: int) -> bytes:
    return b'{"prompt":"a"' + b" " * (n_bytes - 14) + b"}"


def test_body_size_limit_holds_with_content_length_and_chunked(tiny):
    kind = {"content-type": "application/json"}
    assert tiny.send("POST", "/tokenize", padded(MAX_BODY_BYTES), kind)[0] == 200
    status, _, body = tiny.send("POST", "/tokenize", padded(MAX_BODY_BYTES + 1), kind)
    assert status == 413 and b"more than 2097152 bytes" in body

    def chunked(n_bytes: int) -> int:
        connection = tiny.connect(30)
        pieces = (padded(n_bytes)[at : at + 65536] for at in range(0, n_bytes, 65536))
        connection.request("POST", "/tokenize", pieces, kind, encode_chunked=True)
        with connection.getresponse() as response:
            return response.status

    assert chunked(MAX_BODY_BYTES) == 200
    assert chunked(MAX_BODY_BYTES + 1) == 413


def test_too_large_content_length_is_refused_before_the_body(tiny):
    connection = tiny.connect(10)
    connection.putrequest("POST", "/tokenize")
    connection.putheader("content-type", "application/json")
    connection.putheader("content-length", str(MAX_BODY_BYTES + 1))
    connection.endheaders()
    assert connection.getresponse().status == 413
    connection.close()


def test_disconnect_within_a_body_logs_no_error(tiny):
    """Regression: a disconnect within a body was logged with a traceback."""
    before = len(tiny.lines)
    for _ in range(3):
        connection = tiny.connect(10)
        connection.putrequest("POST", "/tokenize")
        connection.putheader("content-type", "application/json")
        connection.putheader("content-length", "100")
        connection.endheaders(b'{"prompt"')
        connection.close()
    deadline = time.monotonic() + 60
    while sum("status=499" in line for line in tiny.lines[before:]) < 3:
        assert time.monotonic() < deadline, tiny.lines[before:]
        time.sleep(0.01)
    assert [line for line in tiny.lines[before:] if " INFO " not in line] == []


# The log

MARK = "no-one-else-may-read-this"


def test_client_text_is_not_written_to_the_log(tiny):
    """Clients cannot write escape sequences to the log or fill it."""
    before = len(tiny.lines)
    text = f"{MARK}\x1b[2J\x1b]0;title\x07\r\nFORGED"
    messages = [{"role": "user", "content": text}]
    for path, fields in [
        ("/v1/chat/completions", {"messages": messages, "max_tokens": 2}),
        ("/v1/chat/completions", {"messages": messages, "max_tokens": 10**6}),
        ("/v1/chat/completions", {"messages": [{"role": text, "content": text, "x": text}]}),
        ("/v1/chat/completions", {"messages": messages, text: 1}),
        ("/v1/chat/completions", {"messages": messages, "model": text[:60]}),
        ("/v1/completions", {"prompt": text, "max_tokens": 2, "user": text, "stop": [text[:60]]}),
        ("/v1/completions", {"prompt": text, "structured_outputs": {"regex": f"({text}"}}),
        ("/v1/completions", {"prompt": text, "structured_outputs": {"grammar": text}}),
        ("/v1/completions", {"prompt": text, "logit_bias": {text: 1}}),
        ("/tokenize", {"prompt": text}),
        ("/nowhere?" + MARK, {}),
    ]:
        assert tiny.send("POST", path, fields)[0] < 500
    for name in ("user-agent", "authorization", "cookie", "host", "referer"):
        tiny.send("GET", f"/v1/models?{MARK}", headers={name: MARK})
    with socket.create_connection((tiny.connect().host, tiny.connect().port), 10) as raw:
        raw.sendall(f"{MARK}\x1b[2J\r\n\r\n".encode())
        assert raw.recv(65536).startswith(b"HTTP/1.1 400 ")
    tiny.send("GET", "/nowhere", headers={"x-request-id": "f" * 32})
    logged(tiny, before, "f" * 32)  # after this line, all lines before it have been read
    usual = re.compile(
        r"\S+ \S+ INFO \S+: ((answered|refused|cancelled) request_id=[0-9a-f]{32}[\w .=/]+"
        r"|ignored a field that has no effect field=user)\n"
    )
    assert [line for line in tiny.lines[before:] if not usual.fullmatch(line)] == []


def logged(served: Served, before: int, text: str) -> str:
    """The one new log line with this text; waits for it."""
    for _ in range(1000):
        if found := [line for line in served.lines[before:] if text in line]:
            (line,) = found
            return line
        time.sleep(0.01)
    raise AssertionError(served.lines[before:])


@pytest.mark.parametrize(
    ("method", "path", "fields", "says"),
    [
        ("POST", "/v1/completions", {"prompt": "a", "top_p": 7}, "code=invalid_value param=top_p"),
        ("POST", "/v1/completions", {"prompt": "a", MARK: 7}, "code=unknown_parameter"),
        (
            "POST", "/v1/completions", {"prompt": "a", "max_tokens": 9999},
            "code=context_length_exceeded param=prompt",
        ),
        ("POST", "/v1/completions", b"{", "code=invalid_json"),
        ("POST", "/v1/completions", {"prompt": "a", "model": MARK}, "code=model_not_found"),
        ("GET", "/nowhere", None, "code=not_found"),
        ("GET", "/v1/completions", None, "code=method_not_allowed"),
    ],
)  # fmt: skip
def test_the_log_says_why_a_request_was_refused(tiny, method, path, fields, says):
    """Regression: for a refused request the log had only the status."""
    before = len(tiny.lines)
    headers = {"content-type": "application/json", "x-request-id": "this-one"}
    tiny.send(method, path, fields, headers)
    line = logged(tiny, before, "this-one")
    assert says in line and MARK not in line


def test_request_of_disconnected_client_is_logged_as_cancelled(tiny):
    before = len(tiny.lines)
    connection = tiny.connect(10)
    body = json.dumps({"prompt": "a", "max_tokens": 400, "ignore_eos": True}).encode()
    headers = {"content-type": "application/json", "x-request-id": "this-one"}
    connection.request("POST", "/v1/completions", body, headers)
    while not tiny.get("/status")["n_running"]:
        pass
    connection.close()
    while tiny.get("/status")["n_running"]:
        pass
    line = logged(tiny, before, "cancelled request_id")
    assert "cancelled request_id=this-one status=499 path=/v1/completions" in line


def test_log_text_cannot_inject_escape_sequences_or_records():
    def record(text: str, error: Exception | None = None) -> str:
        info = (type(error), error, None) if error else None
        made = logging.LogRecord("a", logging.ERROR, "", 0, "%s", (text,), info)
        return _TextFormatter("%(levelname)s %(message)s").format(made)

    assert record("a\x1b[2Jb\x07\r\x9b\u202ec") == r"ERROR a\x1b[2Jb\x07\r\x9b\u202ec"
    assert record("a\nERROR forged").splitlines() == ["ERROR a", "  ERROR forged"]
    told = record("a", ValueError("b\x1b[2J\nERROR forged")).splitlines()
    assert told[0] == "ERROR a" and all(line.startswith("  ") for line in told[1:])
    assert "\x1b" not in "".join(told) and not re.search(r"^ERROR forged", told[-1])


def test_bind_error_advises_another_host_or_another_port():
    """Regression: the error recommended another --port when only another --host could help."""
    with pytest.raises(UsageError, match=r"--host 192\.0\.2\.1 .*; give a --host that is an add"):
        bound_socket("192.0.2.1", 0)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(UsageError, match="; give another --port, or 0 for any free port"):
            bound_socket("127.0.0.1", other.getsockname()[1])
