"""Routes about the cluster of the node (docs/clusters.md).

    POST /api/v1/cluster/init     make this node the first member of a new cluster
    POST /api/v1/cluster/join     make it one more member
    POST /api/v1/cluster/token    the token for new members
    POST /api/v1/cluster/secrets  a step of this node to another secret of the cluster
    GET  /api/v1/cluster/status   nodes, copies, what is wrong
    GET  /api/v1/cluster/map      the record of each partition
    GET  /api/v1/cluster/partitions/{vb}   its copies, and who may become its master
    GET  /api/v1/cluster/page     status, map in a short form, events: for the web console
    GET  /api/v1/cluster/receipts loss receipts in the data folder of this node
    POST /api/v1/cluster/meta/testify, meta/restore   build the metadata store's records anew
    GET  /api/v1/cluster/meta/export   the newest records of the store that this node has seen
    POST /api/v1/cluster/cut, heal   end this node's link to another one, for tests
    POST /api/v1/cluster/set, rebalance, cancel, move, drain, undrain, remove, failover

With `dry_run` these, init and join only say what they would do. Init and join restart the node in
its process: connections end, and it listens again at once.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from dcp.server.admin.answers import AdminError, RouteSpec, json_answer, read_body, vb_of
from dcp.server.admin.bodies import NoMembers
from dcp.server.operate.cluster_reports import (
    ClusterPage,
    ClusterReport,
    ExplainedPartition,
    InitAnswer,
    InitRequest,
    JoinAnswer,
    JoinRequest,
    PartitionReport,
    ReceiptsReport,
    TokenAnswer,
)
from dcp.server.operate.cluster_requests import (
    ChangeReport,
    CutRequest,
    CutsReport,
    MasterFailoverRequest,
    MetaExport,
    MetaRestoreReport,
    MetaRestoreRequest,
    MoveRequest,
    NodeRequest,
    PlainRequest,
    SecretsReport,
    SecretsRequest,
    SetRequest,
    TestifiedReport,
    TestifyRequest,
)
from dcp.session.access.rights import Role

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from dcp.server.admin.answers import Handler
    from dcp.server.cluster.operators.cluster_operations import ClusterOperations


_T = TypeVar("_T")


def routes(commands: Callable[[], ClusterOperations]) -> list[RouteSpec]:
    """Return the routes. `commands` is called for each request: a node alone has nothing of it
    in memory before.
    """

    async def init(request: Request) -> Response:
        body = await read_body(request, InitRequest)
        return json_answer(await _settled(commands().init(body), "the cluster was not made"))

    async def join(request: Request) -> Response:
        body = await read_body(request, JoinRequest)
        return json_answer(await _settled(commands().join(body), "the node did not join"))

    async def token(request: Request) -> Response:
        await read_body(request, NoMembers)
        text = await _settled(_called(commands().token), "there is no token")
        return json_answer(TokenAnswer(text))

    async def secrets(request: Request) -> Response:
        body = await read_body(request, SecretsRequest)
        return json_answer(await _settled(commands().secrets(body), "the secrets stay as they are"))

    async def status(_request: Request) -> Response:
        return json_answer(commands().status())

    async def receipts(_request: Request) -> Response:
        return json_answer(await commands().receipts())

    async def page(_request: Request) -> Response:
        return json_answer(commands().page())

    path = "/api/v1/cluster"
    return [
        *_change_routes(commands, path),
        *_cut_routes(commands, path),
        *_meta_routes(commands, f"{path}/meta"),
        RouteSpec(
            "POST", f"{path}/init", init, body=InitRequest, answer=InitAnswer,
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
            "POST", f"{path}/secrets", secrets, body=SecretsRequest, answer=SecretsReport,
            summary="Return this node's secrets of the cluster, or take a step to another one.",
        ),
        RouteSpec(
            "GET", f"{path}/status", status, answer=ClusterReport,
            summary="Return the nodes, their copies, and what is wrong.",
        ),
        *_partition_routes(commands, path),
        RouteSpec(
            "GET", f"{path}/page", page, answer=ClusterPage,
            summary="Return what the web console shows of the cluster: the status with the figures"
            " of all nodes, the map in a short form, and what happened lately.",
        ),
        RouteSpec(
            "GET", f"{path}/receipts", receipts, answer=ReceiptsReport,
            summary="Return the loss receipts in the data folder of this node.",
        ),
    ]  # fmt: skip


def _partition_routes(commands: Callable[[], ClusterOperations], path: str) -> list[RouteSpec]:
    async def map_(_request: Request) -> Response:
        return json_answer(await _settled(_called(commands().map), "there is no map"))

    async def explain(request: Request) -> Response:
        vb_id = vb_of(request)
        told = _called(lambda: commands().explain(vb_id))
        return json_answer(await _settled(told, f"partition {vb_id} is not explained"))

    return [
        RouteSpec(
            "GET", f"{path}/map", map_, answer=list[PartitionReport],
            summary="Return the record of each partition.",
        ),
        RouteSpec(
            "GET", f"{path}/partitions/{{vb}}", explain, answer=ExplainedPartition,
            summary="Return a partition's copies, who may become its master and why, and what this"
            " node has of it.",
        ),
    ]  # fmt: skip


class _Verb(NamedTuple):
    """A request that is previewed, and then written."""

    name: str
    body: type[PlainRequest | SetRequest | MoveRequest | NodeRequest | MasterFailoverRequest]
    summary: str
    refusal: str


_CHANGES: Final = (
    _Verb("set", SetRequest, "Change the number of copies, or others.", "nothing was set"),
    _Verb("rebalance", PlainRequest, "Spread copies and masters evenly.", "nothing was moved"),
    _Verb("cancel", PlainRequest, "Stop the plan that is under way.", "nothing was cancelled"),
    _Verb("move", MoveRequest, "Make a node the master of a partition.", "nothing was moved"),
    _Verb("drain", NodeRequest, "Move everything away from a node.", "the node was not drained"),
    _Verb(
        "undrain", NodeRequest, "Let a drained node have copies again.", "the node stays drained"
    ),
    _Verb("remove", NodeRequest, "Take a node out of the cluster.", "the node was not removed"),
    _Verb(
        "failover", MasterFailoverRequest, "Give the partitions of a master to another copy.",
        "nothing was failed over",
    ),
)  # fmt: skip
"""Their names are those of methods of ClusterChanges, and of the last segment of the path."""


def _change_routes(commands: Callable[[], ClusterOperations], path: str) -> list[RouteSpec]:
    def handler(change: _Verb) -> Handler:
        async def ask(request: Request) -> Response:
            body = await read_body(request, change.body)

            async def done() -> ChangeReport:
                report: ChangeReport = await getattr(commands().changes, change.name)(body)
                return report

            return json_answer(await _settled(done(), change.refusal))

        return ask

    return [
        RouteSpec(
            "POST", f"{path}/{change.name}", handler(change), body=change.body, answer=ChangeReport,
            summary=change.summary,
        )
        for change in _CHANGES
    ]  # fmt: skip


def _meta_routes(commands: Callable[[], ClusterOperations], path: str) -> list[RouteSpec]:
    async def testify(request: Request) -> Response:
        body = await read_body(request, TestifyRequest)
        told = _asked(lambda: commands().meta.testify(body))
        return json_answer(await _settled(told, "this node did not testify"))

    async def restore(request: Request) -> Response:
        body = await read_body(request, MetaRestoreRequest)
        done = _asked(lambda: commands().meta.restore(body))
        return json_answer(await _settled(done, "the metadata store was not restored"))

    async def export(_request: Request) -> Response:
        async def found() -> MetaExport:
            return commands().meta.export()

        return json_answer(await _settled(found(), "there are no records"))

    return [
        RouteSpec(
            "POST", f"{path}/testify", testify, body=TestifyRequest, answer=TestifiedReport,
            summary="Write into the metadata store what this node has of its records.",
        ),
        RouteSpec(
            "POST", f"{path}/restore", restore, body=MetaRestoreRequest, answer=MetaRestoreReport,
            summary="Build the metadata store's records anew from what nodes have testified.",
        ),
        RouteSpec(
            "GET", f"{path}/export", export, role=Role.ADMIN, answer=MetaExport,
            summary="Return the newest records of the metadata store that this node has seen.",
        ),
    ]  # fmt: skip


def _cut_routes(commands: Callable[[], ClusterOperations], path: str) -> list[RouteSpec]:
    async def cut(request: Request) -> Response:
        body = await read_body(request, CutRequest)
        asked = _called(lambda: commands().cut(body))
        return json_answer(await _settled(asked, "nothing was cut"))

    async def heal(request: Request) -> Response:
        await read_body(request, NoMembers)
        return json_answer(await _settled(_called(commands().heal), "nothing was healed"))

    return [
        RouteSpec(
            "POST", f"{path}/cut", cut, body=CutRequest, answer=CutsReport,
            summary="End this node's replication from another node, in test mode: as its side of a"
            " cut network does.",
        ),
        RouteSpec(
            "POST", f"{path}/heal", heal, body=NoMembers, answer=CutsReport,
            summary="Let this node replicate from all others again.",
        ),
    ]  # fmt: skip


async def _asked(ask: Callable[[], Awaitable[_T]]) -> _T:
    return await ask()


async def _called(ask: Callable[[], _T]) -> _T:
    return ask()


async def _settled(done: Awaitable[_T], what: str) -> _T:
    """Return what a command returns, or answer why it is refused."""
    from dcp.server.cluster.cluster_file import ClusterRefusedError

    try:
        return await done
    except ClusterRefusedError as error:
        raise AdminError(error.status, what, why=error.why, try_this=error.try_this) from error
