"""Requests and responses: shared by all parts of the admin interface."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import lru_cache
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar
from urllib.parse import parse_qs, quote

import msgspec

from dcp.server.access.browser_sessions import CONSOLE_HEADER
from dcp.server.admin.bodies import CouchbaseProblem, ErrorDetails, Problem
from dcp.session.access.rights import Role
from dcp.session.controls import is_decimal

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    Handler = Callable[[Request], Awaitable[Response]]

NUMBER_MAX: Final = 1 << 53
"""JSON readers round larger numbers."""
BODY_BYTES_MAX: Final = 64 * 1024
JSON_TYPE: Final = "application/json"
PROBLEM_TYPE: Final = "application/problem+json"
"""Refusals (RFC 9457)."""
SAFE_HEADERS: Final = (
    (b"cache-control", b"no-store"),
    (b"x-content-type-options", b"nosniff"),
)
"""Headers of every answer that does not set them itself."""
_SECRET_FIELDS: Final = frozenset({"password", "saslPassword", "token", "key", "value"})
"""Members of bodies that the audit log leaves out. Only bodies about documents have "key"."""
FORM_TYPE: Final = "application/x-www-form-urlencoded"

COUCHBASE_PATHS: Final = ("/pools", "/whoami")
"""Paths whose answers have Couchbase's form."""

_B = TypeVar("_B", bound=msgspec.Struct)


class QueryField(NamedTuple):
    """A field of a query."""

    name: str
    meaning: str
    kind: str = "string"
    """Its type in JSON Schema."""
    is_required: bool = False


class RouteSpec(NamedTuple):
    """One kind of request."""

    method: str
    path: str
    handler: Handler
    needs_login: bool = True
    role: Role | None = None
    """The role it needs. None: admin for a change, any login for a GET."""
    is_for_all: bool = False
    """Any login will do, although it is no GET."""
    is_long: bool = False
    """The answer may take very long."""
    summary: str = ""
    """What it does, in a sentence. This and what follows is for the API's description."""
    body: type[msgspec.Struct] | None = None
    """The body of a request: JSON, or a form on Couchbase's paths."""
    answer: Any = None
    """The type of the answer, if it is JSON."""
    event: Any = None
    """The type of the data of an event, if the answer is a stream of server-sent events."""
    status: HTTPStatus = HTTPStatus.OK
    """The status of the usual answer."""
    other_statuses: tuple[HTTPStatus, ...] = ()
    """Statuses of answers that have the same form."""
    media_type: str = JSON_TYPE
    other_media_types: tuple[str, ...] = ()
    query: tuple[QueryField, ...] = ()
    takes_token: bool = False
    """The token of the setting metrics_token stands for a login."""
    is_described: bool = True
    """Whether it is part of the API. The files of the web console are not."""


class AdminError(Exception):
    """A refused request, answered with an error document."""

    def __init__(self, status: HTTPStatus, what: str, *, why: str, try_this: str) -> None:
        super().__init__(what)
        self.status = status
        self.what = what
        self.why = why
        self.try_this = try_this


def invalid(why: str) -> AdminError:
    """Return the refusal of an invalid request."""
    return AdminError(
        HTTPStatus.BAD_REQUEST,
        "the request is not valid",
        why=why,
        try_this="send what is asked for",
    )


def json_answer(document: Any, status: HTTPStatus = HTTPStatus.OK) -> Response:
    """Return a response with a JSON document: a Struct, or what JSON has."""
    from starlette.responses import Response

    return Response(msgspec.json.encode(document), status.value, media_type=JSON_TYPE)


def raw_answer(body: bytes, media_type: str = JSON_TYPE) -> Response:
    """Return a response with these bytes."""
    from starlette.responses import Response

    return Response(body, media_type=media_type)


# -- reading a request -----------------------------------------------------------------------------


def peer_of(request: Request) -> str:
    """Return the host of the client."""
    return request.client.host if request.client is not None else "?"


def action_of(request: Request) -> str:
    """Return the method and the path, for messages.

    Not from `request.url`, which fails for some Host headers.
    """
    return f"{request.method} {request.scope['path']}"


def is_https(request: Request) -> bool:
    """Whether the request came over TLS."""
    return bool(request.scope["scheme"] == "https")


def cookie_of(request: Request) -> str:
    """Return the name of the cookie of a browser's session. A browser sends one cookie to all ports
    of a host, so each port has its own.
    """
    return f"dcpd-{(request.scope.get('server') or ('', 0))[1]}"


def session_token_of(request: Request) -> str:
    """Return the token of the browser's session, "" if there is none, or if the request is not one
    of the console's pages.
    """
    return request.cookies.get(cookie_of(request), "") if CONSOLE_HEADER in request.headers else ""


def partitions_of(request: Request) -> int:
    """Return how many partitions the node that is asked has."""
    count: int = request.app.state.num_vbuckets
    return count


def vb_of(request: Request) -> int:
    """Return the partition in the path."""
    text: str = request.path_params["vb"]
    last = partitions_of(request) - 1
    vb_id = number_in(text, last)
    if vb_id is None:
        raise AdminError(
            HTTPStatus.NOT_FOUND,
            f"there is no partition {text[:30]}",
            why=f"partitions are numbered 0 to {last}",
            try_this="dcpctl seqnos lists them",
        )
    return vb_id


