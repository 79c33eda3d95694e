"""The admin interface: a small HTTP API on its own port, for dcpctl, probes and scripts.

    GET    /livez                          the process answers                        no login
    GET    /readyz                         200 ready, 503 not (starting or stopping)  no login
    GET    /api/v1/status                  what the node is and holds
    POST   /api/v1/vbuckets/{vb}/branch    {"at": seqno}: begin a history branch
    GET    /api/v1/users                   names
    POST   /api/v1/users                   {"name": ..., "password": ...}: add, or new password
    DELETE /api/v1/users/{name}

HTTP basic authentication; the guest from loopback only. Every error is JSON of one form:
{"error": {"what", "where", "why", "try"}}.

Starlette and uvicorn take 140 ms to import: only AdminServer.start and the app pull them in.

A browser page of another site cannot use it: it has no login to send along, and bodies must be
application/json, which browsers ask about first.
"""

from __future__ import annotations

import asyncio
import json
import socket
from base64 import b64decode
from binascii import Error as Base64Error
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, Protocol

from dcp.server.config import is_loopback
from dcp.server.users import UserError, Users
from dcp.server.users_file import UsersFileError
from vbucket.engine import BranchRefusedError
from vbucket.ids import NUM_VBUCKETS, SEQNO_MAX

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from uvicorn import Server

PATHS: Final = (
    "/livez",
    "/readyz",
    "/api/v1/status",
    "/api/v1/vbuckets/{vb}/branch",
    "/api/v1/users",
    "/api/v1/users/{name}",
)
"""Every path there is, for whoever asks for another."""

BODY_BYTES_MAX: Final = 64 * 1024
STOP_TIMEOUT_S: Final = 2
"""What requests under way get to finish when the server stops."""


class NodeView(Protocol):
    """What the admin interface shows and does of a node."""

    users: Users
    is_ready: bool

    def status(self) -> dict[str, Any]:
        """Return what the node is and holds, as JSON."""

    async def branch(self, vb_id: int, at_seqno: int) -> dict[str, Any]:
        """Begin a history branch; return when it is durable. Raises BranchRefusedError."""


class AdminError(Exception):
    """A request that is answered with an error document."""

    def __init__(self, status: HTTPStatus, what: str, *, why: str, try_this: str) -> None:
        super().__init__(what)
        self.status = status
        self.what = what
        self.why = why
        self.try_this = try_this


def admin_app(node: NodeView) -> Starlette:
    """Return the application that serves the API for a node."""
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.routing import Route

    api = _Api(node)
    return Starlette(
        routes=[
            Route("/livez", api.livez),
            Route("/readyz", api.readyz),
            Route("/api/v1/status", api.with_login(api.status)),
            Route("/api/v1/vbuckets/{vb}/branch", api.with_login(api.branch), methods=["POST"]),
            Route("/api/v1/users", api.with_login(api.list_users)),
            Route("/api/v1/users", api.with_login(api.add_user), methods=["POST"]),
            Route("/api/v1/users/{name}", api.with_login(api.remove_user), methods=["DELETE"]),
        ],
        exception_handlers={
            AdminError: _answer_admin_error,
            HTTPException: _answer_http_error,
            500: _answer_failure,
        },
    )


Handler = Callable[["Request"], Awaitable["Response"]]


