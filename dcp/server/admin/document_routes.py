"""Documents for people (dcp.server.operate.document_desk). Programs use the key-value port.

    GET    /api/v1/documents            ?key= &collection= &key_encoding= &older_than= &versions=
                                        the versions of a key that are kept, newest first
    GET    /api/v1/documents/keys       ?prefix= &collection= &limit= &position=
    PUT    /api/v1/documents            see `PutDocument`
    DELETE /api/v1/documents            see `DeleteDocument`

A collection is "scope.name"; without one it is the default. A key that is no text is given as
base64, with key_encoding=base64.
"""

from __future__ import annotations

import binascii
from base64 import b64decode
from http import HTTPStatus
from typing import TYPE_CHECKING, Final, Literal, NoReturn

import msgspec

from dcp.server.admin.answers import AdminError, RouteSpec, invalid, number_in, raw_answer
from dcp.server.admin.console_bodies import read_body
from dcp.server.admin.denials import denied
from dcp.server.operate.document_desk import (
    KEYS_AT_ONCE,
    VERSIONS_AT_ONCE,
    DocumentRefusedError,
    Documents,
)
from dcp.session.rights import Role
from dcp.wire.status import ERROR_TABLE, Status
from vbucket.engine.read_view import ViewRefusedError
from vbucket.model.ids import SEQNO_MAX
from vbucket.store.environment import StoreDamagedError

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

Encoding = Literal["utf-8", "base64"]
U32_MAX: Final = 2**32 - 1
CAS_MAX: Final = 2**64 - 1
_ENCODINGS: Final = ("utf-8", "base64")


class PutDocument(msgspec.Struct, forbid_unknown_fields=True):
    """The body of PUT."""

    key: str
    value: str
    collection: str = ""
    key_encoding: Encoding = "utf-8"
    value_encoding: Encoding = "utf-8"
    cas: str = "0"
    """The CAS that the document must have; "0": any."""
    only_new: bool = False
    """Refuse if there is a document."""
    flags: int = 0
    expiry: int = 0
    """Unix seconds, or up to 30 days from now; 0: never."""


class DeleteDocument(msgspec.Struct, forbid_unknown_fields=True):
    """The body of DELETE."""

    key: str
    collection: str = ""
    key_encoding: Encoding = "utf-8"
    cas: str = "0"
    """The CAS that the document must have; "0": any."""


def routes(documents: Documents) -> list[RouteSpec]:
    """Return the routes."""
    api = _Documents(documents)
    path = "/api/v1/documents"
    return [
        RouteSpec("GET", path, api.history, role=Role.READ),
        RouteSpec("GET", f"{path}/keys", api.keys, role=Role.READ),
        RouteSpec("PUT", path, api.put, role=Role.WRITE),
        RouteSpec("DELETE", path, api.remove, role=Role.WRITE),
    ]


class _Documents:
    def __init__(self, documents: Documents) -> None:
        self._documents = documents

    async def history(self, request: Request) -> Response:
        """Answer the versions of a key."""
        query = request.query_params
        key = _decoded(query.get("key", ""), query.get("key_encoding", "utf-8"), "key")
        try:
            found = await self._documents.history(
                key,
                query.get("collection", ""),
                request.state.rights,
                older_than=_number(query.get("older_than", "0"), SEQNO_MAX, "older_than"),
                versions_max=_limit(query.get("versions"), VERSIONS_AT_ONCE, "versions"),
            )
        except (DocumentRefusedError, StoreDamagedError) as error:
            _refuse(request, "the document cannot be shown", error)
        return raw_answer(msgspec.json.encode(found))

    async def keys(self, request: Request) -> Response:
        """Answer the keys with a prefix."""
        query = request.query_params
        encoding = query.get("key_encoding", "utf-8")
        try:
            found = await self._documents.keys(
                _decoded(query.get("prefix", ""), encoding, "prefix"),
                query.get("collection", ""),
                request.state.rights,
                position=query.get("position", ""),
                limit=_limit(query.get("limit"), KEYS_AT_ONCE, "limit"),
            )
        except (DocumentRefusedError, ViewRefusedError) as error:
            _refuse(request, "the keys cannot be listed", error)
        return raw_answer(msgspec.json.encode(found))

    async def put(self, request: Request) -> Response:
        """Store a document."""
        body = await read_body(request, PutDocument)
        if not (0 <= body.flags <= U32_MAX and 0 <= body.expiry <= U32_MAX):
            raise invalid('"flags" and "expiry" must fit into 32 bits')
        try:
            changed = await self._documents.put(
                request.state.user,
                request.state.rights,
                _decoded(body.key, body.key_encoding, "key"),
                body.collection,
                _decoded(body.value, body.value_encoding, "value"),
                cas=_number(body.cas, CAS_MAX, "cas"),
                flags=body.flags,
                expiry=body.expiry,
                only_new=body.only_new,
            )
        except DocumentRefusedError as error:
            _refuse(request, "the document was not stored", error)
        return raw_answer(msgspec.json.encode(changed))

    async def remove(self, request: Request) -> Response:
        """Delete a document."""
        body = await read_body(request, DeleteDocument)
        try:
            changed = await self._documents.remove(
                request.state.user,
                request.state.rights,
                _decoded(body.key, body.key_encoding, "key"),
                body.collection,
                cas=_number(body.cas, CAS_MAX, "cas"),
            )
        except DocumentRefusedError as error:
            _refuse(request, "the document was not deleted", error)
        return raw_answer(msgspec.json.encode(changed))


