"""Who may ask: API keys, and the names under which a server on loopback is called."""

import base64
import binascii
import hashlib
import hmac
import ipaddress
from collections.abc import Sequence
from contextlib import suppress

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from parallel_llama.errors import UsageError
from parallel_llama.files.bounded_files import expanded, read_bytes
from parallel_llama.serve.errors import Refused, error_response

OPEN = frozenset(("/health", "/health/live", "/health/ready"))
MIN_KEY_CHARS, MAX_KEY_CHARS = 8, 512
MAX_KEYS = 1024


def read_keys(path: str) -> list[str]:
    """The keys of a file, one a line; empty lines and those that begin with # are none.

    Raises: UsageError for a file that has none, or a key that is too short to be one.
    """
    text = read_bytes(expanded(path), MAX_KEYS * MAX_KEY_CHARS).decode("utf-8", "replace")
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


class Access:
    """Lets a request through to the application, or turns it away.

    With keys every path but those in OPEN wants one: as a bearer token, as OpenAI's clients send
    it, or as the password of a browser's own dialogue. A server that listens on loopback answers
    to no other host's name: a web page could otherwise have its own name point here.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str], host: str) -> None:
        self._app = app
        self._digests = [_digest(key) for key in keys]
        self._is_local = _is_loopback(host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            try:
                self._check(scope["path"], headers)
            except Refused as refused:
                response = error_response(refused)
                if refused.status == 401:
                    response.headers["www-authenticate"] = 'Basic realm="parallel_llama"'
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, path: str, headers: Headers) -> None:
        """Raises: Refused."""
        host = headers.get("host", "")
        if self._is_local and not _is_loopback(_name_of(host)):
            raise Refused(403, f"the host {host!r:.200} is not this server; use localhost")
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
        with suppress(binascii.Error, UnicodeDecodeError):
            return base64.b64decode(value.strip(), validate=True).decode().partition(":")[2]
    return ""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _name_of(host: str) -> str:
    """A host header without its port."""
    if host.startswith("["):
        return host.partition("]")[0].lstrip("[")
    return host.partition(":")[0]


def _is_loopback(host: str) -> bool:
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
