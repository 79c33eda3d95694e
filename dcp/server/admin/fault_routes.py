"""Faults on demand (dcp.session.faults).

GET    /api/v1/faults          the rules, in the order in which they are tried
POST   /api/v1/faults          set one: see _RULE
DELETE /api/v1/faults          remove all
DELETE /api/v1/faults/{id}     remove one
"""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

from dcp.server.admin.answers import (
    AdminError,
    Kinds,
    RouteSpec,
    invalid,
    json_answer,
    number_in,
    read_object,
)
from dcp.server.operate.operations import Operations
from dcp.session.faults import FaultError
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from vbucket.model.ids import NUM_VBUCKETS

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

FAULT_ID_MAX: Final = 1 << 63
_RULE: Final[Kinds] = {
    "opcode": (str, int),
    "vb": int,
    "status": (str, int),
    "delay_ms": int,
    "disconnect": bool,
    "count": int,
    "probability": (float, int),
    "seed": int,
    "rollback_seqno": int,
}
"""Members of a rule, all optional; opcodes and statuses by name or number."""


def routes(operations: Operations) -> list[RouteSpec]:
    """Return the routes."""

    async def listed(_request: Request) -> Response:
        return json_answer({"faults": operations.faults()})

    async def add(request: Request) -> Response:
        body = await read_object(request, {}, _RULE)
        vb_id = body.get("vb")
        if vb_id is not None and not 0 <= vb_id < NUM_VBUCKETS:
            raise invalid(f"there is no vbucket {vb_id}")
        rollback_seqno = body.get("rollback_seqno", 0)
        if not 0 <= rollback_seqno < 2**64:
            raise invalid('"rollback_seqno" must fit into 64 bits')
        try:
            rule = operations.set_fault(
                opcode=_named(Opcode, body.get("opcode"), "opcode"),
                vb_id=vb_id,
                status=_named(Status, body.get("status"), "status"),
                delay_ms=body.get("delay_ms", 0),
                disconnects=body.get("disconnect", False),
                count=body.get("count"),
                probability=body.get("probability", 1),
                seed=body.get("seed"),
                rollback_seqno=rollback_seqno,
            )
        except FaultError as error:
            raise invalid(str(error)) from error
        return json_answer(rule, HTTPStatus.CREATED)

    async def clear(_request: Request) -> Response:
        return json_answer({"cleared": operations.clear_faults()})

    async def clear_one(request: Request) -> Response:
        text = request.path_params["id"]
        fault_id = number_in(text, FAULT_ID_MAX)
        if fault_id is None or not operations.clear_faults(fault_id):
            raise AdminError(
                HTTPStatus.NOT_FOUND,
                f"there is no fault {text[:30]}",
                why="it was never set, was cleared, or has reached its count",
                try_this="dcpctl fault list",
            )
        return json_answer({"cleared": 1})

    return [
        RouteSpec("GET", "/api/v1/faults", listed),
        RouteSpec("POST", "/api/v1/faults", add),
        RouteSpec("DELETE", "/api/v1/faults", clear),
        RouteSpec("DELETE", "/api/v1/faults/{id}", clear_one),
    ]


def _named(kind: Any, value: str | int | None, what: str) -> Any:
    """Return the member of an enumeration, by name or number (the number may be text)."""
    if value is None:
        return None
    text = str(value).strip()
    if text.upper() in kind.__members__:
        return kind[text.upper()]
    try:
        return kind(int(text, 0))
    except ValueError:
        raise invalid(
            f'"{what}" must be one of {", ".join(kind.__members__)}, or its number, not {value!r}'
        ) from None