_ANSWERS: Final = {
    Status.KEY_ENOENT: (HTTPStatus.NOT_FOUND, "there is no such document", "look it up again"),
    Status.KEY_EEXISTS: (
        HTTPStatus.CONFLICT,
        "the document has changed, or exists already",
        "look it up again, then repeat the change if it is still right",
    ),
    Status.LOCKED: (HTTPStatus.CONFLICT, "a client has locked it", "a lock lasts 30 s at most"),
    Status.UNKNOWN_COLLECTION: (HTTPStatus.NOT_FOUND, "", "dcpctl collection list"),
    Status.E2BIG: (HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "", "see the setting value_bytes_max"),
    Status.EBUSY: (HTTPStatus.SERVICE_UNAVAILABLE, "", "try again in a moment"),
    Status.ETMPFAIL: (HTTPStatus.SERVICE_UNAVAILABLE, "", "try again in a moment"),
    Status.NOT_MY_VBUCKET: (
        HTTPStatus.CONFLICT, "the partition is not active on this node", "dcpctl vb state VB",
    ),
}  # fmt: skip
"""Status -> the status of HTTP, why ("": the error says it), and what to try."""


def _refuse(request: Request, what: str, error: Exception) -> NoReturn:
    """Raise the refusal of a request."""
    if isinstance(error, DocumentRefusedError):
        if error.status == Status.EACCESS:
            raise denied(request, str(error)) from error
        http_status, why, try_this = _ANSWERS.get(
            Status(error.status), (HTTPStatus.BAD_REQUEST, "", "send what is asked for")
        )
        why = why or str(error) or ERROR_TABLE[Status(error.status)][1]
        raise AdminError(http_status, what, why=why, try_this=try_this) from error
    if isinstance(error, ViewRefusedError):
        raise AdminError(
            HTTPStatus.SERVICE_UNAVAILABLE, what, why=str(error), try_this="try again in a moment"
        ) from error
    raise AdminError(
        HTTPStatus.INTERNAL_SERVER_ERROR,
        what,
        why=f"the stored data is damaged: {error}",
        try_this="stop the server and run dcpctl verify on its folder for more",
    ) from error


def _decoded(text: str, encoding: str, name: str) -> bytes:
    """Return the bytes of a key or value."""
    if encoding not in _ENCODINGS:
        raise invalid(f"an encoding is one of {', '.join(_ENCODINGS)}, not {encoding[:30]!r}")
    if encoding == "utf-8":
        return text.encode("utf-8", "surrogateescape")
    try:
        return b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise invalid(f'"{name}" is not base64: {error}') from error


def _number(text: str, maximum: int, name: str) -> int:
    number = number_in(text, maximum)
    if number is None:
        raise invalid(f'"{name}" must be a number from 0 to {maximum}, not {text[:30]!r}')
    return number


def _limit(text: str | None, maximum: int, name: str) -> int:
    return maximum if text is None else max(1, _number(text, maximum, name))
