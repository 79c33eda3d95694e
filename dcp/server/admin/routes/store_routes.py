"""What operators can do to the store as a whole.

POST /api/v1/compact   answers when it is done
GET  /api/v1/scrub     how far the scrubber is, and what it found
POST /api/v1/scrub     have it read everything now; answers at once
"""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING

from dcp.server.admin.answers import (
    AdminError,
    RouteSpec,
    invalid,
    json_answer,
    partitions_of,
    read_body,
)
from dcp.server.admin.bodies import CompactRequest
from dcp.server.config.sources import OPTIONS
from dcp.server.operate.operations import Operations
from dcp.server.storage.compaction_schedule import CompactionError, CompactionReport
from dcp.server.storage.process.scrubbing import Scrubbing, ScrubStatus

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

    async def scrub_start(_request: Request) -> Response:
        return json_answer(scrubbing.start())

    return [
        RouteSpec(
            "GET", "/api/v1/scrub", scrub_status, answer=ScrubStatus,
            summary="Show how far the scrubber is, and what is damaged.",
        ),
        RouteSpec(
            "POST", "/api/v1/scrub", scrub_start, answer=ScrubStatus,
            summary="Have the scrubber read all that is stored now; answer at once.",
        ),
        RouteSpec(
            "POST", "/api/v1/compact", compact, body=CompactRequest, answer=CompactionReport,
            summary="Compact partitions now; answer when it is done.",
        ),
    ]  # fmt: skip


def _duration(text: str | None, name: str, setting: str) -> float | None:
    """Return a duration, parsed like the setting of that name."""
    if text is None:
        return None
    option = OPTIONS[setting][1]
    try:
        return float(option.parse(text, option))
    except ValueError as error:
        raise invalid(f'"{name}" {error}') from error
