"""The web page at `/`: its files, and their response headers."""

from hashlib import sha256
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

INDEX = "index.html"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
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
    """Routes for `/` and `/page/{file}`; the files are read once, by this call."""
    folder = Path(__file__).with_name("page")
    contents = {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.suffix in TYPES
    }

    async def index(request: Request) -> Response:
        return _file_response(request, INDEX, contents[INDEX])

    async def file(request: Request) -> Response:
        name = request.path_params["file"]
        if name == INDEX or name not in contents:
            return Response("no such file\n", 404, SECURITY_HEADERS, "text/plain")
        return _file_response(request, name, contents[name])

    return [
        Route("/", index, include_in_schema=False),
        Route("/page/{file:path}", file, include_in_schema=False),
    ]


def _file_response(request: Request, name: str, content: bytes) -> Response:
    # "no-cache": a browser may cache the file, but must revalidate it for each use.
    tag = f'"{sha256(content).hexdigest()[:32]}"'
    headers = {**SECURITY_HEADERS, "ETag": tag, "Cache-Control": "no-cache"}
    if tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers, media_type=TYPES[Path(name).suffix])
