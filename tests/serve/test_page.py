"""The page's files, as they are served and shipped."""

import configparser
import hashlib
import http.client
import json
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from urllib.parse import urljoin, urlsplit

import pytest
from stand_in_server import StandIn, stand_in_server

from parallel_llama.serve import page_files

ROOT = Path(__file__).parents[2]
PAGE = Path(page_files.__file__).with_name("page")
VENDOR = PAGE / "vendor"
OWN = sorted(path for path in PAGE.iterdir() if path.is_file())

# Patterns of the references that load a file.
REFERENCES = {
    "html": re.compile(r'\s(?:src|href)="([^"#][^"]*)"'),
    "css": re.compile(r"""(?:url\(\s*|@import\s+)["']?([^)"']+)"""),
    "js": re.compile(r'(?:^(?:import|export)\b[^;]*?from\s*|\bimport\()"([^"]+)"', re.MULTILINE),
}


@pytest.fixture(scope="module")
def server() -> Iterator[StandIn]:
    with stand_in_server() as running:
        yield running


def get(
    server: StandIn, path: str, headers: dict[str, str] | None = None
) -> tuple[int, http.client.HTTPMessage, bytes]:
    """Requests the path exactly as given, which urllib would normalise."""
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=120)
    try:
        connection.request("GET", path, headers=headers or {})
        response = connection.getresponse()
        return response.status, response.headers, response.read()
    finally:
        connection.close()


def references(path: str, text: str) -> set[str]:
    kind = "html" if path == "/" else path.rpartition(".")[2]
    return set(REFERENCES[kind].findall(text)) if kind in REFERENCES else set()


def test_page_loads_exactly_the_files_that_are_served(server):
    found: set[str] = set()
    left = {"/"}
    while left:
        path = left.pop()
        found.add(path)
        status, headers, body = get(server, path)
        assert status == 200, path
        if "vendor/" not in path:
            left |= {urljoin(path, name) for name in references(path, body.decode())} - found
        name = path.removeprefix("/page/") if path != "/" else "index.html"
        assert headers["Content-Type"] == page_files.TYPES[Path(name).suffix]
    files = [path for path in PAGE.rglob("*") if path.suffix in page_files.TYPES]
    served = {f"/page/{path.relative_to(PAGE).as_posix()}" for path in files}
    assert found == served - {"/page/index.html"} | {"/"}


def test_references_are_found_in_html_css_and_js():
    assert references("/", '<a href="a.css"> <img src="b"> <a href="#c">') == {"a.css", "b"}
    assert references("/page/a.css", "@import 'b.css'; a { background: url(c.png) }") == {
        "b.css",
        "c.png",
    }
    assert references("/page/a.js", 'import { x,\n y } from "./b.js";\n') == {"./b.js"}
    assert references("/page/a.js", 'later = import("./b.js");\n') == {"./b.js"}


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.name)
def test_the_page_names_no_other_origin(path):
    text = path.read_text().replace("http://www.w3.org/2000/svg", "")
    assert not re.findall(r"""https?://\S+|["'(]//\S+""", text)


def test_html_has_no_inline_script_or_style():
    html = (PAGE / "index.html").read_text()
    assert not re.findall(r"<style|<script(?![^>]*\ssrc=)|\sstyle=|\son\w+=|javascript:", html)


@pytest.mark.parametrize("path", ["/", "/page/page.js", "/page/none"])
def test_every_answer_has_the_security_headers(server, path):
    _, headers, _ = get(server, path)
    policy = headers["Content-Security-Policy"]
    assert "default-src 'self'" in policy and "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy and "*" not in policy
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "no-referrer"


@pytest.mark.parametrize("path", ["/", "/page/vendor/marked.esm.js"])
def test_matching_etag_gets_304_without_a_body(server, path):
    _, headers, body = get(server, path)
    assert body and headers["Cache-Control"] == "no-cache"
    status, _, body = get(server, path, {"If-None-Match": f'"other", W/{headers["ETag"]}'})
    assert (status, body) == (304, b"")
    assert get(server, path, {"If-None-Match": '"other"'})[0] == 200


@pytest.mark.parametrize(
    "path",
    ["/page/", "/page/index.html", "/page/../page_files.py", "/page/%2e%2e/page_files.py",
     "/page//etc/passwd", "/page/vendor/sources.json", "/page/vendor"],
)  # fmt: skip
def test_unlisted_paths_get_404(server, path):
    assert get(server, path)[0] == 404


def test_vendored_files_match_their_recorded_hashes():
    sources = json.loads((VENDOR / "sources.json").read_text())
    licences = {source["licence_file"] for source in sources.values()}
    assert {path.name for path in VENDOR.iterdir()} == {*sources, *licences, "sources.json"}
    for name, source in sources.items():
        content = (VENDOR / name).read_bytes()
        assert hashlib.sha256(content).hexdigest() == source["sha256"], name
        assert source["version"].encode() in content, name
    assert all("Licen" in (VENDOR / name).read_text() for name in licences)


def test_the_package_ships_every_file_of_the_page():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    patterns = setup["options.package_data"]["parallel_llama"].split()
    files = [path for path in PAGE.rglob("*") if path.is_file()]
    names = [path.relative_to(ROOT / "parallel_llama").as_posix() for path in files]
    # setuptools' patterns do not go into folders.
    shipped = {
        name
        for name in names
        for pattern in patterns
        if fnmatch(name, pattern) and name.count("/") == pattern.count("/")
    }
    assert shipped == set(names)
