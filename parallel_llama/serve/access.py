"""Access control: API keys, and the Host header of a server on loopback."""

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
from parallel_llama.serve.asgi import REQUEST_ID_HEADER
from parallel_llama.serve.errors import HTTPError, error_response

OPEN = frozenset(("/health", "/health/live", "/health/ready"))
# Key of the scope's state: a function that admits the connection if a slot is free.
ADMIT = "parallel_llama.admit"
# Key of the scope's state: the account that is charged for the request's completions.
ACCOUNT = "parallel_llama.account"
TOO_MANY_CONNECTIONS = "too many connections are open; try again later"
MIN_KEY_CHARS, MAX_KEY_CHARS = 8, 512
MAX_KEYS = 1024

_HOST = re.compile(r"(?:\[([^\[\]]*)\]|([^:\[\]]*))(?::[0-9]*)?")


def read_keys(path: str) -> list[str]:
    """Reads the keys of a file, one per line; empty lines and lines that begin with # are skipped.

    Raises: UsageError for a file without keys, for a key of a wrong length, and for a file of this
    user that other users can read (the rule of ssh).
    """
    data = read_private(expanded(path), MAX_KEYS * MAX_KEY_CHARS)
    text = data.decode("utf-8", "replace")
    lines = [line.strip() for line in text.splitlines()]
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys or len(keys) > MAX_KEYS:
        raise UsageError(f"{path} has {len(keys)} keys; give 1 to {MAX_KEYS}, one per line")
    for number, key in enumerate(keys, 1):
        if not (key.isascii() and key.isprintable() and MIN_KEY_CHARS <= len(key) <= MAX_KEY_CHARS):
            raise UsageError(
                f"{path}: key {number} has {len(key)} characters; use {MIN_KEY_CHARS} to "
                f"{MAX_KEY_CHARS} printable ASCII characters"
            )
    return keys


def allowing_origins(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """The application, with CORS headers for these origins, or for any origin with "*".

    Credentials are not allowed: pages of other origins must send a key themselves. Preflight
    requests need no key, and their Host header is not checked.
    """
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=("GET", "POST"),
        allow_headers=("*",),
        expose_headers=(REQUEST_ID_HEADER, "retry-after"),
    )


class Access:
    """Passes authorised requests to the application and refuses all other requests.

    If there are keys, every path except those in OPEN requires a key: as a bearer token, or as the
    password of HTTP basic authentication, for browsers. A server on loopback refuses Host headers
    that name another host, to prevent DNS rebinding. An authorised request takes a slot for its
    connection (see `BoundedProtocol`), and is refused if all slots are taken. The account of a
    request is its key, or the client's address if there are no keys.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str], host: str) -> None:
        self._app = app
        self._digests = [_digest(key) for key in keys]
        self._is_local = is_loopback(host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope.setdefault("state", {})
        admit = state.get(ADMIT)
        headers = Headers(scope=scope)
        try:
            self._check(scope, headers)
            if admit is not None and scope["path"] not in OPEN and not admit():
                raise HTTPError(503, TOO_MANY_CONNECTIONS)
        except HTTPError as error:
            response = error_response(error)
            if error.status == 401:
                response.headers["www-authenticate"] = 'Basic realm="parallel_llama"'
            if error.status == 503:
                response.headers["connection"] = "close"
            await response(scope, receive, send)
        else:
            state[ACCOUNT] = self._account(scope, headers)
            await self._app(scope, receive, send)

    def _account(self, scope: Scope, headers: Headers) -> str:
        if self._digests:
            return _digest(_key_of(headers.get("authorization", ""))).hex()
        address, _port = scope.get("client") or ("", 0)
        return str(address)

    def _check(self, scope: Scope, headers: Headers) -> None:
        """Raises: HTTPError."""
        path, hosts = scope["path"], headers.getlist("host")
        if not hosts and path in OPEN and scope["http_version"] == "1.0":
            return  # a health check of a load balancer; browsers always send a Host header
        if len(hosts) != 1:
            raise HTTPError(400, f"there are {len(hosts)} Host headers; send one")
        if self._is_local and not is_loopback(_name_of(hosts[0])):
            raise HTTPError(403, f"{hosts[0]!r:.200} is not a name of this server; use localhost")
        if self._digests and path not in OPEN and not self._has_key(headers):
            raise HTTPError(401, "no valid API key; send one as Authorization: Bearer KEY")

    def _has_key(self, headers: Headers) -> bool:
        client_digest = _digest(_key_of(headers.get("authorization", "")))
        # All keys are compared, so that the time does not depend on which one matches.
        return sum(hmac.compare_digest(client_digest, digest) for digest in self._digests) > 0


def _key_of(header: str) -> str:
    scheme, _, value = header.partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    if scheme.lower() == "basic":
        with suppress(ValueError):  # not base64, or not UTF-8
            return base64.b64decode(value.strip(), validate=True).decode().partition(":")[2]
    return ""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _name_of(host: str) -> str:
    """A Host header without its port; empty if it is malformed."""
    match = _HOST.fullmatch(host)
    return "" if match is None else match[1] or match[2]


def is_loopback(host: str) -> bool:
    """Whether a host is localhost or a loopback address."""
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
