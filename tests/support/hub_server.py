"""A Hugging Face hub with one repository on the loopback interface, for huggingface_hub.

It answers model_info and, for each file, the HEAD and GET requests of a download. Large files are
redirected to another host name, `localhost`, as the hub redirects them to its storage.

Source: huggingface_hub 2.4, hf_api.py and file_download.py.
"""

import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef" * 2 + "01234567"
LARGE = (".safetensors", ".bin", ".gguf")


class Hub:
    """The repository, the faults of its server, and the requests that it received.

    Args:
        files: the content of each file, for every commit.
    """

    def __init__(self, repo: str, files: Mapping[str, bytes]) -> None:
        self.repo, self.files = repo, files
        self.url = ""
        self.commits = {"main": COMMIT, "v1.0": "a" * 40, "refs/pr/1": "b" * 40}
        self.requests: list[tuple[str, str, str]] = []  # method, path, Range
        self.tokens: set[str] = set()  # of requests to the hub
        self.storage_tokens: set[str] = set()
        # Refusals of the API and of the files: status, X-Error-Code, X-Error-Message.
        self.refused: tuple[int, str, str] | None = None
        self.files_refused: tuple[int, str, str] | None = None
        self.broken: dict[str, int] = {}  # the status of a file's GET requests
        self.cut: dict[str, int] = {}  # bytes of a file after which the connection ends, once
        self.on_info: Callable[[], None] = lambda: None  # after model_info was answered

    def fetched(self) -> list[str]:
        """The sorted names of files whose content was requested, once for each request."""
        paths = [path for method, path, _ in self.requests if method == "GET"]
        names = {f"/storage/{digest(data)}": name for name, data in self.files.items()}
        own = [names.get(path, path.partition("/resolve/")[2].partition("/")[2]) for path in paths]
        return sorted(filter(None, own))

    def answer(self, request: "_Handler") -> None:
        path = unquote(urlsplit(request.path).path)
        self.requests.append((request.command, path, request.headers.get("Range", "")))
        api, large = f"/api/models/{self.repo}/revision/", "/storage/"
        tokens = self.storage_tokens if path.startswith(large) else self.tokens
        tokens.add(request.headers.get("Authorization", ""))
        if path.startswith(api):
            self._answer_info(request, path.removeprefix(api))
        elif path.startswith(f"/{self.repo}/resolve/"):
            commit, _, name = path.removeprefix(f"/{self.repo}/resolve/").partition("/")
            self._answer_file(request, commit, name)
        elif path.startswith(large):
            name = next(n for n, data in self.files.items() if digest(data) == path[len(large) :])
            request.content(self, name, {"Content-Disposition": f'inline; filename="{name}";'})
        else:
            request.refuse(404, "RepoNotFound", "Repository not found")

    def _answer_info(self, request: "_Handler", revision: str) -> None:
        known = {**self.commits, **{commit: commit for commit in self.commits.values()}}
        if self.refused is not None:
            request.refuse(*self.refused)
        elif revision not in known:
            request.refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        else:
            files = [_sibling(name, data) for name, data in self.files.items()]
            body = {"id": self.repo, "sha": known[revision], "siblings": files}
            request.send(200, {"Content-Type": "application/json"}, json.dumps(body).encode())
            self.on_info()

    def _answer_file(self, request: "_Handler", commit: str, name: str) -> None:
        headers = {"X-Repo-Commit": commit, "ETag": f'"{digest(self.files.get(name, b""))}"'}
        if self.files_refused is not None:
            request.refuse(*self.files_refused)
        elif name not in self.files or commit not in self.commits.values():
            request.refuse(404, "EntryNotFound", "Entry not found")
        elif name.endswith(LARGE):
            linked = {"X-Linked-ETag": headers["ETag"], "X-Linked-Size": len(self.files[name])}
            storage = self.url.replace("127.0.0.1", "localhost")
            where = f"{storage}/storage/{digest(self.files[name])}"
            request.send(302, {**headers, **linked, "Location": where}, b"")
        else:
            request.content(self, name, headers)


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _sibling(name: str, data: bytes) -> dict[str, object]:
    """A file in the reply to model_info; as on the hub, large files are in Git LFS."""
    file = {"rfilename": name, "size": len(data), "blobId": digest(data)}
    if not name.endswith(LARGE):
        return file
    lfs = {"sha256": digest(data), "size": len(data), "pointerSize": 130}
    return {**file, "blobId": "0" * 40, "lfs": lfs}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_GET(self) -> None:
        self.hub.answer(self)

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        pass

    def refuse(self, status: int, code: str, message: str) -> None:
        headers = {"X-Error-Code": code, "X-Error-Message": message}
        self.send(status, {name: text for name, text in headers.items() if text}, b"{}")

    def content(self, hub: Hub, name: str, headers: Mapping[str, object]) -> None:
        data, status, asked = hub.files[name], 200, self.headers.get("Range")
        if self.command == "GET" and name in hub.broken:
            self.refuse(hub.broken[name], "", "broken")
            return
        if asked is not None:
            start = int(asked.removeprefix("bytes=").removesuffix("-"))
            headers = {**headers, "Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"}
            data, status = data[start:], 206
        n_bytes = hub.cut.pop(name, len(data)) if self.command == "GET" else len(data)
        self.send(status, headers, data, n_bytes)
        if n_bytes < len(data):
            self.close_connection = True

    def send(
        self, status: int, headers: Mapping[str, object], data: bytes, most: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": len(data)}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data[:most])


@contextmanager
def hub_server(repo: str, files: Mapping[str, bytes]) -> Iterator[Hub]:
    """A hub on a free port, in another thread."""
    hub = Hub(repo, files)
    handler = type("Handler", (_Handler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
