"""Documents for people (dcp.server.operate.document_desk). Programs use the key-value port.

    GET    /api/v1/documents            ?key= &collection= &key_encoding= &older_than= &versions=
                                        the versions of a key that are kept, newest first
    GET    /api/v1/documents/keys       ?prefix= &collection= &limit= &position=
    GET    /api/v1/documents/sorted     ?prefix= &collection= &limit= &position= &at=
                                        with the beginning of each value, sorted over all partitions
    PUT    /api/v1/documents            see `PutDocument`
    DELETE /api/v1/documents            see `DeleteDocument`

A collection is "scope.name"; without one it is the default. A key that is no text is given as
base64, with key_encoding=base64.

    GET    /api/v1/vbuckets/{vb}/documents    ?at=SEQNO, or what is committed now

This one is for programs: JSON lines (`dcp.server.operate.partition_dump`). The headers dcpd-seqno
and dcpd-vb-uuid name the state. It needs the role read, for everything.
"""

from __future__ import annotations

import binascii
from base64 import b64decode
from http import HTTPStatus
from typing import TYPE_CHECKING, Final, NoReturn

from dcp.server.admin.answers import (
    AdminError,
    QueryField,
    RouteSpec,
    denied,
    invalid,
    json_answer,
    number_in,
    read_body,
    unix_time,
    vb_of,
)
from dcp.server.admin.bodies import DeleteDocument, PutDocument
from dcp.server.operate.document_desk import (
    KEYS_AT_ONCE,
    VERSIONS_AT_ONCE,
    Changed,
    DocumentPage,
    DocumentRefusedError,
    Documents,
    History,
    KeyList,
)
from dcp.server.operate.partition_dump import Dumps
from dcp.server.operate.reports import ENCODINGS
from dcp.session.access.rights import Role
from dcp.wire.opcode import Opcode
from dcp.wire.status import ERROR_TABLE, Status
from vbucket.engine.read_view import ViewRefusedError
from vbucket.model.ids import SEQNO_MAX
from vbucket.store.environment import StoreDamagedError

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

LINES_TYPE: Final = "application/x-ndjson"
CAS_MAX: Final = 2**64 - 1
_COLLECTION: Final = QueryField(
    "collection", "scope.collection; without it the default collection."
)
_ENCODING: Final = QueryField("key_encoding", "base64 for bytes that are no text; else utf-8.")


def routes(documents: Documents) -> list[RouteSpec]:
    """Return the routes."""
    api = _Documents(documents)
    path = "/api/v1/documents"
    return [
        RouteSpec(
            "GET", path, api.history, role=Role.READ, answer=History,
            summary="Show the versions of a key that are kept, newest first.",
            query=(
                QueryField("key", "The key.", is_required=True), _COLLECTION, _ENCODING,
                QueryField("older_than", "Only versions below this seqno; 0: all.", "integer"),
                QueryField("versions", f"At most so many, up to {VERSIONS_AT_ONCE}.", "integer"),
            ),
        ),
        RouteSpec(
            "GET", f"{path}/keys", api.keys, role=Role.READ, answer=KeyList,
            summary="List the keys with a prefix, by partition.",
            query=(
                QueryField("prefix", "How the keys begin; without it all keys."),
                _COLLECTION, _ENCODING,
                QueryField("limit", f"At most so many, up to {KEYS_AT_ONCE}.", "integer"),
                QueryField("position", "`next` of the answer before."),
            ),
        ),
        RouteSpec(
            "GET", f"{path}/sorted", api.sorted, role=Role.READ, answer=DocumentPage,
            summary="List the documents with a prefix, sorted by key over all partitions, with the"
            " beginning of each value. For many keys, ask for them by partition.",
            query=(
                QueryField("prefix", "How the keys begin; without it all keys."),
                _COLLECTION, _ENCODING,
                QueryField("limit", f"At most so many, up to {KEYS_AT_ONCE}.", "integer"),
                QueryField("position", "`next` of the answer before."),
                QueryField("at", "As of this Unix time, as far as history is kept.", "number"),
            ),
        ),
        RouteSpec(
            "PUT", path, api.put, role=Role.WRITE, body=PutDocument, answer=Changed,
            summary="Store a document.",
        ),
        RouteSpec(
            "DELETE", path, api.remove, role=Role.WRITE, body=DeleteDocument, answer=Changed,
            summary="Delete a document.",
        ),
    ]  # fmt: skip


