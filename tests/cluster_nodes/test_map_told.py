"""How clients of a cluster's node get newer maps: pushes on the wire, and /pools over HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from struct import pack, unpack
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from dcp.server.admin.routes import couchbase_routes
from dcp.server.admin.routes.couchbase_routes import BLOCK_END
from dcp.server.cluster import node_map
from dcp.server.cluster.node_map import MAP_S
from dcp.server.node import Node
from dcp.server.observe.elapsed import elapsed_ns
from dcp.session.state import CLUSTERMAP_CHANGED
from dcp.wire.feature import Feature
from dcp.wire.frame import Frame, Magic, pack_request
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from failover.coordinator.records import ClusterKeys, encode_record
from failover.metadata.metastore import Put, Txn
from support.cluster_here import Client, ClusterHere
from support.raw_client import GIVE_UP_S, RawHttp, login, request
from support.waiting import until_so

pytestmark = pytest.mark.asyncio(loop_scope="module")
Version = tuple[int, int]
ASKED_MAX = 20_000
"""Far more maps than the sockets' buffers hold."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def two(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ClusterHere]:
    """Two nodes with two copies. The tests change the cluster's record only."""
    async with ClusterHere(tmp_path_factory.mktemp("two"), partitions=1024) as cluster:
        await cluster.start("n1")
        await cluster.become_member("n1", copies=2)
        await cluster.start("n2")
        await cluster.become_member("n2")
        await cluster.until_all_in_sync(2)
        await at_rest(cluster)
        yield cluster


async def at_rest(cluster: ClusterHere) -> None:
    """Return when the nodes tell one map, and no newer one for longer than such a map may wait."""
    told: set[Version] = set()
    while len(told) != 1 or versions(cluster) != told:
        told = versions(cluster)
        await asyncio.sleep(1.5 * node_map.REPLICAS_S)


@pytest.fixture(autouse=True)
def quick_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tell maps in which no master has changed as soon as others: there are no others here."""
    monkeypatch.setattr(node_map, "REPLICAS_S", MAP_S)


def versions(cluster: ClusterHere) -> set[Version]:
    return {node._config.config_version() for node in cluster.nodes.values()}


async def newer_map(cluster: ClusterHere) -> Version:
    """Let the map change; return its version when both nodes tell it."""
    (before,) = versions(cluster)
    replicated = cluster.nodes["n1"].replicated
    assert replicated is not None
    stored = replicated.session.view.cluster
    assert stored is not None
    record = msgspec.structs.replace(
        stored.content, masters_return_s=stored.content.masters_return_s + 1
    )
    put = Put(ClusterKeys(cluster._root).cluster, encode_record(record))
    cluster.meta.store.apply(elapsed_ns(), Txn((), (put,)))
    cluster.meta.advance_soon()
    await until_so(lambda: len(versions(cluster) - {before}) == len(versions(cluster)) == 1)
    (after,) = versions(cluster)
    assert after > before
    return after


async def ready(client: Client, push: Feature) -> None:
    """Ask for pushes, and select the bucket."""
    features = pack(">3H", Feature.SELECT_BUCKET, Feature.DUPLEX, push)
    assert (await client.ask(pack_request(Opcode.HELLO, value=features))).value == features
    answer = await client.ask(pack_request(Opcode.SELECT_BUCKET, key=b"default"))
    assert answer.status == Status.OK


async def received(client: Client) -> Frame:
    frame = await client.receive()
    assert frame is not None, "the server has closed"
    return frame


async def test_a_brief_push_has_the_version_and_no_map(two: ClusterHere) -> None:
    async with Client.connect(two.nodes["n1"]) as client:
        await ready(client, Feature.CLUSTERMAP_CHANGE_NOTIFICATION_BRIEF)
        for _ in range(2):
            version = await newer_map(two)
            frame = await received(client)
            assert (frame.magic, frame.opcode) == (Magic.SERVER_REQUEST, CLUSTERMAP_CHANGED)
            assert unpack(">qq", frame.extras) == version
            assert (frame.key, frame.value, frame.datatype) == (b"default", b"", 0)
        # The client asks for the map itself then.
        answer = await client.ask(pack_request(Opcode.GET_CLUSTER_CONFIG))
        document = json.loads(answer.value)
        assert (document["revEpoch"], document["rev"]) == version


@pytest.mark.parametrize(
    "push",
    [Feature.CLUSTERMAP_CHANGE_NOTIFICATION, Feature.CLUSTERMAP_CHANGE_NOTIFICATION_BRIEF],
)
async def test_client_that_does_not_read_is_pushed_the_newest_map(
    two: ClusterHere, push: Feature
) -> None:
    """Maps that it could not take are left out: each would be sent to no use."""
    node = two.nodes["n1"]
    others = set(node.connections)
    async with Client.connect(node) as client:
        await ready(client, push)
        (connection,) = set(node.connections) - others
        asked = 0
        while not connection._is_write_paused:
            client.send(*(pack_request(Opcode.GET_CLUSTER_CONFIG, opaque=1) for _ in range(50)))
            asked += 50
            assert asked < ASKED_MAX, "the node does not stop to send"
            await asyncio.sleep(0)
        for _ in range(3):
            version = await newer_map(two)
        answers, pushes = 0, []
        while answers < asked or not pushes:
            frame = await received(client)
            if frame.magic == Magic.SERVER_REQUEST:
                pushes.append(unpack(">qq", frame.extras))
            else:
                assert (frame.opcode, frame.status) == (Opcode.GET_CLUSTER_CONFIG, Status.OK)
                answers += 1
        assert pushes == [version]
        assert (await client.ask(pack_request(Opcode.NOOP))).opcode == Opcode.NOOP, "no other push"


async def document(node: Node, path: str) -> Any:
    """Ask a node's admin port for a document."""
    async with await RawHttp.open(node.ports.admin) as http:
        await http.send(request("GET", path, login()))
        answer = await http.answer()
    assert answer.status == 200
    return answer.body