class _Api:
    def __init__(self, node: NodeView) -> None:
        self._node = node

    def with_login(self, handler: Handler) -> Handler:
        """Let a handler be reached with a login only."""

        async def checked(request: Request) -> Response:
            await self._check_login(request)
            return await handler(request)

        return checked

    async def livez(self, _request: Request) -> Response:
        """The process answers."""
        return _json({"status": "ok"})

    async def readyz(self, _request: Request) -> Response:
        """Clients may be sent here."""
        if self._node.is_ready:
            return _json({"status": "ok"})
        return _json({"status": "not ready"}, HTTPStatus.SERVICE_UNAVAILABLE)

    async def status(self, _request: Request) -> Response:
        """What the node is and holds."""
        return _json(self._node.status())

    async def branch(self, request: Request) -> Response:
        """Begin a history branch."""
        vb_text = request.path_params["vb"]
        if not (vb_text.isascii() and vb_text.isdigit() and int(vb_text[:9]) < NUM_VBUCKETS):
            raise AdminError(
                HTTPStatus.NOT_FOUND,
                f"there is no vbucket {vb_text}",
                why=f"vbuckets are numbered 0 to {NUM_VBUCKETS - 1}",
                try_this="dcpctl seqnos lists them",
            )
        at_seqno = (await _read_object(request, {"at": int}))["at"]
        if not 0 <= at_seqno <= SEQNO_MAX:
            raise _invalid('"at" must be a seqno, 0 or more')
        try:
            return _json(await self._node.branch(int(vb_text), at_seqno))
        except BranchRefusedError as error:
            raise AdminError(
                HTTPStatus.CONFLICT,
                f"vbucket {vb_text} cannot branch at seqno {at_seqno}",
                why=str(error),
                try_this=f"dcpctl failover-log {vb_text} and dcpctl seqnos show what there is",
            ) from error

    async def list_users(self, _request: Request) -> Response:
        """Names of the users."""
        return _json({"users": self._node.users.names()})

    async def add_user(self, request: Request) -> Response:
        """Add a user, or give one a new password."""
        body = await _read_object(request, {"name": str, "password": str})
        try:
            # In a thread: deriving the keys and syncing the file take tens of milliseconds.
            await asyncio.to_thread(self._node.users.add, body["name"], body["password"])
        except UserError as error:
            raise _invalid(str(error)) from error
        except UsersFileError as error:
            raise _users_file_failed(error) from error
        return _json({"name": body["name"]}, HTTPStatus.CREATED)

    async def remove_user(self, request: Request) -> Response:
        """Remove a user."""
        name = request.path_params["name"]
        try:
            was_there = await asyncio.to_thread(self._node.users.remove, name)
        except UserError as error:
            raise AdminError(
                HTTPStatus.CONFLICT,
                f"user {name!r} cannot be removed",
                why=str(error),
                try_this="other machines cannot use it in any case",
            ) from error
        except UsersFileError as error:
            raise _users_file_failed(error) from error
        if not was_there:
            raise AdminError(
                HTTPStatus.NOT_FOUND,
                f"there is no user {name!r}",
                why="no user of that name was added",
                try_this="GET /api/v1/users lists the names",
            )
        return _json({"name": name})

    async def _check_login(self, request: Request) -> None:
        peer_is_loopback = request.client is not None and is_loopback(request.client.host)
        scheme, _, encoded = request.headers.get("authorization", "").partition(" ")
        name, colon, password = "", "", ""
        if scheme.lower() == "basic":
            try:
                name, colon, password = b64decode(encoded, validate=True).decode().partition(":")
            except (Base64Error, UnicodeDecodeError):
                colon = ""
        if colon:
            # In a thread: the first login with a password derives its keys.
            is_right: bool = await asyncio.to_thread(
                self._node.users.is_password_of, name, password, peer_is_loopback=peer_is_loopback
            )
            if is_right:
                return
        raise AdminError(
            HTTPStatus.UNAUTHORIZED,
            "log in first",
            why="user or password is wrong or missing; guest works from the server's machine only",
            try_this="HTTP basic authentication, for example curl -u NAME:PASSWORD",
        )


class AdminServer:
    """Serves `admin_app` on a port of its own, on the event loop of the node."""

    def __init__(self, node: NodeView) -> None:
        self._node = node
        self._server: Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self.port = 0
        """The port that is listened on; 0 before `start`."""

    async def start(self, host: str, port: int) -> int:
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


# -- bodies and answers ----------------------------------------------------------------------------


async def _read_object(request: Request, fields: dict[str, type]) -> dict[str, Any]:
    """Read a JSON object with exactly these members."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise AdminError(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            "the body must be JSON",
            why=f"its content type is {media_type or 'missing'}",
            try_this="send the header content-type: application/json",
        )
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > BODY_BYTES_MAX:
            raise AdminError(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                "the body is too long",
                why=f"at most {BODY_BYTES_MAX} bytes are read",
                try_this="send less",
            )
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise _invalid(f"the body is not JSON: {error}") from error
    wanted = ", ".join(f'"{name}" ({kind.__name__})' for name, kind in fields.items())
    if not isinstance(document, dict) or set(document) != set(fields):
        raise _invalid(f"the body must be an object with {wanted} and nothing else")
    if any(type(document[name]) is not kind for name, kind in fields.items()):
        raise _invalid(f"the body must have {wanted}")
    return document


def _invalid(why: str) -> AdminError:
    return AdminError(
        HTTPStatus.BAD_REQUEST,
        "the request is not valid",
        why=why,
        try_this="send what is asked for",
    )


def _users_file_failed(error: UsersFileError) -> AdminError:
    return AdminError(
        HTTPStatus.INTERNAL_SERVER_ERROR,
        "the users were not changed",
        why=str(error),
        try_this="mend the file, then try again",
    )


def _json(document: dict[str, Any], status: HTTPStatus = HTTPStatus.OK) -> Response:
    from starlette.responses import JSONResponse

    return JSONResponse(document, status_code=status)


def _error_response(
    request: Request, status: HTTPStatus, what: str, why: str, try_this: str
) -> Response:
    where = f"{request.method} {request.url.path}"
    document = {"error": {"what": what, "where": where, "why": why, "try": try_this}}
    response = _json(document, status)
    if status == HTTPStatus.UNAUTHORIZED:
        response.headers["www-authenticate"] = 'Basic realm="dcpd"'
    return response


async def _answer_admin_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, AdminError)
    return _error_response(request, error.status, error.what, error.why, error.try_this)


async def _answer_http_error(request: Request, error: Exception) -> Response:
    """What starlette itself refuses: unknown paths and methods."""
    from starlette.exceptions import HTTPException

    assert isinstance(error, HTTPException)
    status = HTTPStatus(error.status_code)
    response = _error_response(
        request,
        status,
        status.phrase.lower(),
        status.description or error.detail,
        f"paths: {', '.join(PATHS)}",
    )
    response.headers.update(error.headers or {})
    return response


async def _answer_failure(request: Request, error: Exception) -> Response:
    """A fault of the server itself; starlette raises it again, so that it is logged."""
    return _error_response(
        request,
        HTTPStatus.INTERNAL_SERVER_ERROR,
        "the server failed",
        f"{type(error).__name__}",
        "the server's log has the details",
    )
