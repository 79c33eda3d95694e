"""Partitions, and what operators can do to them.

    POST /api/v1/vbuckets/{vb}/branch, failover, state, purge, mend-cas
    POST /api/v1/vbuckets/{vb}/explain-rollback
    POST /api/v1/vbuckets/branch     many partitions of this node

Each change is answered when it is durable. In a cluster, requests about a partition that another
node serves get 307 with its address there, after the login: `curl --location-trusted` follows.
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
    partitions_of,
    read_body,
    vb_of,
)
from dcp.server.admin.bodies import (
    SETTABLE_STATES,
    VERSIONS_MAX,
    BranchManyRequest,
    BranchRequest,
    ExplainRequest,
    FailoverRequest,
    NoMembers,
    PurgeRequest,
    SentOn,
    StateRequest,
)
from dcp.server.net.cluster_config import ClusterConfig
from dcp.server.operate.operations import Operations, WritesRefusedError
from dcp.server.operate.replicated_branches import BranchUnknownError
from dcp.server.operate.reports import (
    BranchManyReport,
    BranchReport,
    ExplainReport,
    MendReport,
    PurgeReport,
    StateReport,
)
from dcp.session.access.rights import Role
from failover.rules.history import VB_UUID_MAX
from failover.rules.rollback import Question
from vbucket.engine.lifecycle import HasCopiesError, PurgeRefusedError
from vbucket.engine.mending import MendingRefusedError
from vbucket.engine.partition import BranchRefusedError
from vbucket.model.ids import SEQNO_MAX
from vbucket.store.environment import StoreDamagedError

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from dcp.server.admin.answers import Handler

_PREFIX: Final = "/api/v1/vbuckets/{vb}"


def routes(operations: Operations) -> list[RouteSpec]:
    """Return the routes."""

    async def branch(request: Request) -> Response:
        vb_id = vb_of(request)
        body = await read_body(request, BranchRequest)
        at_seqno = _seqno(body.at, "at")
        change = operations.branch_or_zero if body.or_zero else operations.branch
        return await _done(
            change(vb_id, at_seqno), f"partition {vb_id} cannot branch at seqno {at_seqno}"
        )

    async def failover(request: Request) -> Response:
        vb_id = vb_of(request)
        lost = _seqno((await read_body(request, FailoverRequest)).lose or 0, "lose")
        return await _done(
            operations.failover(vb_id, lost), f"partition {vb_id} cannot lose {lost} changes"
        )

    async def state(request: Request) -> Response:
        vb_id = vb_of(request)
        name = (await read_body(request, StateRequest)).state
        wanted = SETTABLE_STATES.get(name)
        if wanted is None:
            raise invalid(f'"state" is one of {", ".join(SETTABLE_STATES)}, not {name!r}')
        return await _done(operations.set_state(vb_id, wanted), f"partition {vb_id} stays as it is")

    async def purge(request: Request) -> Response:
        vb_id = vb_of(request)
        upto = (await read_body(request, PurgeRequest)).upto
        upto_seqno = None if upto is None else _seqno(upto, "upto")
        return await _done(
            operations.purge(vb_id, upto_seqno),
            f"partition {vb_id} cannot be purged up to {'its end' if upto is None else upto}",
        )

    async def mend_cas(request: Request) -> Response:
        vb_id = vb_of(request)
        await read_body(request, NoMembers)
        return await _done(operations.mend_cas(vb_id), f"partition {vb_id} is not mended")

    return [
        RouteSpec(
            "POST", f"{_PREFIX}/branch", branch, body=BranchRequest, answer=BranchReport,
            summary="Undo every change above a seqno, and begin a new version.",
        ),
        RouteSpec(
            "POST", f"{_PREFIX}/failover", failover, body=FailoverRequest, answer=BranchReport,
            summary="Simulate a promotion: a new version begins, and streams end.",
        ),
        RouteSpec(
            "POST", f"{_PREFIX}/state", state, body=StateRequest, answer=StateReport,
            summary="Set the state of a partition.",
        ),
        RouteSpec(
            "POST", f"{_PREFIX}/purge", purge, body=PurgeRequest, answer=PurgeReport,
            summary="Purge deletions; the next compaction drops them.",
        ),
        RouteSpec(
            "POST", f"{_PREFIX}/mend-cas", mend_cas, body=NoMembers, answer=MendReport,
            summary="Bring a partition's CAS back to the clock, while writes continue.",
        ),
        _branch_many_route(operations),
        _explain_route(operations),
    ]  # fmt: skip


def _branch_many_route(operations: Operations) -> RouteSpec:
    async def branch_many(request: Request) -> Response:
        body = await read_body(request, BranchManyRequest)
        if (body.at is None) == (body.fraction is None):
            raise invalid('"at" or "fraction" says how much is undone, and not both')
        fraction = 0.0 if body.fraction is None else body.fraction
        if body.fraction is not None and not 0 < fraction <= 1:
            raise invalid('"fraction" is above 0, and 1 at most')
        count = partitions_of(request)
        if not all(0 <= vb_id < count for vb_id in body.vbs):
            raise invalid(f'"vbs" are partitions, 0 to {count - 1}')
        at_seqno = None if body.at is None else _seqno(body.at, "at")
        return await _done(
            operations.branch_many(body.vbs, at_seqno, fraction), "no partition was branched"
        )

    return RouteSpec(
        "POST", "/api/v1/vbuckets/branch", branch_many, body=BranchManyRequest,
        answer=BranchManyReport, summary="Branch many partitions that this node serves.",
    )  # fmt: skip


def _explain_route(operations: Operations) -> RouteSpec:
    async def explain(request: Request) -> Response:
        vb_id = vb_of(request)
        question = _question_of(await read_body(request, ExplainRequest))
        return json_answer(await operations.explain(vb_id, question))

    return RouteSpec(
        "POST", f"{_PREFIX}/explain-rollback", explain, role=Role.STREAM,
        body=ExplainRequest, answer=ExplainReport,
        summary="Say how a stream request would be answered, and why.",
    )  # fmt: skip


def at_the_master(routes: list[RouteSpec], config: ClusterConfig) -> list[RouteSpec]:
    """Return routes that send requests about another node's partition to that node."""
    return [
        route._replace(handler=_sent_on(route, config)) if "{vb}" in route.path else route
        for route in routes
    ]


