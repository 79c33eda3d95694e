"""Streams of change consumers, and what operators can do to them.

    GET  /api/v1/streams            every open stream, and all limits; ?name= and ?vb= filter
    POST /api/v1/streams/close      {"reason": "state_changed", ...}: end with STREAM_END
    POST /api/v1/streams/slow       {"bytes_per_s": 1000, ...}: send no faster
    POST /api/v1/streams/stall      send nothing
    POST /api/v1/streams/resume     end slow or stall
    POST /api/v1/streams/drop       cut the connections

The bodies choose streams by {"name": connection, "vb": partition}, both optional. The answer is the
number of open streams, {"streams": 3}, or for drop of connections, {"connections": 1}. `slow` also
applies to streams that are opened later, until `resume` with a choice that covers them.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

from dcp.server.admin.answers import (
    AdminError,
    RouteSpec,
    invalid,
    json_answer,
    number_in,
    read_object,
)
from dcp.server.operate.operations import Operations
from dcp.stream.stream_limits import LIMITS_MAX, StreamChoice, TooManyLimitsError
from dcp.wire.message import EndReason
from vbucket.model.ids import NUM_VBUCKETS

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

BYTES_PER_S_MAX: Final = 1 << 40
_REASONS: Final = {reason.name.lower(): reason for reason in EndReason}
_CHOICE: Final = {"name": str, "vb": int}


def routes(operations: Operations) -> list[RouteSpec]:
    """Return the routes."""

    async def listed(request: Request) -> Response:
        vb = request.query_params.get("vb")
        vb_id = None if vb is None else number_in(vb, NUM_VBUCKETS - 1)
        if vb is not None and vb_id is None:
            raise invalid(f"there is no vbucket {vb[:30]}")
        choice = StreamChoice(request.query_params.get("name"), vb_id)
        limits = operations.stream_limits()
        return json_answer({"streams": operations.streams(choice), "limits": limits})

    async def close(request: Request) -> Response:
        body = await read_object(request, {}, {**_CHOICE, "reason": str})
        reason = _REASONS.get(body.get("reason", EndReason.CLOSED.name.lower()))
        if reason is None:
            raise invalid(f'"reason" must be one of {", ".join(_REASONS)}')
        return _counted("streams", operations.end_streams(_choice_of(body), reason))

    async def slow(request: Request) -> Response:
        body = await read_object(request, {"bytes_per_s": int}, _CHOICE)
        bytes_per_s = body["bytes_per_s"]
        if not 0 < bytes_per_s <= BYTES_PER_S_MAX:
            raise invalid(f'"bytes_per_s" must be 1 to {BYTES_PER_S_MAX}; stall sends nothing')
        return _limited(operations, _choice_of(body), bytes_per_s)

    async def stall(request: Request) -> Response:
        body = await read_object(request, {}, _CHOICE)
        return _counted("streams", operations.limit_streams(_choice_of(body), 0))

    async def resume(request: Request) -> Response:
        body = await read_object(request, {}, _CHOICE)
        return _limited(operations, _choice_of(body), None)

    async def drop(request: Request) -> Response:
        body = await read_object(request, {}, _CHOICE)
        return _counted("connections", operations.drop_connections(_choice_of(body)))

    return [
        RouteSpec("GET", "/api/v1/streams", listed),
        RouteSpec("POST", "/api/v1/streams/close", close),
        RouteSpec("POST", "/api/v1/streams/slow", slow),
        RouteSpec("POST", "/api/v1/streams/stall", stall),
        RouteSpec("POST", "/api/v1/streams/resume", resume),
        RouteSpec("POST", "/api/v1/streams/drop", drop),
    ]


def _choice_of(body: dict[str, Any]) -> StreamChoice:
    vb_id = body.get("vb")
    if vb_id is not None and not 0 <= vb_id < NUM_VBUCKETS:
        raise invalid(f"there is no vbucket {vb_id}")
    return StreamChoice(body.get("name"), vb_id)


def _limited(operations: Operations, choice: StreamChoice, bytes_per_s: int | None) -> Response:
    """Set a limit. It is no error if no stream is open: the limit is for streams to come, too."""
    try:
        return json_answer({"streams": operations.limit_streams(choice, bytes_per_s)})
    except TooManyLimitsError:
        raise AdminError(
            HTTPStatus.CONFLICT,
            "the limit is not set",
            why=f"there are {LIMITS_MAX} limits of streams, and each stream looks through them",
            try_this="dcpctl stream stall --resume",
        ) from None


def _counted(what: str, count: int) -> Response:
    if not count:
        raise AdminError(
            HTTPStatus.NOT_FOUND,
            "no stream matches",
            why="no open stream has that connection name and partition",
            try_this="dcpctl stream list",
        )
    return json_answer({what: count})
