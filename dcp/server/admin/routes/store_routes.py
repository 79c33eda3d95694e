"""What operators can do to the store as a whole.

POST /api/v1/compact   answers when it is done
GET  /api/v1/scrub     how far the scrubber is, and what it found
POST /api/v1/repair    versions of an archive in place of a damaged block
POST /api/v1/scrub     have it read everything now; answers at once
"""

from __future__ import annotations

from base64 import b64decode
from http import HTTPStatus
from typing import TYPE_CHECKING

from dcp.core.scrub_turns import ScrubStatus
from dcp.server.admin.answers import (
    AdminError,
    RouteSpec,
    invalid,
    json_answer,
    partitions_of,
    read_body,
)
from dcp.server.admin.bodies import CompactRequest, NoMembers, RepairRequest
from dcp.server.config.sources import OPTIONS
from dcp.server.operate.operations import Operations
from dcp.server.storage.compaction_schedule import CompactionError, CompactionReport
from dcp.server.storage.process.scrubbing import Scrubbing
from dcp.server.storage.process.store_queue import FAILURES
from vbucket.log.record import LogDamagedError, split_entries

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response


def routes(operations: Operations, scrubbing: Scrubbing) -> list[RouteSpec]:
    """Return the routes."""

    async def compact(request: Request) -> Response:
        body = await read_body(request, CompactRequest)
        count = partitions_of(request)
        vb_ids = body.vbs or list(range(count))
        if not all(0 <= vb_id < count for vb_id in vb_ids):
            raise invalid(f'"vbs" must be a list of partitions, 0 to {count - 1}')
        history_s = _duration(body.history, "history", "history_window")
        purge_age_s = _duration(body.purge_age, "purge_age", "purge_age")
        try:
            return json_answer(
                await operations.compact(list(dict.fromkeys(vb_ids)), history_s, purge_age_s)
            )
        except CompactionError as error:
            raise AdminError(
                HTTPStatus.SERVICE_UNAVAILABLE,
                "the store could not be compacted",
                why=str(error),
                try_this="try again once the cause is gone; what was done stays done",
            ) from error

    async def scrub_status(_request: Request) -> Response:
        return json_answer(scrubbing.status)

    async def scrub_start(request: Request) -> Response:
        await read_body(request, NoMembers)  # no form of another site
        return json_answer(scrubbing.start())

    return [
        _repair_route(scrubbing),
        RouteSpec(
            "GET", "/api/v1/scrub", scrub_status, answer=ScrubStatus,
            summary="Show how far the scrubber is, and what is damaged.",
        ),
        RouteSpec(
            "POST", "/api/v1/scrub", scrub_start, body=NoMembers, answer=ScrubStatus,
            summary="Have the scrubber read all that is stored now; answer at once.",
        ),
        RouteSpec(
            "POST", "/api/v1/compact", compact, body=CompactRequest, answer=CompactionReport,
            summary="Compact partitions now; answer when it is done.",
        ),
    ]  # fmt: skip


def _repair_route(scrubbing: Scrubbing) -> RouteSpec:
    async def repair(request: Request) -> Response:
        body = await read_body(request, RepairRequest)
        try:
            entries = split_entries(b64decode(body.entries, validate=True))
        except (ValueError, LogDamagedError) as error:
            raise invalid(f'"entries": {error}') from error
        rows = scrubbing.blocks_lacking()
        row = next((row for row in rows if (row.vb, row.key) == (body.vb, body.key)), None)
        if row is None:
            raise AdminError(
                HTTPStatus.NOT_FOUND,
                "there is nothing to repair",
                why="no block of versions is known to be damaged there",
                try_this="see GET /api/v1/scrub",
            )
        try:
            is_mended = await scrubbing.put_versions(row, entries, "an archive")
        except FAILURES as error:
            raise AdminError(
                HTTPStatus.SERVICE_UNAVAILABLE, "it was not repaired", why=str(error),
                try_this="try again once the cause is gone; nothing was changed",
            ) from error  # fmt: skip
        if not is_mended:
            raise AdminError(
                HTTPStatus.CONFLICT,
                "it was not repaired",
                why="these versions are not what was there: the checksums differ, or some lack",
                try_this="use another archive; nothing was changed",
            )
        return json_answer(scrubbing.status)

    return RouteSpec(
        "POST",
        "/api/v1/repair",
        repair,
        body=RepairRequest,
        answer=ScrubStatus,
        summary="Put versions of an archive in place of a damaged block, if the checksums that"
        " are known of it prove that they are what was there.",
    )


def _duration(text: str | None, name: str, setting: str) -> float | None:
    """Return a duration, parsed like the setting of that name."""
    if text is None:
        return None
    option = OPTIONS[setting][1]
    try:
        return float(option.parse(text, option))
    except ValueError as error:
        raise invalid(f'"{name}" {error}') from error
