"""What the web console asks for in addition to the API.

    GET /api/v1/console/me                who is logged in, and what this user may do
    GET /api/v1/console/events            server-sent events, one per sample; see `_Events`
          ?show=overview|partitions|consumers|none  &after=SAMPLE  &since=TIME  &boot=ID
          after and since: what the page has; they count if boot is that of this run
    GET /api/v1/vbuckets/{vb}             one partition, with its failover log

Browsers send the login in the header Authorization, so the page reads the events with fetch().
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

import msgspec

from dcp.server.access.users import Users
from dcp.server.admin.answers import (
    AdminError,
    QueryField,
    RouteSpec,
    denied,
    invalid,
    json_answer,
    number_in,
    vb_of,
)
from dcp.server.admin.bodies import ConsoleState, May, Me
from dcp.server.admin.node_view import ConsoleParts
from dcp.server.admin.routes.user_routes import roles_of
from dcp.server.operate.document_desk import DocumentRefusedError
from dcp.server.report.console_view import PartitionDetail
from dcp.session.access.rights import EVERYTHING, Rights, Role
from dcp.wire.opcode import Opcode

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

EVENTS_TYPE: Final = "text/event-stream"
SHOWS: Final = ("overview", "partitions", "consumers", "none")
SAMPLE_MAX: Final = 1 << 53
_NO_STORE: Final = {"cache-control": "no-store", "x-content-type-options": "nosniff"}


def may_of(rights: Rights) -> May:
    """Return what a user may do."""
    return May(
        read_documents=rights.has(Role.READ),
        write_documents=rights.has(Role.READ) and rights.has(Role.WRITE),
        dump=EVERYTHING in rights.scopes().get(Role.READ, ()),
        history=rights.denial(Opcode.GET_FAILOVER_LOG, None, b"") is None,
        explain=rights.has(Role.STREAM),
        operate=rights.has(Role.ADMIN),
    )


def me_of(console: ConsoleParts, user: str, rights: Rights) -> Me:
    """Return who is logged in."""
    return Me(user, roles_of(rights), may_of(rights), console.is_test_mode, console.view.boot)


def routes(console: ConsoleParts, users: Users) -> list[RouteSpec]:
    """Return the routes."""

    async def me(request: Request) -> Response:
        return json_answer(me_of(console, request.state.user, request.state.rights))

    async def events(request: Request) -> Response:
        from starlette.responses import StreamingResponse

        query = request.query_params
        show = query.get("show", "none")
        after = number_in(query.get("after", "0"), SAMPLE_MAX)
        since_s = _time(query.get("since", "0"))
        if show not in SHOWS:
            raise invalid(f'"show" is one of {", ".join(SHOWS)}, not {show[:30]!r}')
        if after is None or since_s is None:
            raise invalid('"after" is the number of a sample, and "since" a Unix time')
        if query.get("boot") != console.view.boot:
            after, since_s = 0, 0.0
        stream = _Events(console, users, request.state.user, request.state.rights, show)
        return StreamingResponse(
            stream.events(after, since_s), media_type=EVENTS_TYPE, headers=_NO_STORE
        )

    async def partition(request: Request) -> Response:
        vb_id = vb_of(request)
        denial = request.state.rights.denial(Opcode.GET_FAILOVER_LOG, None, b"")
        if denial is not None:
            raise denied(request, denial.why)
        try:
            await console.documents.until_committed(vb_id)
        except DocumentRefusedError as error:
            raise AdminError(
                HTTPStatus.SERVICE_UNAVAILABLE,
                "the partition cannot be shown",
                why=str(error),
                try_this="try again in a moment",
            ) from error
        return json_answer(console.view.partition(vb_id))

    return [
        RouteSpec(
            "GET", "/api/v1/console/me", me, answer=Me,
            summary="Who is logged in, and what this user may do.",
        ),
        RouteSpec(
            "GET", "/api/v1/console/events", events, is_long=True,
            media_type=EVENTS_TYPE, event=ConsoleState,
            summary="What the web console shows, as server-sent events: `state` now and after each"
            " sample. If the user's rights change, the last one is `rights`, with no members.",
            query=(
                QueryField("show", f"The page: {', '.join(SHOWS)}; without it none."),
                QueryField("after", "`head.sample` of the last event.", "integer"),
                QueryField("since", "`head.time_s` of the last event.", "number"),
                QueryField("boot", "`head.boot` of the last event; else the two do not count."),
            ),
        ),
        RouteSpec(
            "GET", "/api/v1/vbuckets/{vb}", partition, answer=PartitionDetail,
            summary="Show one partition, with its failover log. It needs the role read or stream.",
        ),
    ]  # fmt: skip


class _Events:
    """The events of one page: one now, and one after each sample.

    Nothing is kept for a page that does not read. The next event is made when the one before has
    been handed to the socket, from what is new then. If the client does not read for five minutes,
    the port closes the connection (dcp.server.net.crowd).
    """

    def __init__(
        self, console: ConsoleParts, users: Users, user: str, rights: Rights, show: str
    ) -> None:
        self._console = console
        self._users = users
        self._user = user
        self._rights = rights
        self._show = show

    async def events(self, after: int, since_s: float) -> AsyncIterator[bytes]:
        """Yield events: `state`; the first one says who is logged in. If the user's rights change,
        `rights` is the last one, and the page asks again.
        """
        sampler, view = self._console.sampler, self._console.view
        is_first = True
        while not sampler.is_stopped:
            if self._users.rights_of(self._user) != self._rights:
                yield b"event: rights\ndata: {}\n\n"
                return
            if is_first and not sampler.ring.last:
                await sampler.after(0)
                continue
            sample, time_s = sampler.ring.last, sampler.ring.last_time_s
            body = self._body(after, since_s)
            if is_first:
                me = me_of(self._console, self._user, self._rights)
                body = b',"me":' + msgspec.json.encode(me) + body
                is_first = False
            yield b"event: state\ndata: {" + b'"head":' + view.head() + body + b"}\n\n"
            after, since_s = sample, time_s
            await sampler.after(sample)

    def _body(self, after: int, since_s: float) -> bytes:
        """Return what `show` adds. The head is kept as bytes, so `ConsoleState` is put together as
        text here.
        """
        view = self._console.view
        match self._show:
            case "overview":
                return b',"overview":' + view.overview(after)
            case "partitions":
                return b',"partitions":' + view.partition_map()
            case "consumers":
                return b',"consumers":' + view.consumers(since_s)
            case _:
                return b""


def _time(text: str) -> float | None:
    """Return a Unix time, None if the text is none."""
    try:
        value = float(text[:30])
    except ValueError:
        return None
    return value if 0 <= value < SAMPLE_MAX else None
