"""Who may ask: API keys, and the names under which a server on loopback is called."""

import base64
import hashlib
import hmac
import ipaddress
import re
from collections.abc import Sequence
from contextlib import suppress

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from parallel_llama.errors import UsageError
from parallel_llama.files.bounded_files import expanded, read_private
from parallel_llama.serve.asgi import HEADER
from parallel_llama.serve.errors import Refused, error_response

OPEN = frozenset(("/health", "/health/live", "/health/ready"))
# In the state of a request's scope: what gives its connection a place, if one is free.
ADMIT = "parallel_llama.admit"
TOO_MANY = "too many connections are open; try again later"
MIN_KEY_CHARS, MAX_KEY_CHARS = 8, 512
MAX_KEYS = 1024

_HOST = re.compile(r"(?:\[([^\[\]]*)\]|([^:\[\]]*))(?::[0-9]*)?")


def read_keys(path: str) -> list[str]:
    """The keys of a file, one a line; empty lines and those that begin with # are none.

    Raises: UsageError for a file that has none, a key that is too short to be one, and a file that
    others can read: as in ssh, where it is one's own.
    """
    data = read_private(expanded(path), MAX_KEYS * MAX_KEY_CHARS)
    text = data.decode("utf-8", "replace")
    lines = [line.strip() for line in text.splitlines()]
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys or len(keys) > MAX_KEYS:
        raise UsageError(f"{path} has {len(keys)} keys; give 1 to {MAX_KEYS}, one a line")
    for number, key in enumerate(keys, 1):
        if not (key.isascii() and key.isprintable() and MIN_KEY_CHARS <= len(key) <= MAX_KEY_CHARS):
            raise UsageError(
                f"{path}: key {number} has {len(key)} characters; use {MIN_KEY_CHARS} to "
                f"{MAX_KEY_CHARS} letters, digits and signs"
            )
    return keys


def allowing_origins(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """The application, for web pages of these origins too, or of any origin with "*".

    Pages send a key themselves: a browser adds neither cookies nor a password that it was given.
    Preflights carry no key and are answered without one. The check of the Host header stays.
    """
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=("GET", "POST"),
        allow_headers=("*",),
        expose_headers=(HEADER, "retry-after"),
    )


class Access:
    """Lets a request through to the application, or turns it away.

    With keys every path but those in OPEN wants one: as a bearer token, as OpenAI's clients send
    it, or as the password of a browser's own dialogue. A server that listens on loopback answers
    to no other host's name: a web page could otherwise have its own name point here. A request that
    is let through gives its connection a place, and is refused where none is free.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str], host: str) -> None:
        self._app = app
        self._digests = [_digest(key) for key in keys]
        self._is_local = is_loopback(host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        admit = scope.get("state", {}).get(ADMIT)
        try:
            self._check(scope["path"], Headers(scope=scope))
            if admit is not None and scope["path"] not in OPEN and not admit():
                raise Refused(503, TOO_MANY)
        except Refused as refused:
            response = error_response(refused)
            if refused.status == 401:
                response.headers["www-authenticate"] = 'Basic realm="parallel_llama"'
            if refused.status == 503:
                response.headers["connection"] = "close"
            await response(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _check(self, path: str, headers: Headers) -> None:
        """Raises: Refused."""
        hosts = headers.getlist("host")
        if len(hosts) != 1:
            raise Refused(400, f"there are {len(hosts)} Host headers; send one")
        if self._is_local and not is_loopback(_name_of(hosts[0])):
            raise Refused(403, f"the host {hosts[0]!r:.200} is not this server; use localhost")
        if self._digests and path not in OPEN and not self._has_key(headers):
            raise Refused(401, "no valid API key; send one as Authorization: Bearer KEY")

    def _has_key(self, headers: Headers) -> bool:
        given = _digest(_key_of(headers.get("authorization", "")))
        # All are compared, so that the time tells nothing of any.
        return sum(hmac.compare_digest(given, digest) for digest in self._digests) > 0


def _key_of(header: str) -> str:
    scheme, _, value = header.partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    if scheme.lower() == "basic":
        with suppress(ValueError):  # no base64, or no text
            return base64.b64decode(value.strip(), validate=True).decode().partition(":")[2]
    return ""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _name_of(host: str) -> str:
    """A Host header without its port; empty where no port, but other text follows the name."""
    match = _HOST.fullmatch(host)
    return "" if match is None else match[1] or match[2]


def is_loopback(host: str) -> bool:
    """Whether an address, or the name for it, is this machine's own and no other's."""
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