def number_in(text: str, maximum: int) -> int | None:
    """Return the number, 0 to `maximum`, of a decimal text; None if it is not one."""
    return number if is_decimal(text) and (number := int(text)) <= maximum else None


def unix_time(text: str) -> float | None:
    """Return a Unix time, None if the text is none."""
    try:
        value = float(text[:30])
    except ValueError:
        return None
    return value if 0 <= value < NUMBER_MAX else None


async def read_body(request: Request, kind: type[_B]) -> _B:
    """Read a JSON object as a Struct. An empty body is an empty object."""
    body = _body_of(request, JSON_TYPE)
    try:
        found = msgspec.json.decode(body or b"{}", type=kind)
        fields = msgspec.to_builtins(found)
        # Strings with half a surrogate pair cannot be stored, logged or sent.
        msgspec.json.encode(fields)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise invalid(f"{error}; the body is an object with {_members_of(kind)}") from error
    request.state.told = _without_secrets(fields)
    return found


async def read_form(request: Request, kind: type[_B]) -> _B:
    """Read an HTML form as a Struct. If a name comes twice, the first value counts."""
    body = _body_of(request, FORM_TYPE)
    try:
        fields = parse_qs(body.decode(), keep_blank_values=True, max_num_fields=32)
        found = {name: values[0] for name, values in fields.items()}
        form = msgspec.convert(found, kind, strict=False)
    except (msgspec.MsgspecError, ValueError) as error:
        raise invalid(f"{error}; the body is a form with {_members_of(kind)}") from error
    request.state.told = _without_secrets(found)
    return form


@lru_cache
def _members_of(kind: type[msgspec.Struct]) -> str:
    """Return what a body may have, for messages: "at" (integer), "or_zero" (boolean, optional)."""
    _, schemas = msgspec.json.schema_components([kind])
    schema = schemas[kind.__name__]
    required = schema.get("required", ())
    return (
        ", ".join(
            f'"{name}" ({_kind_of(member)}{"" if name in required else ", optional"})'
            for name, member in schema["properties"].items()
        )
        or "no members"
    )


def _kind_of(schema: Mapping[str, Any]) -> str:
    kinds = schema.get("anyOf", (schema,))
    names = (str(kind.get("type", "object")) for kind in kinds)
    return " or ".join(name for name in names if name != "null")


def _without_secrets(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that may be in the audit log."""
    return {
        name: value
        for name, value in fields.items()
        if value is not None and name not in _SECRET_FIELDS
    }


async def receive_body(request: Request) -> bytes:
    """Return the whole body. Raises AdminError if it is too long."""
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
    return bytes(body)


def _body_of(request: Request, wanted_type: str) -> bytes:
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != wanted_type:
        raise AdminError(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            "the body must be JSON" if wanted_type == JSON_TYPE else "the body must be a form",
            why=f"its content type is {media_type or 'missing'}",
            try_this=f"send the header content-type: {wanted_type}",
        )
    body: bytes = request.state.body
    return body


# -- errors ----------------------------------------------------------------------------------------


def problem(status: HTTPStatus, what: str, why: str, try_this: str, action: str = "") -> bytes:
    """Return the document of a refusal. `action`: method and path, "" if they are not known."""
    _, _, path = action.partition(" ")
    return msgspec.json.encode(
        Problem(
            title=status.phrase,
            status=status.value,
            detail=f"{what}: {why}",
            instance=quote(path) if path else msgspec.UNSET,
            error=ErrorDetails(what, action or "the admin port", why, try_this),
        )
    )


def error_answer(
    request: Request, status: HTTPStatus, what: str, why: str, try_this: str
) -> Response:
    """Return a response with the document of a refusal."""
    action = action_of(request)
    if is_couchbase_path(request.scope["path"]):
        details = ErrorDetails(what, action, why, try_this)
        response = json_answer(CouchbaseProblem(details))
    else:
        response = raw_answer(problem(status, what, why, try_this, action), PROBLEM_TYPE)
    response.status_code = status.value
    # With WWW-Authenticate a browser asks for the password itself, in a dialog of its own.
    if not (status == HTTPStatus.UNAUTHORIZED and CONSOLE_HEADER in request.headers):
        response.headers.update(_HEADERS.get(status, {}))
    return response


def is_couchbase_path(path: str) -> bool:
    """Return whether clients of Couchbase read the answer, in the form that they know."""
    return path.startswith(COUCHBASE_PATHS)


_HEADERS: Final = {
    HTTPStatus.UNAUTHORIZED: {"www-authenticate": 'Basic realm="dcpd"'},
    HTTPStatus.SERVICE_UNAVAILABLE: {"retry-after": "1"},
}
"""Headers that HTTP requires in addition to the document."""


def denied(request: Request, why: str) -> AdminError:
    """Return the refusal."""
    return AdminError(
        HTTPStatus.FORBIDDEN,
        f"user {request.state.user!r} may not do this",
        why=why,
        try_this="ask an admin: dcpctl user show NAME lists the roles, dcpctl user grant adds one",
    )
