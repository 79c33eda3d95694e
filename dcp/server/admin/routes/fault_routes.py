"""Faults on demand (dcp.session.faults).

GET    /api/v1/faults          the rules, in the order in which they are tried
POST   /api/v1/faults          set one
DELETE /api/v1/faults          remove all
DELETE /api/v1/faults/{id}     remove one

A fault rule makes the server answer wrongly on purpose. On loopback that is for the tests of the
machine's own user. Elsewhere somebody has to say, with the setting test_mode, that this server is
for tests (`guarded`).
"""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

from dcp.server.admin.answers import (
    AdminError,
    RouteSpec,
    invalid,
    json_answer,
    number_in,
    partitions_of,
    read_body,
)
from dcp.server.admin.bodies import ClearedCount, FaultList, FaultRequest
from dcp.server.operate.operations import Operations
from dcp.server.operate.reports import FaultRow
from dcp.session.faults import FaultError
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from vbucket.model.ids import SEQNO_MAX

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

FAULT_ID_MAX: Final = 1 << 63


def routes(operations: Operations) -> list[RouteSpec]:
    """Return the routes."""

    async def listed(_request: Request) -> Response:
        return json_answer(FaultList(operations.faults()))

    async def add(request: Request) -> Response:
        body = await read_body(request, FaultRequest)
        if body.vb is not None and not 0 <= body.vb < partitions_of(request):
            raise invalid(f"there is no partition {body.vb}")
        rollback_seqno = body.rollback_seqno or 0
        if not 0 <= rollback_seqno <= SEQNO_MAX:
            raise invalid('"rollback_seqno" must fit into 64 bits')
        try:
            rule = operations.set_fault(
                opcode=_named(Opcode, body.opcode, "opcode"),
                vb_id=body.vb,
                status=_named(Status, body.status, "status"),
                delay_ms=body.delay_ms or 0,
                disconnects=bool(body.disconnect),
                count=body.count,
                probability=1 if body.probability is None else body.probability,
                seed=body.seed,
                rollback_seqno=rollback_seqno,
            )
        except FaultError as error:
            raise invalid(str(error)) from error
        return json_answer(rule, HTTPStatus.CREATED)

    async def clear(_request: Request) -> Response:
        return json_answer(ClearedCount(operations.clear_faults()))

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
        return json_answer(ClearedCount(1))

    return [
        RouteSpec(
            "GET", "/api/v1/faults", listed, answer=FaultList, summary="List active fault rules.",
        ),
        RouteSpec(
            "POST", "/api/v1/faults", add, body=FaultRequest, answer=FaultRow,
            status=HTTPStatus.CREATED, summary="Set a fault rule.",
        ),
        RouteSpec(
            "DELETE", "/api/v1/faults", clear, answer=ClearedCount, summary="Remove all rules.",
        ),
        RouteSpec(
            "DELETE", "/api/v1/faults/{id}", clear_one, answer=ClearedCount,
            summary="Remove one rule.",
        ),
    ]  # fmt: skip


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


def guarded(routes: list[RouteSpec], *, is_allowed: bool) -> list[RouteSpec]:
    """Return routes of which those that change something refuse, unless that is allowed."""
    if is_allowed:
        return routes
    return [route if route.method == "GET" else route._replace(handler=_refuse) for route in routes]


async def _refuse(_request: Request) -> Response:
    raise AdminError(
        HTTPStatus.FORBIDDEN,
        "this server takes no faults",
        why="other machines can reach it, and it is not in test mode",
        try_this="start it with --test-mode, or on loopback",
    )
