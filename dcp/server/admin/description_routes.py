"""The description of the HTTP API, as a document for programs.

GET /api/v1/openapi.json     OpenAPI 3.1 (dcp.server.admin.openapi)
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import msgspec

from dcp import __version__
from dcp.server.admin.answers import RouteSpec, raw_answer
from dcp.server.admin.openapi import OPENAPI_PATH, openapi_document

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response


def routes(described: list[RouteSpec]) -> list[RouteSpec]:
    """Return the route. It describes these routes, and itself."""

    @cache  # it takes 10 ms to make
    def document() -> bytes:
        return msgspec.json.encode(openapi_document([*described, own], __version__))

    async def show(_request: Request) -> Response:
        return raw_answer(document())

    own = RouteSpec(
        "GET", OPENAPI_PATH, show, answer=dict[str, Any],
        summary="The description of this API, as OpenAPI 3.1.",
    )  # fmt: skip
    return [own]
