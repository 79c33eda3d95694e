"""What the web console asks for in addition to the API.

    GET /api/v1/console/me                who is logged in, and what this user may do
    POST, DELETE /api/v1/console/login    begin and end a browser's session, in a cookie
    GET /api/v1/console/changes           server-sent events: what changes now; see `change_tail`
    GET /api/v1/console/events            server-sent events, one per sample; see `_Events`
          ?show=overview|partitions|consumers|none  &after=SAMPLE  &since=TIME  &boot=ID
          after and since: what the page has; they count if boot is that of this run
    GET /api/v1/vbuckets/{vb}             one partition, with its failover log

The pages send the header CONSOLE_HEADER, without which the cookie of a session does not count, so
they read the events with fetch().
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from http import HTTPStatus
from time import monotonic, time
from typing import TYPE_CHECKING, Final

import msgspec

from dcp.server.access.browser_sessions import CONSOLE_HEADER, BrowserSessions
from dcp.server.access.users import Users
from dcp.server.admin.answers import (
    NUMBER_MAX,
    AdminError,
    QueryField,
    RouteSpec,
    cookie_of,
    denied,
    invalid,
    is_https,
    json_answer,
    number_in,
    read_body,
    session_token_of,
    unix_time,
    vb_of,
)
from dcp.server.admin.bodies import ConsoleState, May, Me, NoMembers
from dcp.server.admin.node_view import ConsoleParts
from dcp.server.admin.routes.user_routes import roles_of
from dcp.server.operate.change_tail import STEP_S, ChangeTail, TailFilter, TailStep
from dcp.server.operate.document_desk import KINDS, DocumentRefusedError
from dcp.server.report.console_view import PartitionDetail
from dcp.session.access.rights import EVERYTHING, Rights, Role
from dcp.wire.opcode import Opcode

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

EVENTS_TYPE: Final = "text/event-stream"
SHOWS: Final = ("overview", "partitions", "consumers", "none")
BEAT_STEPS: Final = 4
"""Steps after which a tail tells that nothing happened: a page can tell silence from a lost link,
and shows the rate of now."""
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


def routes(console: ConsoleParts, users: Users, sessions: BrowserSessions) -> list[RouteSpec]:
    """Return the routes."""

    async def me(request: Request) -> Response:
        return json_answer(me_of(console, request.state.user, request.state.rights))

    async def events(request: Request) -> Response:
        from starlette.responses import StreamingResponse

        query = request.query_params
        show = query.get("show", "none")
        after = number_in(query.get("after", "0"), NUMBER_MAX)
        since_s = unix_time(query.get("since", "0"))
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
        *_login_routes(console, sessions),
        *_tail_routes(console, users),
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


def _login_routes(console: ConsoleParts, sessions: BrowserSessions) -> list[RouteSpec]:
    async def log_in(request: Request) -> Response:
        await read_body(request, NoMembers)
        user, rights = request.state.user, request.state.rights
        sessions.close(session_token_of(request))
        answer = json_answer(me_of(console, user, rights))
        _set_cookies(answer, request, sessions.open(user, monotonic()))
        return answer

    async def log_out(request: Request) -> Response:
        sessions.close(session_token_of(request))
        answer = json_answer(NoMembers())
        _set_cookies(answer, request, "", max_age_s=0)
        return answer

    return [
        RouteSpec(
            "POST", "/api/v1/console/login", log_in, is_for_all=True, body=NoMembers, answer=Me,
            summary="Begin a browser's session: a cookie takes the place of the password, in"
            f" requests with the header {CONSOLE_HEADER}.",
        ),
        RouteSpec(
            "DELETE", "/api/v1/console/login", log_out, is_for_all=True, answer=NoMembers,
            summary="End the browser's session.",
        ),
    ]  # fmt: skip


def _tail_routes(console: ConsoleParts, users: Users) -> list[RouteSpec]:
    async def changes(request: Request) -> Response:
        from starlette.responses import StreamingResponse

        query, manifest = request.query_params, console.engine.keyspace.manifest
        path, kinds = query.get("collection", ""), frozenset(query.getlist("kind"))
        collection_id = manifest.collection_id(path) if path else None
        if path and collection_id is None:
            raise invalid(f"there is no collection {path[:100]!r}")
        if not kinds <= set(KINDS.values()):
            raise invalid(f'"kind" is one of {", ".join(KINDS.values())}')
        wanted = TailFilter(
            collection_id, query.get("prefix", "").encode("utf-8", "surrogateescape"),
            kinds or frozenset(KINDS.values()),
        )  # fmt: skip
        stream = _Tail(console, users, request.state.user, request.state.rights, wanted)
        return StreamingResponse(stream.events(), media_type=EVENTS_TYPE, headers=_NO_STORE)

    return [
        RouteSpec(
            "GET", "/api/v1/console/changes", changes, role=Role.READ, is_long=True,
            media_type=EVENTS_TYPE, event=TailStep,
            summary="What is committed from now on, as server-sent events `step`, twice a second"
            " while there is something. More than a person can read is counted, not sent.",
            query=(
                QueryField("collection", "scope.collection; without it all."),
                QueryField("prefix", "How the keys begin; without it all keys."),
                QueryField("kind", f"{', '.join(KINDS.values())}; may be repeated. None: all."),
            ),
        ),
    ]  # fmt: skip


def _set_cookies(
    answer: Response, request: Request, token: str, max_age_s: int | None = None
) -> None:
    """Set the cookie of a session, and one that tells the page's scripts that it may be there.
    Without Max-Age they are gone when the browser is.
    """
    for name, value, is_secret in (
        (cookie_of(request).replace("dcpd-", "dcpd-in-"), "1", False),
        (cookie_of(request), token, True),
    ):
        answer.set_cookie(
            name, value, max_age_s, path="/",
            secure=is_https(request), httponly=is_secret, samesite="strict",
        )  # fmt: skip


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
            body = self._brief() + self._body(after, since_s)
            if is_first:
                me = me_of(self._console, self._user, self._rights)
                body = b',"me":' + msgspec.json.encode(me) + body
                is_first = False
            yield b"event: state\ndata: {" + b'"head":' + view.head() + body + b"}\n\n"
            after, since_s = sample, time_s
            await sampler.after(sample)

    def _brief(self) -> bytes:
        brief = self._console.brief
        return b"" if brief is None else b',"cluster":' + msgspec.json.encode(brief())

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


class _Tail:
    """The events of the page Changes. Nothing is kept for a page that does not read."""

    def __init__(
        self, console: ConsoleParts, users: Users, user: str, rights: Rights, wanted: TailFilter
    ) -> None:
        self._console = console
        self._users = users
        self._user = user
        self._rights = rights
        self._wanted = wanted

    async def events(self) -> AsyncIterator[bytes]:
        """Yield `step` whenever something happened, and every BEAT_STEPS steps."""
        tail = ChangeTail(self._console.engine, self._rights, self._wanted, time())
        steps = 0
        while not self._console.sampler.is_stopped:
            if self._users.rights_of(self._user) != self._rights:
                yield b"event: rights\ndata: {}\n\n"
                return
            step = tail.step(time())
            if step.passed or step.versions or steps % BEAT_STEPS == 0:
                yield b"event: step\ndata: " + msgspec.json.encode(step) + b"\n\n"
            steps += 1
            await asyncio.sleep(STEP_S)
