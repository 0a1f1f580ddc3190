"""The web page at `/`: its files, and their response headers."""

from hashlib import sha256
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

HTML = "text/html; charset=utf-8"
CSS = "text/css; charset=utf-8"
JAVASCRIPT = "text/javascript; charset=utf-8"
SVG = "image/svg+xml"

INDEX = "index.html"
TYPES = {
    INDEX: HTML,
    "page.css": CSS,
    "icon.svg": SVG,
    "page.js": JAVASCRIPT,
    "answering.js": JAVASCRIPT,
    "chats.js": JAVASCRIPT,
    "completion.js": JAVASCRIPT,
    "conversation.js": JAVASCRIPT,
    "conversations.js": JAVASCRIPT,
    "exchange.js": JAVASCRIPT,
    "formulas.js": JAVASCRIPT,
    "highlight.js": JAVASCRIPT,
    "markdown.js": JAVASCRIPT,
    "room.js": JAVASCRIPT,
    "settings.js": JAVASCRIPT,
    "sides.js": JAVASCRIPT,
    "status.js": JAVASCRIPT,
    "stored.js": JAVASCRIPT,
    "template.js": JAVASCRIPT,
    "toast.js": JAVASCRIPT,
    "turns.js": JAVASCRIPT,
    "vendor/highlight.min.js": JAVASCRIPT,
    "vendor/katex.min.js": JAVASCRIPT,
    "vendor/marked.esm.js": JAVASCRIPT,
    "vendor/purify.es.mjs": JAVASCRIPT,
}

# Scripts and styles load from the page's own files only and are never inline; strings become HTML
# only through DOMPurify (`trusted-types`).
SECURITY_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types dompurify"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def page_routes() -> list[Route]:
    """Routes for `/` and `/page/{file}`; the files are read once, by this call.

    Raises: OSError if the installation lacks a file.
    """
    folder = Path(__file__).with_name("page")
    contents = {name: (folder / name).read_bytes() for name in TYPES}

    async def index(request: Request) -> Response:
        return _answer(request, INDEX, contents[INDEX])

    async def file(request: Request) -> Response:
        name = request.path_params["file"]
        if name == INDEX or name not in contents:
            return Response("no such file\n", 404, SECURITY_HEADERS, "text/plain")
        return _answer(request, name, contents[name])

    return [
        Route("/", index, include_in_schema=False),
        Route("/page/{file:path}", file, include_in_schema=False),
    ]


def _answer(request: Request, name: str, content: bytes) -> Response:
    # "no-cache": a browser may cache the file, but must revalidate it for each use.
    tag = f'"{sha256(content).hexdigest()[:32]}"'
    headers = {**SECURITY_HEADERS, "ETag": tag, "Cache-Control": "no-cache"}
    if tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers, media_type=TYPES[name])
