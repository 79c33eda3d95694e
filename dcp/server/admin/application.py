"""The application: the checks of every request before its handler, and the refusals.

The checks, in this order: against web pages of other sites (`origin`), login, role, and a place
among the running requests (`crowd`). /livez and /readyz need only the first one.
"""

from __future__ import annotations

import time
from base64 import b64decode
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from http import HTTPStatus
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

from dcp.server.access.logins import Peer
from dcp.server.admin.answers import (
    SAFE_HEADERS,
    AdminError,
    RouteSpec,
    action_of,
    error_answer,
    peer_of,
    receive_body,
    session_token_of,
)
from dcp.server.admin.node_view import AdminParts
from dcp.server.admin.openapi import description_routes, role_of
from dcp.server.admin.origin import HostRule, Refusal, page_refusal
from dcp.server.admin.routes import (
    backup_routes,
    console_files,
    console_routes,
    consumer_routes,
    document_routes,
    server_routes,
)
from dcp.server.admin.routes import cluster_routes as clusters
from dcp.server.admin.routes import couchbase_routes as field
from dcp.server.admin.routes import fault_routes as faults
from dcp.server.admin.routes import partition_routes as partitions
from dcp.server.admin.routes import probe_routes as probes
from dcp.server.admin.routes import store_routes as storage
from dcp.server.admin.routes import stream_routes as streams
from dcp.server.admin.routes import user_routes as users
from dcp.server.admin.routes.fault_routes import guarded
from dcp.server.config.sources import is_loopback
from dcp.server.net.crowd import Crowd, Places, TooManyError
from dcp.server.observe.tracing import Facts
from dcp.session.access.rights import Rights, Role

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from dcp.server.admin.answers import Handler

SLICE_BYTES: Final = 64 * 1024
"""Bytes written at once. uvicorn waits before the next piece while the client does not read."""
PATH_CHARS_MAX: Final = 200
"""Characters of a path in a log line."""


def routes_of(parts: AdminParts) -> list[RouteSpec]:
    """Return all routes."""
    described = [
        *probes.routes(parts.health, parts.status, parts.metrics),
        *partitions.at_the_master(partitions.routes(parts.operations), parts.config),
        *storage.routes(parts.operations, parts.scrubbing),
        *partitions.at_the_master(document_routes.dump_routes(parts.dumps), parts.config),
        *streams.routes(parts.operations),
        *consumer_routes.routes(parts.consumers),
        *guarded(faults.routes(parts.operations), is_allowed=parts.console.allows_faults),
        *clusters.routes(parts.cluster),
        *server_routes.routes(parts.live, parts.log),
        *backup_routes.routes(parts.backups),
        *users.routes(parts.users, parts.users_changed),
        *field.routes(parts.config, parts.collections, parts.health),
        *console_files.routes(),
        *console_routes.routes(parts.console, parts.users, parts.access.sessions),
        *document_routes.routes(parts.console.documents),
    ]
    return [*described, *description_routes(described)]


def admin_app(parts: AdminParts, crowd: Crowd, rule: HostRule) -> Starlette:
    """Return the application that serves the API."""
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.requests import ClientDisconnect
    from starlette.routing import Route

    routes = routes_of(parts)
    door = _RequestGuard(parts, crowd, [route.path for route in routes])
    app = Starlette(
        routes=[
            Route(
                route.path,
                door.with_login(route) if route.needs_login else route.handler,
                methods=[route.method],
            )
            for route in routes
        ],
        middleware=[Middleware(_PageGuard, door=door, rule=rule)],
        exception_handlers={
            AdminError: door.answer_admin_error,
            ClientDisconnect: door.answer_nobody,
            HTTPException: door.answer_http_error,
            500: door.answer_failure,
        },
    )
    app.state.num_vbuckets = parts.config.num_vbuckets
    # A redirect would use the Host header, which is not always checked.
    app.router.redirect_slashes = False
    return app


class _PageGuard:
    """Refuses requests of web pages of other sites, before anything else handles them. It also
    sends long answers in slices, so that at most one slice is buffered for a slow client.
    """

    def __init__(self, app: ASGIApp, door: _RequestGuard, rule: HostRule) -> None:
        self._app = app
        self._door = door
        self._rule = rule

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        is_any_host = scope["scheme"] == "https" or scope["path"] in probes.HEALTH_PATHS
        status = HTTPStatus.FORBIDDEN
        refusal = page_refusal(scope["headers"], None if is_any_host else self._rule)
        if refusal is None:
            status = HTTPStatus.BAD_REQUEST
            refusal = _framing_refusal(scope["headers"])
        send = partial(_send_safely, send)
        if refusal is None:
            began_s = time.monotonic()
            await self._app(scope, receive, send)
            self._door.trace(scope, time.monotonic() - began_s)
            return
        from starlette.requests import Request

        answer = self._door.refuse(Request(scope), status, *refusal)
        if status is HTTPStatus.BAD_REQUEST:
            answer.headers["connection"] = "close"  # nobody knows where its body ends
        await answer(scope, receive, send)