def _sent_on(route: RouteSpec, config: ClusterConfig) -> Handler:
    async def handler(request: Request) -> Response:
        scheme = request.scope["scheme"]
        place = config.admin_elsewhere(vb_of(request), is_tls=scheme == "https")
        if not place:
            return await route.handler(request)
        query = request.scope["query_string"].decode("latin-1")
        target = f"{scheme}://{place}{request.scope['path']}{'?' if query else ''}{query}"
        answer = json_answer(SentOn(location=target), HTTPStatus.TEMPORARY_REDIRECT)
        answer.headers["location"] = target
        return answer

    return handler


async def _done(change: Awaitable[Any], what: str) -> Response:
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
    except BranchUnknownError as error:
        raise AdminError(
            HTTPStatus.GATEWAY_TIMEOUT, what, why=str(error), try_this="dcpctl failover-log VB"
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


def _seqno(number: int, name: str) -> int:
    if not 0 <= number <= SEQNO_MAX:
        raise invalid(f'"{name}" must be 0 or more, and fit into 64 bits')
    return number


def _uuid(value: str | int) -> int:
    vb_uuid = number_in(str(value), VB_UUID_MAX)
    if vb_uuid is None:
        raise invalid(f"a vb_uuid is a number from 0 to 2^64-1, not {value!r:.40}")
    return vb_uuid


def _question_of(body: ExplainRequest) -> Question:
    start = _seqno(body.seqno, "seqno")
    versions = body.versions or []
    if len(versions) > VERSIONS_MAX:
        raise invalid(f'"versions" must have {VERSIONS_MAX} items at most')
    return Question(
        start,
        _uuid(body.uuid),
        start if body.snap_start is None else _seqno(body.snap_start, "snap_start"),
        start if body.snap_end is None else _seqno(body.snap_end, "snap_end"),
        versions=tuple((_uuid(uuid), _seqno(seqno, "versions")) for uuid, seqno in versions),
        strict=bool(body.strict),
        ignore_purged=bool(body.ignore_purged),
        client_purge_seqno=_seqno(body.client_purge_seqno or 0, "client_purge_seqno"),
    )
