"""What is known of backups (dcp.server.operate.backup_receipts).

GET  /api/v1/backups    runs and checks, the newest first
POST /api/v1/backups    a run or a check began or ended; `dcpctl backup` sends it
"""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from dcp.server.admin.answers import AdminError, RouteSpec, json_answer, peer_of, read_body
from dcp.server.operate.backup_receipts import (
    BackupReceipt,
    BackupReceipts,
    BackupReport,
    Backups,
)
from dcp.session.access.rights import Role

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

PATH: Final = "/api/v1/backups"


def routes(backups: Backups) -> list[RouteSpec]:
    """Return the routes."""

    async def table(_request: Request) -> Response:
        return json_answer(backups.receipts())

    async def keep(request: Request) -> Response:
        report = await read_body(request, BackupReport)
        try:
            kept = await backups.keep(request.state.user, peer_of(request), report)
        except OSError as error:
            raise AdminError(
                HTTPStatus.SERVICE_UNAVAILABLE,
                "the report was not kept",
                why=f"the data folder cannot be written: {error.strerror}",
                try_this="see the server's disk; the archive itself is not concerned",
            ) from error
        if kept is None:
            raise AdminError(
                HTTPStatus.NOT_FOUND,
                "the check was not kept",
                why="no run of this archive was reported to this server",
                try_this="report it to the server that the archive is of",
            )
        return json_answer(kept)

    return [
        RouteSpec(
            "GET", PATH, table, role=Role.ADMIN, answer=BackupReceipts,
            summary="List the runs of backups and the checks that this node was told of, the"
            " newest first.",
        ),
        RouteSpec(
            "POST", PATH, keep, role=Role.STREAM, body=BackupReport, answer=BackupReceipt,
            summary="Say that a run of a backup, or a check of its archive, began or ended.",
        ),
    ]  # fmt: skip
