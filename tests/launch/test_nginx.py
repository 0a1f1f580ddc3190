"""launch/nginx.conf: its structure, and its limits beside those of the server."""

import inspect
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from launch_files import LAUNCH

from parallel_llama.serve import bodies, protocol, server
from parallel_llama.serve.access import is_loopback
from parallel_llama.serve.app import OPERATIONS

TEXT = (LAUNCH / "nginx.conf").read_text()
UNITS = {"s": 1, "h": 3600, "m": 1 << 20, "k": 1 << 10}
_TOKEN = re.compile(r"""\s+|\#[^\n]*|([{};]|"(?:[^"\\]|\\.)*"|[^\s{};"]+)""")
Directives = list[tuple[list[str], Any]]


def tokens(text: str) -> Iterator[tuple[int, str]]:
    """The words, braces and semicolons, each with its line."""
    end = 0
    while end < len(text):
        token = _TOKEN.match(text, end)
        assert token, f"unexpected {text[end : end + 20]!r}"
        if token[1]:
            yield text.count("\n", 0, end), token[1]
        end = token.end()


def block(words: Iterator[tuple[int, str]], *, is_nested: bool = False) -> Directives:
    """The directives up to a closing brace, each with its block or None.

    A directive is on one line, so that a missing semicolon is noticed.
    """
    found: Directives = []
    own: list[str] = []
    first = 0
    for line, word in words:
        if word == "}":
            assert is_nested and not own, f"line {line}: unexpected }}"
            return found
        first = first if own else line
        assert line == first, f"line {first} has no ;"
        if word in "{;":
            assert own, f"line {line}: unexpected {word}"
            found.append((own, block(words, is_nested=True) if word == "{" else None))
            own = []
        else:
            own.append(word)
    assert not is_nested and not own, "the file ends inside a block"
    return found


MAIN = block(tokens(TEXT))


def inside(directives: Directives, *name: str) -> Any:
    (found,) = (each for words, each in directives if words == list(name))
    return found


def value(directives: Directives, name: str) -> list[str]:
    (found,) = (words[1:] for words, _ in directives if words[0] == name)
    return found


def amount(directives: Directives, name: str) -> int:
    """Seconds of a time, or bytes of a size."""
    (text,) = value(directives, name)
    return int(text[:-1]) * UNITS[text[-1]]


UPSTREAM = inside(MAIN, "upstream", "parallel_llama")
FRONT = inside(MAIN, "server")
PLACE = inside(FRONT, "location", "/")


def test_the_limits_are_those_of_the_server():
    assert amount(FRONT, "client_max_body_size") == bodies.MAX_BODY_BYTES
    assert amount(FRONT, "client_header_timeout") == protocol.HEAD_LIMIT_S
    assert amount(FRONT, "client_body_timeout") == protocol.BODY_LIMIT_S
    assert amount(PLACE, "proxy_send_timeout") == protocol.BODY_LIMIT_S
    assert amount(FRONT, "send_timeout") == server.READ_LIMIT_S
    kept = inspect.signature(uvicorn.Config).parameters["timeout_keep_alive"].default
    assert "timeout_keep_alive" not in inspect.getsource(server)
    assert amount(UPSTREAM, "keepalive_timeout") < kept
    assert amount(PLACE, "proxy_read_timeout") >= 600


def test_streams_are_not_buffered_and_host_header_is_accepted():
    assert value(PLACE, "proxy_buffering") == ["off"]
    assert value(PLACE, "proxy_http_version") == ["1.1"]
    assert value(PLACE, "proxy_pass") == ["http://parallel_llama"]
    headers = dict(words[1:] for words, _ in PLACE if words[0] == "proxy_set_header")
    assert headers["Connection"] == '""' and is_loopback(headers["Host"])
    (hidden,) = (words[2] for words, _ in FRONT if words[:2] == ["location", "="])
    assert hidden in {each.path for each in OPERATIONS}


def test_a_conversation_stays_at_one_server():
    (key, method) = value(UPSTREAM, "hash")
    assert method == "consistent"
    maps = {words[2]: (words[1], dict(line for line, _ in inner))
            for words, inner in MAIN if words[0] == "map"}  # fmt: skip
    chain = []
    while key in maps:
        source, cases = maps[key]
        assert cases["default"] == source
        chain.append(source)
        key = cases['""']
    assert chain == ["$http_x_conversation_id", "$http_authorization"] and key == "$remote_addr"


@pytest.mark.parametrize(
    ("old", "new"), [(";", ""), ("{", ""), ("}", ""), ("}", "}}"), (";", ";;"), ('""', '"')]
)
def test_parser_rejects_missing_or_extra_punctuation(old, new):
    for each in re.finditer(re.escape(old), re.sub("#.*", lambda part: " " * len(part[0]), TEXT)):
        with pytest.raises(AssertionError):
            block(tokens(TEXT[: each.start()] + new + TEXT[each.end() :]))


@pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed")
def test_nginx_accepts_the_file(tmp_path: Path):
    """TLS is left out, since there is no certificate here."""
    own = re.sub(r"listen 443 ssl;|ssl_certificate.*;", "", TEXT)
    kinds = "client_body", "proxy", "fastcgi", "uwsgi", "scgi"  # so that any user can run nginx
    paths = "".join(f"{kind}_temp_path {tmp_path}/{kind};\n" for kind in kinds)
    http = f"http {{\naccess_log off;\n{paths}{own}}}\n"
    (tmp_path / "nginx.conf").write_text(
        f"pid {tmp_path}/pid;\nerror_log stderr;\nevents {{}}\n{http}"
    )
    command = ["nginx", "-t", "-c", str(tmp_path / "nginx.conf")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
