"""How the server was started, and what it has logged lately: for people without its terminal.

    GET /api/v1/settings         every setting with its value, its default and what it means
    PUT /api/v1/settings/{key}   another value, until the server ends; for those that are live
    GET /api/v1/log              the last lines of the log, the newest first

All need the role admin: they tell paths and addresses.
"""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from dcp.server.admin.answers import (
    AdminError,
    QueryField,
    RouteSpec,
    invalid,
    json_answer,
    number_in,
    read_body,
)
from dcp.server.admin.bodies import LogLine, LogLines, SettingRow, SettingTable, SettingValue
from dcp.server.config.settings import Settings
from dcp.server.config.sources import OPTIONS, LiveSettings, flag_of, shown
from dcp.server.observe.event_log import LINES_KEPT, EventLog
from dcp.session.access.rights import Role

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

PREFIX: Final = "/api/v1"
_LOGIN: Final = re.compile("//[^/@]*@")
"""User and password in the URL of a metadata store."""


def routes(live: LiveSettings, log: EventLog) -> list[RouteSpec]:
    """Return the routes."""

    def row_of(key: str) -> SettingRow:
        value, default = shown(live.now)[key], shown(Settings())[key]
        doc = OPTIONS[key][1].doc
        return SettingRow(key, _LOGIN.sub("//...@", value), default, doc, key in live.keys)

    async def table(_request: Request) -> Response:
        return json_answer(SettingTable([row_of(key) for key in sorted(OPTIONS)]))

    async def change(request: Request) -> Response:
        key = request.path_params["key"]
        wanted = (await read_body(request, SettingValue)).value
        if key not in OPTIONS:
            raise AdminError(
                HTTPStatus.NOT_FOUND,
                f"there is no setting {key[:60]!r}",
                why="its name is not among them",
                try_this="dcpctl config show lists them",
            )
        if key not in live.keys:
            raise AdminError(
                HTTPStatus.CONFLICT,
                f"{key} stays as it is",
                why="it is read when the server starts",
                try_this=f"restart with {flag_of(key)} {wanted[:100]}",
            )
        try:
            live.change(key, wanted)
        except ValueError as error:
            raise invalid(f"{key} {error}") from error
        log.warning("setting changed", key=key, value=wanted)
        return json_answer(row_of(key))

    async def lines(request: Request) -> Response:
        limit = number_in(request.query_params.get("limit", str(LINES_KEPT)), LINES_KEPT)
        if limit is None:
            raise invalid(f'"limit" is a number up to {LINES_KEPT}')
        newest = list(reversed(log.lines))[:limit]
        return json_answer(LogLines([LogLine(*line) for line in newest]))

    return [
        RouteSpec(
            "GET", f"{PREFIX}/settings", table, role=Role.ADMIN, answer=SettingTable,
            summary="List the settings, as they are now.",
        ),
        RouteSpec(
            "PUT", f"{PREFIX}/settings/{{key}}", change, role=Role.ADMIN, body=SettingValue,
            answer=SettingRow,
            summary="Change a setting until the server ends, one with `is_live`.",
        ),
        RouteSpec(
            "GET", f"{PREFIX}/log", lines, role=Role.ADMIN, answer=LogLines,
            summary="Show the last lines of the server's own log, the newest first.",
            query=(QueryField("limit", f"At most so many, up to {LINES_KEPT}.", "integer"),),
        ),
    ]  # fmt: skip
