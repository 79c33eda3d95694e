"""What needs the setting test_mode: faults, if other machines can reach the server.

A fault rule makes the server answer wrongly on purpose. On loopback that is for the tests of the
machine's own user. Elsewhere somebody has to say that this server is for tests.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING

from dcp.server.admin.answers import AdminError, RouteSpec

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response


def guarded(routes: list[RouteSpec], *, is_allowed: bool) -> list[RouteSpec]:
    """Return routes of which those that change something refuse, unless that is allowed."""
    if is_allowed:
        return routes
    return [route if route.method == "GET" else route._replace(handler=_refuse) for route in routes]


async def _refuse(_request: Request) -> Response:
    raise AdminError(
        HTTPStatus.FORBIDDEN,
        "this server takes no faults",
        why="other machines can reach it, and it is not in test mode",
        try_this="start it with --test-mode, or on loopback",
    )
