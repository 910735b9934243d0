"""The server's page: static files of the package, read at the start.

The files hold no data, so they need no token; the page sends one with its requests. The headers let
a browser load nothing from other origins, run no script but these files, and turn no text into
HTML.
"""

from collections.abc import Iterator
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_FOLDER = "page_files"
_INDEX = "index.html"
_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
}
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}
"""Headers of every answer of these routes."""


def page_routes() -> list[Route]:
    """`/` and `/page` redirect to `/page/`; below it are the files of the package, and nothing
    else.
    """
    redirects = [Route("/", _redirect("page/")), Route("/page", _redirect("page/"))]
    return redirects + [Route(path, _answer(*file)) for path, file in _files()]


def _files() -> Iterator[tuple[str, tuple[bytes, str]]]:
    """Path, content and content type of each file."""
    for file in files("serving.http").joinpath(_FOLDER).iterdir():
        name = file.name
        kind = _TYPES[name.rpartition(".")[2]]
        yield f"/page/{'' if name == _INDEX else name}", (file.read_bytes(), kind)


def _redirect(location: str):
    # Relative, so that it also holds behind a proxy that puts the server below a path of its own.
    async def redirect(request: Request) -> Response:
        return Response(status_code=307, headers=HEADERS | {"location": location})

    return redirect


def _answer(content: bytes, kind: str):
    async def answer(request: Request) -> Response:
        return Response(content, headers=HEADERS | {"content-type": kind})

    return answer