def _framing_refusal(headers: Iterable[tuple[bytes, bytes]]) -> Refusal | None:
    """Return why a request whose body ends in two places is refused, None if it has one end.

    A proxy in front of this port may believe the other one, and take the rest of the body for a
    request of another client (RFC 9112, 6.1).
    """
    if {b"content-length", b"transfer-encoding"} <= {name for name, _ in headers}:
        return Refusal(
            "the request is ambiguous",
            "it has both Content-Length and Transfer-Encoding",
            "send one of them",
        )
    return None


async def _send_safely(send: Send, message: Message) -> None:
    """Send a piece of an answer. What it tells is of now and for its reader: no cache keeps it, and
    no browser takes it for another type.
    """
    if message["type"] == "http.response.start":
        named = {name for name, _ in message["headers"]}
        message["headers"] = [
            *message["headers"],
            *(header for header in SAFE_HEADERS if header[0] not in named),
        ]
    await _send_sliced(send, message)


async def _send_sliced(send: Send, message: Message) -> None:
    body: bytes = message.get("body", b"")
    if len(body) <= SLICE_BYTES:
        await send(message)
        return
    ends = range(SLICE_BYTES, len(body) + SLICE_BYTES, SLICE_BYTES)
    for end in ends:
        has_more = end < len(body) or message.get("more_body", False)
        piece = body[end - SLICE_BYTES : end]
        await send({"type": message["type"], "body": piece, "more_body": has_more})