async def test_pools_of_any_node_have_all_nodes_and_the_same_map(two: ClusterHere) -> None:
    admin_ports = {node.ports.admin for node in two.nodes.values()}
    pools = [await document(node, "/pools") for node in two.nodes.values()]
    assert pools[0] == pools[1]
    assert pools[0]["uuid"], "that of the cluster"
    terse = [await document(node, "/pools/default/b/default") for node in two.nodes.values()]
    for each in terse:
        assert {entry["services"]["mgmt"] for entry in each["nodesExt"]} == admin_ports
        assert [entry.pop("thisNode", False) for entry in each["nodesExt"]].count(True) == 1
    assert terse[0] == terse[1]
    assert terse[0]["vBucketServerMap"]["numReplicas"] == 1
    for node in two.nodes.values():
        bucket = await document(node, "/pools/default/buckets/default")
        assert bucket["vBucketServerMap"] == terse[0]["vBucketServerMap"]
        assert {each["hostname"].rpartition(":")[2] for each in bucket["nodes"]} == {
            str(port) for port in admin_ports
        }
        assert len((await document(node, "/pools/default"))["nodes"]) == 2
        services = (await document(node, "/pools/default/nodeServices"))["nodesExt"]
        assert {entry["services"]["mgmt"] for entry in services} == admin_ports


@pytest.mark.parametrize("kind", ["bs", "bucketsStreaming"])
async def test_a_stream_of_maps_has_each_newer_one_on_any_node(
    two: ClusterHere, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(couchbase_routes, "KEEPALIVE_S", 3600.0)
    streams = [await RawHttp.open(node.ports.admin) for node in two.nodes.values()]
    for stream in streams:
        await stream.send(request("GET", f"/pools/default/{kind}/default", login()))
        await stream.reader.readuntil(b"\r\n\r\n")
    for number in range(2):
        expected = await newer_map(two) if number else next(iter(versions(two)))
        blocks = [await block(stream) for stream in streams]
        for each in blocks:
            assert (each["revEpoch"], each["rev"]) == expected
        assert blocks[0]["vBucketServerMap"] == blocks[1]["vBucketServerMap"]
    for stream in streams:
        stream.close()


async def block(stream: RawHttp) -> Any:
    """Return the next document of a stream: one chunk, in the form of HTTP."""
    async with asyncio.timeout(GIVE_UP_S):
        size = int(await stream.reader.readuntil(b"\r\n"), 16)
        chunk = await stream.reader.readexactly(size)
        await stream.reader.readexactly(len(b"\r\n"))
    assert chunk.endswith(BLOCK_END)
    return json.loads(chunk)
