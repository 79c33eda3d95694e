"""A partition's documents as of a seqno.

    GET /api/v1/vbuckets/{vb}/documents     ?at=SEQNO, or what is committed now

The answer is JSON lines (`dcp.server.operate.partition_dump`). The headers dcpd-seqno and
dcpd-vb-uuid name the state. It needs the role read, for everything.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from dcp.server.admin.answers import AdminError, QueryField, RouteSpec, invalid, number_in, vb_of
from dcp.server.operate.partition_dump import Dumps
from dcp.session.access.rights import Role
from dcp.wire.opcode import Opcode
from vbucket.engine.read_view import ViewRefusedError
from vbucket.model.ids import SEQNO_MAX

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

LINES_TYPE: Final = "application/x-ndjson"


def routes(dumps: Dumps) -> list[RouteSpec]:
    """Return the routes."""

    async def documents(request: Request) -> Response:
        from starlette.responses import StreamingResponse

        vb_id = vb_of(request)
        at_seqno = _at(request)
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


def _at(request: Request) -> int | None:
    text = request.query_params.get("at")
    if text is None:
        return None
    at_seqno = number_in(text, SEQNO_MAX)
    if at_seqno is None:
        raise invalid(f'"at" must be a seqno, not {text[:30]!r}')
    return at_seqno