def dump_routes(dumps: Dumps) -> list[RouteSpec]:
    """Return the routes of a partition's documents as of a seqno."""

    async def documents(request: Request) -> Response:
        from starlette.responses import StreamingResponse

        vb_id = vb_of(request)
        at = request.query_params.get("at")
        at_seqno = None if at is None else _number(at, SEQNO_MAX, "at")
        denial = request.state.rights.denial(Opcode.GET, None, b"")
        if denial is not None:
            raise AdminError(
                HTTPStatus.FORBIDDEN,
                f"user {request.state.user!r} may not read every document",
                why=denial.why,
                try_this="use range scans over what the user may read",
            )
        try:
            view = await dumps.open(vb_id, at_seqno)
        except ViewRefusedError as error:
            raise AdminError(
                HTTPStatus.CONFLICT,
                f"partition {vb_id} cannot be dumped",
                why=str(error),
                try_this="dcpctl seqnos shows how far each partition is",
            ) from error
        headers = {"dcpd-seqno": str(view.seqno), "dcpd-vb-uuid": str(view.vb_uuid)}
        return StreamingResponse(dumps.lines(view), media_type=LINES_TYPE, headers=headers)

    return [
        RouteSpec(
            "GET", "/api/v1/vbuckets/{vb}/documents", documents, role=Role.READ, is_long=True,
            media_type=LINES_TYPE,
            summary="List a partition's documents as of a seqno, one JSON object in each line.",
            query=(QueryField("at", "The seqno; without it: what is committed now.", "integer"),),
        )
    ]  # fmt: skip


class _Documents:
    def __init__(self, documents: Documents) -> None:
        self._documents = documents

    async def history(self, request: Request) -> Response:
        """Answer the versions of a key."""
        query = request.query_params
        key = _decoded(query.get("key", ""), query.get("key_encoding"), "key")
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
        return json_answer(found)

    async def keys(self, request: Request) -> Response:
        """Answer the keys with a prefix."""
        query = request.query_params
        try:
            found = await self._documents.keys(
                _decoded(query.get("prefix", ""), query.get("key_encoding"), "prefix"),
                query.get("collection", ""),
                request.state.rights,
                position=query.get("position", ""),
                limit=_limit(query.get("limit"), KEYS_AT_ONCE, "limit"),
            )
        except (DocumentRefusedError, ViewRefusedError) as error:
            _refuse(request, "the keys cannot be listed", error)
        return json_answer(found)

    async def sorted(self, request: Request) -> Response:
        """Answer documents, sorted by key."""
        query = request.query_params
        try:
            found = await self._documents.sorted_documents(
                _decoded(query.get("prefix", ""), query.get("key_encoding"), "prefix"),
                query.get("collection", ""),
                request.state.rights,
                position=query.get("position", ""),
                limit=_limit(query.get("limit"), KEYS_AT_ONCE, "limit"),
                at_s=_moment(query.get("at")),
            )
        except (DocumentRefusedError, ViewRefusedError) as error:
            _refuse(request, "the documents cannot be listed", error)
        return json_answer(found)

    async def put(self, request: Request) -> Response:
        """Store a document."""
        body = await read_body(request, PutDocument)
        try:
            changed = await self._documents.put(
                request.state.user,
                request.state.rights,
                _decoded(body.key, body.key_encoding, "key"),
                body.collection or "",
                _decoded(body.value, body.value_encoding, "value"),
                cas=_number(body.cas or "0", CAS_MAX, "cas"),
                flags=body.flags or 0,
                expiry=body.expiry or 0,
                only_new=bool(body.only_new),
            )
        except DocumentRefusedError as error:
            _refuse(request, "the document was not stored", error)
        return json_answer(changed)

    async def remove(self, request: Request) -> Response:
        """Delete a document."""
        body = await read_body(request, DeleteDocument)
        try:
            changed = await self._documents.remove(
                request.state.user,
                request.state.rights,
                _decoded(body.key, body.key_encoding, "key"),
                body.collection or "",
                cas=_number(body.cas or "0", CAS_MAX, "cas"),
            )
        except DocumentRefusedError as error:
            _refuse(request, "the document was not deleted", error)
        return json_answer(changed)


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


def _decoded(text: str, encoding: str | None, name: str) -> bytes:
    """Return the bytes of a key or value; None: the encoding is utf-8."""
    encoding = "utf-8" if encoding is None else encoding
    if encoding not in ENCODINGS:
        raise invalid(f"an encoding is one of {', '.join(ENCODINGS)}, not {encoding[:30]!r}")
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


def _moment(text: str | None) -> float | None:
    """Return a Unix time; None: now."""
    if text is None:
        return None
    moment_s = unix_time(text)
    if moment_s is None:
        raise invalid(f'"at" is a Unix time, not {text[:30]!r}')
    return moment_s


def _limit(text: str | None, maximum: int, name: str) -> int:
    return maximum if text is None else max(1, _number(text, maximum, name))
