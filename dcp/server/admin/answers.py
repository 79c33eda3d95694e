"""Requests and responses: shared by all parts of the admin interface."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import parse_qs

from dcp.session.controls import is_decimal
from dcp.session.rights import Role
from vbucket.model.ids import NUM_VBUCKETS

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    Handler = Callable[[Request], Awaitable[Response]]

BODY_BYTES_MAX: Final = 64 * 1024
JSON_TYPE: Final = "application/json"
_SECRET_FIELDS: Final = frozenset({"password", "saslPassword", "token", "value"})
FORM_TYPE: Final = "application/x-www-form-urlencoded"

Kinds = Mapping[str, type | tuple[type, ...]]
"""Member -> its type or types."""


class RouteSpec(NamedTuple):
    """One kind of request."""

    method: str
    path: str
    handler: Handler
    needs_login: bool = True
    role: Role | None = None
    """The role it needs. None: admin for a change, any login for a GET."""
    is_long: bool = False
    """The answer may take very long."""


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
    """Return a response with a JSON document."""
    from starlette.responses import JSONResponse

    return JSONResponse(document, status_code=status)


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


def vb_of(request: Request) -> int:
    """Return the partition in the path."""
    text: str = request.path_params["vb"]
    vb_id = number_in(text, NUM_VBUCKETS - 1)
    if vb_id is None:
        raise AdminError(
            HTTPStatus.NOT_FOUND,
            f"there is no vbucket {text[:30]}",
            why=f"vbuckets are numbered 0 to {NUM_VBUCKETS - 1}",
            try_this="dcpctl seqnos lists them",
        )
    return vb_id


def number_in(text: str, maximum: int) -> int | None:
    """Return the number, 0 to `maximum`, of a decimal text; None if it is not one."""
    return number if is_decimal(text) and (number := int(text)) <= maximum else None


async def read_object(
    request: Request, required: Kinds, optional: Kinds | None = None
) -> dict[str, Any]:
    """Read a JSON object with these members. Optional ones may be missing or null."""
    optional = optional or {}
    body = _body_of(request, JSON_TYPE)
    try:
        document = json.loads(body or b"{}") if not required else json.loads(body)
        # Half a surrogate pair is valid JSON, but cannot be stored, logged or sent. NaN and
        # Infinity are not valid JSON, but `loads` accepts them.
        json.dumps(document, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise invalid(f"the body is not JSON: {error}") from error
    wanted = ", ".join(
        [f'"{name}" ({_names(kind)})' for name, kind in required.items()]
        + [f'"{name}" ({_names(kind)}, optional)' for name, kind in optional.items()]
    )
    known = {*required, *optional}
    if not isinstance(document, dict) or not {*required} <= set(document) <= known:
        raise invalid(f"the body must be an object with {wanted} and nothing else")
    found = {name: value for name, value in document.items() if value is not None}
    kinds = {**optional, **required}
    if not {*required} <= set(found) or not all(
        type(value) in _types(kinds[name]) for name, value in found.items()
    ):
        raise invalid(f"the body must have {wanted}")
    request.state.told = _without_secrets(found)
    return found


async def read_form(request: Request) -> dict[str, str]:
    """Read an HTML form. If a name comes twice, the first value counts."""
    body = _body_of(request, FORM_TYPE)
    try:
        fields = parse_qs(body.decode(), keep_blank_values=True, max_num_fields=32)
    except ValueError as error:
        raise invalid(f"the body is not a form: {error}") from error
    found = {name: values[0] for name, values in fields.items()}
    request.state.told = _without_secrets(found)
    return found


def _without_secrets(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that may be in the audit log."""
    return {name: value for name, value in fields.items() if name not in _SECRET_FIELDS}


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


def _types(kind: type | tuple[type, ...]) -> tuple[type, ...]:
    return kind if isinstance(kind, tuple) else (kind,)


def _names(kind: type | tuple[type, ...]) -> str:
    return " or ".join(one.__name__ for one in _types(kind))


# -- errors ----------------------------------------------------------------------------------------


def error_document(what: str, where: str, why: str, try_this: str) -> dict[str, Any]:
    """Return the document of a refusal."""
    return {"error": {"what": what, "where": where, "why": why, "try": try_this}}


def error_answer(
    request: Request, status: HTTPStatus, what: str, why: str, try_this: str
) -> Response:
    """Return a response with an error document."""
    response = json_answer(error_document(what, action_of(request), why, try_this), status)
    response.headers.update(_HEADERS.get(status, {}))
    return response


_HEADERS: Final = {
    HTTPStatus.UNAUTHORIZED: {"www-authenticate": 'Basic realm="dcpd"'},
    HTTPStatus.SERVICE_UNAVAILABLE: {"retry-after": "1"},
}
"""Headers that HTTP requires in addition to the document."""
