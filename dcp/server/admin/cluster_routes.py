"""Routes about the cluster of the node (docs/clusters.md).

    POST /api/v1/cluster/init     make this node the first member of a new cluster
    POST /api/v1/cluster/join     make it one more member
    POST /api/v1/cluster/token    the token for new members
    GET  /api/v1/cluster/status   nodes, copies, what is wrong
    GET  /api/v1/cluster/map      the record of each partition
    GET  /api/v1/cluster/receipts loss receipts in the data folder of this node

The first two restart the node in its process: connections end, and it listens again at once.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from dcp.server.admin.answers import AdminError, RouteSpec, json_answer, read_body
from dcp.server.admin.bodies import NoMembers
from dcp.server.operate.cluster_reports import (
    ClusterReport,
    InitRequest,
    JoinAnswer,
    JoinRequest,
    PartitionReport,
    ReceiptsReport,
    TokenAnswer,
)

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from dcp.server.cluster.cluster_operations import ClusterOperations


_T = TypeVar("_T")


def routes(commands: Callable[[], ClusterOperations]) -> list[RouteSpec]:
    """Return the routes. `commands` is called for each request: a node alone has nothing of it
    in memory before.
    """

    async def init(request: Request) -> Response:
        body = await read_body(request, InitRequest)
        done = commands().init(
            copies=body.copies, min_in_sync=body.min_in_sync, meta=body.meta, name=body.name,
            rack=body.rack,
        )  # fmt: skip
        return json_answer(TokenAnswer(await _settled(done, "the cluster was not made")))

    async def join(request: Request) -> Response:
        body = await read_body(request, JoinRequest)
        done = commands().join(token=body.token, name=body.name, rack=body.rack)
        return json_answer(JoinAnswer(await _settled(done, "the node did not join")))

    async def token(request: Request) -> Response:
        await read_body(request, NoMembers)
        text = await _settled(_called(commands().token), "there is no token")
        return json_answer(TokenAnswer(text))

    async def status(_request: Request) -> Response:
        return json_answer(commands().status())

    async def map_(_request: Request) -> Response:
        return json_answer(await _settled(_called(commands().map), "there is no map"))

    async def receipts(_request: Request) -> Response:
        return json_answer(await commands().receipts())

    path = "/api/v1/cluster"
    return [
        RouteSpec(
            "POST", f"{path}/init", init, body=InitRequest, answer=TokenAnswer,
            summary="Make this node, with its data, the first member of a new cluster.",
        ),
        RouteSpec(
            "POST", f"{path}/join", join, body=JoinRequest, answer=JoinAnswer,
            summary="Make this node one more member of a cluster.",
        ),
        RouteSpec(
            "POST", f"{path}/token", token, body=NoMembers, answer=TokenAnswer,
            summary="Return the token for new members.",
        ),
        RouteSpec(
            "GET", f"{path}/status", status, answer=ClusterReport,
            summary="Return the nodes, their copies, and what is wrong.",
        ),
        RouteSpec(
            "GET", f"{path}/map", map_, answer=list[PartitionReport],
            summary="Return the record of each partition.",
        ),
        RouteSpec(
            "GET", f"{path}/receipts", receipts, answer=ReceiptsReport,
            summary="Return the loss receipts in the data folder of this node.",
        ),
    ]  # fmt: skip


async def _called(ask: Callable[[], _T]) -> _T:
    return ask()


async def _settled(done: Awaitable[_T], what: str) -> _T:
    """Return what a command returns, or answer why it is refused."""
    from dcp.server.cluster.cluster_refusal import ClusterRefusedError

    try:
        return await done
    except ClusterRefusedError as error:
        raise AdminError(
            error.status,
            what,
            why=error.why,
            try_this=error.try_this or "`dcpctl cluster status` says more",
        ) from error
