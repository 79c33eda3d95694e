"""The application and the port it is served on; login, errors and refusals of every request."""

from __future__ import annotations

import asyncio
import socket
from base64 import b64decode
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from dcp.server.admin import dump, faults, field, partitions, probes, storage, streams, users
from dcp.server.admin.answers import AdminError, RouteSpec, error_answer, peer_of
from dcp.server.admin.view import NodeView
from dcp.server.logins import Peer
from dcp.session.rights import Rights, Role

if TYPE_CHECKING:
    from ssl import SSLContext

    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from uvicorn import Server

    from dcp.server.admin.answers import Handler

STOP_TIMEOUT_S: Final = 2
"""What requests under way get to finish when the server stops."""

_PARTS: Final = (probes, partitions, storage, dump, streams, faults, users, field)


def routes_of(node: NodeView) -> list[RouteSpec]:
    """Return everything that there is."""
    return [route for part in _PARTS for route in part.routes(node)]


def admin_app(node: NodeView) -> Starlette:
    """Return the application that serves the API for a node."""
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.routing import Route

    door = _Door(node, [route.path for route in routes_of(node)])
    return Starlette(
        routes=[
            Route(
                route.path,
                door.with_login(route) if route.needs_login else route.handler,
                methods=[route.method],
            )
            for route in routes_of(node)
        ],
        exception_handlers={
            AdminError: door.answer_admin_error,
            HTTPException: door.answer_http_error,
            500: door.answer_failure,
        },
    )


class _Door:
    """Who may come in, and what is said to those who may not."""

    def __init__(self, node: NodeView, paths: list[str]) -> None:
        self._node = node
        self._paths = list(dict.fromkeys(paths))

    def with_login(self, route: RouteSpec) -> Handler:
        """Let a handler be reached only by who may; what changes something is audited.

        The handler finds who asks in `request.state.user` and `request.state.rights`.
        """
        role = route.role or (None if route.method == "GET" else Role.ADMIN)

        async def checked(request: Request) -> Response:
            request.state.user, request.state.rights = await self._login(request)
            if role is not None and not request.state.rights.has(role):
                raise self._denial(request, role)
            if route.method == "GET":
                return await route.handler(request)
            return await self._audited(request, route.handler)

        return checked

    async def _audited(self, request: Request, handler: Handler) -> Response:
        status = int(HTTPStatus.INTERNAL_SERVER_ERROR)
        try:
            response = await handler(request)
            status = response.status_code
        except AdminError as error:
            status = int(error.status)
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
            why=f"it takes the role {role}",
            try_this=f"an admin grants it: dcpctl user grant {user} {role}",
        )

    def _audit(self, event: str, request: Request, **fields: object) -> None:
        peer = _login_peer(request)
        self._node.access.audit.write(
            event,
            user=request.state.user,
            peer=peer.address,
            over=peer.over,
            action=f"{request.method} {request.url.path}",
            **fields,
        )

    async def _login(self, request: Request) -> tuple[str, Rights]:
        scheme, _, encoded = request.headers.get("authorization", "").partition(" ")
        name, colon, password = "", "", ""
        if scheme.lower() == "basic":
            try:
                name, colon, password = b64decode(encoded, validate=True).decode().partition(":")
            except ValueError:  # no base64, or no UTF-8 in it
                colon = ""
        why = "user and password are missing"
        if colon:
            logins = self._node.access.logins
            rights = await logins.rights_of_password(_login_peer(request), name, password)
            if isinstance(rights, Rights):
                return name, rights
            why = rights
        raise AdminError(
            HTTPStatus.UNAUTHORIZED,
            "log in first",
            why=why,
            try_this="HTTP basic authentication, for example curl -u NAME:PASSWORD",
        )

    async def answer_admin_error(self, request: Request, error: Exception) -> Response:
        """A refusal of ours."""
        assert isinstance(error, AdminError)
        return self._refuse(request, error.status, error.what, error.why, error.try_this)

    async def answer_http_error(self, request: Request, error: Exception) -> Response:
        """What starlette itself refuses: unknown paths and methods."""
        from starlette.exceptions import HTTPException

        assert isinstance(error, HTTPException)
        status = HTTPStatus(error.status_code)
        response = self._refuse(
            request,
            status,
            status.phrase.lower(),
            status.description or error.detail,
            f"paths: {', '.join(self._paths)}",
        )
        response.headers.update(error.headers or {})
        return response

    async def answer_failure(self, request: Request, error: Exception) -> Response:
        """A fault of the server itself; starlette raises it again, so that it is logged."""
        return error_answer(
            request,
            HTTPStatus.INTERNAL_SERVER_ERROR,
            "the server failed",
            f"{type(error).__name__}",
            "the server's log has the details",
        )

    def _refuse(
        self, request: Request, status: HTTPStatus, what: str, why: str, try_this: str
    ) -> Response:
        self._node.log_refusal(
            "admin request refused",
            peer_of(request),
            request=f"{request.method} {request.url.path[:200]}",
            status=int(status),
            reason=f"{what}: {why}",
        )
        return error_answer(request, status, what, why, try_this)


def _login_peer(request: Request) -> Peer:
    host = peer_of(request)
    port = request.client.port if request.client is not None else 0
    return Peer(host, f"{host}:{port}", "admin-tls" if request.url.scheme == "https" else "admin")


class AdminServer:
    """Serves `admin_app` on a port of its own, on the event loop of the node."""

    def __init__(self, node: NodeView) -> None:
        self._node = node
        self._server: Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self.port = 0
        """The port that is listened on; 0 before `start`."""

    async def start(self, host: str, port: int, tls: SSLContext | None = None) -> int:
        """Listen, and return the port (0 picks a free one). Raises OSError if it cannot."""
        from uvicorn import Config, Server

        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            listener.listen(128)
        except OSError:
            listener.close()
            raise
        self.port = listener.getsockname()[1]
        config = Config(
            admin_app(self._node),
            access_log=False,
            log_config=None,
            log_level="warning",
            lifespan="off",
            http="h11",
            ws="none",
            server_header=False,
            proxy_headers=False,
            limit_concurrency=64,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=STOP_TIMEOUT_S,
            ssl_context_factory=None if tls is None else lambda _config, _default: tls,
        )
        # _serve is serve() without the signal handlers: signals are the process's own business.
        self._server = Server(config)
        self._serving = asyncio.create_task(self._server._serve(sockets=[listener]))  # noqa: SLF001
        return self.port

    async def stop(self) -> None:
        """Finish the requests under way and close the port."""
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await self._serving
            self._server = self._serving = None
