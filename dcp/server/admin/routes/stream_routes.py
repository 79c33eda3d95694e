"""Streams of change consumers, and what operators can do to them.

    GET  /api/v1/streams            every open stream, and all limits; ?name= and ?vb= filter
    POST /api/v1/streams/close      end with STREAM_END
    POST /api/v1/streams/slow       send no faster than a limit
    POST /api/v1/streams/stall      send nothing
    POST /api/v1/streams/resume     end slow or stall
    POST /api/v1/streams/drop       cut the connections

The bodies choose streams by the name of their connection and by partition. The answer is the number
of open streams, or for drop of connections. `slow` also applies to streams that are opened later,
until `resume` with a choice that covers them.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from dcp.server.admin.answers import (
    AdminError,
    QueryField,
    RouteSpec,
    invalid,
    json_answer,
    number_in,
    partitions_of,
    read_body,
)
from dcp.server.admin.bodies import (
    END_REASONS,
    CloseRequest,
    ConnectionCount,
    SlowRequest,
    StreamCount,
    StreamList,
    StreamSelection,
)
from dcp.server.operate.operations import Operations
from dcp.stream.stream_limits import LIMITS_MAX, StreamChoice, TooManyLimitsError
from dcp.wire.message import EndReason

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

BYTES_PER_S_MAX: Final = 1 << 40


def routes(operations: Operations) -> list[RouteSpec]:
    """Return the routes."""

    async def listed(request: Request) -> Response:
        vb = request.query_params.get("vb")
        vb_id = None if vb is None else number_in(vb, partitions_of(request) - 1)
        if vb is not None and vb_id is None:
            raise invalid(f"there is no partition {vb[:30]}")
        choice = StreamChoice(request.query_params.get("name"), vb_id)
        return json_answer(StreamList(operations.streams(choice), operations.stream_limits()))

    async def close(request: Request) -> Response:
        body = await read_body(request, CloseRequest)
        reason = END_REASONS.get(body.reason or EndReason.CLOSED.name.lower())
        if reason is None:
            raise invalid(f'"reason" must be one of {", ".join(END_REASONS)}')
        return _streams(operations.end_streams(_choice_of(request, body), reason))

    async def slow(request: Request) -> Response:
        body = await read_body(request, SlowRequest)
        if body.bytes_per_s > BYTES_PER_S_MAX:
            raise invalid(f'"bytes_per_s" must be 1 to {BYTES_PER_S_MAX}; stall sends nothing')
        return _limited(operations, _choice_of(request, body), body.bytes_per_s)

    async def stall(request: Request) -> Response:
        body = await read_body(request, StreamSelection)
        return _streams(operations.limit_streams(_choice_of(request, body), 0))

    async def resume(request: Request) -> Response:
        body = await read_body(request, StreamSelection)
        return _limited(operations, _choice_of(request, body), None)

    async def drop(request: Request) -> Response:
        body = await read_body(request, StreamSelection)
        return json_answer(
            ConnectionCount(_some(operations.drop_connections(_choice_of(request, body))))
        )

    post = "/api/v1/streams"
    return [
        RouteSpec(
            "GET", post, listed, answer=StreamList,
            summary="List open streams, and the limits of streams.",
            query=(
                QueryField("name", "Only streams of connections with this name."),
                QueryField("vb", "Only streams of this partition.", "integer"),
            ),
        ),
        RouteSpec(
            "POST", f"{post}/close", close, body=CloseRequest, answer=StreamCount,
            summary="End streams with STREAM_END.",
        ),
        RouteSpec(
            "POST", f"{post}/slow", slow, body=SlowRequest, answer=StreamCount,
            summary="Limit the speed of streams, also of those to come.",
        ),
        RouteSpec(
            "POST", f"{post}/stall", stall, body=StreamSelection, answer=StreamCount,
            summary="Send nothing on streams that are open now.",
        ),
        RouteSpec(
            "POST", f"{post}/resume", resume, body=StreamSelection, answer=StreamCount,
            summary="End slow and stall.",
        ),
        RouteSpec(
            "POST", f"{post}/drop", drop, body=StreamSelection, answer=ConnectionCount,
            summary="Cut the connections that have a chosen stream.",
        ),
    ]  # fmt: skip


def _choice_of(request: Request, body: StreamSelection) -> StreamChoice:
    if body.vb is not None and not 0 <= body.vb < partitions_of(request):
        raise invalid(f"there is no partition {body.vb}")
    return StreamChoice(body.name, body.vb)


def _streams(count: int) -> Response:
    return json_answer(StreamCount(_some(count)))


def _limited(operations: Operations, choice: StreamChoice, bytes_per_s: int | None) -> Response:
    """Set a limit. It is no error if no stream is open: the limit is for streams to come, too."""
    try:
        return json_answer(StreamCount(operations.limit_streams(choice, bytes_per_s)))
    except TooManyLimitsError:
        raise AdminError(
            HTTPStatus.CONFLICT,
            "the limit is not set",
            why=f"there are {LIMITS_MAX} limits of streams, and each stream looks through them",
            try_this="dcpctl stream stall --resume",
        ) from None


def _some(count: int) -> int:
    """Return the count. Raises AdminError if it is 0."""
    if not count:
        raise AdminError(
            HTTPStatus.NOT_FOUND,
            "no stream matches",
            why="no open stream has that connection name and partition",
            try_this="dcpctl stream list",
        )
    return count
