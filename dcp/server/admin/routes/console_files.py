"""The files of the web console, at / and /console/. They need no login, because they hold no data.

Every file has headers that allow its own scripts and styles only, no frames and no other sites. So
a value that is shown can never become a script, whatever it contains.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import sha256
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from dcp.server.admin.answers import AdminError, RouteSpec

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

FOLDER: Final = Path(__file__).parents[1] / "console"
INDEX: Final = "index.html"
TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    )
)
HEADERS: Final = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    # The browser asks each time, and gets 304 unless the server was upgraded.
    "cache-control": "no-cache",
}


class ConsoleFile(NamedTuple):
    """A file as it is served."""

    body: bytes
    media_type: str
    etag: str


@lru_cache(maxsize=1)
def console_files() -> dict[str, ConsoleFile]:
    """Return all files by name. They are read at the first request, and kept: some 150 KB."""
    found: dict[str, ConsoleFile] = {}
    for path in sorted(FOLDER.iterdir()):
        media_type = TYPES.get(path.suffix)
        if media_type is not None:
            body = path.read_bytes()
            found[path.name] = ConsoleFile(body, media_type, f'"{sha256(body).hexdigest()[:20]}"')
    return found


def routes() -> list[RouteSpec]:
    """Return the routes."""
    return [
        RouteSpec("GET", "/", _index, needs_login=False, is_described=False),
        RouteSpec("GET", "/console/{name}", _file, needs_login=False, is_described=False),
    ]


async def _index(request: Request) -> Response:
    return _answer(request, INDEX)


async def _file(request: Request) -> Response:
    return _answer(request, request.path_params["name"])


def _answer(request: Request, name: str) -> Response:
    from starlette.responses import Response

    found = console_files().get(name)
    if found is None:
        raise AdminError(
            HTTPStatus.NOT_FOUND,
            "there is no such file",
            why="the console has no file of that name",
            try_this="open / in a browser",
        )
    headers = HEADERS | {"etag": found.etag}
    if request.headers.get("if-none-match") == found.etag:
        return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
    return Response(found.body, media_type=found.media_type, headers=headers)