class _LongAnswer:
    """An answer that keeps its place until it ends."""

    def __init__(self, response: Response, give_back: Callable[[], None]) -> None:
        self._response = response
        self._give_back = give_back

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer."""
        try:
            await self._response(scope, receive, send)
        finally:
            self._give_back()


class _RequestGuard:
    """Checks who may use the interface, and answers those who may not."""

    def __init__(self, parts: AdminParts, crowd: Crowd, paths: list[str]) -> None:
        self._access = parts.access
        self._meter = parts.meter
        self._refusals = parts.refusals
        self._crowd = crowd
        self._paths = list(dict.fromkeys(paths))

    def trace(self, scope: Scope, seconds: float) -> None:
        """Make the span of a request that was answered; probes have none."""
        tracing, route = self._meter.tracing, scope.get("route")
        if tracing is not None and route is not None and route.path not in probes.HEALTH_PATHS:
            parent = dict(scope["headers"]).get(b"traceparent", b"")
            facts: Facts = {"http.request.method": scope["method"], "http.route": route.path}
            tracing.request(f"{scope['method']} {route.path}", seconds, parent, facts)

    def with_login(self, route: RouteSpec) -> Handler:
        """Return a handler that checks login and role, and audits changes.

        The original handler finds the user in `request.state.user` and `request.state.rights`.
        """
        from starlette.exceptions import HTTPException

        role = role_of(route)

        async def checked(request: Request) -> Any:
            state = request.state
            if route.is_long and request.method == "HEAD":
                # Starlette allows HEAD wherever GET is allowed. It would run the whole answer,
                # which may never end, and hold a place among the streams meanwhile.
                raise HTTPException(HTTPStatus.METHOD_NOT_ALLOWED, headers={"allow": route.method})
            if (token := _token_of(request)) is not None:
                self._check_token(route, token)
                with self._place(request):
                    return await route.handler(request)
            if (found := self._login_of_session(request)) is not None:
                state.user, state.rights = found
            else:
                state.user, password = _credentials(request)
                with self._place(request):
                    state.rights = await self._rights(request, state.user, password)
            if role is not None and not state.rights.has(role):
                raise self._denial(request, role)
            if route.is_long:
                return await self._long(request, route.handler)
            if route.method == "GET":
                with self._place(request):
                    return await route.handler(request)
            return await self._audited(request, route.handler)

        return checked

    def _login_of_session(self, request: Request) -> tuple[str, Rights] | None:
        """Return user and rights of the browser's session. The header Authorization goes first."""
        token = session_token_of(request)
        if not token or "authorization" in request.headers:
            return None
        is_local = is_loopback(peer_of(request))
        found = self._access.sessions.login_of(token, monotonic(), peer_is_loopback=is_local)
        if found is None:
            raise _log_in_first("the session is over")
        return found

    def _check_token(self, route: RouteSpec, token: str) -> None:
        """Check a token. Raises AdminError unless it is right, and good for this route."""
        if not route.takes_token:
            raise _log_in_first("a token is for /metrics only")
        if not self._access.may_read_metrics(token):
            raise _log_in_first("the token is not that of the setting metrics_token")

    @contextmanager
    def _place(self, request: Request) -> Iterator[None]:
        """Hold a place while the server works on a request, not while it waits for the client."""
        give_back = _take(self._crowd.requests, request)
        try:
            yield
        finally:
            give_back()

    async def _long(self, request: Request, handler: Handler) -> _LongAnswer:
        give_back = _take(self._crowd.streams, request)
        try:
            return _LongAnswer(await handler(request), give_back)
        except BaseException:
            give_back()
            raise

    async def _audited(self, request: Request, handler: Handler) -> Response:
        from starlette.requests import ClientDisconnect

        status = int(HTTPStatus.INTERNAL_SERVER_ERROR)
        try:
            request.state.body = await receive_body(request)
            with self._place(request):
                response = await handler(request)
            status = response.status_code
        except AdminError as error:
            status = int(error.status)
            raise
        except ClientDisconnect:
            status = int(HTTPStatus.REQUEST_TIMEOUT)
            raise
        finally:
            told = getattr(request.state, "told", None)
            self._audit("admin", request, told=told, result=status)
        return response

    def _denial(self, request: Request, role: Role) -> AdminError:
        user = request.state.user
        self._audit("denied", request, role=str(role))
        return AdminError(
            HTTPStatus.FORBIDDEN,
            f"user {user!r} may not do this",
            why=f"it needs the role {role}",
            try_this=f"ask an admin to grant it: dcpctl user grant {user} {role}",
        )

    def _audit(self, event: str, request: Request, **fields: object) -> None:
        peer = _login_peer(request)
        self._access.audit.write(
            event,
            user=request.state.user,
            peer=peer.address,
            over=peer.over,
            action=action_of(request),
            **fields,
        )

    async def _rights(self, request: Request, name: str, password: str) -> Rights:
        found = await self._access.logins.rights_of_password(_login_peer(request), name, password)
        if isinstance(found, Rights):
            return found
        raise _log_in_first(found)

    async def answer_admin_error(self, request: Request, error: Exception) -> Response:
        """Answer a refusal of ours."""
        assert isinstance(error, AdminError)
        return self.refuse(request, error.status, error.what, error.why, error.try_this)

    async def answer_nobody(self, _request: Request, _error: Exception) -> Response:
        """The body did not arrive: the client is gone, or `protocol` has answered 408."""
        from starlette.responses import Response

        return Response(status_code=HTTPStatus.BAD_REQUEST)

    async def answer_http_error(self, request: Request, error: Exception) -> Response:
        """Answer what starlette itself refuses: unknown paths and methods."""
        from starlette.exceptions import HTTPException

        assert isinstance(error, HTTPException)
        status = HTTPStatus(error.status_code)
        response = self.refuse(
            request,
            status,
            status.phrase.lower(),
            status.description or error.detail,
            f"paths: {', '.join(self._paths)}",
        )
        response.headers.update(error.headers or {})
        return response

    async def answer_failure(self, request: Request, error: Exception) -> Response:
        """Answer a bug of the server. Starlette raises the error again, so it is logged."""
        return error_answer(
            request,
            HTTPStatus.INTERNAL_SERVER_ERROR,
            "the server failed",
            f"{type(error).__name__}",
            "the server's log has the details",
        )

    def refuse(
        self, request: Request, status: HTTPStatus, what: str, why: str, try_this: str
    ) -> Response:
        """Return a refusal; log it at a bounded rate, and count it."""
        self._meter.admin_refusals[str(status.value)] += 1
        self._refusals.write(
            "admin request refused",
            peer_of(request),
            request=action_of(request)[:PATH_CHARS_MAX],
            status=int(status),
            reason=f"{what}: {why}",
        )
        return error_answer(request, status, what, why, try_this)


def _login_peer(request: Request) -> Peer:
    host = peer_of(request)
    port = request.client.port if request.client is not None else 0
    over = "admin-tls" if request.scope["scheme"] == "https" else "admin"
    return Peer(host, f"{host}:{port}", over)


def _take(places: Places, request: Request) -> Callable[[], None]:
    try:
        return places.take(peer_of(request))
    except TooManyError as error:
        raise AdminError(
            HTTPStatus.SERVICE_UNAVAILABLE,
            "there are too many requests",
            why=str(error),
            try_this="try again in a moment",
        ) from error


def _credentials(request: Request) -> tuple[str, str]:
    """Return user and password of basic authentication."""
    scheme, _, encoded = request.headers.get("authorization", "").partition(" ")
    name, colon, password = "", "", ""
    if scheme.lower() == "basic":
        try:
            name, colon, password = b64decode(encoded, validate=True).decode().partition(":")
        except ValueError:  # no base64, or no UTF-8 in it
            colon = ""
    if not colon:
        raise _log_in_first("user and password are missing")
    return name, password


def _token_of(request: Request) -> str | None:
    """Return the token of bearer authentication, None if there is none."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None


def _log_in_first(why: str) -> AdminError:
    return AdminError(
        HTTPStatus.UNAUTHORIZED,
        "log in first",
        why=why,
        try_this="HTTP basic authentication, for example curl -u NAME:PASSWORD",
    )
