"""Partitions, and what operators can do to them.

    POST /api/v1/vbuckets/{vb}/branch             {"at": seqno, "or_zero": bool, optional}
    POST /api/v1/vbuckets/{vb}/failover           {"lose": count, optional}
    POST /api/v1/vbuckets/{vb}/state              {"state": "active|replica|pending|dead"}
    POST /api/v1/vbuckets/{vb}/purge              {"upto": seqno, optional}
    POST /api/v1/vbuckets/{vb}/mend-cas
    POST /api/v1/vbuckets/{vb}/explain-rollback   {"uuid", "seqno", ...}: see _QUESTION

Each answers when the change is durable.
"""

from __future__ import annotations

from collections.abc import Awaitable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

from dcp.server.admin.answers import (
    AdminError,
    RouteSpec,
    invalid,
    json_answer,
    number_in,
    read_object,
    vb_of,
)
from dcp.server.operate.operations import Operations, WritesRefusedError
from dcp.session.rights import Role
from failover.history import VB_UUID_MAX
from failover.rollback import Question
from vbucket.engine.branch import BranchRefusedError
from vbucket.engine.lifecycle import HasCopiesError, PurgeRefusedError
from vbucket.engine.mending import MendingRefusedError
from vbucket.engine.partition import VbState
from vbucket.model.ids import SEQNO_MAX
from vbucket.store.environment import StoreDamagedError

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

VERSIONS_MAX: Final = 1_000

_UUID: Final = (str, int)
"""The id of a version; also as text, because many JSON readers round numbers above 2^53."""
_QUESTION: Final = {
    "snap_start": int,
    "snap_end": int,
    "versions": list,
    "strict": bool,
    "ignore_purged": bool,
    "client_purge_seqno": int,
}
"""Optional members of a question. Without a snapshot, it is the start alone."""


def routes(operations: Operations) -> list[RouteSpec]:
    """Return the routes."""

    async def branch(request: Request) -> Response:
        vb_id = vb_of(request)
        body = await read_object(request, {"at": int}, {"or_zero": bool})
        at_seqno = _seqno(body["at"], "at")
        change = operations.branch_or_zero if body.get("or_zero") else operations.branch
        return await _done(
            change(vb_id, at_seqno), f"vbucket {vb_id} cannot branch at seqno {at_seqno}"
        )

    async def failover(request: Request) -> Response:
        vb_id = vb_of(request)
        lost = _seqno((await read_object(request, {}, {"lose": int})).get("lose", 0), "lose")
        return await _done(
            operations.failover(vb_id, lost), f"vbucket {vb_id} cannot lose {lost} changes"
        )

    async def state(request: Request) -> Response:
        vb_id = vb_of(request)
        name = (await read_object(request, {"state": str}))["state"]
        wanted = _STATES.get(name)
        if wanted is None:
            raise invalid(f'"state" is one of {", ".join(_STATES)}, not {name!r}')
        return await _done(operations.set_state(vb_id, wanted), f"vbucket {vb_id} stays as it is")

    async def purge(request: Request) -> Response:
        vb_id = vb_of(request)
        upto = (await read_object(request, {}, {"upto": int})).get("upto")
        upto_seqno = None if upto is None else _seqno(upto, "upto")
        return await _done(
            operations.purge(vb_id, upto_seqno),
            f"vbucket {vb_id} cannot be purged up to {'its end' if upto is None else upto}",
        )

    async def mend_cas(request: Request) -> Response:
        vb_id = vb_of(request)
        await read_object(request, {})
        return await _done(operations.mend_cas(vb_id), f"vbucket {vb_id} is not mended")

    async def explain(request: Request) -> Response:
        vb_id = vb_of(request)
        body = await read_object(request, {"uuid": _UUID, "seqno": int}, _QUESTION)
        return json_answer(await operations.explain(vb_id, _question_of(body)))

    prefix = "/api/v1/vbuckets/{vb}"
    return [
        RouteSpec("POST", f"{prefix}/branch", branch),
        RouteSpec("POST", f"{prefix}/failover", failover),
        RouteSpec("POST", f"{prefix}/state", state),
        RouteSpec("POST", f"{prefix}/purge", purge),
        RouteSpec("POST", f"{prefix}/mend-cas", mend_cas),
        RouteSpec("POST", f"{prefix}/explain-rollback", explain, role=Role.STREAM),
    ]


_STATES: Final = {state.name.lower(): state for state in VbState if state is not VbState.FENCED}
"""What an operator can set. A fence is the node's own."""


async def _done(change: Awaitable[dict[str, Any]], what: str) -> Response:
    """Answer with the report of a change, or with why it failed; `what` says what was wanted."""
    try:
        return json_answer(await change)
    except WritesRefusedError as error:
        raise AdminError(
            HTTPStatus.SERVICE_UNAVAILABLE,
            what,
            why=str(error),
            try_this="try again once there is room on the log's disk",
        ) from error
    except StoreDamagedError as error:
        raise AdminError(
            HTTPStatus.INTERNAL_SERVER_ERROR,
            what,
            why=f"the stored data is damaged: {error}",
            try_this="stop the server and run dcpctl verify on its folder for more",
        ) from error
    except MendingRefusedError as error:
        raise AdminError(
            HTTPStatus.CONFLICT, what, why=str(error), try_this="dcpctl vb state VB active"
        ) from error
    except HasCopiesError as error:
        raise AdminError(
            HTTPStatus.CONFLICT, what, why=str(error), try_this=error.instead
        ) from error
    except (BranchRefusedError, PurgeRefusedError) as error:
        raise AdminError(
            HTTPStatus.CONFLICT,
            what,
            why=str(error),
            try_this="dcpctl failover-log VB and dcpctl seqnos show the present state",
        ) from error


def _seqno(number: Any, name: str) -> int:
    if type(number) is not int or not 0 <= number <= SEQNO_MAX:
        raise invalid(f'"{name}" must be 0 or more, and fit into 64 bits')
    return number


def _uuid(value: Any) -> int:
    vb_uuid = number_in(str(value), VB_UUID_MAX)
    if vb_uuid is None:
        raise invalid(f"a vb_uuid is a number from 0 to 2^64-1, not {value!r:.40}")
    return vb_uuid


def _question_of(body: dict[str, Any]) -> Question:
    start = _seqno(body["seqno"], "seqno")
    versions = body.get("versions", [])
    if len(versions) > VERSIONS_MAX or not all(
        isinstance(item, list) and len(item) == 2 for item in versions
    ):
        raise invalid(f'"versions" must be a list of [vb_uuid, seqno], {VERSIONS_MAX} at most')
    return Question(
        start,
        _uuid(body["uuid"]),
        _seqno(body.get("snap_start", start), "snap_start"),
        _seqno(body.get("snap_end", start), "snap_end"),
        versions=tuple((_uuid(uuid), _seqno(seqno, "versions")) for uuid, seqno in versions),
        strict=body.get("strict", False),
        ignore_purged=body.get("ignore_purged", False),
        client_purge_seqno=_seqno(body.get("client_purge_seqno", 0), "client_purge_seqno"),
    )
