"""How the server was started, and what it has logged lately: for people without its terminal.

    GET /api/v1/settings     every setting with its value, its default and what it means
    GET /api/v1/log          the last lines of the log, the newest first

Both need the role admin: they tell paths and addresses.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from dcp.server.admin.answers import QueryField, RouteSpec, invalid, json_answer, number_in
from dcp.server.admin.bodies import LogLine, LogLines, SettingRow, SettingTable
from dcp.server.config.settings import Settings
from dcp.server.config.sources import OPTIONS, shown
from dcp.server.observe.event_log import LINES_KEPT, EventLog
from dcp.session.access.rights import Role

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

PREFIX: Final = "/api/v1"
_LOGIN: Final = re.compile("//[^/@]*@")
"""User and password in the URL of a metadata store."""


def routes(settings: Settings, log: EventLog) -> list[RouteSpec]:
    """Return the routes."""

    async def table(_request: Request) -> Response:
        values, defaults = shown(settings), shown(Settings())
        return json_answer(
            SettingTable(
                [
                    SettingRow(key, _LOGIN.sub("//...@", values[key]), defaults[key], option.doc)
                    for key, (_, option) in sorted(OPTIONS.items())
                ]
            )
        )

    async def lines(request: Request) -> Response:
        limit = number_in(request.query_params.get("limit", str(LINES_KEPT)), LINES_KEPT)
        if limit is None:
            raise invalid(f'"limit" is a number up to {LINES_KEPT}')
        newest = list(reversed(log.lines))[:limit]
        return json_answer(LogLines([LogLine(*line) for line in newest]))

    return [
        RouteSpec(
            "GET", f"{PREFIX}/settings", table, role=Role.ADMIN, answer=SettingTable,
            summary="List the settings that the server was started with.",
        ),
        RouteSpec(
            "GET", f"{PREFIX}/log", lines, role=Role.ADMIN, answer=LogLines,
            summary="Show the last lines of the server's own log, the newest first.",
            query=(QueryField("limit", f"At most so many, up to {LINES_KEPT}.", "integer"),),
        ),
    ]  # fmt: skip
